"""FedAPM: two silos by hand, its equations in numpy, ADMM's invariants and limits, its equivalences (A3)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from near import near
from representatives import seldom
from tiny import SHORT, STILL, federate, initial, keep_weights_at, random_silos, rows_of, same
from two_layers import (
    DEEP,
    FC1,
    FC2,
    deep_gradient,
    isotropic_silos,
    quadratic_loss,
    quadratic_terms,
    replies_of,
    rounds_trained,
    sent_by,
    start_at,
)

from strategies.base.client import SiloClient
from strategies.fedapm import FedAPMClient

OPTIONS = {**DEEP, **SHORT, "momentum": 0.5}
FREE = {"fedapm__rho": 0.0, "fedapm__sigma": 0.0, "fedapm__v_start": "server"}


# ---- By hand and in numpy --------------------------------------------------------------------------------------------


def test_two_silos_by_hand(pair, monkeypatch):
    """One round of one step per phase, fc2 personal; w = (s, t; c, -c, d, -d), start s = 1, else 0 (see test_fedsim).

    α = 1/2 is undone by η = 2, and at the first step both proximal terms and π are 0: FedAlt's step. With
    q = 1 / (1 + e^5), r = 1 / (1 + e^2): u_a = (1 + 4 q, 2 q), u_b = (1 + r, r), heads (1, 1/2) and (-1/2, -1/2).
    ρ = 1/4: π_i = (u_i - u) / 4, z_i = u_i + 4 π_i = 2 u_i - u, u = mean z_i = (1 + 4 q + r, 2 q + r).
    """
    start_at(monkeypatch, [1, 0, 0, 0, 0, 0])
    options = {"mlp__hidden": "1", "learning_rate": 2.0, "fedapm__rho": 0.25, "rounds": 1}
    run = federate(pair, "fedapm", **options)
    q, r = 1 / (1 + math.exp(5)), 1 / (1 + math.exp(2))
    for silo, (s, t), (c, d) in (("a", (4 * q, 2 * q), (1, 0.5)), ("b", (r, r), (-0.5, -0.5))):
        near(run.personal(silo), [1 + s, t, c, -c, d, -d])
        near(run.kept(silo)["dual"], [s / 4, t / 4])
        sent = sent_by(run, silo, 0, "shared")
        near(sent, [1 + 2 * s, 2 * t])
    near(run.shared, [1 + 4 * q + r, 2 * q + r])


def test_two_quadratics_by_hand(tmp_path, monkeypatch, zero_start):
    """f_i(u) = ||u - m_i||² / 2, nothing personal, α = ρ = 1/2, η = 1 / (α + ρ) = 1: one step solves eq. 11 exactly.

    m_i = mean e_y (x, 1) over x = 1, -1. Labels of a (0, 1): W = (1/2, -1/2), b = (1/2, 1/2); of b (1, 1): W = 0,
    b = (0, 1). With m their mean, u_i = m_i/2 + u/2 - π_i:
    round 1, u = π = 0: u_i = m_i/2, π_i = m_i/4, z_i = m_i, and u = m, the optimum of f_a + f_b.
    Round 2: u_i = m_i/4 + m/2, π_i = 3 m_i/8 - m/4 = -α ∇f_i(u_i), z_i = m_i again.
    """
    quadratic_loss(monkeypatch)
    files = isotropic_silos(tmp_path, {"a": (0, 1), "b": (1, 1)})
    options = {"fedapm__personal": "none", "fedapm__rho": 0.5, "learning_rate": 1.0}
    run = federate(files, "fedapm", rounds=2, **options)
    m = {"a": np.array([0.5, -0.5, 0.5, 0.5]), "b": np.array([0, 0, 0, 1.0])}
    mean = (m["a"] + m["b"]) / 2
    assert run.received("a", 2).tolist() == mean.tolist()
    assert run.shared.tolist() == mean.tolist()
    for silo in files:
        assert run.personal(silo).tolist() == (m[silo] / 4 + mean / 2).tolist()
        assert run.kept(silo)["dual"].tolist() == (3 * m[silo] / 8 - mean / 4).tolist()


@pytest.mark.parametrize(
    "absent", [set(), {("c", 1), ("a", 2), ("b", 3), ("c", 4)}], ids=["all", "two of three"]
)
@pytest.mark.parametrize("alpha", ["uniform", "samples"])
@pytest.mark.parametrize("v_start", ["own", "server"])
def test_rounds_of_several_steps_in_numpy(three, v_start, alpha, absent):
    """Equations 8 and 11 to 15 in float64: 2 steps a phase, 4 rounds, all three silos or two of them a round.

    Whoever is absent keeps v_i, u_i, π_i, and its last z_i stays in the mean (eq. 14); before a silo's first round
    all of them are the initial model's, and π_i = 0.
    """
    rho, sigma, eta = 0.3, 0.4, 0.9
    run = federate(
        three,
        "fedapm",
        rounds=4,
        local_epochs=2,
        mlp__hidden="4",
        learning_rate=eta,
        lr_decay=0.9,
        fedapm__rho=rho,
        fedapm__sigma=sigma,
        fedapm__v_start=v_start,
        fedapm__alpha=alpha,
        absent=absent,
    )
    start = run.start()
    v, own, z = (dict.fromkeys(three, start[part]) for part in (FC2, FC1, FC1))
    dual = dict.fromkeys(three, np.zeros_like(start[FC1]))
    trained = {silo: rounds_trained(run, silo) for silo in three}
    for server_round in range(1, 5):
        u, step = sum(z.values()) / 3, eta * 0.9 ** (server_round - 1)
        for silo in (s for s in three if server_round in trained[s]):
            x, y = rows_of(three[silo])
            share = len(y) / 24 if alpha == "samples" else 1 / 3
            w = np.concatenate([own[silo] if v_start == "own" else u, v[silo]])
            for _ in range(2):
                w[FC2] -= step * (
                    share * deep_gradient(w, x, y)[FC2] + sigma * (w[FC2] - v[silo])
                )
            w[FC1] = u
            for _ in range(2):
                w[FC1] -= step * (
                    share * deep_gradient(w, x, y)[FC1] + dual[silo] + rho * (w[FC1] - u)
                )
            v[silo], own[silo] = w[FC2], w[FC1]
            dual[silo] = dual[silo] + rho * (own[silo] - u)
            z[silo] = own[silo] + dual[silo] / rho
    assert trained["c"] == ([2, 3] if absent else [1, 2, 3, 4])
    near(run.shared, sum(z.values()) / 3, 1e-5)
    for silo in three:
        near(run.personal(silo), np.concatenate([own[silo], v[silo]]), 1e-5)
        near(run.kept(silo)["dual"], dual[silo], 1e-5)


# ---- ADMM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_invariant_after_every_aggregation(three, rounds):
    """u is the mean of u_i + π_i/ρ, so sum_i [ρ (u_i - u) + π_i] = 0 (eq. 8)."""
    run = federate(three, "fedapm", fedapm__rho=0.2, **{**OPTIONS, "rounds": rounds})
    states = [run.kept(silo) for silo in three]
    u = run.shared
    total = sum(0.2 * (s["personal"][FC1] - u) + s["dual"] for s in states)
    assert isinstance(total, torch.Tensor)
    near(total, torch.zeros(16))
    assert max(float(s["dual"].abs().max()) for s in states) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("participation, rounds", [(1.0, 40), seldom(0.5, 120)])
def test_quadratics_converge_to_the_consensus_optimum(
    tmp_path, participation, rounds, monkeypatch
):
    """Nothing personal: u tends to the minimum of sum_i f_i / m, not of the pooled rows, also with half the silos.

    FedAvg on the same silos does not get there: it stops where the local drifts cancel.
    """
    quadratic_loss(monkeypatch)
    files = random_silos(tmp_path, [6, 10, 8, 20])
    terms = [quadratic_terms(*rows_of(file), 3) for file in files.values()]
    optimum = np.linalg.solve(sum(h for h, _ in terms), sum(c for _, c in terms))
    options = {"local_epochs": 10, "learning_rate": 0.8, "evaluate_every": 0}
    run = federate(
        files,
        "fedapm",
        rounds=rounds,
        participation=participation,
        fedapm__personal="none",
        fedapm__rho=0.2,
        **options,
    )
    near(run.shared, optimum, 1e-4)
    if participation == 1:
        drifted = federate(
            files, "fedavg", rounds=rounds // 2, **{**options, "learning_rate": 0.2}
        )
        assert np.abs(drifted.shared.numpy() - optimum).max() > 1e-2


def test_solved_exactly_the_dual_is_the_gradient(tmp_path, monkeypatch):
    """The first-order condition of eq. 11 and eq. 12 give π_i = -α_i ∇f_i(u_i): here -(u_i - m_i) / 3."""
    quadratic_loss(monkeypatch)
    files = isotropic_silos(tmp_path, {"a": (0, 1), "b": (1, 1), "c": (1, 0)})
    rho = 0.15
    options = {"fedapm__personal": "none", "fedapm__rho": rho}
    run = federate(files, "fedapm", rounds=3, learning_rate=1 / (1 / 3 + rho), **options)
    for silo, file in files.items():
        hessian, optimum = quadratic_terms(*rows_of(file), 2)
        assert hessian.tolist() == np.eye(4).tolist()
        state = run.kept(silo)
        expected = -(state["personal"].double().numpy() - optimum) / 3
        near(state["dual"], expected)


def test_with_exact_solves_it_is_feddyn(tmp_path, monkeypatch):
    """FedDyn (Acar et al. 2021) in float64, with its a = ρ / α_i = m ρ, for its f_i has no α_i.

    θ_i = argmin f_i - <g_i, θ> + (a/2) ||θ - θ^t||² = (m_i + g_i + a θ^t) / (1 + a); g_i <- g_i - a (θ_i - θ^t);
    h <- h - a mean(θ_i - θ^t); θ^{t+1} = mean θ_i - h/a. All silos take part.
    """
    quadratic_loss(monkeypatch)
    files = isotropic_silos(tmp_path, {"a": (0, 1), "b": (1, 1), "c": (1, 0)})
    rho, rounds = 0.4, 5
    options = {"fedapm__personal": "none", "fedapm__rho": rho}
    run = federate(files, "fedapm", rounds=rounds, learning_rate=1 / (1 / 3 + rho), **options)
    a, theta = 3 * rho, initial(run.settings, 1, 2).double().numpy()
    optima = [quadratic_terms(*rows_of(file), 2)[1] for file in files.values()]
    g, h = [np.zeros(4)] * 3, np.zeros(4)
    for _ in range(rounds):
        local = [(m + gi + a * theta) / (1 + a) for m, gi in zip(optima, g, strict=True)]
        g = [gi - a * (t - theta) for gi, t in zip(g, local, strict=True)]
        h = h - a * (np.mean(local, 0) - theta)
        theta = np.mean(local, 0) - h / a
    near(run.shared, theta)
    for i, silo in enumerate(files):
        near(run.personal(silo), local[i])
        near(run.kept(silo)["dual"].numpy() * 3, -g[i])


# ---- Equivalences ----------------------------------------------------------------------------------------------------


@pytest.fixture
def equal(tmp_path):
    """Two silos of 8 rows: α = 1/2 and the weights of all means are powers of two, so scaling by them is exact."""
    return random_silos(tmp_path, [8, 8])


def test_nothing_shared_is_local_near_the_last_round(two):
    """σ > 0: each step adds σ (v - v_i^t), centred on where the round began. α = 1/2, η = 0.6, σ = 0.7."""
    run = federate(
        two,
        "fedapm",
        fedapm__personal="all",
        fedapm__sigma=0.7,
        mlp__hidden="4",
        rounds=2,
        local_epochs=3,
        learning_rate=0.6,
    )
    for silo, file in two.items():
        w = run.start()
        for _ in range(2):
            centre = w.copy()
            for _ in range(3):
                w = w - 0.6 * (deep_gradient(w, *rows_of(file)) / 2 + 0.7 * (w - centre))
        near(run.personal(silo), w, 1e-5)


def test_before_there_are_duals_the_shared_step_is_fedprox(equal):
    """Round 1, nothing personal: u_i is FedProx's local model with μ = ρ / α_i = 2 ρ, bit for bit."""
    options = {**OPTIONS, "rounds": 1}
    prox = federate(equal, "fedprox", fedprox__mu=0.8, **options)
    options |= {"learning_rate": 0.6, "fedapm__rho": 0.4, "fedapm__personal": "none"}
    run = federate(equal, "fedapm", **options)
    for silo in equal:
        assert same(prox.personal(silo), run.personal(silo))
        assert not same(run.kept(silo)["dual"], torch.zeros(31))


