"""FedGH: two silos by hand, rounds in double precision, a server that does not learn, what is withheld (B55)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from near import near
from tiny import SHORT, federate, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient, sent_by

import strategies.fedgh

OPTIONS = {**SHORT}


def test_two_silos_by_hand(pair, zero_start):
    """The network is linear, so its features are the inputs: a sends 2 for class 0, b sends 1 for class 1.

    From h = 0 with a rate of 1 and both pairs in one batch: the errors are 1/2, and the mean gradient of the row of
    class 0 is (-2/2 + 1/2)/2 = -1/4, of its bias (-1/2 + 1/2)/2 = 0. h = (1/4, -1/4, 0, 0), for every silo. Second
    pass, a: logit 2/4 twice apart: 1, q = 1/(1 + e); b: 1/2, r = 1/(1 + e^(-1/2)). Weight 1/4 + (2 q - r)/2, bias
    (q - r)/2.
    """
    options = {"fedgh.server-learning-rate": 1.0}
    run = federate(pair, "fedgh", rounds=1, **options)
    assert run.shared.tolist() == pytest.approx([0.25, -0.25, 0, 0])
    run = federate(pair, "fedgh", rounds=1, **options, **{"fedgh.server-passes": 2})
    q, r = 1 / (1 + math.e), 1 / (1 + math.exp(-0.5))
    u, v = 0.25 + (2 * q - r) / 2, (q - r) / 2
    assert run.shared.tolist() == pytest.approx([u, -u, v, -v])


def test_rounds_in_numpy(three):
    """Four rounds of two full-batch steps, all pairs in one batch, three passes; b is away in round 2."""
    eta, rate = 0.3, 0.8
    run = federate(
        three,
        "fedgh",
        rounds=4,
        local_epochs=2,
        **{"fedgh.server-learning-rate": rate, "fedgh.server-passes": 3},
        fedgh__server_batch_size=100,
        absent={("b", 2)},
        **DEEP,
    )
    first = federate(three, "fedavg", rounds=1, **DEEP).sent_to("a", 1)["global"]
    start = first.vector.double().numpy()
    head, bodies = start[FC2].copy(), {s: start[FC1].copy() for s in three}
    for r in range(1, 5):
        pairs = []
        for silo in three:
            if (silo, r) == ("b", 2):
                continue
            x, y = rows_of(three[silo])
            w = np.concatenate([bodies[silo], head])
            for _ in range(2):
                w = w - eta * deep_gradient(w, x, y)
            bodies[silo] = w[FC1]
            z = np.maximum(x @ w[:12].reshape(4, 3).T + w[12:16], 0)
            pairs += [(z[y == k].mean(0), k) for k in range(3) if (y == k).any()]
        means, labels = np.array([m for m, _ in pairs]), np.array([k for _, k in pairs])
        for _ in range(3):
            p = np.exp(means @ head[:12].reshape(3, 4).T + head[12:])
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(labels)), labels] -= 1
            grad = np.concatenate([(p.T @ means).ravel(), p.sum(0)]) / len(labels)
            head = head - rate * grad
    near(run.shared, head, 1e-5)
    for silo in three:
        near(run.personal(silo)[FC1], bodies[silo], 1e-5)


def test_the_server_draws_its_batches_anew_in_each_pass_of_each_round(three, monkeypatch):
    """Batches of one: the labels of all pairs in the order of the server's steps, of two passes in each round."""
    passed: list[int] = []

    def loss(logits, labels):
        passed.extend(labels.tolist())
        return torch.nn.functional.cross_entropy(logits, labels)

    monkeypatch.setattr(
        strategies.fedgh, "F", SimpleNamespace(**{**vars(F), "cross_entropy": loss})
    )
    own = {"fedgh.server-batch-size": 1, "fedgh.server-passes": 2}
    federate(three, "fedgh", rounds=3, **own, **DEEP)
    pairs = sum(len(np.unique(rows_of(file)[1])) for file in three.values())
    orders = [tuple(passed[i : i + pairs]) for i in range(0, len(passed), pairs)]
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len(set(orders)) == len(orders) == 6


def test_a_server_that_does_not_learn_sends_the_first_head(three):
    run = federate(three, "fedgh", **{"fedgh.server-learning-rate": 0.0}, **OPTIONS, **DEEP)
    heads = [run.received("b", r) for r in (1, 2, 3, 4)]
    assert all(same(heads[0], head) for head in heads)


def test_small_classes_are_withheld(three):
    """Of a's six samples some class has fewer than three: its row is 0, with no mark."""
    run = federate(three, "fedgh", fedgh__min_count=3, **OPTIONS, **DEEP)
    counts = np.bincount(rows_of(three["a"])[1], minlength=3)
    table = sent_by(run, "a", 0, "prototypes").view(3, -1)
    assert (counts < 3).any() and table[:, -1].tolist() == (counts >= 3).astype(float).tolist()
    assert not table[torch.from_numpy(counts < 3)].any()
