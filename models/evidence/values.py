"""Calibration of predicted measurements: least squares of observed on predicted, agreement, bins, intervals.

``predicted`` (n,) and ``truth`` (n,), the measured values, are in the measurement's own unit. Differences are observed
minus predicted: above 0 the prediction is too low.
"""

from __future__ import annotations

import math

import numpy as np

from models.evidence.calibration import Array, Units, groups_of
from models.evidence.conformal import ALPHA, enough, halves, shrunk

SPREAD = 1.96  # standard deviations on either side, for limits of agreement


def recalibration(predicted: Array, truth: Array) -> tuple[float, float]:
    """Return intercept a and slope b of truth = a + b predicted by least squares, ideal 0 and 1.

    ``nan`` where all predictions are equal. Source: Stevens and Poppe, J. Clin. Epidemiol. 2020.
    """
    if len(predicted) < 2 or np.ptp(predicted) <= 1e-9 * max(1.0, float(np.abs(predicted).max())):
        return math.nan, math.nan
    centred = predicted - predicted.mean()
    slope = float(centred @ truth / (centred @ centred))
    return float(truth.mean() - slope * predicted.mean()), slope


def agreement(predicted: Array, truth: Array) -> tuple[float, float, float]:
    """Return the mean difference and its limits of agreement, mean -+ 1.96 SD (Bland and Altman, Lancet 1986)."""
    if len(predicted) < 2:
        return (math.nan,) * 3
    difference = truth - predicted
    mean, half = float(difference.mean()), SPREAD * float(difference.std(ddof=1))
    return mean, mean - half, mean + half


def value_bins(predicted: Array, truth: Array, least: int, units: Units | None = None) -> list[float]:
    """Return samples, mean prediction, mean measurement and mean absolute error of each bin, bin after bin.

    The bins are those of a reliability diagram: of about equally many samples, none with fewer than ``least`` of
    ``units`` (n,).
    """
    own = groups_of(predicted, least, units)
    counts = np.bincount(own)
    sums = [np.bincount(own, values) / counts for values in (predicted, truth, np.abs(truth - predicted))]
    return [float(v) for row in zip(counts, *sums, strict=True) for v in row]


def half_width(errors: Array, alpha: float = ALPHA) -> float:
    """Return the half width of a split conformal interval: the ceil((n + 1)(1 - alpha))-th smallest absolute error.

    ``errors`` (n,); ``nan`` where n is too small. Source: Lei et al., JASA 2018, algorithm 2.
    """
    rank = math.ceil((len(errors) + 1) * (1 - alpha) - 1e-12)
    return float(np.sort(errors)[rank - 1]) if 0 < rank <= len(errors) else math.nan


def own_width(errors: Array, units: Units, least: int) -> tuple[int, float]:
    """Return the number of calibration samples, and their half width; ``nan`` where either half is too small."""
    fits, _ = halves(units)
    return int(fits.sum()), half_width(errors[fits]) if enough(units, least) else math.nan


def interval_shares(errors: Array, units: Units, common: float) -> list[float]:
    """Return the number of samples for coverage, then coverage and width with own, common and shrunk half width."""
    fits, held = halves(units)
    own, rest = half_width(errors[fits]), errors[held]
    values = [float(len(rest))]
    for half in (own, common, shrunk(own, int(fits.sum()), common)):
        values += [float((rest <= half).mean()) if len(rest) else math.nan, 2 * half]
    return values
