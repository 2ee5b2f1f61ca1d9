"""The accountant: published figures, closed forms, the inverse, composition."""

from __future__ import annotations

import math

import pytest
from failing import fails

from models.privacy.accountant import (
    ORDERS,
    OutOfRangeError,
    Releases,
    composed_epsilon,
    epsilon,
    noise_multiplier_for,
)

# (n, E, R) with batches of 64: ε at σ 0.7, 1, 2 and δ = 1/n, by dp-accounting 0.6's RdpAccountant.
PUBLISHED = {
    (1000, 1, 20): (13.84, 6.27, 2.02),
    (400, 2, 30): (41.5, 19.7, 6.24),
    (4000, 1, 100): (17.6, 7.48, 2.51),
}


@pytest.mark.parametrize("setting, wanted", PUBLISHED.items())
def test_epsilon_is_that_of_an_independent_accountant(setting, wanted):
    n, epochs, rounds = setting
    steps = round(rounds * epochs * n / 64)
    for noise, value in zip((0.7, 1.0, 2.0), wanted, strict=True):
        assert epsilon(noise, 64 / n, steps, 1 / n) == pytest.approx(value, rel=0.01)


def test_without_sampling_it_is_the_gaussian_mechanism():
    """q = 1: RDP(α) = α T / (2 σ²)."""
    steps, noise, delta = 30, 4.0, 1e-5
    by_hand = min(
        a * steps / (2 * noise**2)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in ORDERS
    )
    assert epsilon(noise, 1.0, steps, delta) == pytest.approx(by_hand, rel=1e-12)
    assert epsilon(noise, 1 - 1e-9, steps, delta) == pytest.approx(by_hand, rel=1e-6)


def test_whole_orders_are_the_binomial_sum():
    """A(α) = Σ_k C(α, k) (1-q)^(α-k) q^k exp(k (k-1) / (2 σ²)) for whole α (section 3.3 of the paper)."""
    from models.privacy.accountant import _rdp

    noise, rate = 0.8, 0.03
    for order in (2, 5, 20):
        terms = (
            math.comb(order, k)
            * (1 - rate) ** (order - k)
            * rate**k
            * math.exp(k * (k - 1) / (2 * noise**2))
            for k in range(order + 1)
        )
        found = _rdp(noise, rate)[ORDERS.index(order)]
        assert found == pytest.approx(math.log(sum(terms)) / (order - 1), rel=1e-9)


def test_the_noise_for_an_epsilon_is_the_inverse():
    for target in (0.5, 3.0, 8.0):
        noise = noise_multiplier_for(target, 0.064, 312, 1e-5)
        assert target * 0.999 <= epsilon(noise, 0.064, 312, 1e-5) <= target


def test_releases_compose():
    alike = [Releases(1.0, 0.05, 40), Releases(1.0, 0.05, 60)]
    assert composed_epsilon(alike, 1e-5) == pytest.approx(
        epsilon(1.0, 0.05, 100, 1e-5), rel=1e-12
    )
    mixed = composed_epsilon([Releases(1.0, 0.05, 40), Releases(2.0, 0.1, 10)], 1e-5)
    assert epsilon(1.0, 0.05, 40, 1e-5) < mixed
    assert mixed < epsilon(1.0, 0.05, 40, 5e-6) + epsilon(2.0, 0.1, 10, 5e-6)
    assert composed_epsilon([Releases(1.0, 0.05, 0)], 1e-5) == 0 == composed_epsilon([], 1e-5)


def test_values_out_of_range_are_refused():
    fails(
        OutOfRangeError, r"noise multiplier 0\.01: 0\.1 to 100000", epsilon, 0.01, 0.1, 1, 1e-5
    )
    fails(OutOfRangeError, r"sample rate 1\.5", epsilon, 1.0, 1.5, 1, 1e-5)
    fails(OutOfRangeError, "delta = 0", epsilon, 1.0, 0.1, 1, 0.0)
    with pytest.raises(
        OutOfRangeError, match=r"epsilon = 0\.0001 at delta = 1e-09 is out of reach"
    ):
        noise_multiplier_for(1e-4, 0.1, 10, 1e-9)


# (σ, rate, steps, δ): ε by dp-accounting 0.6's RDP with our orders, and by its privacy loss distributions, which are
# tighter. `python -m benchmarks.dp` has fifty.
REFERENCE = [
    (0.7, 0.001, 5000, 1e-05, 1.85633, 0.980175),
    (0.7, 0.01, 1000, 0.001, 3.59177, 2.87497),
    (0.7, 0.032, 600, 1e-05, 12.8705, 11.4325),
    (0.7, 0.05, 400, 0.001, 12.1629, 10.4425),
    (1, 0.01, 1000, 1e-05, 2.10137, 1.82824),
    (1, 1, 8, 0.001, 13.2933, 12.0697),
    (1.5, 0.032, 600, 0.001, 1.9658, 1.70143),
    (3, 0.001, 5000, 1e-05, 0.0855976, 0.0735934),
    (3, 1, 8, 1e-05, 4.41968, 4.08923),
    (8, 0.05, 400, 1e-05, 0.485651, 0.440983),
    (8, 1, 8, 0.001, 1.03023, 0.894054),
]


@pytest.mark.parametrize("noise, rate, steps, delta, wanted, tighter", REFERENCE)
def test_fixed_figures_of_an_independent_accountant(noise, rate, steps, delta, wanted, tighter):
    found = epsilon(noise, rate, steps, delta)
    assert found == pytest.approx(wanted, rel=0.01) and found > tighter
    assert noise_multiplier_for(found, rate, steps, delta) == pytest.approx(noise, rel=2e-4)
