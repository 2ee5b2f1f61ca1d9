"""A silo that asks for a message waits for one, and has again what it never got.

State, store and service are Flower's, behind gRPC on the loopback interface; the last test asks a whole SuperLink, as
`silofl up` starts it.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from failing import fails
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesRequest,
    PushAppMessagesRequest,
)
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]
from superlink import superlink
from supernode import wait_until

from client.flower import mail as mail_module
from client.flower import transfers
from client.flower.fleet import (
    HEADERS,
    Fleet,
    FleetCalls,
    covered,
    fleet_method,
    request,
    signed_text,
)
from client.flower.grid import RuntimeGrid
from client.flower.internals import internal
from client.flower.mail import GATHER_SECONDS, HELD_SECONDS, MOST_TIMES, WAIT_SECONDS, Mail
from client.flower.messages import FAILED, LOST, is_error
from client.flower.service import (
    METHODS,
    MOST_CALL,
    OLD_SILO,
    check_signature,
    fleet_server,
    handler_of,
    missing_seams,
)
from client.flower.transfers import MOST_PARTS, enclose, object_ids, parts_in, tree_of
from client.protocol.envelope import load_node_key
from partitions.common.errors import DataError
from server.deploy.control import Control
from server.deploy.superlink import start_superlink as superlink_main
from server.run.exchange import Exchange, TimeoutPolicy, join_arrays
from server.run.limits import check_reply, group_id, most_bytes, too_large


class StoppedClock:
    """The module `time` for a SuperLink: a look at the messages is a sleep later only when the test lets time pass."""

    def __init__(self):
        self.now, self.turn, self.asleep = 0.0, 0, 0
        self.changed = threading.Condition()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        with self.changed:
            turn, self.asleep = self.turn, self.asleep + 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.turn != turn, 60)

    def wait_for(self, sleepers):
        """Until so many calls have looked and found nothing."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.asleep == sleepers, 60)

    def let_pass(self, seconds):
        with self.changed:
            self.now, self.turn, self.asleep = self.now + seconds, self.turn + 1, 0
            self.changed.notify_all()


# A call that the caller has given up; a call that has been answered
ENDED: SimpleQueue[bool] = SimpleQueue()


def endpoint(name, mail):
    """A method of the service as our SuperLink has it, whoever calls."""
    answer, method = handler_of(name, mail), fleet_method(name)

    def call(request, context):
        if name == "PullMessages":
            context.add_callback(lambda: ENDED.put(True))
        try:
            return answer(request, context)
        finally:
            if name == "PullMessages":
                ENDED.put(False)

    return grpc.unary_unary_rpc_method_handler(
        call,
        GetMessageClass(method.input_type).FromString,
        GetMessageClass(method.output_type).SerializeToString,
    )


@dataclass
class FakeServer:
    """A Fleet API with one silo and one run, which is on."""

    states: LinkStateFactory
    stores: ObjectStoreFactory
    mail: Mail
    address: str
    node: int
    run: int

    def __post_init__(self):
        self.handlers = SimpleNamespace(**vars(internal("runtime_handlers")))
        self.mail.wrap(self.handlers)

    def store(self, number, *, whole=True, group=""):
        """A message to the silo, as a ServerApp pushes one; ``whole``: with its parts. Its number."""
        state = self.states.state()
        content = RecordDict({"model": ArrayRecord([np.full(3, number)])})
        now = time.time()
        metadata = Metadata(
            self.run, "", SUPERLINK_NODE_ID, self.node, "", group, now, 60.0, "train"
        )
        message = make_message(metadata, content)
        metadata.__dict__["_message_id"] = message.object_id
        request = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        answer = self.handlers.push_messages(request, state, SimpleNamespace(run_id=self.run))
        assert answer.message_ids == [message.object_id] and answer.objects_to_push
        self.rest = (
            answer.session_id,
            {name: part.deflate() for name, part in get_all_nested_objects(message).items()},
        )
        if whole:
            self.complete()
        return message.object_id

    def complete(self):
        """Push the parts of the message that was stored last."""
        session, parts = self.rest
        task, node = SimpleNamespace(run_id=self.run), Node(node_id=SUPERLINK_NODE_ID)
        for name, part in parts.items():
            request = PushObjectRequest(
                node=node,
                run_id=self.run,
                session_id=session,
                object_id=name,
                object_content=part,
            )
            assert self.handlers.push_object(request, self.states.state(), task).stored

    def has_a_silo_waiting(self):
        return self.node in self.mail.news

    def reply(self, name):
        """What the ServerApp is given as the reply to a message."""
        (found,) = self.states.state().get_message_res({name}, self.run)
        return found

    def silo(self):
        return FakeSilo(FleetStub(grpc.insecure_channel(self.address)), self.node, self.run)


