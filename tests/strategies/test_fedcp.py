"""FedCP: the head's special cases, rounds in an independent loop, absent silos, what is exported (B25)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from near import near
from predictions import exported_head
from tiny import SHORT, federate, rows_of, same, split
from torch import nn
from two_layers import DEEP, sent_by

import strategies.fedcp
from models.initialisation import initial_model
from models.metrics import mmd
from models.networks.mlp import MlpSettings
from models.training import generator
from strategies.fedcp import PolicyHead

OPTIONS = {**DEEP, **SHORT, "momentum": 0.9}
# The vector of the network 3-4-3: body, P, G, policy (8 x 4, 8, LN 8 + 8), context.
SHAPES = [(4, 3), (4,), (3, 4), (3,), (3, 4), (3,), (8, 4), (8,), (8,), (8,), (4,)]
BODY, OWN, SHARED, POLICY, CONTEXT = (
    slice(*ends) for ends in ((0, 16), (16, 31), (31, 46), (46, 102), (102, 106))
)


def test_fixed_masks():
    """A policy of zeros: r = s = 1/2, so W h + 2 b with equal heads. LN's bias at 50 for r: W h + b_p + b_g."""
    torch.manual_seed(1)
    head, h = PolicyHead(nn.Linear(4, 3)).eval(), torch.randn(5, 4)
    assert (
        same(head.own.weight, head.shared.weight) and head.own.weight is not head.shared.weight
    )
    with torch.no_grad():
        for parameter in head.policy.parameters():
            parameter.zero_()
        w, b = head.own.weight, head.own.bias
        near(head(h), h @ w.T + 2 * b, 1e-5)
        head.shared.weight.normal_()
        head.shared.bias.normal_()
        head.policy[1].bias[:4] = 50  # type: ignore[operator]
        near(head(h), h @ w.T + b + head.shared.bias, 1e-5)


def test_noise_is_for_training():
    torch.manual_seed(1)
    head, h = PolicyHead(nn.Linear(4, 3)), torch.randn(5, 4)
    r, s = head.masks(h).unbind(1)
    near(r + s, torch.ones(5, 4), 1e-5)
    assert not same(head(h), head(h))
    assert same(head.eval()(h), head(h))
    noise = strategies.fedcp.gumbel(torch.empty(200_000))
    near(float(noise.mean()), 0.5772, 0.01)  # Euler's constant
    near(float(noise.var()), np.pi**2 / 6, 0.03)


def test_mmd_by_hand():
    """Two points at distance 2 against one in the middle; equal batches are 0."""
    a, b = torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    k = [sum(np.exp(-d / (2 * width)) for width in (10, 15, 20, 50)) for d in (0, 1, 4)]
    near(float(mmd(a, b)), (k[0] + k[2]) / 2 + k[0] - 2 * k[1])
    assert float(mmd(a, a)) == 0


def logits_of(w, x, noise=None):
    """Logits and features, from the equations."""
    w1, b1, wp, bp, wg, bg, a, c, scale, shift, v = split(w, SHAPES)
    h = (x @ w1.T + b1).clamp_min(0)
    t = (h * v / v.norm()) @ a.T + c
    t = (t - t.mean(1, keepdim=True)) / (
        t.var(1, keepdim=True, correction=0) + 1e-5
    ).sqrt() * scale + shift
    t = t.clamp_min(0).view(len(x), 2, 4) + (0 if noise is None else noise)
    r = 1 / (1 + (t[:, 1] - t[:, 0]).exp())
    return (r * h) @ wp.T + bp + ((1 - r) * h) @ wg.T + bg, h


def rbf(u, v):
    d = (u[:, None] - v[None]).square().sum(2)
    return torch.stack([(-d / (2 * width)).exp().mean() for width in (10, 15, 20, 50)]).sum()


