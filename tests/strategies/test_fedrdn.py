"""FedRDN: statistics by hand, rounds in double precision with their draws, FedAvg of standardised inputs (B49)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, comparable, federate, round_of, rows_of, same, write_silo
from two_layers import DEEP, deep_gradient

from models.samples import Samples
from models.training import generator
from strategies.base.transport.payload import array_record, decode
from strategies.fedrdn import normalise, statistics

OPTIONS = {**SHORT, "momentum": 0.9}
INPUT = slice(0, 6)  # μ and σ of three columns, below the network


def test_statistics_by_hand():
    """Columns (1, 3) and (5, 5): means 2 and 5, deviations 1 and, of a constant, 1. Pictures: over all places."""
    x = np.array([[1, 5], [3, 5]], np.float32)
    found = statistics(Samples(x, np.array([0, 1])))
    assert found.tolist() == [[2, 5], [1, 1]]
    assert normalise(torch.tensor([[3.0, 7.0]]), *found).tolist() == [[1, 2]]
    pictures = np.zeros((2, 2, 2, 1), np.float32)
    pictures[0] = 4
    assert statistics(Samples(pictures, np.array([0, 1]))).tolist() == [[2], [2]]


def pair_of(file):
    x = rows_of(file)[0]
    return np.array([x.mean(0), x.std(0)])


def test_rounds_in_numpy(three):
    """Three rounds of two full-batch steps; b is away in round 2, and its pair stays."""
    run = federate(three, "fedrdn", rounds=3, local_epochs=2, absent={("b", 2)}, **DEEP)
    w = run.received("a", 1).double().numpy().copy()
    assert list(run.sent_to("a", 1)) == ["global"]
    pairs = np.array(
        sorted((pair_of(file) for file in three.values()), key=lambda p: p.tolist())
    )
    near(run.sent_to("c", 2)["inputs"].vector, pairs.ravel())
    for r in range(1, 4):
        ends, weights = [], []
        for silo, file in three.items():
            if (silo, r) == ("b", 2):
                continue
            x, y = rows_of(file)
            order_rng, end = generator(7, silo, r, "train"), w.copy()
            held = pair_of(file)[None] if r == 1 else pairs
            for epoch in range(2):
                order = torch.randperm(len(y), generator=order_rng).numpy()
                seed = generator(7, "augment", silo, r, "train", epoch).initial_seed()
                rng = generator(seed, "inputs")
                j = torch.randint(len(held), (len(y),), generator=rng).numpy()
                drawn = (x[order] - held[j, 0]) / held[j, 1]
                end -= 0.3 * deep_gradient(end, drawn, y[order])
            ends.append(end)
            weights.append(len(y))
            if r == 3:
                own = run.personal(silo).numpy()
                near(own[INPUT], pair_of(file).ravel())
                near(own[6:], end, 1e-5)
        w = np.average(ends, axis=0, weights=weights)
    near(run.shared, w, 1e-5)


def standardised(folder, files):
    """The files with each silo's rows as its own layer makes them, in float32."""
    found = {}
    for name, file in files.items():
        x, y = rows_of(file)
        rows = torch.from_numpy(x.astype(np.float32))
        pair = statistics(Samples(rows.numpy(), y))
        found[name] = write_silo(
            folder / f"{name}.npz", normalise(rows, *pair).numpy(), y.tolist(), 3
        )
    return found


@pytest.mark.parametrize("alike", [False, True])
def test_equal_pairs_are_fedavg_of_standardised_inputs(three, tmp_path, alike):
    """Of one silo, and of silos with the same rows and other labels, bit for bit."""
    files = {"a": three["a"]}
    if alike:
        x, y = rows_of(three["a"])
        for k, name in enumerate("bc"):
            files[name] = write_silo(tmp_path / f"{name}.npz", x, ((y + k + 1) % 3).tolist(), 3)
    (tmp_path / "plain").mkdir()
    run = federate(files, "fedrdn", **OPTIONS, **DEEP)
    plain = federate(standardised(tmp_path / "plain", files), "fedavg", **OPTIONS, **DEEP)
    assert same(run.shared, plain.shared)
    without = ("round_seconds", "bytes_up", "bytes_down")
    assert comparable(run.rows, without=without) == comparable(plain.rows, without=without)


def test_statistics_of_other_units_are_left_out(tmp_path, three):
    """c's columns in smaller units, 20 or 80 times: its own inputs are the same, and others draw its pair or do not."""
    x, y = rows_of(three["c"])

    def own_of_a(units, reach):
        files = {**three, "c": write_silo(tmp_path / "c.npz", units * x, y.tolist(), 3)}
        run = federate(files, "fedrdn", **{"fedrdn.reach": reach}, **OPTIONS, **DEEP)
        return run.personal("a").numpy()

    little, much = own_of_a(20, 10), own_of_a(80, 10)
    near(little, much, 1e-3)
    assert np.abs(own_of_a(20, 1000) - own_of_a(80, 1000)).max() > 0.01


def test_a_deviation_that_is_none_is_left_out(three):
    def lie(silo, message, reply):
        if silo == "a" and round_of(message) == 1 and message.metadata.message_type == "train":
            vector = decode(reply.content)[0].models["inputs"].vector.clone()
            vector[3] = 0.0
            reply.content["model.inputs"] = array_record({"vector": vector})
        return reply

    run = federate(
        three, "fedrdn", prepare=lambda g: setattr(g, "after", lie), **OPTIONS, **DEEP
    )
    assert [r.silo for r in run.rows if r.metric == "rejected"] == ["a"]
    assert len(run.sent_to("b", 2)["inputs"].vector) == 12