@dataclass
class FakeSilo:
    stub: FleetStub
    node: int
    run: int

    def ask(self):
        """The numbers of the messages that it is given."""
        answer = self.stub.PullMessages(
            PullMessagesRequest(node=Node(node_id=self.node)), timeout=60
        )
        return [m.metadata.message_id for m in answer.messages_list]

    def answer(
        self,
        message,
        numbers,
        *,
        group="",
        session=None,
        begun=lambda: None,
        inside=lambda parts: {},
    ):
        """Reply to a message with so many float64 numbers, part by part; which parts the server has taken.

        ``begun`` is called before the first part. ``inside``: of all parts, those that come in the reply's tree.
        """
        content = RecordDict({"model": ArrayRecord([np.arange(numbers, dtype=np.float64)])})
        now = time.time()
        metadata = Metadata(
            self.run, "", self.node, SUPERLINK_NODE_ID, message, group, now, 30.0, "train"
        )
        reply = make_message(metadata, content)
        metadata.__dict__["_message_id"] = reply.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        tree = get_object_tree(reply)
        enclose(tree, inside(parts).get)
        request = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
        )
        answer = self.stub.PushMessages(request)
        begun()
        taken = []
        for name in answer.objects_to_push:
            part = PushObjectRequest(
                node=Node(node_id=self.node),
                run_id=self.run,
                session_id=answer.session_id if session is None else session,
                object_id=name,
                object_content=parts[name],
            )
            taken.append(self.stub.PushObject(part).stored)
        return taken

    def confirm(self, message):
        node = Node(node_id=self.node)
        request = ConfirmMessageReceivedRequest(
            node=node, run_id=self.run, message_object_id=message
        )
        self.stub.ConfirmMessageReceived(request)


@pytest.fixture
def clock(monkeypatch):
    clock = StoppedClock()
    monkeypatch.setattr(mail_module, "time", clock)
    monkeypatch.setattr(mail_module, "LOOK_SECONDS", 0.02)
    return clock


@pytest.fixture
def server(clock):
    stores = ObjectStoreFactory()
    states = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), stores)
    state = states.state()
    node = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"key", 60.0)
    assert state.activate_node(node, 60.0)
    run = state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
    )
    (task,) = state.get_tasks(run_ids=[run])
    assert state.claim_task(task.task_id) and state.activate_task(task.task_id)
    mail = Mail(state, most_bytes, too_large, threading.Semaphore(2))
    service = grpc.server(
        ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", MOST_CALL)]
    )
    endpoints = {name: endpoint(name, mail) for name in METHODS}
    fleet = grpc.method_handlers_generic_handler("flwr.proto.Fleet", endpoints)
    service.add_generic_rpc_handlers([fleet])
    port = service.add_insecure_port("127.0.0.1:0")
    service.start()
    yield FakeServer(states, stores, mail, f"127.0.0.1:{port}", node, run)
    clock.let_pass(WAIT_SECONDS)
    service.stop(None).wait()


def get_nothing(server, clock):
    """A silo asks, waits all the time that there is, and has an answer without a message."""
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.silo().ask)
        wait_until(server.has_a_silo_waiting)
        clock.let_pass(0.9 * WAIT_SECONDS)
        assert server.has_a_silo_waiting() and not asked.done()
        clock.let_pass(0.2 * WAIT_SECONDS)
        assert asked.result() == []


def test_a_message_that_is_there_is_given_at_once(server, clock):
    name = server.store(1.0)
    assert server.silo().ask() == [name] and clock.asleep == 0


def test_without_one_the_answer_is_nothing_after_a_while(server, clock):
    get_nothing(server, clock)


