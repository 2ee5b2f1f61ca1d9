"""What happens to a round's messages where silos are slow, go away and come back. The clock is the test's."""

from __future__ import annotations

import threading
import time

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from client.flower.fleet import PATIENT_SECONDS, QUEUED_SECONDS
from client.flower.messages import GONE as UNAVAILABLE
from client.flower.messages import refuse
from client.flower.transfers import LostPartError
from server.run import exchange
from server.run.collector import ClockWatch
from server.run.exchange import DETECTED_LATE, Exchange, TimeoutPolicy
from server.simulation.engine import flower_identity


class SilentNetwork(Grid):
    """Nodes that answer after so many seconds; ``away`` has each one's absences, from second to second,
    ``busy`` when it is in a long transfer.

    As Flower's SuperLink: a message that a node has is lost when it goes away, one to an absent node is answered with
    an error as soon as somebody asks, and who is back has a new time of activation.
    """

    def __init__(self, takes, away=None, busy=None):
        self.takes, self.away, self.busy = takes, away or {}, busy or {}
        self.now, self.told = 0.0, PATIENT_SECONDS
        self.sent: dict[str, tuple[Message, float]] = {}
        self.pushes = 0
        self.faults = 0  # pushes that fail at first

    def messages(self):
        """One for each node."""
        return [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN)
            for node in self.takes
        ]

    def sleep(self, seconds):
        self.now += seconds

    def is_here(self, node):
        gone, back = self.away.get(node, (1e9, 1e9))
        return not gone <= self.now < back

    def get_node_ids(self):
        return [node for node in self.takes if self.is_here(node)]

    def get_nodes(self):
        for node in self.get_node_ids():
            back = self.away.get(node, (1e9, 1e9))[1]
            begin, end = self.busy.get(node, (1e9, 1e9))
            told = self.told if begin <= self.now < end else 12.0
            since = "later" if self.now >= back else "first"
            yield NodeInfo(node_id=node, last_activated_at=since, heartbeat_interval=told)

    def push_messages(self, messages):
        if self.faults:
            self.faults -= 1
            raise LostPartError("object")
        names = []
        for message in messages:
            self.pushes += 1
            names.append(f"m{self.pushes}")
            self.sent[names[-1]] = message, self.now
        return names

    def pull_messages(self, message_ids):
        for name in message_ids:
            message, pushed = self.sent[name]
            message.metadata.__dict__["_message_id"] = name
            node = message.metadata.dst_node_id
            gone = self.away.get(node, (1e9, 1e9))[0]
            done = pushed + self.takes[node]
            if not self.is_here(node):
                yield refuse(message, "the node is not here", UNAVAILABLE)
            elif self.now >= done and not pushed <= gone < done:
                yield Message(RecordDict(), reply_to=message)

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    create_message = set_run = send_and_receive  # type: ignore[assignment]
    run = property(lambda self: None)


def go(network, policy, monkeypatch, answered=(), on_queue=lambda node: None):
    """What each node's reply is ("" is content), and who was said to be gone."""
    monkeypatch.setattr(exchange.time, "sleep", network.sleep)
    monkeypatch.setattr(exchange.time, "monotonic", lambda: network.now)
    gone: list[int] = []
    with flower_identity():
        asked = Exchange(
            network, policy, answered=answered, on_disconnect=gone.append, on_queue=on_queue
        )
        replies = asked.run(network.messages())
    assert len({r.metadata.src_node_id for r in replies}) == len(replies)
    assert all(r.metadata.message_type == MessageType.TRAIN for r in replies)
    return {
        r.metadata.src_node_id: str(r.error.reason) if r.has_error() else "" for r in replies
    }, gone


def test_each_reply_is_reported_as_it_comes(monkeypatch):
    """For the live view: the node, and the seconds since it was asked, up to the pause between two queries."""
    network = SilentNetwork({1: 3.0, 2: 1.0})
    monkeypatch.setattr(exchange.time, "sleep", network.sleep)
    monkeypatch.setattr(exchange.time, "monotonic", lambda: network.now)
    told = []
    with flower_identity():
        Exchange(
            network, TimeoutPolicy(1000.0), on_reply=lambda *reply: told.append(reply)
        ).run(network.messages())
    assert [node for node, _ in told] == [2, 1]
    assert all(
        0 <= seconds - network.takes[node] <= exchange.POLL_SECONDS[1] for node, seconds in told
    )


