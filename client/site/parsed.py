"""From a text to values, as everywhere (`partitions/common/parsed.py`); errors are this site's own, `SiteError`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..flower.private import load_ours


class SiteError(ValueError):
    """A rule, a key or a file of this site cannot be used, or forbids the message; the text names it and the reason."""


_parsed: Any = load_ours("partitions/common", "parsed")
if TYPE_CHECKING:
    from partitions.common.parsed import Frozen, match_pattern, parse_toml, shorten
else:
    Frozen, match_pattern, shorten = _parsed.Frozen, _parsed.match_pattern, _parsed.shorten
    parse_toml = _parsed.parse_toml

Parsed = TypeVar("Parsed", bound=Frozen)


def read_toml(text: str, path: str, mend: str) -> dict[str, Any]:
    """Return the content of a text in TOML. ``mend``: the next step. Raises SiteError, one line."""
    try:
        return parse_toml(text)
    except ValueError as error:
        raise SiteError(f"{path} is no TOML ({error}); {mend}") from None


def read_bounded(path: Path) -> bytes:
    """Return a file's content. Raises SiteError, one line, where it is too long; OSError."""
    try:
        return bytes(_parsed.read_bounded(path))
    except ValueError as error:
        raise SiteError(str(error)) from None


def parse_values(kind: type[Parsed], content: object, path: str, mend: str) -> Parsed:
    """Return content as values. ``mend``: the next step. Raises SiteError, one line."""
    try:
        found: Parsed = _parsed.parse_values(kind, content, path, mend)
        return found
    except ValueError as error:
        raise SiteError(str(error)) from None
