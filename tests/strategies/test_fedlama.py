"""FedLAMA: the intervals by hand, rounds in numpy, FedAvg at the ends, absent silos and lost replies (B27)."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Error, Message
from near import near
from tiny import federate, initial, random_silos, round_of, rows_of, same
from two_layers import DEEP, deep_gradient, replies_of

from models.initialisation import flat_model
from models.layout import Entry, Layout
from strategies.base.transport.payload import decode
from strategies.fedlama import choose_intervals

OPTIONS = {**DEEP, "rounds": 4, "local_epochs": 2, "batch_size": 4, "momentum": 0.5}


def some_layout(**shapes):
    entries, start = [], 0
    for name, shape in shapes.items():
        entries.append(Entry(name, shape, start, start + int(np.prod(shape))))
        start = entries[-1].stop
    return Layout(tuple(entries), (), ())


@pytest.mark.parametrize(
    "excess, slow",
    [
        ([0.4, 0.1, 4.0, 0.1, 2.4], "ac"),
        ([0.4, 0.1, 4.0, 0.1, 1.0], "abc"),
        ([0.4, 9.0, 4.0, 9.0, 2.4], "abc"),
        ([0.1, 0.0, 9.9, 0.0, 9.9], "ac"),
        ([9.0, 0.0, 0.5, 0.0, 6.0], "bc"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], "abc"),
    ],
)
def test_the_intervals_by_hand(excess, slow):
    """Kernels a, b, c of 4, 8 and 12 numbers, and biases, which are never slow; the numbers are d dim.

    First: d = 0.1, 0.5, 0.2, so a, c, b, and the sum is 7. After a: λ = 1/6, δ = 0.4/7 < 5/6. After c: λ = 2/3,
    δ = 2.8/7 > 1/3: crossed, and c is still slow. Second: c before a; after both δ = 1.4/5.6 = 1/4 < 1/3, so b too, as
    λ = 1 there. Third: the biases in the denominator, 24.8, put the crossing off. Fourth: a, then c with
    δ = 10/19.9 > 1/3. Fifth: b, then c: λ = 5/6, δ = 6.5/15.5 > 1/6. Last: equal copies never cross.
    """
    layout = some_layout(a=(2, 2), a_bias=(2,), b=(2, 4), b_bias=(1,), c=(3, 4))
    found = choose_intervals(layout, excess, 3)
    assert {e.name for e, i in zip(layout.parameters, found, strict=True) if i == 3} == set(
        slow
    )
    assert set(found) <= {1, 3}


@pytest.mark.parametrize("phi, average", [(2, "samples"), (3, "silos"), (2, "silos")])
def test_rounds_of_several_steps_in_numpy(tmp_path, phi, average):
    """Seven rounds in float64; twelve columns, 8 hidden units, two classes: w1 (96 of 112) can be slow alone.

    The layers are kept apart here, by name, each silo with its own copy.
    """
    files = random_silos(tmp_path, [6, 10, 9], columns=12, classes=2)
    run = federate(
        files,
        "fedlama",
        fedlama__phi=phi,
        fedlama__average=average,
        rounds=7,
        local_epochs=2,
        momentum=0.5,
        **{**DEEP, "mlp__hidden": "8"},
    )
    layers = {
        "w1": slice(0, 96),
        "b1": slice(96, 104),
        "w2": slice(104, 120),
        "b2": slice(120, 122),
    }
    start = initial(run.settings, 12, 2).double().numpy()
    averaged, copies = start.copy(), {silo: start.copy() for silo in files}
    p = (
        {"a": 6 / 25, "b": 10 / 25, "c": 9 / 25}
        if average == "samples"
        else dict.fromkeys(files, 1 / 3)
    )
    slow = set()
    chosen = []
    for server_round in range(1, 8):
        for silo, file in files.items():
            x, y = rows_of(file)
            velocity = np.zeros_like(start)
            for _ in range(2):
                velocity = 0.5 * velocity + deep_gradient(copies[silo], x, y, 2)
                copies[silo] = copies[silo] - 0.3 * velocity
        trained = {silo: w.copy() for silo, w in copies.items()}
        spread = {}
        for name, part in layers.items():
            if name in slow and server_round % phi:
                continue
            u = sum(p[silo] * trained[silo][part] for silo in files)
            spread[name] = sum(
                p[silo] * ((trained[silo][part] - u) ** 2).sum() for silo in files
            )
            spread[name] /= phi if name in slow else 1
            for silo in files:
                copies[silo][part] = averaged[part] = u
        if server_round % phi == 0:
            first, second = sorted(
                ("w1", "w2"), key=lambda n: spread[n] / (96 if n == "w1" else 16)
            )
            size = 96 if first == "w1" else 16
            slow = (
                {first}
                if 1 - size / 112 < spread[first] / sum(spread.values())
                else {first, second}
            )
            chosen.append(slow)
    for silo in files:
        near(run.personal(silo), trained[silo])
    near(run.shared, averaged)
    assert {"w1"} in chosen  # one of the two alone
    intervals = run.strategy.state.numbers["intervals"]
    assert [i == phi for i in intervals] == [name in slow for name in layers]


def test_a_slow_layer_stays_with_its_silo(three):
    """Both kernels are slow after round 2 (12 of 24 numbers never cross alone): round 3 averages the biases only.

    Round 4 starts from the silo's own kernels, and averages all again.
    """
    run = federate(three, "fedlama", **OPTIONS)
    assert run.strategy.state.numbers["intervals"] == [2, 1, 2, 1]
    third = {silo: p.models["layers"].vector for r, silo, p, _ in replies_of(run) if r == 3}
    assert {len(vector) for vector in third.values()} == {7}
    mean = 6 / 24 * third["a"] + 10 / 24 * third["b"] + 8 / 24 * third["c"]
    for silo in three:
        near(run.received(silo, 4), mean, 1e-5)
    fourth = {silo: p.models["layers"].vector for r, silo, p, _ in replies_of(run) if r == 4}
    assert all(same(vector, run.personal(silo)) for silo, vector in fourth.items())
    assert same(run.received("a", 5), run.shared)


def fresh_of(run, silo, server_round):
    """Which tensors this silo got in this round."""
    for message, _ in run.grid.traffic:
        if (run.grid.name_of(message.metadata.dst_node_id), round_of(message)) == (
            silo,
            server_round,
        ):
            return decode(message.content)[0].numbers["fresh"]
    raise AssertionError


def test_who_was_away_gets_all_that_was_averaged_since(three):
    """b is away in rounds 2 and 3; the reply of c's round 4 is lost, and its training with it, but in its own kernels.

    b in round 4: all of round 2. c in round 5, and then 6: since round 3, when it was last heard of, so all of round 4.
    The others get in round 4 the biases of round 3.
    """

    def lose(silo, message, reply):
        lost = message.metadata.message_type == "train" and (silo, round_of(message)) == (
            "c",
            4,
        )
        return Message(Error(1, "lost on the way"), reply_to=message) if lost else reply

    def prepare(grid):
        grid.absent, grid.after = {("b", 2), ("b", 3)}, lose

    run = federate(three, "fedlama", **{**OPTIONS, "rounds": 6}, prepare=prepare)
    everything, biases = [1, 1, 1, 1], [0, 1, 0, 1]
    assert fresh_of(run, "a", 4) == fresh_of(run, "c", 4) == biases
    assert fresh_of(run, "b", 4) == everything
    assert {tuple(fresh_of(run, silo, 5)) for silo in three} == {tuple(everything)}
    assert {tuple(fresh_of(run, silo, 6)) for silo in three} == {tuple(biases)}
    sent = {silo: p.models["layers"].vector for r, silo, p, _ in replies_of(run) if r == 4}
    assert set(sent) == {"a", "b"}
    mean = 6 / 16 * sent["a"] + 10 / 16 * sent["b"]
    near(run.received("c", 5), mean, 1e-5)


def test_one_silo_alone_says_nothing_of_the_layers(three):
    """A round of one participant has no differences: the intervals stay as they are."""
    run = federate(three, "fedlama", participation=0.4, **OPTIONS)
    assert run.strategy.state.numbers["intervals"] == [1, 1, 1, 1]


def test_kernels_are_told_from_biases_and_normalisation(tiny_bn):
    layout = flat_model("tiny-bn", (3,), 3, (), "cpu").layout
    assert choose_intervals(layout, [1.0] * 6, 5) == [5, 1, 1, 1, 5, 1]
