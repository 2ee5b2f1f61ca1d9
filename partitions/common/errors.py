"""Errors that a user causes and can mend: one clear line, exit code 2. Every other error is a fault of the program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class UserError(ValueError):
    """An unusable setting, command line or run directory; the text names it, the reason and the next step."""


class DataError(ValueError):
    """An unusable file, or message of another party; the text names it, the reason and the next step."""


class SeveralError(DataError):
    """Several problems of one file. ``lines``: a heading, and a line for each of ``problems``."""

    def __init__(self, heading: str, problems: Sequence[str]) -> None:
        numbered = [f"({i}) {text}" for i, text in enumerate(problems, 1)]
        super().__init__(f"{heading}: {'; '.join(numbered)}")
        self.problems = [*problems]
        self.lines = [f"{heading}:", *numbered]


class Problems:
    """Problems of one source, which one error lists."""

    def __init__(self, errors: Sequence[Exception] = ()) -> None:
        self.errors = list[Exception](errors)

    def __iter__(self) -> Iterator[str]:
        for error in self.errors:
            yield from getattr(error, "problems", [str(error)])

    def add(self, text: str) -> None:
        """Add a problem."""
        self.errors.append(DataError(text))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that keeps a user's error instead of raising it."""
        try:
            yield
        except (UserError, DataError) as error:
            self.errors.append(error)

    @contextmanager
    def complete(self, file: object) -> Iterator[None]:
        """Context of a step without which nothing else can be checked: its error is raised with all others."""
        with self.collect():
            yield
            return
        self.refuse(file)

    def refuse(self, file: object) -> None:
        """Raise the problem, or one DataError with all of them, if there are any."""
        texts = list(dict.fromkeys(self))  # a file that cannot be read is met twice
        if len(texts) == 1:
            raise self.errors[0]
        if texts:
            short = [text.removeprefix(f"{file}, ").removeprefix(f"{file}: ") for text in texts]
            heading = f"{file} has {len(texts)} problems"
            raise SeveralError(heading, short)


class RunFailedError(RuntimeError):
    """A run that cannot continue, without a fault of the program: too few silos, or no reply in time."""


class NoAnswerError(RunFailedError):
    """A server that does not answer; its run may go on."""
