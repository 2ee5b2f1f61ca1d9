"""Kaplan and Meier's curve and the log-rank test from a table of patients by time (``models/evidence/pooled.py``).

At the times t_1 < .. < t_K there are d_k events since t_{k-1}, c_k others last seen since then, n_k at risk before:

    S_k = (1 - d_1 / n_1) .. (1 - d_k / n_k),        n_1 = all, n_{k+1} = n_k - d_k - c_k

These are the curve and the test of times that are rounded up to the next t_k, where events come before the others. Of
the times themselves the curve is at most S_k, and at least the product of 1 - d_k / (n_k - c_k), ``least``, where the
others come first. With narrower intervals both are nearer.

Sources: Kaplan and Meier, JASA 1958. The interval is that of log(-log S) with Greenwood's variance (Kalbfleisch and
Prentice, The Statistical Analysis of Failure Time Data, 2002). Log-rank: Mantel 1966, Peto and Peto 1972, with the
hypergeometric variance of tied times, over g groups chi squared with g - 1 degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LEVEL = 0.95


class Table(NamedTuple):
    """Patients at risk, events, and others last seen, at each time (K,)."""

    at_risk: Array
    events: Array
    others: Array


class LogRank(NamedTuple):
    """The test's statistic, its degrees of freedom and p."""

    chi2: float
    df: int
    p: float


@dataclass(frozen=True)
class Curve:
    """A curve: its times, its table, S, the ends of its 95 % interval, and the least that S may be; each (K,)."""

    times: Sequence[float]
    table: Table
    survival: Array
    low: Array
    high: Array
    least: Array

    @property
    def rows(self) -> list[dict[str, float]]:
        """The values of each time, by name."""
        columns = {"time": self.times, **self.table._asdict()}
        columns |= {key: getattr(self, key) for key in ("survival", "low", "high", "least")}
        return [
            {key: float(values[k]) for key, values in columns.items()}
            for k in range(len(self.times))
        ]


def kaplan_meier(times: Sequence[float], cells: Sequence[int]) -> Curve:
    """Return the curve of a table's cells: events at each time, others at each time, and later."""
    k = len(times)
    events, others = np.array(cells[:k], float), np.array(cells[k:-1], float)
    at_risk = sum(cells) - np.concatenate([[0.0], np.cumsum(events + others)[:-1]])
    survival = np.cumprod(1 - events / np.maximum(at_risk, 1))
    without = np.maximum(at_risk - others, np.maximum(events, 1))
    least = np.cumprod(1 - events / without)
    with np.errstate(divide="ignore", invalid="ignore"):
        greenwood = np.cumsum(events / (at_risk * (at_risk - events)))
        wide = NormalDist().inv_cdf((1 + LEVEL) / 2) * np.sqrt(greenwood) / np.log(survival)
        low, high = survival ** np.exp(-wide), survival ** np.exp(wide)
    sure = survival == 1
    # Where all have died the interval is not known
    low, high = (
        np.where(sure, 1.0, np.nan_to_num(end, nan=unknown))
        for end, unknown in ((low, 0.0), (high, 1.0))
    )
    return Curve(times, Table(at_risk, events, others), survival, low, high, least)


def log_rank(tables: Sequence[Table]) -> LogRank | None:
    """Return the test that all groups have one curve; None for fewer than two groups, or where nothing varies."""
    if len(tables) < 2:
        return None
    from scipy import special  # not in every run's process

    n, d = (np.array([getattr(t, key) for t in tables]) for key in ("at_risk", "events"))
    every, dead = n.sum(0), d.sum(0)
    share = n / np.maximum(every, 1)
    excess = (d - share * dead).sum(1)
    each = dead * (every - dead) / np.maximum(every - 1, 1)
    variance = np.diag((share * each).sum(1)) - (share * each) @ share.T
    df = len(tables) - 1
    if np.linalg.matrix_rank(variance) < df:
        return None
    chi2 = float(excess[:df] @ np.linalg.solve(variance[:df, :df], excess[:df]))
    return LogRank(chi2, df, float(special.chdtrc(df, chi2)))


def survival_rows(
    curves: Mapping[str, Curve], test: LogRank | None
) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield the rows of ``survey.csv``: of each group and time, then of the test."""
    for group, curve in curves.items():
        for row in curve.rows:
            at = f"{row.pop('time'):g}"
            for statistic, value in row.items():
                yield group, "survival", at, statistic, value
    for statistic, value in test._asdict().items() if test else ():
        yield "", "survival", "log-rank", statistic, value
