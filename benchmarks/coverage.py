"""How often the report's intervals hold the truth, how often it claims what is not so, and how often it sees a gain.

    python -m benchmarks.coverage [--draws 4000] [--part power|settings|seeds|cohorts|silo]

Hospitals are simulated whose truth is known, by the model of `silofl plan` (server/planning/power.py).

* ``power``: gains of 5 points on average that vary by 3 points between hospitals of 30 to 200 test patients; every seed
  splits anew. The share of studies in which a gain is shown; coverage; claims of a gain or a loss where there is none.
* ``settings``: coverage, and claims where the mean gain is zero. Gains vary by 0, 3 or 10 points (normal), or skewed
  (exponential); or one hospital of each study gains or loses 35 points more than the others; or each hospital does so
  with a probability of one in seven (``rare``: studies that have drawn one, and all studies).
* ``seeds``: seeds that move the gains of all hospitals together: coverage of the mean of these seeds, and of all seeds;
  and of all seeds by the interval of the reference table (``reference_gains.py``).
* ``cohorts``: the reference table's mean over cohorts, its prediction of a new one, and its false claims.
* ``silo``: one hospital's gain over 1 to 10 seeds that share their test patients, on which both models are tested.

docs/uncertainty.md has the figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from benchmarks.common import command_line, print_table
from benchmarks.reference_gains import crossed_mean, over_cohorts
from server.planning.power import CORRELATION, Design, half_widths, measure
from server.report import inference
from server.report.inference import Gain, Interval, accuracy_interval, from_intervals

Array = npt.NDArray[Any]
Generator = np.random.Generator

HOSPITALS = (3, 5, 6, 8, 12)
PATIENTS = (20, 50, 100, 200)
FAR = 0.35  # how much more than the others a hospital gains that stands out
RARE = 1 / 7


def share(held: Array | Sequence[bool]) -> str:
    return f"{np.mean(held):.3f}"


def of_report(values: Array, truth: Array | float, design: Design) -> list[str]:
    """Return coverage, and the shares of studies that show a gain and that show a loss."""
    means, halves = values.mean(1), half_widths(values, 1, design.least_error)
    claims = np.abs(means - truth) <= halves, means > halves, means < -halves
    return [share(claim) for claim in claims]


def power(draws: int) -> Iterator[list[object]]:
    for hospitals, seeds in itertools.product(HOSPITALS, (1, 2, 3, 5)):
        patients = tuple(np.linspace(30, 200, hospitals).astype(int).tolist())
        design, columns = Design(patients, 0.03, seeds=seeds), list[str]()
        for mean in (0.05, 0.0):
            rng = np.random.default_rng(3)
            gains = rng.normal(mean, 0.03, (draws, hospitals))
            columns += of_report(measure(design, gains, rng), mean, design)
        yield [hospitals, seeds, *columns]


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


def settings(draws: int) -> Iterator[list[object]]:
    for (name, spread), patients in itertools.product(SPREADS.items(), (20, 50, 200)):
        row: list[object] = [name, patients]
        for hospitals in HOSPITALS:
            rng, design = np.random.default_rng(3), Design((patients,) * hospitals, 0.0)
            gains = np.array([spread(rng, hospitals) for _ in range(draws)])
            row.append(" ".join(of_report(measure(design, gains, rng), 0.0, design)))
        yield row


def over_seeds(draws: int) -> Iterator[list[object]]:
    for common, hospitals in itertools.product((0, 2, 4), (6, 12)):
        row: list[object] = [common, hospitals]
        for seeds in (2, 3, 5, 10):
            rng, design = np.random.default_rng(3), Design((200,) * hospitals, 0.0, seeds=seeds)
            together = rng.normal(0, common / 100, (draws, 1, seeds))
            gains = together + rng.normal(0, 0.03, (draws, hospitals, 1))
            gains = gains + rng.normal(0, 0.02, (draws, hospitals, seeds))
            of_seed = replace(design, seeds=1)
            values = np.stack([measure(of_seed, gains[..., s], rng) for s in range(seeds)], -1)
            of = [
                of_report(values.mean(2), truth, design)[0]
                for truth in (together.mean((1, 2)), 0.0)
            ]
            row.append(
                ", ".join([*of, share([holds(crossed_mean(v).interval) for v in values])])
            )
        yield row


def holds(interval: Interval, truth: float = 0.0) -> bool:
    low, high = interval
    return low <= truth <= high


def cohorts(draws: int) -> Iterator[list[object]]:
    """Cohorts of 6 to 38 hospitals with ten repeats; gains in per cent, with a deviation of 10 between hospitals."""
    for count, between in itertools.product((3, 4, 6), (0.0, 3.0, 6.0)):
        rng, outcomes = np.random.default_rng(3), list[tuple[bool, ...]]()
        for _ in range(draws // 4):
            studies = []
            for hospitals in (16, 6, 6, 38, 6, 10)[:count]:
                gains = rng.normal(0, between) + rng.normal(0, 10, (hospitals, 1))
                gains = gains + rng.normal(0, 1, 10) + rng.normal(0, 10, (hospitals, 10))
                studies.append(crossed_mean(gains))
            pooled = over_cohorts(studies)
            assert pooled is not None
            new = holds(pooled.prediction, rng.normal(0, between))
            outcomes.append((holds(pooled.interval), pooled.interval[0] > 0, new))
        yield [count, f"{between:g}", *map(share, zip(*outcomes, strict=True))]


def one_silo(rng: Generator, gains: Array, patients: int) -> dict[int, Gain]:
    """Return the differences of accuracies of a hospital whose true gains are these, by seed, on the same patients."""
    base = rng.standard_normal(patients)
    mine = CORRELATION * base + np.sqrt(1 - CORRELATION**2) * rng.standard_normal(patients)
    right = Design((), 0.0).base
    a = [float((mine < special.ndtri(right + gain)).mean()) for gain in gains]
    b = float((base < special.ndtri(right)).mean())
    return {seed: difference(each, b, patients) for seed, each in enumerate(a)}


def difference(a: float, b: float, n: int) -> Gain:
    return Gain(a - b, from_intervals(a, accuracy_interval(a, n), b, accuracy_interval(b, n)))


def over_one_silo(draws: int) -> Iterator[list[object]]:
    for between, patients in itertools.product((0, 2, 5, 10), PATIENTS):
        row: list[object] = [between, patients]
        for seeds in (1, 2, 3, 5, 10):
            rng, held = np.random.default_rng(3), []
            for _ in range(draws):
                gains = np.clip(rng.normal(0, between / 100, seeds), -0.35, 0.35)
                gain = inference.over_seeds(one_silo(rng, gains, patients))
                held.append(holds(gain.interval))
            row.append(share(held))
        yield row


# Each part's rows by number of draws, and its columns
PARTS: dict[str, tuple[Callable[[int], Iterator[list[object]]], str]] = {
    "power": (
        power,
        "hospitals | seeds | held | shown | loss shown | held, no gain | gain claimed | loss claimed",
    ),
    "settings": (
        settings,
        " | ".join(["gains", "patients", *(f"{n}: held, gain, loss" for n in HOSPITALS)]),
    ),
    "seeds": (
        over_seeds,
        "seeds move all by | hospitals | 2 seeds | 3 seeds | 5 seeds | 10 seeds",
    ),
    "cohorts": (cohorts, "cohorts | differ by | held | gain claimed | new cohort held"),
    "silo": (
        over_one_silo,
        "seeds differ by | patients | 1 seed | 2 seeds | 3 seeds | 5 seeds | 10 seeds",
    ),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    args = parser.parse_args()
    for name in args.part:
        rows, header = PARTS[name]
        print_table(header, rows(args.draws))


if __name__ == "__main__":
    main()
