"""A long transfer: what is said of it, what the SuperLink is told, and that no limit of Flower's ends it."""

from __future__ import annotations

import time

import pytest

from client.flower import transfers
from client.flower.transfers import Transfer


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
