"""How often the 95 % intervals of a silo's score hold the truth, on simulated data whose truth is known.

    python -m benchmarks.intervals [--draws 4000]

One line per kind of score and size of the test part: the share of draws whose interval holds the truth. Draws without a
score (no two patients to compare) do not count. docs/tasks.md has the figures; two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import numpy as np
import torch

from benchmarks.common import command_line
from models.intervals import areas, of_area, of_pairs, of_share
from models.tasks import concordance, task_of

Interval = tuple[float, float]
Generator = np.random.Generator


def distance(true: float) -> float:
    """Return how far apart the normal scores of both kinds are, for this true area."""
    return NormalDist().inv_cdf(true) * 2**0.5


def auc(positives: int, negatives: int, true: float, rng: Generator) -> Interval:
    positive = np.arange(positives + negatives) < positives
    scores = rng.normal(size=len(positive)) + distance(true) * positive
    area, error, few = areas(scores, positive)
    return of_area(area, float((error**2).sum()) + few, positives, negatives)


def mean_auc(n: int, findings: int, true: float, share: float, rng: Generator) -> Interval:
    """Draw findings of a given share; half of a score's variance is common to all findings."""
    y = (rng.random((n, findings)) < share).astype(float)
    scores = (rng.normal(size=(n, 1)) + rng.normal(size=(n, findings))) / 2**0.5
    return measured("multilabel", scores + distance(true) * y, y)


def mean_auc_with_one_rare(
    positives: int, findings: int, true: float, rng: Generator
) -> Interval:
    """Draw 70 samples; the first finding has so few positives, each other 20."""
    counts = np.array([positives, *(findings - 1) * [20]])
    y = (np.arange(70)[:, None] < counts).astype(float)
    return measured("multilabel", rng.normal(size=y.shape) + distance(true) * y, y)


def few_events(events: int, n: int, true: float, rng: Generator) -> Interval:
    """Draw a C-index: of ``events`` of n patients the event comes first, of the others none."""
    event, time = np.arange(n) < events, np.arange(n) + 1.0
    risk = rng.normal(size=n) + distance(true) * event
    return of_pairs(*concordance(risk, np.where(event, 1.0, time), event))[1]


def r2(n: int, true: float, rng: Generator) -> Interval:
    predicted = rng.normal(size=(n, 1)) * true**0.5
    rest = rng.normal(size=(n, 1)) * (1 - true) ** 0.5
    return measured("regression", predicted, predicted + rest)


def measured(task: str, outputs: np.ndarray, y: np.ndarray) -> Interval:
    metrics = task_of(task).measure(torch.tensor(outputs), torch.tensor(y))
    return metrics["score_low"], metrics["score_high"]


def cohort(
    n: int, censored: float, rng: Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw log risks, times and events of patients; ``censored`` is the mean time until censoring."""
    risk = rng.normal(size=n)
    time, lost = rng.exponential(np.exp(-risk)), rng.exponential(censored, size=n)
    return risk, np.minimum(time, lost), time <= lost


def c_index(n: int, censored: float, rng: Generator) -> Interval:
    return of_pairs(*concordance(*cohort(n, censored, rng)))[1]


def true_c_index(censored: float) -> float:
    concordant, comparable = concordance(*cohort(4000, censored, np.random.default_rng(0)))
    return float(concordant.sum() / comparable.sum())


def dice(n: int, rng: Generator) -> Interval:
    """Draw pictures' coefficients from Beta(8, 2), with mean .8."""
    of = rng.beta(8, 2, size=n)
    return of_share(float(of.mean()), float(of.var(ddof=1)) / n, n)


CASES: list[tuple[str, Callable[[Generator], Interval], float]] = [
    *(
        (f"AUC, {p} positive, {n} negative, true {true}", partial(auc, p, n, true), true)
        for p, n, true in (
            (1, 50, 0.75),
            (1, 200, 0.75),
            (1, 50, 0.95),
            (2, 50, 0.75),
            (3, 50, 0.75),
            (20, 80, 0.76),
            (10, 30, 0.86),
            (5, 20, 0.94),
            (8, 8, 0.96),
            (8, 8, 0.8),
            (200, 200, 0.9),
        )
    ),
    ("mean of 5 AUCs, n = 60", partial(mean_auc, 60, 5, 0.85, 0.2), 0.85),
    ("mean of 14 AUCs, n = 200", partial(mean_auc, 200, 14, 0.8, 0.1), 0.8),
    *(
        (
            f"mean of {k} AUCs, one of {p} positives, true {true}",
            partial(mean_auc_with_one_rare, p, k, true),
            true,
        )
        for p, k, true in ((1, 2, 0.75), (1, 2, 0.95), (1, 5, 0.85), (2, 5, 0.85), (3, 5, 0.85))
    ),
    *(
        (f"R2 {true}, n = {n}", partial(r2, n, true), true)
        for n, true in ((20, 0.5), (50, 0.5), (200, 0.5), (50, 0.9))
    ),
    *(
        (
            f"C-index, n = {n}, lost after {censored}",
            partial(c_index, n, censored),
            true_c_index(censored),
        )
        for n, censored in ((20, 0.5), (40, 0.3), (100, 0.3), (100, 2.0))
    ),
    *(
        (
            f"C-index, {k} of 50 with an event, true {true}",
            partial(few_events, k, 50, true),
            true,
        )
        for k, true in ((1, 0.75), (1, 0.9), (2, 0.75), (3, 0.75), (5, 0.75))
    ),
    *((f"Dice, {n} pictures", partial(dice, n), 0.8) for n in (5, 10, 20, 50)),
]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--draws", type=int, default=4000)
    draws = parser.parse_args().draws
    for name, draw, true in CASES:
        rng = np.random.default_rng(3)
        ends = np.array([draw(rng) for _ in range(draws)])
        low, high = ends[~np.isnan(ends[:, 0])].T
        print(f"{name:50} {np.mean((low <= true) & (true <= high)):.3f}", flush=True)


if __name__ == "__main__":
    main()