def test_with_ala_the_shared_step_starts_from_the_mixture(three):
    """And its centre stays u: in round 2, one step of length η from the mixture x = u_i + W (u - u_i) gives
    x - η (α ∇_u f + π_i + ρ (x - u)).
    """
    rho, eta = 0.3, 0.9
    options = {
        "mlp__hidden": "4",
        "fedapm__rho": rho,
        "learning_rate": eta,
        "ala": True,
        "fedala__eta": 1000.0,
        "fedala__max_epochs": 2,
    }
    first, run = (federate(three, "fedapm", rounds=rounds, **options) for rounds in (1, 2))
    for silo, file in three.items():
        old, new = (
            {k: v.double().numpy() for k, v in r.kept(silo).items()} for r in (first, run)
        )
        u = run.received(silo, 2).double().numpy()
        own = old["personal"][FC1]
        mixed = own + new["weights"] * (u - own)
        w = np.concatenate([mixed, new["personal"][FC2]])
        grad = deep_gradient(w, *rows_of(file))[FC1] / 3 + old["dual"] + rho * (mixed - u)
        near(new["personal"][FC1], mixed - eta * grad, 1e-5)
        assert np.abs(mixed - u).max() > 1e-3


# ---- Accuracy of the shared step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy, epochs", [(1e-6, 1), (1e-30, 5)])
def test_the_shared_step_ends_at_its_accuracy(tmp_path, accuracy, epochs, monkeypatch):
    """One exact step leaves a gradient of rounding size; what is never reached ends after local-epochs.

    Three silos, so that α = 1/3 leaves a rounding error.
    """
    quadratic_loss(monkeypatch)
    batches, steps = SiloClient.batches, []

    def counted(self, *arguments, **more):
        for batch in batches(self, *arguments, **more):
            steps.append(arguments[1])
            yield batch

    monkeypatch.setattr(FedAPMClient, "batches", counted)
    files = isotropic_silos(tmp_path, {"a": (0, 1), "b": (1, 1), "c": (1, 0)})
    options = {"fedapm__personal": "none", "fedapm__rho": 0.1, "fedapm__accuracy": accuracy}
    federate(
        files, "fedapm", rounds=1, local_epochs=5, learning_rate=1 / (1 / 3 + 0.1), **options
    )
    assert steps.count("train") == 3 * epochs  # one batch per epoch


