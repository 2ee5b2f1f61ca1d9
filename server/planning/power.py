"""What a planned study can find out: simulated studies, with the intervals of the report.

A hospital's true gain is normal around the mean gain. Whether a patient is classified correctly follows a normal
variable of each model; the two correlate by ``CORRELATION``, so that both models are right on many of the same
patients. Of a score that is a mean over patients, such as the log loss, the difference is normal, with the standard
deviation of one patient's difference. ``benchmarks/coverage.py`` measures the report's intervals on the same model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special

from server.report.inference import (
    HOSPITALS_NEEDED,
    LEAST,
    Gain,
    Z,
    accuracy_interval,
    excludes_zero,
    from_intervals,
    over_seeds,
    t_quantile,
)

Array = npt.NDArray[np.float64]

CORRELATION = 0.5
DRAWS = 4000  # a share is known to ± .016
HARM_DRAWS = 400
POWERS = (0.8, 0.9)
MOST_HOSPITALS, MOST_SEEDS, MOST_PATIENTS = 200, 50, 100  # of patients: times as many
LEAST_STEP = 1e-4


@dataclass(frozen=True)
class Design:
    """A planned study; scores and gains are shares of 1.

    ``tested``: each hospital's test patients. ``comparisons`` share the 5 %. ``resplit``: each seed draws the test
    patients anew. ``deviation``: of one patient's difference; 0: the score is the share of patients classified
    correctly, of which the baseline's is ``base``.
    """

    tested: tuple[int, ...]
    spread: float
    base: float = 0.6
    seeds: int = 1
    comparisons: int = 1
    resplit: bool = True
    deviation: float = 0.0

    @property
    def is_answerable(self) -> bool:
        """Return whether the report has an interval of the mean over hospitals."""
        return len(self.tested) >= HOSPITALS_NEEDED

    @property
    def least_error(self) -> float:
        """Return the least standard error of the mean over hospitals (:func:`~server.report.inference.least_error`)."""
        of_patient = self.deviation or math.sqrt(2 * self.base * (1 - self.base))
        of_hospitals = (of_patient / math.sqrt(self.seeds * n) for n in self.tested)
        return LEAST * math.hypot(*of_hospitals) / len(self.tested)

    def with_hospitals(self, count: int) -> Design:
        """Return the design with the first ``count`` hospitals of these sizes, repeated."""
        repeated = self.tested * math.ceil(count / len(self.tested))
        return replace(self, tested=repeated[:count])

    def with_patients(self, times: float) -> Design:
        return replace(self, tested=tuple(math.ceil(n * times) for n in self.tested))


def both_correct(first: Array, second: Array) -> Array:
    """Return the probability that two models, right with these probabilities, are right on the same patient.

    The bivariate normal distribution by Owen's T function (Annals of Mathematical Statistics 1956, eq. 2.1).
    """
    h, k = special.ndtri(first), special.ndtri(second)
    h, k = (np.where(z == 0, 1e-12, z) for z in (h, k))
    root = math.sqrt(1 - CORRELATION**2)
    inside = (special.owens_t(a, (b / a - CORRELATION) / root) for a, b in ((h, k), (k, h)))
    both: Array = (first + second) / 2 - sum(inside) - np.where(h * k < 0, 0.5, 0.0)
    return both


def differences(design: Design, mean: float, rng: np.random.Generator, draws: int) -> Array:
    """Return each hospital's measured gain (draws, hospitals), a mean over the seeds."""
    return measure(design, rng.normal(mean, design.spread, (draws, len(design.tested))), rng)


def measure(design: Design, gains: Array, rng: np.random.Generator) -> Array:
    """Return what test patients show of hospitals' true gains (draws, hospitals), a mean over the seeds."""
    sizes = np.array(design.tested)
    counted = design.seeds if design.resplit else 1
    if design.deviation:
        return rng.normal(gains, design.deviation / np.sqrt(counted * sizes))
    second = np.full_like(gains, design.base)
    first = np.clip(design.base + gains, 0.01, 0.99)
    both = both_correct(first, second)
    cells = np.stack([first - both, second - both, 1 - first - second + 2 * both], -1)
    counts = rng.multinomial(counted * sizes, cells.clip(0, 1))
    measured: Array = (counts[..., 0] - counts[..., 1]) / (counted * sizes)
    return measured


