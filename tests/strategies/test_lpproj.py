"""lp-proj: two silos by hand, rounds in numpy for every distance, the projection, Local and pFedMe as limits (B24)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, federate, gradient, random_silos, rows_of, same
from two_layers import replies_of

import strategies.lpproj
from partitions.common.errors import UserError
from strategies.lpproj import projection

OPTIONS = {**SHORT, "learning_rate": 0.1}
CPU = torch.device("cpu")


def project_by(monkeypatch, matrix):
    monkeypatch.setattr(
        strategies.lpproj, "projection", lambda *_: torch.tensor(matrix, dtype=torch.float32)
    )


def test_two_silos_by_hand(pair, monkeypatch, zero_start):
    """Two full-batch steps from θ = 0, w = 0, p = 1; P reads the first weight. η = 1, λ = 1/4, η_w = 1/2, K = 2.

    Step 1: e = 0, so plain: a's first row is (1, 1/2) with the second its negative, b's -(1/2, 1/2). Step 2, a: e = -1,
    s = -1, which takes λ off the first weight alone: with 1/q = 1 + e^5 it is 1 + 2 q - 1/4. b: e = 1/2, so +1/4.
    Then e is negative in a, positive in b: w_a = 0 + η_w λ, w_b = -η_w λ, their mean 0.
    """
    project_by(monkeypatch, [[1, 0, 0, 0]])
    run = federate(
        pair,
        "lp-proj",
        rounds=1,
        local_epochs=2,
        **{
            "lp-proj.dimension": 1,
            "lp-proj.lambda": 0.25,
            "lp-proj.inner-steps": 2,
            "lp-proj.reference-learning-rate": 0.5,
        },
    )
    q, r = 1 / (1 + np.exp(5)), 1 / (1 + np.exp(2))
    near(run.personal("a"), [0.75 + 2 * q, -1 - 2 * q, 0.5 + q, -0.5 - q])
    near(run.personal("b"), [-0.25 - r, 0.5 + r, -0.5 - r, 0.5 + r])
    sent = {silo: p.models["projection"].vector.tolist() for _, silo, p, _ in replies_of(run)}
    assert sent == {"a": [0.125], "b": [-0.125]}
    assert run.shared.tolist() == [0.0]


@pytest.mark.parametrize(
    "distance, p, beta, clip",
    [
        ("norm", 1.0, 1.0, 0.0),
        ("norm", 2.0, 0.5, 0.0),
        ("norm", 3.0, 1.0, 0.1),
        ("unscaled", 1.5, 1.0, 0.0),
        ("squared", 1.0, 1.5, 0.0),
    ],
)
def test_rounds_of_several_steps_in_numpy(two, distance, p, beta, clip):
    """Four rounds of five full-batch steps, w_i moves after the 2nd, 4th and 5th; a falling η; a is away in round 3."""
    lam, eta, eta_w = 0.1, 0.4, 0.2
    run = federate(
        two,
        "lp-proj",
        rounds=4,
        local_epochs=5,
        learning_rate=eta,
        lr_decay=0.9,
        absent={("a", 3)},
        **{
            "lp-proj.dimension": 4,
            "lp-proj.lambda": lam,
            "lp-proj.inner-steps": 2,
            "lp-proj.distance": distance,
            "lp-proj.reference-learning-rate": eta_w,
            "lp-proj.p": p,
            "lp-proj.beta": beta,
            "lp-proj.clip": clip,
        },
    )
    matrix = projection(7, "gaussian", 4, 12, CPU).double().numpy()

    def grad(e):
        if distance == "squared":
            return e
        length = np.abs(e) / (np.sum(np.abs(e) ** p) ** (1 / p) if distance == "norm" else 1)
        return np.asarray(np.sign(e) * length ** (p - 1))

    start = run.start()
    w, thetas = np.zeros(4), dict.fromkeys(two, start)
    for r in range(4):
        sent = []
        for silo in [s for s in two if (s, r) != ("a", 2)]:
            theta, own = thetas[silo].copy(), w.copy()
            for k in range(1, 6):
                g = gradient(theta, *rows_of(two[silo]))
                g = g * min(1.0, clip / float(np.linalg.norm(g))) if clip else g
                theta = theta - eta * 0.9**r * (g - lam * matrix.T @ grad(own - matrix @ theta))
                if k in (2, 4, 5):
                    own = own - eta_w * 0.9**r * lam * grad(own - matrix @ theta)
            thetas[silo] = theta
            sent.append(own)
        w = (1 - beta) * w + beta * np.mean(sent, axis=0)
    near(run.shared, w)
    for silo in two:
        near(run.personal(silo), thetas[silo], 2e-6)


def test_the_projection():
    """The run's seed alone decides it; rows of length 1; orthogonal ones span the same, row by row (Gram-Schmidt)."""
    plain, orthogonal = (projection(3, kind, 4, 9, CPU) for kind in ("gaussian", "orthogonal"))
    near(plain.norm(dim=1), torch.ones(4), 1e-5)
    near(orthogonal @ orthogonal.T, torch.eye(4))
    # Triangular: row k of P lies in the span of the first k orthogonal ones
    products = orthogonal @ plain.T
    near(products.tril(-1), torch.zeros(4, 4))
    assert bool((products.diagonal() > 0).all())
    strategies.lpproj.projection.cache_clear()
    assert same(projection(3, "gaussian", 4, 9, CPU), plain)
    assert not same(projection(4, "gaussian", 4, 9, CPU), plain)


def test_in_full_dimension_it_is_pfedme(tmp_path, monkeypatch, zero_start):
    """P = 1 and the square, from θ = w = 0: round 1 of three steps and one of w, for full batches and equal silos."""
    equal = random_silos(tmp_path, [8, 8])
    project_by(monkeypatch, np.eye(12))
    run = federate(
        equal,
        "lp-proj",
        rounds=1,
        local_epochs=3,
        learning_rate=0.2,
        **{
            "lp-proj.dimension": 12,
            "lp-proj.distance": "squared",
            "lp-proj.lambda": 2.0,
            "lp-proj.inner-steps": 3,
            "lp-proj.reference-learning-rate": 0.1,
        },
    )
    other = federate(
        equal,
        "pfedme",
        rounds=1,
        learning_rate=0.1,
        pfedme__lambda=2.0,
        pfedme__mu=0.0,
        pfedme__inner_steps=3,
        pfedme__personal_learning_rate=0.2,
    )
    ours, theirs = (r.shared for r in (run, other))
    near(ours, theirs)
    for silo in equal:
        near(run.personal(silo), other.personal(silo))


def test_statistics_stay_with_the_model(three, tiny_bn):
    """Five numbers travel, though the network has BatchNorm and ``buffers = "shared"``."""
    run = federate(three, "lp-proj", model="tiny-bn", **{"lp-proj.dimension": 5}, **OPTIONS)
    assert run.values("bytes_up") == [3 * 5 * 4] * 3 + [0]
    assert run.values("bytes_down") == [3 * 5 * 4] * 4
    assert "buffers" not in run.held


def test_more_numbers_than_the_model_has_are_refused(three):
    with pytest.raises(UserError, match="13: the model has 12 parameters only"):
        federate(three, "lp-proj", **{"lp-proj.dimension": 13})
