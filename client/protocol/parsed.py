"""From a text to values, as everywhere (`partitions/common/parsed.py`); errors are this site's own, `SiteError`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import ours

if TYPE_CHECKING:
    from partitions.common.parsed import Frozen as Frozen
    from partitions.common.parsed import match_pattern as match_pattern
    from partitions.common.parsed import parse_toml as parse_toml
    from partitions.common.parsed import shorten as shorten
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(ours.parsed, name)


class SiteError(ValueError):
    """A rule, a key or a file of this site cannot be used, or forbids the message; the text names it and the reason."""


Parsed = TypeVar("Parsed", bound="Frozen")


def read_toml(text: str, path: str, mend: str) -> dict[str, Any]:
    """Return the content of a text in TOML. ``mend``: the next step. Raises SiteError, one line."""
    try:
        return ours.parsed.parse_toml(text)
    except ValueError as error:
        raise SiteError(f"{path} is no TOML ({error}); {mend}") from None


def read_bounded(path: Path) -> bytes:
    """Return a file's content. Raises SiteError, one line, where it is too long; OSError."""
    try:
        return ours.parsed.read_bounded(path)
    except ValueError as error:
        raise SiteError(str(error)) from None


def parse_values(kind: type[Parsed], content: object, path: str, mend: str) -> Parsed:
    """Return content as values. ``mend``: the next step. Raises SiteError, one line."""
    try:
        return ours.parsed.parse_values(kind, content, path, mend)
    except ValueError as error:
        raise SiteError(str(error)) from None
