"""The command ``silofl``: parse, dispatch, exit code. The commands are in the modules of their groups."""

from __future__ import annotations

# ruff: noqa: E402  (the first lines run before anything else is imported)
import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType
from typing import Any, NoReturn


def on_interrupt(number: int, frame: FrameType | None) -> None:
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


ROOT = os.path.realpath(f"{__file__}/../../..")
IS_PROGRAM = __name__ == "__main__" or os.path.basename(sys.argv[0]) in ("silofl", "silofl.py")
# Else it is ignored, as with nohup
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, on_interrupt)

for name in ("client", "models", "partitions", "strategies"):
    origin = str(getattr(find_spec(name), "origin", None))
    if os.path.dirname(os.path.dirname(os.path.realpath(origin))) != ROOT:
        print(
            f"silofl: {origin} hides silofl's own {name}: give your module another name",
            file=sys.stderr,
        )
        sys.exit(2)

import argparse
from collections.abc import Sequence
from itertools import product

from client import cli as site
from client.commands import data
from client.commands import study as hospital_studies
from client.commands.table import Command, Parser, add_command, option
from client.protocol.methods import DEFAULTS
from server.cli import (
    backup,
    deploy,
    federation,
    models,
    operators,
    plan,
    relay,
    research,
    study,
    survey,
    tune,
)

SHELLS = ("bash", "zsh", "fish")
WRITTEN = ("out", "masks", "export", "plot")  # options that name a file to write

GROUPS: dict[str, tuple[Command, ...]] = {
    "research, on one machine": (
        *research.COMMANDS,
        *survey.COMMANDS,
        *plan.COMMANDS,
        *tune.COMMANDS,
        Command(
            "completion",
            "print the completion of this command line for a shell",
            lambda args: print(completion(args.shell)),
            (option("shell", "SHELL", "the shell", choices=SHELLS),),
            ("silofl completion bash > ~/.local/share/bash-completion/completions/silofl",),
        ),
    ),
    "the consortium": (
        *federation.COMMANDS,
        *study.COMMANDS,
        *deploy.COMMANDS,
        *relay.COMMANDS,
        *backup.COMMANDS,
        *operators.COMMANDS,
    ),
    "the hospital": (
        *data.COMMANDS,
        *site.COMMANDS,
        *hospital_studies.COMMANDS,
        *models.COMMANDS,
    ),
}
COMMANDS = [command for group in GROUPS.values() for command in group]


class Version(argparse.Action):
    """Action that prints the version, which is looked up only when requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print("silofl", version("silofl"))
        parser.exit(0)


class TopParser(Parser):
    """Parser of ``silofl`` itself: its help lists the commands by the people who use them."""

    def format_help(self) -> str:
        from shutil import get_terminal_size
        from textwrap import fill

        width, indent = max(get_terminal_size().columns - 2, 40), " " * 16
        lines = ["usage: silofl COMMAND [OPTION ...]", "", str(self.description)]
        for group, commands in GROUPS.items():
            lines += ["", f"{group}:"]
            lines += [
                fill(f"  {command.name:13} {command.help}", width, subsequent_indent=indent)
                for command in commands
            ]
        return "\n".join(
            [*lines, "", "silofl COMMAND --help: its options and examples; silofl --version\n"]
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = TopParser(
        prog="silofl", description="Personalised federated learning for hospitals, on Flower."
    )
    top.settings = DEFAULTS
    top.add_argument("--version", action=Version, nargs=0, help="print silofl's version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        add_command(commands, command, DEFAULTS)
    return top


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; without a command, print the help and exit with 0."""
    top, words = parser(), list(sys.argv[1:] if arguments is None else arguments)
    known = [command.name for command in COMMANDS]
    if not words:
        top.print_help()
        top.exit(0)
    if not words[0].startswith("-") and words[0] not in known:
        from partitions.common.names import nearest

        top.error(f"there is no command {words[0][:80]!r}{nearest(words[0], known)}")
    args = top.parse_args(words)
    paths = [
        (key, os.fspath(value))
        for key, value in vars(args).items()
        if isinstance(value, str | os.PathLike)
    ]
    for (written, out), (key, path) in product(paths, paths):
        if written in WRITTEN and key != written and is_same_file(out, path, key in WRITTEN):
            top.error(
                f"--{written} {out} is what {key} names, and would replace it: give it another name"
            )
    return args


def is_same_file(out: str, path: str, missing: bool) -> bool:
    """Return whether two paths are one file; ``missing``: also where there is none yet."""
    if os.path.isfile(out) and os.path.isfile(path):
        return os.path.samefile(out, path)
    return missing and bool(out) and os.path.realpath(out) == os.path.realpath(path)


def completion(shell: str) -> str:
    """Return the script that completes commands and options, and paths where an option takes one."""
    import shtab

    return str(shtab.complete(parser(), shell=shell))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code. 0: done; 2: a user's error; 1: a run failed; 130: interrupted.

    Each error prints one line. With SILOFL_TRACEBACK=1 it is raised instead, with its traceback.
    """
    command, lines = "", list[str]()
    from partitions.common.output import check_output, open_streams

    if IS_PROGRAM and arguments is None:
        open_streams()
    try:
        args = parse(arguments)
        command = f" {args.command}"
        from partitions.common.files import private

        with private():
            code = int(args.run(args) or 0)
        check_output()
        return code
    except KeyboardInterrupt as interrupt:
        code, text = 130, "; ".join(["interrupted", *map(str, interrupt.args)])
    except Exception as error:
        if os.environ.get("SILOFL_TRACEBACK"):
            raise
        from client.faults import explain

        code, text = explain(error)
        lines = getattr(error, "lines", [])
    from partitions.common.names import escape

    for line in lines or [text]:
        print(f"silofl{command}: {escape(' '.join(line.split()))}", file=sys.stderr)
    if IS_PROGRAM and arguments is None and code == 130:
        # A second Ctrl-C must not interrupt Python's finalisation
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