def test_it_is_given_as_soon_as_it_has_come_whole(server, monkeypatch):
    """Its last part wakes the silo, which else looks once a minute."""
    monkeypatch.setattr(mail_module, "LOOK_SECONDS", 60.0)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.silo().ask)
        wait_until(server.has_a_silo_waiting)
        name = server.store(1.0, whole=False)
        assert not asked.done()  # its parts are on their way
        server.complete()
        assert asked.result(timeout=30) == [name]
    assert not server.mail.news and not server.mail.missing


def test_what_a_silo_has_confirmed_is_not_given_again(server, clock):
    silo, name = server.silo(), server.store(1.0)
    assert silo.ask() == [name]
    silo.confirm(name)
    get_nothing(server, clock)


def test_what_it_never_got_is_given_again(server):
    """The line was cut while the answer was on its way, or in the middle of the message's parts."""
    silo, name = server.silo(), server.store(1.0)
    assert silo.ask() == [name]  # and is lost
    later = server.store(2.0)
    assert silo.ask() == [name]
    silo.confirm(name)
    assert silo.ask() == [later]


def test_but_not_for_ever(server, clock):
    silo, name = server.silo(), server.store(1.0)
    assert [silo.ask() for _ in range(MOST_TIMES + 1)] == [[name]] * (MOST_TIMES + 1)
    get_nothing(server, clock)


def test_a_silo_that_has_gone_takes_no_message_with_it(server, clock):
    while not ENDED.empty():  # of tests before
        ENDED.get()
    asked = server.silo().stub.PullMessages.future(
        PullMessagesRequest(node=Node(node_id=server.node))
    )
    wait_until(server.has_a_silo_waiting)
    asked.cancel()
    assert ENDED.get(timeout=60)  # the server knows it
    name = server.store(1.0)
    assert not ENDED.get(timeout=60)  # it has looked, and answered nobody
    assert not server.mail.noted[name].delivered
    assert server.silo().ask() == [name]


def test_more_silos_than_there_is_room_for_have_their_answer_at_once(server, clock):
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(server.silo().ask) for _ in range(2)]
        wait_until(lambda: server.mail.room._value == 0)
        assert server.silo().ask() == [] and not any(asked.done() for asked in held)
        clock.let_pass(WAIT_SECONDS)
        assert [asked.result() for asked in held] == [[], []]
    get_nothing(server, clock)  # there is room again


# --- small parts in the tree of their message -----------------------------------------------------------------


def test_small_parts_of_a_message_come_with_it(server):
    name = server.store(1.0)
    request = PullMessagesRequest(node=Node(node_id=server.node))
    (tree,) = server.silo().stub.PullMessages(request).message_object_trees
    assert parts_in(tree) == server.rest[1] and name in server.rest[1]


def test_small_parts_of_a_reply_come_with_it(server):
    """80,000 bytes come in a call of their own; parts that are none of the reply's are not kept."""
    name, group = server.store(1.0, group=group_id(MOST)), ""
    assert server.silo().answer(name, 10_000, group=group, inside=dict) == [True]
    reply = server.reply(name)
    parts = object_ids(server.stores.store().get_object_tree(reply.metadata.message_id))
    assert all(server.stores.store().get(part) for part in parts)


@pytest.mark.parametrize("inside", [lambda of: dict.fromkeys(of, b"none"), lambda of: {}])
def test_a_false_part_in_a_tree_is_not_kept(server, inside):
    name, group = server.store(1.0, group=group_id(MOST)), ""
    taken = server.silo().answer(name, 10_000, group=group, inside=inside)
    assert taken == [True] * len(taken) and len(taken) > 1


