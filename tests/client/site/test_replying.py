"""A silo's loop, with the real messages of the Fleet API and a server whose parts and answers get lost."""

from __future__ import annotations

import hashlib
import time
from types import SimpleNamespace
from typing import Any, cast

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from failing import fails
from flwr.app import ArrayRecord, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.run_pb2 import GetRunResponse, Run
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from client.flower import loop, transfers
from client.flower.fleet import RunIsOverError
from client.flower.loop import BUSY_SECONDS, POLL_SECONDS, MessageLoop, Received
from client.flower.transfers import enclose, object_ids, parts_in

RUN, NODE, SERIES = 7, 3, 5
LARGE = np.arange(100_000, dtype=np.float64)  # more than a tree encloses


class RefusedError(grpc.RpcError):  # type: ignore[misc]
    def details(self):
        return "the push session may have expired"


class Server:
    """What a silo calls. The first ``faults`` parts of replies are refused; the run ends after ``until`` parts."""

    grpc, node = grpc, NODE

    def __init__(self, array=LARGE, *, faults=0, until=10_000, enclosed=False, late=0):
        self.faults, self.until, self.late = faults, until, late
        metadata = Metadata(RUN, "", 0, NODE, "", "", time.time(), 600.0, MessageType.TRAIN)
        self.message = make_message(metadata, RecordDict({"a": ArrayRecord([array])}))
        metadata.__dict__["_message_id"] = self.message.object_id
        found = get_all_nested_objects(self.message).items()
        self.parts = {name: part.deflate() for name, part in found}
        self.tree = get_object_tree(self.message)
        if enclosed:
            enclose(self.tree, self.parts.get)
        self.waiting = [self.message]
        self.calls: list[str] = []
        self.replies: list[str] = []
        self.taken: dict[str, bytes] = {}

    def ask(self, name, **fields):
        self.calls.append(name)
        return getattr(self, name)(**fields)

    def PullMessages(self):
        if not self.waiting:
            return PullMessagesResponse()
        bare = message_to_proto(remove_content_from_message(self.waiting.pop()))
        return PullMessagesResponse(messages_list=[bare], message_object_trees=[self.tree])

    def GetRun(self, run_id):
        return GetRunResponse(run=Run(run_id=run_id, fab_hash="f", series_id=SERIES))

    def GetFab(self, hash_str, run_id):
        assert hash_str == "f"
        return SimpleNamespace(fab=SimpleNamespace(content=b"app", hash_str=hash_str))

    def PullObject(self, run_id, object_id):
        self.until -= 1
        if self.until < 0:
            raise RunIsOverError
        if self.late > 0:
            self.late -= 1
            return PullObjectResponse(object_found=self.late != 1, object_available=False)
        content = self.parts[object_id]
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=content
        )

    def ConfirmMessageReceived(self, run_id, message_object_id):
        assert message_object_id == self.message.object_id

    def PushMessages(self, messages_list, message_object_trees, clientapp_runtime_list):
        (message,), (tree,) = messages_list, message_object_trees
        self.replies.append(message.metadata.message_id)
        inside = parts_in(tree)
        self.taken |= inside
        self.whole = set(object_ids(tree))
        wanted = [name for name in self.whole if name not in inside]
        return PushMessagesResponse(objects_to_push=wanted, session_id="session")

    def PushObject(self, run_id, session_id, object_id, object_content):
        assert session_id == "session"
        if self.faults:
            self.faults -= 1
            if self.faults % 2:
                raise RefusedError
            return PushObjectResponse(stored=False)
        self.taken[object_id] = object_content
        return PushObjectResponse(stored=True)


