"""FedALA: the aggregation weights by hand, the first stage, and the special cases of the algorithm reference (A2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from near import near
from tiny import (
    SHORT,
    TinyGrid,
    client_of,
    federate,
    forget_models,
    gradient,
    rows_of,
    same,
    session_of,
    settings_of,
)
from torch.testing import assert_close

from strategies.base.state import State
from strategies.base.transport.payload import Model
from strategies.fedala import FedALAClient


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """One ALA epoch of one batch (max-epochs = 1, s = 100), η_W = 0.1, all layers; weights (u, -u), biases (v, -v).

    Round 1 is FedAvg's (see test_fedavg): Θ_a = (1, 1/2), Θ_b = (-1/2, -1/2), then Θ = (-1/8, -1/4).
    Round 2, silo a: Θ - Θ_a = (-9/8, -3/4). At W = 1, Θ̂ = Θ and its gradient (x = 2, class 0), with
    q = 1 / (1 + e), is (-2 (1 - q), -(1 - q)). So W_u = 1 - 0.1 · 2 (1 - q) · 9/8, W_v = 1 - 0.1 (1 - q) 3/4 (for
    -u and -v both factors change sign: the same). Θ̂ = Θ_a + (Θ - Θ_a) W, then one step from there.
    """
    run = federate(
        pair,
        "fedala",
        rounds=2,
        fedala__max_epochs=1,
        fedala__sample_percent=100,
        fedala__eta=0.1,
    )
    rest = 1 - 1 / (1 + math.e)
    w_u, w_v = 1 - 0.1 * 2 * rest * 9 / 8, 1 - 0.1 * rest * 3 / 4
    near(run.kept("a")["weights"], [w_u, w_u, w_v, w_v])
    u, v = 1 - 9 / 8 * w_u, 0.5 - 3 / 4 * w_v
    z = 2 * (2 * u + v)  # difference of the two logits
    near(run.values("loss", "a", "received")[1], math.log(1 + math.exp(-z)))
    rest = 1 - 1 / (1 + math.exp(-z))
    u, v = u + 2 * rest, v + rest
    near(run.personal("a"), [u, -u, v, -v])


def test_three_rounds_of_several_batches_in_numpy(two):
    """Equations 4 to 7 in float64; two ALA epochs in the first stage, one later, full batches."""
    eta, rate = 0.3, 0.5
    run = federate(
        two,
        "fedala",
        rounds=3,
        learning_rate=rate,
        fedala__eta=eta,
        fedala__sample_percent=100,
        fedala__max_epochs=2,
    )
    received = run.start()
    old: dict[str, Any] = {}
    weights = {silo: np.ones(12) for silo in two}
    for r in range(3):
        total = np.zeros(12)
        for silo, file in two.items():
            x, y = rows_of(file)
            start = received
            if r > 0:
                difference = received - old[silo]
                for _ in range(2 if r == 1 else 1):
                    g = gradient(old[silo] + difference * weights[silo], x, y)
                    weights[silo] = np.clip(weights[silo] - eta * g * difference, 0, 1)
                start = old[silo] + difference * weights[silo]
            old[silo] = start - rate * gradient(start, x, y)
            total += len(y) / 16 * old[silo]
        received = total
    near(run.shared, received, 1e-5)
    for silo in two:
        near(run.kept(silo)["weights"], weights[silo], 1e-5)
    assert (weights["a"] < 1).any()


# ---- Special cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "tiny-bn"])
def test_without_learning_it_is_fedavg_up_to_rounding(three, model, tiny_bn):
    """η = 0 keeps W = 1: Θ_i + (Θ - Θ_i) is Θ but for the last bit. Running statistics are not ALA's to change."""
    options = {**SHORT, "learning_rate": 0.1, "model": model}
    plain = federate(three, "fedavg", **options)
    ala = federate(
        three, "fedala", fedala__eta=0.0, fedala__layers=9, fedala__max_epochs=3, **options
    )
    for name, vector in plain.held.items():
        near(ala.held[name], vector, 2e-6)
    for a, b in zip(plain.rows, ala.rows, strict=True):
        if a.metric == "loss":
            near(a.value, b.value, 1e-5)


