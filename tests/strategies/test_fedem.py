"""FedEM: an E-step by hand, rounds in double precision, and its two ends: one component, and equal ones (B38)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, federate, initial, rows_of, same
from torch import nn
from two_layers import DEEP, deep_gradient, start_at

from strategies.fedem import Components, responsibilities

OPTIONS = {**SHORT, "momentum": 0.9}


class Fixed(nn.Module):
    """A network with the same logits for every sample."""

    block_names = ("bias",)

    def __init__(self, logits):
        super().__init__()
        self.bias = nn.Linear(1, 2)
        self.logits = torch.tensor(logits)

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def test_an_e_step_and_a_prediction_by_hand():
    """p(y = 0) is 3/4 and 1/4, π = (1/2, 1/2): q of class 0 is (3/4, 1/4), of class 1 the other way; p is 1/2.

    With π = (1, 0) q is (1, 0), up to 10⁻⁸, and p is the first one's.
    """
    made = iter([[math.log(3), 0.0], [0.0, math.log(3)]])
    net = Components(lambda: Fixed(next(made)), (1,), 2)
    x, y = torch.zeros(2, 1), torch.tensor([0, 1])
    assert net(x).exp().tolist() == [pytest.approx([0.5, 0.5])] * 2
    net.apart = True
    q = responsibilities(net(x), y, torch.tensor([0.5, 0.5]))
    assert q.tolist() == [pytest.approx([0.75, 0.25]), pytest.approx([0.25, 0.75])]
    q = responsibilities(net(x), y, torch.tensor([1.0, 0.0]))
    assert q.tolist() == [pytest.approx([1, 0], abs=1e-7)] * 2
    net.apart = False
    net.shares.values.data = torch.tensor([1.0, 0.0])
    assert net(x).exp().tolist() == [pytest.approx([0.75, 0.25])] * 2


def losses(w, x, y):
    z = np.maximum(x @ w[:12].reshape(4, 3).T + w[12:16], 0) @ w[16:28].reshape(3, 4).T + w[28:]
    return np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]


def test_rounds_in_numpy(three):
    """Three rounds of two full-batch steps, two components; b is away in round 2, and keeps its shares."""
    run = federate(
        three,
        "fedem",
        rounds=3,
        local_epochs=2,
        **{"fedem.components": 2},
        absent={("b", 2)},
        **DEEP,
    )
    theta = run.received("a", 1).double().numpy().reshape(2, 31).copy()
    assert same(
        torch.from_numpy(theta[0]).float(), initial(run.settings, 3, 3)
    ) and not np.array_equal(theta[0], theta[1])
    shares = {silo: np.full(2, 0.5) for silo in three}
    for r in range(1, 4):
        ends, weights = [], []
        for silo, file in three.items():
            x, y = rows_of(file)
            if (silo, r) == ("b", 2):
                continue
            q = shares[silo] * np.exp(-np.stack([losses(w, x, y) for w in theta], 1))
            mixed = -np.log(q.sum(1)).mean()
            if silo != "b":
                found = run.values("loss", silo, "received")[r - 1]
                assert found == pytest.approx(mixed, rel=1e-5)
            q /= q.sum(1, keepdims=True)
            shares[silo] = q.mean(0)
            end = theta.copy()
            for _ in range(2):
                for m, w in enumerate(end):
                    parts = [
                        q[j, m] * deep_gradient(w, x[j : j + 1], y[j : j + 1])
                        for j in range(len(y))
                    ]
                    end[m] = w - 0.3 * np.mean(parts, axis=0)
            ends.append(end)
            weights.append(len(y))
            if r == 3:
                own = run.personal(silo).numpy()
                near(own[:2], shares[silo], 1e-5)
                near(own[2:], end.ravel(), 1e-5)
        theta = np.average(ends, axis=0, weights=weights)
    near(run.shared, theta.ravel(), 1e-5)


def test_equal_components_are_fedavg_with_a_smaller_rate(three, monkeypatch):
    rates = {**OPTIONS, "mlp__hidden": "4"}
    w = federate(three, "fedavg", rounds=1, **DEEP).received("a", 1)
    start_at(monkeypatch, w.tolist())
    plain = federate(three, "fedavg", **rates, learning_rate=0.15)
    start_at(monkeypatch, [0.5, 0.5, *w.tolist(), *w.tolist()])
    run = federate(three, "fedem", fedem__components=2, **rates, learning_rate=0.3)
    expected = plain.shared.tolist()
    near(run.shared, 2 * expected)
    assert run.personal("a")[:2].tolist() == [0.5, 0.5]


def test_a_loss_that_is_no_likelihood_is_refused(three):
    with pytest.raises(ValueError, match="a likelihood is needed, which loss = focal"):
        federate(three, "fedem", loss="focal", **OPTIONS, **DEEP)
