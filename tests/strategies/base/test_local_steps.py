"""`local-steps`: each silo takes the same number of mini-batches in a round, whatever its size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tiny import comparable, federate, random_silos, settings_of

import strategies.base.trainer.loop as base
from partitions.common.errors import UserError
from strategies import strategies

STEPS: dict[str, dict[str, Any]] = {
    name: {} for name, method in strategies().items() if method.info.training.local_steps
}
del STEPS["pooled"]  # FedAvg with one silo, in simulations only
STEPS["fedbn"] = {"model": "tiny-bn"}
STEPS["fedex-lora"] = {"lora_rank": 2, "mlp__hidden": "4"}


@pytest.fixture
def three(tmp_path):
    return random_silos(tmp_path, [8, 16, 40])


def test_whole_epochs_in_steps_are_epochs(tmp_path):
    """Silos of 8 samples have two batches of 4 in an epoch: four steps are two epochs, bit for bit."""
    equal = random_silos(tmp_path, [8, 8])
    common = {"strategy": "fedavg", "rounds": 2, "batch_size": 4}
    epochs = comparable(federate(equal, **common, local_epochs=2).rows)
    assert comparable(federate(equal, **common, local_steps=4).rows) == epochs
    assert comparable(federate(equal, **common, local_steps=3).rows) != epochs


@pytest.mark.parametrize("name", STEPS)
def test_every_silo_takes_as_many(three, tiny_bn, monkeypatch, name):
    """5 batches of 4 samples: more than the two of an epoch of a, fewer than the ten of c."""
    taken: Counter[tuple[str, str]] = Counter()
    batches = base.shuffled_batches

    def counted(silo, common, server_round, epochs, purpose, *rest):
        for batch in batches(silo, common, server_round, epochs, purpose, *rest):
            taken[silo.name, purpose] += 1
            yield batch

    monkeypatch.setattr(base, "shuffled_batches", counted)
    options = {"rounds": 1, "batch_size": 4, "local_steps": 5, "learning_rate": 0.1}
    run = federate(three, name, **options, **STEPS[name])
    trained = {silo: n for (silo, purpose), n in taken.items() if purpose == "train"}
    assert trained == dict.fromkeys(three, 5)
    assert run.rows


@pytest.mark.parametrize("name", ["ditto", "apple", "fednova"])
def test_methods_that_count_epochs_refuse_steps(three, name):
    with pytest.raises(
        UserError, match=rf"^local-steps = 5: {name} counts .* set local-epochs$"
    ):
        settings_of(three, strategy=name, local_steps=5)


def test_the_budget_counts_epochs(three):
    with pytest.raises(UserError, match=r"^dp = true: not with local-steps = 5: "):
        settings_of(three, strategy="fedavg", local_steps=5, dp=True)
