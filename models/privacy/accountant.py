"""(ε, δ) of the Poisson-subsampled Gaussian mechanism, from Rényi differential privacy (RDP).

The mechanism takes each unit with probability q, sums the sampled units' vectors of norm at most C, and adds noise of
standard deviation σ C. Neighbouring data sets differ by one unit that is added or removed. With ν the density of
N(0, σ²), its RDP of order α is log A(α) / (α - 1), where

    A(α) = ∫ ν(z) (1 - q + q exp((2 z - 1) / (2 σ²)))^α dz

(Mironov, Talwar and Zhang, arXiv 1908.10530, theorems 4 and 5), for whole and for fractional α. RDP of the same order
adds up over releases. With the order α that gives the smallest value,

    ε = RDP(α) + log((α - 1) / α) - (log δ + log α) / (α - 1)

(Canonne, Kamath and Steinke, arXiv 2004.00010, proposition 12). The integral is a trapezoid sum. The integrand is
analytic in a strip of half-width π σ² around the real line, so the sum's error is below exp(-2 π² σ² / h) for steps h.

This module imports nothing else of silofl: the site's own process loads this file alone
(client/site/budget/accounting.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

ORDERS: tuple[float, ...] = (
    1.25,
    *(k / 10 for k in range(13, 110)),
    *(float(k) for k in range(11, 65)),
    *(72.0, 80.0, 96.0, 112.0, 128.0, 160.0, 192.0, 256.0, 320.0, 384.0, 512.0),
)
LEAST_NOISE, MOST_NOISE = 0.1, 1e5  # the range of noise multipliers


class OutOfRangeError(ValueError):
    """A value outside the range for which epsilon is computed; the text names value and range."""


@dataclass(frozen=True)
class Releases:
    """Releases of one kind: noise multiplier σ, sample rate q, and their number."""

    noise_multiplier: float
    sample_rate: float
    steps: int


@lru_cache(maxsize=256)
def _rdp(noise_multiplier: float, sample_rate: float) -> tuple[float, ...]:
    """Return the RDP of one release at each of :data:`ORDERS`."""
    if not LEAST_NOISE <= noise_multiplier <= MOST_NOISE:
        raise OutOfRangeError(
            f"noise multiplier {noise_multiplier:g}: {LEAST_NOISE:g} to {MOST_NOISE:g} is needed here"
        )
    if not 0 <= sample_rate <= 1:
        raise OutOfRangeError(f"sample rate {sample_rate:g}: 0 to 1 is needed here")
    variance = noise_multiplier**2
    if sample_rate == 1:
        return tuple(order / (2 * variance) for order in ORDERS)
    if sample_rate == 0:
        return (0.0,) * len(ORDERS)
    step = min(noise_multiplier, variance) / 4
    margin = 12 * noise_multiplier
    z = np.arange(-margin, ORDERS[-1] + margin, step)
    density = -(z**2) / (2 * variance) + math.log(
        step / (noise_multiplier * math.sqrt(2 * math.pi))
    )
    ratio = np.logaddexp(
        math.log1p(-sample_rate), math.log(sample_rate) + (2 * z - 1) / (2 * variance)
    )
    result = []
    for order in ORDERS:
        end = np.searchsorted(z, order + margin)
        result.append(
            max(float(np.logaddexp.reduce(density[:end] + order * ratio[:end])), 0.0)
            / (order - 1)
        )
    return tuple(result)


def composed_epsilon(releases: Iterable[Releases], delta: float) -> float:
    """Return ε of several kinds of releases from the same units together, at this δ."""
    if not 0 < delta < 1:
        raise OutOfRangeError(f"delta = {delta:g}: more than 0 and less than 1 is needed here")
    total = [0.0] * len(ORDERS)
    for r in releases:
        if r.steps:
            single = _rdp(float(r.noise_multiplier), float(r.sample_rate))
            total = [sum_ + r.steps * value for sum_, value in zip(total, single, strict=True)]
    if not any(total):
        return 0.0
    return max(
        min(
            rdp + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
            for order, rdp in zip(ORDERS, total, strict=True)
        ),
        0.0,
    )


def epsilon_of(lines: Iterable[Mapping[str, Any]], delta: float) -> float:
    """Return ε of all lines (noise, rate, steps) of a ledger or a silo's state; equal steps are summed first."""
    steps: dict[tuple[float, float], int] = {}
    for line in lines:
        kind = float(line["noise"]), float(line["rate"])
        steps[kind] = steps.get(kind, 0) + int(line["steps"])
    releases = [Releases(*kind, count) for kind, count in sorted(steps.items())]
    return composed_epsilon(releases, delta)


def epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return ε after ``steps`` releases, at this δ. Raises OutOfRangeError for a value out of its range."""
    return composed_epsilon([Releases(noise_multiplier, sample_rate, steps)], delta)


def noise_multiplier_for(
    target_epsilon: float, sample_rate: float, steps: int, delta: float
) -> float:
    """Return the smallest noise multiplier, within one part in ten thousand, with ε at most ``target_epsilon``.

    Raises OutOfRangeError where no noise reaches it.
    """

    def reaches(noise: float) -> bool:
        return epsilon(noise, sample_rate, steps, delta) <= target_epsilon

    low = high = LEAST_NOISE
    while not reaches(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise OutOfRangeError(
                f"epsilon = {target_epsilon:g} at delta = {delta:g} is out of reach of any noise"
            )
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
