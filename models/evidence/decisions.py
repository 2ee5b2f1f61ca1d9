"""Net benefit of decisions by a model's probabilities (Vickers and Elkin, Med. Decis. Making 2006)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

THRESHOLDS = tuple(round(0.05 * k, 2) for k in range(1, 20))  # probabilities from which a patient is treated


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
