"""Copies of the model that the server holds: one of each reply, the round's model, and the next one."""

from __future__ import annotations

import mmap
import tracemalloc
import weakref
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from tiny import federate, random_silos

from client.flower import transfers
from client.flower.internals import internal
from client.flower.transfers import keep_pieces
from client.protocol.receipts import RECORD
from server.run.collector import Collector
from server.run.exchange import join_arrays
from server.run.receipts import Receipts
from strategies.base.transport.payload import Model, Payload, decode, encode

pytestmark = pytest.mark.usefixtures("identity")


def test_messages_and_replies_of_a_round_are_gone_before_the_next(
    no_search, monkeypatch, tmp_path
):
    """Flower's views of a message's records by their type are such cycles."""
    held: list[weakref.ref[RecordDict]] = []
    exchange = Collector.exchange

    def exchanged(collector, messages, strategy, lost):
        assert not any(content() for content in held)
        replies = exchange(collector, messages, strategy, lost)
        collector.grid.traffic.clear()
        held[:] = [weakref.ref(message.content) for message in (*messages, *replies)]
        return replies

    monkeypatch.setattr(Collector, "exchange", exchanged)
    federate(random_silos(tmp_path, [5, 7]), "fedavg", rounds=3)
    assert len(held) == 4


def test_a_reply_whose_log_line_was_read_is_gone_with_its_last_reference(no_search):
    asked = Message(RecordDict(), dst_node_id=7, message_type="train")
    reply = Message(RecordDict({RECORD: ConfigRecord({"line": 1})}), reply_to=asked)
    Receipts().take([reply])
    assert RECORD not in reply.content
    content = weakref.ref(reply.content)
    del reply
    assert content() is None


def test_a_chunk_of_a_reply_is_gone_once_it_is_in_its_array(monkeypatch):
    """The arrays lie in maps, which are not counted. The last chunk is shorter."""
    utils = internal("inflatable_utils")
    monkeypatch.setattr(utils, "inflatable_class_registry", {**utils.inflatable_class_registry})
    keep_pieces()
    vector, left = torch.arange(8e6), list[int]()

    class Watched(mmap.mmap):
        def write(self, piece):
            left.append(tracemalloc.get_traced_memory()[0])
            return super().write(piece)

    monkeypatch.setattr(transfers.mmap, "mmap", Watched)
    content = encode(Payload({"m": Model(vector)}))
    sent = Message(content, dst_node_id=7, message_type="train")
    objects, whole = get_all_nested_objects(sent), sent.object_id
    tracemalloc.start()
    try:
        contents = {name: part.deflate() for name, part in objects.items()}
        reply = join_arrays(utils.inflate_object_from_contents(whole, contents), 1 << 30)
        left.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert left[0] > vector.nbytes and len(left) == 8
    assert all(left[0] - now > (done - 0.1) * (5 << 20) for done, now in enumerate(left[:-1]))
    assert left[-1] < 0.1 * vector.nbytes
    assert torch.equal(decode(reply.content)[0].models["m"].vector, vector)


def test_the_reported_model_is_mapped_from_the_checkpoint(tmp_path):
    """It is only written again: in memory it would be one model more in all rounds after it."""
    files = random_silos(tmp_path, [5, 7])
    run = federate(files, "fedavg", directory=tmp_path / "run", rounds=3)
    shared = run.federation.state.shared["global"]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(end, 16) for end in m[0].split("-")] for m in maps if "server" in m[-1]]
    assert any(start <= shared.data_ptr() < stop for start, stop in spans)
    reported = run.federation.recorder.chosen.round
    assert torch.equal(shared, run.received("a", reported))