def test_parts_in_a_tree_count_as_bytes_of_the_reply(server, monkeypatch):
    monkeypatch.setattr(transfers, "MOST_ENCLOSED", 10 * MOST)
    name, silo = server.store(1.0, group=group_id(MOST)), server.silo()
    silo.ask()
    silo.confirm(name)
    assert silo.answer(name, MOST // 8, inside=dict) == []
    assert server.reply(name).has_error() and kept(server) < MOST


def test_a_serverapp_and_its_superlink_exchange_small_parts_with_their_message(server):
    """Of a message with 80,000 bytes of an array, that array alone is asked for."""
    state, handlers = (
        server.states.state(),
        SimpleNamespace(**vars(internal("runtime_handlers"))),
    )
    server.mail.wrap(handlers)
    content = RecordDict(
        {"model": ArrayRecord([np.arange(10_000.0)]), "config": ConfigRecord({})}
    )
    now = time.time()
    metadata = Metadata(
        server.run, "", SUPERLINK_NODE_ID, server.node, "", "", now, 60.0, "train"
    )
    message = make_message(metadata, content)
    metadata.__dict__["_message_id"] = name = message.object_id
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[tree_of(message, get_all_nested_objects(message), 0)],
    )
    task = SimpleNamespace(run_id=server.run)
    answer = handlers.push_messages(request, state, task)
    parts = get_all_nested_objects(message)
    (chunk,) = answer.objects_to_push
    assert type(parts[chunk]).__name__ == "ArrayChunk"
    assert state.store_object(server.run, answer.session_id, chunk, parts[chunk].deflate())
    silo = server.silo()
    assert silo.ask() == [name]
    silo.answer(name, 1, inside=dict)
    (tree,) = handlers.pull_messages(
        PullAppMessagesRequest(message_ids=[name]), state, task
    ).message_object_trees
    assert len(parts_in(tree)) == len(object_ids(tree))


# --- a ServerApp's query for replies --------------------------------------------------------------------------


@pytest.fixture
def query(server):
    """Ask our SuperLink for the replies to messages; which have one."""
    handlers = SimpleNamespace(**vars(internal("runtime_handlers")))
    server.mail.wrap(handlers)
    state, task = server.states.state(), SimpleNamespace(run_id=server.run)

    def ask(*names):
        request = PullAppMessagesRequest(message_ids=names)
        answer = handlers.pull_messages(request, state, task)
        assert len(answer.message_object_trees) == len(answer.messages_list)
        return sorted(one.metadata.reply_to_message_id for one in answer.messages_list)

    return ask


def two_messages(server):
    """Two messages that the silo has received."""
    silo, names = server.silo(), [server.store(1.0), server.store(2.0)]
    for _ in names:
        (name,) = silo.ask()
        silo.confirm(name)
    return silo, names


def is_asking(server):
    return len(server.mail.came._waiters)


@pytest.mark.parametrize("inside", [dict, lambda parts: {}])
def test_a_query_is_answered_when_all_replies_are_whole(server, query, monkeypatch, inside):
    """What comes last wakes the ServerApp, which else looks once a minute."""
    for name in ("LOOK_SECONDS", "HELD_SECONDS", "GATHER_SECONDS"):
        monkeypatch.setattr(mail_module, name, 60.0)
    silo, names = two_messages(server)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(query, *names)
        wait_until(lambda: is_asking(server))

        def looked():
            wait_until(lambda: is_asking(server) or asked.done())

        for name in names:  # when it has begun, its parts have yet to come
            silo.answer(name, 1, inside=inside, begun=looked)
        assert asked.result(timeout=30) == sorted(names)


def test_a_query_is_answered_when_a_reply_is_too_large(server, query, monkeypatch):
    for name in ("LOOK_SECONDS", "HELD_SECONDS"):
        monkeypatch.setattr(mail_module, name, 60.0)
    name, silo = server.store(1.0, group=group_id(MOST)), server.silo()
    silo.ask()
    silo.confirm(name)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(query, name)
        wait_until(lambda: is_asking(server))
        silo.answer(name, 100_000)
        assert asked.result(timeout=30) == [name]


def test_a_query_waits_a_while_for_others_after_the_first_reply(server, query, clock):
    """It leaves one that has only begun: the ServerApp would wait for its parts."""
    silo, (first, second) = two_messages(server)
    silo.answer(first, 1)

    def begun():
        for names, seconds in (((first, second), GATHER_SECONDS), ((second,), HELD_SECONDS)):
            asked = pool.submit(query, *names)
            wait_until(lambda: is_asking(server))
            clock.let_pass(0.9 * seconds)
            wait_until(lambda: is_asking(server))
            assert not asked.done()
            clock.let_pass(0.2 * seconds)
            assert asked.result() == [names[0]]

    with ThreadPoolExecutor() as pool:
        silo.answer(second, 1, begun=begun)