def test_with_ala_and_nothing_personal_the_own_shared_part_is_mixed(three):
    """Round 2 with W = 0 (see test_ala) starts from u_i of round 1, not from z_i = u_i + π_i / ρ, which travelled."""
    options = {**OPTIONS, "rounds": 2, "fedapm__personal": "none"}
    first = federate(three, "fedapm", **{**options, "rounds": 1})
    run = federate(
        three, "fedapm", ala=True, prepare=keep_weights_at(0.0, 31), **STILL, **options
    )
    for silo in three:
        sent = sent_by(run, silo, 0, "shared")
        assert not same(sent, first.personal(silo))
        assert (
            run.values("loss", silo, "received")[1] == first.values("loss", silo, "personal")[0]
        )


def test_the_accuracy_is_that_of_the_augmented_lagrangian(three):
    """||α ∇_u f_i + π_i + ρ (u_i - u)||² over all of the silo's rows, π_i of before the step, is below ε at the end.

    And after one epoch less it was not: the step ends as soon as it may.
    """
    rho, accuracy, norms = 0.3, 2e-3, []
    measure = FedAPMClient._squared_norm

    def recorded(self, correct):
        norms.append((self.silo.name, measure(self, correct)))
        return norms[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAPMClient, "_squared_norm", recorded)
        run = federate(
            three,
            "fedapm",
            rounds=1,
            local_epochs=200,
            mlp__hidden="4",
            learning_rate=0.9,
            batch_size=4,
            fedapm__rho=rho,
            fedapm__accuracy=accuracy,
        )
    u = run.start()[FC1]
    for silo, file in three.items():
        w = run.personal(silo).double().numpy()
        grad = deep_gradient(w, *rows_of(file))[FC1] / 3 + rho * (w[FC1] - u)
        mine = [value for name, value in norms if name == silo]
        assert mine[-1] == pytest.approx(float(grad @ grad), rel=1e-3)
        assert mine[-1] <= accuracy
        assert all(value > accuracy for value in mine[:-1])
    assert len(norms) > 3


