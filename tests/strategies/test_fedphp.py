"""FedPHP: two silos by hand, its loss by double-precision autograd over rounds, μ by a silo's own rounds (B17)."""

from __future__ import annotations

import math

import pytest
import torch
from near import near
from tiny import federate, rows_of
from two_layers import DEEP, network, replies_of

from models.metrics import mmd

OPTIONS = {"rounds": 4, "local_epochs": 2, "batch_size": 4, "learning_rate": 0.2}


def test_two_silos_by_hand(pair, zero_start):
    """Two rounds of one step, distillation with λ = 1/2, η = 1, μ = 1/2; weights (u, -u), biases (v, -v).

    Round 1: both networks say 1/2, so the transfer term has no grad and the step is half of FedAvg's: w_a = (1/2,
    1/4), w_b = -(1/4, 1/4). μ is 0, p = w. Mean with weights 1/4, 3/4: (-1/16, -1/8). Round 2, a: logit d = 2 (2 u
    + v) = -1/2, of p: 2 (1 + 1/4) = 5/2, over 4: 5/8. Slope of the loss along the logit of class 0, with σ(t) =
    1/(1 + e^-t): (σ(d) - 1)/2 + (σ(d) - σ(5/8))/2 =: s_a; b: d = 2 (u + v) = -3/8, of p: -1, over 4: -1/4, label 1:
    s_b = σ(d)/2 + (σ(d) - σ(-1/4))/2. Then w_a = (-1/16 - 2 s_a, -1/8 - s_a), w_b = (-1/16 - s_b, -1/8 - s_b), and
    with one of two rounds done μ is 1/2 · 1/2: p = w + (p - w)/4.
    """
    run = federate(
        pair,
        "fedphp",
        rounds=2,
        fedphp__lambda=0.5,
        fedphp__mu=0.5,
        fedphp__transfer="distillation",
    )
    s = [1 / (1 + math.exp(-t)) for t in (-1 / 2, 5 / 8, -3 / 8, -1 / 4)]
    s_a, s_b = (s[0] - 1) / 2 + (s[0] - s[1]) / 2, s[2] / 2 + (s[2] - s[3]) / 2
    ends = {"a": (-1 / 16 - 2 * s_a, -1 / 8 - s_a), "b": (-1 / 16 - s_b, -1 / 8 - s_b)}
    before = {"a": (1 / 2, 1 / 4), "b": (-1 / 4, -1 / 4)}
    for silo in pair:
        u, v = (
            end + (old - end) / 4 for end, old in zip(ends[silo], before[silo], strict=True)
        )
        near(run.personal(silo), [u, -u, v, -v])
    sent = {(r, silo): p.models["model"].vector.tolist() for r, silo, p, _ in replies_of(run)}
    for silo in pair:
        for r, (u, v) in ((1, before[silo]), (2, ends[silo])):
            near(sent[r, silo], [u, -u, v, -v])


def transfer_term(kind, w, p, x):
    (h, z), (g, y) = network(w, x), network(p, x)
    if kind == "distillation":
        return -(torch.softmax(y / 4, 1) * torch.log_softmax(z, 1)).sum() / len(x)

    twice = [20.0, 30.0, 40.0, 100.0]
    if kind == "mmd of batch":
        both = torch.cat([h, g]).detach()
        pairs = [(both[i] - both[j]).square().sum() for i in range(len(both)) for j in range(i)]
        twice = [float(sum(pairs)) / len(pairs) / 4 * 2**k for k in range(5)]

    def kernel(a, b):
        d = ((a[:, None] - b[None]) ** 2).sum(2)
        return sum((torch.exp(-d / width) for width in twice), torch.zeros(()))

    return (kernel(h, h) + kernel(g, g) - 2 * kernel(h, g)).mean()


@pytest.mark.parametrize("transfer", ["mmd", "mmd of batch", "distillation"])
def test_rounds_in_double_precision(three, transfer):
    """Five rounds of three full-batch steps, with a steep λ; b is away in rounds 2 and 4, which its μ remembers.

    The kernels of a batch are narrow where its features are near, so that float32's rounding of distances counts more.
    """
    close = 2e-4 if "batch" in transfer else 1e-6
    share, mu, eta = 0.8, 0.7, 0.3
    run = federate(
        three,
        "fedphp",
        rounds=5,
        local_epochs=3,
        fedphp__lambda=share,
        fedphp__mu=mu,
        fedphp__transfer=transfer.split()[0],
        fedphp__kernels="batch" if "batch" in transfer else "fixed",
        **DEEP,
        absent={("b", 2), ("b", 4)},
    )
    w = run.received("a", 1).double()
    history, visits = dict.fromkeys(three, w), dict.fromkeys(three, 0)
    for r in range(1, 6):
        came = [s for s in three if s != "b" or r % 2]
        ends = {}
        for silo in came:
            x, y = (torch.from_numpy(part) for part in rows_of(three[silo]))
            own = w.clone()
            for _ in range(3):
                own.requires_grad_()
                loss = (1 - share) * torch.nn.functional.cross_entropy(network(own, x)[1], y)
                loss = loss + share * transfer_term(transfer, own, history[silo], x)
                own = own.detach() - eta * torch.autograd.grad(loss, own)[0]
            ends[silo] = own
            m = mu * visits[silo] / 5
            history[silo] = m * history[silo] + (1 - m) * own
            visits[silo] += 1
        n = {silo: len(rows_of(three[silo])[1]) for silo in came}
        w = sum((n[s] * ends[s] for s in came), torch.zeros(31, dtype=torch.float64)) / sum(
            n.values()
        )
    near(run.shared, w, close)
    for silo in three:
        near(run.personal(silo), history[silo], close)


def test_mmd_by_hand():
    """One sample each, at distance² 20: 2 · 4 - 2 sum_s exp(-10/s); equal batches: 0, with no grad."""
    a, b = torch.tensor([[0.0, 2.0]]), torch.tensor([[4.0, 0.0]])
    expected = 8 - 2 * sum(math.exp(-10 / s) for s in (10, 15, 20, 50))
    near(float(mmd(a, b)), expected, 1e-5)
    # Of the batch: the only two samples are at the mean distance, so d²/2s is 4, 2, 1, 1/2, 1/4.
    own = 10 - 2 * sum(math.exp(-x) for x in (4, 2, 1, 0.5, 0.25))
    near(float(mmd(a, b, of_batch=True)), own, 1e-5)
    same_features = torch.randn(
        5, 3, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    value = mmd(same_features, same_features.detach())
    (grad,) = torch.autograd.grad(value, same_features)
    assert abs(float(value.detach())) < 1e-5 and float(grad.abs().max()) < 1e-6


def test_statistics_are_mixed_like_the_model(three, tiny_bn):
    """What the silo keeps as its own statistics is μ of its last own and 1 - μ of those that training left."""
    run = federate(three, "fedphp", model="tiny-bn", **{**OPTIONS, "rounds": 2})
    first = federate(three, "fedphp", model="tiny-bn", **{**OPTIONS, "rounds": 1})
    for silo in three:
        # μ = 0.9 · 1/2 in round 2 of 2; in round 1 it is 0, whatever T is.
        old = first.kept(silo)["personal.buffers"]
        trained = next(
            p.models["buffers"].vector for r, s, p, _ in replies_of(run) if (r, s) == (2, silo)
        )
        mixed = run.kept(silo)["personal.buffers"]
        near(mixed, 0.45 * old + 0.55 * trained, 1e-5)
