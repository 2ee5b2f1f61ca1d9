"""pFedFDA: its discriminant by hand, rounds in double precision, the ends of β, and covariances that are none (B36)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from near import near
from scipy.optimize import minimize_scalar
from tiny import SHORT, federate, round_of, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient

from models.training import generator
from strategies.base.transport.payload import array_record, decode
from strategies.pfedfda import discriminant, estimates, halves, least, read_gaussians, root_of

OPTIONS = {**SHORT}


def test_the_discriminant_by_hand():
    """Two classes at -1 and 1 with S = 4: a = ∓1/4, b = log 1/2 - 1/8. With S = I it is the nearest mean."""
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    means = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    a, b = discriminant(means, root_of(torch.full((1, 1), 4.0).double()), half)
    assert a.flatten().tolist() == pytest.approx([-0.25, 0.25])
    assert b.tolist() == pytest.approx([math.log(0.5) - 0.125] * 2)
    rng = torch.Generator().manual_seed(1)
    means, z = (torch.randn(n, 5, generator=rng).double() for n in (4, 50))
    a, b = discriminant(means, root_of(torch.eye(5).double()), torch.full((4,), 0.25).double())
    assert torch.equal((z @ a.T + b).argmax(1), torch.cdist(z, means).argmin(1))


def test_estimates_by_hand():
    """Samples 1 and 3 of class 0: mean 2, scatter 2 over n - 1 = 1. Class 1 has none, and keeps 7. Equal ones: r."""
    shared = torch.tensor([[0.0], [7.0]]).double()
    found = estimates(torch.tensor([[1.0], [3.0]]).double(), torch.tensor([0, 0]), shared, 0.5)
    assert found.means.tolist() == [[2.0], [7.0]] and found.covariance.tolist() == [[2.5]]
    alike = estimates(torch.ones(4, 2).double(), torch.tensor([0, 0, 1, 1]), shared, 1e-4)
    assert alike.covariance.tolist() == [[1e-4, 0], [0, 1e-4]]
    assert halves(torch.tensor([0, 1, 0, 0, 1]), 2).tolist() == [
        False,
        False,
        True,
        False,
        True,
    ]
    near(least(lambda b: (b - 0.3) ** 2), 0.3, 1e-4)
    assert (least(lambda b: b), least(lambda b: -b)) == (0.0, 1.0)


def head(gaussians, shares):
    """h as numbers of the last layer (C K + C,)."""
    means, s = gaussians
    e, k = 1e-4, len(s)
    inverse = np.linalg.inv((1 - e) * s + e * np.trace(s) / k * np.eye(k))
    bias = np.log(shares) - np.einsum("ck,kl,cl->c", means, inverse, means) / 2
    return np.concatenate([(means @ inverse).ravel(), bias])


def of_own(z, y, shared):
    means = np.array([z[y == c].mean(0) if (y == c).any() else shared[c] for c in range(3)])
    apart = z - means[y]
    return means, apart.T @ apart / (len(z) - 1) + 1e-4 * np.eye(z.shape[1])


def mixed(z, y, shared, shares):
    seen, second = dict.fromkeys(range(3), 0), np.zeros(len(y), bool)
    for i, c in enumerate(y):
        second[i], seen[c] = seen[c] % 2 == 1, seen[c] + 1

    def loss(betas):
        total = 0.0
        for part in (second, ~second):
            own = of_own(z[part], y[part], shared[0])
            both = zip(betas, own, shared, strict=True)
            w = head([b * o + (1 - b) * g for b, o, g in both], shares)
            logits = z[~part] @ w[:12].reshape(3, 4).T + w[12:]
            logits -= logits.max(1, keepdims=True)
            total -= (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[
                np.arange(len(logits)), y[~part]
            ].sum()
        return total

    def best(of):
        inside = float(
            minimize_scalar(of, bounds=(0, 1), method="bounded", options={"xatol": 1e-7}).x
        )
        return min((0.0, 1.0, inside), key=of)

    betas = [0.5, 0.5]
    for _ in range(2):
        betas[0] = best(lambda b: loss([b, betas[1]]))
        betas[1] = best(lambda b: loss([betas[0], b]))
    own = of_own(z, y, shared[0])
    return [b * o + (1 - b) * g for b, o, g in zip(betas, own, shared, strict=True)]


def test_rounds_in_numpy(three):
    """Three rounds of two full-batch steps; b is away in round 2. β by another search, in double precision."""
    run = federate(three, "pfedfda", rounds=3, local_epochs=2, absent={("b", 2)}, **DEEP)
    sent = run.sent_to("a", 1)
    first = federate(three, "fedavg", rounds=1, **DEEP).sent_to("a", 1)["global"]
    body = first.vector.double().numpy()[FC1].copy()
    numbers = read_gaussians(sent["gaussians"].vector, run.strategy.layout)
    shared: Any = [numbers.means.numpy(), numbers.covariance.numpy()]
    assert np.array_equal(shared[1], np.eye(4)) and 0 <= shared[0].min() <= shared[0].max() < 1
    for r in range(1, 4):
        bodies, gaussians, weights = [], [], []
        for silo in three:
            if (silo, r) == ("b", 2):
                continue
            x, y = rows_of(three[silo])
            shares = (np.bincount(y, minlength=3) / len(y) + 1e-4) / (1 + 3e-4)
            w = np.concatenate([body, head(shared, shares)])
            passed, labels = [], []
            rng = generator(7, silo, r, "train")
            for _ in range(2):
                # Halves are by the order of passing
                order = torch.randperm(len(y), generator=rng).numpy()
                passed.append(np.maximum(x[order] @ w[:12].reshape(4, 3).T + w[12:16], 0))
                labels.append(y[order])
                w[FC1] -= 0.3 * deep_gradient(w, x, y)[FC1]
            mine = mixed(np.concatenate(passed), np.concatenate(labels), shared, shares)
            if r == 3:
                own = run.personal(silo).numpy()
                near(own[FC1], w[FC1], 2e-3)
                assert own[FC2] == pytest.approx(head(mine, shares), rel=0.05, abs=0.05)
            bodies.append(w[FC1])
            gaussians.append(mine)
            weights.append(len(y))
        body = np.average(bodies, axis=0, weights=weights)
        shared = [
            np.average([g[i] for g in gaussians], axis=0, weights=weights) for i in (0, 1)
        ]
    near(run.shared, body, 2e-3)
    state: Any = run.strategy.state
    found = read_gaussians(state.gaussians, run.strategy.layout)
    near(found.means, shared[0], 5e-3)
    near(found.covariance, shared[1], 5e-3)


def test_without_own_estimates_the_gaussians_stay(three):
    """β = 0: a body below a head that differs by the silo's shares of classes alone."""
    run = federate(three, "pfedfda", **{"pfedfda.betas": "none"}, **OPTIONS, **DEEP)
    first, last = (run.sent_to("a", r) for r in (1, 4))
    assert last["gaussians"].vector.tolist() == pytest.approx(
        first["gaussians"].vector.tolist()
    )
    heads = [run.personal(silo)[FC2] for silo in ("a", "b")]
    assert heads[0][:12].tolist() == pytest.approx(heads[1][:12].tolist())
    assert not same(heads[0][12:], heads[1][12:])
    assert not same(first["global"].vector, last["global"].vector)


@pytest.mark.parametrize("rule", ["none", "median"])
def test_a_silo_whose_covariance_is_none(three, rule, caplog):
    """It is left out, and a median of covariances stays one."""

    def lie(silo, message, reply):
        if silo == "a" and round_of(message) == 1 and message.metadata.message_type == "train":
            vector = decode(reply.content)[0].models["gaussians"].vector.clone()
            vector[12] = -1.0
            reply.content["model.gaussians"] = array_record({"vector": vector})
        return reply

    options = {**OPTIONS, "robust": rule}
    run = federate(
        three, "pfedfda", prepare=lambda g: setattr(g, "after", lie), **options, **DEEP
    )
    assert [r.silo for r in run.rows if r.metric == "rejected"] == ["a"]
    assert "holds no covariance" in caplog.text
    state: Any = run.strategy.state
    assert read_gaussians(state.gaussians, run.strategy.layout).is_positive()
