"""FedBABU: two silos by hand, rounds in numpy, the head that stands still, the special cases (B13)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, STILL, comparable, federate, initial, keep_weights_at, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of, sent_by, start_at

from strategies.base.client import SiloClient

OPTIONS = {**DEEP, **SHORT, "momentum": 0.5}


@pytest.mark.parametrize("tune", ["all", "head", "body"])
def test_two_silos_by_hand(pair, tune, monkeypatch):
    """One column, one hidden unit: w = (s, t; c, -c, d, -d), h = relu(s x + t), z = 2 (c h + d); s = c = 1, t = d = 0.

    One step of η = 1. a (x = 2, class 0): h = 2, z = 4, q = 1 / (1 + e^4); dc = -2 q, dd = -q, dh = -2 q, so ds = -4 q,
    dt = -2 q. b (x = 1, class 1): h = 1, z = 2, r = 1 / (1 + e^-2); dc = dd = r, dh = 2 r, so ds = dt = 2 r.
    The mean of the bodies has weights 1/4 and 3/4. Fine-tuning, one step from the received model, takes the same
    gradients: of all, of (c, d) or of (s, t).
    """
    start_at(monkeypatch, [1, 0, 1, -1, 0, 0])
    run = federate(
        pair, "fedbabu", mlp__hidden="1", rounds=1, fedbabu__epochs=1, fedbabu__tune=tune
    )
    q, r = 1 / (1 + math.exp(4)), 1 / (1 + math.exp(-2))
    u = [1 + q - 1.5 * r, 0.5 * q - 1.5 * r]
    near(run.shared, u)
    steps = {"a": ([4 * q, 2 * q], [2 * q, q]), "b": ([-2 * r, -2 * r], [-r, -r])}
    for silo, (body, (c, d)) in steps.items():
        move = [*body, c, -c, d, -d]
        still = {"all": [], "head": [0, 1], "body": [2, 3, 4, 5]}[tune]
        expected = [
            w + (0 if i in still else m)
            for i, (w, m) in enumerate(zip([1, 0, 1, -1, 0, 0], move, strict=True))
        ]
        near(run.personal(silo), expected)


@pytest.mark.parametrize("average", ["samples", "silos"])
def test_rounds_of_several_steps_in_numpy(two, average):
    """Three rounds in float64: two steps on fc1 below the first fc2, then three on all, with momentum of its own."""
    run = federate(
        two,
        "fedbabu",
        **DEEP,
        rounds=3,
        local_epochs=2,
        momentum=0.5,
        lr_decay=0.9,
        fedbabu__epochs=3,
        fedbabu__average=average,
    )
    start = run.start()
    u, personal = start[FC1], {}

    def train(w, part, steps, rate):
        velocity = np.zeros_like(w[part])
        for _ in range(steps):
            velocity = 0.5 * velocity + deep_gradient(w, x, y)[part]
            w[part] -= rate * velocity

    for server_round in range(3):
        received = np.concatenate([u, start[FC2]])
        total = np.zeros_like(u)
        rate = 0.3 * 0.9**server_round
        for silo, file in two.items():
            x, y = rows_of(file)
            local, personal[silo] = received.copy(), received.copy()
            train(local, FC1, 2, rate)
            train(personal[silo], slice(0, None), 3, rate)
            total += (len(y) / 16 if average == "samples" else 1 / 2) * local[FC1]
        u = total
    run.ends_near(u, personal)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_head_stands_still_in_the_federated_phase(three, momentum, monkeypatch):
    """Bit for bit the initial one at every step, with weight decay and with momentum; then it is fine-tuned."""
    seen: dict[tuple[str, int], list[torch.Tensor]] = {}
    compute = SiloClient.gradient

    def recorded(self, x, y):
        seen.setdefault((self.silo.name, self.round), []).append(self.model.vector.clone())
        return compute(self, x, y)

    monkeypatch.setattr(SiloClient, "gradient", recorded)
    options = {**OPTIONS, "momentum": momentum, "weight_decay": 0.1, "batch_size": 1000}
    run = federate(three, "fedbabu", fedbabu__epochs=2, **options)
    head = initial(run.settings, 3, 3)[FC2]
    assert len(seen) == 9
    for steps in seen.values():
        assert len(steps) == 4
        # Two of the body, and the first of the fine-tuning
        assert all(same(w[FC2], head) for w in steps[:3])
        assert not same(steps[3][FC2], head)
        assert not same(steps[0][FC1], steps[1][FC1])
        assert same(steps[0], steps[2])  # which starts from the received model


@pytest.mark.parametrize("tune, epochs", [("all", 0), ("head", 3), ("body", 1), ("all", 4)])
def test_fine_tuning_leaves_the_federated_training_as_it_is(three, tune, epochs):
    """Without an epoch the personal model is the received one: the averaged body and the first head."""
    default = federate(three, "fedbabu", **OPTIONS)
    run = federate(three, "fedbabu", fedbabu__tune=tune, fedbabu__epochs=epochs, **OPTIONS)
    assert same(default.shared, run.shared)
    received = [[r for r in one.rows if r.snapshot == "received"] for one in (default, run)]
    assert comparable(received[0]) == comparable(received[1])
    start = initial(run.settings, 3, 3)
    for silo in three:
        own, body = run.personal(silo), run.received(silo, 3)
        assert same(own[FC1], body) == (tune == "head" or epochs == 0)
        assert same(own[FC2], start[FC2]) == (tune == "body" or epochs == 0)


@pytest.mark.parametrize("tune", ["all", "head", "body"])
def test_everything_personal_is_fine_tuning_of_the_initial_model(three, tune):
    """Nothing travels and nothing is trained together; as the body is empty, tuning it changes nothing."""
    run = federate(
        three,
        "fedbabu",
        fedbabu__personal="all",
        fedbabu__tune=tune,
        fedbabu__epochs=2,
        **OPTIONS,
    )
    alone = federate(three, "local", **{**OPTIONS, "rounds": 1})
    assert sum(run.values("bytes_up") + run.values("bytes_down")) == 0
    for silo in three:
        assert len(set(run.values("loss", silo, "received"))) == 1
        first = run.values("loss", silo, "personal")[0]
        assert (
            first
            == (alone.values("loss", silo, "personal" if tune != "body" else "received")[0])
        )


def test_absent_silos_are_left_out(three):
    """The mean is over who came; b is back in round 2, and starts from that mean as the others do."""
    run = federate(three, "fedbabu", **{**OPTIONS, "rounds": 2}, absent={("b", 1)})
    sent = {silo: p.models["shared"].vector for r, silo, p, _ in replies_of(run) if r == 1}
    mean = 6 / 14 * sent["a"] + 8 / 14 * sent["c"]
    near(run.received("b", 2), mean, 1e-5)
    assert len(replies_of(run, "b")) == 1


def test_with_ala_the_body_that_is_mixed_is_the_federations(three):
    """W = 0 keeps the silo's own body, which is the trained one and not the fine-tuned: it goes on as if alone."""
    options = {**OPTIONS, "fedbabu__epochs": 2}
    alone = federate({"a": three["a"]}, "fedbabu", **options)
    run = federate(
        three, "fedbabu", ala=True, prepare=keep_weights_at(0.0, 16), **STILL, **options
    )
    ours, theirs = (sent_by(r, "a", -1, "shared") for r in (run, alone))
    assert same(ours, theirs)
    assert not same(run.personal("a")[FC1], ours)
