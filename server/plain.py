"""Templates of plain text, for files and for the terminal: nothing is escaped, and a missing value is an error."""

from __future__ import annotations

import json
from functools import partial

from jinja2 import Environment, StrictUndefined

from partitions.common.names import escape

PLAIN = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
# `printable`: characters that would control a terminal are shown as escapes
PLAIN.filters |= {"json": partial(json.dumps, ensure_ascii=False), "printable": escape}


def fill(template: str, **values: object) -> str:
    """Return a template's text with these values."""
    return PLAIN.from_string(template).render(**values)
