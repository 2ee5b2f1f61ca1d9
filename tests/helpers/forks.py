"""The command ``silofl`` in a process that begins where all is imported: as a new one, two seconds of CPU sooner.

A server, itself a process that has done nothing but import, forks for each command, which gets the folder, environment,
standard input and output of its caller, and nothing else.

    python forks.py SOCKET WORDS...     asks the server at SOCKET, and ends as the command does
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import sys
sys.path[:0] = {paths!r}
import {imports}
import forks
forks.serve(sys.argv[1])
"""
EVERYTHING = (
    "client.export, server.deploy.submit, server.simulation.evaluate, server.simulation.workers, sklearn.compose, "
    "sklearn.datasets, sklearn.impute"
)
LIBRARIES = "torch, flwr.app, flwr.serverapp, matplotlib.figure, scipy.special, sklearn.datasets"  # of silofl: nothing


@contextlib.contextmanager
def server(folder: Path, imports: str = EVERYTHING) -> Iterator[Path]:
    """A server that has imported these, and the socket at which it listens."""
    path = folder / "forks"
    code = SERVER.format(imports=imports, paths=[str(ROOT), str(Path(__file__).parent)])
    environment = {"PATH": os.defpath, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        try:
            yield path
        finally:
            process.terminate()


def in_fork(run: Callable[[], object]) -> int:
    """Run it in a fork of this very process; 0, 1 after an error, less than 0 where a signal ended it."""
    return ended(fork(run))


def fork(run: Callable[[], object]) -> int:
    """Run it in a fork of this process, which does nothing else; the fork's id.

    What trains needs a process of its own: where this one has trained, PyTorch refuses it in a fork.
    """
    if not (child := os.fork()):
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """Wait for a fork's end; how :func:`in_fork` ends."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def serve(path: str) -> None:
    """Fork for each command, one after the other."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("listens", flush=True)
        while True:
            line, _ = listening.accept()
            with line:
                request, descriptors, _, _ = socket.recv_fds(line, 1 << 16, 3)
                if not (child := os.fork()):
                    become(json.loads(request), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                _, status = os.waitpid(child, 0)
                line.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def become(request: dict[str, object], descriptors: Sequence[int]) -> None:
    """Run the command in this process, to its end."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        # The old ones may believe to be files that can be rewound.
        sys.stdout = open(1, "w", -1, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", closefd=False)  # noqa: SIM115
        os.chdir(str(request["folder"]))
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["silofl", *request["words"]]  # type: ignore[misc]
        from server.cli.main import main

        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ask(
    path: str | Path,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    files: list[int],
) -> int:
    """Its exit code; ``files``: standard input, output, error."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        request = {
            "words": list(words),
            "folder": str(folder),
            "environment": dict(environment),
        }
        socket.send_fds(line, [json.dumps(request).encode()], files)
        return int(line.recv(16))


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:], Path.cwd(), os.environ, [0, 1, 2]))
