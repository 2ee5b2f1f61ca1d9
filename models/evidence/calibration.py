"""Calibration of predicted probabilities: Brier score, slope, in-the-large, expected calibration error, bins.

``p`` (n,) are probabilities and ``event`` (n,) 0 or 1. Slope and in-the-large are those of logistic recalibration
(Cox, Biometrika 1958; Van Calster et al., J. Clin. Epidemiol. 2016): logit P(event) = a + b logit p. The slope is b,
ideal 1; in-the-large is a where b = 1, ideal 0: above 0 there are more events than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
# The patient of each prediction (n,); without patients, the sample
Units = npt.NDArray[np.int64]

BINS = 10
# Least samples per bin on average, because the share of events in a bin of one is 0 or 1
FEWEST = 5
# Least distance of a probability from 0 and 1, where its logit would be infinite
NEAREST = 1e-12
STEPS = 50  # of Newton's method
LARGEST = 1e3  # a larger coefficient has no finite estimate: the events are separated


@dataclass(frozen=True)
class Bins:
    """A reliability diagram: for each bin its samples, their mean probability and their share of events."""

    counts: Array
    predicted: Array
    observed: Array


def brier_score(p: Array, event: Array) -> float:
    """Return the mean of (p - event)^2; ``nan`` without samples (Brier, Monthly Weather Review 1950)."""
    return float(np.mean((p - event) ** 2)) if len(p) else math.nan


def calibration_slope(p: Array, event: Array) -> float:
    """Return b of logit P(event) = a + b logit p; ``nan`` where it has no finite estimate."""
    x = logit(p)
    if not len(x) or np.ptp(x) < 1e-9:
        return math.nan
    coefficients = _newton(np.column_stack([np.ones_like(x), x]), np.zeros_like(x), event)
    return math.nan if coefficients is None else float(coefficients[1])


def calibration_in_the_large(p: Array, event: Array) -> float:
    """Return a of logit P(event) = a + logit p; ``nan`` where it has no finite estimate."""
    coefficients = _newton(np.ones((len(p), 1)), logit(p), event)
    return math.nan if coefficients is None else float(coefficients[0])


def logit(p: Array) -> Array:
    near = np.clip(p, NEAREST, 1 - NEAREST)
    return np.asarray(np.log(near) - np.log1p(-near))


def reliability(p: Array, event: Array, least: int = 1, units: Units | None = None) -> Bins:
    """Return bins of about equally many samples, at most ``BINS``, none with fewer than ``least`` of ``units`` (n,).

    The edges are quantiles of ``p``, so that equal probabilities share a bin (scikit-learn's strategy "quantile"). A
    bin with too few joins the one before, the first one joins the next. Without ``units`` each sample is one.
    """
    if not len(p):
        return Bins(*(np.empty(0),) * 3)
    bin_of = groups_of(p, least, units)
    counts = np.bincount(bin_of)
    return Bins(
        counts.astype(float),
        np.bincount(bin_of, p) / counts,
        np.bincount(bin_of, event) / counts,
    )


def groups_of(p: Array, least: int, units: Units | None = None) -> npt.NDArray[np.intp]:
    """Return the bin of each of these predictions (n,), n > 0."""
    most = max(1, min(BINS, len(p) // max(least, FEWEST)))
    edges = np.percentile(p, np.linspace(0, 100, most + 1))
    part_of = np.searchsorted(edges[1:-1], p)
    units = np.arange(len(p)) if units is None else units
    return join_bins([[units[part_of == k]] for k in range(most)], least)[part_of]


def expected_calibration_error(bins: Bins) -> float:
    """Return sum_b n_b / n |observed_b - predicted_b|: biased upwards where bins are small."""
    n = bins.counts.sum()
    return (
        float((bins.counts * np.abs(bins.observed - bins.predicted)).sum() / n)
        if n
        else math.nan
    )


def join_bins(bins: Sequence[Sequence[Units]], least: int) -> npt.NDArray[np.intp]:
    """Return for each bin the number of the joined bin that it belongs to; no joined bin is too small.

    ``bins``: for each bin, by kind of samples, their units. A bin needs ``least`` different units of each kind. Where
    all bins together have too few of one kind, they are one bin.
    """
    groups, current, first = np.zeros(len(bins), np.intp), 0, 0
    for i in range(1, len(bins)):
        if fewest_units(bins[first:i]) >= max(least, 1) <= fewest_units(bins[i:]):
            current, first = current + 1, i
        groups[i] = current
    return groups


def fewest_units(bins: Sequence[Sequence[Units]]) -> int:
    """Return the number of different units in these bins together, for the kind with the fewest."""
    return min(len(np.unique(np.concatenate(kind))) for kind in zip(*bins, strict=True))


def _newton(x: Array, offset: Array, event: Array) -> Array | None:
    """Return the coefficients (k,) of a logistic regression with an offset; None where there is no finite estimate."""
    if not len(event) or not 0 < event.sum() < len(event):
        return None
    beta = np.zeros(x.shape[1])
    for _ in range(STEPS):
        share = 1 / (1 + np.exp(-np.clip(x @ beta + offset, -500, 500)))
        information = (x * (share * (1 - share))[:, None]).T @ x
        try:
            step = np.linalg.solve(information, x.T @ (event - share))
        except np.linalg.LinAlgError:
            return None
        # A long step is shortened: Newton's method alone may oscillate.
        beta = beta + step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-300))
        if not np.isfinite(beta).all() or np.abs(beta).max() > LARGEST:
            return None
        if np.abs(step).max() < 1e-12 * max(1.0, float(np.abs(beta).max())):
            return beta
    return beta if np.abs(step).max() < 1e-9 else None


# Net benefit of decisions by a model's probabilities (Vickers and Elkin, Med. Decis. Making 2006)


# Probabilities from which a patient is treated
THRESHOLDS = tuple(round(0.05 * k, 2) for k in range(1, 20))


def net_benefit(p: Array, event: Array, thresholds: tuple[float, ...] = THRESHOLDS) -> Array:
    """Return TP / n - FP / n * t / (1 - t) of "treat where p >= t", for each threshold t."""
    t = np.asarray(thresholds)
    treated = p[None, :] >= t[:, None]
    return np.asarray((treated * _worth(event, t)).mean(1))


def treat_all(event: Array, thresholds: tuple[float, ...] = THRESHOLDS) -> Array:
    """Return the net benefit of treating everybody; treating no one has 0."""
    return np.asarray(_worth(event, np.asarray(thresholds)).mean(1))


def _worth(event: Array, t: Array) -> Array:
    """Return the benefit of treating each sample (thresholds, n): 1 for an event, -t / (1 - t) without one."""
    return np.asarray(np.where(event[None, :] > 0, 1.0, -(t / (1 - t))[:, None]))
