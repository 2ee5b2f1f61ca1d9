"""Statistics of the reference table: a gain over a cohort's hospitals and repeats, and over cohorts.

**One cohort.** Gains g_hr of hospital h in repeat r (a seed and a fold) are a mean, plus an effect of the hospital, one
of the repeat, and a rest. All are random, so the mean's variance is (MS_h + max(MS_r - MS_rest, 0)) / (H R), with the
mean squares of the two-way analysis of variance, and its degrees of freedom are Satterthwaite's. Where repeats move the
hospitals independently, this is Student's t over the hospitals' means, as in the report.

**Over cohorts.** Random effects with Paule and Mandel's variance between cohorts (J. Res. NBS 1982), Hartung and
Knapp's interval (Statistics in Medicine 2001, with a factor of at least 1: Röver et al., BMC MRM 2015), and the
prediction interval of a new cohort with k - 2 degrees of freedom (Higgins et al., JRSS A 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from server.report.inference import HOSPITALS_NEEDED, Interval

Array = npt.NDArray[np.float64]
ALPHA = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and degrees of freedom; ``nan``: none. ``count``: of hospitals or cohorts."""

    mean: float
    error: float
    freedom: float
    count: int

    @property
    def interval(self) -> Interval:
        """The 95 % interval."""
        return self.around(self.error, self.freedom)

    def around(self, error: float, freedom: float) -> Interval:
        half = float(stats.t.ppf(1 - ALPHA / 2, freedom)) * error
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """The p value, two-sided; 1 without an interval, and where there is no difference at all."""
        if not self.error > 0:
            return float(math.isnan(self.error) or self.mean == 0)
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.freedom))


@dataclass(frozen=True)
class PooledGain(Estimate):
    """A mean over cohorts. ``spread``: standard deviation of the cohorts' true gains."""

    spread: float = math.nan

    @property
    def prediction(self) -> Interval:
        """The 95 % prediction interval of a new cohort's true gain."""
        return self.around(math.hypot(self.spread, self.error), self.count - 2)


def crossed_mean(gains: Array) -> Estimate:
    """Return the mean of gains (hospitals, repeats). No error below the hospitals that the report's interval needs."""
    hospitals, repeats = gains.shape
    mean, by_hospital, by_repeat = float(gains.mean()), gains.mean(1), gains.mean(0)
    if hospitals < HOSPITALS_NEEDED:
        return Estimate(mean, math.nan, math.nan, hospitals)
    first, second = float(by_hospital.var(ddof=1)) / hospitals, 0.0
    if repeats > 1:
        rest = gains - by_hospital[:, None] - by_repeat + mean
        of_rest = float((rest**2).sum()) / ((hospitals - 1) * (repeats - 1) * hospitals)
        second = max(float(by_repeat.var(ddof=1)) - of_rest, 0.0) / repeats
    total = first + second
    freedom = float(hospitals - 1)
    if second:
        freedom = total**2 / (first**2 / (hospitals - 1) + second**2 / (repeats - 1))
    return Estimate(mean, math.sqrt(total), freedom, hospitals)


def over_cohorts(cohorts: Sequence[Estimate | None]) -> PooledGain | None:
    """Return the random-effects mean of at least three cohorts' gains; None for fewer."""
    known = [c for c in cohorts if c and c.error > 0]
    count = len(known)
    if count < 3:
        return None
    means = np.array([c.mean for c in known])
    variances = np.array([c.error**2 for c in known])

    def pooled(between: float) -> tuple[float, float, float]:
        """Return the weighted mean, the sum of its weights, and the weighted squares of the distances to it."""
        weights = 1 / (variances + between)
        mean = (weights * means).sum() / weights.sum()
        squares = (weights * (means - mean) ** 2).sum()
        return float(mean), float(weights.sum()), float(squares)

    between, most = 0.0, float(means.var(ddof=1)) * count + 1e-12
    if pooled(0.0)[2] > count - 1:
        between = float(optimize.brentq(lambda b: pooled(b)[2] - (count - 1), 0.0, most))
    mean, weight, squares = pooled(between)
    error = math.sqrt(max(1.0, squares / (count - 1)) / weight)
    return PooledGain(mean, error, count - 1, count, math.sqrt(between))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p values (Holm, Scandinavian Journal of Statistics 1979)."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = highest
    return adjusted


def conclusion(estimate: Estimate, adjusted: float, margin: float) -> str:
    """Return ``gain`` or ``harm``, ``small`` where the 95 % interval is within the margin; else whether it is there."""
    is_small = max(map(abs, estimate.interval)) < margin
    if adjusted < ALPHA:
        return ("small " if is_small else "") + ("gain" if estimate.mean > 0 else "harm")
    return "equivalent" if is_small else "inconclusive"
