"""FedLC: two silos by hand, rounds in numpy, and where it is FedAvg (B53)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, federate, gradient, rows_of, settings_of, write_silo

from partitions.common.errors import UserError

OPTIONS = {**SHORT, "momentum": 0.9}


def test_two_silos_by_hand(tmp_path, zero_start):
    """One step of 1 from 0, x = 1 for all; weights and biases of a class are equal, as x is 1. τ = 1.

    a has class 0 once and class 1 sixteen times: margins 1 and 16^(-1/4) = 1/2, so the loss sees the difference
    z_0 - z_1 = -1/2, and p = P(0) = 1 / (1 + e^(1/2)). The gradient of z_0 is p - 1/17, and w_0 = 1/17 - p = -w_1.
    b has class 1 alone, three times: class 0 is out of the loss, p = 0, nothing moves. The mean: 17/20 of a's.
    """
    files = {
        "a": write_silo(tmp_path / "a.npz", [[1]] * 17, [0] + [1] * 16),
        "b": write_silo(tmp_path / "b.npz", [[1]] * 3, [1] * 3),
    }
    run = federate(files, "fedlc", rounds=1, fedlc__tau=1.0, weight_cap=0)
    u = (1 / 17 - 1 / (1 + math.exp(0.5))) * 17 / 20
    assert run.personal("b").tolist() == [0, 0, 0, 0]
    near(run.shared, [u, -u, u, -u])


def test_rounds_in_numpy(three):
    """Four rounds of three full-batch steps; a margin is a bias that only the training has; b is away in round 2."""
    tau, eta = 2.0, 0.4
    run = federate(
        three,
        "fedlc",
        rounds=4,
        local_epochs=3,
        learning_rate=eta,
        fedlc__tau=tau,
        absent={("b", 2)},
    )
    w = run.start()
    for r in range(1, 5):
        came = [s for s in three if (s, r) != ("b", 2)]
        ends, weights = [], []
        for silo in came:
            x, y = rows_of(three[silo])
            counts = np.bincount(y, minlength=3)
            margin = np.where(counts > 0, tau * np.maximum(counts, 1) ** -0.25, 1e3)
            local = w.copy()
            for _ in range(3):
                seen = local.copy()
                seen[9:] -= margin
                local = local - eta * gradient(seen, x, y)
            ends.append(local)
            weights.append(len(y))
        w = np.average(ends, axis=0, weights=weights)
    near(run.shared, w, 1e-5)


def test_equal_counts_are_fedavg_up_to_rounding(tmp_path):
    rng = np.random.default_rng(1)
    files = {
        name: write_silo(tmp_path / f"{name}.npz", rng.normal(size=(9, 3)), [0, 1, 2] * 3, 3)
        for name in "ab"
    }
    plain, run = (federate(files, s, **OPTIONS) for s in ("fedavg", "fedlc"))
    near(run.shared, plain.shared, 1e-5)


def test_counts_have_no_noise(three):
    with pytest.raises(UserError, match="dp = true: not with fedlc: its loss shifts logits by"):
        settings_of(three, strategy="fedlc", dp=True)


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_smoothed_labels_have_no_share_of_a_class_that_the_silo_lacks(tmp_path, weights):
    """Two full-batch steps of PyTorch in float64 on the classes 0 and 2 alone, of three; the row of class 1 stays."""
    rng, tau, eta = np.random.default_rng(3), 0.7, 0.3
    x, y = rng.normal(size=(9, 3)), [0, 2, 0, 0, 2, 0, 0, 0, 2]
    files = {s: write_silo(tmp_path / f"{s}.npz", x, y, 3) for s in "ab"}
    run = federate(
        files,
        "fedlc",
        rounds=1,
        local_epochs=2,
        learning_rate=eta,
        fedlc__tau=tau,
        label_smoothing=0.2,
        class_weights=weights,
    )
    w = torch.from_numpy(run.start())
    own, rows, labels = [0, 2], torch.from_numpy(x), torch.tensor(y) // 2
    margins = tau * torch.tensor([6.0, 3.0]).double() ** -0.25
    balanced = torch.tensor([9 / 18, 9 / 9]).double() if weights == "balanced" else None
    loss = torch.nn.CrossEntropyLoss(balanced, label_smoothing=0.2)
    for _ in range(2):
        w.requires_grad_()
        logits = rows @ w[:9].view(3, 3).T + w[9:]
        (g,) = torch.autograd.grad(loss(logits[:, own] - margins, labels), w)
        w = w.detach() - eta * g
    near(run.personal("a"), w, 1e-5)
    assert torch.equal(run.personal("a")[3:6].double(), torch.from_numpy(run.start())[3:6])