def test_a_query_for_nothing_is_answered_at_once(query):
    assert query() == []


def test_a_query_of_a_silo_that_is_offline_is_answered_at_once(server, query, clock):
    """With Flower's error; the other replies are not waited for a whole second, either."""
    name = server.store(1.0)
    assert server.states.state().deactivate_node(server.node)
    assert query(name) == [name] and clock.asleep == 0


def test_a_lost_answer_to_a_query_is_given_again(server, query):
    """Flower has deleted message and reply by then."""
    silo, names = two_messages(server)
    for name in names:
        silo.answer(name, 1)
    assert query(*names) == query(*names) == sorted(names)
    third = server.store(3.0)
    assert silo.ask() == [third]
    silo.answer(third, 1)
    assert query(third) == [third]


# --- how large a reply may be -------------------------------------------------------------------------------


MOST = 100_000  # bytes


def kept(server):
    """Bytes of all parts of messages that the server holds."""
    store = server.stores.store()
    return sum(len(entry.content) for entry in store.store.values())


def test_a_reply_within_its_bounds_is_taken(server):
    name, group = server.store(1.0, group=group_id(MOST)), ""
    assert all(server.silo().answer(name, 10_000, group=group))
    assert server.reply(name).has_content()


@pytest.mark.parametrize("session", [None, "", "another"])
def test_of_a_reply_that_is_too_large_nothing_is_kept(server, session):
    """40 MB, in parts of 5 MiB: the ServerApp has an error at once, and no part of it is in the server's memory."""
    name, silo = server.store(1.0, group=group_id(MOST)), server.silo()
    silo.ask()
    silo.confirm(name)
    taken = silo.answer(name, 5_000_000, session=session)
    assert not all(taken) and kept(server) < MOST
    if session is None:
        reply = server.reply(name)
        assert (
            reply.error.reason
            == "its reply has more than 100000 bytes, the most that it may have, and was not read"
        )
        assert silo.answer(name, 5_000_001) == []  # and no other one is taken
        assert kept(server) < MOST


@pytest.mark.parametrize(("numbers", "whole"), [(10_000, True), (5_000_000, False)])
def test_parts_come_after_the_serverapp_has_begun_to_take_the_reply(server, numbers, whole):
    """Then Flower has deleted message and reply, and the parts still count to that reply."""
    name = server.store(1.0, group=group_id(MOST))
    silo = server.silo()
    state = server.states.state()

    def pulled():
        assert server.reply(name).has_content()
        state.delete_messages({name})

    assert all(silo.answer(name, numbers, begun=pulled)) == whole
    assert kept(server) < MOST or whole


def test_a_reply_of_another_silo_is_not_taken(server):
    """Flower takes it from each sender that names the message."""
    name = server.store(1.0)
    stranger = FakeSilo(server.silo().stub, server.node + 1, server.run)
    assert stranger.answer(name, 1) == [] and server.silo().answer("a" * 64, 1) == []
    before = kept(server)
    assert all(server.silo().answer(name, 10_000)) and kept(server) > before


# --- who calls ----------------------------------------------------------------------------------------------

KEY, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
MOMENT = "2026-11-28T12:00:00+00:00"
NOW = datetime.fromisoformat(MOMENT).timestamp()


class Raw:
    """Bytes in place of a request."""

    def __init__(self, body):
        self.body = body

    def SerializeToString(self):
        return self.body


def signed(text, key=KEY, moment=MOMENT):
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = KEY.sign(text, ec.ECDSA(SHA256()))
    return dict(zip(HEADERS, (public, moment, signature), strict=True))


@pytest.mark.parametrize(
    ("headers", "now", "reason"),
    [
        ({}, NOW, "Missing authentication metadata"),
        (signed(b"x"), NOW, "Invalid signature"),
        (signed(signed_text("PushObject", MOMENT, b"body"), OTHER), NOW, "Invalid signature"),
        (signed(signed_text("PullObject", MOMENT, b"body")), NOW, "Invalid signature"),
        (signed(signed_text("PushObject", MOMENT, b"bode")), NOW, "Invalid signature"),
        (
            signed(signed_text("PushObject", MOMENT, b"body"), moment="x"),
            NOW,
            "Invalid signature",
        ),
        (signed(MOMENT.encode()), NOW, OLD_SILO),
        (signed(signed_text("PushObject", MOMENT, b"body")), NOW + 306, "Invalid timestamp"),
        (signed(signed_text("PushObject", MOMENT, b"body")), NOW - 6, "Invalid timestamp"),
    ],
)
def test_a_call_is_signed_with_method_body_and_time(headers, now, reason):
    fails(ValueError, reason, check_signature, "PushObject", b"body", headers, now)
    good = signed(signed_text("PushObject", MOMENT, b"body"))
    assert check_signature("PushObject", b"body", good, NOW) == good[HEADERS[0]]


