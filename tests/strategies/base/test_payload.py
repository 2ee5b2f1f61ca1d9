"""What travels: payloads through every way that Flower carries a message, and faults of the manifest."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from failing import fails
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from server.simulation.engine import flower_identity
from strategies.base.transport.payload import (
    Model,
    Payload,
    TensorArray,
    array_record,
    decode,
    encode,
    tensor_of,
    wire_bytes,
)


def by_objects(records):
    """As the object store of a deployment: every nested object as bytes under its hash, inflated on the other side."""
    contents = {
        key: bytes(part.deflate()) for key, part in get_all_nested_objects(records).items()
    }
    result = inflate_object_from_contents(records.object_id, contents)
    assert isinstance(result, RecordDict)
    return result


def by_protobuf(records):
    return recorddict_from_proto(
        ProtoRecordDict.FromString(recorddict_to_proto(records).SerializeToString())
    )


def by_pickle(records):
    """As Ray carries it between processes."""
    result = pickle.loads(pickle.dumps(records))
    assert isinstance(result, RecordDict)
    return result


WAYS = {
    "in process": lambda records: records,
    "objects": by_objects,
    "protobuf": by_protobuf,
    "pickle": by_pickle,
    "deep copy": copy.deepcopy,
}


def example():
    generator = torch.Generator().manual_seed(0)
    models = {
        "global": Model(torch.randn(1000, generator=generator), round=3),
        "St. Mary's/2": Model(
            torch.tensor([1.5, -0.0, float("inf"), 1e-45]), "St. Mary's/2", 2, 17
        ),
        "empty": Model(torch.zeros(0)),
    }
    numbers = {
        "wanted": ["a", "b"],
        "strength": 0.1 + 0.2,
        "samples": json.dumps({"ä": 3}),
        "flag": True,
        "n": 2**53,
    }
    return Payload(models, numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_a_payload_arrives_as_it_was_sent(way):
    payload = example()
    received, config = decode(WAYS[way](encode(payload, {"round": 4, "evaluate": True})))
    assert config == {"round": 4, "evaluate": True}
    assert received.numbers == payload.numbers
    assert list(received.models) == list(payload.models)
    for name, sent in payload.models.items():
        got = received.models[name]
        assert (got.silo, got.round, got.samples) == (sent.silo, sent.round, sent.samples)
        assert got.vector.dtype == torch.float32
        assert got.vector.numpy().tobytes() == sent.vector.numpy().tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_it_can_be_sent_on(way):
    """What came over the wire is encoded again without loss (the server hands out what silos sent)."""
    payload = example()
    once = decode(WAYS[way](encode(payload)))[0]
    twice = decode(WAYS[way](encode(once)))[0]
    assert all(torch.equal(twice.models[n].vector, m.vector) for n, m in payload.models.items())


def test_in_one_process_nothing_is_copied():
    vector = torch.randn(10)
    received = decode(encode(Payload({"m": Model(vector)})))[0].models["m"].vector
    assert received.data_ptr() == vector.data_ptr()
    record = array_record({"x": vector})
    assert tensor_of(record["x"]).data_ptr() == vector.data_ptr()


def test_an_array_serialises_once_and_only_when_asked():
    array = TensorArray(torch.arange(3.0))
    assert "_chunks" not in array.__dict__
    assert array.children is not None and "_chunks" in array.__dict__
    assert array.numpy().tolist() == [0, 1, 2]
    plain = Array(np.arange(3, dtype=np.float32))
    assert array.data == plain.data
    assert array.object_id == plain.object_id
    assert (array.dtype, array.shape, array.stype) == (plain.dtype, plain.shape, plain.stype)


def test_a_graph_does_not_travel():
    parameter = torch.randn(3, requires_grad=True)
    vector = decode(encode(Payload({"m": Model(parameter * 2)})))[0].models["m"].vector
    assert not vector.requires_grad


def test_one_model_for_many_silos_is_one_object():
    """Content addressing: the messages to three silos share the model's objects; only the rest differs."""
    vector = torch.randn(500)
    messages = []
    with flower_identity():
        for node in (1, 2, 3):
            payload = Payload({"global": Model(vector, round=1)}, {"node": node})
            messages.append(Message(encode(payload), dst_node_id=node, message_type="train"))
    ids = [m.content["model.global"].object_id for m in messages]
    assert len(set(ids)) == 1
    nested = [set(get_all_nested_objects(m.content)) for m in messages]
    shared = nested[0] & nested[1] & nested[2]
    assert len(shared) == 3  # the record, its array, the array's one chunk
    assert all(len(part - shared) == 2 for part in nested)  # the config, and what holds both
    with flower_identity():
        other = encode(Payload({"global": Model(vector + 1, round=1)}))
    assert other["model.global"].object_id not in ids


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_of_the_arrays(way):
    """1000 + 4 + 0 float32 values; the manifest and the numbers do not count."""
    assert wire_bytes(WAYS[way](encode(example()))) == 1004 * 4
    assert wire_bytes(encode(Payload())) == 0


# ---- Faults --------------------------------------------------------------------------------------------------------


def manifest(records):
    config = records["config"]
    assert isinstance(config, ConfigRecord)
    return config


@pytest.mark.parametrize("record", [None, ArrayRecord(), ConfigRecord({"vector": 1})])
def test_a_model_that_is_not_there_or_of_the_wrong_kind(record):
    records = encode(example())
    del records["model.global"]
    if record is not None:
        records["model.global"] = record
    fails(ValueError, "names model 'global' and does not carry it", decode, records)


@pytest.mark.parametrize("text", ["", "{", "[{}]", '["global"]', "3"])
def test_a_manifest_that_is_none(text):
    records = encode(example())
    manifest(records)["manifest"] = text
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(records)


def test_no_manifest_at_all():
    records = encode(example())
    del manifest(records)["manifest"]
    for empty in (records, RecordDict()):
        fails(ValueError, "no config with a manifest", decode, empty)


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY", b"garbage", np.array([object()], dtype=object).dumps()]
)
def test_bytes_that_are_no_array(data):
    """Nothing is unpickled, whatever a message says it holds."""
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=data)
    with pytest.raises((ValueError, EOFError, TypeError)):
        tensor_of(array)