def test_the_time_that_stragglers_have():
    """The median of 10, 20 and 30 s is 20 s: five times that is 100 s."""
    policy = TimeoutPolicy(timeout=1000, factor=5, floor=60)
    assert policy.limit(silos=6, took=[10, 20]) == 1000  # not half of them yet
    assert policy.limit(silos=6, took=[10, 20, 30]) == 100
    assert policy.limit(silos=7, took=[10, 20, 30]) == 1000
    assert policy.limit(silos=6, took=[1, 2, 3]) == 60  # never less
    # Never more
    assert TimeoutPolicy(timeout=90, factor=5, floor=60).limit(6, [10, 20, 30]) == 90
    assert (
        TimeoutPolicy(timeout=1000, factor=5, floor=60, quorum=4).limit(6, [10, 20, 30]) == 1000
    )
    assert TimeoutPolicy(timeout=1000).limit(6, [10, 20, 30]) == 1000


@pytest.mark.parametrize(
    ("factor", "answered", "until"),
    [(3, {1, 2, 3}, 60), (9, {1, 2, 3, 4}, 150), (0, {1, 2, 3, 4}, 150)],
)
def test_a_straggler_costs_a_multiple_of_the_median(factor, answered, until, monkeypatch):
    network = SilentNetwork({1: 10, 2: 20, 3: 30, 4: 150})
    replies, gone = go(network, TimeoutPolicy(1000, factor=factor, floor=40), monkeypatch)
    assert set(replies) == answered and not gone
    assert network.now == pytest.approx(until, abs=1)


@pytest.mark.parametrize(
    ("busy", "answered", "until"),
    [
        ((40, 150), {1, 2, 3, 4}, 150),
        ((40, 90), {1, 2, 3}, 60 + DETECTED_LATE + 50),
        ((100, 150), {1, 2, 3}, 60),
        ((40, 1e9), {1, 2, 3}, 500),
    ],
)
def test_who_is_in_a_long_transfer_is_no_straggler(busy, answered, until, monkeypatch):
    """Three times the median of 20 s is 60 s, and more by the time in a transfer, up to the time of the round."""
    network = SilentNetwork(
        {1: 10, 2: 20, 3: 30, 4: 150 if busy[1] < 1e9 else 1e9}, busy={4: busy}
    )
    replies, _ = go(network, TimeoutPolicy(500, factor=3, floor=40), monkeypatch)
    assert set(replies) == answered
    assert network.now == pytest.approx(until, abs=2.5)


def test_who_waits_in_a_queue_is_no_straggler_and_is_told_once(monkeypatch):
    network = SilentNetwork({1: 10, 2: 20, 3: 30, 4: 150}, busy={4: (40, 140)})
    network.told = QUEUED_SECONDS
    queued: list[int] = []
    policy = TimeoutPolicy(500, factor=3, floor=40)
    replies, gone = go(network, policy, monkeypatch, on_queue=queued.append)
    assert set(replies) == {1, 2, 3, 4} and queued == [4] and not gone


def test_a_clock_that_is_set_is_told_once(monkeypatch):
    """Back by an hour; and by a minute less, of which nobody hears."""
    notes: list[str] = []
    watch = ClockWatch(notes.append)
    right = time.time
    for seconds in (0, 3600, 3600, 3541):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: right() - seconds)
        watch.check()
    assert len(notes) == 1 and notes[0].startswith("this server's clock went back by 1.0 h")


GONE = "the node is not here"
LOST = "it was gone for a while, and what it was at is lost"


@pytest.mark.parametrize(
    ("away", "policy", "answered", "said", "until"),
    [
        ((20, 1e9), {}, [], GONE, 30),
        # Gone and back within a quarter of a second: nobody saw it, and its message is lost
        ((20.1234, 20.1235), {}, [], LOST, 30),
        # Back, so its message is sent once more
        ((20.1234, 20.1235), {"resend": True}, [], "", 120),
        ((20.1234, 50), {"resend": True}, [], "", 150),
        # Never back: five times the median of 10 and 30
        ((20, 1e9), {"factor": 5, "floor": 60, "resend": True}, [], GONE, 100),
        # Nobody waits for a silo that was not here to begin with
        ((-1, 1e9), {"resend": True}, [], GONE, 30),
        # It has just replied: its line was mended, and its next sign of life comes after 8 s
        ((-1, 8), {"resend": True}, [3], "", 108),
    ],
)
def test_a_silo_that_goes_away(away, policy, answered, said, until, monkeypatch):
    """The round goes on without it, or waits for it where it may come back."""
    network = SilentNetwork({1: 10, 2: 30, 3: 100}, away={3: away})
    replies, gone = go(network, TimeoutPolicy(1000, **policy), monkeypatch, answered)
    assert replies == {1: "", 2: "", 3: said} and gone == [3]
    assert network.pushes == (3 if said else 4)
    assert network.now == pytest.approx(until, abs=3 if until > 100 else 1)


