"""PartialFed-Fix: two silos by hand, rounds in numpy, the equivalences, statistics, who comes late (B18)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from tiny import comparable, federate, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of, sent_by, start_at

from partitions.common.errors import UserError

OPTIONS = {**DEEP, "rounds": 4, "local_epochs": 2, "batch_size": 4, "momentum": 0.5}


def test_two_silos_by_hand(pair, monkeypatch):
    """One column, one hidden unit: w = (s, t; c, -c, d, -d), h = relu(s x + t), z = 2 (c h + d); s = c = 1, t = d = 0.

    One step of η = 1. a (x = 2, class 0): h = 2, z = 4, q = 1 / (1 + e^4): dc = -2 q, dd = -q, ds = -4 q, dt = -2 q.
    b (x = 1, class 1): h = 1, z = 2, r = 1 / (1 + e^-2): dc = dd = r, ds = dt = 2 r. All is averaged, 1/4 and 3/4; a
    loads s = 1 + q - 3/2 r < 0 and t < 0, which leaves h = 0 and, with its own d = q, the loss log(1 + e^(-2 q)).
    """
    start_at(monkeypatch, [1, 0, 1, -1, 0, 0])
    run = federate(pair, "partialfed", mlp__hidden="1", rounds=1)
    q, r = 1 / (1 + math.exp(4)), 1 / (1 + math.exp(-2))
    c, d = 1 + (2 * q - 3 * r) / 4, (q - 3 * r) / 4
    mean = [1 + q - 1.5 * r, 0.5 * q - 1.5 * r, c, -c, d, -d]
    near(run.shared, mean)
    near(run.values("loss", "a", "received")[1], math.log(1 + math.exp(-2 * q)))


@pytest.mark.parametrize("personal, own", [("output", FC2), ("input", FC1), ("fc1", FC1)])
def test_rounds_of_several_steps_in_numpy(two, personal, own):
    """Four rounds in float64: the personal layers are averaged too, and only the server ever sees that average."""
    run = federate(
        two,
        "partialfed",
        partialfed__personal=personal,
        **DEEP,
        rounds=4,
        local_epochs=2,
        momentum=0.5,
    )
    w = run.start()
    last = dict.fromkeys(two, w)
    for _ in range(4):
        total = np.zeros_like(w)
        for silo, file in two.items():
            x, y = rows_of(file)
            local = w.copy()
            local[own] = last[silo][own]
            velocity = np.zeros_like(w)
            for _ in range(2):
                velocity = 0.5 * velocity + deep_gradient(local, x, y)
                local -= 0.3 * velocity
            last[silo] = local
            total += len(y) / 16 * local
        w = total
    run.ends_near(w, last)


def test_batch_normalisation_is_kept_with_its_statistics(three, tiny_bn):
    """``norm``: all is sent, 39 parameters and 8 statistics; a silo goes on from its own γ, β and statistics.

    In tiny-bn the layer is a block of its own, so that its name comes to the same bit for bit.
    """
    options = {**OPTIONS, "model": "tiny-bn"}
    run = federate(three, "partialfed", partialfed__personal="norm", **options)
    by_name = federate(three, "partialfed", partialfed__personal="norm,", **options)
    assert comparable(run.rows) == comparable(by_name.rows)
    sent = replies_of(run, "a")[-1][2].models
    assert (len(sent["model"].vector), len(sent["buffers"].vector)) == (39, 8)
    own = [run.kept(silo)["personal.buffers"] for silo in three]
    assert not any(same(own[i], own[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    mean = run.held["buffers"]
    near(mean, 6 / 24 * own[0] + 10 / 24 * own[1] + 8 / 24 * own[2], 1e-5)
    assert not any(same(mean, buffers) for buffers in own)


def test_who_comes_late_loads_all_and_who_is_absent_keeps_its_own(three):
    """c first comes in round 3 and starts from the average of all layers; b, away in round 3, goes on from its own fc2.

    The loss of the received model in that round says from what.
    """

    def absent(grid):
        grid.absent = {("c", 1), ("c", 2), ("b", 3)}

    run = federate(three, "partialfed", **{**OPTIONS, "rounds": 4}, prepare=absent)

    def loss_of(w, silo):
        x, y = rows_of(three[silo])
        hidden = np.maximum(x @ w[:12].reshape(4, 3).T + w[12:16], 0)
        logits = hidden @ w[16:28].reshape(3, 4).T + w[28:]
        return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean())

    received = {
        silo: {
            r.round: r.value
            for r in run.rows
            if (r.silo, r.snapshot, r.split, r.metric) == (silo, "received", "test", "loss")
        }
        for silo in three
    }
    third = run.received("a", 3).double().numpy()
    assert received["c"][3] == pytest.approx(loss_of(third, "c"), rel=1e-5)
    fourth = run.received("b", 4).double().numpy()
    own = sent_by(run, "b", 1).double().numpy()
    fourth[FC2] = own[FC2]
    assert received["b"][4] == pytest.approx(loss_of(fourth, "b"), rel=1e-5)


@pytest.mark.parametrize(
    "personal, reason",
    [
        ("head", r"personal = 'head'.*fc1, fc2"),
        ("norm", r"partialfed.personal = norm.*has none.*fc1, fc2"),
    ],
)
def test_what_the_network_does_not_have_is_refused(three, personal, reason):
    with pytest.raises(UserError, match=reason):
        federate(three, "partialfed", partialfed__personal=personal, **OPTIONS)
