"""What float32 cannot tell apart: times in milliseconds, identifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LOST = 1e-3  # of the spread of a column's values: a larger error of float32 is refused
MERGED = 0.01  # share of a column's different whole numbers that may be one in float32 without a note
LEAVE_OUT = (
    'leave out an identifier (--columns, or kind = "skip" in the recipe), read a date as one (--dates), or subtract a '
    "number that all hospitals share (`offset` in the recipe)"
)


def merged_in_float32(name: str, values: npt.NDArray[Any]) -> tuple[str, bool]:
    """Return a text on different values of a column (n,) that are one in float32, "" where that has no effect.

    Also whether they must be refused: float32 moves them by more than :data:`LOST` of the column's spread.
    """
    known = np.unique(values[np.isfinite(values)])
    with np.errstate(over="ignore"):
        stored = known.astype(np.float32)
    different = len(np.unique(stored))
    if different == len(known):
        return "", False
    low, high = np.quantile(known, (0.25, 0.75))
    refused = bool(np.abs(stored - known).max() > LOST * (high - low))
    if not refused and not (
        len(known) - different > MERGED * len(known) and (known == np.round(known)).all()
    ):
        return "", False
    return (
        f"{len(known)} different numbers of {name} are {different} in float32, which has 7 digits",
        refused,
    )