def ala_client(files, state, received, **changes):
    """Silo a's half in round 2, holding a received model."""
    forget_models()
    settings = settings_of(files, strategy="fedala", **changes)
    grid = TinyGrid(files, settings)
    client = client_of(
        settings, session_of(settings, grid.contexts[1], classes=3).silo, state, server_round=2
    )
    assert isinstance(client, FedALAClient)
    client.models = {"global": Model(received)}
    return client


def test_where_both_models_are_equal_nothing_is_learned(two):
    """(Θ - Θ_i) = 0 makes every gradient of W zero: W and the first stage stay as they are, Θ̂ = Θ."""
    received = torch.randn(12, generator=torch.Generator().manual_seed(1))
    state = State({"personal": received.clone(), "weights": torch.full((12,), 0.25)})
    client = ala_client(two, state, received)
    assert same(client.receive(), received)
    assert state.arrays["weights"].tolist() == [0.25] * 12
    assert "settled" not in state.numbers


def test_weights_of_equal_entries_do_not_move(two):
    """Where only some entries agree, those keep their W and Θ's value."""
    received = torch.randn(12, generator=torch.Generator().manual_seed(1))
    old = received.clone()
    old[::2] += 0.5
    state = State({"personal": old, "weights": torch.full((12,), 0.5)})
    mixed = ala_client(two, state, received).receive()
    assert state.arrays["weights"][1::2].tolist() == [0.5] * 6
    assert same(mixed[1::2], received[1::2])
    assert (state.arrays["weights"][::2] != 0.5).any()


def test_weights_are_clipped(two):
    """A huge η drives every W with a gradient to 0 or 1, never beyond."""
    generator = torch.Generator().manual_seed(2)
    received, old = torch.randn(12, generator=generator), torch.randn(12, generator=generator)
    state = State({"personal": old, "weights": torch.full((12,), 0.5)})
    mixed = ala_client(two, state, received, fedala__eta=1e6, fedala__max_epochs=1).receive()
    weights = state.arrays["weights"]
    assert set(weights.tolist()) == {0.0, 1.0}
    assert same(mixed[weights == 0], old[weights == 0])
    near(mixed[weights == 1], received[weights == 1], 1e-5)


def test_only_the_highest_layers_are_mixed(two):
    """Layers below the p highest take Θ as it is; p counts layers, with weight and bias."""
    size = 3 * 4 + 4 + 4 * 3 + 3  # one hidden layer of 4
    generator = torch.Generator().manual_seed(3)
    received = torch.randn(size, generator=generator)
    old = torch.randn(size, generator=generator)
    state = State({"personal": old})
    client = ala_client(
        two, state, received, mlp__hidden="4", fedala__layers=1, fedala__max_epochs=1
    )
    mixed = client.receive()
    assert same(mixed[:16], received[:16])
    assert state.arrays["weights"].shape == (15,)
    expected = old[16:] + (received - old)[16:] * state.arrays["weights"]
    near(mixed[16:], expected, 1e-5)
    assert (state.arrays["weights"] < 1).any()
    assert all(p.requires_grad for p in client.model.module.parameters())


