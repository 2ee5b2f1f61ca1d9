"""Intervals of scores and of the difference of two methods, from the values that leave a silo.

A silo reports the number of correct test samples, never which ones. So the difference of two models on one test set
uses Newcombe's interval for independent shares, which is wider than a paired one.
:mod:`server.report.inference` has the intervals for several seeds and for the mean over silos.
"""

from __future__ import annotations

import math

from models.metrics import wilson_interval

Interval = tuple[float, float]
UNKNOWN: Interval = (math.nan, math.nan)


def correct_of(accuracy: float, n: int) -> int:
    """Return the number of correct samples for an accuracy over ``n`` samples."""
    return round(accuracy * n)


def accuracy_interval(accuracy: float, n: int, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of an accuracy over ``n`` test samples; ``nan`` twice if either is unknown."""
    if math.isnan(accuracy) or n <= 0:
        return UNKNOWN
    return wilson_interval(correct_of(accuracy, n), n, confidence)


def difference_interval(first: float, n_first: int, second: float, n_second: int, confidence: float = 0.95) -> Interval:
    """Return Newcombe's interval of ``first - second``, two accuracies (Statistics in Medicine 1998, method 10).

    With Wilson's intervals (l1, u1), (l2, u2) of p1, p2 and d = p1 - p2:
    (d - sqrt((p1 - l1)^2 + (u2 - p2)^2), d + sqrt((u1 - p1)^2 + (p2 - l2)^2)).
    """
    ends = accuracy_interval(first, n_first, confidence), accuracy_interval(second, n_second, confidence)
    return from_intervals(first, ends[0], second, ends[1])


def from_intervals(first: float, of_first: Interval, second: float, of_second: Interval) -> Interval:
    """Return the interval of ``first - second`` from the scores' own intervals (Zou and Donner, Stat. Med. 2008)."""
    (l1, u1), (l2, u2) = of_first, of_second
    if math.isnan(l1) or math.isnan(l2):
        return UNKNOWN
    d = first - second
    return d - math.hypot(first - l1, u2 - second), d + math.hypot(u1 - first, second - l2)