def half_widths(values: Array, comparisons: int = 1, least: float = 0.0) -> Array:
    """Return half of each study's interval (draws,), as of :func:`~server.report.inference.over_hospitals`.

    ``least``: the standard error that is shown at least.
    """
    n = values.shape[1]
    errors = np.maximum(values.std(1, ddof=1) / math.sqrt(n), least)
    half: Array = t_quantile(n, comparisons) * errors
    return half


def shown(values: Array, comparisons: int, least: float = 0.0) -> Array:
    """Return the sign of each study's interval (draws,)."""
    mean = values.mean(1)
    signs: Array = np.sign(mean) * (np.abs(mean) > half_widths(values, comparisons, least))
    return signs


def power(design: Design, mean: float, draws: int = DRAWS) -> float:
    """Return the share of studies in which a mean gain is shown; 0 with fewer hospitals than an interval needs."""
    if not design.is_answerable:
        return 0.0
    values = differences(design, mean, np.random.default_rng(3), draws)
    return float((shown(values, design.comparisons, design.least_error) > 0).mean())


def detectable_gain(design: Design, wanted: float) -> float | None:
    """Return the smallest mean gain that is shown in this share of studies; None: not even the largest possible is."""
    most = 1 - design.base if not design.deviation else 10 * design.deviation
    return smallest(lambda gain: power(design, gain) >= wanted, most)


def smallest(holds: Callable[[float], bool], most: float) -> float | None:
    """Return the least number up to ``most`` from which a condition holds, by bisection."""
    if not holds(most):
        return None
    low, high = 0.0, most
    while high - low > LEAST_STEP * max(most, 1.0):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def one_hospital(design: Design, size: int, loss: float, draws: int = HARM_DRAWS) -> float:
    """Return the share of studies in which the report shows that a hospital of ``size`` test patients loses this."""
    rng = np.random.default_rng(3)
    alone = replace(design, tested=(size,), spread=0.0)
    seeds = range(design.seeds if design.resplit else 1)
    by_seed = [_gains(alone, -loss, rng, draws) for _ in seeds]
    measured = (over_seeds(dict(enumerate(gains))) for gains in zip(*by_seed, strict=True))
    among = len(design.tested)
    return float(np.mean([excludes_zero(gain, among) < 0 for gain in measured]))


def _gains(design: Design, mean: float, rng: np.random.Generator, draws: int) -> list[Gain]:
    """Return one hospital's gain in each study, with the interval that its test patients give."""
    once = replace(design, seeds=1)
    (n,) = design.tested
    values = differences(once, mean, rng, draws)[:, 0]
    if design.deviation:
        half = Z * design.deviation / math.sqrt(n)
        return [Gain(v, (v - half, v + half)) for v in values.tolist()]
    # Of equal differences the interval depends on the baseline's score alone, which is taken as it is expected
    base = accuracy_interval(design.base, n)
    scores = np.clip(design.base + values, 0, 1).tolist()
    return [
        Gain(v, from_intervals(a, accuracy_interval(a, n), design.base, base))
        for v, a in zip(values.tolist(), scores, strict=True)
    ]


def detectable_harm(design: Design, size: int, wanted: float) -> float | None:
    """Return the smallest loss of one hospital that is shown in this share of studies; None: not even the largest."""
    most = design.base - 0.01 if not design.deviation else 20 * design.deviation
    return smallest(lambda loss: one_hospital(design, size, loss) >= wanted, most)


def least_number(holds: Callable[[int], bool], first: int, most: int) -> int | None:
    """Return the least whole number from ``first`` to ``most`` from which a condition holds, by bisection."""
    if not holds(most):
        return None
    return first + bisect_left(range(first, most), True, key=holds)


def needed(design: Design, effect: float, wanted: float) -> dict[str, int | None]:
    """Return the hospitals, the test patients of each (times as many) and the seeds that show ``effect`` so often.

    Each is changed alone. None: more of it does not answer the question.
    """

    def enough(changed: Design) -> bool:
        return power(changed, effect) >= wanted

    return {
        "hospitals": least_number(
            lambda n: enough(design.with_hospitals(n)), HOSPITALS_NEEDED, MOST_HOSPITALS
        ),
        "patients": least_number(
            lambda times: enough(design.with_patients(times)), 1, MOST_PATIENTS
        ),
        "seeds": least_number(lambda n: enough(replace(design, seeds=n)), 1, MOST_SEEDS)
        if design.resplit
        else None,
    }
