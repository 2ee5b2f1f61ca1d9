"""The silos' weights in a secure sum: the server sends them, and each silo computes them again.

A hospital's own process loads this file, too (`client/site/secure/statements.py`): it imports only the standard
library.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

CAP = 5.0  # of a silo's weight, in median weights, where ``weight-cap`` sets none


def weights_in_sum(counts: Sequence[int], cap: float) -> list[int]:
    """Return the weights of silos with so many samples: at most ``cap`` medians, and none above half of all."""
    most = max(int((cap or CAP) * median_low(counts)), 1)
    weights = [min(count, most) for count in counts]
    first = weights.index(max(weights))
    weights[first] = max(min(weights[first], sum(weights) - weights[first]), 1)
    return weights
