"""Standard output and error of a command: a reader that closes them, or an encoding, does not stop its work."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from partitions.common.errors import UserError
from partitions.common.names import escape


class Output(io.TextIOWrapper):
    """A standard stream that drops its text from the first fault on; ``fault``: that one.

    Characters that its encoding lacks are written as ``\\xfc``.
    """

    fault: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.drop(error)

    def drop(self, error: OSError) -> None:
        """Write nothing more, nor do the processes that inherit the stream from here on."""
        self.fault = self.fault or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def open_streams() -> None:
    """Replace standard output and error of this process; a closed one is open from here on, and drops its text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Else the first file to be written would get its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if number:
            old = getattr(sys, name) or open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            buffered, through = old.line_buffering, old.write_through
            form = {"encoding": old.encoding, "errors": "backslashreplace"}
            stream = Output(
                old.detach(), **form, line_buffering=buffered, write_through=through
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def output_fault() -> OSError | None:
    """Return why standard output is written no more; None while it is."""
    return getattr(sys.stdout, "fault", None)


def check_output() -> None:
    """Write what is left. Raises OSError for output that was not written, unless its reader has closed it."""
    sys.stdout.flush()
    if (fault := output_fault()) and not isinstance(fault, BrokenPipeError):
        raise OSError(fault.errno, fault.strerror, "standard output")


def print_document(text: str) -> None:
    """Print a text that is to be read again. Raises UserError where the output's encoding lacks a character of it."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        raise UserError(
            f"standard output is {encoding}, which has no {text[error.start]!r}: set PYTHONIOENCODING=utf-8"
        ) from None
    print(text, end="")


def columns(lines: Iterable[Sequence[str]]) -> list[str]:
    """Return the rows as text in columns: the first aligned left, the others right."""
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrap(text: str, first: str, rest: str = "", width: int = 110) -> list[str]:
    """Return a text in lines: ``first`` stands before it, ``rest``, or as many spaces, before the other lines."""
    rest = rest or " " * len(first)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False
    )


class Escaped(str):
    """Lines whose texts are escaped."""


NO_LINE = "\0"  # of a page's template: an empty text leaves no empty line


def text_page(template: str, **values: object) -> str:
    """Return a template's text. What is not printable in a value is escaped, so it cannot begin a line or control
    the terminal. Filters: ``wrap`` (:func:`wrap`), without a line for an empty text; ``json``.
    """
    from jinja2 import Environment, StrictUndefined

    def wrapped(text: str, *form: Any) -> Escaped:
        return Escaped("\n".join(map(escape, wrap(text, *form))) or NO_LINE)

    def printable(value: Any) -> Any:
        return escape(value) if type(value) is str else value

    pages = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=printable
    )
    pages.filters |= {"wrap": wrapped, "json": json.dumps}
    return pages.from_string(template).render(values).replace(f"{NO_LINE}\n", "")
