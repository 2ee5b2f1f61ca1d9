"""Split conformal prediction sets, and thresholds that are shrunk towards the hospitals' common one.

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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.evidence.calibration import Array, Units

ALPHA = 0.1
SHRINKAGE = 19.0  # n0, in calibration samples


@dataclass(frozen=True)
class Sets:
    """Prediction sets of some samples: the share that holds the true class, and their mean number of classes."""

    coverage: float
    size: float


def threshold_of(scores: Array, alpha: float = ALPHA) -> float:
    """Return the threshold of calibration scores (n,); 1, which admits all classes, where there are too few."""
    rank = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-12)
    return float(np.sort(scores)[rank - 1]) if 0 < rank <= len(scores) else 1.0


def shrunk(own: float, n: int, common: float, n0: float = SHRINKAGE) -> float:
    """Return a hospital's threshold over ``n`` samples, shrunk towards the common one."""
    return (n * own + n0 * common) / (n + n0)


def true_scores(p: Array, y: npt.NDArray[np.int64]) -> Array:
    """Return 1 - p of the true class (n,), from probabilities (n, C)."""
    return np.asarray(1 - p[np.arange(len(y)), y])


def sets_of(p: Array, y: npt.NDArray[np.int64], threshold: float) -> Sets:
    """Return coverage and size of the sets with this threshold; ``nan`` without samples."""
    if not len(y):
        return Sets(math.nan, math.nan)
    inside = 1 - p <= threshold
    return Sets(float(inside[np.arange(len(y)), y].mean()), float(inside.sum(1).mean()))


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
