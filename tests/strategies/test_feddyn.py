"""FedDyn: two silos by hand, rounds in numpy, its invariant and its optimum, ADMM by other names (B5)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from representatives import sampled
from tiny import federate, gradient, initial, rows_of
from two_layers import confirmed, losing

OPTIONS = {"rounds": 4, "local_epochs": 2, "batch_size": 4, "learning_rate": 0.2}


def test_two_silos_by_hand(pair, zero_start):
    """Two rounds of one full-batch step, η = 1, α = 1/2, from 0; weights (u, -u), biases (v, -v).

    Round 1, as FedAvg: θ_a = (1, 1/2), θ_b = (-1/2, -1/2), mean (1/4, 0). g_i = -θ_i/2, h = -(1/8, 0), and θ is the
    mean less h/α: (1/2, 0), twice as far. Round 2, a: logit 2, q = 1 / (1 + e²): θ_a = θ + (2 q, q) + g_a
    = (2 q, q - 1/4); b: logit 1, r = 1 / (1 + 1/e): θ_b = (3/4 - r, 1/4 - r). With their mean m, h = -(1/8, 0) -
    (m - θ)/2 and the next θ is m - 2 h = 2 m - (1/4, 0).
    """
    run = federate(pair, "feddyn", rounds=2, feddyn__alpha=0.5)
    q, r = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-1))
    a, b = (2 * q, q - 0.25), (0.75 - r, 0.25 - r)
    m = [(a[k] + b[k]) / 2 for k in (0, 1)]
    h = (-0.125 - (m[0] - 0.5) / 2, -m[1] / 2)
    g_a = (-0.5 - (a[0] - 0.5) / 2, -0.25 - a[1] / 2)
    arrays = run.held
    for (u, v), vector in (
        (a, run.personal("a")),
        (b, run.personal("b")),
        ((2 * m[0] - 0.25, 2 * m[1]), arrays["global"]),
        (h, arrays["h"]),
        (g_a, confirmed(run, "a", "dual")),
    ):
        near(vector, [u, -u, v, -v])


@pytest.mark.parametrize(
    "weights, clip", [("uniform", 0.0), ("samples", 0.0), ("uniform", 0.3)]
)
def test_rounds_of_several_steps_in_numpy(three, weights, clip):
    """Five rounds of three full-batch steps; b is away in round 2, the server leaves out a's reply of round 3.

    α_i = α or α n/(N n_i); the whole gradient is shortened to ``clip``.
    """
    alpha, eta = 0.4, 0.3
    run = federate(
        three,
        "feddyn",
        rounds=5,
        local_epochs=3,
        learning_rate=eta,
        feddyn__alpha=alpha,
        feddyn__weights=weights,
        feddyn__clip=clip,
        prepare=losing(("a", 3), absent=[("b", 2)]),
    )
    theta = run.start()
    h, duals = np.zeros_like(theta), {silo: np.zeros_like(theta) for silo in three}
    shortened = 0
    for r in range(5):
        came = [s for s in three if (s, r + 1) not in (("b", 2), ("a", 3))]
        moves = []
        for silo in came:
            x, y = rows_of(three[silo])
            own = alpha * (8 / len(y) if weights == "samples" else 1)  # 24 rows over 3 silos
            w = theta.copy()
            for _ in range(3):
                g = gradient(w, x, y) - duals[silo] + own * (w - theta)
                norm = np.linalg.norm(g)
                if clip and norm > clip:
                    g, shortened = g * clip / norm, shortened + 1
                w = w - eta * g
            duals[silo] = duals[silo] - own * (w - theta)
            moves.append(w - theta)
        h = h - alpha / 3 * sum(moves)
        theta = theta + sum(moves) / len(came) - h / alpha
    assert bool(shortened) == bool(clip) and shortened < 39
    near(run.shared, theta)
    near(run.held["h"], h)
    for silo in three:
        near(confirmed(run, silo, "dual"), duals[silo])


def test_h_is_the_mean_of_the_silos_duals(three):
    """With mini-batches and momentum, and whoever's reply is left out counts with the dual of before."""
    run = federate(
        three,
        "feddyn",
        feddyn__alpha=0.3,
        momentum=0.9,
        **OPTIONS,
        prepare=losing(("b", 2), ("c", 4)),
    )
    mean = torch.stack([confirmed(run, silo, "dual") for silo in three]).mean(0)
    near(run.held["h"], mean)


@pytest.mark.parametrize("alpha", [0.05, 2.0])
def test_round_one_goes_on_beyond_the_mean(three, alpha):
    """By 1 + |S|/N of the way, for any α: here two of three silos come."""
    run = federate(
        three,
        "feddyn",
        feddyn__alpha=alpha,
        **{**OPTIONS, "rounds": 1},
        prepare=lambda grid: grid.absent.add(("b", 1)),
    )
    start = initial(run.settings, 3, 3)
    mean = (run.personal("a") + run.personal("c")) / 2
    expected = start + (1 + 2 / 3) * (mean - start)
    near(run.shared, expected)


@pytest.mark.exhaustive
@sampled("weights", ["uniform", "samples"], 2)
def test_it_comes_to_rest_where_the_weighted_gradients_cancel(three, weights):
    """With several local steps, where FedAvg does not: sum_i k_i ∇f_i(θ) = 0 with k_i = 1/N or n_i/n (decay 0.1)."""
    options = {
        "rounds": 60,
        "local_epochs": 5,
        "learning_rate": 0.3,
        "weight_decay": 0.1,
        "evaluate_every": 0,
    }
    left = []
    for strategy in ("feddyn", "fedavg"):
        run = federate(
            three, strategy, **{"feddyn.alpha": 0.5, "feddyn.weights": weights}, **options
        )
        w = run.shared.double().numpy()
        grads = [
            (len(rows_of(f)[1]), gradient(w, *rows_of(f)) + 0.1 * w) for f in three.values()
        ]
        left.append(
            np.linalg.norm(
                sum((n / 24 if weights == "samples" else 1 / 3) * g for n, g in grads)
            )
        )
    assert left[0] < 1e-4 < 1e-2 < left[1]


def test_it_is_admm_with_all_silos_present(three):
    """FedAPM with nothing personal, ρ = α/3 and three times η, for inexact steps as well; FedADMM with ρ = α."""
    options = {"rounds": 4, "local_epochs": 3, "batch_size": 4}
    ours = federate(three, "feddyn", feddyn__alpha=0.6, learning_rate=0.1, **options)
    apm = federate(
        three, "fedapm", fedapm__personal="none", fedapm__rho=0.2, learning_rate=0.3, **options
    )
    admm = federate(three, "fedadmm", fedadmm__rho=0.6, learning_rate=0.1, **options)
    for run in (apm, admm):
        for silo in three:
            near(ours.personal(silo), run.personal(silo), 2e-6)
