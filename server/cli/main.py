"""The command ``silofl``: parse, dispatch, exit code. What a command does is in its own group's module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from client import cli as site
from server.cli import deploy, federation, research


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line; argparse would print the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(prog="silofl", description="Personalised federated learning for hospitals, on Flower.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    research.add_commands(commands)
    federation.add_commands(commands)
    deploy.add_commands(commands)
    site.add_commands(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 0: done; 2: a user's error, one clear line; 1: a run failed; 130: interrupted.

    With SILOFL_TRACEBACK=1 an error is raised instead, to be seen with its traceback.
    """
    given = parser().parse_args(arguments)
    from partitions.disk import private

    with private():
        return run(given)


def run(given: argparse.Namespace) -> int:
    """The command that was given, and its exit code."""
    try:
        code = int(given.run(given) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough, as in `silofl strategies | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        code, text = 130, "; ".join(["interrupted", *map(str, interrupt.args)])
    except Exception as error:
        if os.environ.get("SILOFL_TRACEBACK"):
            raise
        code, text = explain(error)
    print(f"silofl {given.command}: {' '.join(text.split())}", file=sys.stderr)
    return code


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and text. A ValueError or a file that cannot be used is the user's to mend, all else a failed run."""
    if isinstance(error, OSError):
        return 2, ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    if isinstance(error, ValueError):
        return 2, str(error)
    return 1, str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
