"""A long transfer: what is said of it, what the SuperLink is told, and that no limit of Flower's ends it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from failing import fails
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

from client.flower import transfers
from client.flower.transfers import Transfer, watch_pulls


@pytest.fixture
def said(monkeypatch):
    """Lines, one every 50 ms."""
    monkeypatch.setattr(transfers, "LONG_SECONDS", 0.02)
    monkeypatch.setattr(transfers, "EVERY_SECONDS", 0.05)
    return []


def test_a_short_transfer_says_nothing(said):
    told: list[bool] = []
    with Transfer("sending", said.append, lasting=told.append) as transfer:
        transfer.add(b"x")
    assert said == [] and told == []


def test_a_long_one_says_how_far_it_is_and_what_it_came_to(said):
    told: list[bool] = []
    with Transfer("sending", said.append, lasting=told.append) as transfer:
        transfer.expect(4, 8_000_000)
        for _ in range(4):
            transfer.add(bytes(2_000_000))
            time.sleep(0.08)
    assert said[0].startswith(("sending: 2 of 8 MB, ", "sending: 0 of 8 MB"))
    assert " MB/s, " in said[1] and said[1].endswith(" s left")
    assert said[-1].startswith("sending: 8 MB, 4 parts, in 0 s")
    assert told == [True, False]


def test_the_line(monkeypatch):
    """By hand: 62 of 200 MB in 25 s are 2.48 MB/s, and 138 MB more take 55.6 s."""
    now = 0.0
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now)
    transfer = Transfer("", print, size=200_000_000)
    now = 25.0
    assert transfer.line() == "0 of 200 MB, no part for 25 s"
    transfer.add(bytes(62_000_000))
    assert transfer.line() == "62 of 200 MB, 2.5 MB/s, 56 s left"
    now = 60.0
    assert transfer.line() == "62 of 200 MB, no part for 35 s"
    unknown = Transfer("", print, parts=44)
    assert unknown.line() == "nothing yet"
    now = 62.0
    unknown.add(bytes(5_000_000))
    assert unknown.line() == "5 of about 200 MB, 2.5 MB/s, 78 s left"
    sent_again = Transfer("", print)  # of a reply whose first parts have arrived
    sent_again.add(bytes(5_000_000))
    sent_again.expect(1, 5_000_000)
    assert sent_again.line().startswith("5 of 10 MB")


def test_who_waits_for_parts_waits_without_a_limit(said, monkeypatch):
    """Flower's own function gives up after so many looks; where it is watched it does not."""
    # No pauses
    monkeypatch.setattr(inflatable_utils, "random", SimpleNamespace(uniform=lambda a, b: -1.0))
    looks = 0

    def pull(name):
        nonlocal looks
        looks += 1
        if looks < 3000:
            raise ObjectUnavailableError(name)
        return b"part"

    fails(Exception, "limit reached", inflatable_utils.pull_objects, ["a"], pull)
    looks, module = 0, SimpleNamespace(pull_objects=inflatable_utils.pull_objects)
    for _ in range(2):  # it is not wrapped twice
        watch_pulls(module, "receiving", said.append)
    assert module.pull_objects.flowers is inflatable_utils.pull_objects
    assert module.pull_objects(object_ids=["a"], pull_object_fn=pull) == {"a": b"part"}
    assert module.pull_objects(["a", "b"], lambda name: name.encode()) == {"a": b"a", "b": b"b"}


def test_a_message_that_came_whole_is_not_pulled(said, monkeypatch):
    module = SimpleNamespace(pull_objects=lambda names, pull, **given: {"pulled": b""})
    watch_pulls(module, "receiving", said.append)
    monkeypatch.setattr(transfers, "PARTS", {"a": b"1", "b": b"2"})
    assert module.pull_objects(["a", "b", "a"], None) == {"a": b"1", "b": b"2"}
    assert module.pull_objects(["a", "c"], None) == {"pulled": b""}


def test_a_part_that_has_not_come_is_asked_for_again_soon(said, monkeypatch):
    """Flower waits a second, two, four: most of an exchange of short messages."""
    pauses, early = list[float | None](), iter(range(7))

    class Early(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return False

    def pull(name):
        if next(early, None) is not None:
            raise ObjectUnavailableError(name)
        return b"part"

    flower = SimpleNamespace(Event=Early, Lock=threading.Lock)
    monkeypatch.setattr(inflatable_utils, "threading", flower)
    monkeypatch.setattr(inflatable_utils, "random", SimpleNamespace(uniform=lambda a, b: 0.0))
    module = SimpleNamespace(pull_objects=inflatable_utils.pull_objects)
    watch_pulls(module, "receiving", said.append)
    assert module.pull_objects(["a"], pull) == {"a": b"part"}
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
