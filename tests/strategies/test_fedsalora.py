"""FedSA-LoRA: its first step by hand, rounds in numpy, one silo is Local, and what it needs (B48)."""

from __future__ import annotations

import numpy as np
import pytest
from near import near
from tiny import federate, rows_of, same
from two_layers import DEEP, deep_gradient

from models.initialisation import flat_model, initial_model
from models.lora import PLACE
from partitions.common.errors import UserError

LORA = {**DEEP, "lora_rank": 2}
ORIGINAL = f"{PLACE}.original"
A, B = slice(0, 6), slice(6, 14)  # of fc1: (2, 3) and (4, 2); then fc2


def test_the_first_step_by_hand(two):
    """As B = 0, the output is the frozen network's, and dL/dA = (α/r) Bᵀ dL/dW = 0: A stays, B and the head move."""
    run = federate(two, "fedsa-lora", rounds=1, **LORA)
    sent = run.received("a", 1)
    assert len(sent) == 6 and same(sent, run.shared)
    own = run.personal("a")
    assert same(own[A], sent) and own[B].any()


def test_rounds_in_numpy(three):
    """Four rounds of three full-batch steps; b is away in round 2. With dW the gradient of the adapted layer's sum,
    dA = s Bᵀ dW and dB = s dW Aᵀ, s = α/r = 4."""
    eta = 0.05
    options = {**LORA, "learning_rate": eta, "local_epochs": 3}
    run = federate(three, "fedsa-lora", rounds=4, absent={("b", 2)}, **options)
    name, given = run.settings.model_for((3,))
    part = run.settings.part()
    model = flat_model(name, (3,), 3, given, "cpu", None, part)
    named = dict(model.module.named_parameters())
    frozen = [named[f"fc1.{k}"].detach().double().numpy() for k in (ORIGINAL, "bias")]
    start = initial_model(name, (3,), 3, given, 7, None, part)("").double().numpy()
    a = start[A].copy()
    own = {silo: start[6:].copy() for silo in three}
    for r in range(1, 5):
        ends, weights = [], []
        for silo in three:
            if (silo, r) == ("b", 2):
                continue
            x, y = rows_of(three[silo])
            low, high, head = a.reshape(2, 3), own[silo][:8].reshape(4, 2), own[silo][8:]
            for _ in range(3):
                weight = frozen[0] + 4 * high @ low
                g = deep_gradient(np.concatenate([weight.ravel(), frozen[1], head]), x, y)
                d = g[:12].reshape(4, 3)
                low, high, head = (
                    low - eta * 4 * high.T @ d,
                    high - eta * 4 * d @ low.T,
                    head - eta * g[16:],
                )
            own[silo] = np.concatenate([high.ravel(), head])
            ends.append(low.ravel())
            weights.append(len(y))
        a = np.average(ends, axis=0, weights=weights)
    near(run.shared, a, 1e-5)
    for silo in three:
        near(run.personal(silo)[6:], own[silo], 1e-5)


def test_without_low_rank_changes_it_is_refused(two):
    with pytest.raises(UserError, match=r"^strategy = fedsa-lora [^\n]*: set lora-rank = 8"):
        federate(two, "fedsa-lora", rounds=1, **DEEP)
