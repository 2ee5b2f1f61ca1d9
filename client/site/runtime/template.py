"""The template process: imports what a silo's app needs, then forks a process for each run's app; it runs none itself.

    SuperNode (supernode.py)  ~~socket~~  template process
        ~~the same socket~~                   `- app's process (app_process.py), one per run

A process that Flower starts for an app takes 3 s for its imports. Here they are done once. A SuperNode connects to the
template's socket, and the connection becomes that of the forked process. The template keeps a copy only to send how
that process ended. If the template ends, the apps' processes go on; the SuperNode starts another one when it needs it.
Silos of one machine may share a template.

Python takes an app's module from `sys.modules` first. A template that had imported the package `client` would run the
installed code instead of the app's. Therefore `client/protocol/private.py` loads the folder `client` as the package
`silofl_site`, a name that no app has. Code that runs here imports its neighbours relatively, and otherwise only the
standard library and third-party packages. Before the fork nothing is computed and CUDA is not used.

Linux only; elsewhere use Flower's own SuperNode.
"""

import argparse
import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ...flower.apps import PRELOADED
from ...protocol.launch import die_with_parent, lock_path
from .app_process import DIED, check_peer, run_app_process

# Third-party modules that a silo's ClientApp imports; one that is not installed is skipped.
PRELOAD = (
    *PRELOADED,
    "numpy",
    "numpy.random",  # numpy imports it at its first use: otherwise for each run
    "pydantic.types",
    "safetensors.torch",
    "statistics",
    "tomli_w",
    "torch",
    "torch.func",
    "tqdm",
    "yaml",
)


def main() -> None:
    """Run the template process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", type=Path)
    parser.add_argument(
        "--parent", type=int, help="end with the process of this number, which started this one"
    )
    parser.add_argument(
        "--import", dest="modules", action="append", help="a module to import ahead (repeat)"
    )
    arguments = parser.parse_args()
    if arguments.parent:
        die_with_parent()
        if os.getppid() != arguments.parent:
            return
    serve_template(arguments.socket.absolute(), arguments.modules or PRELOAD)


def serve_template(path: Path, modules: Sequence[str]) -> None:
    """Import `modules`, then fork a process for every connection; ends at SIGTERM or SIGINT.

    One template process per socket: if another one holds the lock, this one exits with code 0.
    """
    lock = take_lock(path)
    if lock is None:
        log("another template process serves this socket")
        return
    listener = listen(path)
    started = time.monotonic()
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children share these objects: their garbage collector must not touch the pages
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_template)
    log(f"ready in {time.monotonic() - started:.1f} s")
    # By pidfd: process number and connection
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([listener.fileno(), *running], [], [])[0]:
            if ready in running:
                report_end(ready, *running.pop(ready))
                continue
            connection, _ = listener.accept()
            pid = fork()
            if pid == 0:
                for other in (listener, *(socket for _, socket in running.values())):
                    other.close()
                for descriptor in (lock, *running):
                    os.close(descriptor)
                run_app_process(connection)
            elif pid is None:
                connection.close()
            else:
                running[os.pidfd_open(pid)] = pid, connection


def report_end(pidfd: int, pid: int, connection: socket.socket) -> None:
    """Send the SuperNode how its app's process ended: the exit code, or minus the number of a signal."""
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    with connection, contextlib.suppress(OSError):
        connection.sendall(DIED + str(os.waitstatus_to_exitcode(status)).encode())


def take_lock(path: Path) -> int | None:
    """Return the socket's lock, held by this process from now on; None if another process holds it."""
    lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(10):  # `template_pid` may hold it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            return lock
        time.sleep(0.05)
    os.close(lock)
    return None


def fork() -> int | None:
    """Fork; return None without memory or processes for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.fork()
    except OSError as error:
        log(f"cannot fork: {error}")
        return None


def end_template(number: int, _: object) -> NoReturn:
    """End the template process; the apps' processes go on."""
    os._exit(0)


def log(text: str) -> None:
    """Write one line to the template process's log."""
    print(
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} template process {os.getpid()}: {text}",
        file=sys.stderr,
        flush=True,
    )


# --- its socket -------------------------------------------------------------------------------------------


def listen(path: Path) -> socket.socket:
    """Return the socket for SuperNodes, accessible to this user only."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with short_address(path) as short:
        mask = os.umask(0o177)
        listener.bind(short)
        os.umask(mask)
    listener.listen(1024)  # who connects during the imports waits in the backlog
    return listener


def connect_to(path: Path) -> socket.socket:
    """Return a connection to the template process at a socket. Raises OSError if there is none of this user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_address(path) as short:
            connection.connect(short)
        check_peer(connection)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Yield a short path to a socket by its folder's descriptor: an address has at most 107 bytes, a path more."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
