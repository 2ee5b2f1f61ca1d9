"""MOON: its term by hand and by double-precision autograd over rounds, and where it is FedAvg (B44)."""

from __future__ import annotations

import math

import pytest
import torch
from near import near
from tiny import SHORT, comparable, federate, rows_of, same
from torch import Tensor
from two_layers import DEEP, network

from models.features import compute_frozen
from strategies.moon import MoonClient, cosine

OPTIONS = {**SHORT, "momentum": 0.9}


def test_cosines_by_hand():
    """(3, 4) and (4, 3): 24/25; without a direction 0, and no gradient, which would be infinite."""
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    found = cosine(a, torch.tensor([[4.0, 3.0], [1.0, 0.0]]))
    assert found.tolist() == pytest.approx([24 / 25, 0.0])
    (grad,) = torch.autograd.grad(found.sum(), a)
    # d cos / da = b/|a||b| - cos a/|a|² = (4, 3)/25 - (24/25) (3, 4)/25
    assert grad[0].tolist() == pytest.approx([(4 - 72 / 25) / 25, (3 - 96 / 25) / 25])
    assert grad[1].tolist() == [0.0, 0.0]


def term(h, near, far, temperature):
    """The mean of -log(e^a / (e^a + e^b)), with a and b the cosines over the temperature, row by row."""
    total = torch.zeros((), dtype=h.dtype)
    for z, g, p in zip(h, near, far, strict=True):
        a, b = (
            (z @ v / (z.norm() * v.norm()) if z.norm() * v.norm() > 0 else 0 * z.sum())
            / temperature
            for v in (g, p)
        )
        total = total - torch.log(torch.exp(a) / (torch.exp(a) + torch.exp(b)))
    return total / len(h)


def test_two_silos_by_hand(pair, zero_start):
    """With features of one number cosines are signs: 1 for equal ones, so the term has no gradient, and it is FedAvg.

    The network is linear, its features are the inputs: x = 2 or 1 for all three models, every cosine is 1 and the term
    is log 2 for any μ. FedAvg's two rounds by hand are in test_fedavg.
    """
    run = federate(pair, "moon", rounds=2, moon__mu=5.0)
    plain = federate(pair, "fedavg", rounds=2)
    a, b = (one.shared for one in (run, plain))
    near(a, b)
    # What is reported of a's training is the cross-entropy log(1 + e) and 5 log 2.
    loss = run.values("loss", "a", "personal", "train")[1]
    near(loss, math.log(1 + math.e) + 5 * math.log(2), 1e-5)


@pytest.mark.parametrize("temperature", [0.5, 0.2])
def test_rounds_in_double_precision(three, temperature):
    """Four rounds of three full-batch steps, μ = 2; b is away in round 2, and keeps its model of round 1."""
    mu, eta = 2.0, 0.3
    run = federate(
        three,
        "moon",
        rounds=4,
        local_epochs=3,
        moon__mu=mu,
        moon__temperature=temperature,
        **DEEP,
        absent={("b", 2)},
    )
    w = run.received("a", 1).double()
    last: dict[str, Tensor] = {}
    for r in range(1, 5):
        came = [s for s in three if (s, r) != ("b", 2)]
        n = {s: len(rows_of(three[s])[1]) for s in came}
        mean = torch.zeros_like(w)
        for silo in came:
            x, y = (torch.from_numpy(part) for part in rows_of(three[silo]))
            own = w.clone()
            for _ in range(3):
                own.requires_grad_()
                h, logits = network(own, x)
                loss = torch.nn.functional.cross_entropy(logits, y)
                if silo in last:
                    close, far = (network(v, x)[0].detach() for v in (w, last[silo]))
                    loss = loss + mu * term(h, close, far, temperature)
                own = own.detach() - eta * torch.autograd.grad(loss, own)[0]
            last[silo] = own
            mean += n[silo] / sum(n.values()) * own
        w = mean
    run.ends_near(w, last, 2e-5)


def test_the_first_round_is_fedavgs_for_any_weight(three):
    options = {**OPTIONS, **DEEP, "rounds": 1}
    plain = federate(three, "fedavg", **options)
    run = federate(three, "moon", moon__mu=7.0, **options)
    assert comparable(plain.rows) == comparable(run.rows)
    later = federate(three, "moon", moon__mu=7.0, **{**options, "rounds": 2})
    second = federate(three, "fedavg", **{**options, "rounds": 2})
    assert not same(later.personal("a"), second.personal("a"))


def test_frozen_networks_leave_the_running_statistics(three, tiny_bn):
    """With local-epochs = 0 nothing is trained; with epochs, statistics come from the trained network's passes alone:
    as many as FedAvg's, and with a learning rate near 0 equal to them."""
    options = {"model": "tiny-bn", "rounds": 2, "batch_size": 4, "learning_rate": 1e-12}
    plain = federate(three, "fedavg", **options)
    run = federate(three, "moon", moon__mu=3.0, **options)
    assert same(plain.held["buffers"], run.held["buffers"])


def test_the_last_model_has_the_statistics_of_its_own_training(three, tiny_bn, monkeypatch):
    """z_p is what the model gave that the silo trained last: its outputs then, on its first records, are z_p now."""
    seen: dict[str, list[Tensor]] = {"then": [], "received": [], "now": []}
    update = MoonClient.local_update

    def features(client, tensors=None):
        train = client.silo.train
        x, _ = next(iter(train.batches(train.in_order(4))))
        tensors = tensors or client.model.layout.unflatten(
            client.model.vector, client.model.buffers
        )
        return compute_frozen(client.model, tensors, x)[0].clone()

    def recorded(self):
        first = features(self)
        result = update(self)
        if self.silo.name == "a" and self.round == 1:
            seen["then"].append(features(self))
        if self.silo.name == "a" and self.round == 2:
            near_one, last = self.contrasts
            seen["received"] += [first, features(self, near_one)]
            seen["now"].append(features(self, last))
        return result

    monkeypatch.setattr(MoonClient, "local_update", recorded)
    options = {"model": "tiny-bn", "rounds": 2, "batch_size": 4, "learning_rate": 0.3}
    federate(three, "moon", **options)
    assert same(*seen["received"])
    assert same(*seen["then"], *seen["now"])
