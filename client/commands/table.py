"""The command line as a table: a command is one value with its options and its examples.

``argparse`` parses it. typer, which Flower uses, has no option with several values (``--set a=1 b=2``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# shtab.FILE, without importing it
PATHS = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "fish": "(__fish_complete_path (commandline -ct))",
}


class Option(NamedTuple):
    """One option or positional argument, as ``add_argument`` takes it."""

    name: str
    values: dict[str, Any]


class OneOf(NamedTuple):
    """Options of which a command line has at most one."""

    options: Sequence[Option]
    required: bool = False


class Titled(NamedTuple):
    """Options below a heading of their own in ``--help``."""

    title: str
    options: Sequence[Option | OneOf]


class Command(NamedTuple):
    """One command. ``actions``: its subcommands, in place of options."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int | None] | None = None
    options: Sequence[Option | OneOf | Titled] = ()
    examples: Sequence[str] = ()
    description: str = ""
    actions: Sequence[Command] = ()


def option(name: str, metavar: str, help: str, **values: Any) -> Option:
    """Return an option with a value; the help gets the default, where there is one to see."""
    default = values.get("default")
    if default not in (None, "", []) and "default" not in help:
        help = f"{help} (default: {default})"
    return Option(name, {"metavar": metavar, "help": help.replace("%", "%%"), **values})


def text_option(name: str, metavar: str, help: str, **values: Any) -> Option:
    """An option with one value, which is empty where it is not set."""
    return option(name, metavar, help, default="", **values)


def file_option(name: str, metavar: str, help: str, **values: Any) -> Option:
    """Return an option whose value is a path."""
    return option(name, metavar, help, type=Path, **values)


def flag(name: str, help: str) -> Option:
    """Return an option without a value."""
    return Option(name, {"action": "store_true", "help": help})


def choice(name: str, choices: Sequence[str], help: str, default: str) -> Option:
    """Return an option with a value from a list."""
    shown = f" (default: {default})" if default and "default" not in help else ""
    return Option(name, {"choices": choices, "default": default, "help": help + shown})


def several(name: str, metavar: str, help: str, **values: Any) -> Option:
    """Return an option that may be repeated, with a value each time."""
    return Option(
        name, {"metavar": metavar, "help": help, "action": "append", "default": [], **values}
    )


def pairs(name: str, metavar: str, help: str) -> Option:
    """Return an option with one or more values, which may be repeated, too."""
    return Option(
        name,
        {"metavar": metavar, "help": help, "nargs": "+", "action": "extend", "default": []},
    )


class Parser(argparse.ArgumentParser):
    """Parser that reports an invalid command line in one line, and prints a command's examples with its help.

    ``settings``: names of run settings, which are written behind ``--set``.
    """

    examples: Sequence[str] = ()
    settings: Iterable[str] = ()

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse what this parser does not know here, where the command is known: argparse does it at the top."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}{self.remedy(unknown[0].partition('=')[0])}"
            )
        return known, unknown

    def remedy(self, option: str) -> str:
        """Return what may have been meant by an option that does not exist."""
        from partitions.common.names import nearest

        if (key := option.removeprefix("--")) != option and key in self.settings:
            return f": {key} is a setting of a run, write --set {key}=VALUE"
        known = [
            name.removeprefix("--")
            for name in self._option_string_actions
            if name.startswith("--")
        ]
        return nearest(key, known).replace("'", "'--", 1)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def format_help(self) -> str:
        lines = [f"  $ {example}" for example in self.examples]
        return super().format_help() + ("\n".join(["\nexamples:", *lines, ""]) if lines else "")


def add_command(commands: Any, command: Command, settings: Iterable[str] = ()) -> None:
    """Add a command, with its subcommands, to a parser's subparsers."""
    parser: Parser = commands.add_parser(
        command.name, help=command.help, description=command.description or None
    )
    parser.examples = command.examples
    parser.settings = settings
    if command.actions:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for action in command.actions:
            add_command(actions, action, settings)
        return
    parser.set_defaults(run=command.run)
    for option in command.options:
        add_option(parser, option)


def add_option(parser: Any, option: Option | OneOf | Titled) -> None:
    """Add an option, or a group of them, to a parser."""
    if isinstance(option, Option):
        action = parser.add_argument(option.name, **option.values)
        if option.values.get("type") is Path:
            action.complete = PATHS
        return
    group = (
        parser.add_argument_group(option.title)
        if isinstance(option, Titled)
        else parser.add_mutually_exclusive_group(required=option.required)
    )
    for inner in option.options:
        add_option(group, inner)
