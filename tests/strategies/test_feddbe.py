"""FedDBE: one silo by hand, rounds in numpy, its halves switched off, absent silos, what is exported (B31)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from predictions import read_csv
from tiny import SHORT, federate, initial, rows_of, same, write_silo
from two_layers import DEEP, HIDDEN, replies_of, sent_by, start_at

from client.export import export_model
from client.prediction.predict import predict_file

OPTIONS = {**DEEP, **SHORT, "momentum": 0.9}


def test_one_silo_by_hand(tmp_path, monkeypatch):
    """One column, x = 1 in all rows, no hidden layer, start W = (1, -1), b = 0, η = 1, three rows of class 0, one of 1.

    Round 1 is thrown away, but for the mean feature 1. Round 2, u = 0: p_0 = 1 / (1 + e^-2), s = p_0 - 3/4;
    dW = db = (s, -s), du = W · db = 2 s. Then W = (1 - s, s - 1), b = (-s, s), u = -2 s, and the bias of the plain
    network is b + W u. Without a body the regularisation has no gradient.
    """
    start_at(monkeypatch, [1, -1, 0, 0])
    files = {"a": write_silo(tmp_path / "a.npz", [[1]] * 4, [0, 0, 0, 1])}
    run = federate(files, "feddbe", rounds=2)
    assert replies_of(run)[0][2].models["model"].vector.tolist() == [1]
    assert run.held["mean"].tolist() == [1]
    s = 1 / (1 + math.exp(-2)) - 3 / 4
    w, b, u = 1 - s, -s, -2 * s
    near(run.shared, [w, -w, b, -b])
    near(run.kept("a")["bias"], [u])
    near(run.personal("a"), [w, -w, b + w * u, -b - w * u])
    # One silo: what it starts round 3 from is its own model, with its u.
    assert run.values("loss", "a", "received")[2] == run.values("loss", "a", "personal")[1]


def parts(w):
    a, b, c = 3 * HIDDEN, 4 * HIDDEN, 7 * HIDDEN
    return w[:a].reshape(HIDDEN, 3), w[a:b], w[b:c].reshape(3, HIDDEN), w[c:]


def gradients(w, u, x, y, pull):
    """∇w and ∇u of mean CE(W2 (relu(W1 x + b1) + u) + b2, y); ``pull`` is added to every sample's dL/dz."""
    w1, b1, w2, b2 = parts(w)
    h = np.maximum(x @ w1.T + b1, 0)
    p = np.exp((h + u) @ w2.T + b2)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    dz = (p @ w2 + pull) * (h > 0)
    return np.concatenate(
        [(dz.T @ x).ravel(), dz.sum(0), (p.T @ (h + u)).ravel(), p.sum(0)]
    ), p.sum(0) @ w2


@pytest.mark.parametrize("m, warm_up", [(1.0, "discard"), (0.4, "keep")])
def test_rounds_in_numpy(two, m, warm_up):
    """Four rounds of three full-batch steps in float64. The grad of κ/K sum ½ (z̄ - z̄ᵍ)² is κ m (z̄ - z̄ᵍ) / (K B)."""
    kappa = 5.0
    run = federate(
        two,
        "feddbe",
        rounds=4,
        local_epochs=3,
        **DEEP,
        feddbe__kappa=kappa,
        feddbe__momentum=m,
        feddbe__warm_up=warm_up,
    )
    w = run.start()
    biases, goal = {silo: np.zeros(HIDDEN) for silo in two}, np.zeros(HIDDEN)
    for server_round in range(4):
        total, means = np.zeros_like(w), np.zeros(HIDDEN)
        for silo, file in two.items():
            x, y = rows_of(file)
            local, u, mean = w.copy(), biases[silo].copy(), np.zeros(HIDDEN)
            for _ in range(3):
                w1, b1, _, _ = parts(local)
                mean = (1 - m) * mean + m * np.maximum(x @ w1.T + b1, 0).mean(0)
                pull = (
                    kappa * m * (mean - goal) / (HIDDEN * len(y)) if server_round else 0 * mean
                )
                grad, grad_u = gradients(local, u, x, y, pull)
                local -= 0.3 * grad
                u -= 0.3 * grad_u * (server_round > 0)
            biases[silo] = u
            total += len(y) / 16 * local
            means += len(y) / 16 * mean
        if server_round or warm_up == "keep":
            w = total
        goal = goal if server_round else means
    near(run.held["mean"], goal)
    near(run.shared, w)
    for silo in two:
        near(run.kept(silo)["bias"], biases[silo])


def test_without_both_halves_it_is_fedavg(three):
    off = {"feddbe__kappa": 0.0, "feddbe__bias": False}
    run = federate(three, "feddbe", feddbe__warm_up="keep", **off, **OPTIONS)
    plain = federate(three, "fedavg", **OPTIONS)
    assert same(run.shared, plain.shared)
    for silo in three:
        assert same(run.personal(silo), plain.personal(silo))
        assert run.values("loss", silo, "received") == plain.values("loss", silo, "received")
    for half in off:  # and each half does something
        one = federate(three, "feddbe", feddbe__warm_up="keep", **{half: off[half]}, **OPTIONS)
        assert not same(one.shared, plain.shared)


def test_the_warm_up_is_thrown_away(three):
    """After round 1 all silos start from the initial model again, and their u is still 0."""
    run = federate(three, "feddbe", **OPTIONS)
    start = initial(run.settings, 3, 3)
    assert same(run.received("a", 2), start)
    for silo in three:
        losses = run.values("loss", silo, "received")
        assert losses[0] == losses[1] != losses[2]
    assert "mean" not in run.sent_to("a", 1)
    assert same(run.sent_to("a", 2)["mean"].vector, run.sent_to("b", 4)["mean"].vector)


def test_absent_silos(three):
    """b has no part in z̄ᵍ and starts with u = 0 later; a, away in round 2, begins round 3 with u = 0 too."""
    runs = [
        federate(three, "feddbe", **{**OPTIONS, "rounds": rounds}, absent={("b", 1), ("a", 2)})
        for rounds in (2, 3)
    ]
    sent = {(r, silo): p.models["model"].vector for r, silo, p, _ in replies_of(runs[1])}
    assert {silo: v.numel() for (r, silo), v in sent.items() if r == 1} == {
        "a": HIDDEN,
        "c": HIDDEN,
    }
    goal = (6 * sent[1, "a"] + 8 * sent[1, "c"]) / 14
    near(runs[1].strategy.state.arrays["mean"], goal, 1e-5)
    assert "bias" not in runs[0].kept("a") and "bias" in runs[1].kept("a")
    assert not same(*(run.kept("b")["bias"] for run in runs))


def test_the_export_has_the_bias(three, tmp_path):
    run = federate(three, "feddbe", directory=tmp_path / "run", **OPTIONS)
    card = export_model(tmp_path / "run", "b", "last", tmp_path / "b.safetensors")
    assert card.model.head is None  # a plain network
    x, y = rows_of(three["b"])
    w1, b1, w2, b2 = parts(sent_by(run, "b", -1).double().numpy())
    u = run.kept("b")["bias"].double().numpy()
    p = np.exp((np.maximum(x @ w1.T + b1, 0) + u) @ w2.T + b2)
    p /= p.sum(1, keepdims=True)
    _, _, given = read_csv(predict_file(tmp_path / "b.safetensors", three["b"]))
    assert np.abs(u).max() > 1e-3 and np.allclose(given, p, atol=1e-5)
    assert card.metrics["test.accuracy"] == np.mean(p.argmax(1) == y)