def test_of_a_part_all_but_the_content_is_signed_for_the_store_compares_that(server):
    """So 4 MB are hashed once at each end; whoever alters content, name or session is refused."""
    part = {"run_id": 1, "object_id": "a", "object_content": b"x", "session_id": "s"}
    covers = {
        key: covered("PushObject", b"", request("PushObject", **{**part, key: value}))
        for key, value in {
            "object_content": b"y",
            "object_id": "b",
            "run_id": 2,
            "session_id": "t",
        }.items()
    }
    before = covered("PushObject", b"", request("PushObject", **part))
    assert [key for key in covers if covers[key] == before] == ["object_content"]
    assert covered("PushMessages", b"all", None) == b"all"
    name = server.store(1.0)
    silo, honest = server.silo(), server.silo().stub.PushObject

    def altered(part):
        part.object_content += b"x"
        return honest(part)

    silo.stub.PushObject = altered
    taken = silo.answer(name, 10_000)
    assert taken and not any(taken)


def test_a_store_that_does_not_compare_is_an_error_at_start():
    mail: Any = SimpleNamespace(store=SimpleNamespace(verify=False))
    fails(
        ValueError,
        "must compare each part",
        fleet_server,
        SimpleNamespace(certificates=()),
        mail,
    )


def test_a_seam_that_flower_has_moved_is_an_error_at_start(monkeypatch):
    assert missing_seams() == []
    monkeypatch.delattr(internal("fleet_handlers"), "push_object")
    monkeypatch.delattr(internal("extensions"), "get_lifespan_contexts")
    with pytest.raises(
        SystemExit, match=r"has no fleet_handlers\.push_object, extensions\.get_life"
    ):
        superlink_main()


def test_a_whole_superlink_refuses_strangers_large_calls_and_old_silos(tmp_path):
    with superlink(tmp_path, wait=0.1) as running, Control(running.connection) as control:
        credentials = running.credentials
        control.register("north", credentials.node_public_pem("north"))
        control.register("south", credentials.node_public_pem("south"))
        ca, north = credentials.ca_certificate.read_bytes(), credentials.node_key("north")
        where, south = (
            f"127.0.0.1:{running.fleet}",
            load_node_key(credentials.node_key("south")),
        )
        with (
            Fleet(where, ca, load_node_key(north)) as fleet,
            FleetCalls(where, ca, south) as calls,
        ):
            told = {}
            for name, body in (
                ("node", request("PullMessages", node=Node(node_id=fleet.node))),
                ("large", Raw(bytes(MOST_CALL + 1))),
                ("broken", Raw(b"no message")),
            ):
                with pytest.raises(grpc.RpcError) as error:
                    calls.send("PullMessages", body)
                told[name] = (error.value.code().name, error.value.details())
            assert told["node"] == ("UNAUTHENTICATED", "Invalid node ID")
            assert (
                told["large"][0] == "RESOURCE_EXHAUSTED"
                and told["broken"][0] == "UNAUTHENTICATED"
            )
            own: Any = SimpleNamespace(  # as Flower's SuperNode, and silofl 0.3
                sign=lambda text, how: south.sign(text.split(b"\0")[2], how)
            )
            calls.key = own
            with pytest.raises(grpc.RpcError, match=OLD_SILO):
                calls.send("PullMessages", request("PullMessages", node=Node(node_id=1)))


