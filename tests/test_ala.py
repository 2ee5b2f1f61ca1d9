"""ALA as a module: the same mixing before any method that starts from a received model (FedALA, table 4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Files, comparable, federate, same, settings_of

from strategies import strategies
from strategies.settings import UserError

OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "local_epochs": 2,
    "batch_size": 4,
    "mlp__hidden": "4",
    "learning_rate": 0.3,
}
ALA: dict[str, Any] = {"fedala__max_epochs": 3, "fedala__eta": 0.5}


def test_fedavg_with_ala_is_fedala(three: Files) -> None:
    """FedALA's table 4: the row of FedAvg + ALA is FedALA's own."""
    module = federate(three, strategy="fedavg", ala=True, **OPTIONS, **ALA)
    method = federate(three, strategy="fedala", **OPTIONS, **ALA)
    assert comparable(module.rows) == comparable(method.rows)
    assert same(module.strategy.state.arrays["global"], method.strategy.state.arrays["global"])


@pytest.mark.parametrize("name", sorted(n for n, s in strategies().items() if s.takes_ala))
def test_ala_changes_every_method_that_takes_it(three: Files, name: str) -> None:
    """From round 3 at the latest the received model is a mixture (FedAMP and DiversiFed receive nothing in round 1)."""
    extra: dict[str, Any] = {"diversifed": {"diversifed__start": "received"}}.get(name, {})
    plain = federate(three, strategy=name, **OPTIONS, **ALA, **extra)
    mixed = federate(three, strategy=name, ala=True, **OPTIONS, **ALA, **extra)
    losses = [r.values("loss", "a", "received") for r in (plain, mixed)]
    assert losses[0][0] == losses[1][0]
    assert losses[0] != losses[1]


def test_a_partial_method_mixes_what_it_receives(three: Files) -> None:
    """FedPer shares fc1 alone (3 · 4 + 4 = 16 scalars): with p = 1 the weights are fc1's, not those of the head."""
    run = federate(three, strategy="fedper", ala=True, **OPTIONS, **ALA)
    assert run.grid.state("a").arrays["weights"].shape == (16,)


def test_a_method_with_two_models_mixes_its_copy_of_the_global_one(three: Files) -> None:
    """η = 0 keeps W = 1: Ditto's global model then runs as without ALA, up to rounding."""
    still: dict[str, Any] = {"fedala__eta": 0.0, "fedala__max_epochs": 1, "fedala__layers": 9}
    plain = federate(three, strategy="ditto", **OPTIONS)
    mixed = federate(three, strategy="ditto", ala=True, **OPTIONS, **still)
    ours, theirs = (r.strategy.state.arrays["global"] for r in (mixed, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert not same(mixed.grid.state("a").arrays["local"], mixed.personal("a"))


@pytest.mark.parametrize("name", ["local", "apple", "fedfomo", "fedala"])
def test_methods_without_a_received_model_refuse_it(three: Files, name: str) -> None:
    with pytest.raises(UserError, match="ala = true"):
        settings_of(three, strategy=name, ala=True)
