"""ALA as a module: the same mixing before any method that starts from a received model (FedALA, table 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import typical
from failing import fails
from near import near
from tiny import SHORT, STILL, federate, keep_weights_at, rows_of, same, settings_of
from two_layers import deep_gradient, sent_by

from partitions.common.errors import UserError
from strategies import strategies

OPTIONS = {**SHORT, "mlp__hidden": "4", "learning_rate": 0.3}
ALA = {"fedala__max_epochs": 3, "fedala__eta": 0.5}


@typical(sorted(n for n, s in strategies().items() if s.info.training.ala))
def test_ala_changes_every_method_that_takes_it(three, name, tiny_bn):
    """From round 3 at the latest the received model is a mixture (FedAMP and DiversiFed receive nothing in round 1)."""
    needed: dict[str, dict[str, Any]] = {
        "diversifed": {"diversifed__start": "received"},
        "fedbn": {"model": "tiny-bn"},
    }
    needed["fedsa-lora"] = {"lora_rank": 2}
    extra = needed.get(name, {})
    plain = federate(three, name, **OPTIONS, **ALA, **extra)
    mixed = federate(three, name, ala=True, **OPTIONS, **ALA, **extra)
    losses = [r.values("loss", "a", "received") for r in (plain, mixed)]
    assert losses[0][0] == losses[1][0]
    assert losses[0] != losses[1]


def test_a_partial_method_mixes_what_it_receives(three):
    """FedPer shares fc1 alone (3 · 4 + 4 = 16 scalars): with p = 1 the weights are fc1's, not those of the head."""
    run = federate(three, "fedper", ala=True, **OPTIONS, **ALA)
    assert run.kept("a")["weights"].shape == (16,)


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_a_method_with_two_models_mixes_its_copy_of_the_global_one(three, name):
    """W = 0: a silo goes on from that copy and hears nothing of the others: what it sends is Local's model."""
    alone = federate(three, "local", **OPTIONS)
    run = federate(three, name, ala=True, prepare=keep_weights_at(0.0, 31), **STILL, **OPTIONS)
    for silo in three:
        sent = sent_by(run, silo, -1)
        assert same(sent, alone.personal(silo))
        assert not same(sent, run.personal(silo))


def test_the_proximal_centre_is_the_received_model(three):
    """FedProx with W = 0, one step in round 2 from the silo's own w_i: w_i - η (∇f(w_i) + μ (w_i - w))."""
    options = {"rounds": 2, "learning_rate": 0.3, "mlp__hidden": "4", "fedprox__mu": 2.0}
    first = federate(three, "fedprox", **{**options, "rounds": 1})
    run = federate(
        three, "fedprox", ala=True, prepare=keep_weights_at(0.0, 31), **STILL, **options
    )
    for silo, file in three.items():
        own = first.personal(silo).double().numpy()
        w = run.received(silo, 2).double().numpy()
        expected = own - 0.3 * (deep_gradient(own, *rows_of(file)) + 2 * (own - w))
        near(run.personal(silo), expected, 1e-5)
        assert np.abs(own - w).max() > 1e-3


def test_what_starts_from_its_own_model_refuses_it(three):
    """DiversiFed's default: nothing received would be mixed."""
    with pytest.raises(UserError, match=r"diversifed\.start = received"):
        settings_of(three, strategy="diversifed", ala=True)
    settings_of(three, strategy="diversifed", ala=True, diversifed__start="received")


@pytest.mark.parametrize("name", ["local", "apple", "fedfomo", "fedala"])
def test_methods_without_a_received_model_refuse_it(three, name):
    fails(UserError, "ala = true", settings_of, three, strategy=name, ala=True)