def test_a_fault_in_the_middle_leaves_the_model_trainable(two, monkeypatch):
    """Silos of one process share the network: what ALA freezes must not stay frozen for the next one."""
    state = State({"personal": torch.zeros(31)})
    client = ala_client(two, state, torch.ones(31), mlp__hidden="4")
    monkeypatch.setattr(client, "_epoch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.receive()
    assert all(p.requires_grad for p in client.model.module.parameters())
    assert "weights" not in state.arrays


# ---- The first stage -----------------------------------------------------------------------------------------------


def count_epochs(run, monkeypatch, losses=None):
    """ALA epochs by (silo, round) while ``run()`` is running; ``losses`` replaces the last batches' losses."""
    counted: dict[tuple[str, int], int] = {}
    original = FedALAClient._epoch

    def epoch(self, *arguments):
        key = (self.silo.name, self.round)
        counted[key] = counted.get(key, 0) + 1
        loss = original(self, *arguments)
        return loss if losses is None else losses[counted[key] - 1]

    monkeypatch.setattr(FedALAClient, "_epoch", epoch)
    run()
    return counted


def test_the_first_stage_ends_after_window_plus_one_epochs_at_the_earliest(two, monkeypatch):
    """Everything counts as settled (threshold 1e9): window + 1 = 4 epochs in round 2, then one a round.

    Round 1 has no old model and no ALA; the closing exchange (round 4) mixes as well.
    """
    options = {"strategy": "fedala", "rounds": 3, "fedala__window": 3, "fedala__threshold": 1e9}
    counted = count_epochs(lambda: federate(two, **options), monkeypatch)
    assert counted == {(silo, r): 4 if r == 2 else 1 for silo in two for r in (2, 3, 4)}


def test_the_first_stage_is_bounded(two, monkeypatch):
    """Nothing is ever under threshold 0: max-epochs; and a bound below window + 1 holds too."""
    for bound in (2, 7):
        options = {
            "strategy": "fedala",
            "rounds": 2,
            "fedala__window": 3,
            "fedala__threshold": 0.0,
        }
        with monkeypatch.context() as patch:
            counted = count_epochs(
                lambda o=options, b=bound: federate(two, fedala__max_epochs=b, **o), patch
            )
        assert {counted[silo, 2] for silo in two} == {bound}
        assert {counted[silo, 3] for silo in two} == {1}


def test_the_last_windows_population_deviation_settles_it(two, monkeypatch):
    """Window 2, threshold 0.5. Population deviation of two values is half their distance.

    9, 5: more than two losses are needed. 5, 4 (after 3 epochs): 0.5, not under it. 4, 3.1 (after 4): 0.45, settled.
    The sample deviation, 0.64, would go on.
    """
    options = {"strategy": "fedala", "rounds": 2, "fedala__window": 2, "fedala__threshold": 0.5}
    losses = [9.0, 5.0, 4.0, 3.1, 3.1, 3.1, 3.1]
    counted = count_epochs(lambda: federate(two, **options), monkeypatch, losses)
    assert {counted[silo, 2] for silo in two} == {4}


def test_the_first_stage_waits_for_the_weights_and_not_for_the_batches(two, monkeypatch):
    """With η = 0 W stays, and so does the loss of the last batch, for it is of the same samples: window + 1 epochs.

    In fresh batches of 2 of 6 and 10 rows it would be another every epoch, and no threshold of 1e-9 would be met.
    """
    options = {
        "strategy": "fedala",
        "rounds": 3,
        "batch_size": 2,
        "fedala__eta": 0.0,
        "fedala__window": 3,
        "fedala__threshold": 1e-9,
        "fedala__sample_percent": 100,
    }
    counted = count_epochs(lambda: federate(two, **options), monkeypatch)
    assert counted == {(silo, r): 4 if r == 2 else 1 for silo in two for r in (2, 3, 4)}


def test_a_rounds_batches_are_the_same_in_every_epoch_and_others_in_the_next_round(
    two, monkeypatch
):
    orders: dict[tuple[str, int], list[list[list[int]]]] = {}
    original = FedALAClient._epoch

    def epoch(self, network, take, *arguments):
        taken: list[list[int]] = []
        loss = original(
            self,
            network,
            lambda i: (taken.append(i.tolist()), take(i))[1],  # type: ignore[func-returns-value]
            *arguments,
        )
        orders.setdefault((self.silo.name, self.round), []).append(taken)
        return loss

    monkeypatch.setattr(FedALAClient, "_epoch", epoch)
    federate(two, "fedala", rounds=4, batch_size=2, fedala__max_epochs=5, fedala__threshold=0.0)
    for silo in two:
        assert len(orders[silo, 2]) == 5
        assert all(order == orders[silo, 2][0] for order in orders[silo, 2])
    assert len({str(orders["b", r][0]) for r in (2, 3, 4)}) == 3


def test_dropout_is_drawn_anew_in_every_epoch(two, monkeypatch):
    """The batches are the same, the dropped units are not: with η = 0 the losses of the last batch differ."""
    losses = []
    original = FedALAClient._epoch

    def epoch(self, *arguments):
        losses.append(original(self, *arguments))
        return losses[-1]

    monkeypatch.setattr(FedALAClient, "_epoch", epoch)
    federate({"b": two["b"]}, "fedala", rounds=1, mlp__hidden="16", mlp__dropout=0.5)
    assert losses == []  # round 1 has no old model, and alone there is no difference later
    federate(
        two,
        "fedala",
        rounds=2,
        mlp__hidden="16",
        mlp__dropout=0.5,
        fedala__eta=0.0,
        fedala__max_epochs=6,
        fedala__threshold=0.0,
    )
    assert len(set(losses[:6])) > 3


def test_a_silo_that_comes_later_has_its_first_stage_later(three, monkeypatch):
    """c is away in rounds 1 and 2: round 3 starts from Θ as received, round 4 is its long one."""

    runs = []
    options = {"strategy": "fedala", "rounds": 4, "fedala__window": 2, "fedala__threshold": 1e9}
    counted = count_epochs(
        lambda: runs.append(federate(three, absent={("c", 1), ("c", 2)}, **options)),
        monkeypatch,
    )
    of_c = {r: n for (silo, r), n in counted.items() if silo == "c"}
    assert of_c == {4: 3, 5: 1}
    assert {n for (silo, r), n in counted.items() if silo == "a" and r > 2} == {1}
    x, y = rows_of(three["c"])
    w = runs[0].received("c", 3).double().numpy()
    z = x @ w[:9].reshape(3, 3).T + w[9:]
    loss = float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))
    near(runs[0].values("loss", "c", "received")[0], loss)