@pytest.mark.parametrize("resend", [True, False])
def test_a_line_that_breaks_for_all_costs_nothing(resend, monkeypatch):
    """All silos are gone at once, twice in a round: it is the server's line, and each gets its message again.

    A straggler's limit, 60 s here, does not end the round meanwhile: silo 1 has replied after 10 s, 2 and 3 after the
    first cut.
    """

    class Cut(SilentNetwork):
        def is_here(self, node):
            return not (20 <= self.now < 200 or 220 <= self.now < 300)

        def get_nodes(self):
            for node in self.get_node_ids():
                since = str(sum(self.now >= end for end in (200, 300)))
                yield NodeInfo(node_id=node, last_activated_at=since, heartbeat_interval=12.0)

        def pull_messages(self, message_ids):
            for name in message_ids:
                message, pushed = self.sent[name]
                done = pushed + self.takes[message.metadata.dst_node_id]
                lost = any(pushed <= gone < done for gone in (20, 220))
                if not self.is_here(0) or (self.now >= done and not lost):
                    message.metadata.__dict__["_message_id"] = name
                    here = self.is_here(0)
                    yield (
                        Message(RecordDict(), reply_to=message)
                        if here
                        else refuse(message, GONE, UNAVAILABLE)
                    )

    network, cuts = Cut({1: 10, 2: 15 + 10, 3: 40}), list[bool]()
    monkeypatch.setattr(exchange.time, "sleep", network.sleep)
    monkeypatch.setattr(exchange.time, "monotonic", lambda: network.now)
    policy = TimeoutPolicy(1000, factor=3, floor=60, quorum=1, resend=resend)
    with flower_identity():
        asked = Exchange(network, policy, on_cut=lambda: cuts.append(True))
        replies = asked.run(network.messages())
    assert [r.metadata.src_node_id for r in replies if not r.has_error()] == [1, 2, 3]
    assert cuts == [True, True] and network.now < 400


def test_a_line_that_stays_cut_ends_with_the_rounds_time(monkeypatch):
    network = SilentNetwork({1: 10, 2: 30}, away={1: (5, 1e9), 2: (6, 1e9)})
    replies, _ = go(network, TimeoutPolicy(500, factor=3, floor=60), monkeypatch)
    assert replies == {1: GONE, 2: GONE} and network.now == pytest.approx(500, abs=3)


def until_told(network, monkeypatch, told):
    """Whether each node's reply is an error, where ``told`` hears of those that go away while Flower waits."""
    monkeypatch.setattr(exchange, "PRESENCE_SECONDS", 0.01)
    policy = TimeoutPolicy(1000, watches=True)
    asked = Exchange(network, policy, on_disconnect=lambda node: told.set())
    with flower_identity():
        return [(r.metadata.src_node_id, r.has_error()) for r in asked.run(network.messages())]


def test_who_goes_away_in_the_middle_of_a_reply_is_told_while_flower_waits(monkeypatch):
    """Flower's call for the replies returns only after that."""
    told = threading.Event()

    class Waiting(SilentNetwork):
        def pull_messages(self, message_ids):
            self.away[2] = (-1, 1e9)
            assert told.wait(60)
            self.away.clear()
            self.now = 1.0
            return super().pull_messages(message_ids)

    replies = until_told(Waiting({1: 0, 2: 0}), monkeypatch, told)
    assert dict(replies) == {1: False, 2: False}


def test_a_reply_that_gets_through_after_a_cut_counts(monkeypatch):
    """While Flower waits for its rest the silo goes away and comes back, so that what it was at counts as lost."""

    class Waiting(SilentNetwork):
        def pull_messages(self, message_ids):
            self.away[2] = (-1, 1e9)
            assert gone.wait(60)
            self.away[2] = (-1, -1)
            assert back.wait(60)
            self.now = 1.0
            return super().pull_messages(message_ids)

    gone, back = threading.Event(), threading.Event()
    looked = Exchange._check_presence

    def look(self, before):
        here = looked(self, before)
        if 2 in self.lost:
            back.set()
        return here

    monkeypatch.setattr(Exchange, "_check_presence", look)
    replies = until_told(Waiting({1: 0, 2: 0}), monkeypatch, gone)
    assert sorted(replies) == [(1, False), (2, False)]


def test_a_message_is_sent_twice_at_most(monkeypatch):
    class Flapping(SilentNetwork):
        def is_here(self, node):
            return node != 2 or not 20 <= self.now % 40 < 30

    network = Flapping({1: 10, 2: 100})
    replies, gone = go(network, TimeoutPolicy(1000, resend=True), monkeypatch)
    assert replies == {1: "", 2: "the node is not here"}
    assert gone == [2, 2] and network.pushes == 3


def test_messages_that_did_not_reach_the_superlink_go_again(monkeypatch):
    network = SilentNetwork({1: 10, 2: 30})
    network.faults = 3
    assert go(network, TimeoutPolicy(1000), monkeypatch)[0] == {1: "", 2: ""}
    network.faults = 4
    with pytest.raises(LostPartError):
        go(network, TimeoutPolicy(1000), monkeypatch)
