"""The command ``silofl``: parse, dispatch, exit code. The commands are in the modules of their groups."""

from __future__ import annotations

# ruff: noqa: E402  (the first lines run before anything else is imported)
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn


def interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt at Ctrl-C; during an import, end the process with one line and exit code 130.

    Partly loaded native libraries do not survive an exception: Python printed their tracebacks, or crashed.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def end_at_once() -> NoReturn:
    """End this process as interrupted, without Python's finalisation."""
    os.write(2, b"silofl: interrupted\n")
    os._exit(130)


IS_PROGRAM = __name__ == "__main__" or os.path.basename(sys.argv[0]) == "silofl"
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as with nohup
    signal.signal(signal.SIGINT, interrupted)

import argparse
from collections.abc import Sequence

from client import cli as site
from client import study_cli
from client.site.trust.methods import DEFAULTS
from server.cli import budget, deploy, federation, models, research, study, survey, tune, watch


class Version(argparse.Action):
    """Action that prints the version, which is looked up only when requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print("silofl", version("silofl"))
        parser.exit(0)


class Parser(argparse.ArgumentParser):
    """Parser that reports an invalid command line in one line, without argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        first = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        if (key := first.removeprefix("--")) != first and key in DEFAULTS:
            message += f": {key} is a setting of a run, write --set {key}=VALUE"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = Parser(prog="silofl", description="Personalised federated learning for hospitals, on Flower.")
    top.add_argument("--version", action=Version, nargs=0, help="print silofl's version")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    research.add_commands(commands)
    survey.add_commands(commands)
    models.add_commands(commands)
    federation.add_commands(commands)
    watch.add_commands(commands)
    tune.add_commands(commands)
    deploy.add_commands(commands)
    site.add_commands(commands)
    study.add_commands(commands)
    study_cli.add_commands(commands)
    budget.add_commands(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code. 0: done; 2: a user's error; 1: a run failed; 130: interrupted.

    Each error prints one line. With SILOFL_TRACEBACK=1 it is raised instead, with its traceback.
    """
    command = ""
    try:
        args = parser().parse_args(arguments)
        command = f" {args.command}"
        from partitions.common.files import private

        with private():
            code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as in `silofl strategies | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        code, text = 130, "; ".join(["interrupted", *map(str, interrupt.args)])
    except Exception as error:
        if os.environ.get("SILOFL_TRACEBACK"):
            raise
        from client.faults import explain

        code, text = explain(error)
    from partitions.common.names import escaped

    print(f"silofl{command}: {escaped(' '.join(text.split()))}", file=sys.stderr)
    if IS_PROGRAM and arguments is None and code == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt Python's finalisation
    return code


if __name__ == "__main__":
    sys.exit(main())
