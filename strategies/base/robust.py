"""Robust aggregation: bounds on the influence of one dishonest or broken silo.

``screen``, which bounds counts and directions as well, is described last.

A silo's *step* is the vector it sends minus the one it was sent: v_i - c_i. A vector that already is a difference is
itself the step.

``clip``: a step that is longer than ``robust-clip`` (τ) times the median of the round's steps is shortened to that,

    v_i <- c_i + (v_i - c_i) min(1, τ m_i / ||v_i - c_i||),   m_i = max(m, 0.02 L) max(1, k_i / k),

m is the (lower) median of the ||v_j - c_j||, and L the median length of the vectors that silos were sent.
k_i = ceil(n_i / B) is a silo's batches per epoch, k their median: a silo with more samples takes more steps and moves
further. The floor 0.02 L is there because a small step is no attack when nearly all silos have stopped moving. Each
vector that travels is clipped separately. A shorter step is unchanged, bit for bit. Norm bounding: Sun et al. 2019,
arXiv 1911.07963; about a centre, Karimireddy, He and Jaggi, ICML 2021, arXiv 2012.10333. There the bound is a number;
here it is a multiple of the round's median, which moves only if half of the silos collude. Methods that forward models,
or aggregate one per silo, exclude a silo beyond the bound instead. Fewer than three steps have no median to compare
with: nothing is clipped among two silos.

Replacements of the mean, for n silos of which f (``robust-attackers``) may send anything, per coordinate or whole:

    trimmed-mean      per coordinate, the mean of the n numbers without the f smallest and the f largest
                      (Yin et al., ICML 2018, arXiv 1803.01498, definition 2, with β = f/n)
    median            per coordinate; for an even number of silos the mean of the two in the middle (definition 1)
    krum              the v_i with the smallest s_i = sum of ||v_i - v_j||² over its n - f - 2 nearest others
                      (Blanchard et al., NeurIPS 2017, arXiv 1703.02757, section 4)
    multi-krum        the mean of the n - f with the smallest s_i (section 4, with m = n - f)
    geometric-median  argmin_v sum_i ||v - v_i||, by the smoothed Weiszfeld algorithm: starting from the mean,
                      v <- sum_i b_i v_i / sum_i b_i,  b_i = 1 / max(ν, ||v - v_i||)
                      (Pillutla, Kakade and Harchaoui 2019, arXiv 1912.13445, algorithm 2)

These rules weight all silos equally, because each silo states its own number of samples. Krum compares steps with all
vectors of a silo concatenated, so that the chosen model and control variate come from one silo. A silo that is not
chosen counts as absent from the round. An f too large for a round's silos (f < n/2, for Krum f < (n - 2)/2) is lowered
to the largest valid one. These rules are no mean: honest hospitals differ, and a rare one is treated like an attacker.
Special cases: f = 0 makes trimmed-mean and multi-krum the unweighted mean. Equal vectors, and a single silo's vector,
are returned unchanged, bit for bit. The median is the trimmed mean with the largest f.

The rule ``screen``: the mean without outliers, exactly the mean if there are none.

Of n silos, f = floor(n / 4) may send anything, and state any number of samples. So a number is compared with the
(f + 1)-th largest, which is at most the largest of an honest silo. Fewer than four silos: f = 0, and ``clip`` alone.

    counts      a silo that is not agreed on is weighted by at most 1.25 times the (f + 1)-th largest count
    directions  g is the geometric median of the steps v_i, each cut to the median length m; p_i = <v_i, g> / (m ||g||)
                of the cut steps, and p the (f + 1)-th smallest; a step with p_i < -b = min(-0.1, 1.5 p) and
                cos(v_i, g) ||g|| < -0.1 m is shortened to b / |p_i| of it, or excluded if it is too long as well
    lengths     r_i is the step's length over its measure (robust.py); a step with r_i > min(τ, 1.5 max(r, 1)), where r
                is the (f + 1)-th largest of them, is cut to r_i = 1

If all steps agree, ||g|| is m. If the model has converged, it is near 0.2 m; honest steps cancel there, so a negative
cosine alone is no sign of an attack. A hospital whose patients differ steps against the others again and again: of it,
and of f liars, there counts what an honest silo's step against the others may be, or 0.1 m. Steps that are too long as
well were of liars, but for one in a thousand. Fewer than eight silos: no direction is compared. A group's mean step
(``secure-robust``) is more alike than a silo's: of three groups or more, f is at least 1, and the eight are silos.

No length, count or direction is weighted by a number that a silo states itself. The rule combines:

* norm bounding (Sun et al. 2019, arXiv 1911.07963);
* clipping below a bound of order statistics (Winsor's mean);
* the geometric median as a reference (Pillutla et al. 2019, arXiv 1912.13445);
* the sign of the cosine to a trusted direction (Cao et al., NDSS 2021, arXiv 2012.13995; there the server has data).

The combination and its constants are silofl's; they were chosen by measurement (docs/reliability.md).

Cost: one Gram matrix of the steps, O(n² Σ) multiplications in float64; everything after it is O(n³).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from partitions.common.adding import added
from partitions.common.errors import UserError
from strategies.base.settings import KRUM


def weighted_mean(vectors: Iterable[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return sum_k w_k v_k / sum_k w_k, added up in the given order (floating-point sums depend on it); no w: all 1."""
    if weights is None:
        vectors = list(vectors)
        weights = [1.0] * len(vectors)
    total = added(weights)
    result: Tensor | None = None
    for vector, weight in zip(vectors, weights, strict=True):
        if result is None:
            result = vector * (weight / total)
        else:
            result.add_(vector, alpha=weight / total)
    if result is None:
        raise UserError("a mean of no vectors")
    return result


