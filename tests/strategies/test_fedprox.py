"""FedProx and FedProx-FT: two silos by hand, and the special cases of the algorithm reference (B3)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import comparable, federate, gradient, initial, rows_of, same


@pytest.mark.usefixtures("zero_start")
def test_two_silos_by_hand(pair):
    """One round of two full-batch steps from 0, η = 1, μ = 1/2; weights (u, -u), biases (v, -v).

    The first step has no proximal gradient (w is the centre): a at (1, 1/2), b at (-1/2, -1/2), as in test_fedavg.
    Second, a: q = 1 / (1 + e^-5), u = 1 + 2 (1 - q) - μ 1, v = 1/2 + (1 - q) - μ/2. b: q' = 1 / (1 + e^2),
    u = v = -1/2 - q' + μ/2. The mean has weights 1/4 and 3/4.
    """
    run = federate(pair, strategy="fedprox", rounds=1, local_epochs=2, fedprox__mu=0.5)
    rest, q = 1 - 1 / (1 + math.exp(-5)), 1 / (1 + math.exp(2))
    a, b = (0.5 + 2 * rest, 0.25 + rest), (-0.25 - q, -0.25 - q)
    u, v = ((a[k] + 3 * b[k]) / 4 for k in (0, 1))
    assert run.personal("a").tolist() == pytest.approx([a[0], -a[0], a[1], -a[1]], abs=1e-6)
    assert run.strategy.state.arrays["global"].tolist() == pytest.approx(
        [u, -u, v, -v], abs=1e-6
    )


def test_the_centre_is_the_received_model_for_the_whole_round(two):
    """Three rounds of three steps with momentum; the centre changes between rounds and never within one."""
    run = federate(
        two,
        strategy="fedprox",
        rounds=3,
        local_epochs=3,
        fedprox__mu=0.8,
        momentum=0.5,
        learning_rate=0.5,
    )
    w = initial(run.settings, 3, 3).double().numpy()
    for _ in range(3):
        total = np.zeros_like(w)
        for file in two.values():
            x, y = rows_of(file)
            local, velocity = w.copy(), np.zeros_like(w)
            for _ in range(3):
                velocity = 0.5 * velocity + gradient(local, x, y) + 0.8 * (local - w)
                local -= 0.5 * velocity
            total += len(y) / 16 * local
        w = total
    assert run.strategy.state.arrays["global"].numpy() == pytest.approx(w, abs=1e-5)


def test_without_the_term_it_is_fedavg(three):
    options: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "batch_size": 4, "momentum": 0.9}
    plain = federate(three, strategy="fedavg", **options)
    prox = federate(three, strategy="fedprox", fedprox__mu=0.0, **options)
    assert comparable(plain.rows) == comparable(prox.rows)
    assert same(plain.strategy.state.arrays["global"], prox.strategy.state.arrays["global"])


@pytest.mark.parametrize("mu", [0.001, 1.0, 100.0])
def test_one_local_step_is_fedavg_for_any_mu(three, mu):
    plain = federate(three, strategy="fedavg", rounds=3)
    prox = federate(three, strategy="fedprox", fedprox__mu=mu, rounds=3)
    assert comparable(plain.rows) == comparable(prox.rows)
    assert same(plain.strategy.state.arrays["global"], prox.strategy.state.arrays["global"])


def test_bytes_are_fedavgs(three):
    run = federate(three, strategy="fedprox", rounds=2)
    assert run.values("bytes_up") == [3 * 12 * 4, 3 * 12 * 4, 0]
    assert run.values("bytes_down") == [3 * 12 * 4] * 3


# ---- FedProx-FT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [0, 2])
def test_fine_tuning_leaves_the_federated_training_as_it_is(three, epochs):
    options: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "batch_size": 4}
    plain = federate(three, strategy="fedprox", fedprox__mu=0.5, **options)
    tuned = federate(
        three,
        strategy="fedprox-ft",
        **{"fedprox-ft.mu": 0.5, "fedprox-ft.epochs": epochs},
        **options,
    )
    assert same(plain.strategy.state.arrays["global"], tuned.strategy.state.arrays["global"])
    received = [[r for r in run.rows if r.snapshot == "received"] for run in (plain, tuned)]
    assert comparable(received[0]) == comparable(received[1])
    if epochs == 0:
        assert same(tuned.personal("a"), tuned.sent_to("a", 3)["global"].vector)


def test_fine_tuning_has_no_proximal_term(three):
    """In round 1 all methods receive the same model, so the fine-tuned one is FedAvg-FT's bit for bit."""
    options: dict[str, Any] = {"rounds": 1, "local_epochs": 3, "batch_size": 4, "momentum": 0.9}
    prox = federate(
        three,
        strategy="fedprox-ft",
        **{"fedprox-ft.mu": 0.5, "fedprox-ft.epochs": 2},
        **options,
    )
    plain = federate(three, strategy="fedavg-ft", **{"fedavg-ft.epochs": 2}, **options)
    assert not same(prox.strategy.state.arrays["global"], plain.strategy.state.arrays["global"])
    for silo in three:
        assert same(prox.personal(silo), plain.personal(silo))


def test_fine_tuning_without_the_term_is_fedavg_ft(three):
    options: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "batch_size": 4, "momentum": 0.9}
    prox = federate(
        three,
        strategy="fedprox-ft",
        **{"fedprox-ft.mu": 0.0, "fedprox-ft.epochs": 2},
        **options,
    )
    plain = federate(three, strategy="fedavg-ft", **{"fedavg-ft.epochs": 2}, **options)
    assert comparable(prox.rows) == comparable(plain.rows)


def test_the_pages_walk_shows_the_file():
    """Every block of Python in docs/contributing.md's walk through strategies/fedprox.py is in the file."""
    root = Path(__file__).parents[2]
    walk = (
        (root / "docs" / "contributing.md")
        .read_text()
        .split("## How to add a method")[1]
        .split("## Tests")[0]
    )
    blocks = re.findall(r"```python\n(.*?)```", walk, re.S)
    code = (root / "strategies" / "fedprox.py").read_text()
    assert len(blocks) >= 3
    for block in blocks:
        assert block in code
