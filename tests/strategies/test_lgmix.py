"""LG-Mix: two silos by hand, rounds in numpy with an absence, FedAvg and Local at its ends (B46)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from tiny import SHORT, federate, rows_of, settings_of
from two_layers import DEEP, deep_gradient

from partitions.common.errors import UserError

OPTIONS = {**SHORT}


def test_two_silos_by_hand(pair, zero_start):
    """Two rounds of one step of 1 from 0. The network is linear: both models have the inputs as features, so c = 1/2.

    Round 1, as test_fedavg: D_a = (1, 1/2), D_b = -(1/2, 1/2), D = w = (-1/8, -1/4). The own models are halfway between
    D and D_i: a (7/16, 1/8), b (-5/16, -3/8). Round 2, a: logit difference 2 (7/8 + 1/8) = 2, q = 1 / (1 + e²), it goes
    on by (2 q, q); b: 2 (-11/16), r = 1 / (1 + e^(11/8)), by -(r, r). w moves by a quarter and three of these.
    """
    run = federate(pair, "lg-mix", rounds=2)
    q, r = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(11 / 8))
    w = (-1 / 8 + (2 * q - 3 * r) / 4, -1 / 4 + (q - 3 * r) / 4)
    for (u, v), vector in (
        ((7 / 16 + 2 * q, 1 / 8 + q), run.personal("a")),
        ((-5 / 16 - r, -3 / 8 - r), run.personal("b")),
        (w, run.shared),
    ):
        near(vector, [u, -u, v, -v])


def features(w, x):
    return np.maximum(x @ w[:12].reshape(4, 3).T + w[12:16], 0)


def spread(parts):
    z = np.concatenate(parts)
    return float(np.linalg.eigvalsh((z - z.mean(0)).T @ (z - z.mean(0)) / len(z))[1:].sum())


def test_rounds_in_numpy(three):
    """Five rounds of three full-batch steps; b is away in rounds 2 and 3, and then takes what it missed."""
    eta = 0.4
    run = federate(
        three,
        "lg-mix",
        rounds=5,
        local_epochs=3,
        **{**DEEP, "learning_rate": eta},
        absent={("b", 2), ("b", 3)},
    )
    start = run.received("a", 1).double().numpy()
    w = start
    ratios: dict[str, list[float]] = {s: [] for s in three}
    own, step, last = (dict.fromkeys(three, v) for v in (start, 0 * start, start))
    for r in range(1, 6):
        came = [s for s in three if s != "b" or r not in (2, 3)]
        n = {s: len(rows_of(three[s])[1]) for s in came}
        total = np.zeros_like(w)
        for silo in came:
            x, y = rows_of(three[silo])
            if ratios[silo]:
                c = np.mean(ratios[silo])
                own[silo] = own[silo] + (1 - c) * (w - last[silo]) + c * step[silo]
            local, seen = own[silo], []
            for _ in range(3):
                seen.append(features(local, x))
                local = local - eta * deep_gradient(local, x, y)
            mine, shared = spread(seen), spread([features(w, x)] * 3)
            ratios[silo].append(mine / (mine + shared))
            step[silo], last[silo] = local - own[silo], w
            total += n[silo] / sum(n.values()) * step[silo]
        w = w + total
    near(run.shared, w, 1e-5)
    for silo in three:
        near(run.personal(silo), own[silo] + step[silo], 1e-5)
    assert len({round(float(np.mean(c)), 3) for c in ratios.values()}) == 3


@pytest.mark.parametrize("ratio, method", [(0.0, "fedavg"), (1.0, "local")])
def test_its_ends_are_fedavg_and_local(three, ratio, method):
    run, other = (
        federate(three, s, **{"lg-mix.ratio": ratio}, **DEEP, **OPTIONS)
        for s in ("lg-mix", method)
    )
    for silo in three:
        near(run.personal(silo), other.personal(silo), 1e-5)


def test_features_have_no_noise(three):
    with pytest.raises(UserError, match="dp = true: not with lg-mix: its own model"):
        settings_of(three, strategy="lg-mix", dp=True)