EXPLODED = 1000  # times the others' step
# Of the length of the vector that was sent: shorter steps are not used as a measure
STILL = 0.02
CHUNK = 1 << 20  # coordinates that are sorted at a time
# Coordinates whose differences are multiplied at a time: they fit a core's cache
STRIP = 1 << 13
PADDING = 8  # between their rows: rows at a distance of a power of two would evict each other from the cache
SMALLEST = 1e-6  # ν of the geometric median, as a share of the largest distance
ITERATIONS = 100  # upper limit of the geometric median, which converges in about ten


# ---------------------------------------------------------------------------------------------------------------------
# In place of the mean


def trimmed_mean(vectors: Sequence[Tensor], f: int) -> Tensor:
    """Return the mean of each coordinate of n vectors (Σ,) without the f smallest and the f largest; 2 f < n."""
    n, result = len(vectors), torch.empty_like(vectors[0])
    for start in range(0, max(len(result), 1), CHUNK):
        part = slice(start, start + CHUNK)
        kept = torch.stack([v[part] for v in vectors]).sort(0).values[f : n - f]
        # As differences: equal numbers stay unchanged
        result[part] = kept[0] + (kept - kept[0]).mean(0)
    return result


def median(vectors: Sequence[Tensor]) -> Tensor:
    """Return the median of each coordinate of n vectors (Σ,); for even n the mean of the two in the middle."""
    return trimmed_mean(vectors, (len(vectors) - 1) // 2)


def squared_distances(vectors: Sequence[Tensor]) -> Tensor:
    """Return ||v_i - v_j||² (n, n), float64, computed from differences."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for start in range(0, max(len(vectors[0]), 1), CHUNK):
        rows = torch.stack([v[start : start + CHUNK] for v in vectors]).double()
        total += (
            torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
        )
    return total


def krum_scores(squares: Tensor, f: int) -> list[float]:
    """Return s_i from the squared distances (n, n): the sum over the n - f - 2 (at least 1) nearest others."""
    n = len(squares)
    if n == 1:
        return [0.0]
    others = squares.clone().fill_diagonal_(torch.inf).sort(1).values
    scores: list[float] = others[:, : max(n - f - 2, 1)].sum(1).tolist()
    return scores


def krum_choice(rule: str, vectors: Sequence[Tensor], f: int) -> list[int]:
    """Return the indices of the vectors that Krum or Multi-Krum chooses, ascending; ties go to the first."""
    scores = krum_scores(squared_distances(vectors), f)
    order = sorted(range(len(vectors)), key=lambda i: scores[i])
    return sorted(order[: 1 if rule == "krum" else len(vectors) - f])


def median_weights(squares: Tensor) -> Tensor:
    """Return a (n,), float64, of the geometric median sum_i a_i v_i, from the squared distances d (n, n) alone.

    In every iteration v is sum_i a_i v_i, so that ||v - v_j||² = sum_i a_i d_ij - (1/2) sum_ik a_i a_k d_ik.
    """
    n, nu = len(squares), SMALLEST * float(squares.max().sqrt()) or 1.0
    a = torch.full((n,), 1 / n, dtype=torch.float64)
    for _ in range(ITERATIONS):
        inner = squares @ a
        # Equals 1 / (inner - a @ inner / 2).clamp(min=nu * nu).sqrt(), in fewer calls: with few numbers calls dominate.
        b = inner.sub(a @ inner, alpha=0.5).clamp_(min=nu * nu).sqrt_().reciprocal_()
        before, a = a, b / b.sum()
        if float((a - before).abs().max()) < 1e-9:
            break
    return a


def geometric_median(vectors: Sequence[Tensor]) -> Tensor:
    """Return argmin_v sum_i ||v - v_i|| (Σ,).

    It is summed as differences from the first vector, so that equal vectors are returned unchanged.
    """
    result = vectors[0].clone()
    for weight, vector in zip(
        median_weights(squared_distances(vectors)).tolist(), vectors, strict=True
    ):
        result.add_(vector - vectors[0], alpha=weight)
    return result


def breakdown_point(rule: str, n: int, f: int) -> int:
    """Return the largest number of attackers, up to f, that a rule tolerates among n silos."""
    return max(min(f, (n - 3) // 2 if rule in KRUM else (n - 1) // 2), 0)


def estimate(rule: str, vectors: Sequence[Tensor], f: int) -> Tensor:
    """Return the estimate (Σ,) that a rule other than Krum puts in place of the mean of the vectors (Σ,)."""
    if rule == "geometric-median":
        return geometric_median(vectors)
    return (
        median(vectors)
        if rule == "median"
        else trimmed_mean(vectors, breakdown_point(rule, len(vectors), f))
    )


# ---------------------------------------------------------------------------------------------------------------------
# Steps. ``norms`` holds, per vector name, the length of each silo's step.

Norms = Mapping[str, Mapping[str, float]]


def gram_of(vectors: Sequence[Tensor], centres: Sequence[Tensor | None]) -> Tensor:
    """Return <v_i - c_i, v_j - c_j> (n, n), float64, of n vectors (Σ,); without a centre, c_i = 0.

    It works strip by strip: whole differences take several times as long to compute as to multiply.
    """
    n, length, device = len(vectors), len(vectors[0]), vectors[0].device
    total = torch.zeros(n, n, dtype=torch.float64, device=device)
    # Reused: fresh pages are slow
    memory = torch.empty(n, STRIP + PADDING, dtype=torch.float64, device=device)
    for start in range(0, length, STRIP):
        part = slice(start, start + STRIP)
        rows = memory[:, : min(STRIP, length - start)]
        for row, vector, centre in zip(rows, vectors, centres, strict=True):
            row.copy_(
                vector[part] if centre is None else vector[part] - centre[part].to(device)
            )
        total += rows @ rows.T
    return total.cpu()


def units(
    norms: Norms, sent: Mapping[str, float], batches: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Return the measure of each silo's step: max(m, 0.02 L) max(1, k_i / k).

    ``sent``: L, per vector; ``batches``: k_i, by silo. With one or two steps, L is added to those the median is of.
    """
    measures = {}
    for name, of in norms.items():
        length = sent.get(name, 0.0)
        middle = statistics.median_low(of.values() if len(of) > 2 else [*of.values(), length])
        usual = statistics.median_low(batches[silo] for silo in of)
        longest = max(middle, STILL * length)
        measures[name] = {silo: longest * max(1.0, batches[silo] / usual) for silo in of}
    return measures


def find_diverging(norms: Norms, units: Norms) -> dict[str, str]:
    """Return silos with a step over a thousand times its measure (which counts as at least 1), with the reasons."""
    reasons: dict[str, str] = {}
    for name, of in norms.items():
        for silo, norm in of.items():
            if norm > EXPLODED * max(units[name][silo], 1.0):
                reason = (
                    f"{display_name(name)} exploded: its step of length {norm:.3g} "
                    f"is over {EXPLODED} times the others'"
                )
                reasons.setdefault(silo, reason)
    return reasons


def outliers(
    norms: Norms, units: Norms, factor: float | Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return by silo and vector the ratio of a step to its measure, if above ``factor`` (a number, or per vector)."""
    ratios: dict[str, dict[str, float]] = {}
    for name, of in norms.items():
        most = factor if isinstance(factor, float | int) else factor[name]
        for silo, norm in of.items():
            if len(of) > 2 and norm > most * units[name][silo] > 0:
                ratios.setdefault(silo, {})[name] = norm / units[name][silo]
    return ratios


def clip_step(vector: Tensor, centre: Tensor | None, share: float) -> Tensor:
    """Return the vector with this share of its step."""
    return vector * share if centre is None else centre + (vector - centre) * share


def display_name(name: str) -> str:
    return "the model" if name in ("model", "shared", "layers") else f"'{name}'"


def excess(ratios: Mapping[str, float], bound: str) -> str:
    """Return a text that names a silo's steps that were too long, with their ratios."""
    parts = [
        f"{display_name(name)} moved {ratio:.3g} times as far as the median silo's"
        for name, ratio in ratios.items()
    ]
    return f"{', '.join(parts)} ({bound})"


COUNT_SLACK = 1.25  # times the (f + 1)-th largest count
LENGTH_SLACK = 1.5  # times the (f + 1)-th largest length
# Silos: with fewer, an honest silo that differs cannot be distinguished from an attacker
LEAST = 8
OPPOSED = 0.1  # times the median length: a step against g may be as long
OPPOSED_SLACK = 1.5  # times the (f + 1)-th longest against g


def tolerated_faults(n: int, silos: int = 0) -> int:
    """Return f, the number among n that may send anything: silos, or groups of so many ``silos``, then 1 from 3 on."""
    return max(n // 4, int(n > 2 and silos > n))


def opposable(n: int, silos: int = 0) -> int:
    """Return how many of n may be bounded because of their direction: 0 of fewer than eight silos."""
    return tolerated_faults(n, silos) if max(n, silos) >= LEAST else 0


def next_largest(values: Collection[float], f: int) -> float:
    """Return the (f + 1)-th largest value."""
    return sorted(values, reverse=True)[f]


def plausible_counts(counts: Mapping[str, int], agreed: Collection[str]) -> dict[str, int]:
    """Return the counts by silo; those not agreed on are at most 1.25 times the (f + 1)-th largest."""
    if not counts:
        return {}
    most = max(
        int(COUNT_SLACK * next_largest(counts.values(), tolerated_faults(len(counts)))), 1
    )
    return {
        silo: count if silo in agreed else min(count, most) for silo, count in counts.items()
    }


def length_limits(norms: Norms, units: Norms, clip: float, f: int) -> dict[str, float]:
    """Return, per vector, the longest step that is not cut, in multiples of its measure."""
    limits = {}
    for name, of in norms.items():
        ratios = [
            norm / units[name][silo] if units[name][silo] > 0 else 0.0
            for silo, norm in of.items()
        ]
        limits[name] = min(
            clip, LENGTH_SLACK * max(next_largest(ratios, min(f, len(ratios) - 1)), 1.0)
        )
    return limits


def find_opposing(gram: Tensor, f: int) -> dict[int, tuple[float, float]]:
    """Return the indices of the steps that oppose the others too far, at most f: their cosines and what counts of them.

    ``gram``: from :func:`~strategies.base.robust.gram_of`.
    """
    lengths = gram.diagonal().clamp(min=0).sqrt()
    middle = lengths.median()
    shares = torch.where(lengths > middle, middle / lengths, 1.0)
    gram = gram * shares[:, None] * shares
    square = gram.diagonal().clamp(min=0)
    weights = median_weights((square[:, None] + square - 2 * gram).clamp(min=0))
    length = (weights @ gram @ weights).clamp(min=0).sqrt()
    along = gram @ weights / length
    cosines = torch.nan_to_num(along / square.sqrt()).tolist()
    projections = torch.nan_to_num(along / middle).tolist()
    most = max(OPPOSED, -OPPOSED_SLACK * sorted(projections)[f])
    return {
        i: (cosine, most / -p)
        for i, (cosine, p) in enumerate(zip(cosines, projections, strict=True))
        if p < -most and cosine * float(length) < -OPPOSED * float(middle)
    }
