"""Compared values of the report: a method's score in a silo, and the gain of one method over another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
NAN = math.nan
UNKNOWN: Interval = (NAN, NAN)
EXACT = 1e-9  # scores with a smaller difference are equal


@dataclass(frozen=True)
class Tested:
    """Score of one run's model on one silo's ``n`` test samples, and its interval."""

    score: float
    n: int
    interval: Interval


@dataclass(frozen=True)
class Score:
    """Score of one method on one silo's test data: mean over seeds, their standard deviation, mean number of samples.

    ``interval`` is that of a single seed; with several seeds the spread is used instead. ``nan`` if withheld.
    """

    mean: float
    spread: float
    interval: Interval
    n_test: int


@dataclass(frozen=True)
class Gain:
    """Difference of two methods, in one silo or as a mean over silos: value, 95 % interval, p value if it has one."""

    mean: float
    interval: Interval
    p: float = NAN

    @property
    def sign(self) -> int:
        """The sign of the mean: 1 for a gain, 0 for equal scores, -1 for a loss."""
        return 0 if math.isnan(self.mean) or abs(self.mean) < EXACT else (1 if self.mean > 0 else -1)

    @property
    def shown(self) -> int:
        """The sign of an interval that excludes 0: 1 for a gain, -1 for a loss; else 0."""
        return 1 if self.interval[0] > 0 else -1 if self.interval[1] < 0 else 0


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds (n - 1); ``nan`` for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else NAN


def known(value: float | None) -> float:
    """Return the value; ``nan`` for None."""
    return NAN if value is None else value
