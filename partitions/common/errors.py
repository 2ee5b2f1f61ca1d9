"""Errors that a user causes and can mend: one clear line, exit code 2. Every other error is a fault of the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An unusable setting, command line or run directory; the text names it, the reason and the next step."""


class DataError(ValueError):
    """An unusable file, or message of another party; the text names it, the reason and the next step."""


class Problems:
    """Problems of one file, which one error lists."""

    def __init__(self) -> None:
        self.found: list[ValueError] = []

    def __iter__(self) -> Iterator[str]:
        return map(str, self.found)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that keeps a user's error instead of raising it."""
        try:
            yield
        except (UserError, DataError) as error:
            self.found.append(error)

    def refuse(self, file: object) -> None:
        """Raise the problem, or one DataError with all of them, if there are any."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            texts = (text.removeprefix(f"{file}, ").removeprefix(f"{file}: ") for text in self)
            listed = "; ".join(f"({i}) {text}" for i, text in enumerate(texts, 1))
            raise DataError(f"{file} has {len(self.found)} problems: {listed}")


class RunFailedError(RuntimeError):
    """A run that cannot continue, without a fault of the program: too few silos, or no reply in time."""
