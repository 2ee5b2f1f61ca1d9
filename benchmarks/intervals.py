"""How often the 95 % intervals of a silo's score hold the truth, on simulated data whose truth is known.

    python -m benchmarks.intervals [--draws 4000]

One line per kind of score and size of the test part: the share of draws whose interval holds the truth. Draws without a
score (no two patients to compare) do not count. docs/tasks.md has the figures; two minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import torch

from models.intervals import areas, of_area, of_pairs, of_share
from models.tasks import concordance, task_of

Interval = tuple[float, float]
Draw = Callable[[np.random.Generator], Interval]


def auc(positives: int, negatives: int, true: float) -> Draw:
    """Return draws with normal scores of both kinds, at the distance that gives the true area."""
    positive = np.arange(positives + negatives) < positives
    apart = NormalDist().inv_cdf(true) * 2**0.5

    def draw(rng: np.random.Generator) -> Interval:
        area, error, few = areas(rng.normal(size=len(positive)) + apart * positive, positive)
        return of_area(area, float((error**2).sum()) + few, positives, negatives)

    return draw


def mean_auc(n: int, findings: int, true: float, share: float) -> Draw:
    """Return draws with findings of a given share; half of a score's variance is common to all findings."""
    apart = NormalDist().inv_cdf(true) * 2**0.5

    def draw(rng: np.random.Generator) -> Interval:
        y = (rng.random((n, findings)) < share).astype(float)
        scores = (rng.normal(size=(n, 1)) + rng.normal(size=(n, findings))) / 2**0.5 + apart * y
        return measured("multilabel", scores, y)

    return draw


def mean_auc_with_one_rare(positives: int, findings: int, true: float) -> Draw:
    """Return draws of 70 samples; the first finding has so few positives, each other 20."""
    apart = NormalDist().inv_cdf(true) * 2**0.5
    y = np.array([np.arange(50 + 20) < p for p in (positives, *(findings - 1) * [20])]).T * 1.0

    def draw(rng: np.random.Generator) -> Interval:
        return measured("multilabel", rng.normal(size=y.shape) + apart * y, y)

    return draw


def few_events(events: int, later: int, true: float) -> Draw:
    """Return draws of a C-index: of ``events`` patients the event comes first, of the others none."""
    event = np.arange(events + later) < events
    time, apart = np.arange(events + later) + 1.0, NormalDist().inv_cdf(true) * 2**0.5

    def draw(rng: np.random.Generator) -> Interval:
        risk = rng.normal(size=len(event)) + apart * event
        return of_pairs(*concordance(risk, np.where(event, 1.0, time), event))[1]

    return draw


def r2(n: int, true: float) -> Draw:
    def draw(rng: np.random.Generator) -> Interval:
        predicted = rng.normal(size=(n, 1)) * true**0.5
        return measured(
            "regression", predicted, predicted + rng.normal(size=(n, 1)) * (1 - true) ** 0.5
        )

    return draw


def measured(task: str, outputs: np.ndarray, y: np.ndarray) -> Interval:
    metrics = task_of(task).measure(torch.tensor(outputs), torch.tensor(y))
    return metrics["score_low"], metrics["score_high"]


def cohort(
    rng: np.random.Generator, n: int, censored: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw log risks, times and events of patients; ``censored`` is the mean time until censoring."""
    risk = rng.normal(size=n)
    time, lost = rng.exponential(np.exp(-risk)), rng.exponential(censored, size=n)
    return risk, np.minimum(time, lost), time <= lost


def c_index(n: int, censored: float) -> Draw:
    def draw(rng: np.random.Generator) -> Interval:
        return of_pairs(*concordance(*cohort(rng, n, censored)))[1]

    return draw


def true_c_index(censored: float) -> float:
    concordant, comparable = concordance(*cohort(np.random.default_rng(0), 4000, censored))
    return float(concordant.sum() / comparable.sum())


def dice(n: int) -> Draw:
    """Return draws with pictures' coefficients from Beta(8, 2), with mean .8."""

    def draw(rng: np.random.Generator) -> Interval:
        of = rng.beta(8, 2, size=n)
        return of_share(float(of.mean()), float(of.var(ddof=1)) / n, n)

    return draw


CASES: list[tuple[str, Draw, float]] = [
    *(
        (f"AUC, {p} positive, {n} negative, true {true}", auc(p, n, true), true)
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
    ("mean of 5 AUCs, n = 60", mean_auc(60, 5, 0.85, 0.2), 0.85),
    ("mean of 14 AUCs, n = 200", mean_auc(200, 14, 0.8, 0.1), 0.8),
    *(
        (
            f"mean of {k} AUCs, one of {p} positives, true {true}",
            mean_auc_with_one_rare(p, k, true),
            true,
        )
        for p, k, true in ((1, 2, 0.75), (1, 2, 0.95), (1, 5, 0.85), (2, 5, 0.85), (3, 5, 0.85))
    ),
    *(
        (f"R2 {true}, n = {n}", r2(n, true), true)
        for n, true in ((20, 0.5), (50, 0.5), (200, 0.5), (50, 0.9))
    ),
    *(
        (
            f"C-index, n = {n}, lost after {censored}",
            c_index(n, censored),
            true_c_index(censored),
        )
        for n, censored in ((20, 0.5), (40, 0.3), (100, 0.3), (100, 2.0))
    ),
    *(
        (f"C-index, {k} of {n} with an event, true {true}", few_events(k, n - k, true), true)
        for k, n, true in (
            (1, 50, 0.75),
            (1, 50, 0.9),
            (2, 50, 0.75),
            (3, 50, 0.75),
            (5, 50, 0.75),
        )
    ),
    *((f"Dice, {n} pictures", dice(n), 0.8) for n in (5, 10, 20, 50)),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=4000)
    draws = parser.parse_args().draws
    for name, draw, true in CASES:
        rng = np.random.default_rng(3)
        drawn = [(low, high) for low, high in (draw(rng) for _ in range(draws)) if low == low]
        print(
            f"{name:50} {np.mean([low <= true <= high for low, high in drawn]):.3f}", flush=True
        )


if __name__ == "__main__":
    main()
