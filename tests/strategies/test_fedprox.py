"""FedProx and FedProx-FT: two silos by hand, and the special cases of the algorithm reference (B3)."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from near import near
from tiny import federate, gradient, rows_of


def test_two_silos_by_hand(pair, zero_start):
    """One round of two full-batch steps from 0, η = 1, μ = 1/2; weights (u, -u), biases (v, -v).

    The first step has no proximal gradient (w is the centre): a at (1, 1/2), b at (-1/2, -1/2), as in test_fedavg.
    Second, a: q = 1 / (1 + e^-5), u = 1 + 2 (1 - q) - μ 1, v = 1/2 + (1 - q) - μ/2. b: q' = 1 / (1 + e^2),
    u = v = -1/2 - q' + μ/2. The mean has weights 1/4 and 3/4.
    """
    run = federate(pair, "fedprox", rounds=1, local_epochs=2, fedprox__mu=0.5)
    rest, q = 1 - 1 / (1 + math.exp(-5)), 1 / (1 + math.exp(2))
    a, b = (0.5 + 2 * rest, 0.25 + rest), (-0.25 - q, -0.25 - q)
    u, v = ((a[k] + 3 * b[k]) / 4 for k in (0, 1))
    near(run.personal("a"), [a[0], -a[0], a[1], -a[1]])
    near(run.shared, [u, -u, v, -v])


def test_the_centre_is_the_received_model_for_the_whole_round(two):
    """Three rounds of three steps with momentum; the centre changes between rounds and never within one."""
    run = federate(
        two,
        "fedprox",
        rounds=3,
        local_epochs=3,
        fedprox__mu=0.8,
        momentum=0.5,
        learning_rate=0.5,
    )
    w = run.start()
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
    near(run.shared, w, 1e-5)


# ---- FedProx-FT ----------------------------------------------------------------------------------------------------


def test_the_pages_walk_shows_the_file():
    """Every block of Python in docs/contributing.md's walk through strategies/fedprox.py is in the file."""
    root = Path(__file__).parents[2]
    walk = (
        (root / "docs/contributing.md")
        .read_text()
        .split("## How to add a method")[1]
        .split("## Tests")[0]
    )
    blocks = re.findall(r"```python\n(.*?)```", walk, re.S)
    code = (root / "strategies/fedprox.py").read_text()
    assert len(blocks) >= 3
    for block in blocks:
        assert block in code
