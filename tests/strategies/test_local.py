"""Local: plain gradient descent of every silo by itself, and nothing that travels (B1)."""

from __future__ import annotations

import math
from typing import Any

from near import near
from tiny import comparable, federate, gradient, initial, random_silos, rows_of, same
from torch.testing import assert_close


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """Weights (u, -u), biases (v, -v), η = 1, start 0 (see test_fedavg for the first step).

    a (x = 2, class 0): round 1 (1, 1/2); then z = 2.5, q = 1 / (1 + e^-5): u = 1 + 2 (1 - q), v = 1/2 + (1 - q).
    b (x = 1, class 1): round 1 (-1/2, -1/2); then z = -1, q = 1 / (1 + e^2): u = v = -1/2 - q.
    """
    run = federate(pair, "local", rounds=2)
    rest, q = 1 - 1 / (1 + math.exp(-5)), 1 / (1 + math.exp(2))
    u, v = 1 + 2 * rest, 0.5 + rest
    near(run.personal("a"), [u, -u, v, -v])
    u = v = -0.5 - q
    near(run.personal("b"), [u, -u, v, -v])


def test_rounds_times_epochs_steps_of_gradient_descent(two):
    run = federate(two, "local", rounds=3, local_epochs=2)
    for silo, file in two.items():
        w = run.start()
        for _ in range(3 * 2):
            w = w - gradient(w, *rows_of(file))
        near(run.personal(silo), w, 1e-5)


def test_a_silo_does_not_feel_the_others(two):
    other = {"a": two["a"], **random_silos(two["a"].parent, {"z": 5}, seed=3)}
    rows = [federate(f, "local", rounds=3, batch_size=2).rows for f in (two, other)]
    of_a = [[r for r in part if r.silo == "a"] for part in rows]
    assert comparable(of_a[0]) == comparable(of_a[1])
    assert len(of_a[0]) > 0


def test_a_round_starts_where_the_last_one_ended(two):
    run = federate(two, "local", rounds=3)
    for metric in ("loss", "accuracy"):
        assert run.values(metric, "a", "received")[1:] == run.values(metric, "a", "personal")


def test_an_absent_silo_does_not_train(three):
    """Half of three silos is one a round: whoever is not drawn keeps its last model, or the initial one."""
    run = federate(three, "local", rounds=4, participation=0.5)
    trained: dict[str, Any] = {
        s: {
            m.content["config"]["round"]
            for m, _ in run.grid.traffic
            if run.grid.key_of(m)[0] == s and m.metadata.message_type == "train"
        }
        for s in three
    }
    assert sorted(r for rounds in trained.values() for r in rounds) == [1, 2, 3, 4]
    assert any(len(rounds) < 4 for rounds in trained.values())
    for silo, rounds in trained.items():
        expected = run.start()
        for _ in rounds:
            expected = expected - gradient(expected, *rows_of(three[silo]))
        state = run.kept(silo) if rounds else {"personal": initial(run.settings, 3, 3)}
        near(state["personal"], expected, 1e-5)


def test_kept_momentum_makes_rounds_and_epochs_the_same(two):
    """With ``optimizer-state = "keep"`` four rounds of one epoch are two rounds of two; reset momentum is not."""
    for optimizer in ("sgd", "adam"):
        options = {
            "strategy": "local",
            "optimizer": optimizer,
            "momentum": 0.9,
            "learning_rate": 0.1,
        }
        kept = [
            federate(two, rounds=r, local_epochs=4 // r, optimizer_state="keep", **options)
            for r in (2, 4)
        ]
        assert_close(kept[0].personal("a"), kept[1].personal("a"), rtol=1e-5, atol=1e-5)
        reset = federate(two, rounds=4, local_epochs=1, **options)
        assert (reset.personal("a") - kept[1].personal("a")).abs().max() > 1e-3


def test_one_initial_model_for_all(two):
    run = federate(two, "local", rounds=1, local_epochs=0)
    assert same(run.personal("a"), run.personal("b"))
    assert same(run.personal("a"), initial(run.settings, 3, 3))