def silo_of(server, monkeypatch, seen=None):
    monkeypatch.setattr(loop, "PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setattr(loop, "internal", without_config(loop.internal))

    def answer(bare, take):
        task = take()
        assert not len(bare.content) and task.run.run_id == RUN and task.fab.content == b"app"
        if seen is not None:
            seen.append(task)
        return Message(task.message.content, reply_to=task.message)

    return MessageLoop(server, {"name": "north"}, answer, lambda busy: None)


def without_config(internal):
    def found(name):
        return (
            (lambda fab, run: {"seed": 7})
            if name == "get_fused_config_from_fab"
            else internal(name)
        )

    return found


@pytest.mark.timeout(30)
@pytest.mark.parametrize("faults", [0, 1, 2, 3, 10_000])
def test_a_reply_that_did_not_get_through_goes_again(monkeypatch, faults, capsys):
    server = Server(faults=faults)
    assert silo_of(server, monkeypatch).serve_one()
    assert (server.taken.keys() == server.whole) == (faults < 4)
    assert len(server.replies) == min(faults + 1, 4) and len({*server.replies}) == 1
    said = capsys.readouterr().out
    assert said.count("the reply did not get through (") == min(faults, 4)
    assert ("is dropped" in said) == (faults >= 4)


def test_what_arrives_is_what_was_sent_and_the_reply_is_whole(monkeypatch):
    server, seen = Server(), list[Received]()
    silo = silo_of(server, monkeypatch, seen)
    assert silo.serve_one() and not silo.serve_one()
    (task,) = seen
    assert task.message.metadata.message_id == server.message.object_id
    assert np.array_equal(task.message.content["a"].to_numpy_ndarrays()[0], LARGE)
    reply = {*server.taken}
    sums = {hashlib.sha256(part).hexdigest() for part in server.taken.values()}
    assert reply == sums == server.whole
    context = task.context
    assert (context.run_id, context.node_id, context.series_id) == (RUN, NODE, SERIES)
    assert context.node_config == {"name": "north"} and context.run_config == {"seed": 7}


def test_a_small_message_needs_four_calls_and_its_run_two_more_once(monkeypatch):
    server = Server(np.arange(4.0), enclosed=True)
    silo = silo_of(server, monkeypatch)
    for calls in (["GetRun", "GetFab"], []):
        server.waiting, server.calls = [server.message], []
        assert silo.serve_one()
        assert server.calls == [
            "PullMessages",
            *calls,
            "ConfirmMessageReceived",
            "PushMessages",
        ]


def test_the_state_of_a_series_is_kept_from_run_to_run(monkeypatch):
    seen: list = []
    silo = silo_of(server := Server(np.arange(4.0), enclosed=True), monkeypatch, seen)
    silo.serve_one()
    seen[0].context.state["kept"] = ArrayRecord()
    other = SimpleNamespace(run_id=RUN + 1, series_id=SERIES)
    later = silo._context(other, SimpleNamespace(content=b""))
    assert "kept" in later.state and later.run_id == RUN + 1
    assert server.node == later.node_id


@pytest.mark.parametrize("until", [0, 1, 3])
def test_a_message_whose_run_is_stopped_while_it_comes_leaves_nothing(monkeypatch, until):
    server = Server(until=until)
    silo = silo_of(server, monkeypatch)
    with pytest.raises(RunIsOverError):
        silo.serve_one()
    assert not silo.serve_one()  # and the next question is for another message
    assert "ConfirmMessageReceived" not in server.calls and server.replies == []


def test_a_part_that_the_server_has_removed_is_not_waited_for(monkeypatch):
    server = Server(late=2)
    fails(loop.LostPartError, "no part", silo_of(server, monkeypatch).serve_one)
    assert server.replies == []


def test_a_part_that_has_not_come_is_asked_for_again_soon(monkeypatch):
    """Flower waits a second, two, four: most of an exchange of short messages."""
    server, pauses = Server(), list[float]()
    pull = server.PullObject
    early = iter(range(7))

    class Moved(transfers.Transfer):
        def __enter__(self):
            self.over: Any = SimpleNamespace(wait=lambda s: pauses.append(s), set=lambda: None)
            return self

        def __exit__(self, *_):
            pass

    def later(run_id, object_id):
        if next(early, None) is not None:
            return PullObjectResponse(object_found=True, object_available=False)
        return pull(run_id, object_id)

    monkeypatch.setattr(server, "PullObject", later)
    monkeypatch.setattr(transfers, "Transfer", Moved)
    monkeypatch.setattr(loop, "MOVERS", 1)
    assert silo_of(server, monkeypatch).serve_one()
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


# --- how often it asks --------------------------------------------------------------------------------------


class EndedError(Exception):
    """The end of a loop that has none."""


class Hours:
    """A clock that only sleeping and waiting move."""

    def __init__(self):
        self.now, self.slept = 1000.0, list[float]()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)
        if len(self.slept) == 300:
            raise EndedError


@pytest.fixture
def hours(monkeypatch):
    monkeypatch.setattr(loop, "time", hours := Hours())
    return hours


def test_sleeps_are_short_for_a_minute_after_a_message(hours):
    rests: list[bool] = []
    silo: Any = MessageLoop(cast(Any, Server()), {}, lambda bare, take: None, rests.append)
    asked = iter([False, True])
    silo.serve_one = lambda: next(asked, False)
    with pytest.raises(EndedError):
        silo.serve()
    short = hours.slept.count(POLL_SECONDS)
    assert hours.slept[0] == 3 and short == pytest.approx(BUSY_SECONDS / POLL_SECONDS, abs=1)
    assert {*hours.slept[1 : short + 1]} == {POLL_SECONDS} and hours.slept[-1] == 3
    assert rests[:2] == [False, True] and not rests[-1]


def test_nobody_sleeps_where_the_server_takes_its_time(hours):
    silo: Any = MessageLoop(cast(Any, Server()), {}, lambda bare, take: None, lambda busy: None)
    held = iter([0.0, 1.5, 0.2, 2.0, 2.0])
    slept: list[int] = []

    def wait():
        slept.append(len(hours.slept))
        hours.now += next(held)
        return False

    silo.serve_one = wait
    with pytest.raises(StopIteration):
        silo.serve()
    assert slept == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("fault", [RunIsOverError(), RefusedError(), loop.LostPartError("x")])
def test_a_message_that_does_not_arrive_is_dropped_and_the_loop_goes_on(hours, fault, capsys):
    silo: Any = MessageLoop(cast(Any, Server()), {}, lambda bare, take: None, lambda busy: None)
    tries: list[int] = []

    def fail():
        tries.append(1)
        raise fault

    silo.serve_one = fail
    with pytest.raises(EndedError):
        silo.serve()
    assert len(tries) == 300 and capsys.readouterr().out.count("dropped\n") in (0, 300)