def test_a_whole_superlink_lets_a_silo_wait(tmp_path):
    with superlink(tmp_path, wait=1.5) as running, Control(running.connection) as control:
        credentials = running.credentials
        control.register("north", credentials.node_public_pem("north"))
        key = load_node_key(credentials.node_key("north"))
        ca = credentials.ca_certificate.read_bytes()
        with Fleet(f"127.0.0.1:{running.fleet}", ca, key) as fleet:
            until = time.monotonic() + 1.5
            assert not fleet.ask("PullMessages").messages_list and time.monotonic() >= until


# ---- A reply of a registered silo that means harm -------------------------------------------------------------------


NUMBERS = itertools.count(1.0)


class HostileReply:
    """A reply in parts of the test's making, the root first, to a message that the server has stored."""

    def __init__(self, server, *, most=1 << 22):
        self.server, self.asked = server, server.store(next(NUMBERS), group=group_id(most))

    def begin(self, tree, **metadata):
        server, now = self.server, time.time()
        fields = {"src_node_id": server.node, "reply_to_message_id": self.asked, **metadata}
        named = Metadata(
            run_id=server.run,
            message_id="",
            dst_node_id=SUPERLINK_NODE_ID,
            group_id="",
            created_at=now,
            ttl=30.0,
            message_type="train",
            **fields,
        )
        reply = make_message(named, RecordDict())
        named.__dict__["_message_id"] = tree.object_id
        request = PushMessagesRequest(
            node=Node(node_id=server.node),
            messages_list=[message_to_proto(reply)],
            message_object_trees=[tree],
        )
        return server.silo().stub.PushMessages(request)

    def send(self, parts, **metadata):
        """All of it; what the ServerApp then has."""
        (_, tree), *_ = trees = [(part_id(part), tree_below(part, parts)) for part in parts]
        answer = self.begin(tree, **metadata)
        contents = dict(zip([name for name, _ in trees], parts, strict=True))
        for name in answer.objects_to_push:
            part = PushObjectRequest(
                node=Node(node_id=self.server.node),
                run_id=self.server.run,
                session_id=answer.session_id,
                object_id=name,
                object_content=contents[name],
            )
            assert self.server.silo().stub.PushObject(part).stored
        return self.pulled()

    def pulled(self):
        (reply,) = grid_of(self.server).pull_messages([self.asked])
        return reply


def part_id(part):
    return hashlib.sha256(part).hexdigest()


def part_of(kind, body, children=()):
    """A part as Flower writes it."""
    names = ",".join(map(part_id, children))
    return f"{kind} {names} {len(body)}".encode() + b"\0" + body


def tree_below(part, parts):
    _, names, _ = part.split(b"\0")[0].decode().split(" ")
    children = [known for known in parts if part_id(known) in names.split(",")]
    return ObjectTree(
        object_id=part_id(part), children=[tree_below(child, parts) for child in children]
    )


def grid_of(server):
    """The Grid of a ServerApp, whose calls are answered in this process."""
    task, handlers = SimpleNamespace(run_id=server.run), server.handlers

    def call(name):
        return lambda request: getattr(handlers, name)(request, server.states.state(), task)

    node = NodeInfo(node_id=server.node, last_activated_at="now", heartbeat_interval=60.0)
    client = SimpleNamespace(
        GetNodes=lambda request: GetNodesResponse(nodes=[node]),
        PushMessages=call("push_messages"),
        PushObject=call("push_object"),
        PullMessages=call("pull_messages"),
        PullObject=call("pull_object"),
        ConfirmMessageReceived=lambda request: None,
    )
    return RuntimeGrid(
        SimpleNamespace(_runtime_client=client, run=SimpleNamespace(run_id=server.run))
    )


def test_a_tree_that_stands_for_a_larger_one_is_refused(server):
    """Each part is named twice on each of forty levels, with all that is in it only once: it has 80 names, and the
    store would look through 2^40. So is one that names what the store has, and not all of it; and too many parts."""
    names = [part_id(str(depth).encode()) for depth in range(41)]
    deep = ObjectTree(object_id=names[0])
    for name, below in itertools.pairwise(names):
        deep = ObjectTree(object_id=below, children=[deep, ObjectTree(object_id=name)])
    small = ObjectTree(object_id=names[1], children=[ObjectTree(object_id=names[0])] * 2)
    again = ObjectTree(object_id=names[2], children=[ObjectTree(object_id=names[1])] * 2)
    many = ObjectTree(
        object_id=names[3], children=[ObjectTree(object_id=names[4])] * MOST_PARTS
    )
    told = "names a part with other parts in it than before"
    for tree, fault in ((deep, told), (small, ""), (again, told), (many, "has 20001 parts")):
        reply = HostileReply(server)
        assert bool(reply.begin(tree).objects_to_push) == (not fault)
        if fault:
            assert fault in reply.pulled().error.reason
            assert not reply.begin(small).objects_to_push  # nor anything after it


