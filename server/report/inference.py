"""Two-level bootstrap of the gain of one method over another: hospitals, the test patients within them, and seeds.

Each hospital gives one :class:`Difference` per seed: the difference of two scores on its test patients, with its 95 %
interval (:func:`server.report.uncertainty.from_intervals`). A hospital never sends which patients a model classified
correctly. The patients are therefore resampled from that interval, which assumes that the two tests are independent.
Two models are usually right on the same patients, so the interval is wider than a paired one.

* Hospitals: drawn with replacement.
* Patients: one draw per drawn hospital, from a normal distribution whose two halves end at the two ends of the
  hospital's interval. It is not divided by the number of seeds, because seeds may share their test patients.
* Seeds: drawn with replacement, the same for all hospitals, if there are at least ``SEEDS_NEEDED``. With fewer, the
  interval holds for these seeds only.

A bootstrap of few units is too narrow. The deviations of ``n`` units from their mean are therefore multiplied by
``t(0.975, n - 1) / z(0.975) * sqrt(n / (n - 1))``. The expanded percentile interval adjusts its quantiles in the same
way (Hesterberg, The American Statistician 2015). Measured coverage: docs/researcher.md, ``benchmarks/coverage.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from server.report.uncertainty import UNKNOWN, Interval

HOSPITALS_NEEDED = 6  # with fewer, equal signs in all hospitals have a probability of 2 / 2^n > 5 % by chance alone
SEEDS_NEEDED = 3
DRAWS = 4000
Z = float(special.ndtri(0.975))

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Difference of two scores in one hospital with one seed, and its 95 % interval for the sampling of patients."""

    value: float
    interval: Interval


Seeds = Mapping[int, Difference]  # of one hospital: seed -> difference


def silo_interval(seeds: Seeds) -> Interval:
    """Return the 95 % interval of one hospital's mean difference over seeds; ``nan`` twice if one is unknown."""
    if not seeds or _incomplete([seeds]):
        return UNKNOWN
    if len(seeds) == 1:
        return next(iter(seeds.values())).interval
    below, above = _patients([seeds])
    mean = float(np.mean([d.value for d in seeds.values()]))
    if len(seeds) < SEEDS_NEEDED:
        return mean - Z * float(below[0]), mean + Z * float(above[0])
    rng = np.random.default_rng(0)
    drawn = _seeds(_table([seeds]), rng) + _split_normal(rng, below, above, (DRAWS, 1))
    return _percentile(mean + drawn[:, 0])


def mean_interval(silos: Sequence[Seeds]) -> Interval:
    """Return the 95 % interval of the mean difference over hospitals like these, with equal weights.

    ``nan`` twice with fewer than ``HOSPITALS_NEEDED`` hospitals, or if one of the differences' intervals is unknown.
    The same differences always give the same interval: the generator's seed is fixed.
    """
    silos = [seeds for seeds in silos if seeds]
    if len(silos) < HOSPITALS_NEEDED or _incomplete(silos):
        return UNKNOWN
    rng, n = np.random.default_rng(0), len(silos)
    table = _table(silos)
    means = np.nanmean(table, axis=1)
    each = means.mean() + _expansion(n) * (means - means.mean())
    drawn = rng.integers(0, n, (DRAWS, n))
    values = each[drawn] + np.take_along_axis(_seeds(table, rng), drawn, axis=1)
    below, above = _patients(silos)
    values += _split_normal(rng, below[drawn], above[drawn], drawn.shape)
    return _percentile(values.mean(axis=1))


def _incomplete(silos: Sequence[Seeds]) -> bool:
    return any(math.isnan(end) for seeds in silos for d in seeds.values() for end in d.interval)


def _table(silos: Sequence[Seeds]) -> Array:
    """Return the differences (silos, seeds); ``nan`` for a missing one."""
    seeds = sorted({seed for found in silos for seed in found})
    return np.array([[found[s].value if s in found else math.nan for s in seeds] for found in silos])


def _seeds(table: Array, rng: np.random.Generator) -> Array:
    """Return draws of the deviation of each hospital's mean over seeds (DRAWS, silos); zeros with too few seeds."""
    silos, seeds = table.shape
    if seeds < SEEDS_NEEDED:
        return np.zeros((DRAWS, silos))
    deviations = np.nan_to_num(table - np.nanmean(table, axis=1, keepdims=True))  # a missing one is set to the mean
    weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS) / seeds
    return np.asarray(_expansion(seeds) * weights @ deviations.T)


def _patients(silos: Sequence[Seeds]) -> tuple[Array, Array]:
    """Return standard errors (silos,) downwards and upwards: means over seeds, which may share test patients."""
    below = [np.mean([d.value - d.interval[0] for d in seeds.values()]) / Z for seeds in silos]
    above = [np.mean([d.interval[1] - d.value for d in seeds.values()]) / Z for seeds in silos]
    return np.array(below), np.array(above)


def _split_normal(rng: np.random.Generator, below: Array, above: Array, shape: tuple[int, ...]) -> Array:
    drawn = rng.standard_normal(shape)
    return np.asarray(np.where(drawn < 0, drawn * below, drawn * above))


def _expansion(n: int) -> float:
    """Return the factor for the deviations of ``n`` units."""
    return float(special.stdtrit(n - 1, 0.975)) / Z * math.sqrt(n / (n - 1))


def _percentile(values: Array) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


# ---------------------------------------------------------------------------------------------------------------------
# Paired tests


@dataclass(frozen=True)
class PairedTest:
    """Tests of no difference between two methods over ``n`` units: p of Student's t, and of sign flips (Fisher)."""

    n: int
    t: float
    flips: float


MOST_FLIPS = 16  # up to this many units all 2^n flips are counted; with more, this many are drawn:
FLIPS_DRAWN = 100_000


def over_hospitals(silos: Mapping[str, Seeds]) -> PairedTest | None:
    """Test the hospitals' differences, each a mean over its seeds; None with fewer than ``HOSPITALS_NEEDED``."""
    return paired_test([float(np.mean([d.value for d in s.values()])) for s in silos.values() if s], HOSPITALS_NEEDED)


def over_seeds(silos: Mapping[str, Seeds]) -> PairedTest | None:
    """Test the seeds' differences, each a mean over the hospitals with all seeds; None with too few seeds."""
    seeds = sorted({seed for found in silos.values() for seed in found})
    whole = [found for found in silos.values() if len(found) == len(seeds)]
    means = [float(np.mean([found[s].value for found in whole])) for s in seeds] if whole else []
    return paired_test(means, SEEDS_NEEDED)


def paired_test(differences: Sequence[float] | Array, needed: int) -> PairedTest | None:
    """Return two-sided p values of a zero mean; None with fewer than ``needed`` differences, or if all are equal."""
    d = np.asarray(differences)
    if len(d) < needed or np.ptp(d) < 1e-12:
        return None
    t = float(d.mean() / (d.std(ddof=1) / math.sqrt(len(d))))
    if len(d) <= MOST_FLIPS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(d))))
        share = float((np.abs(signs @ d) >= abs(d.sum()) - 1e-12).mean())
    else:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), (FLIPS_DRAWN, len(d)))
        share = float(((np.abs(signs @ d) >= abs(d.sum()) - 1e-12).sum() + 1) / (FLIPS_DRAWN + 1))
    return PairedTest(len(d), float(2 * special.stdtr(len(d) - 1, -abs(t))), share)
