"""FedRoD: two silos by hand, rounds in numpy, balanced silos are FedAvg, what is exported (B20)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from predictions import exported_head
from tiny import SHORT, comparable, federate, initial, rows_of, same, write_silo
from two_layers import DEEP, FC1, FC2, HIDDEN, deep_gradient, replies_of, sent_by, start_at

OPTIONS = {**DEEP, **SHORT, "momentum": 0.9}


def test_two_silos_by_hand(tmp_path, monkeypatch):
    """One column, no hidden layer, start G = (1, -1; 0, 0), η = 1, one step; x = 1 in all rows.

    a: three rows of class 0, one of 1. G z = (1, -1), plus log (1, 1/3): p_0 = e / (e + e^-1 / 3). The grad of the
    first weight and bias is p_0 - 3/4. P starts as G: G z + P z = (2, -2), r_0 = 1 / (1 + e^-4), grad r_0 - 3/4.
    b: one row of class 1; class 0 has log 0, so p_1 = 1 and G does not move; P: r_0, grad r_0.
    """
    start_at(monkeypatch, [1, -1, 0, 0])
    files = {
        "a": write_silo(tmp_path / "a.npz", [[1]] * 4, [0, 0, 0, 1]),
        "b": write_silo(tmp_path / "b.npz", [[1]], [1]),
    }
    run = federate(files, "fedrod", rounds=1)
    e, r = math.e, 1 / (1 + math.exp(-4))
    g = e / (e + 1 / (3 * e)) - 3 / 4
    sent = {silo: p.models["model"].vector.tolist() for _, silo, p, _ in replies_of(run)}
    near(sent["a"], [1 - g, -1 + g, -g, g])
    assert sent["b"] == [1, -1, 0, 0]
    for silo, grad in (("a", r - 3 / 4), ("b", r)):
        own = [1 - grad, -1 + grad, -grad, grad]
        near(run.kept(silo)["head"], own)
        near(run.personal(silo), np.add(own, sent[silo]))
    # Before training it predicts with twice the head, after it with the mean G and its own P.
    assert run.values("loss", "b", "received")[0] == pytest.approx(
        4 + math.log(1 + math.exp(-4))
    )
    logit = 2 - 2 * (r - 3 / 4) - 2 * 4 / 5 * g  # of class 0, half of the difference
    loss = run.values("loss", "a", "received")[1]
    near(loss, math.log(1 + math.exp(-2 * logit)) + 2 * logit / 4)


@pytest.mark.parametrize("gamma, start", [(1.0, "copy"), (0.6, "zeros")])
def test_rounds_in_numpy(two, gamma, start):
    """Three rounds of three full-batch steps in float64; P's grad is of before the joint step."""
    run = federate(
        two,
        "fedrod",
        rounds=3,
        local_epochs=3,
        **DEEP,
        fedrod__gamma=gamma,
        fedrod__start=start,
    )
    w = run.start()
    heads = dict.fromkeys(two, w[FC2] * (start == "copy"))
    for _ in range(3):
        total = np.zeros_like(w)
        for silo, file in two.items():
            x, y = rows_of(file)
            local, own = w.copy(), heads[silo]
            for _ in range(3):
                # Both losses are a plain network's with other last weights.
                both, shifted = local.copy(), local.copy()
                both[FC2] += own
                shifted[-3:] += gamma * np.log(np.bincount(y, minlength=3) + 1e-300)
                own = own - 0.3 * deep_gradient(both, x, y)[FC2]
                local -= 0.3 * deep_gradient(shifted, x, y)
            heads[silo] = own
            total += len(y) / 16 * local
        w = total
    near(run.shared, w)
    for silo in two:
        near(run.kept(silo)["head"], heads[silo])


def labelled(folder, **labels):
    rng = np.random.default_rng(2)
    return {
        n: write_silo(folder / f"{n}.npz", rng.normal(size=(len(y), 3)), y, 3)
        for n, y in labels.items()
    }


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_balanced_silos_are_fedavg(tmp_path, gamma):
    """Equal counts, or γ = 0: body and generic head bit for bit, whatever P does; not so with unequal counts."""
    balanced = labelled(tmp_path, a=[0, 1, 2] * 2, b=[0, 1, 2] * 4)
    uneven = labelled(tmp_path, c=[0, 1, 2, 2, 2], d=[0, 1, 1, 2])
    for files in (balanced, uneven):
        run = federate(
            files, "fedrod", fedrod__gamma=gamma, fedrod__predict="generic", **OPTIONS
        )
        plain = federate(files, "fedavg", **OPTIONS)
        equal = files is balanced or gamma == 0
        assert same(run.shared, plain.shared) == equal
        if gamma == 0:
            assert comparable(run.rows) == comparable(plain.rows)


def test_a_personal_head_at_zero_predicts_as_the_generic_one(three):
    """In the first round; and the choice of the predictor and of P's start leave φ and G as they are."""
    runs = {
        (start, predict): federate(
            three, "fedrod", fedrod__start=start, fedrod__predict=predict, **OPTIONS
        )
        for start, predict in (("zeros", "personal"), ("copy", "generic"), ("copy", "personal"))
    }
    zero, generic, both = runs.values()
    for silo in three:
        losses = [run.values("loss", silo, "received") for run in (zero, generic, both)]
        assert losses[0][0] == losses[1][0] != losses[2][0]
        assert losses[0][1] != losses[1][1]
    for run in (zero, both):
        assert same(run.shared, generic.shared)


def test_a_class_that_a_silo_lacks(tmp_path):
    """Its output's bias and weights in G stay as they are: log 0 takes them out of the balanced loss; P's do not."""
    files = labelled(tmp_path, a=[0, 1, 1, 0], b=[2, 2, 2])
    run = federate(files, "fedrod", **{**OPTIONS, "rounds": 1})
    start = initial(run.settings, 3, 3)
    sent = sent_by(run, "a", 0)
    last = slice(FC2.start + 2 * HIDDEN, FC2.start + 3 * HIDDEN)
    assert same(sent[last], start[last]) and float(sent[-1]) == float(start[-1])
    assert same(sent_by(run, "b", 0), start)  # one class: p = 1
    own = run.kept("b")["head"]
    assert bool(torch.isfinite(own).all()) and not same(own, start[FC2])


def test_an_absent_silo_keeps_its_head_and_a_late_one_begins_with_the_initial(three):
    run = federate(three, "fedrod", **OPTIONS, absent={("a", 2), ("b", 1)})
    one = federate(three, "fedrod", **{**OPTIONS, "rounds": 1}, absent={("b", 1)})
    two = federate(three, "fedrod", **{**OPTIONS, "rounds": 2}, absent={("a", 2), ("b", 1)})
    assert same(one.kept("a")["head"], two.kept("a")["head"])
    assert "head" in run.kept("b")
    sent = {(r, silo): p.models["model"].vector for r, silo, p, _ in replies_of(run)}
    mean = (6 * sent[1, "a"] + 8 * sent[1, "c"]) / 14
    near(run.received("b", 2), mean, 1e-5)


def test_the_export_is_both_heads(three, tmp_path):
    run = federate(three, "fedrod", directory=tmp_path / "run", **OPTIONS)
    x, _ = rows_of(three["b"])
    w = sent_by(run, "b", -1).double().numpy()
    own = run.kept("b")["head"].double().numpy()
    z = np.maximum(x @ w[FC1][:12].reshape(4, 3).T + w[FC1][12:], 0)
    logits = sum(z @ head[:12].reshape(3, 4).T + head[12:] for head in (w[FC2], own))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert exported_head(tmp_path, three["b"], p) is None  # a plain network