EMPTY = message_to_proto(
    make_message(Metadata(1, "", 1, 1, "", "", 0.0, 1.0, "train"), RecordDict())
)


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (part_of("Message", b"\xff\xff\xff"), "DecodeError"),
        (part_of("ArrayChunk", b"hello"), "AttributeError"),
        (part_of("Message", EMPTY.SerializeToString()), "IndexError"),
    ],
    ids=["no message", "another part", "without a content"],
)
def test_a_reply_that_cannot_be_read_is_its_silos_error(server, part, fault):
    reply = HostileReply(server).send([part])
    assert is_error(reply, FAILED) and fault in reply.error.reason
    assert reply.metadata.src_node_id == server.node


def test_who_replies_and_to_what_is_what_the_server_has_checked(server):
    """The reply's first part has such fields, too."""
    asked, other = (HostileReply(server) for _ in range(2))
    message = make_message(
        Metadata(server.run, "", 77, SUPERLINK_NODE_ID, other.asked, "", 0.0, 9.0, "train"),
        RecordDict({"metrics": MetricRecord({"loss": 1.0})}),
    )
    parts = [part.deflate() for part in get_all_nested_objects(message).values()]
    parts.sort(key=lambda part: not part.startswith(b"Message"))
    reply = asked.send(parts)
    assert reply.content["metrics"] == {"loss": 1.0}
    assert reply.metadata.reply_to_message_id == asked.asked
    assert reply.metadata.src_node_id == server.node


def test_an_array_of_one_part_many_times_is_not_joined(server):
    """Its parts have a megabyte, and it has a thousand: it is refused by its size, which is counted."""
    record = ArrayRecord([np.zeros(1 << 17)])
    message = make_message(
        Metadata(server.run, "", server.node, 1, "", "", 0.0, 9.0, "train"),
        RecordDict({"model": record}),
    )
    names = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    (once,) = (name for name, part in names.items() if part.startswith(b"Array "))
    head, body = names[once].split(b"\0", 1)
    body = body.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b"0," * 999 + b"0]")
    often = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\0" + body
    reply = HostileReply(server).send(renamed(names, once, often))
    (array,) = reply.content["model"].values()
    joined = join_arrays(reply, 1 << 22)
    assert len(array.__dict__["pieces"]) == 1000
    with pytest.raises(DataError, match="more than 4194304 bytes"):
        check_reply(joined.content, ("model",), 1 << 22)
    assert len(array.__dict__["pieces"]) == 1000
    assert len(array.data) == 1000 * len(record["0"].data)


def renamed(names, old, new):
    """The parts of a message, the root first, in which one is another, and so all above it are."""
    names = {name: part for name, part in names.items() if name != old} | {part_id(new): new}
    for above, part in names.items():
        if old.encode() in part:
            return renamed(names, above, part.replace(old.encode(), part_id(new).encode()))
    return sorted(names.values(), key=lambda part: not part.startswith(b"Message "))


def test_a_reply_whose_parts_do_not_come_is_not_waited_for(server, monkeypatch):
    """At the end of the round the others' replies have come, and this one is lost."""
    monkeypatch.setattr(mail_module, "HELD_SECONDS", 0.0)
    reply = HostileReply(server)
    reply.begin(
        ObjectTree(object_id=part_id(b"root"), children=[ObjectTree(object_id=part_id(b"1"))])
    )
    grid = grid_of(server)
    grid.until = time.monotonic() + 0.1
    (lost,) = grid.pull_messages([reply.asked])
    assert is_error(lost, LOST) and lost.error.reason == "not all parts of it came in time"
    began = time.monotonic()
    Exchange(grid, TimeoutPolicy(30.0, watches=True)).run([])
    assert began <= grid.until - 30 <= time.monotonic()
