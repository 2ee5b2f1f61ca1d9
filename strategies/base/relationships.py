"""Who learns from whom: a method's relationships over the rounds, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Relationships:
    """``values[k, i, j]``: the weight, at least 0, of silo j for silo i after round ``rounds[k]``."""

    names: list[str]
    rounds: list[int]
    values: Array  # (rounds, N, N), nan before a silo's first round

    @classmethod
    def of(cls, histories: Mapping[str, Array], rounds: Mapping[str, Sequence[int]]) -> Relationships | None:
        """Build it from each silo's own history (rounds, N) and the rounds of its rows; None if they do not match."""
        names = sorted(histories)
        n = len(names)
        if n < 2 or any(history.shape[1] != n for history in histories.values()):
            return None
        every = sorted({r for name in names for r in rounds[name]})
        values = np.full((len(every), n, n), np.nan)
        for i, name in enumerate(names):
            for row, r in zip(histories[name], rounds[name], strict=True):
                values[every.index(r) :, i] = row  # an absent silo keeps its last row
        return cls(names, every, values)
