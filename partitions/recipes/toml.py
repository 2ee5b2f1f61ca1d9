"""TOML with comments: how recipes and schemas are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

NO_NOTES: Mapping[str, str] = MappingProxyType({})
BARE = re.compile(r"[A-Za-z0-9_-]+")


def as_toml(content: Mapping[str, Any], about: str, notes: Mapping[str, str] = NO_NOTES) -> str:
    """Return the content as TOML: tables as sections, those of the key ``columns`` as sections each.

    ``about``: a comment at the beginning; ``notes``: comments above keys, and above columns (``columns.0``).
    """
    return "\n".join([*comment_lines(about), *toml_lines(content, notes)]) + "\n"


def toml_lines(
    table: Mapping[str, Any], notes: Mapping[str, str], above: str = ""
) -> Iterator[str]:
    """Yield a table's lines: its own keys, then the sections in it. ``above``: the names of the tables around it."""
    sections = [
        key for key, value in table.items() if isinstance(value, Mapping) or key == "columns"
    ]
    for key, value in table.items():
        if key not in sections:
            yield from comment_lines(notes.get(key, ""))
            yield f"{bare(key)} = {write_value(value)}"
    for key in sections:
        value, name = table[key], above + bare(key)
        for i, part in enumerate([value] if isinstance(value, Mapping) else value):
            head = f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"
            note = notes.get(key if isinstance(value, Mapping) else f"{key}.{i}", "")
            yield from ("", *comment_lines(note), head, *toml_lines(part, notes, f"{name}."))


def comment_lines(text: str) -> Iterator[str]:
    """Yield a text's lines as comments, without control characters."""
    for line in text.splitlines():
        yield "".join(c if c.isprintable() else "?" for c in f"# {line}").rstrip()


def bare(key: str) -> str:
    """Return a key, in quotation marks where it needs them."""
    return key if BARE.fullmatch(key) else write_value(key)


def write_value(value: Any) -> str:
    """Return a value in TOML's notation on one line, or tables in a list on one each."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{bare(str(key))} = {write_value(item)}" for key, item in value.items()
            )
            + "}"
        )
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return "\n".join(["[", *(f"  {write_value(item)}," for item in value), "]"])
    if isinstance(value, list):
        return "[" + ", ".join(map(write_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
