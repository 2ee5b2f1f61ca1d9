"""pFedMe: two silos by hand, a run in numpy, the limits of β and λ (B15)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from tiny import SHORT, comparable, federate, gradient, initial, random_silos, rows_of, same
from two_layers import replies_of, sent_by

OPTIONS = {**SHORT, "learning_rate": 0.1}


def test_two_silos_by_hand(pair, zero_start):
    """One batch, K = 2 steps of η_p = 1 from 0, λ = 1/2, μ = 1/4, η = 1; weights (u, -u), biases (v, -v).

    θ after the first step: a (1, 1/2), b (-1/2, -1/2), for both terms are 0 at 0. The second, a: logit 5,
    q = 1 / (1 + e^5), and -(λ + μ) θ: (1/4 + 2 q, 1/8 + q); b: r = 1 / (1 + e²): -1/8 - r twice.
    w_i = w - η λ (w - θ) = θ/2, the mean has weights 1/4 and 3/4, and β = 1/2 goes half way to it.
    """
    run = federate(
        pair,
        "pfedme",
        rounds=1,
        pfedme__lambda=0.5,
        pfedme__inner_steps=2,
        pfedme__mu=0.25,
        pfedme__personal_learning_rate=1.0,
        pfedme__beta=0.5,
    )
    q, r = 1 / (1 + math.exp(5)), 1 / (1 + math.exp(2))
    a, b = (0.25 + 2 * q, 0.125 + q), (-0.125 - r, -0.125 - r)
    for silo, (u, v) in (("a", a), ("b", b)):
        near(run.personal(silo), [u, -u, v, -v])
        sent = sent_by(run, silo, 0)
        near(sent, [u / 2, -u / 2, v / 2, -v / 2])
    u, v = ((a[k] + 3 * b[k]) / 4 / 2 / 2 for k in (0, 1))
    near(run.shared, [u, -u, v, -v])


@pytest.mark.parametrize("beta", [1.0, 0.4, 2.0])
def test_rounds_of_several_steps_in_numpy(two, beta):
    """Three rounds of two batches with K = 3 in float64; θ goes on from batch to batch and starts each round at w."""
    lambda_, mu, eta, inner = 2.0, 0.1, 0.3, 0.2
    run = federate(
        two,
        "pfedme",
        rounds=3,
        local_epochs=2,
        learning_rate=eta,
        lr_decay=0.8,
        pfedme__lambda=lambda_,
        pfedme__inner_steps=3,
        pfedme__mu=mu,
        pfedme__personal_learning_rate=inner,
        pfedme__beta=beta,
    )
    w, thetas = run.start(), {}
    for r in range(3):
        mean = np.zeros_like(w)
        for silo, file in two.items():
            x, y = rows_of(file)
            theta, own = w.copy(), w.copy()
            for _ in range(2):
                for _ in range(3):
                    theta = theta - inner * 0.8**r * (
                        gradient(theta, x, y) + lambda_ * (theta - own) + mu * theta
                    )
                own = own - eta * 0.8**r * lambda_ * (own - theta)
            thetas[silo] = theta
            mean += len(y) / 16 * own
        w = (1 - beta) * w + beta * mean
    run.ends_near(w, thetas, 1e-5)


def test_beta_zero_keeps_w(three):
    """Bit for bit: every round starts from the initial model."""
    run = federate(three, "pfedme", pfedme__beta=0.0, **OPTIONS)
    assert same(run.shared, initial(run.settings, 3, 3))
    for silo in three:
        assert len(set(run.values("loss", silo, "received"))) == 1
        assert len(set(run.values("loss", silo, "personal"))) > 1  # other batches every round


def test_lambda_zero_is_sgd_from_w(tmp_path):
    """θ is plain local SGD with η_p from w, bit for bit FedAvg's local model of round 1, and w stays.

    Two silos of equal size, for a mean of equal vectors with weights 1/2 is exact.
    """
    equal = random_silos(tmp_path, [8, 8])
    plain = federate(equal, "fedavg", **{**OPTIONS, "rounds": 1, "learning_rate": 0.3})
    run = federate(
        equal,
        "pfedme",
        pfedme__lambda=0.0,
        pfedme__mu=0.0,
        pfedme__inner_steps=1,
        pfedme__personal_learning_rate=0.3,
        **OPTIONS,
    )
    start = initial(run.settings, 3, 3)
    assert same(run.shared, start)
    for silo in equal:
        assert all(
            same(p.models["model"].vector, start) for _, _, p, _ in replies_of(run, silo)
        )
        first = [r for r in run.rows if (r.silo, r.snapshot, r.round) == (silo, "personal", 1)]
        assert comparable(first) == comparable(
            [r for r in plain.rows if (r.silo, r.snapshot) == (silo, "personal")]
        )


def test_a_full_step_takes_theta_over(three):
    """η λ = 1: w_i = θ after each batch. With K = 1, μ = 0 every step then starts at its centre: FedAvg with η_p."""
    options = {**OPTIONS, "learning_rate": 0.25, "pfedme__lambda": 4.0}
    run = federate(three, "pfedme", **options)
    for silo in three:
        last = sent_by(run, silo, -1)
        near(last, run.personal(silo))
    run = federate(
        three,
        "pfedme",
        pfedme__inner_steps=1,
        pfedme__mu=0.0,
        pfedme__personal_learning_rate=0.3,
        **options,
    )
    plain = federate(three, "fedavg", **{**OPTIONS, "learning_rate": 0.3})
    ours, theirs = (r.shared for r in (run, plain))
    near(ours, theirs, 2e-6)
    for silo in three:
        near(run.personal(silo), plain.personal(silo), 2e-6)


def test_absent_silos_are_left_out(three):
    """The mean is over who came, and β moves w from where it was."""
    run = federate(
        three, "pfedme", pfedme__beta=0.5, **{**OPTIONS, "rounds": 1}, absent={("b", 1)}
    )
    sent = {silo: p.models["model"].vector for _, silo, p, _ in replies_of(run)}
    assert set(sent) == {"a", "c"}
    mean = 6 / 14 * sent["a"] + 8 / 14 * sent["c"]
    expected = (initial(run.settings, 3, 3) + mean) / 2
    near(run.shared, expected, 1e-5)
