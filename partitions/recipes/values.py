"""Checks of a recipe's values, by the type of each key. All raise DataError, one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partitions.common.errors import DataError

LARGEST = 1e300  # a limit, because TOML's whole numbers have none


def table_of(content: object, what: str) -> Mapping[str, Any]:
    """Return the content as a table. Raises DataError."""
    if not isinstance(content, Mapping):
        raise DataError(f"{what} is a table of keys")
    return content


def cells_of(content: object, what: str) -> dict[str, str]:
    """Return a table of texts by cell. Raises DataError."""
    table = table_of(content, what)
    return {str(cell): typed(table, cell, "") for cell in table}


def refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise DataError where a table has another key."""
    if strange := [key for key in table if key not in known]:
        raise DataError(f"{what} has no key {str(strange[0])[:40]!r}; there are: {', '.join(known)}")


def typed(table: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the key's value, of the default's type. Raises DataError."""
    value = table.get(key, default)
    if type(value) is not type(default):
        raise DataError(f"{key} is {str(value)[:40]}; it is a {type(default).__name__} (a text stands in quotes)")
    return value


def number(value: object, what: str) -> float:
    """Return a finite number. Raises DataError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise DataError(f"{what} is {str(value)[:40]}, no number")
    return float(value)


def pair(value: object, name: str) -> tuple[float, float]:
    """Return a pair of numbers, a range. Raises DataError."""
    if not isinstance(value, list) or len(value) != 2:
        raise DataError(f"range of {name!r} is a list of two numbers")
    return number(value[0], f"range of {name!r}"), number(value[1], f"range of {name!r}")


def year(value: object, name: str) -> int:
    """Return a year of four digits. Raises DataError."""
    if not isinstance(value, int) or not 1000 <= value <= 9999:
        raise DataError(f"latest of {name!r} is {str(value)[:40]}; it is a year of four digits")
    return value


def texts(value: object, what: str) -> tuple[str, ...]:
    """Return a list of texts. Raises DataError."""
    if not isinstance(value, list) or not all(isinstance(own, str) and len(own) <= 200 for own in value):
        raise DataError(f"{what}: a list of texts in quotes")
    return tuple(value)
