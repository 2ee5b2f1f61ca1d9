"""IFCA: four silos by hand, rounds in numpy with choices, one model, equal models, a lone silo (B40)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, federate, gradient, initial, round_of, rows_of, same, write_silo
from two_layers import replies_of

import client.session
import server.run.loop
from strategies.ifca import IFCAClient

OPTIONS = {**SHORT, "momentum": 0.9}


def start_with(monkeypatch, **vectors):
    """The initial model of each purpose; the first one's is ""."""

    def made(*arguments):
        return lambda purpose: torch.tensor(vectors[purpose.replace("-", "_") or "first"])

    monkeypatch.setattr(client.session, "initial_model", made)
    monkeypatch.setattr(server.run.loop, "initial_model", made)


@pytest.fixture
def four(tmp_path):
    """Of one column, two classes: a (2 -> 0), b three times (1 -> 1), c (1 -> 0), d (2 -> 1)."""
    rows = {"a": ([[2]], [0]), "b": ([[1]] * 3, [1] * 3), "c": ([[1]], [0]), "d": ([[2]], [1])}
    return {name: write_silo(tmp_path / f"{name}.npz", *given) for name, given in rows.items()}


def test_four_silos_by_hand(four, monkeypatch):
    """One step of 1; weights (u, -u), biases (v, -v). The first model starts at (1, 0), the second at (-1, 0).

    The logit of class 0 is u x, so a and c have the lower loss with the first, b and d with the second. The error of
    the true class is 1 / (1 + e^(2 x)): q at x = 1, s at x = 2. a: (1 + 2 s, s); c: (1 + q, q); their mean is alike,
    one row each. b: (-1 - q, -q); d: (-1 - 2 s, -s), of 3 and 1 rows.
    """
    start_with(monkeypatch, first=[1.0, -1.0, 0.0, 0.0], cluster_1=[-1.0, 1.0, 0.0, 0.0])
    run = federate(four, "ifca", rounds=1, robust="none")
    q, s = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(4))
    first = (1 + (2 * s + q) / 2, (s + q) / 2)
    second = (-1 - (3 * q + 2 * s) / 4, -(3 * q + s) / 4)
    for name, (u, v) in (("global", first), ("cluster-1", second)):
        near(run.held[name], [u, -u, v, -v])
    # The received model of the closing exchange is that of the silo's group: b's error there is 1 / (1 + e^-2(u + v)).
    loss = math.log(1 + math.exp(2 * sum(second)))
    near(run.values("loss", "b", "received")[-1], loss)


@pytest.fixture
def groups(tmp_path):
    """Five silos of two kinds: labels by one rule, or by its opposite."""
    rng, files = np.random.default_rng(6), {}
    rule = rng.normal(size=(3, 3))
    for name, n in zip("abcde", (6, 9, 7, 8, 5), strict=True):
        x = rng.normal(size=(n, 3))
        y = (x @ (rule if name in "ace" else -rule)).argmax(1)
        files[name] = write_silo(tmp_path / f"{name}.npz", x, y, 3)
    return files


def loss_of(w, x, y):
    z = x @ w[:9].reshape(3, 3).T + w[9:]
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))


@pytest.mark.parametrize("average", ["samples", "silos"])
def test_rounds_in_numpy(groups, average):
    """Six rounds of two full-batch steps of three models; e is away in round 2. What one silo alone chose stays."""
    eta = 0.4
    run = federate(
        groups,
        "ifca",
        rounds=6,
        local_epochs=2,
        learning_rate=eta,
        ifca__clusters=3,
        ifca__average=average,
        prepare=lambda grid: grid.absent.add(("e", 2)),
    )
    names = ["global", "cluster-1", "cluster-2"]
    models = [
        initial(run.settings, 3, 3, purpose).double().numpy()
        for purpose in ("", "cluster-1", "cluster-2")
    ]
    for r in range(1, 7):
        chosen: dict[int, list[tuple[np.ndarray, int]]] = {}
        for silo in groups:
            if (silo, r) == ("e", 2):
                continue
            x, y = rows_of(groups[silo])
            j = int(np.argmin([loss_of(w, x, y) for w in models]))
            local = models[j].copy()
            for _ in range(2):
                local = local - eta * gradient(local, x, y)
            chosen.setdefault(j, []).append((local, len(y)))
        for j, found in chosen.items():
            if len(found) > 1:
                weights = [n if average == "samples" else 1 for _, n in found]
                models[j] = np.average([w for w, _ in found], axis=0, weights=weights)
    for name, w in zip(names, models, strict=True):
        near(run.held[name], w, 1e-5)
    last = {silo: p.numbers["cluster"] for _, silo, p, _ in replies_of(run)}
    assert last["a"] == last["c"] == last["e"] != last["b"] == last["d"]


def test_of_equal_models_all_choose_the_first(three, zero_start):
    run = federate(three, "ifca", rounds=1)
    assert {p.numbers["cluster"] for _, _, p, _ in replies_of(run)} == {0}
    assert not run.held["cluster-1"].any()
    assert run.shared.any()


def test_what_one_silo_alone_trained_is_not_shown_to_all(pair, monkeypatch):
    """a and b choose differently: both models stay, though both silos train."""
    start_with(monkeypatch, first=[1.0, -1.0, 0.0, 0.0], cluster_1=[-1.0, 1.0, 0.0, 0.0])
    run = federate(pair, "ifca", rounds=2)
    assert [p.numbers["cluster"] for _, _, p, _ in replies_of(run)] == [0, 1, 0, 1]
    for name in ("global", "cluster-1"):
        assert same(run.sent_to("a", 3)[name].vector, run.sent_to("a", 1)[name].vector)


@pytest.mark.parametrize("number", [-1, 2, True, 0.0])
def test_a_silo_that_names_no_model_is_left_out(three, number):
    def lie(silo, message, reply):
        if silo == "a" and round_of(message) == 1 and message.metadata.message_type == "train":
            config = reply.content["config"]
            config["number.cluster"] = number
        return reply

    run = federate(three, "ifca", rounds=1, prepare=lambda grid: setattr(grid, "after", lie))
    assert [r.silo for r in run.rows if r.metric == "rejected"] == ["a"]


def test_each_record_counts_alike_in_the_choice(tmp_path, monkeypatch):
    """512 records (1 -> 0) fill a batch, a 513th (1 -> 1) is one of its own. The logit of class 0 is u x.

    u = 1: log(1 + e^-2) = 0.127 and 2.127; u = -0.1: 0.798 and 0.598. The first has the lower mean, 0.131 against
    0.798; of two batches that count alike it would have the higher, 1.127 against 0.698.
    """
    file = write_silo(tmp_path / "a.npz", [[1]] * 513, [0] * 512 + [1])
    start_with(monkeypatch, first=[1.0, -1.0, 0.0, 0.0], cluster_1=[-0.1, 0.1, 0.0, 0.0])
    run = federate({"a": file, "b": file}, "ifca", rounds=1)
    assert {p.numbers["cluster"] for _, _, p, _ in replies_of(run)} == {0}


def test_a_loss_that_is_no_number_is_not_the_lowest():
    client = IFCAClient.__new__(IFCAClient)
    client.training_loss = lambda vector: vector[0]  # type: ignore[method-assign]
    models = [torch.tensor([value]) for value in (math.nan, 2.0, 1.0)]
    assert client.choose_model(models) is models[2] and client.cluster == 2
