"""FedEx-LoRA: its server by hand, rounds in numpy, the mean of the silos' weights, one silo, and what it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import federate, random_silos, rows_of, settings_of
from two_layers import DEEP, deep_gradient

from models.initialisation import flat_model, initial_model
from models.lora import PLACE
from partitions.common.errors import UserError
from strategies.base.transport.payload import Update
from strategies.fedexlora import FedExLoRA

LORA = {**DEEP, "lora_rank": 2}
SCALE = 4  # α / r
A, B, R, HEAD = slice(0, 6), slice(6, 14), slice(14, 26), slice(26, 41)  # of fc1; then fc2
WEIGHT = "fc1.weight"


def network(run):
    """The network of a run, with the method's residual."""
    name, options = run.settings.model_for((3,))
    part = run.settings.part()
    start = initial_model(name, (3,), 3, options, 7, None, part)("")
    return flat_model(name, (3,), 3, options, "cpu", None, part), start


def sent(a, b):
    """Of A a row, of B a column, all else 0."""
    vector = torch.zeros(29)
    vector[0:3], vector[6:14:2] = torch.tensor(a), torch.tensor(b)
    return vector


def test_two_silos_by_hand(two):
    """A_1 = (1 0 0), B_1 = (2 0 0 0)ᵀ with n_1 = 1; A_2 = (0 1 0), B_2 = (0 4 0 0)ᵀ with n_2 = 3; second rows are 0.

    A' = (1/4 3/4 0), B' = (1/2 3 0 0)ᵀ. The mean of the products is ((1/2 0 0) (0 3 0) ...), B' A' is
    ((1/8 3/8 0) (3/4 9/4 0) ...): R grows by ((3/8 -3/8 0) (-3/4 3/4 0) ...), which is added to what R was, here 1.
    """
    settings = settings_of(two, strategy="fedex-lora", **LORA)
    name, options = settings.model_for((3,))
    layout = flat_model(name, (3,), 3, options, "cpu", None, settings.part()).layout
    strategy = FedExLoRA(settings.common, settings.method, layout)
    strategy.state.model = torch.zeros(41)
    strategy.state.model[R] = 1
    updates = [
        Update("a", 1, {"shared": sent([1.0, 0, 0], [2.0, 0, 0, 0])}, {}, {}),
        Update("b", 3, {"shared": sent([0.0, 1, 0], [0.0, 4, 0, 0])}, {}, {}),
    ]
    strategy.aggregate(updates)
    w = strategy.state.model
    assert w[A].tolist() == [0.25, 0.75, 0, 0, 0, 0]
    assert w[B].tolist() == [0.5, 0, 3, 0, 0, 0, 0, 0]
    added = [3 / 8, -3 / 8, 0, -3 / 4, 3 / 4, 0, *[0] * 6]
    assert (w[R] - 1).tolist() == added and not w[HEAD].any()


@pytest.mark.parametrize("average", ["samples", "silos"])
def test_rounds_in_numpy(three, average):
    """Three rounds of three full-batch steps, b away in round 2: the server averages the changes, and keeps factors
    whose product is another. dA = s Bᵀ dW and dB = s dW Aᵀ."""
    eta = 0.2
    options = {**LORA, "learning_rate": eta, "local_epochs": 3, "fedex-lora__average": average}
    run = federate(three, "fedex-lora", rounds=3, absent={("b", 2)}, **options)
    model, start = network(run)
    named = dict(model.module.named_parameters())
    frozen, bias = (
        named[f"fc1.{k}"].detach().double().numpy() for k in (f"{PLACE}.original", "bias")
    )
    start = start.double().numpy()
    low, high, head = start[A].reshape(2, 3), start[B].reshape(4, 2), start[HEAD]
    change = high @ low  # of W, all in all, divided by s
    for r in range(1, 4):
        ends, weights = [], []
        for silo, file in three.items():
            if (silo, r) == ("b", 2):
                continue
            x, y = rows_of(file)
            a, b, h = low.copy(), high.copy(), head.copy()
            for _ in range(3):
                weight = frozen + SCALE * (change - high @ low + b @ a)
                g = deep_gradient(np.concatenate([weight.ravel(), bias, h]), x, y)
                d = g[:12].reshape(4, 3)
                a, b, h = a - eta * SCALE * b.T @ d, b - eta * SCALE * d @ a.T, h - eta * g[16:]
            ends.append((a, b, h, change - high @ low + b @ a))
            weights.append(len(y) if average == "samples" else 1)
        low, high, head, change = (
            np.average(part, axis=0, weights=weights) for part in zip(*ends, strict=True)
        )
    near(run.shared[A], low.ravel(), 1e-5)
    near(run.shared[B], high.ravel(), 1e-5)
    near(run.shared[HEAD], head, 1e-5)
    residual = change - high @ low
    assert np.abs(residual).max() > 1e-3
    near(run.shared[R], residual.ravel(), 1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_model_is_the_mean_of_the_silos_weights(three, rank):
    """Of an export's W, whatever the rank; FedAvg's, with a mean of the factors, is another."""
    apart = {}
    for name in ("fedex-lora", "fedavg"):
        run = federate(three, name, rounds=2, **{**LORA, "lora_rank": rank}, local_epochs=4)
        model, _ = network(run)
        counts = [len(rows_of(file)[1]) for file in three.values()]
        each = [model.state_dict(run.personal(silo))[WEIGHT].double() for silo in three]
        mean = sum(n * w for n, w in zip(counts, each, strict=True)) / sum(counts)
        apart[name] = float((model.state_dict(run.shared)[WEIGHT].double() - mean).abs().max())
    assert apart["fedex-lora"] < 1e-6 < 1e-3 < apart["fedavg"]


def test_one_silo_is_fedavg(tmp_path):
    alone = random_silos(tmp_path, [8])
    exact, plain = (
        federate(alone, name, rounds=3, **LORA).shared for name in ("fedex-lora", "fedavg")
    )
    assert not exact[R].any()
    assert torch.equal(torch.cat([exact[A], exact[B], exact[HEAD]]), plain)


def test_without_low_rank_changes_it_is_refused(two):
    with pytest.raises(UserError, match=r"^strategy = fedex-lora [^\n]*: set lora-rank = 8"):
        federate(two, "fedex-lora", rounds=1, **DEEP)
