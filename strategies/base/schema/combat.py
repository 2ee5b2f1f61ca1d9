"""The part of a survey's answer for ComBat: exact sums of a hospital's columns, in the format of the message.

``combat`` holds the values that all columns share, and why some are withheld. ``combat.glucose`` holds one column's
numbers, so that the audit log names each column whose sums left. The values are JSON. With covariates all columns have
the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.survey.combat import Sums
from partitions.common.errors import DataError
from partitions.schema import LONGEST_NAME
from strategies.base.schema.reporting import LARGEST, MOST, is_whole

KEY = "combat"
MOST_TERMS, LONGEST_WHY = 1000, 500
SHARED = {"day", "refused", "withheld", "covariates", "x", "xx"}
OWN = {"n", "mean", "square", "xy"}
Part = dict[str, Any]  # the values that all columns share, and each column's numbers in "columns"


def written_combat(part: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a record."""
    found = {KEY: json.dumps({key: value for key, value in part.items() if key != "columns"})}
    return found | {f"{KEY}.{name}": json.dumps(own) for name, own in part.get("columns", {}).items()}


def read_combat(texts: Mapping[str, object]) -> Part:
    """Return the part of a reply from ``texts`` by column name (or ""); raise DataError, one line, if it is invalid."""
    shared = _loaded(texts.get("", ""), SHARED)
    terms, day = shared.setdefault("covariates", []), shared.setdefault("day", "")
    centre, products = shared.setdefault("x", []), shared.setdefault("xx", [])
    right = _are_texts(terms, LONGEST_NAME) and len(terms) <= MOST_TERMS and _are_texts([day or "day"], 10)
    right = right and _are_texts([shared.setdefault("refused", "") or "none"], LONGEST_WHY)
    held = shared.setdefault("withheld", {})
    right = right and isinstance(held, dict) and _are_texts([*held], LONGEST_NAME)
    right = right and _are_texts([*held.values()], LONGEST_WHY)
    right = right and _are_numbers(centre, len(terms)) and isinstance(products, list) and len(products) == len(terms)
    if not right or not all(_are_numbers(row, len(terms)) for row in products):
        raise DataError("the sums for ComBat are out of range")
    columns = {name: _column(name, text, len(terms)) for name, text in texts.items() if name}
    return shared | {"columns": columns}


def sums_in(part: Mapping[str, Any]) -> dict[str, Sums]:
    """Return the sums by column."""
    x, xx = np.array(part["x"], np.float64), np.array(part["xx"], np.float64)
    p = len(x)
    return {
        name: Sums(own["n"], own["mean"], own["square"], x, xx.reshape(p, p), np.array(own["xy"], np.float64))
        for name, own in part["columns"].items()
    }


def _column(name: str, text: object, covariates: int) -> Part:
    own = _loaded(text, OWN)
    right = set(own) == OWN and is_whole(own["n"], 1, MOST)
    right = right and _are_numbers([own["mean"], own["square"]], 2) and own["square"] >= 0
    right = right and _are_numbers(own["xy"], covariates)
    if not right or not _are_texts([name], LONGEST_NAME):
        raise DataError(f"the sums of {name[:80]!r} are out of range")
    return own


def _loaded(text: object, keys: set[str]) -> Part:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not set(found) <= keys:
        raise DataError("the sums for ComBat cannot be read")
    return found


def _are_texts(values: object, longest: int) -> bool:
    return isinstance(values, Sequence) and all(
        isinstance(own, str) and 0 < len(own) <= longest and own.isprintable() for own in values
    )


def _are_numbers(values: object, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(own, int | float) and not isinstance(own, bool) and abs(own) <= LARGEST for own in values)
    )
