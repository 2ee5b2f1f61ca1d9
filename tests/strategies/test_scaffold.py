"""SCAFFOLD: two silos by hand, both options in numpy, the invariant of the control variates, lost replies (B4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from failing import fails
from near import near
from tiny import SHORT, federate, gradient, random_silos, rows_of, same
from two_layers import confirmed, losing, replies_of

from partitions.common.errors import UserError

OPTIONS = {**SHORT, "learning_rate": 0.2}


def test_two_silos_by_hand(pair, zero_start):
    """Two rounds of one full-batch step, η = η_g = 1, from 0; weights (u, -u), biases (v, -v).

    Round 1, as FedAvg: y_a = (1, 1/2), y_b = (-1/2, -1/2), with equal weights x = (1/4, 0); c_i = 0 - y_i, their
    mean c = (-1/4, 0). Round 2, a: logit 2 (2 u + v) = 1, q = 1 / (1 + e), g = (-2 q, -q); b: logit 1/2,
    r = 1 / (1 + e^(-1/2)), g = (r, r). y_a = x - g - c + c_a = (2 q - 1/2, q - 1/2), y_b = (1 - r, 1/2 - r).
    """
    run = federate(pair, "scaffold", rounds=2)
    q, r = 1 / (1 + math.e), 1 / (1 + math.exp(-0.5))
    a, b = (2 * q - 0.5, q - 0.5), (1 - r, 0.5 - r)
    x, c = [(a[k] + b[k]) / 2 for k in (0, 1)], (r / 2 - q, (r - q) / 2)
    for (u, v), vector in (
        (a, run.personal("a")),
        (b, run.personal("b")),
        (x, run.shared),
        (c, run.held["control"]),
        ((-2 * q, -q), confirmed(run, "a", "control")),
        ((r, r), confirmed(run, "b", "control")),
    ):
        near(vector, [u, -u, v, -v])


@pytest.mark.parametrize("option", ["I", "II"])
def test_rounds_of_several_steps_in_numpy(three, option):
    """Five rounds of three full-batch steps with weight decay, η_g ≠ 1 and a falling η, by the paper's formulas.

    b is away in round 2, the server leaves out a's reply of round 3: a trains on with the control variate of before.
    """
    eta, decay, step = 0.4, 0.01, 0.7
    run = federate(
        three,
        "scaffold",
        rounds=5,
        local_epochs=3,
        learning_rate=eta,
        lr_decay=0.9,
        weight_decay=decay,
        scaffold__server_learning_rate=step,
        scaffold__option=option,
        prepare=losing(("a", 3), absent=[("b", 2)]),
    )
    x = run.start()
    c, own = np.zeros_like(x), {silo: np.zeros_like(x) for silo in three}
    for r in range(5):
        rate, came = eta * 0.9**r, [s for s in three if (s, r + 1) not in (("b", 2), ("a", 3))]
        moves, changes = [], []
        for silo in came:
            rows = rows_of(three[silo])
            y = x.copy()
            for _ in range(3):
                y = y - rate * (gradient(y, *rows) + decay * y + c - own[silo])
            new = (
                own[silo] - c + (x - y) / (3 * rate)
                if option == "II"
                else gradient(x, *rows) + decay * x
            )
            moves.append(y - x)
            changes.append(new - own[silo])
            own[silo] = new
        x = x + step / len(came) * sum(moves)
        c = c + sum(changes) / 3
    near(run.shared, x)
    near(run.held["control"], c)
    for silo in three:
        near(confirmed(run, silo, "control"), own[silo])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_c_is_the_mean_of_the_silos(three, optimizer):
    """All present, and whoever's reply is left out counts with the control variate of before; with momentum too."""
    run = federate(
        three,
        "scaffold",
        momentum=0.9,
        optimizer=optimizer,
        **{**OPTIONS, "rounds": 5},
        prepare=losing(("b", 3), ("c", 3), ("b", 5)),
    )
    mean = torch.stack([confirmed(run, silo, "control") for silo in three]).mean(0)
    near(run.held["control"], mean)
    assert not same(confirmed(run, "b", "control"), run.kept("b")["proposed.control"])


def test_what_is_sent_is_the_papers_formula(three):
    """Mini-batches: the mean gradient of the K steps is (x - y)/(K η) + c_i - c, so c_i⁺ - c_i holds no c_i."""
    run = federate(three, "scaffold", **OPTIONS)
    steps = {"a": 4, "b": 6, "c": 4}  # batches of 4 of 6, 10 and 8 rows, twice
    for server_round, silo, payload, _ in replies_of(run):
        sent = run.sent_to(silo, server_round)
        x, c, y = sent["global"].vector, sent["control"].vector, payload.models["model"].vector
        expected = (x - y) / (steps[silo] * 0.2) - c
        near(payload.models["control"].vector, expected, 2e-6)


def test_one_full_batch_step_goes_along_the_global_gradient(three):
    """c_i is then the silo's gradient; in round 2 every silo steps by g_i(x) + c - c_i, their mean by ∇f(x)."""
    run = federate(three, "scaffold", rounds=2, learning_rate=0.3)
    x0 = run.start()
    first = np.mean([gradient(x0, *rows_of(file)) for file in three.values()], axis=0)
    sent = run.sent_to("a", 2)
    near(sent["control"].vector, first)
    x1 = x0 - 0.3 * first
    second = np.mean([gradient(x1, *rows_of(file)) for file in three.values()], axis=0)
    near(run.shared, x1 - 0.3 * second)


def test_round_one_is_fedavg_with_equal_weights(tmp_path):
    """Bit for bit, for silos of equal size; round 2 is not."""
    equal = random_silos(tmp_path, [8, 8, 8])
    runs = [federate(equal, s, momentum=0.9, **OPTIONS) for s in ("fedavg", "scaffold")]
    for server_round, alike in ((2, True), (3, False)):
        ours, theirs = (run.received("a", server_round) for run in runs)
        assert same(ours, theirs) == alike


def test_the_model_alone_is_enough_for_plain_sgd(three):
    """The same course up to rounding, for Σ = 12 and one number up, with absent silos, a falling η and lost replies."""
    options = {
        **OPTIONS,
        "rounds": 4,
        "participation": 0.7,
        "lr_decay": 0.9,
        "prepare": losing(("a", 2), ("b", 3)),
    }
    both = federate(three, "scaffold", **options)
    model = federate(three, "scaffold", scaffold__up="model", **options)
    for name in ("global", "control"):
        ours, theirs = (run.held[name] for run in (model, both))
        near(ours, theirs, 2e-6)
    assert model.values("bytes_up") == [n / 2 for n in both.values("bytes_up")]
    assert all(p.numbers == {"steps": 4 if s != "b" else 6} for _, s, p, _ in replies_of(model))


@pytest.mark.parametrize(
    "change",
    [{"momentum": 0.9}, {"optimizer": "adam"}, {"scaffold__option": "I"}, {"ala": True}],
)
def test_the_model_alone_is_refused_where_it_is_not(three, change):
    fails(
        UserError, "plain SGD only", federate, three, "scaffold", scaffold__up="model", **change
    )


def test_no_number_of_steps_no_update(three):
    def after(silo, message, reply):
        if silo == "c" and message.metadata.message_type == "train":
            reply.content["config"]["number.steps"] = -1
        return reply

    run = federate(
        three,
        "scaffold",
        scaffold__up="model",
        rounds=1,
        prepare=lambda g: setattr(g, "after", after),
    )
    assert run.strategy.state.numbers["counted"] == {"a": 1, "b": 1}
