"""A SuperNode answers every message it takes: Flower's own state, store and loop, and a SuperLink that is ours."""

from __future__ import annotations

import time
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import Status, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.start_client_internal import _insert_message

from client.site.runtime import replying

RUN = 7


class SuperLink:
    """What a SuperNode sends to: takes replies and their parts, and refuses the first ``faults`` parts."""

    def __init__(self, faults: int = 0) -> None:
        self.faults, self.whole = faults, False
        self.replies: list[Message] = []
        self.parts: set[str] = set()

    def send(self, reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        self.replies.append(reply)
        return set(replying.names_in(tree)), "session"

    def push_object(self, run_id: int, session: str, name: str, content: bytes) -> None:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("the push session may have expired")
        self.parts.add(name)


def message_of(run: int, name: str) -> Message:
    metadata = Metadata(run, name, 0, 1, "", "", time.time(), 600.0, MessageType.TRAIN)
    return make_message(metadata=metadata, content=RecordDict({"arrays": ArrayRecord()}))


class Silo:
    """The memory of a SuperNode that has taken one message, whose task a ClientApp's process is at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = InMemoryObjectStore()
        self.state = InMemoryNodeState(self.store)
        self.state.set_node_id(1)
        self.message = message_of(RUN, "a" * 64)
        self.state.store_message(self.message)
        task = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN, fab_hash="f" * 64)
        assert task is not None
        self.task = task
        self.state.claim_task(task)
        self.state.activate_task(task)
        for name in ("_pull_and_store_message", "_push_messages"):  # so that what `install` does is undone
            monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
        monkeypatch.setattr(replying, "GRACE_SECONDS", 0.05)
        monkeypatch.setattr(replying, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(replying, "PAUSES", (0.01, 0.01, 0.01))
        replying.install(lambda state: None)  # its process is the test

    def takes(self) -> None:
        """The process takes the message."""
        assert self.state.get_messages(run_ids=[RUN], is_reply=False)
        self.state.record_message_processing_start(self.message.metadata.message_id)

    def hands_over(self) -> Message:
        """The process's whole reply."""
        reply = Message(RecordDict({"arrays": ArrayRecord()}), reply_to=self.message)
        _insert_message(reply, self.state, self.store)
        self.state.record_message_processing_end(self.message.metadata.message_id)
        return reply

    def hands_over_a_part(self) -> None:
        """The reply as it stands while its parts arrive: the process is killed before they have."""
        reply = Message(RecordDict({"arrays": ArrayRecord()}), reply_to=self.message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.state.store_message(reply)
        self.store.preregister(RUN, get_object_tree(reply))
        first = next(iter(get_all_nested_objects(reply).items()))
        self.store.put(first[0], first[1].deflate())

    def ends(self, how: str = SubStatus.FAILED, why: str = "") -> None:
        self.state.finish_task(self.task, how, why)

    def push(self, link: SuperLink) -> None:
        """What Flower's loop does after it has taken a message."""
        start_client_internal._push_messages(self.state, self.store, link.send, link.push_object)

    def pulls_of_a_run_that_is_stopped(self) -> None:
        """The next message comes without its parts: its run is stopped meanwhile."""
        message = message_of(RUN, "")
        message.metadata.__dict__["_message_id"] = message.object_id

        def pull_object(run_id: int, name: str) -> bytes:
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
def silo(monkeypatch: pytest.MonkeyPatch) -> Silo:
    return Silo(monkeypatch)


def said(reply: Message) -> str:
    return str(reply.error.reason) if reply.has_error() else "content"


def empty(silo: Silo) -> bool:
    return not silo.state.msg_store and not len(silo.store)


@pytest.mark.timeout(30)
def test_a_process_that_died_before_it_took_its_message_is_answered_for(silo: Silo) -> None:
    """Flower gives no reply for a task that fails before its message was taken, and waits for one."""
    silo.ends(why="killed by hand")
    link = SuperLink()
    silo.push(link)
    assert [said(reply) for reply in link.replies] == ["killed by hand"]
    assert empty(silo)


@pytest.mark.timeout(30)
def test_a_process_that_died_while_it_replied_is_answered_for(silo: Silo) -> None:
    """The reply is known and a part of it is not there: Flower waits for the part."""
    silo.takes()
    silo.hands_over_a_part()
    silo.ends()
    link = SuperLink()
    silo.push(link)
    assert [said(reply) for reply in link.replies] == [replying.UNANSWERED]
    assert empty(silo)


@pytest.mark.timeout(30)
def test_an_error_that_the_watchdog_sent_goes_out_and_the_broken_reply_does_not(silo: Silo) -> None:
    silo.takes()
    silo.hands_over_a_part()
    reply = silo.hands_over()
    silo.ends()
    link = SuperLink()
    silo.push(link)
    assert [r.metadata.message_id for r in link.replies] == [reply.metadata.message_id]
    assert empty(silo)


@pytest.mark.timeout(30)
def test_a_process_at_work_is_waited_for(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reply comes at the fortieth look, long after the time that a dead one is given."""
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 40:
            silo.hands_over()
        time.sleep(seconds)

    silo.takes()
    replying.wait_for_reply(silo.state, silo.store, sleep)
    assert len(looks) == 40
    assert [said(reply) for reply in replying.replies(silo.state)] == ["content"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("faults", [0, 1, 2, 3])
def test_a_reply_that_did_not_get_through_goes_again(silo: Silo, faults: int) -> None:
    silo.takes()
    reply = silo.hands_over()
    names = replying.names_in(get_object_tree(reply))
    silo.ends(SubStatus.COMPLETED)
    link = SuperLink(faults)
    silo.push(link)
    assert link.parts == set(names)
    assert {r.metadata.message_id for r in link.replies} == {reply.metadata.message_id}
    assert empty(silo)


@pytest.mark.timeout(30)
def test_after_the_fourth_try_the_silo_is_free_again(silo: Silo) -> None:
    silo.takes()
    silo.hands_over()
    silo.ends(SubStatus.COMPLETED)
    link = SuperLink(faults=10_000)
    silo.push(link)
    assert len(link.replies) == 4
    assert empty(silo)


@pytest.mark.timeout(30)
def test_the_reply_to_another_message_ends_no_wait(silo: Silo) -> None:
    """One of a stopped run is there, while the next run's message is worked at: that one is not answered for."""
    other = message_of(RUN + 1, "b" * 64)
    silo.state.store_message(other)
    _insert_message(Message(RecordDict(), reply_to=other), silo.state, silo.store)
    silo.takes()
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            silo.hands_over()

    replying.wait_for_reply(silo.state, silo.store, sleep)
    assert len(looks) == 3
    assert [said(reply) for reply in replying.replies(silo.state)] == ["content", "content"]


@pytest.mark.timeout(30)
def test_a_message_whose_run_is_stopped_while_it_comes_leaves_nothing(silo: Silo) -> None:
    silo.takes()
    silo.hands_over()
    silo.ends(SubStatus.COMPLETED)
    silo.push(SuperLink())
    silo.state.store_run(Run.create_empty(RUN))
    silo.pulls_of_a_run_that_is_stopped()
    assert empty(silo)
    assert {task.status.status for task in silo.state.get_tasks()} == {Status.FINISHED}


@pytest.mark.timeout(30)
def test_without_us_flower_keeps_it(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before is there for: should this fail, `forget` can go."""
    silo.ends()
    silo.state.delete_messages()
    silo.state.store_run(Run.create_empty(RUN))
    monkeypatch.undo()
    silo.pulls_of_a_run_that_is_stopped()
    assert not empty(silo)


@pytest.mark.timeout(30)
def test_without_us_flower_waits_for_ever(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first two tests are there for: should this fail, Flower has mended it, and `replying` can go."""

    class WaitedError(Exception):
        pass

    def waits(seconds: float) -> None:
        raise WaitedError

    monkeypatch.undo()
    silo.ends()
    monkeypatch.setattr(start_client_internal.time, "sleep", waits)
    link = SuperLink()
    with pytest.raises(WaitedError):
        silo.push(link)
