"""How far a difference between two methods can be trusted, from the little that leaves a silo.

A silo reports how many test samples a model gets right, never which ones. So the difference of two models on one
test set gets Newcombe's interval for independent shares, which is wider than one that could pair the samples. Where a
study has several seeds, or where the silos themselves are the sample, differences are paired and bootstrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from models.metrics import wilson_interval

Interval = tuple[float, float]
UNKNOWN: Interval = (math.nan, math.nan)


def correct_of(accuracy: float, n: int) -> int:
    """The number of samples that an accuracy over ``n`` samples stands for."""
    return round(accuracy * n)


def accuracy_interval(accuracy: float, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's interval of an accuracy over ``n`` test samples; ``nan`` twice where either is unknown."""
    if math.isnan(accuracy) or n <= 0:
        return UNKNOWN
    return wilson_interval(correct_of(accuracy, n), n, confidence)


def difference_interval(first: float, n_first: int, second: float, n_second: int, confidence: float = 0.95) -> Interval:
    """Newcombe's hybrid score interval of ``first - second``, both accuracies (Statistics in Medicine 1998, method 10).

    With Wilson's intervals (l1, u1), (l2, u2) of p1, p2 and d = p1 - p2:
    (d - sqrt((p1 - l1)^2 + (u2 - p2)^2), d + sqrt((u1 - p1)^2 + (p2 - l2)^2)).
    """
    ends = accuracy_interval(first, n_first, confidence), accuracy_interval(second, n_second, confidence)
    return from_intervals(first, ends[0], second, ends[1])


def from_intervals(first: float, of_first: Interval, second: float, of_second: Interval) -> Interval:
    """The same of any two scores with intervals of their own (Zou and Donner, Statistics in Medicine 2008)."""
    (l1, u1), (l2, u2) = of_first, of_second
    if math.isnan(l1) or math.isnan(l2):
        return UNKNOWN
    d = first - second
    return d - math.hypot(first - l1, u2 - second), d + math.hypot(u1 - first, second - l2)


def paired_bootstrap(differences: Sequence[float], confidence: float = 0.95, draws: int = 4000) -> Interval:
    """Percentile interval of the mean of paired differences, resampled with replacement.

    One difference per pair (a silo, or a silo with a seed). ``nan`` differences are left out; ``nan`` twice where fewer
    than two are left. Always the same for the same differences: the generator's seed is fixed.
    """
    known = np.array([d for d in differences if not math.isnan(d)])
    if len(known) < 2:
        return UNKNOWN
    rng = np.random.default_rng(0)
    means = known[rng.integers(0, len(known), (draws, len(known)))].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)
