"""FedNTD: its gradient by hand, rounds in numpy, where it is FedAvg, and two classes (B54)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from tiny import SHORT, federate, gradient, rows_of, write_silo

from partitions.common.errors import UserError

OPTIONS = {**SHORT, "momentum": 0.9}


def test_two_silos_by_hand(tmp_path, zero_start):
    """Two steps of 1 from 0, x = 1, three classes, β = 1, T = 1; a class's weight and bias are equal, as x is 1.

    a is of class 0, b of class 1 (once each). First step, the term has no gradient: a's logits grow by
    2 (e_0 - 1/3) = (4/3, -2/3, -2/3). Then p_0 = 1 / (1 + 2 e^-2) =: p, p_1 = p_2 = (1 - p)/2; the classes that are
    not true are alike for both models: q = q_g = 1/2, no gradient. So w_0 = 2/3 + 1 - p, w_1 = w_2 = -w_0/2.
    c is of class 0 with x = 1 and of class 1 with x = -1: its biases stay at 0 by symmetry only in sum; it is not
    here. b is a with the classes 0 and 1 exchanged. The mean: (1/2) (w_0 + w_1), for classes 0 and 1, and w_2.
    """
    files = {
        name: write_silo(tmp_path / f"{name}.npz", [[1]], [k], 3) for k, name in enumerate("ab")
    }
    run = federate(files, "fedntd", rounds=1, local_epochs=2)
    w = 2 / 3 + 1 - 1 / (1 + 2 * math.exp(-2))
    mean = [w / 4, w / 4, -w / 2]
    near(run.shared, [*mean, *mean])


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def test_rounds_in_numpy(three):
    """Four rounds of four full-batch steps, β = 3, T = 2; the gradient of a not-true logit is β T (q - q_g)."""
    beta, t, eta = 3.0, 2.0, 0.3
    run = federate(
        three,
        "fedntd",
        rounds=4,
        local_epochs=4,
        learning_rate=eta,
        fedntd__beta=beta,
        fedntd__temperature=t,
        absent={("b", 2)},
    )
    w = run.start()
    for r in range(1, 5):
        came = [s for s in three if (s, r) != ("b", 2)]
        ends, weights = [], []
        for silo in came:
            x, y = rows_of(three[silo])
            rows, local = np.arange(len(y)), w.copy()

            def others(v):
                z = (x @ v[:9].reshape(3, 3).T + v[9:]) / t  # noqa: B023
                z[rows, y] = -np.inf  # noqa: B023
                return softmax(z)

            for _ in range(4):
                apart = beta * t * (others(local) - others(w)) / len(y)
                term = np.concatenate([(apart.T @ x).ravel(), apart.sum(0)])
                local = local - eta * (gradient(local, x, y) + term)
            ends.append(local)
            weights.append(len(y))
        w = np.average(ends, axis=0, weights=weights)
    near(run.shared, w, 1e-5)


def test_one_step_is_fedavg_for_any_weight(three):
    plain, run = (
        federate(three, s, rounds=3, **{"fedntd.beta": 50.0}) for s in ("fedavg", "fedntd")
    )
    near(run.shared, plain.shared, 1e-5)


def test_two_classes_are_refused(pair):
    with pytest.raises(UserError, match=r"^strategy = fedntd: with two classes [^\n]*fedavg$"):
        federate(pair, "fedntd", rounds=1)
