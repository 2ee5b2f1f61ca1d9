"""The rule ``screen``: the mean without outliers, exactly the mean if there are none.

Of n silos, f = floor(n / 4) may send anything, and state any number of samples. So a number is compared with the
(f + 1)-th largest, which is at most the largest of an honest silo. Fewer than four silos: f = 0, and ``clip`` alone.

    counts      a silo that is not agreed on is weighted by at most 1.25 times the (f + 1)-th largest count
    directions  g is the geometric median of the steps v_i, each cut to the median length m; the silo with the smallest
                cosine to g is excluded from the round if cos(v_i, g) ||g|| < -0.1 m; this is repeated with a new g,
                up to f times
    lengths     r_i is the step's length over its measure (robust.py); a step with r_i > min(τ, 1.5 max(r, 1)), where r
                is the (f + 1)-th largest of them, is cut to r_i = 1

If all steps agree, ||g|| is m. If honest silos differ, or the model has converged, it is near 0.2 m. There honest steps
oppose each other and cancel, so a negative cosine alone is no sign of an attack. An attack that moves the model away
from such a point makes the honest steps agree again. Fewer than eight silos: none is excluded.

No length, count or direction is weighted by a number that a silo states itself. The rule combines:

* norm bounding (Sun et al. 2019, arXiv 1911.07963);
* clipping below a bound of order statistics (Winsor's mean);
* the geometric median as a reference (Pillutla et al. 2019, arXiv 1912.13445);
* the sign of the cosine to a trusted direction (Cao et al., NDSS 2021, arXiv 2012.13995; there the server has data).

The combination and its constants are silofl's; they were chosen by measurement (docs/reliability.md).

Cost: one Gram matrix of the steps, O(n² Σ) multiplications in float64; everything after it is O(n³).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from strategies.base.aggregation.robust import Norms, median_weights

COUNT_SLACK = 1.25  # times the (f + 1)-th largest count
LENGTH_SLACK = 1.5  # times the (f + 1)-th largest length
LEAST = 8  # silos: with fewer, an honest silo that differs cannot be distinguished from an attacker
OPPOSED = 0.1  # times the median length: a longer projection against g opposes it


def tolerated(n: int) -> int:
    """Return f, the number of silos among n that may send anything."""
    return n // 4


def excludable(n: int) -> int:
    """Return how many of n silos may be excluded because of their direction: 0 of fewer than eight."""
    return tolerated(n) if n >= LEAST else 0


def next_largest(values: Collection[float], f: int) -> float:
    """Return the (f + 1)-th largest value."""
    return sorted(values, reverse=True)[f]


def plausible_counts(counts: Mapping[str, int], agreed: Collection[str]) -> dict[str, int]:
    """Return the counts by silo; those not agreed on are at most 1.25 times the (f + 1)-th largest."""
    if not counts:
        return {}
    most = max(int(COUNT_SLACK * next_largest(counts.values(), tolerated(len(counts)))), 1)
    return {silo: count if silo in agreed else min(count, most) for silo, count in counts.items()}


def length_limits(norms: Norms, units: Norms, clip: float, f: int) -> dict[str, float]:
    """Return, per vector, the longest step that is not cut, in multiples of its measure."""
    limits = {}
    for name, of in norms.items():
        ratios = [norm / units[name][silo] if units[name][silo] > 0 else 0.0 for silo, norm in of.items()]
        limits[name] = min(clip, LENGTH_SLACK * max(next_largest(ratios, min(f, len(ratios) - 1)), 1.0))
    return limits


def opposing(gram: Tensor, f: int) -> dict[int, float]:
    """Return the indices of up to f steps that oppose the others, with their cosines.

    ``gram``: from :func:`~strategies.base.aggregation.robust.gram_of`.
    """
    lengths = gram.diagonal().clamp(min=0).sqrt()
    middle = lengths.median()
    shares = torch.where(lengths > middle, middle / lengths, 1.0)
    gram = gram * shares[:, None] * shares
    kept, found = list(range(len(gram))), dict[int, float]()
    for _ in range(f):
        square = gram.diagonal()
        weights = median_weights((square[:, None] + square - 2 * gram).clamp(min=0))
        dots, length = gram @ weights, (weights @ gram @ weights).clamp(min=0).sqrt()
        cosines = torch.nan_to_num(dots / (square.clamp(min=0).sqrt() * length)).tolist()
        worst = cosines.index(min(cosines))
        if not cosines[worst] * float(length) < -OPPOSED * float(middle):
            break
        found[kept.pop(worst)] = cosines[worst]
        others = [i for i in range(len(gram)) if i != worst]
        gram = gram[others][:, others]
    return found
