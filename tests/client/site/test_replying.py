"""A reply is sent until it gets through: Flower's own state, store and loop, and a SuperLink that is ours."""

from __future__ import annotations

import time

import pytest
from flwr.app import ArrayRecord, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import Status, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.start_client_internal import _insert_message

from client.site.runtime import answering
from client.site.runtime.transfers import names_in

RUN = 7


class SuperLink:
    """What a SuperNode sends to: takes replies and their parts, and refuses the first ``faults`` parts."""

    def __init__(self, faults=0):
        self.faults, self.whole = faults, False
        self.replies: list[Message] = []
        self.parts: set[str] = set()

    def send(self, reply, tree, seconds):
        self.replies.append(reply)
        return set(names_in(tree)), "session"

    def push_object(self, run_id, session, name, content):
        if self.faults:
            self.faults -= 1
            raise RuntimeError("the push session may have expired")
        self.parts.add(name)


def message_of(run, name):
    metadata = Metadata(run, name, 0, 1, "", "", time.time(), 600.0, MessageType.TRAIN)
    return make_message(metadata=metadata, content=RecordDict({"arrays": ArrayRecord()}))


class ReplyingSilo:
    """The memory of a SuperNode that has taken one message."""

    def __init__(self, monkeypatch):
        self.store = InMemoryObjectStore()
        self.state = InMemoryNodeState(self.store)
        self.state.set_node_id(1)
        self.message = message_of(RUN, "a" * 64)
        self.state.store_message(self.message)
        task = self.state.create_task(
            task_type=TaskType.CLIENT_APP, run_id=RUN, fab_hash="f" * 64
        )
        assert task is not None
        self.task = task
        # So that what `install` does is undone
        for name in ("_pull_and_store_message", "_push_messages"):
            monkeypatch.setattr(
                start_client_internal, name, getattr(start_client_internal, name)
            )
        monkeypatch.setattr(answering, "PAUSES", (0.01, 0.01, 0.01))
        answering.install(self.answer)

    def answer(self, state, store):
        """Have the whole reply at hand, as our SuperNode has it."""
        for message in state.get_messages(run_ids=[RUN], is_reply=False):
            self.state.record_message_processing_start(message.metadata.message_id)
            self.reply = Message(RecordDict({"arrays": ArrayRecord()}), reply_to=message)
            self.state.record_message_processing_end(message.metadata.message_id)
            _insert_message(self.reply, state, store)
        self.state.finish_task(self.task, SubStatus.STOPPED, "")

    def push(self, link):
        """What Flower's loop does after it has taken a message."""
        start_client_internal._push_messages(
            self.state, self.store, link.send, link.push_object
        )

    def pulls_of_a_run_that_is_stopped(self):
        """The next message comes without its parts: its run is stopped meanwhile."""
        message = message_of(RUN, "")
        message.metadata.__dict__["_message_id"] = message.object_id

        def pull_object(run_id, name):
            raise RunNotRunningException

        taken = start_client_internal._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda run_id: Run.create_empty(run_id),
            get_fab=lambda name, run_id: pytest.fail("the run is known"),
            pull_object=pull_object,
            confirm_message_received=lambda run_id, name: pytest.fail("it has not come"),
            trusted_entities=None,
        )
        assert taken is None


@pytest.fixture
def silo(monkeypatch):
    return ReplyingSilo(monkeypatch)


def empty(silo):
    return not silo.state.msg_store and not len(silo.store)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("faults", [0, 1, 2, 3, 10_000])
def test_a_reply_that_did_not_get_through_goes_again(silo, faults):
    link = SuperLink(faults)
    silo.push(link)
    whole = set(names_in(get_object_tree(silo.reply)))
    assert link.parts == (whole if faults < 4 else set())
    assert len(link.replies) == min(faults + 1, 4)
    assert {r.metadata.message_id for r in link.replies} == {silo.reply.metadata.message_id}
    assert empty(silo)


@pytest.mark.timeout(30)
def test_a_message_whose_run_is_stopped_while_it_comes_leaves_nothing(silo):
    silo.push(SuperLink())
    silo.state.store_run(Run.create_empty(RUN))
    silo.pulls_of_a_run_that_is_stopped()
    assert empty(silo)
    # Nor are parts hashed whose names are the server's, or this process's own
    silo.store.preregister(RUN, ObjectTree(object_id="a" * 64))
    silo.store.put("a" * 64, b"a part")
    assert {task.status.status for task in silo.state.get_tasks()} == {Status.FINISHED}