def test_the_accuracy_shrinks_with_every_round_a_silo_takes_part_in(three):
    """c misses rounds 1 and 2 of 3; ε is halved after each use."""
    run = federate(
        three,
        "fedapm",
        fedapm__accuracy=0.5,
        fedapm__shrink=0.5,
        **OPTIONS,
        absent={("c", 1), ("c", 2)},
    )
    for context, epsilon in zip(
        run.grid.contexts.values(), (0.0625, 0.0625, 0.25), strict=True
    ):
        assert json.loads(str(context.state["numbers"]["json"]))["epsilon"] == epsilon


def test_measuring_the_accuracy_leaves_running_statistics_alone(three, tiny_bn):
    """Whether the norm is looked at or not, one epoch moves BatchNorm's statistics alike (batches of one order)."""
    options = {"rounds": 1, "model": "tiny-bn", "learning_rate": 0.1}
    plain, measured = (
        federate(three, "fedapm", fedapm__accuracy=accuracy, **options)
        for accuracy in (0.0, 1e9)
    )
    near(plain.held["buffers"], measured.held["buffers"])


# ---- What travels ----------------------------------------------------------------------------------------------------


def test_only_z_leaves_a_silo(three):
    """Neither v_i, nor u_i and π_i apart; the server averages the last z of all silos, present or not (eq. 8)."""
    run = federate(three, "fedapm", **{**OPTIONS, "rounds": 5}, participation=0.5)
    last = dict.fromkeys(three, initial(run.settings, 3, 3)[FC1])
    for _, silo, payload, _ in replies_of(run):
        assert list(payload.models) == ["shared"]
        assert not payload.numbers
        last[silo] = payload.models["shared"].vector
    silos = [s for s in three if rounds_trained(run, s)]
    for silo in silos:
        state = run.kept(silo)
        own = state["personal"][FC1]
        near(last[silo], own + state["dual"] / 0.01, 1e-5)
        assert not same(last[silo], own)
    mean = torch.stack(list(last.values())).mean(0)
    near(run.shared, mean, 1e-5)
    assert any(len(rounds_trained(run, s)) < 5 for s in three)
