"""GPFL: the valve's special cases, rounds in an independent loop, FedPer without it, what is exported (B32)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from near import near
from predictions import exported_head
from tiny import SHORT, federate, rows_of, same, split, write_silo
from two_layers import DEEP, replies_of

from models.initialisation import initial_model
from models.networks.mlp import MlpSettings
from strategies.gpfl import ConditionalHead, GPFLClient, Valve

OPTIONS = {**DEEP, **SHORT, "momentum": 0.9}
# The vector of the network 3-4-3: body, head, embeddings, A, A', LN, LN', context.
SHAPES = [
    (4, 3),
    (4,),
    (3, 4),
    (3,),
    (3, 4),
    (4, 4),
    (4,),
    (4, 4),
    (4,),
    (4,),
    (4,),
    (4,),
    (4,),
    (4,),
]
BODY, OWN, GCE, VALVE, CONTEXT = (
    slice(*ends) for ends in ((0, 16), (16, 31), (31, 43), (43, 99), (99, 103))
)


def test_the_valve_can_be_the_identity():
    """LN weights and biases 0 and z >= 0: CoV(z, t) = z for any t. It has 2K² + 6K parameters."""
    valve, z, t = Valve(4), torch.rand(5, 4), torch.randn(4)
    assert sum(p.numel() for p in valve.parameters()) == 2 * 16 + 6 * 4
    assert not torch.allclose(valve(z, t), z)
    with torch.no_grad():
        for norm in (valve.scale_norm, valve.shift_norm):
            norm.weight.zero_()
            norm.bias.zero_()
    assert same(valve(z, t), z)


def layer_norm(t, weight, bias):
    return (t - t.mean()) / (t.var(correction=0) + 1e-5).sqrt() * weight + bias


def view_of(w, x, t):
    """CoV(φ(x), t)."""
    w1, b1, _, _, _, a, c, a2, c2, scale, scale_b, shift, shift_b, _ = split(w, SHAPES)
    z = (x @ w1.T + b1).clamp_min(0)
    gamma = layer_norm((a @ t + c).clamp_min(0), scale, scale_b)
    beta = layer_norm((a2 @ t + c2).clamp_min(0), shift, shift_b)
    return (z * (1 + gamma) + beta).clamp_min(0)


def logits_of(w, x):
    return view_of(w, x, w[CONTEXT].detach()) @ split(w, SHAPES)[2].T + split(w, SHAPES)[3]


@pytest.mark.parametrize("contexts", ["received", "own"])
def test_rounds_in_an_independent_loop(two, contexts):
    """Three rounds of three full-batch steps in float64 by autograd."""
    lambda_, mu = 0.3, 0.05
    run = federate(
        two,
        "gpfl",
        rounds=3,
        local_epochs=3,
        gpfl__lambda=lambda_,
        gpfl__mu=mu,
        gpfl__contexts=contexts,
        **{**DEEP, "learning_rate": 0.1},
    )
    start = initial_model("mlp", (3,), 3, MlpSettings("4"), 7, ConditionalHead)("").double()
    shared, models = start.clone(), dict.fromkeys(two, start)
    for server_round in range(3):
        total = torch.zeros_like(start)
        for silo, file in two.items():
            rows, labels = rows_of(file)
            x, y = torch.tensor(rows), torch.tensor(labels)
            w, targets = shared.clone(), split(shared, SHAPES)[4]
            w[OWN] = models[silo][OWN]
            e = targets if contexts == "received" else split(models[silo], SHAPES)[4]
            e = 0 * e if contexts == "own" and server_round == 0 else e
            w[CONTEXT] = sum(e[c] for c in labels) / len(labels)
            for _ in range(3):
                w.requires_grad_()
                view = view_of(w, x, e.mean(0))
                now = split(w, SHAPES)[4]
                cosines = (view @ now.T) / view.norm(dim=1)[:, None] / now.norm(dim=1)
                loss = F.cross_entropy(logits_of(w, x), y) + F.cross_entropy(cosines, y)
                loss = loss + lambda_ * torch.linalg.matrix_norm(view - targets[y])
                (grad,) = torch.autograd.grad(loss, w)
                grad[CONTEXT] = 0
                grad[GCE.start : VALVE.stop] += mu * w[GCE.start : VALVE.stop].detach()
                w = (w - 0.1 * grad).detach()
            models[silo] = w
            total += len(y) / 16 * w
        shared = total
    for silo in two:
        near(run.personal(silo), models[silo], 2e-6)
    expected = torch.cat([shared[BODY], shared[GCE], shared[VALVE]])
    near(run.shared, expected, 2e-6)


def test_without_valve_and_guidance_it_is_fedper(three, monkeypatch):
    """Bit for bit, with the valve replaced by the identity."""
    monkeypatch.setattr(Valve, "forward", lambda self, z, t: z)
    monkeypatch.setattr(GPFLClient, "guidance", lambda self, z, y: 0.0)
    run = federate(three, "gpfl", gpfl__mu=0.0, **OPTIONS)
    plain = federate(three, "fedper", **OPTIONS)
    for silo in three:
        assert same(run.personal(silo)[: OWN.stop], plain.personal(silo))
        assert run.values("loss", silo, "received") == plain.values("loss", silo, "received")


def test_contexts(tmp_path):
    """Equal class counts: p_i = g. A class that a silo lacks has no part in its context."""
    rng = np.random.default_rng(2)
    labels = {"a": [0, 1, 2, 0, 1, 2], "b": [1, 1, 1, 2]}
    files = {
        n: write_silo(tmp_path / f"{n}.npz", rng.normal(size=(len(y), 3)), y, 3)
        for n, y in labels.items()
    }
    run = federate(files, "gpfl", **OPTIONS)
    e = run.received("a", 3)[16:28].view(3, 4)
    near(run.personal("a")[CONTEXT], e.mean(0), 1e-5)
    near(run.personal("b")[CONTEXT], (3 * e[1] + e[2]) / 4, 1e-5)
    own = federate(files, "gpfl", gpfl__contexts="own", **{**OPTIONS, "rounds": 1})
    assert not own.personal("a")[CONTEXT].any()


def test_a_batch_at_its_embeddings_has_a_gradient(two, zero_start):
    """All at 0: the views are their embeddings, where the grad of a bare norm is no number. Only biases move."""
    run = federate(
        two, "gpfl", **{**OPTIONS, "rounds": 1, "local_epochs": 1, "batch_size": 100}
    )
    moved = run.personal("a")
    assert not run.strategy.rejected and moved[28:31].any() and not moved[:28].any()


def test_an_absent_silo_keeps_its_head(three):
    away = {("a", 2), ("b", 1)}
    runs = [
        federate(three, "gpfl", **{**OPTIONS, "rounds": rounds}, absent=away)
        for rounds in (1, 2)
    ]
    assert same(runs[0].personal("a"), runs[1].personal("a"))
    sent = {silo: p.models["shared"].vector for r, silo, p, _ in replies_of(runs[1]) if r == 2}
    mean = (10 * sent["b"] + 8 * sent["c"]) / 18
    near(runs[1].strategy.state.arrays["global"], mean, 1e-5)


def test_the_export_predicts_alike(three, tmp_path):
    run = federate(three, "gpfl", directory=tmp_path / "run", **OPTIONS)
    x, _ = rows_of(three["b"])
    p = logits_of(run.personal("b").double(), torch.tensor(x)).softmax(1).numpy()
    assert exported_head(tmp_path, three["b"], p) == "gpfl"
