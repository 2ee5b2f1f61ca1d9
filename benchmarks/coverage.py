"""How often the report's 95 % intervals of a gain hold the truth, on simulated hospitals whose truth is known.

    python -m benchmarks.coverage [--draws 1000] [--part hospitals|seeds|silo]

Both models of a hospital are tested on the same patients: whether a patient is classified correctly follows a normal
variable of each model, and the two correlate by one half. The report sees two accuracies and a number of patients.

* ``hospitals``: the mean gain over 2 to 12 hospitals of 20 to 200 patients, one seed. Gains vary between hospitals by a
  standard deviation of 0, 3 or 10 points; or one hospital in seven gains 35 points and the others nothing ("rare").
* ``seeds``: the mean gain with seeds that move the gains of all hospitals together.
* ``silo``: one hospital's gain over 1 to 10 seeds that share their test patients.

The column ``hospitals only`` resamples only the hospitals, as silofl did up to 0.1. docs/researcher.md has the figures;
half an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.common import table
from server.report import inference
from server.report.inference import Difference, Seeds, mean_interval, silo_interval
from server.report.uncertainty import difference_interval

Array = npt.NDArray[np.float64]
Study = list[Seeds]

HOSPITALS = (2, 3, 4, 5, 6, 8, 10, 12)
PATIENTS = (20, 50, 100, 200)
BASE = 0.6  # accuracy of the baseline's model
RARE = (1 / 7, 0.35)  # a share of the hospitals gains this
CORRELATION = 0.5


def study(rng: np.random.Generator, gains: Array, patients: int) -> Study:
    """Return accuracies on simulated patients, equal for all seeds; ``gains`` (hospitals, seeds) are the true ones."""
    base = rng.standard_normal((len(gains), 1, patients))
    own = rng.standard_normal((len(gains), 1, patients))
    mine = CORRELATION * base + np.sqrt(1 - CORRELATION**2) * own
    right = (mine < stats.norm.ppf(BASE + gains)[..., None]).mean(axis=-1)
    before = (base < stats.norm.ppf(BASE)).mean(axis=-1)
    return [
        {s: Difference(a - b, difference_interval(a, patients, b, patients)) for s, a in enumerate(row.tolist())}
        for row, (b,) in zip(right, before.tolist(), strict=True)
    ]


def spread(rng: np.random.Generator, between: str, hospitals: int) -> Array:
    """Draw true gains (hospitals,) with expectation 0."""
    if between == "rare":
        share, gain = RARE
        return np.asarray(gain * (rng.random(hospitals) < share) - gain * share)
    return np.clip(rng.normal(0, float(between) / 100, hospitals), -0.35, 0.35)


def hospitals_only(found: Study) -> tuple[float, float]:
    rng, values = np.random.default_rng(0), np.array([seeds[0].value for seeds in found])
    low, high = np.quantile(values[rng.integers(0, len(values), (1000, len(values)))].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def held(intervals: list[tuple[float, float]]) -> str:
    return f"{np.mean([low <= 0 <= high for low, high in intervals]):.3f}"


def over_hospitals(draws: int) -> Iterator[list[str]]:
    for between in ("0", "3", "10", "rare"):
        for patients in PATIENTS:
            for hospitals in HOSPITALS:
                rng = np.random.default_rng(3)
                found = [study(rng, spread(rng, between, hospitals)[:, None], patients) for _ in range(draws)]
                two = [mean_interval(f) for f in found]
                width = f"{100 * np.mean([high - low for low, high in two]):.1f}"
                yield [between, f"{patients}", f"{hospitals}", held(list(map(hospitals_only, found))), held(two), width]


def over_seeds(draws: int) -> Iterator[list[str]]:
    for common in (0, 2, 4):
        for patients in (50, 200):
            for hospitals in (6, 12):
                row = [f"{common}", f"{patients}", f"{hospitals}"]
                for seeds in (1, 2, 3, 5):
                    rng, found = np.random.default_rng(3), []
                    for _ in range(draws):
                        gains = spread(rng, "3", hospitals)[:, None] + rng.normal(0, common / 100, seeds)
                        gains = gains + rng.normal(0, 0.02, (hospitals, seeds))
                        found.append(mean_interval(study(rng, gains, patients)))
                    row.append(held(found))
                yield row


def over_one_silo(draws: int) -> Iterator[list[str]]:
    for between in (0, 2, 5, 10):
        for patients in PATIENTS:
            row = [f"{between}", f"{patients}"]
            for seeds in (1, 2, 3, 5, 10):
                rng = np.random.default_rng(3)
                gains = (np.clip(rng.normal(0, between / 100, (1, seeds)), -0.35, 0.35) for _ in range(draws))
                row.append(held([silo_interval(study(rng, g, patients)[0]) for g in gains]))
            yield row


PARTS = {
    "hospitals": (over_hospitals, ["between, points", "patients", "hospitals", "hospitals only", "two levels", "wide"]),
    "seeds": (over_seeds, ["seeds move all by", "patients", "hospitals", "1 seed", "2 seeds", "3 seeds", "5 seeds"]),
    "silo": (over_one_silo, ["seeds differ by", "patients", "1 seed", "2 seeds", "3 seeds", "5 seeds", "10 seeds"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    with patch.object(inference, "HOSPITALS_NEEDED", 2):  # also for numbers without an interval in the report
        for name in (options.part,) if options.part else PARTS:
            rows, header = PARTS[name]
            print(table(list(rows(options.draws)), header), flush=True)


if __name__ == "__main__":
    main()
