"""How vectors travel: number formats, bytes, and each distinct vector packed once."""

from __future__ import annotations

import pytest
import torch
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from tiny import federate, random_silos, round_of

from server.simulation.engine import flower_identity
from strategies.base.transport.payload import Model, Payload, Wire, decode, encode, wire_bytes

OPTIONS = {"rounds": 3, "batch_size": 4, "mlp__hidden": "4", "learning_rate": 0.3}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_format_halves_the_bytes_and_rounds_once(dtype):
    """1/3 in float16 (11 significant bits) is 1365/4096, in bfloat16 (8 bits) 171/512."""
    vector = torch.tensor([1 / 3, -2.0, 0.0])
    records = encode(Payload({"global": Model(vector)}), wire=Wire(dtype))
    assert wire_bytes(records) == 3 * 2
    arrived = decode(records)[0].models["global"].vector
    assert arrived.dtype == torch.float32
    assert arrived.tolist() == [
        {"float16": 1365 / 4096, "bfloat16": 171 / 512}[dtype],
        -2.0,
        0.0,
    ]


@pytest.mark.parametrize("strategy", ["fedavg", "apple"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_run_in_a_narrow_format(three, strategy, dtype):
    """Half the bytes both ways; after 3 rounds within a few units of the format's last place of the float32 run."""
    wide = federate(three, strategy=strategy, **OPTIONS)
    narrow = federate(three, strategy=strategy, wire_dtype=dtype, **OPTIONS)
    for direction in ("bytes_down", "bytes_up"):
        assert [2 * b for b in narrow.values(direction)] == wide.values(direction)
    unit = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for silo in three:
        difference = (narrow.personal(silo) - wide.personal(silo)).abs().max()
        assert 0 < difference < 20 * unit * wide.personal(silo).abs().max()


# Whole messages, as Flower's object store moves them: every nested object under its hash, headers and settings too.
# Σ = 63,003
BIG = {"rounds": 2, "batch_size": 8, "mlp__hidden": "9000", "evaluate_every": 0}


def objects(message):
    with flower_identity():
        return {
            key: len(part.deflate()) for key, part in get_all_nested_objects(message).items()
        }


@pytest.mark.parametrize("strategy", ["fedavg", "apple", "fedamp"])
def test_whole_messages_are_within_two_per_cent_of_the_stated_units(three, strategy):
    run = federate(three, strategy=strategy, **BIG)
    second = [
        (m, r)
        for m, r in run.grid.traffic
        if m.metadata.message_type == "train" and round_of(m) == 2
    ]
    assert len(second) == 3
    model = 4 * run.strategy.layout.size
    down, up = 3 * model * (2 if strategy == "apple" else 1), 3 * model
    assert down < sum(sum(objects(m).values()) for m, _ in second) < 1.02 * down
    assert up < sum(sum(objects(r).values()) for _, r in second) < 1.02 * up


@pytest.mark.parametrize("silos", [3, 6])
def test_what_the_server_uploads_for_apple_grows_with_the_silos(tmp_path, silos):
    """N core models to each of N silos; a model that several messages share is one object, and is uploaded once."""
    files = random_silos(tmp_path, {f"h{i}": 8 for i in range(silos)})
    run = federate(files, strategy="apple", **BIG)
    uploaded: dict[str, int] = {}
    for message, _ in run.grid.traffic:
        if message.metadata.message_type == "train" and round_of(message) == 2:
            uploaded |= objects(message)
    models = silos * 4 * run.strategy.layout.size
    assert models < sum(uploaded.values()) < 1.02 * models
