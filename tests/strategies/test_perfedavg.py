"""Per-FedAvg: two silos by hand, both variants in numpy, the limits of a and of the Hessian (B10)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, comparable, federate, gradient, initial, random_silos, rows_of, same
from two_layers import quadratic_loss, quadratic_terms, replies_of

import models.tasks.base
from strategies.perfedavg import PerFedAvgClient

OPTIONS = {**SHORT, "learning_rate": 0.3}
NAME = "per-fedavg"


def given(**changes):
    return {f"{NAME}.{key}": value for key, value in changes.items()}


def received(run):
    return comparable([r for r in run.rows if r.snapshot == "received"])


# ---- By hand and in numpy --------------------------------------------------------------------------------------------


def test_two_silos_by_hand(pair, zero_start):
    """One step from 0, a = 1/2, b = 1; weights (u, -u), biases (v, -v); all batches of a silo are equal.

    a: w~ = (1/2, 1/4) has the logit 2 (2/2 + 1/4) = 5/2: q = 1 / (1 + e^(5/2)), w = (2 q, q).
    b: w~ = (-1/4, -1/4) has 2 (1/4 + 1/4) = 1: r = 1 / (1 + e), w = (-r, -r).
    The mean is unweighted. Personal is w~: the received model after one step.
    """
    run = federate(pair, NAME, rounds=1, **given(step=0.5))
    q, r = 1 / (1 + math.exp(2.5)), 1 / (1 + math.e)
    u, v = (2 * q - r) / 2, (q - r) / 2
    near(run.shared, [u, -u, v, -v])
    assert run.personal("a").tolist() == [0.5, -0.5, 0.25, -0.25]
    assert run.personal("b").tolist() == [-0.25, 0.25, -0.25, 0.25]


def hessian_times(w, d, x, y):
    """∇²f(w) d of the softmax regression: with z = D x + e (d as a model), mean (diag(p) - p pᵀ) z (x, 1)ᵀ."""
    p = np.exp(x @ w[:9].reshape(3, 3).T + w[9:])
    p /= p.sum(1, keepdims=True)
    z = x @ d[:9].reshape(3, 3).T + d[9:]
    s = p * z - p * (p * z).sum(1, keepdims=True)
    return np.concatenate([(s.T @ x).ravel(), s.sum(0)]) / len(y)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_rounds_of_several_steps_in_numpy(two, variant, weighting):
    """Two rounds of three full-batch steps in float64, the Hessian in closed form; δ = 0.05 is near enough to it."""
    a, b = 0.6, 0.5
    run = federate(
        two,
        NAME,
        rounds=2,
        local_epochs=3,
        learning_rate=b,
        lr_decay=0.8,
        **given(step=a, variant=variant, delta=0.05, weighting=weighting),
    )
    w = run.start()
    shares = {"uniform": [0.5, 0.5], "samples": [6 / 16, 10 / 16]}
    adapted = {}
    for r in range(2):
        mean = np.zeros_like(w)
        for share, (silo, file) in zip(shares[weighting], two.items(), strict=True):
            x, y = rows_of(file)
            adapted[silo] = w - a * gradient(w, x, y)
            local = w
            for _ in range(3):
                grad = gradient(local - a * gradient(local, x, y), x, y)
                if variant == "hf":
                    grad = grad - a * hessian_times(local, grad, x, y)
                local = local - b * 0.8**r * grad
            mean += share * local
        w = mean
    run.ends_near(w, adapted, 1e-4)


# ---- Limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_without_adaptation_it_is_fedavg(tmp_path, three, variant):
    """a = 0, bit for bit: with uniform weights where silos are equal in size, and with sample weights anywhere."""
    equal = random_silos(tmp_path, [8, 8, 8, 8], seed=4)
    for files, weighting, changes in (
        (equal, "uniform", {"momentum": 0.9}),
        (three, "samples", {"mlp__hidden": "4", "mlp__dropout": 0.5}),
    ):
        options = {**OPTIONS, **changes}
        plain = federate(files, "fedavg", **options)
        run = federate(
            files, NAME, **given(step=0.0, variant=variant, weighting=weighting), **options
        )
        assert received(plain) == received(run)
        assert same(plain.shared, run.shared)
        for silo in files:  # no step: the personal model is the received one
            assert same(run.personal(silo), run.received(silo, 3))


def test_the_weights_are_uniform_by_default(three):
    run = federate(three, NAME, **{**OPTIONS, "rounds": 1})
    sent = [p.models["model"].vector for _, _, p, _ in replies_of(run)]
    near(run.shared, torch.stack(sent).mean(0), 1e-5)


@pytest.mark.parametrize("delta", [0.01, 0.5, 10.0])
def test_on_a_quadratic_the_difference_is_exact(two, delta, monkeypatch):
    """f = wᵀ H w / 2 - cᵀ w: w <- w - b (1 - a H) (H w~ - c) with w~ = w - a (H w - c), for any δ."""
    quadratic_loss(monkeypatch)
    a, b = 0.3, 0.4
    run = federate(
        two,
        NAME,
        rounds=2,
        local_epochs=2,
        learning_rate=b,
        **given(step=a, variant="hf", delta=delta),
    )
    w = run.start()
    for _ in range(2):
        parts = []
        for file in two.values():
            hessian, c = quadratic_terms(*rows_of(file), 3)
            local = w
            for _ in range(2):
                grad = hessian @ (local - a * (hessian @ local - c)) - c
                local = local - b * (grad - a * hessian @ grad)
            parts.append(local)
        w = np.mean(parts, 0)
    tolerance = 1e-6 / min(delta, 0.5)  # of float32, over the width of the difference
    near(run.shared, w, 4 * tolerance)


def test_without_curvature_both_variants_are_one(three, monkeypatch):
    """A loss that is linear in the model has no Hessian; with the cross-entropy the variants differ."""

    def linear(logits, y):
        return (logits * torch.linspace(-1, 1, 3)).mean() - logits.gather(1, y[:, None]).mean()

    first, second = (
        federate(three, NAME, **given(variant=v, step=0.4), **OPTIONS) for v in ("fo", "hf")
    )
    assert not same(first.shared, second.shared)
    monkeypatch.setattr(models.tasks.base, "loss_function", lambda *_: linear)
    first, second = (
        federate(three, NAME, **given(variant=v, step=0.4), **OPTIONS) for v in ("fo", "hf")
    )
    assert comparable(first.rows) == comparable(second.rows)
    assert same(first.shared, second.shared)


# ---- Batches, adaptation ---------------------------------------------------------------------------------------------


def recorded(monkeypatch):
    """The rows (their first column) of every batch whose gradient is taken."""
    seen = []
    compute = PerFedAvgClient.gradient

    def gradient_of(self, x, y):
        seen.append(tuple(x[:, 0].tolist()))
        return compute(self, x, y)

    monkeypatch.setattr(PerFedAvgClient, "gradient", gradient_of)
    return seen


def test_batches_are_independent(two, monkeypatch):
    """HF: D, D', D'' and D'' again, four gradients a step; D' in FedAvg's order, D and D'' in their own.

    The last gradient of a round is the adaptation's. Silo b has 10 rows: 5 batches of 2 an epoch, 4 epochs.
    """
    seen = recorded(monkeypatch)
    files = {"b": two["b"]}
    options = {"rounds": 1, "local_epochs": 4, "batch_size": 2}
    federate(files, NAME, **given(variant="hf"), **options)
    assert len(seen) == 4 * 20 + 1
    support, query, ahead, behind = (seen[i:80:4] for i in range(4))
    assert ahead == behind
    for order in (support, query, ahead):  # each passes over all rows, epoch by epoch
        for epoch in range(4):
            rows = [value for batch in order[5 * epoch : 5 * epoch + 5] for value in batch]
            assert len(set(rows)) == 10
    assert len({tuple(support), tuple(query), tuple(ahead)}) == 3
    seen.clear()
    federate(files, NAME, **given(variant="fo", step=0.0), **options)
    assert seen == query


def test_no_local_epochs_no_adaptation(three):
    run = federate(three, NAME, rounds=1, local_epochs=0)
    for silo in three:
        assert same(run.personal(silo), initial(run.settings, 3, 3))


def test_the_personal_model_adapts_the_received_one(three):
    """One step of length a from what came, not from what local training made of it; on one batch of the silo's own."""
    options = {**OPTIONS, "rounds": 2, "batch_size": 1000}
    run = federate(three, NAME, **given(step=0.8), **options)
    for silo, file in three.items():
        w = run.received(silo, 2).double().numpy()
        near(run.personal(silo), w - 0.8 * gradient(w, *rows_of(file)), 1e-5)


def test_absent_silos_are_left_out(three):
    run = federate(three, NAME, **{**OPTIONS, "rounds": 1}, absent={("b", 1)})
    sent = {silo: p.models["model"].vector for _, silo, p, _ in replies_of(run)}
    assert set(sent) == {"a", "c"}
    assert same(run.shared, sent["a"] / 2 + sent["c"] / 2)
