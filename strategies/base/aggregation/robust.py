"""Robust aggregation: what one silo that lies, or is broken, can do to the others has a bound.

``screen``, which bounds counts and directions as well, is in ``screening.py``.

A silo's *step* is what it sends less what it was sent: v_i - c_i (where what it sends is a difference already, that).

``clip``: a step that is longer than ``robust-clip`` (τ) times the median of the round's steps is shortened to that,

    v_i <- c_i + (v_i - c_i) min(1, τ m_i / ||v_i - c_i||),   m_i = max(m, 0.02 L) max(1, k_i / k),

m the (lower) median of the ||v_j - c_j||, L that of the lengths of what silos were sent, k_i = ceil(n_i / B) a silo's
batches per epoch, k their median: a silo with more samples takes more steps and goes further. Where nearly all silos
have stopped moving, a small step of one silo is no attack. Each vector that travels is clipped for itself. A shorter
step stays untouched, to the bit. Norm bounding: Sun et al. 2019, arXiv 1911.07963; about a centre, Karimireddy, He and
Jaggi, ICML 2021, arXiv 2012.10333. There the bound is a number; here it is a multiple of the round's median, which half
of the silos would have to move together. Methods that forward models, or aggregate one per silo, exclude a silo beyond
the bound instead. Fewer than three steps have no middle: nothing is clipped among two silos.

In place of the mean, n silos of which f (``robust-attackers``) may send anything, coordinate by coordinate or whole:

    trimmed-mean      of each coordinate's n numbers without the f least and the f greatest, the mean
                      (Yin et al., ICML 2018, arXiv 1803.01498, definition 2, with β = f/n)
    median            of each coordinate; of an even number of silos the mean of the two in the middle (definition 1)
    krum              the v_i of the least s_i = sum of ||v_i - v_j||² over its n - f - 2 nearest others
                      (Blanchard et al., NeurIPS 2017, arXiv 1703.02757, section 4)
    multi-krum        the mean of the n - f with the least s_i (section 4, with m = n - f)
    geometric-median  argmin_v sum_i ||v - v_i||, by the smoothed Weiszfeld algorithm: from the mean on,
                      v <- sum_i b_i v_i / sum_i b_i,  b_i = 1 / max(ν, ||v - v_i||)
                      (Pillutla, Kakade and Harchaoui 2019, arXiv 1912.13445, algorithm 2)

These count all silos alike: the number of samples is a silo's own word. Krum compares steps, all vectors of a silo
joined, so that the model and the control variate that are taken are one silo's; who is not chosen counts as absent from
the round. An f too large for the silos of a round (f < n/2, for Krum f < (n - 2)/2) is lowered to the largest that is
not. They are no mean: where honest silos differ, as hospitals do, a rare one is treated as an attacker is.
Special cases: f = 0 makes trimmed-mean and multi-krum the mean of silos that count alike; equal vectors, and one silo,
come out as they are, to the bit. The median is the trimmed mean with the greatest f.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strategies.base.settings import KRUM

EXPLODED = 1000  # times the others' step
STILL = 0.02  # of the length of what was sent: a step below that is no measure of others
CHUNK = 1 << 20  # coordinates that are sorted at a time
STRIP = 1 << 13  # coordinates whose differences are multiplied at a time: what a core's cache holds
PADDING = 8  # between their rows: at distances of a power of two they would displace each other from the cache
SMALLEST = 1e-6  # ν of the geometric median, as a share of the largest distance
ITERATIONS = 100  # most of the geometric median; it is there in some ten


# ---------------------------------------------------------------------------------------------------------------------
# In place of the mean


def trimmed_mean(vectors: Sequence[Tensor], f: int) -> Tensor:
    """Return the mean of each coordinate of n vectors (Σ,) without the f least and the f greatest; 2 f < n."""
    n, result = len(vectors), torch.empty_like(vectors[0])
    for start in range(0, max(len(result), 1), CHUNK):
        part = slice(start, start + CHUNK)
        kept = torch.stack([v[part] for v in vectors]).sort(0).values[f : n - f]
        result[part] = kept[0] + (kept - kept[0]).mean(0)  # as differences: equal numbers stay what they are
    return result


def median(vectors: Sequence[Tensor]) -> Tensor:
    """Return the middle of each coordinate of n vectors (Σ,); of an even number the mean of the two in the middle."""
    return trimmed_mean(vectors, (len(vectors) - 1) // 2)


def squared_distances(vectors: Sequence[Tensor]) -> Tensor:
    """||v_i - v_j||² (n, n), float64, by differences."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for start in range(0, max(len(vectors[0]), 1), CHUNK):
        rows = torch.stack([v[start : start + CHUNK] for v in vectors]).double()
        total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
    return total


def krum_scores(squares: Tensor, f: int) -> list[float]:
    """s_i from the squared distances (n, n): the sum over the n - f - 2 nearest others, of at least one."""
    n = len(squares)
    if n == 1:
        return [0.0]
    others = squares.clone().fill_diagonal_(torch.inf).sort(1).values
    scores: list[float] = others[:, : max(n - f - 2, 1)].sum(1).tolist()
    return scores


def chosen(rule: str, vectors: Sequence[Tensor], f: int) -> list[int]:
    """The places of the vectors that Krum or Multi-Krum takes, ascending; of equal scores the first."""
    scores = krum_scores(squared_distances(vectors), f)
    order = sorted(range(len(vectors)), key=lambda i: scores[i])
    return sorted(order[: 1 if rule == "krum" else len(vectors) - f])


