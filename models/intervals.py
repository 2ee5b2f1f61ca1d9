"""Confidence intervals of one silo's score, computed at the silo from its samples.

The interval of an accuracy follows from its value and ``n`` (:func:`models.metrics.wilson_interval`). Intervals of
other scores (an area under a curve, a Dice coefficient, an R2) depend on samples that never leave the silo. So the silo
sends the two ends beside the score. Measured coverage: docs/tasks.md.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from models.metrics import wilson_interval

Array = npt.NDArray[np.float64]
Z = NormalDist().inv_cdf(0.975)
UNKNOWN = (math.nan, math.nan)
TYPICAL = 2  # samples of the rarer kind that count as much as the typical variance


def of_share(value: float, variance: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a score in 0..1, symmetric for its logit: logit(a) -+ z sqrt(V) / (a (1 - a)).

    Without a variance (all right, all wrong, one sample) it is Wilson's interval of that share of ``n``. ``nan`` twice
    where the value is ``nan``, or n <= 0.
    """
    if math.isnan(value) or n <= 0:
        return UNKNOWN
    if not (0 < value < 1 and variance > 0):
        return wilson_interval(round(value * n), n)
    centre = math.log(value / (1 - value))
    half = Z * math.sqrt(variance) / (value * (1 - value))
    return _expit(centre - half), _expit(centre + half)


def of_mean(value: float, variance: float, most: float) -> tuple[float, float]:
    """Return the 95 % interval of a score without a lower limit: a -+ z sqrt(V), up to ``most``."""
    half = Z * math.sqrt(variance)
    highest = min(value + half, most)
    return value - half, highest


def _expit(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))


def areas(scores: Array, positive: npt.NDArray[np.bool_]) -> tuple[float, Array, float]:
    """Return the area under the ROC curve of scores (n,), equal ones counting half, and the two parts of its variance.

    The first part is each sample's influence (n,), whose squares sum to DeLong's variance (DeLong et al., Biometrics
    1988). A positive sample's is (V10 - A) / sqrt(n+ (n+ - 1)), with V10 the share of negatives below it; a negative's
    likewise. So the variance of a mean of several areas over the same samples is the sum of the squared means. The
    second is :func:`of_few`. ``nan`` and zeros where one of the two kinds is missing.
    """
    influence = np.zeros(len(scores))
    above = np.sort(scores[positive])
    below = np.sort(scores[~positive])
    if not len(above) or not len(below):
        return math.nan, influence, 0.0
    v10 = _placements(below, scores[positive])
    v01 = 1 - _placements(above, scores[~positive])
    area = float(v10.mean())
    for kind, share in ((positive, v10), (~positive, v01)):
        influence[kind] = (share - area) / math.sqrt(len(share) * max(len(share) - 1, 1))
    few = of_few(area, float((influence**2).sum()), min(len(above), len(below)))
    return area, influence, few


def of_few(area: float, variance: float, rarer: float) -> float:
    """Return the variance of an area that ``rarer`` samples of the rarer kind do not show; a single one shows none.

    V is drawn to Hanley and McNeil's (Radiology 1982), of which the rarer kind's part is
    H = a^2 (1 - a) / (1 + a) / m with a = max(A, 1 - A): ((m - 1) V + 2 H) / (m + 1). Where all m are right (or wrong),
    H has a = (m + 1) / (m + 2).
    """
    a = max(area, 1 - area) if 0 < area < 1 else (rarer + 1) / (rarer + 2)
    typical = a * a * (1 - a) / (1 + a) / rarer
    weight = TYPICAL / (rarer - 1 + TYPICAL)
    return max(weight * (typical - variance), 0.0)


def _placements(ordered: Array, values: Array) -> Array:
    """Return for each value the share of ``ordered`` that is smaller, equal ones counting half."""
    smaller = np.searchsorted(ordered, values, side="left")
    not_larger = np.searchsorted(ordered, values, side="right")
    return np.asarray((smaller + not_larger) / (2 * len(ordered)))


def of_area(
    area: float, variance: float, positives: int, negatives: int
) -> tuple[float, float]:
    """Return the 95 % interval of an area under the ROC curve of this variance (:func:`areas`), on the logit.

    Without a variance (all right) it is Wilson's interval of that share of the samples of the rarer kind.
    """
    return of_share(area, variance, min(positives, negatives))


def of_pairs(concordant: Array, comparable: Array) -> tuple[float, tuple[float, float]]:
    """Return the share of comparable pairs that are concordant, and its 95 % jackknife interval.

    ``concordant`` and ``comparable`` (n,) count for each sample the pairs that it is in. With C_-i the share without
    sample i, V = (n - 1) / n sum (C_-i - mean)^2, on the logit; more with few events (:func:`of_few`). Their number is
    taken as that of all pairs over that of one sample's, at most.
    """
    n, pairs = len(comparable), comparable.sum() / 2
    if pairs == 0:
        return math.nan, UNKNOWN
    share = float(concordant.sum() / 2 / pairs)
    left = pairs - comparable
    without = (share * pairs - concordant)[left > 0] / left[left > 0]
    variance = 0.0
    if len(without):
        variance = (n - 1) / n * float(((without - without.mean()) ** 2).sum())
    # A single event is in all pairs; without it there are none
    rarer = float(pairs / comparable.max())
    variance += of_few(share, variance, rarer)
    return share, of_share(share, variance, round(rarer))
