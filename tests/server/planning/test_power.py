"""The plan's power: closed forms, a published example, the report's own intervals, and what it takes to see more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from near import near
from scipy import special, stats

from server.planning.power import (
    CORRELATION,
    Design,
    both_correct,
    detectable_gain,
    detectable_harm,
    differences,
    least_number,
    needed,
    one_hospital,
    power,
    shown,
)
from server.report.inference import (
    Gain,
    Z,
    accuracy_interval,
    from_intervals,
    least_error,
    over_hospitals,
    over_seeds,
)

MEANS = Design((100,) * 12, 0.03, deviation=0.45)


def closed_form(design: Design, gain: float, comparisons: int = 1) -> float:
    """Power of Student's t over equal hospitals, one side, by the noncentral t distribution.

    With equal hospitals Hartung and Knapp's interval of a random-effects mean is this interval.
    """
    n = len(design.tested)
    of_patients = design.deviation**2 / design.tested[0] / design.seeds
    deviation = np.sqrt(design.spread**2 + of_patients)
    limit = stats.t.ppf(1 - 0.025 / comparisons, n - 1)
    return float(1 - stats.nct.cdf(limit, n - 1, gain / deviation * np.sqrt(n)))


@pytest.mark.parametrize("gain", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("seeds, comparisons", [(1, 1), (3, 1), (1, 5)])
def test_power_is_the_noncentral_t(gain, seeds, comparisons):
    design = replace(MEANS, seeds=seeds, comparisons=comparisons)
    near(power(design, gain, 20_000), closed_form(design, gain, comparisons), 0.012)


def test_a_published_example():
    """A paired t test of an effect of half a standard deviation needs 34 pairs for a power of .8.

    Faul, Erdfelder, Lang and Buchner 2007 (G*Power): dz = 0.5, alpha = .05 two-sided, n = 34, actual power .808.
    """
    pairs = Design((10**9,) * 34, 1.0, deviation=1e-6)
    near(power(pairs, 0.5, 20_000), 0.808, 0.01)
    near(closed_form(pairs, 0.5), 0.808, 0.001)
    # Drawn studies: within two of 34
    assert abs((needed(pairs, 0.5, 0.8)["hospitals"] or 0) - 34) <= 2


@pytest.mark.parametrize("first, second", [(0.6, 0.65), (0.5, 0.5), (0.3, 0.9), (0.99, 0.02)])
def test_both_models_right_on_one_patient(first, second):
    """Owen's function against scipy's bivariate normal distribution."""
    z = special.ndtri([first, second])
    both = stats.multivariate_normal([0, 0], [[1, CORRELATION], [CORRELATION, 1]]).cdf(z)
    near(both_correct(np.array(first), np.array(second)), both, 1e-7)


def test_differences_of_accuracies_have_the_variance_of_paired_patients():
    """Var = (p₁₀ + p₀₁ - (p₁₀ - p₀₁)²) / n, with p₁₀ = p - both."""
    design = Design((50, 200), 0.0, base=0.7, seeds=2)
    values = differences(design, 0.1, np.random.default_rng(1), 20_000)
    both = float(both_correct(np.array(0.8), np.array(0.7)))
    variance = (0.8 + 0.7 - 2 * both - 0.1**2) / (2 * np.array([50, 200]))
    near(values.mean(0), [0.1, 0.1], 2e-3)
    near(values.var(0) / variance, [1, 1], 0.05)
    same = differences(replace(design, resplit=False), 0.1, np.random.default_rng(1), 20_000)
    near(same.var(0) / variance, [2, 2], 0.1)


def test_a_gain_is_shown_where_the_report_shows_it():
    design = Design((40, 60, 200, 90, 30, 120, 80), 0.05)
    values = differences(design, 0.04, np.random.default_rng(5), 300)
    for comparisons in (1, 4):
        for least in (0.0, design.least_error, 0.02):
            errors = [least * math.sqrt(7)] * 7  # of which the mean's is ``least``
            of_report = [
                over_hospitals(row, comparisons, errors).shown for row in values.tolist()
            ]
            assert shown(values, comparisons, least).tolist() == of_report
            assert len(set(of_report)) > 1


def test_the_least_error_is_the_reports():
    """Of large test parts, half of that of two independent shares of 60 %, divided by the root of the seeds."""
    design = Design((4000,) * 6, 0.0, seeds=4)
    share = accuracy_interval(0.6, 4000)
    gain = over_seeds(
        dict.fromkeys(range(4), Gain(0.0, from_intervals(0.6, share, 0.6, share)))
    )
    near(design.least_error, least_error(gain) / math.sqrt(6), 1e-5)


def test_fewer_hospitals_than_an_interval_needs():
    design = Design((500,) * 5, 0.0)
    assert not design.is_answerable
    assert power(design, 0.3) == 0 and detectable_gain(design, 0.8) is None


def test_detectable_gain_has_the_power_it_is_for():
    for wanted in (0.8, 0.9):
        gain = detectable_gain(MEANS, wanted)
        assert gain is not None
        near(closed_form(MEANS, gain), wanted, 0.02)
    assert detectable_gain(Design((6,) * 6, 0.3, base=0.95), 0.9) is None


def test_detectable_harm_of_a_mean_over_patients():
    """One seed: shown where the mean lies Z' standard errors below 0, Z' for two sides shared by 12 hospitals.

    So .8 of studies show a loss of (Z' + z(.8)) sd / sqrt(n).
    """
    loss = detectable_harm(MEANS, 100, 0.8)
    limit = special.ndtri(1 - 0.025 / 12) + special.ndtri(0.8)
    near(loss, limit * 0.45 / 10, 0.01)
    assert one_hospital(MEANS, 100, 0.0) < 0.02
    assert special.ndtri(1 - 0.025 / 12) > Z


def test_of_small_hospitals_no_loss_is_shown():
    assert detectable_harm(Design((8,) * 12, 0.03), 8, 0.8) is None


def test_what_it_takes():
    design = Design((60, 90, 120, 60, 80, 100), 0.02)
    more = {name: number or 0 for name, number in needed(design, 0.05, 0.8).items()}
    assert all(more.values())
    assert power(design.with_hospitals(more["hospitals"]), 0.05) >= 0.8
    assert power(design.with_hospitals(more["hospitals"] - 1), 0.05) < 0.8
    assert power(design.with_patients(more["patients"]), 0.05) >= 0.8
    assert power(design.with_patients(more["patients"] - 1), 0.05) < 0.8
    assert power(replace(design, seeds=more["seeds"]), 0.05) >= 0.8
    assert needed(replace(design, resplit=False), 0.05, 0.8)["seeds"] is None
    # Hospitals differ by more than the gain: no number of patients shows it in most studies
    assert needed(replace(design, spread=0.2), 0.02, 0.8)["patients"] is None


def test_repeated_hospitals():
    assert Design((1, 2, 3), 0.0).with_hospitals(5).tested == (1, 2, 3, 1, 2)
    assert Design((3, 5), 0.0).with_patients(2).tested == (6, 10)


@pytest.mark.parametrize("least", [1, 7, 10])
def test_least_number(least):
    assert least_number(lambda n: n >= least, 1, 10) == least
    assert least_number(lambda n: False, 1, 10) is None