# ---- The sample, and what leaves -----------------------------------------------------------------------------------


def test_the_sample_is_s_percent_drawn_anew_each_round(two, monkeypatch):
    """Of b's 10 rows 35 % are 3; all epochs of a round go over the same rows, another round over others."""
    taken: dict[int, list[frozenset[int]]] = {}
    original = FedALAClient._epoch

    def epoch(self, *arguments):
        rows: list[int] = []
        take = self.silo.train.take
        with monkeypatch.context() as patch:
            patch.setattr(
                self.silo.train,
                "take",
                lambda i: (rows.extend(i.tolist()), take(i))[1],  # type: ignore[func-returns-value]
            )
            loss = original(self, *arguments)
        if self.silo.name == "b":
            assert len(rows) == len(set(rows)) == 3
            taken.setdefault(self.round, []).append(frozenset(rows))
        return loss

    monkeypatch.setattr(FedALAClient, "_epoch", epoch)
    federate(
        two, "fedala", rounds=5, batch_size=2, fedala__sample_percent=35, fedala__max_epochs=3
    )
    assert len(taken[2]) == 3
    assert all(len(set(epochs)) == 1 for epochs in taken.values())
    assert len({epochs[0] for epochs in taken.values()}) > 1


def test_features_of_the_frozen_layers_are_computed_once(two, monkeypatch):
    """With one of two layers mixed, the first layer runs once per sample and round, and nothing else changes."""
    from models.flat import FlatModel

    options = {
        "strategy": "fedala",
        "rounds": 3,
        "batch_size": 2,
        "mlp__hidden": "4",
        "fedala__max_epochs": 5,
        "fedala__sample_percent": 50,
    }
    quick = federate(two, **options)
    rows = []
    original = FlatModel.__init__

    def init(self, *arguments):
        original(self, *arguments)
        self.has_dropout = True  # "random" layers: the whole network runs in every pass
        first = self.module.get_submodule(self.layout.blocks[0].name)
        first.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))

    with monkeypatch.context() as patch:
        patch.setattr(FlatModel, "__init__", init)
        forget_models()
        slow = federate(two, **options)
    forget_models()
    assert rows
    assert_close(quick.personal("a"), slow.personal("a"), rtol=1e-5, atol=1e-6)
    near(quick.kept("a")["weights"], slow.kept("a")["weights"], 1e-5)
