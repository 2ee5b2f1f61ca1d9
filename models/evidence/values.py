"""Calibration of predicted measurements: least squares of observed on predicted, agreement, bins, intervals.

``predicted`` (n,) and ``truth`` (n,), the measured values, are in the measurement's own unit. Differences are observed
minus predicted: above 0 the prediction is too low.

Split conformal prediction sets, and thresholds that are shrunk towards the hospitals' common one.

The score of a class is 1 - p of that class ("LAC": Sadinle, Lei and Wasserman, JASA 2019). A set holds the classes
whose score is at most the threshold: the ceil((n + 1)(1 - alpha))-th smallest score of the true class among n
calibration samples. Such a set holds the true class of a new patient of the same hospital with probability 1 - alpha
or more. For n < 1 / alpha - 1 no threshold achieves this, and all classes are in the set.

A hospital's own threshold is noisy where n is small. The common one holds for the mixture of hospitals, not for each
(Lu et al., arXiv 2305.17564). The shrunk threshold is (n q + n0 c) / (n + n0), with n0 = 19 as in arXiv 2606.20115. It
has no known guarantee. So coverage is measured on samples that were not used for calibration.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from models.evidence.calibration import Array, Units, groups_of

SPREAD = 1.96  # standard deviations on either side, for limits of agreement


def recalibration(predicted: Array, truth: Array) -> tuple[float, float]:
    """Return intercept a and slope b of truth = a + b predicted by least squares, ideal 0 and 1.

    ``nan`` where all predictions are equal. Source: Stevens and Poppe, J. Clin. Epidemiol. 2020.
    """
    if len(predicted) < 2 or np.ptp(predicted) <= 1e-9 * max(
        1.0, float(np.abs(predicted).max())
    ):
        return math.nan, math.nan
    centred = predicted - predicted.mean()
    slope = float(centred @ truth / (centred @ centred))
    return float(truth.mean() - slope * predicted.mean()), slope


def agreement(predicted: Array, truth: Array) -> tuple[float, float, float]:
    """Return the mean difference and its limits of agreement, mean -+ 1.96 SD (Bland and Altman, Lancet 1986)."""
    if len(predicted) < 2:
        return (math.nan,) * 3
    difference = truth - predicted
    mean = float(difference.mean())
    half = SPREAD * float(difference.std(ddof=1))
    return mean, mean - half, mean + half


def value_bins(
    predicted: Array, truth: Array, least: int, units: Units | None = None
) -> list[float]:
    """Return samples, mean prediction, mean measurement and mean absolute error of each bin, bin after bin.

    The bins are those of a reliability diagram: of about equally many samples, none with fewer than ``least`` of
    ``units`` (n,).
    """
    bin_of = groups_of(predicted, least, units)
    counts = np.bincount(bin_of)
    sums = [
        np.bincount(bin_of, values) / counts
        for values in (predicted, truth, np.abs(truth - predicted))
    ]
    return [float(v) for row in zip(counts, *sums, strict=True) for v in row]


def own_width(errors: Array, units: Units, least: int) -> tuple[int, float]:
    """Return the number of calibration samples, and their half width; ``nan`` where either half is too small."""
    fits, _ = halves(units)
    return int(fits.sum()), quantile(errors[fits]) if enough(units, least) else math.nan


def interval_shares(errors: Array, units: Units, common: float) -> list[float]:
    """Return the number of samples for coverage, then coverage and width with own, common and shrunk half width."""
    fits, held = halves(units)
    width = quantile(errors[fits])
    rest = errors[held]
    values = [float(len(rest))]
    for half in (width, common, shrunk(width, int(fits.sum()), common)):
        covered = float((rest <= half).mean()) if len(rest) else math.nan
        values += [covered, 2 * half]
    return values


# Split conformal prediction

ALPHA = 0.1
SHRINKAGE = 19.0  # n0, in calibration samples


def quantile(scores: Array, alpha: float = ALPHA, too_few: float = math.nan) -> float:
    """Return the ceil((n + 1)(1 - alpha))-th smallest of n scores; ``too_few`` where there is none.

    Of classes a threshold of 1 admits all. Of measurements, whose score is the absolute error, it is the half width of
    an interval (Lei et al., JASA 2018, algorithm 2).
    """
    rank = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9)
    return float(np.sort(scores)[rank - 1]) if 0 < rank <= len(scores) else too_few


def shrunk(threshold: float, n: int, common: float) -> float:
    """Return a hospital's threshold over ``n`` samples, shrunk towards the common one."""
    return (n * threshold + SHRINKAGE * common) / (n + SHRINKAGE)


def true_scores(p: Array, y: npt.NDArray[np.int64]) -> Array:
    """Return 1 - p of the true class (n,), from probabilities (n, C)."""
    return np.asarray(1 - p[np.arange(len(y)), y])


def sets_of(p: Array, y: npt.NDArray[np.int64], threshold: float) -> tuple[float, float]:
    """Return the share of sets that hold the true class, and their mean size; ``nan`` without samples."""
    if not len(y):
        return math.nan, math.nan
    inside = 1 - p <= threshold
    covered = inside[np.arange(len(y)), y]
    return float(covered.mean()), float(inside.sum(1).mean())


def halves(units: Units) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which test samples (n,) are for calibration, and which for measuring coverage.

    The samples of every second of ``units`` (n,), patients where the file has them, are for calibration: a patient's
    samples are all in one half. Validation samples cannot serve, because they selected the model.
    """
    fits = np.unique(units, return_inverse=True)[1] % 2 == 0
    return fits, ~fits


def enough(units: Units, least: int) -> bool:
    """Return whether each of the :func:`halves` has ``least`` different units."""
    return len(np.unique(units)) // 2 >= least
