"""The variables of a bundle's `.env`: the allowed names, and the parser."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from partitions.common.errors import UserError

if TYPE_CHECKING:
    pass

# Names that a bundle's .env may set. Docker Compose reads the file too: COMPOSE_FILE would start another file.
VARIABLES = (
    *("SILOFL_NAME", "SILOFL_SERVER", "SILOFL_DATA", "SILOFL_USER", "SILOFL_DEVICE", "SILOFL_RESIDENT_MINUTES"),
    *("SILOFL_IMAGE", "SILOFL_FLWR", "SILOFL_KEY"),
)

VARIABLE = re.compile(r"""(?P<key>[A-Z][A-Z0-9_]*)=(?P<quote>["']?)(?P<value>[^'"$`\\#]*)(?P=quote) *""")


def read_variables(text: str) -> dict[str, str]:
    """Return the `KEY=value` lines of a bundle's `.env`, which silofl and Docker Compose must read alike.

    Raises UserError, one line, for any other line: Compose parses `export`, quotes, `$` and its own line ends
    differently from the signature's check.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.isprintable() and (not line.strip() or line.startswith("#")):
            continue
        match = VARIABLE.fullmatch(line) if line.isprintable() else None
        if match is None:
            raise UserError(
                f"the bundle's .env, line {number} is {line[:60]!r}: write KEY=value, without `export`, and in the "
                "value none of $ ` \\ # nor a quote inside it"
            )
        key, value = match["key"], match["value"].strip()
        if key not in VARIABLES:
            raise UserError(f"the bundle's .env, line {number} sets {key}; it may set {', '.join(VARIABLES)}")
        if key in found:
            raise UserError(f"the bundle's .env, line {number} sets {key} a second time: leave one line of them")
        found[key] = value
    return found


def variables_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the variables of a bundle. Raises UserError as :func:`read_variables` does."""
    try:
        return read_variables(files[".env"].decode())
    except UnicodeDecodeError:
        raise UserError("the bundle's .env is not in UTF-8: save it as a plain text file") from None