def test_rounds_in_an_independent_loop(two, monkeypatch):
    """Three rounds of three full-batch steps in float64 by autograd; the noise is the same in every step and row."""

    noise = torch.linspace(-1, 2, 8).view(2, 4)
    monkeypatch.setattr(strategies.fedcp, "gumbel", lambda like: noise)
    run = federate(two, "fedcp", rounds=3, local_epochs=3, fedcp__lambda=2.0, **DEEP)
    start = initial_model("mlp", (3,), 3, MlpSettings("4"), 7, PolicyHead)("").double()
    shared, models = start.clone(), dict.fromkeys(two, start)
    for server_round in range(3):
        total = torch.zeros_like(start)
        for silo, file in two.items():
            rows, labels = rows_of(file)
            x, y = torch.tensor(rows), torch.tensor(labels)
            w = shared.clone()
            w[OWN] = models[silo][OWN]
            w[CONTEXT] = w[OWN][:12].view(3, 4).sum(0)
            if server_round == 0:
                w[CONTEXT] = torch.rand(4, generator=generator(7, silo, "context")).double()
            old = logits_of(w, x)[1]
            for _ in range(3):
                w.requires_grad_()
                logits, h = logits_of(w, x, noise.double())
                distance = rbf(h, h) + rbf(old, old) - 2 * rbf(h, old)
                (grad,) = torch.autograd.grad(F.cross_entropy(logits, y) + 2.0 * distance, w)
                grad[SHARED] = grad[CONTEXT] = 0
                w = (w - 0.3 * grad).detach()
            models[silo] = w.clone()
            w[SHARED] = (w[OWN] + w[SHARED]) / 2
            total += len(y) / 16 * w
        shared = total
    for silo in two:
        near(run.personal(silo), models[silo], 2e-6)
    expected = torch.cat([shared[BODY], shared[SHARED], shared[POLICY]])
    near(run.shared, expected, 2e-6)


def test_heads_that_train_alike(three):
    """G moves by the mean of the heads and not in training; the silos' heads and contexts stay apart."""
    run = federate(three, "fedcp", **OPTIONS)
    for silo in three:
        own = run.personal(silo)
        received = run.received(silo, 3)
        assert same(own[SHARED], received[16:31])
        sent = sent_by(run, silo, -1, "shared")
        assert same(sent[16:31], (own[OWN] + own[SHARED]) / 2) and same(sent[:16], own[BODY])
    assert not same(run.personal("a")[CONTEXT], run.personal("b")[CONTEXT])


def test_lambda_pulls_the_features_back(three):
    """With λ the body moves less from where it was received."""
    moved, slow = [], {"rounds": 1, "local_epochs": 8, "learning_rate": 0.05, "momentum": 0.0}
    for weight in (0.0, 20.0):
        run = federate(three, "fedcp", fedcp__lambda=weight, **{**OPTIONS, **slow})
        start = run.received("a", 1)
        moved.append(float((sent_by(run, "a", 0, "shared") - start)[:16].norm()))
    assert moved[1] < 0.9 * moved[0]


def test_an_absent_silo_keeps_its_head(three):
    away = {("a", 2), ("b", 1)}
    runs = [
        federate(three, "fedcp", **{**OPTIONS, "rounds": rounds}, absent=away)
        for rounds in (1, 2, 3)
    ]
    assert same(runs[0].personal("a"), runs[1].personal("a"))
    own = runs[1].personal("a")[OWN]
    context = own[:12].view(3, 4).sum(0)
    assert same(runs[2].personal("a")[CONTEXT], context)
    random = torch.rand(4, generator=generator(7, "b", "context"))
    assert same(runs[1].personal("b")[CONTEXT], random)  # its first round


def test_the_export_predicts_alike(three, tmp_path):
    run = federate(three, "fedcp", directory=tmp_path / "run", **OPTIONS)
    x, _ = rows_of(three["b"])
    p = logits_of(run.personal("b").double(), torch.tensor(x))[0].softmax(1).numpy()
    assert exported_head(tmp_path, three["b"], p) == "fedcp"
