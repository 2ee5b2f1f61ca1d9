"""FedLP: two silos by hand, rounds in numpy with the draw as it was, FedAvg and standing still as limits (B26)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, federate, initial, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of

import strategies.fedlp
from models.layout import Block, Layout
from server.run.reporter import Progress
from strategies.base.settings import Common
from strategies.base.transport.payload import array_record
from strategies.fedlp import LpSettings, parts_to_send

Draws = dict[tuple[str, int], list[slice]]
WHOLE = {**SHORT, "learning_rate": 0.2}


def draw(monkeypatch, draws):
    def fixed(layout, settings, common, silo, server_round):
        return draws[silo, server_round]

    monkeypatch.setattr(strategies.fedlp, "parts_to_send", fixed)


def test_two_silos_by_hand(pair, monkeypatch, zero_start):
    """One step of FedAvg from 0: w_a = (1, -1, 1/2, -1/2), w_b = (-1, 1, -1, 1)/2. a sends its weights, b its weights
    and biases: the weights are a mean with equal weights, the biases b's. Nobody sends anything in round 2."""
    weights, biases = slice(0, 2), slice(2, 4)
    draws = {("a", 1): [weights], ("b", 1): [weights, biases], ("a", 2): [], ("b", 2): []}
    draw(monkeypatch, draws)
    run = federate(pair, "fedlp", rounds=2)
    assert [p.models["layers"].vector.tolist() for r, _, p, _ in replies_of(run) if r == 1] == [
        [1.0, -1.0],
        [-0.5, 0.5, -0.5, 0.5],
    ]
    assert run.shared.tolist() == [0.25, -0.25, -0.5, 0.5]
    assert run.values("bytes_up") == [(2 + 4) * 4, 0, 0]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_rounds_in_numpy(three, weights):
    """Five rounds of three full-batch steps of a network of two layers, p = 1/2; b is away in round 2.

    Which layers came is read off the lengths of the replies: 16 is the first, 15 the second, 31 both.
    """
    run = federate(
        three,
        "fedlp",
        rounds=5,
        local_epochs=3,
        fedlp__keep=0.5,
        fedlp__weights=weights,
        **DEEP,
        absent={("b", 2)},
    )
    lengths = {(s, r): p.models["layers"].vector.numel() for r, s, p, _ in replies_of(run)}
    assert set(lengths.values()) == {0, 15, 16, 31} and ("b", 2) not in lengths
    w = run.received("a", 1).double().numpy()
    for r in range(1, 6):
        after = w.copy()
        ends = {}
        for silo, file in three.items():
            ends[silo] = w.copy()
            for _ in range(3):
                ends[silo] -= 0.3 * deep_gradient(ends[silo], *rows_of(file))
        for part, with_it in ((FC1, (16, 31)), (FC2, (15, 31))):
            came = [s for s in three if lengths.get((s, r)) in with_it]
            counts = [len(rows_of(three[s])[1]) if weights == "samples" else 1 for s in came]
            if came:
                after[part] = np.average([ends[s][part] for s in came], axis=0, weights=counts)
        w = after
    near(run.shared, w, 2e-6)


def test_nothing_sent_keeps_w(three):
    run = federate(three, "fedlp", fedlp__keep=0.0, **WHOLE)
    assert same(run.shared, initial(run.settings, 3, 3))
    assert run.values("bytes_up") == [0, 0, 0, 0]
    assert not same(run.personal("a"), initial(run.settings, 3, 3))


def test_the_draw():
    """p of all layers in the long run, others for every silo and round, the same for the same."""
    layout = Layout((), (), tuple(Block(f"block{i}", i, i + 1) for i in range(50)))
    settings, common = LpSettings(keep=0.3), Common(seed=5)
    draws = [
        parts_to_send(layout, settings, common, silo, r)
        for silo in ("a", "b")
        for r in range(1, 101)
    ]
    assert abs(sum(map(len, draws)) / (200 * 50) - 0.3) < 0.02
    assert len({tuple(part.start for part in d) for d in draws}) == 200
    assert parts_to_send(layout, settings, common, "a", 1) == draws[0]
    assert parts_to_send(layout, settings, Common(seed=6), "a", 1) != draws[0]


def test_other_layers_than_were_drawn_are_left_out(three):
    """A reply of another length than the draw's is refused, and named."""

    def after(silo, message, reply):
        if silo == "c" and message.metadata.message_type == "train":
            reply.content["model.layers"] = array_record({"vector": torch.zeros(5)})
        return reply

    def prepare(grid):
        grid.after = after

    seen: list[Progress] = []
    federate(three, "fedlp", fedlp__keep=1.0, rounds=1, prepare=prepare, watch=seen.append)
    assert "shape (5,), not float32 of (12,)" in seen[0].rejected["c"]


def test_statistics_travel_whole(three, tiny_bn):
    """8 buffer scalars with every reply, whatever layers it has; 39 parameters in three blocks."""
    run = federate(three, "fedlp", model="tiny-bn", fedlp__keep=0.0, **WHOLE)
    assert run.values("bytes_up") == [3 * 8 * 4] * 3 + [0]
    assert run.values("bytes_down") == [3 * 39 * 4, *[3 * 47 * 4] * 3]
