"""How often the report's intervals hold the truth, how often it claims what is not so, and how often it sees a gain.

    python -m benchmarks.coverage [--draws 4000] [--part power|settings|seeds|silo]

Hospitals are simulated whose truth is known. Both models of a hospital are tested on the same patients: whether a
patient is classified correctly follows a normal variable of each model, and the two correlate by one half. The report
sees accuracies and numbers of patients.

* ``power``: gains of 5 points on average that vary by 3 points between hospitals of 30 to 200 test patients; every seed
  splits anew. The share of studies in which a gain is shown; coverage; claims of a gain or a loss where there is none.
* ``settings``: coverage, and claims where the mean gain is zero. Gains vary by 0, 3 or 10 points (normal), or skewed
  (exponential); or one hospital of each study gains or loses 35 points more than the others; or each hospital does so
  with a probability of one in seven (``rare``: studies that have drawn one, and all studies).
* ``seeds``: seeds that move the gains of all hospitals together: coverage of the mean of these seeds, and of all seeds.
* ``silo``: one hospital's gain over 1 to 10 seeds that share their test patients.

docs/uncertainty.md has the figures; half an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from scipy import special

from benchmarks.common import table
from server.planning.power import CORRELATION
from server.report import inference
from server.report.inference import (
    Gain,
    Interval,
    Seeds,
    accuracy_interval,
    from_intervals,
    over_hospitals,
    silo_interval,
)

Array = npt.NDArray[Any]
Generator = np.random.Generator
Study = list[Seeds]

HOSPITALS = (3, 5, 6, 8, 12)
PATIENTS = (20, 50, 100, 200)
BASE = 0.6  # accuracy of the baseline's model
FAR = 0.35  # how much more than the others a hospital gains that stands out
RARE = 1 / 7


def study(rng: Generator, gains: Array, patients: Array | int, *, shared: bool = True) -> Study:
    """Return differences of accuracies on simulated patients; ``gains`` (hospitals, seeds) are the true ones.

    ``shared``: whether all seeds have the same test patients.
    """
    seeds_of: Study = []
    for row, n in zip(gains, np.broadcast_to(patients, len(gains)).tolist(), strict=True):
        base = rng.standard_normal((1 if shared else len(row), n))
        noise = rng.standard_normal(base.shape)
        mine = CORRELATION * base + np.sqrt(1 - CORRELATION**2) * noise
        right = (mine < special.ndtri(np.clip(BASE + row, 0.01, 0.99))[:, None]).mean(axis=1)
        before = np.broadcast_to((base < special.ndtri(BASE)).mean(axis=1), right.shape)
        pairs = zip(right.tolist(), before.tolist(), strict=True)
        seeds_of.append({s: difference(a, b, n) for s, (a, b) in enumerate(pairs)})
    return seeds_of


def difference(a: float, b: float, n: int) -> Gain:
    return Gain(a - b, from_intervals(a, accuracy_interval(a, n), b, accuracy_interval(b, n)))


def interval_of(results: Study) -> Interval:
    return over_hospitals(
        [float(np.mean([d.mean for d in seeds.values()])) for seeds in results]
    ).interval


def shares(intervals: list[Interval], truth: Array | float) -> list[str]:
    """Return coverage, and the shares of studies that show a gain and that show a loss."""
    low, high = np.array(intervals).T
    return [
        f"{np.mean(each):.3f}" for each in ((low <= truth) & (truth <= high), low > 0, high < 0)
    ]


def power(draws: int) -> Iterator[list[str]]:
    for hospitals in HOSPITALS:
        for seeds in (1, 2, 3, 5):
            row = [f"{hospitals}", f"{seeds}"]
            for mean in (0.05, 0.0):
                rng, shown = np.random.default_rng(3), []
                for _ in range(draws):
                    gains = np.repeat(rng.normal(mean, 0.03, (hospitals, 1)), seeds, axis=1)
                    patients = rng.integers(30, 201, hospitals)
                    shown.append(interval_of(study(rng, gains, patients, shared=False)))
                covered, up, down = shares(shown, mean)
                row += [up, covered] if mean else [covered, up, down]
            yield row


def stands_out(hospitals: int, far: float) -> Array:
    """Return gains of which one is ``far`` above the others, with mean zero."""
    return np.where(np.arange(hospitals) == 0, far, 0.0) - far / hospitals


def at_least_one(rng: Generator, hospitals: int) -> Array:
    """Return ``rare`` gains of a study that has drawn a hospital that gains more."""
    while not (drawn := rng.random(hospitals) < RARE).any():
        pass
    return FAR * (drawn - RARE)


SPREADS: dict[str, Callable[[Generator, int], Array]] = {
    "equal gains": lambda rng, n: np.zeros(n),
    "normal, 3 points": lambda rng, n: rng.normal(0, 0.03, n),
    "normal, 10 points": lambda rng, n: rng.normal(0, 0.1, n),
    "skewed, 3 points": lambda rng, n: 0.03 * (rng.exponential(size=n) - 1),
    "skewed, 10 points": lambda rng, n: 0.1 * (rng.exponential(size=n) - 1),
    "one gains 35 more": lambda rng, n: stands_out(n, FAR),
    "one loses 35 more": lambda rng, n: stands_out(n, -FAR),
    "rare, drawn": at_least_one,
    "rare": lambda rng, n: FAR * ((rng.random(n) < RARE) - RARE),
}


def settings(draws: int) -> Iterator[list[str]]:
    for name, spread in SPREADS.items():
        for patients in (20, 50, 200):
            row = [name, f"{patients}"]
            for hospitals in HOSPITALS:
                rng = np.random.default_rng(3)
                cases = [
                    interval_of(study(rng, spread(rng, hospitals)[:, None], patients))
                    for _ in range(draws)
                ]
                row.append(" ".join(shares(cases, 0.0)))
            yield row


def over_seeds(draws: int) -> Iterator[list[str]]:
    for common in (0, 2, 4):
        for hospitals in (6, 12):
            row = [f"{common}", f"{hospitals}"]
            for seeds in (1, 2, 3, 5):
                rng, covered, moved = np.random.default_rng(3), [], []
                for _ in range(draws):
                    together = rng.normal(0, common / 100, seeds)
                    gains = (
                        rng.normal(0, 0.03, (hospitals, 1))
                        + together
                        + rng.normal(0, 0.02, (hospitals, seeds))
                    )
                    covered.append(interval_of(study(rng, gains, 200, shared=False)))
                    moved.append(together.mean())
                row.append(f"{shares(covered, np.array(moved))[0]}, {shares(covered, 0.0)[0]}")
            yield row


def over_one_silo(draws: int) -> Iterator[list[str]]:
    for between in (0, 2, 5, 10):
        for patients in PATIENTS:
            row = [f"{between}", f"{patients}"]
            for seeds in (1, 2, 3, 5, 10):
                rng = np.random.default_rng(3)
                gains = (
                    np.clip(rng.normal(0, between / 100, (1, seeds)), -0.35, 0.35)
                    for _ in range(draws)
                )
                row.append(
                    shares([silo_interval(study(rng, g, patients)[0]) for g in gains], 0.0)[0]
                )
            yield row


PARTS = {
    "power": (
        power,
        [
            "hospitals",
            "seeds",
            "power",
            "coverage",
            "coverage, no gain",
            "gain claimed",
            "loss claimed",
        ],
    ),
    "settings": (
        settings,
        ["gains", "patients", *(f"{n} hospitals: coverage, gain, loss" for n in HOSPITALS)],
    ),
    "seeds": (
        over_seeds,
        ["seeds move all by", "hospitals", "1 seed", "2 seeds", "3 seeds", "5 seeds"],
    ),
    "silo": (
        over_one_silo,
        ["seeds differ by", "patients", "1 seed", "2 seeds", "3 seeds", "5 seeds", "10 seeds"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    # Also for numbers without an interval in the report
    with patch.object(inference, "HOSPITALS_NEEDED", 2):
        for name in (options.part,) if options.part else PARTS:
            rows, header = PARTS[name]
            print(table(list(rows(options.draws)), header), flush=True)


if __name__ == "__main__":
    main()
