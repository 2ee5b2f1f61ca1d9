"""Inference of the whole report: one method for every mean over hospitals, one for a single hospital's gain.

**Mean over hospitals** (gain, unseen hospitals, calibration): Student's t over the hospitals' values, each a mean over
its seeds. The spread between hospitals already contains the error of their test patients, so it is not added again. Few
patients may show no spread by chance. So the standard error is at least half of what independent tests of the two
models would give (:func:`least_error`). Without any error nothing is tested.
Several methods that are compared on the same test data share the 5 % (Bonferroni). **Mean over patients**: hospitals
weigh by their test patients; the variance is the jackknife's over hospitals, the degrees of freedom are Kish's
effective number of hospitals less one. With equal weights it is the mean over hospitals.

**One hospital's gain**: each score's interval covers its test patients. A hospital never sends which patients a model
classified correctly, so the two tests count as independent, and the interval is wider than a paired one. Patients do
not average out over seeds, because seeds may share them; the seeds' spread is added from ``SEEDS_NEEDED`` on.

Coverage, false claims and power: docs/uncertainty.md, ``benchmarks/coverage.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import special

from models.metrics import wilson_interval

Interval = tuple[float, float]
NAN = math.nan
UNKNOWN: Interval = (NAN, NAN)
EXACT = 1e-9  # scores with a smaller difference are equal
HOSPITALS_NEEDED = 6  # with fewer, equal signs in all hospitals have a probability of 2 / 2^n > 5 % by chance alone
SEEDS_NEEDED = 3
LEAST = 0.5  # of the standard error of independent tests; both models are right on many of the same patients
Z = float(special.ndtri(0.975))
SEEN = float(special.ndtri(0.8))


@dataclass(frozen=True)
class Tested:
    """Score of one run's model on one silo's ``n`` test samples, and its interval."""

    score: float
    n: int
    interval: Interval


@dataclass(frozen=True)
class Score:
    """Score of one method on one silo's test data: mean over seeds, their standard deviation, mean number of samples.

    ``interval`` is that of a single seed; with several seeds the spread is used instead. ``nan`` if withheld.
    """

    mean: float
    spread: float
    interval: Interval
    n_test: int


@dataclass(frozen=True)
class Gain:
    """Difference of two methods, in one silo or as a mean over silos: its 95 % interval, and p value if it has one.

    Of one silo's mean over ``n_seeds``: ``seed_error`` is its standard error over seeds, if that is in the interval.
    """

    mean: float
    interval: Interval
    p: float = NAN
    n_seeds: int = 1
    seed_error: float = 0.0

    @property
    def sign(self) -> int:
        """The sign of the mean: 1 for a gain, 0 for equal scores, -1 for a loss."""
        return (
            0
            if math.isnan(self.mean) or abs(self.mean) < EXACT
            else (1 if self.mean > 0 else -1)
        )

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.interval[0])

    @property
    def shown(self) -> int:
        """The sign of an interval that excludes 0: 1 for a gain, -1 for a loss; else 0."""
        return 1 if self.interval[0] > 0 else -1 if self.interval[1] < 0 else 0


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds (n - 1); ``nan`` for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else NAN


def finite_or_nan(value: object) -> float:
    """Return the value; ``nan`` if it is not a finite number."""
    number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    return float(value) if number else NAN  # type: ignore[arg-type]


# Of one hospital: seed -> difference, its interval for the sampling of patients
Seeds = Mapping[int, Gain]


def t_quantile(n: int, methods: int = 1) -> float:
    """Return the half width of a 95 % interval of the mean of ``n`` values, in standard errors."""
    return float(special.stdtrit(n - 1, 1 - 0.025 / methods))


def over_hospitals(
    values: Sequence[float], methods: int = 1, errors: Sequence[float] = ()
) -> Gain:
    """Return the mean of one value per hospital with its 95 % interval and p value (Student's t).

    ``methods``: number of methods among which the 5 % are shared. ``errors``: by hospital, :func:`least_error`. No
    interval below ``HOSPITALS_NEEDED`` hospitals.
    """
    n = len(values)
    values = [0.0 if abs(v) < EXACT else v for v in values]
    if not n:
        return Gain(NAN, UNKNOWN)
    mean = statistics.fmean(values)
    if n < HOSPITALS_NEEDED:
        return Gain(mean, UNKNOWN)
    error = max(statistics.stdev(values) / math.sqrt(n), math.hypot(*errors) / n)
    return students_t(mean, error, n - 1, methods)


def students_t(mean: float, error: float, freedom: float, methods: int) -> Gain:
    """Return a mean of this standard error with its interval and p value (Student's t); without an error neither."""
    if error < EXACT:  # equal values whose patients are not known
        return Gain(mean, UNKNOWN)
    half = float(special.stdtrit(freedom, 1 - 0.025 / methods)) * error
    p = float(2 * special.stdtr(freedom, -abs(mean) / error))
    return Gain(mean, (mean - half, mean + half), min(1.0, methods * p))


def over_patients(
    values: Sequence[float],
    patients: Sequence[int],
    methods: int = 1,
    errors: Sequence[float] = (),
) -> Gain:
    """Return the mean of hospitals' values, weighted by their patients, as :func:`over_hospitals` does."""
    known = [
        (0.0 if abs(v) < EXACT else v, n) for v, n in zip(values, patients, strict=True) if n
    ]
    total = sum(n for _, n in known)
    if len(known) < HOSPITALS_NEEDED:
        return Gain(sum(v * n for v, n in known) / total if total else NAN, UNKNOWN)
    shares = [n / total for _, n in known]
    mean = sum(v * share for (v, _), share in zip(known, shares, strict=True))
    # Without a hospital the mean moves by so much
    moves = ((v - mean) * p / (1 - p) for (v, _), p in zip(known, shares, strict=True))
    error = math.sqrt((1 - 1 / len(known)) * sum(move**2 for move in moves))
    least = math.hypot(*(n / total * e for e, n in zip(errors, patients, strict=False)))
    return students_t(mean, max(error, least), 1 / sum(p**2 for p in shares) - 1, methods)


def carrier(values: Mapping[str, float]) -> str | None:
    """Return the hospital that carries a mean: more than half of the sum, and twice any other's value; or None."""
    if len(values) < 3:
        return None
    first, second = sorted(values, key=lambda silo: -abs(values[silo]))[:2]
    total, most = sum(values.values()), values[first]
    alone = total * most > 0 and abs(most) > abs(total) / 2
    return first if alone and abs(most) >= 2 * abs(values[second]) else None


def over_seeds(seeds: Seeds) -> Gain:
    """Return one hospital's gain: its mean over seeds with its 95 % interval; ``nan`` for none.

    Each side adds in quadrature the patients' distance to that end and, from ``SEEDS_NEEDED`` seeds on, Student's half
    width over seeds.
    """
    differences = list(seeds.values())
    mean, n = statistics.fmean(d.mean for d in differences) if differences else NAN, len(seeds)
    if not all(d.has_interval for d in differences) or not differences:
        return Gain(mean, UNKNOWN)
    below = statistics.fmean(d.mean - d.interval[0] for d in differences)
    above = statistics.fmean(d.interval[1] - d.mean for d in differences)
    enough = n >= SEEDS_NEEDED
    error = statistics.stdev(d.mean for d in differences) / math.sqrt(n) if enough else 0.0
    half = t_quantile(n) * error if enough else 0.0
    interval = mean - math.hypot(below, half), mean + math.hypot(above, half)
    return Gain(mean, interval, n_seeds=n, seed_error=error)


def with_interval(gains: Mapping[str, Gain]) -> dict[str, Gain]:
    """Return the hospitals' gains that have an interval."""
    return {silo: gain for silo, gain in gains.items() if gain.has_interval}


def quantile_among(among: int) -> float:
    """Return the half width of one hospital's interval among several (Bonferroni), in standard errors."""
    return float(special.ndtri(1 - 0.025 / among))


def of_patients(gain: Gain, end: float) -> float:
    """Return one hospital's standard error by its test patients, to the side of this end of its interval."""
    half = t_quantile(gain.n_seeds) * gain.seed_error if gain.seed_error else 0.0
    return math.sqrt(max((end - gain.mean) ** 2 - half**2, 0.0)) / Z


def least_error(gain: Gain) -> float:
    """Return the least standard error of one hospital's gain, by its test patients; 0 if its interval is unknown.

    Seeds may draw new patients, so that the error of their mean is smaller.
    """
    if not gain.has_interval:
        return 0.0
    below, above = (of_patients(gain, end) for end in gain.interval)
    return LEAST * math.sqrt((below**2 + above**2) / 2 / gain.n_seeds)


def widen(gain: Gain, among: int) -> Interval:
    """Return one hospital's interval, widened for ``among`` hospitals.

    Patients by the normal quantile, seeds by Student's, which grows faster: of three seeds 3.6 times for 12 hospitals.
    """
    if math.isnan(gain.interval[0]):
        return UNKNOWN
    of_seeds = t_quantile(gain.n_seeds, among) * gain.seed_error if gain.seed_error else 0.0
    below, above = (
        math.hypot(quantile_among(among) * of_patients(gain, end), of_seeds)
        for end in gain.interval
    )
    return gain.mean - below, gain.mean + above


def excludes_zero(gain: Gain, among: int) -> int:
    """Return the sign of one hospital's gain, its interval widened for ``among`` hospitals; 0 if it contains zero."""
    return Gain(gain.mean, widen(gain, among)).shown


def visible_loss(gain: Gain, among: int) -> float:
    """Return the smallest true loss of one hospital that is shown in 80 of 100 studies with an interval as wide."""
    error = math.hypot(of_patients(gain, gain.interval[1]), gain.seed_error)
    return widen(gain, among)[1] - gain.mean + SEEN * error


def accuracy_interval(accuracy: float, n: int) -> Interval:
    """Return Wilson's interval of an accuracy over ``n`` test samples; ``nan`` twice if either is unknown."""
    return (
        UNKNOWN if math.isnan(accuracy) or n <= 0 else wilson_interval(round(accuracy * n), n)
    )


def from_intervals(
    first: float, of_first: Interval, second: float, of_second: Interval
) -> Interval:
    """Return the interval of ``first - second`` from the scores' own intervals (Zou and Donner, Stat. Med. 2008).

    Of Wilson's intervals it makes Newcombe's (Statistics in Medicine 1998, method 10).
    """
    (l1, u1), (l2, u2) = of_first, of_second
    if math.isnan(l1) or math.isnan(l2):
        return UNKNOWN
    d = first - second
    return d - math.hypot(first - l1, u2 - second), d + math.hypot(u1 - first, second - l2)
