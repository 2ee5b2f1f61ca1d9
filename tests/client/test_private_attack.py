"""A server that reads one patient's value from one message with noise, by hidden units that overflow for them alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import federate, write_silo
from two_layers import replies_of

from client.privacy import private_round
from strategies.base.transport.payload import array_record, tensor_of

HIDDEN, VALUE, LARGEST = 64, 4.7, 3.4e38
THRESHOLDS = torch.linspace(2, 8, HIDDEN)  # hidden unit k overflows for a value above the k-th
RUN = {
    "strategy": "fedavg",
    "mlp__hidden": str(HIDDEN),
    "rounds": 1,
    "local_epochs": 1,
    "dp": True,
}
RUN |= {"batch_size": 12, "dp__noise_multiplier": 20.0, "learning_rate": 0.1}


def crafted(vector):
    """The first layer (H, 3), its bias, the second layer (2, H), its bias: unit k is value * LARGEST / threshold k."""
    found = torch.zeros_like(vector)
    found[: 3 * HIDDEN].view(HIDDEN, 3)[:, 0] = LARGEST / THRESHOLDS
    return found


def attacked(tmp_path, change):
    """The model that silo a is sent, what it replies (none: empty), and the errors of all silos."""
    rng, files = np.random.default_rng(0), {}
    for name in ("a", "b"):
        rows = rng.uniform(-1, 1, (12, 3))
        rows[5, 0] = VALUE if name == "a" else 0.5
        files[name] = write_silo(tmp_path / f"{name}.npz", rows, [0, 1] * 6)
    errors = []

    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "train":
                record = message.content["model.global"]
                message.content["model.global"] = array_record(
                    {"vector": change(tensor_of(record["vector"]))}
                )

        def after(silo, message, reply):
            errors.extend([reply.error.reason or ""] if reply.has_error() else [])
            return reply

        grid.before, grid.after = before, after

    try:
        run = federate(files, state_dir=tmp_path / "state", prepare=prepare, **RUN)
    except Exception as error:
        assert "no silo sent a usable update" in str(error)
        return torch.empty(0), errors
    (reply,) = [
        payload.models["model"].vector for _, silo, payload, _ in replies_of(run) if silo == "a"
    ]
    return reply, errors


def test_overflow_reads_no_value(tmp_path, monkeypatch):
    """What let the server read 4.67 of 4.7: units up to the value were far beyond all noise, the others not."""
    monkeypatch.setattr(private_round, "LARGEST", math.inf)
    reply, errors = attacked(tmp_path, crafted)
    moved = reply[4 * HIDDEN : 6 * HIDDEN].view(2, HIDDEN).abs().amax(0)
    assert not errors and not bool((moved > 10).any())


@pytest.mark.parametrize("value", [1.1e6, math.nan, -math.inf])
def test_weights_beyond_any_training_s_are_refused_before_it(tmp_path, value):
    reply, errors = attacked(tmp_path, lambda vector: torch.full_like(vector, value))
    line = (
        "refuses: dp = true, and 'global' of the message has numbers beyond 1e+06 or not finite"
    )
    assert not len(reply) and len(errors) == 2 and all(line in error for error in errors)
    assert not list((tmp_path / "state").rglob("*.safetensors"))
