"""FedAWA: two silos by hand, rounds in numpy with Adam written out, its special cases (B50)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import federate, gradient, random_silos, rows_of, write_silo

from strategies.fedawa import alignment_loss


def test_two_silos_by_hand(pair, zero_start):
    """One round, η = 1, from 0: D_a = w_a = (1, -1, 1/2, -1/2), D_b = w_b = (-1/2, 1/2, -1/2, 1/2).

    l = (1/4, 3/4). The second term is 2 l_a l_b ||D_a - D_b||, whose derivative by T_a, 2 l_a l_b (l_b - l_a) ||...||,
    is above 0. In the first term w = (-1/8, 1/8, -1/4, 1/4) lies along w_b and against w_a: more of a raises it, too.
    By T_b both derivatives are the negative. Adam's first step is its rate, whatever the gradient's size: T_a - 0.001,
    T_b + 0.001, so that b weighs 3 e^0.002 times as much as a.
    """
    run = federate(pair, "fedawa", rounds=1)
    a = 1 / (1 + 3 * math.exp(0.002))
    near(run.shared, [*(a * s - (1 - a) * s / 2 for s in (1, -1)), a - 0.5, 0.5 - a], 1e-7)
    before = federate(pair, "fedawa", rounds=1, fedawa__weights="before")
    near(before.shared, [-1 / 8, 1 / 8, -1 / 4, 1 / 4], 1e-7)


def learned_in(run, silo):
    """T_i without where it starts."""
    return run.strategy.state.numbers[f"learned.{silo}"]


def loss(logits, models, centre):
    """L(T), as written in the paper."""
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    w, moves = weights @ models, models - centre
    cosines = models @ w / np.linalg.norm(models, axis=1) / np.linalg.norm(w)
    return weights @ (1 - cosines + np.linalg.norm(moves - weights @ moves, axis=1))


def adam(logits, models, centre, rate, steps):
    """A new Adam's steps, of numeric derivatives."""
    m, v = np.zeros_like(logits), np.zeros_like(logits)
    for t in range(1, steps + 1):
        ahead = np.eye(len(logits)) * 1e-5
        g = np.array(
            [
                (loss(logits + e, models, centre) - loss(logits - e, models, centre)) / 2e-5
                for e in ahead
            ]
        )
        m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g**2
        logits = logits - rate * (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return logits


@pytest.mark.parametrize("start, weights", [("samples", "after"), ("shares", "before")])
def test_rounds_in_numpy(three, start, weights):
    """Three rounds with three steps of Adam; b is away in round 2, and has its number of round 1 in round 3."""
    run = federate(
        three,
        "fedawa",
        rounds=3,
        learning_rate=0.3,
        weight_cap=0,
        absent={("b", 2)},
        fedawa__start=start,
        fedawa__weights=weights,
        fedawa__gamma=0.9,
        fedawa__server_learning_rate=0.2,
        fedawa__steps=3,
    )
    counts = np.array([6, 10, 8])
    logits = counts / 24 if start == "shares" else np.log(counts)
    w, names = run.start().astype(np.float64), list(three)
    for r in (1, 2, 3):
        came = [i for i, name in enumerate(names) if (name, r) != ("b", 2)]
        models = np.stack([w - 0.3 * gradient(w, *rows_of(three[names[i]])) for i in came])
        old = logits[came]
        logits = logits.copy()
        logits[came] = adam(old, models, w, 0.2, 3)
        parts = np.exp(old if weights == "before" else logits[came])
        w = 0.9 * parts / parts.sum() @ models
    near(run.shared, w, 2e-5)


def test_without_steps_it_is_fedavg(three):
    plain, run = (
        federate(three, name, rounds=3, learning_rate=0.3, **own)
        for name, own in (("fedavg", {}), ("fedawa", {"fedawa__steps": 0}))
    )
    near(run.shared, plain.shared, 1e-6)


def test_silos_alike_keep_their_weights(tmp_path):
    """Silos of 2 and 6 equal rows train equal models: L is 0 at every T, and rounding moves nothing."""
    rows = [[1.0, 2.0], [0.5, -1.0]]
    silos = {
        name: write_silo(tmp_path / f"{name}.npz", rows * k, [0, 1] * k)
        for name, k in {"a": 1, "b": 3}.items()
    }
    run = federate(silos, "fedawa", rounds=2, learning_rate=0.3)
    near([learned_in(run, s) for s in "ab"], [0.0, 0.0], 1e-6)


def test_a_round_changes_no_ratio_by_more_than_the_rate(tmp_path):
    """A new Adam's first step is at most its rate for each T_i."""
    run = federate(
        random_silos(tmp_path, [5, 40, 9, 17]), "fedawa", rounds=1, learning_rate=0.3
    )
    moved = torch.tensor([learned_in(run, s) for s in "abcd"])
    near(moved.abs(), torch.full((4,), 1e-3), 1e-6)


def test_the_loss_from_inner_products():
    """Drawn models; of the centre as weights of one silo alone, its own terms are 0."""
    rng = np.random.default_rng(3)
    models, centre, logits = rng.normal(size=(4, 9)), rng.normal(size=9), rng.normal(size=4)
    moves = models - centre
    of = [torch.from_numpy(rows @ rows.T) for rows in (models, moves)]
    value = alignment_loss(torch.from_numpy(logits).softmax(0), *of)
    near(value, loss(logits, models, centre), 1e-12)
    near(alignment_loss(torch.eye(4, dtype=torch.float64)[2], *of), 0.0, 1e-7)
