"""What crosses between the process that runs the app and the one that writes the audit log: data, never code."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pickle
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from client.flower.internals import internal
from client.flower.transfers import keep_pieces
from client.site.release import describe_reply
from client.site.runtime.app_process import (
    InvalidAnswerError,
    read_answer,
    read_question,
    write_answer,
    write_question,
)
from client.site.runtime.worker import shared_memory
from strategies.base.transport.payload import JOINED, Model, Payload, decode, encode

ROOT = Path(__file__).parents[3]
PARTS = ("models", "partitions", "strategies", "client", "server")

pytestmark = pytest.mark.usefixtures("identity")


def content(value=1.5):
    vector = ArrayRecord({"vector": Array(np.array([value, -0.0, np.inf], dtype=np.float32))})
    return RecordDict(
        {
            "model": vector,
            "config": ConfigRecord({"round": 3, "exact": True, "names": ["a", "b"]}),
        }
    )


def message():
    return Message(content(), dst_node_id=7, message_type="train")


@pytest.fixture
def file():
    with shared_memory() as file:
        yield file


def test_a_question_arrives_as_it_was_asked(file):
    asked = message()
    known = Context(
        11,
        7,
        {"name": "clinic"},
        content(2.5),
        {"rounds": 3, "learning-rate": 0.1, "resume": False},
    )
    write_question(file, {"fab": ["a", "1"]}, asked, known)
    head, read, same = read_question(file)
    assert head["fab"] == ["a", "1"]
    assert read.content == asked.content and vars(read.metadata) == vars(asked.metadata)
    assert (same.run_id, same.node_id, same.node_config) == (11, 7, {"name": "clinic"})
    assert same.state == known.state and same.run_config == known.run_config


def test_the_worker_makes_the_reply_from_content_or_error_alone(file):
    """Whose reply it is, and to whom it goes, the app's process has no say in."""
    asked = message()
    forged = Message(content(4.0), dst_node_id=99, message_type="query")
    known = Context(11, 7, {}, RecordDict(), {})
    write_answer(file, forged, content(2.5))
    reply = read_answer(file, asked, known)
    assert reply.content == content(4.0) and known.state == content(2.5)
    assert reply.metadata.message_type == "train"
    assert reply.metadata.reply_to_message_id == asked.metadata.message_id
    failed = Message(Error(2, "no such column"), reply_to=asked)
    with shared_memory() as other:
        write_answer(other, failed, RecordDict())
        reply = read_answer(other, asked, known)
    assert (reply.error.code, reply.error.reason) == (
        2,
        "no such column",
    ) and known.state == content(2.5)


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def ended(**values):
    text = json.dumps(values).encode()
    return text + len(text).to_bytes(8, "big")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        pickle.dumps(Trap()),
        b"x" + ended(places=[[0, 2**40]]),
        b"x" + ended(places=[[-1, 1], [0, 1]]),
        b"\xff" + ended(places=[[0, 1]]),
        b"x" + ended(places=[[0, 0], [0, 0], [0, 1]]),
        ended(places=[], error={"code": "x", "reason": 1}),
    ],
)
def test_an_answer_of_bad_intent_is_an_error(file, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file.write(answer)
    file.flush()
    with pytest.raises(InvalidAnswerError, match="wrote no valid answer"):
        read_answer(file, message(), None)
    assert not Path("executed").exists()


def test_what_was_logged_is_what_leaves(file):
    """The app's process still holds the file: it can neither change it nor cut it off, nor keep a way to do so."""
    write_answer(file, Message(content(4.0), dst_node_id=9, message_type="train"), RecordDict())
    known = Context(11, 7, {}, RecordDict(), {})
    with mmap.mmap(file.fileno(), 0), pytest.raises(InvalidAnswerError, match="OSError"):
        read_answer(file, message(), known)
    reply = read_answer(file, message(), known)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fileno(), 0)
    assert reply.content == content(4.0)


def test_chunks_have_flowers_names_and_bytes():
    """`keep_pieces` hashes and copies them once; what travels is Flower's own."""
    from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

    keep_pieces()
    for data in (b"", b"\x00a\x00\x00", bytes(100_000)):
        chunk = internal("inflatable_utils").ArrayChunk(memoryview(data))
        content = chunk.deflate()
        assert content == add_header_to_object_body(chunk.data, chunk)
        assert chunk.object_id == hashlib.sha256(content).hexdigest()
        assert type(chunk).inflate(content).data == data


def test_a_large_model_is_held_once_at_every_hop(file, monkeypatch):
    """From the server's tensor to the app's, and back: views and parts, in units of the model's bytes."""
    utils = internal("inflatable_utils")
    monkeypatch.setattr(utils, "inflatable_class_registry", {**utils.inflatable_class_registry})
    keep_pieces()
    vector, known = torch.arange(8e6), Context(11, 7, {}, RecordDict(), {})
    first, size = JOINED / vector.nbytes, vector.nbytes

    def check_copies(now, most):
        found = [traced / size - 0.01 for traced in tracemalloc.get_traced_memory()]
        assert found[0] <= now and found[1] <= most, found
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        sent = Message(
            encode(Payload({"m": Model(vector)})), dst_node_id=7, message_type="train"
        )
        objects, whole = get_all_nested_objects(sent), sent.object_id
        check_copies(first, 1.5 * first)
        contents = {name: part.deflate() for name, part in objects.items()}
        del objects, sent
        check_copies(1, 2)
        asked = utils.inflate_object_from_contents(whole, contents)
        check_copies(1, 1 + first / 2)
        write_question(file, {}, asked, known)
        check_copies(0, 1)
        read = read_question(file)[1]
        received = decode(read.content)[0].models["m"].vector
        assert torch.equal(received, vector) and received.data_ptr() % 64 == 0
        with shared_memory() as answer:
            content = encode(Payload({"m": Model(received)}))
            write_answer(answer, Message(content, reply_to=read), RecordDict())
            reply = read_answer(answer, read, known)
        assert next(iter(describe_reply(reply)))["bytes"] > size
        check_copies(0, 0)
    finally:
        tracemalloc.stop()


def arrived(sent):
    """The message at its other end."""
    objects, whole = get_all_nested_objects(sent), sent.object_id
    contents = {name: part.deflate() for name, part in objects.items()}
    return internal("inflatable_utils").inflate_object_from_contents(whole, contents)


def test_equal_vectors_of_a_message_arrive_both(file, monkeypatch):
    """Flower sends them as one object, for example APPLE's first core models with `common-init`."""
    utils = internal("inflatable_utils")
    monkeypatch.setattr(utils, "inflatable_class_registry", {**utils.inflatable_class_registry})
    keep_pieces()
    models = {name: Model(torch.arange(3.0)) for name in ("a", "b")}
    asked = arrived(Message(encode(Payload(models)), dst_node_id=7, message_type="train"))
    write_question(file, {}, asked, Context(11, 7, {}, RecordDict(), {}))
    received = decode(read_question(file)[1].content)[0].models
    assert {name: model.vector.tolist() for name, model in received.items()} == {
        name: [0.0, 1.0, 2.0] for name in models
    }


def test_nothing_is_pickled_anywhere():
    """But published files: CIFAR's, with stand-ins for all that a pickle can call, and tables of a known SHA-256."""
    sources = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    imports = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill|cloudpickle)\b", re.MULTILINE
    )
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources
        if imports.search(path.read_text("utf-8"))
    }
    assert users == {"partitions/datasets/pickles.py", "partitions/datasets/centres.py"}
