"""LG-FedAvg: two silos by hand, rounds in numpy with FedAvg before them, the equivalences (B14)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flwr.app import Error, Message
from near import near
from representatives import product
from tiny import comparable, federate, round_of, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of, sent_by, start_at

OPTIONS = {**DEEP, "rounds": 4, "local_epochs": 2, "batch_size": 4, "momentum": 0.5}


def lg(**own):
    return {
        "strategy": "lg-fedavg",
        **{f"lg-fedavg.{key}": value for key, value in own.items()},
    }


def test_two_silos_by_hand(pair, monkeypatch):
    """One column, one hidden unit: w = (s, t; c, -c, d, -d), h = relu(s x + t), z = 2 (c h + d); s = c = 1, t = d = 0.

    One step of η = 1, on all. a (x = 2, class 0): h = 2, z = 4, q = 1 / (1 + e^4): dc = -2 q, dd = -q, ds = -4 q,
    dt = -2 q. b (x = 1, class 1): h = 1, z = 2, r = 1 / (1 + e^-2): dc = dd = r, ds = dt = 2 r.
    fc2 is averaged with weights 1/4 and 3/4: c = 1 + (2 q - 3 r) / 4, d = (q - 3 r) / 4; fc1 stays.
    """
    start_at(monkeypatch, [1, 0, 1, -1, 0, 0])
    run = federate(pair, mlp__hidden="1", rounds=1, **lg(layers=1))
    q, r = 1 / (1 + math.exp(4)), 1 / (1 + math.exp(-2))
    c, d = 1 + (2 * q - 3 * r) / 4, (q - 3 * r) / 4
    near(run.received("a", 2), [c, -c, d, -d])
    near(run.personal("a"), [1 + 4 * q, 2 * q, 1 + 2 * q, -1 - 2 * q, q, -q])
    near(run.personal("b"), [1 - 2 * r, -2 * r, 1 - r, r - 1, -r, r])


@pytest.mark.parametrize("average", ["samples", "silos"])
@pytest.mark.parametrize("pretrain", [0, 2])
def test_rounds_of_several_steps_in_numpy(two, pretrain, average):
    """Five rounds in float64, the first two FedAvg's: then all go on from the averaged model, fc1 on its own."""
    run = federate(
        two,
        **lg(layers=1, pretrain=pretrain, average=average),
        **DEEP,
        rounds=5,
        local_epochs=2,
        momentum=0.5,
    )
    w = run.start()
    own = dict.fromkeys(two, w)
    for server_round in range(5):
        total = np.zeros_like(w)
        for silo, file in two.items():
            x, y = rows_of(file)
            local = w.copy()
            if server_round > pretrain:
                local[FC1] = own[silo][FC1]
            velocity = np.zeros_like(w)
            for _ in range(2):
                velocity = 0.5 * velocity + deep_gradient(local, x, y)
                local -= 0.3 * velocity
            own[silo] = local
            total += (len(y) / 16 if average == "samples" else 1 / 2) * local
        w = total if server_round < pretrain else np.concatenate([w[FC1], total[FC2]])
    run.ends_near(w, own)


@product(
    model=["mlp", "tiny-bn"],
    end=[
        ({"layers": 9}, "fedavg"),
        ({"layers": 1, "pretrain": 4}, "fedavg"),
        ({"layers": 0}, "local"),
    ],
)
def test_the_ends(three, end, model, tiny_bn):
    """All layers averaged, or FedAvg for all rounds: FedAvg; none averaged: Local. Bit for bit, with bytes."""
    own, other = end
    plain = federate(three, other, **{**OPTIONS, "model": model})
    run = federate(three, **lg(**own), **{**OPTIONS, "model": model})
    # The closing exchange is after the last of FedAvg's rounds
    last = 4 if "pretrain" in own else 5
    assert comparable(
        [r for r in plain.rows if r.round <= last and r.metric != "bytes_down"]
    ) == comparable([r for r in run.rows if r.round <= last and r.metric != "bytes_down"])
    assert run.values("bytes_down")[:4] == plain.values("bytes_down")[:4]
    for silo in three:
        assert same(plain.personal(silo), run.personal(silo))


def test_after_fedavg_every_silo_starts_from_the_averaged_model(three):
    """c is away in round 3, the first of its own layers: it gets the model whole in round 4, with the fc2 of then.

    b's reply of round 3 is lost: the server does not know that b began, and sends the model whole once more.
    """

    def lose(silo, message, reply):
        lost = message.metadata.message_type == "train" and (silo, round_of(message)) == (
            "b",
            3,
        )
        return Message(Error(1, "lost on the way"), reply_to=message) if lost else reply

    def prepare(grid):
        grid.absent, grid.after = {("c", 3)}, lose

    run = federate(
        three, **lg(layers=1, pretrain=2), **{**OPTIONS, "rounds": 5}, prepare=prepare
    )
    plain = federate(three, "fedavg", **{**OPTIONS, "rounds": 2})
    averaged = plain.shared
    assert all(same(run.received(silo, 3), averaged) for silo in ("a", "b"))
    # The only one that arrived in round 3
    top = sent_by(run, "a", 2, "shared")
    for silo in ("b", "c"):
        fourth = run.received(silo, 4)
        assert same(fourth[FC1], averaged[FC1]) and same(fourth[FC2], top)
    assert same(run.received("a", 4), top)
    assert {len(run.received(silo, 5)) for silo in three} == {15}
    own = [run.personal(silo)[FC1] for silo in three]
    assert not any(same(own[i], own[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_an_absent_silo_keeps_its_lower_layers(three):
    run = federate(
        three, **lg(layers=1), **OPTIONS, prepare=lambda grid: grid.absent.add(("b", 4))
    )
    *_, (last, _, payload, _) = replies_of(run, "b")
    assert last == 3
    assert same(payload.models["shared"].vector, run.personal("b")[FC2])
    near(
        run.received("b", 5),
        6 / 14 * sent_by(run, "a", -1, "shared") + 8 / 14 * sent_by(run, "c", -1, "shared"),
        1e-5,
    )


def test_a_network_without_personal_layers_is_said(three, caplog):
    line = "lg-fedavg.layers = 2: the network has 2, nothing is personal and this is FedAvg"
    for layers, said in ((1, 0), (2, 1)):
        federate(three, **lg(layers=layers), **{**OPTIONS, "rounds": 1})
        assert [r.getMessage() for r in caplog.records].count(line) == said