def median_weights(squares: Tensor) -> Tensor:
    """a (n,), float64, of the geometric median sum_i a_i v_i, from the squared distances d (n, n) alone.

    v is sum_i a_i v_i all along, so that ||v - v_j||² = sum_i a_i d_ij - (1/2) sum_ik a_i a_k d_ik.
    """
    n, nu = len(squares), SMALLEST * float(squares.max().sqrt()) or 1.0
    a = torch.full((n,), 1 / n, dtype=torch.float64)
    for _ in range(ITERATIONS):
        inner = squares @ a
        # As 1 / (inner - a @ inner / 2).clamp(min=nu * nu).sqrt(): of few numbers, each operation costs its call.
        b = inner.sub(a @ inner, alpha=0.5).clamp_(min=nu * nu).sqrt_().reciprocal_()
        before, a = a, b / b.sum()
        if float((a - before).abs().max()) < 1e-9:
            break
    return a


def geometric_median(vectors: Sequence[Tensor]) -> Tensor:
    """argmin_v sum_i ||v - v_i|| (Σ,).

    It is added up as differences from the first, so that equal vectors come out as they are.
    """
    result = vectors[0].clone()
    for weight, vector in zip(median_weights(squared_distances(vectors)).tolist(), vectors, strict=True):
        result.add_(vector - vectors[0], alpha=weight)
    return result


def breakdown_point(rule: str, n: int, f: int) -> int:
    """Return the greatest number of attackers, up to f, that a rule tolerates among n silos."""
    return max(min(f, (n - 3) // 2 if rule in KRUM else (n - 1) // 2), 0)


def estimate(rule: str, vectors: Sequence[Tensor], f: int) -> Tensor:
    """What a rule that is no Krum takes in place of the mean of the vectors (Σ,)."""
    if rule == "geometric-median":
        return geometric_median(vectors)
    return median(vectors) if rule == "median" else trimmed_mean(vectors, breakdown_point(rule, len(vectors), f))


# ---------------------------------------------------------------------------------------------------------------------
# Steps. ``norms`` holds of each vector that travels, by its name, the length of each silo's step.

Norms = Mapping[str, Mapping[str, float]]


def gram_of(vectors: Sequence[Tensor], centres: Sequence[Tensor | None]) -> Tensor:
    """<v_i - c_i, v_j - c_j> (n, n), float64, of n vectors (Σ,); without a centre, c_i = 0.

    Strip by strip: to make whole differences takes several times as long as to multiply them.
    """
    n, length, device = len(vectors), len(vectors[0]), vectors[0].device
    total = torch.zeros(n, n, dtype=torch.float64, device=device)
    memory = torch.empty(n, STRIP + PADDING, dtype=torch.float64, device=device)  # made once: fresh pages are slow
    for start in range(0, length, STRIP):
        part = slice(start, start + STRIP)
        rows = memory[:, : min(STRIP, length - start)]
        for row, vector, centre in zip(rows, vectors, centres, strict=True):
            row.copy_(vector[part] if centre is None else vector[part] - centre[part].to(device))
        total += rows @ rows.T
    return total.cpu()


def units(norms: Norms, sent: Mapping[str, float], batches: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """What each silo's step is measured by: the longer of m and 2 % of L, times max(1, k_i / k).

    ``sent``: L, per vector; ``batches``: k_i, by silo. Of one or two steps, which have no middle, L is one more.
    """
    found = {}
    for name, of in norms.items():
        length = sent.get(name, 0.0)
        middle = statistics.median_low(of.values() if len(of) > 2 else [*of.values(), length])
        usual = statistics.median_low(batches[silo] for silo in of)
        longest = max(middle, STILL * length)
        found[name] = {silo: longest * max(1.0, batches[silo] / usual) for silo in of}
    return found


def diverging(norms: Norms, units: Norms) -> dict[str, str]:
    """Silos with a step over a thousand times its measure, which counts as 1 at least, and why."""
    found: dict[str, str] = {}
    for name, of in norms.items():
        for silo, norm in of.items():
            if norm > EXPLODED * max(units[name][silo], 1.0):
                reason = f"{called(name)} exploded: its step of length {norm:.3g} is over {EXPLODED} times the others'"
                found.setdefault(silo, reason)
    return found


def outliers(norms: Norms, units: Norms, factor: float | Mapping[str, float]) -> dict[str, dict[str, float]]:
    """By silo and vector how often its step has its measure, where that is more than ``factor`` (maybe per vector)."""
    found: dict[str, dict[str, float]] = {}
    for name, of in norms.items():
        most = factor if isinstance(factor, float | int) else factor[name]
        for silo, norm in of.items():
            if len(of) > 2 and norm > most * units[name][silo] > 0:
                found.setdefault(silo, {})[name] = norm / units[name][silo]
    return found


def clipped(vector: Tensor, centre: Tensor | None, share: float) -> Tensor:
    """The vector with this share of its step."""
    return vector * share if centre is None else centre + (vector - centre) * share


def called(name: str) -> str:
    return "the model" if name in ("model", "shared", "layers") else f"'{name}'"


def excess(ratios: Mapping[str, float], bound: str) -> str:
    """Which of a silo's steps were too long, and how much, in words."""
    parts = [f"{called(name)} moved {ratio:.3g} times as far as the median silo's" for name, ratio in ratios.items()]
    return f"{', '.join(parts)} ({bound})"
