"""Who learns from whom: a method's relationships over the rounds, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Relationships:
    """``values[k, i, j]``: how much silo i takes of silo j after round ``rounds[k]``, from 0 on."""

    names: list[str]
    rounds: list[int]
    values: Array  # (rounds, N, N), nan before a silo's first round

    @classmethod
    def of(cls, histories: Mapping[str, Array], rounds: Mapping[str, Sequence[int]]) -> Relationships | None:
        """From each silo's own history (rounds, N), and the rounds of its rows; None where they do not fit together."""
        names = sorted(histories)
        n = len(names)
        if n < 2 or any(history.shape[1] != n for history in histories.values()):
            return None
        every = sorted({r for name in names for r in rounds[name]})
        values = np.full((len(every), n, n), np.nan)
        for i, name in enumerate(names):
            for row, r in zip(histories[name], rounds[name], strict=True):
                values[every.index(r) :, i] = row  # an absent silo's row stays as it is
        return cls(names, every, values)
