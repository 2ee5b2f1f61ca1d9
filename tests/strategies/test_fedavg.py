"""FedAvg and FedAvg-FT: two silos by hand, and the special cases of the algorithm reference (B2)."""

from __future__ import annotations

import math

import numpy as np
from near import near
from tiny import federate, gradient, rows_of, same

from models.metrics import METRICS


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """Σ = 4: weights (u, -u) and biases (v, -v), by symmetry. Full batch, η = 1, start at 0; n_a = 1, n_b = 3.

    Round 1: p = 1/2 everywhere. a (x = 2, class 0): du = (1/2 - 1) 2 = -1, dv = -1/2, so (u, v) = (1, 1/2).
    b (x = 1, class 1): du = dv = 1/2, so (u, v) = (-1/2, -1/2). The mean: u = (1 - 3/2) / 4 = -1/8,
    v = (1/2 - 3/2) / 4 = -1/4.
    Round 2: p_0 = 1 / (1 + exp(-2 (u x + v))). a: z = -1/4 - 1/4, q_a = 1 / (1 + e); b: z = -3/8,
    q_b = 1 / (1 + e^(3/4)). u = -1/8 + (2 (1 - q_a) - 3 q_b) / 4, v = -1/4 + ((1 - q_a) - 3 q_b) / 4.
    """
    run = federate(pair, "fedavg", rounds=2)
    after_1 = run.received("a", 2)
    assert after_1.tolist() == [-1 / 8, 1 / 8, -1 / 4, 1 / 4]
    q_a, q_b = 1 / (1 + math.e), 1 / (1 + math.exp(0.75))
    u = -1 / 8 + (2 * (1 - q_a) - 3 * q_b) / 4
    v = -1 / 4 + ((1 - q_a) - 3 * q_b) / 4
    near(run.shared, [u, -u, v, -v])
    # The personal model is the silo's own copy after training: b's from (-1/8, -1/4) less q_b.
    near(run.personal("b"), [-1 / 8 - q_b, 1 / 8 + q_b, -1 / 4 - q_b, 1 / 4 + q_b])
    # Loss of the received model before any training is log 2; after round 1, at a: -log q_a = log(1 + e).
    near(run.values("loss", "a", "received")[:2], [math.log(2), math.log(1 + math.e)])


def test_one_full_batch_step_is_centralised_sgd(two):
    """sum_i (n_i / n) (w - η g_i) = w - η g of the pooled rows, for g_i is a mean over n_i."""
    run = federate(two, "fedavg", rounds=3)
    x, y = (
        np.concatenate(parts) for parts in zip(*(rows_of(f) for f in two.values()), strict=True)
    )
    w = run.start()
    for _ in range(3):
        w = w - gradient(w, x, y)
    near(run.shared, w, 1e-5)


def test_several_local_steps(two):
    """Two epochs of one batch each, momentum 1/2 that starts afresh every round, η falling by 0.9 a round."""
    run = federate(
        two, "fedavg", rounds=2, local_epochs=2, momentum=0.5, lr_decay=0.9, learning_rate=0.5
    )
    w = run.start()
    for r in range(2):
        parts = []
        for file in two.values():
            x, y = rows_of(file)
            local, velocity = w.copy(), np.zeros_like(w)
            for _ in range(2):
                velocity = 0.5 * velocity + gradient(local, x, y)
                local -= 0.5 * 0.9**r * velocity
            parts.append(len(y) * local)
        w = np.asarray(sum(parts) / 16)
    near(run.shared, w, 1e-5)


def test_received_is_before_training_and_personal_after_it(two):
    """The received model of round 2 scores, on silo a, the loss of the aggregate of round 1 by an own softmax."""
    run = federate(two, "fedavg", rounds=2)
    x, y = rows_of(two["a"])

    def loss(vector):
        w = vector.double().numpy()
        z = x @ w[:9].reshape(3, 3).T + w[9:]
        return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))

    near(run.values("loss", "a", "received")[1], loss(run.received("a", 2)))
    near(run.values("loss", "a", "received")[2], loss(run.shared))
    near(run.values("loss", "a", "personal")[1], loss(run.personal("a")))


# ---- FedAvg-FT -----------------------------------------------------------------------------------------------------


def test_no_fine_tuning_is_the_received_model(three):
    run = federate(three, "fedavg-ft", rounds=2, **{"fedavg-ft.epochs": 0}, local_epochs=2)
    for silo in three:
        assert same(run.personal(silo), run.received(silo, 2))
        for metric in METRICS:
            received, personal = (
                run.values(metric, silo, snapshot) for snapshot in ("received", "personal")
            )
            assert received[:2] == personal


def test_fine_tuning_by_hand(pair, zero_start):
    """Silo a, round 1, from 0, η = 1: first epoch (u, v) = (1, 1/2), as in the test of FedAvg.

    Second epoch: z = 2 + 1/2, q = 1 / (1 + e^-5): u = 1 + 2 (1 - q), v = 1/2 + (1 - q). The local training has only
    the first.
    """
    run = federate(pair, "fedavg-ft", rounds=1, **{"fedavg-ft.epochs": 2})
    rest = 1 - 1 / (1 + math.exp(-5))
    u, v = 1 + 2 * rest, 0.5 + rest
    near(run.personal("a"), [u, -u, v, -v])
    assert run.shared.tolist() == [-1 / 8, 1 / 8, -1 / 4, 1 / 4]
