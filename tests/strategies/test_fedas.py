"""FedAS: rounds in numpy with an absence, its alignment by hand, FedPer, and a silo that overstates itself (B34)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from near import near
from tiny import federate, round_of, rows_of
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of

from strategies.fedas import FedAS


def features(body, x):
    return np.maximum(x @ body[:12].reshape(4, 3).T + body[12:], 0)


def alignment(body, x, y, means):
    """The gradient of the sum over classes of the mean of (1/K) ||h - P_y||², with h = relu(W x + b)."""
    h = features(body, x)
    weight = 1 / np.bincount(y, minlength=3)[y]
    dz = 2 * (h - means[y]) / 4 * weight[:, None] * (h > 0)
    return np.concatenate([(dz.T @ x).ravel(), dz.sum(0)])


def means_of(body, x, y):
    z = features(body, x)
    return np.stack([z[y == k].mean(0) if (y == k).any() else np.zeros(4) for k in range(3)])


def test_two_silos_and_their_alignment_by_hand():
    """h = relu(w x), one feature of four used, two samples of class 0 at h = 1 and 3, P = 1: the loss is the mean of 0
    and 4, over K = 4: 1/2. Its gradient by w, with x = 1 and 3: (1/2) 2 (3 - 1) 3 / 4 = 3/2."""
    body = np.zeros(16)
    body[0] = 1.0
    x, y = np.array([[1.0, 0, 0], [3.0, 0, 0]]), np.array([0, 0])
    means = np.zeros((3, 4))
    means[0, 0] = 1.0
    assert alignment(body, x, y, means)[0] == pytest.approx(1.5)
    z = torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 0]])
    client = FedAS.client.__new__(FedAS.client)
    client.prototypes = torch.from_numpy(means).float()
    assert float(client.distance(z, z, torch.tensor([0, 0]))) == pytest.approx(0.5)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_rounds_in_numpy(three, decay):
    """Four rounds: one step of alignment, two of training, all in full batches; b is away in round 2.

    Both rates of round r are decay^(r - 1) of the first.
    """
    run = federate(
        three,
        "fedas",
        rounds=4,
        local_epochs=2,
        fedas__align_learning_rate=0.2,
        lr_decay=decay,
        weight_cap=0,
        **DEEP,
        absent={("b", 2)},
    )
    first = federate(three, "fedavg", rounds=1, **DEEP).sent_to("a", 1)["global"]
    start = first.vector.double().numpy()
    body, own = start[FC1].copy(), dict.fromkeys(three, start)
    trained = set()
    for r in range(1, 5):
        eta, rate = 0.3 * decay ** (r - 1), 0.2 * decay ** (r - 1)
        bodies, energies = [], []
        for silo in three:
            if (silo, r) == ("b", 2):
                continue
            x, y = rows_of(three[silo])
            u = body.copy()
            if silo in trained:
                u = u - rate * alignment(u, x, y, means_of(own[silo][FC1], x, y))
            w = np.concatenate([u, own[silo][FC2]])
            for _ in range(2):
                w = w - eta * deep_gradient(w, x, y)
            own[silo] = w
            trained.add(silo)
            bodies.append(w[FC1])
            energies.append(float((deep_gradient(w, x, y) ** 2).sum()))
        body = np.average(bodies, axis=0, weights=energies)
    run.ends_near(body, own, 1e-5)
    told = [p.numbers["energy"] for r, _, p, _ in replies_of(run) if r == 4]
    assert told == pytest.approx(energies, rel=1e-4)


@pytest.mark.parametrize("energy", [1e30, -1.0, float("nan")])
def test_a_silo_that_overstates_itself(three, energy):
    """It counts as weight-cap times the median at most; what is no size of a gradient is left out."""

    def lie(silo, message, reply):
        if silo == "a" and round_of(message) == 1 and message.metadata.message_type == "train":
            config = reply.content["config"]
            config["number.energy"] = energy
        return reply

    run = federate(
        three,
        "fedas",
        rounds=1,
        robust="none",
        prepare=lambda grid: setattr(grid, "after", lie),
        **DEEP,
    )
    rejected = [r.silo for r in run.rows if r.metric == "rejected"]
    assert rejected == ([] if energy > 0 else ["a"])
    if energy > 0:
        sent = {s: p for _, s, p, _ in replies_of(run)}
        told = {s: float(str(sent[s].numbers["energy"])) for s in ("b", "c")}
        weights = [5 * max(told.values()), *told.values()]
        vectors = [sent[s].models["shared"].vector.numpy() for s in three]
        expected = np.average(vectors, axis=0, weights=weights)
        found = run.shared.numpy()
        near(found, expected, 1e-5)


def test_with_running_statistics_it_measures_in_evaluation_mode(three, tiny_bn, monkeypatch):
    """s_i is ||gradient||² of the one batch's mean loss, and P of round 2 the class means of the model of round 1: both
    of a copy of the network that is in evaluation mode, with the statistics of the silo's own training."""
    told, expected, means = [], [], {}

    def all_of(client):
        train = client.silo.train
        return next(iter(train.batches(train.in_order(1000))))

    def copied(client):
        return copy.deepcopy(client.model.module).eval()

    def energy(self, original=FedAS.client.energy):
        module = copied(self)
        x, y = all_of(self)
        loss = torch.nn.functional.cross_entropy(module(x), y)
        found = torch.autograd.grad(loss, [*module.parameters()])
        expected.append(sum(float(g.square().sum()) for g in found))
        told.append(original(self))
        return told[-1]

    def update(self, original=FedAS.client.local_update):
        result = original(self)
        module, inputs = copied(self), []
        layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        layers[-1].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        x, y = all_of(self)
        with torch.no_grad():
            module(x)
        z = inputs[0].flatten(1)
        means[self.silo.name] = {k: z[y == k].mean(0) for k in y.unique().tolist()}
        return result

    def prototypes(self, own, original=FedAS.client.own_prototypes):
        found = original(self, own)
        for k, mean in means[self.silo.name].items():
            near(found[k], mean, 1e-5)
        checked.append(self.silo.name)
        return found

    checked: list[str] = []
    monkeypatch.setattr(FedAS.client, "energy", energy)
    monkeypatch.setattr(FedAS.client, "local_update", update)
    monkeypatch.setattr(FedAS.client, "own_prototypes", prototypes)
    federate(three, "fedas", rounds=2, model="tiny-bn", learning_rate=0.3)
    assert told == pytest.approx(expected, rel=1e-4)
    assert sorted(checked) == ["a", "b", "c"]
