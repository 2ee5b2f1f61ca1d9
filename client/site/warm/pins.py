"""Which apps a site runs: the SHA-256 sums of `SILOFL_ALLOWED_APPS`, a file of them or a list."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path


class AppRefusedError(Exception):
    """The app's SHA-256 is not among those this site allows."""


def check_pin(digest: str) -> None:
    """Raise AppRefusedError unless SHA-256 `digest` is allowed at this site (`SILOFL_ALLOWED_APPS`)."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    if not pins:
        return
    try:
        allowed = set(read_pins(pins))
    except OSError as error:
        raise refused(f"app {digest} refused: cannot read the allowed apps: {error}") from None
    if digest not in allowed:
        where = "SILOFL_ALLOWED_APPS" if is_sums(pins) else pins
        raise refused(f"app {digest} refused: its SHA-256 is not among the {len(allowed)} listed in {where}")


def refused(line: str) -> AppRefusedError:
    """The error, after its one line is in the silo's log."""
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return AppRefusedError(line)


def is_sums(pins: str) -> bool:
    """Whether a value of `SILOFL_ALLOWED_APPS` is a list of sums, and not a file's name."""
    return all(len(part) == 64 and not set(part) - set("0123456789abcdef") for part in split(pins))


def split(text: str) -> list[str]:
    """The words of a text, in lower case, separated by commas or white space."""
    return text.replace(",", " ").lower().split()


def read_pins(pins: str) -> Iterator[str]:
    """The SHA-256 sums of `SILOFL_ALLOWED_APPS`; in a file one per line, `#` starts a comment."""
    if is_sums(pins):
        yield from split(pins)
        return
    for line in Path(pins).expanduser().read_text(encoding="utf-8").splitlines():
        yield from split(line.partition("#")[0])[:1]  # `sha256sum` writes the file's name after the sum
