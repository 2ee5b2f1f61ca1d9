"""Ditto: two silos by hand, a run in numpy, the courses of w and v, the limits of λ (B16)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from tiny import SHORT, federate, gradient, rows_of, same
from two_layers import rounds_trained, snapshot_rows

OPTIONS = {**SHORT, "momentum": 0.9, "lr_decay": 0.9, "learning_rate": 0.3, "mlp__hidden": "4"}


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """Weights (u, -u), biases (v, -v), η = 1, λ = 1/2; w is FedAvg's: (-1/8, -1/4) after round 1 (see test_fedavg).

    The personal models start at the centre 0, so round 1 is a plain step: a = (1, 1/2), b = (-1/2, -1/2).
    Round 2: a has the logit 5, q = 1 / (1 + e^5); b has -2, r = 1 / (1 + e²); each goes half way to the received w:
    a: u = 1 + 2 q - (1 + 1/8) / 2, v = 1/2 + q - (1/2 + 1/4) / 2; b: u = -1/2 - r + 3/16, v = -1/2 - r + 1/8.
    """
    run = federate(pair, "ditto", rounds=2, ditto__lambda=0.5)
    q, r = 1 / (1 + math.exp(5)), 1 / (1 + math.exp(2))
    u, v = 1 + 2 * q - 9 / 16, 0.5 + q - 3 / 8
    near(run.personal("a"), [u, -u, v, -v])
    u, v = -0.5 - r + 3 / 16, -0.5 - r + 1 / 8
    near(run.personal("b"), [u, -u, v, -v])
    q_a, q_b = 1 / (1 + math.e), 1 / (1 + math.exp(0.75))
    u = -1 / 8 + (2 * (1 - q_a) - 3 * q_b) / 4
    near(run.shared[0].item(), u)


@pytest.mark.parametrize("epochs", [0, 3])
def test_rounds_of_several_steps_in_numpy(two, epochs):
    """Three rounds in float64, momentum that starts afresh, 2 epochs on w and s on v (0: as many)."""
    lambda_, eta = 0.4, 0.5
    run = federate(
        two,
        "ditto",
        rounds=3,
        local_epochs=2,
        learning_rate=eta,
        momentum=0.5,
        lr_decay=0.9,
        ditto__lambda=lambda_,
        ditto__personal_epochs=epochs,
    )
    w = run.start()
    own = dict.fromkeys(two, w)
    for r in range(3):
        total = np.zeros_like(w)
        for silo, file in two.items():
            x, y = rows_of(file)
            local, velocity = w.copy(), np.zeros_like(w)
            for _ in range(2):
                velocity = 0.5 * velocity + gradient(local, x, y)
                local -= eta * 0.9**r * velocity
            total += len(y) / 16 * local
            v, velocity = own[silo].copy(), np.zeros_like(w)
            for _ in range(epochs or 2):
                velocity = 0.5 * velocity + gradient(v, x, y) + lambda_ * (v - w)
                v -= eta * 0.9**r * velocity
            own[silo] = v
        w = total
    run.ends_near(w, own, 1e-5)


def test_batch_norm_of_both_models(three, tiny_bn):
    """v's running statistics are the silo's own, those of w are averaged: w is still FedAvg's, v at λ = 0 Local's."""
    options = {**OPTIONS, "model": "tiny-bn", "learning_rate": 0.1}
    fedavg, local = (federate(three, name, **options) for name in ("fedavg", "local"))
    run = federate(three, "ditto", ditto__lambda=0.0, **options)
    assert snapshot_rows(fedavg, "received") == snapshot_rows(run, "received")
    assert snapshot_rows(local, "personal") == snapshot_rows(run, "personal")
    assert same(fedavg.held["buffers"], run.held["buffers"])
    for silo in three:
        kept = run.kept(silo)["personal.buffers"]
        assert same(kept, local.kept(silo)["personal.buffers"])
        assert not same(kept, run.held["buffers"])


@pytest.mark.parametrize("eta", [1.0, 0.25])
def test_a_full_pull_starts_from_w(three, eta):
    """η λ = 1, one step: v - η (∇f(v) + λ (v - w)) = w - η ∇f(v)."""
    run = federate(three, "ditto", rounds=2, learning_rate=eta, ditto__lambda=1 / eta)
    first = federate(three, "ditto", rounds=1, learning_rate=eta, ditto__lambda=1 / eta)
    for silo, file in three.items():
        w = run.received(silo, 2).double().numpy()
        expected = w - eta * gradient(first.personal(silo).double().numpy(), *rows_of(file))
        near(run.personal(silo), expected, 1e-5)


def test_an_absent_silo_keeps_its_personal_model(three):
    """c misses rounds 2 and 3: its v of round 1 is evaluated meanwhile, and is where round 4 starts."""
    options = {"strategy": "ditto", "rounds": 4, "ditto__lambda": 0.7}
    run = federate(three, **options, absent={("c", 2), ("c", 3)})
    assert rounds_trained(run, "c") == [1, 4]
    first = federate(three, **{**options, "rounds": 1}).personal("c").double().numpy()
    w = run.received("c", 4).double().numpy()
    expected = first - gradient(first, *rows_of(three["c"])) - 0.7 * (first - w)
    near(run.personal("c"), expected, 1e-5)
