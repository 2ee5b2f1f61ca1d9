"""A train message on its way through the gate: rooms, rules in their order, transactions, and a kill between them."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from forks import in_fork
from gates import described
from study_text import study_text
from tiny import write_silo

from client.protocol.methods import DEFAULTS
from client.protocol.parsed import SiteError
from client.site import gate, record, release
from client.site.budget.ledger import Ledger, charges
from client.site.counts import count_used
from client.site.record import Record, close_records
from client.site.study import approvals
from client.site.trust import audit
from server.simulation.engine import flower_identity

APP = "ab" * 32
MODEL = np.ones(4, np.float32)
MOST_ROOMS = 19


class Silo:
    """A hospital with an approved study, and a message for it. ``steps``: what happened, in its order."""

    def __init__(self, folder):
        self.folder, self.state = folder, folder / "state"
        self.steps: list[str] = []
        self.run: dict[str, Any] = {**DEFAULTS, "study": "heart", "batch-size": 10}
        (folder / "policy.toml").write_text("")
        write_silo(folder / "data.npz", [[float(i), 1.0] for i in range(240)], [0, 1] * 120)
        text = study_text(app=APP, bytes=1000).replace(
            "[settings]\n", "[settings]\ndp = [true, false]\nbatch-size = 10\n"
        )
        approvals.record_approval(self.state, "north", text, "Dr. B", "", [])

    def policy(self, text):
        (self.folder / "policy.toml").write_text(text)

    def ask(self, kind="train", run=9, answer=None, size=4, **config):
        config = {"round": 1, "participants": 3, "run": "today", **config}
        content = RecordDict({"config": ConfigRecord(config)})
        content["model.global"] = ArrayRecord({"vector": Array(MODEL)})
        node: Any = {"name": "north", "data": str(self.folder / "data.npz")}
        node |= {"policy": str(self.folder / "policy.toml"), "state-dir": str(self.state)}

        def reply(terms):
            self.steps.append("answer")
            vector = ArrayRecord({"vector": Array(np.zeros(size, np.float32))})
            return Message(RecordDict({"model.global": vector}), reply_to=message)

        with flower_identity():
            message = Message(content, dst_node_id=1, message_type=kind)
            context = Context(run, 1, node, RecordDict(), self.run)
            return gate.pass_gate(message, context, APP, answer or reply, lambda: [APP])

    def used(self):
        with Record(self.state).reading() as db:
            return count_used(db, "heart", "north")["messages"]

    def kinds(self):
        return [line["kind"] for line in Ledger(self.state).lines()]

    def left(self):
        return [e for e in audit.verify_log(self.state / "audit").entries if e["sent"]]


@pytest.fixture
def silo(tmp_path):
    yield Silo(tmp_path)
    close_records()


@pytest.fixture
def private(silo):
    silo.run["dp"] = True
    return silo


def why(reply):
    assert reply.has_error()
    return str(reply.error.reason)


@pytest.fixture
def statements(silo, monkeypatch):
    """SQL of the record, in the silo's steps: of a transaction as a whole, and the rules between them."""
    real = record.connect

    def connect(uri):
        db = real(uri)
        seen = {"BEGIN IMMEDIATE": "begin", "COMMIT": "commit", "ROLLBACK": "rollback"}
        db.set_trace_callback(lambda sql: silo.steps.append(seen[sql]) if sql in seen else None)
        return db

    close_records()
    monkeypatch.setattr(record, "connect", connect)

    def noted(rule):
        def ask(message):
            silo.steps.append(rule.__name__)
            return rule(message)

        return ask

    monkeypatch.setattr(gate.check_rules, "__defaults__", (tuple(map(noted, gate.RULES)),))
    return silo.steps


NAMES = [
    "policy_fault",
    "study_fault",
    "own_model_fault",
    "counts_fault",
    "masks_fault",
    "receipt_fault",
    "budget_fault",
]


def test_the_rules_in_their_order(silo):
    assert [rule.__name__ for rule in gate.RULES] == NAMES
    for rule in gate.RULES:  # each in the file of its name
        assert rule.__module__ == f"client.site.rules.{rule.__name__.removesuffix('_fault')}"


@pytest.mark.parametrize("dp", [False, True])
def test_a_train_message_has_two_transactions(silo, statements, dp):
    """The first one is on the disk before the answer, the second before the reply leaves."""
    silo.run["dp"] = dp
    silo.ask()  # the data file is read once
    statements.clear()
    assert not silo.ask(round=2, participants=4).has_error()
    assert statements == ["begin", *NAMES, "commit", "answer", "begin", "commit"]
    assert silo.kinds() == ["charge", "sent"] * (2 * dp)


def test_a_train_message_enters_few_rooms(silo):
    """A warm one, as all of a run but the first: whoever reviews the gate reads these modules."""
    silo.ask()
    rooms = set()

    def enter(frame, event, _):
        if event == "call":
            rooms.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(enter)
    try:
        reply = silo.ask(round=2)
    finally:
        sys.setprofile(None)
    here = sorted(name for name in rooms if name.startswith("client.site."))
    assert not reply.has_error() and len(here) <= MOST_ROOMS, here


def test_killed_between_the_transactions_it_has_paid(private, monkeypatch):
    """It is counted and charged, and nothing has left; the same message again costs nothing more."""

    def dies(_):
        os.kill(os.getpid(), signal.SIGKILL)

    close_records()
    assert in_fork(lambda: private.ask(answer=dies)) == -signal.SIGKILL
    assert private.used() == 1 and private.kinds() == ["charge"] and not private.left()
    close_records()
    monkeypatch.setattr(release, "write_down", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert in_fork(private.ask) == -signal.SIGKILL
    monkeypatch.undo()
    assert private.used() == 2 and private.kinds() == ["charge"] and not private.left()
    assert not private.ask().has_error()
    assert private.kinds() == ["charge", "sent"] and len(private.left()) == 1


def test_killed_before_the_first_one_ends_nothing_was_answered(private, monkeypatch):
    """Neither count nor charge is on the disk, nor a line of the ledger's file; no app was asked."""

    def dies(self, db, *_):
        db.execute("SELECT 1")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Ledger, "_charge", dies)
    close_records()
    assert in_fork(private.ask) == -signal.SIGKILL
    monkeypatch.undo()
    assert private.used() == 0 and private.kinds() == [] and not private.steps


def test_what_a_later_rule_refuses_counts_all_the_same(private):
    """Else a server could ask for ever whether a receipt or a budget is in order."""
    private.policy('receipts = "required"\n')
    assert "its policy has receipts" in why(private.ask()) and private.used() == 1
    assert private.kinds() == []
    private.policy("epsilon = 0.001\n")
    assert "its policy has epsilon" in why(private.ask()) and private.used() == 2
    private.policy("epsilon = 0.001\nruns-per-day = 1\n")
    assert "runs-per-day = 1" in why(private.ask(run=10)) and private.used() == 2
    assert private.kinds() == [] and not private.steps


def test_a_rule_that_fails_undoes_the_transaction(private, monkeypatch):
    """An error that no rule expects: nothing is answered, counted or charged."""

    def unlucky(self, *_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(Ledger, "charge", unlucky)
    assert why(private.ask()) == "no luck" and private.used() == 0 and not private.steps


def test_a_reply_that_must_not_leave_is_no_paid_reply(private):
    """Its bytes are too many for the study: neither budget nor log has it, in the record and in the files."""
    reply = private.ask(size=4000)
    assert "limits.bytes = 1000" in why(reply)
    assert private.kinds() == ["charge"] and not private.left()
    assert (
        not private.ask().has_error()
    )  # paid, and of other bits: the first reply has not left
    assert private.kinds() == ["charge", "sent"]
    assert "limits.bytes" in why(private.ask(size=4000)) and private.kinds() == [
        "charge",
        "sent",
    ]
    assert len(list(charges(Ledger(private.state).lines()))) == 1


def test_a_block_inside_a_transaction_is_a_part_of_it(silo):
    """What fails in it is undone alone; of another record, or with more care for a power cut, it is a mistake."""

    def count(db):
        return db.execute("SELECT count(*) FROM messages").fetchone()[0]

    row = ("2026-01-01", "1", "north", "train", "")
    home = Record(silo.state)
    with home.write() as db:
        db.execute(record.MESSAGE, row)
        with pytest.raises(SiteError), Record(silo.state).write() as inner:
            inner.execute(record.MESSAGE, row)
            raise SiteError("not this one")
        with pytest.raises(SiteError, match="damaged"), home.write() as inner:
            inner.execute(record.MESSAGE, row)
            raise sqlite3.DatabaseError("a statement that fails")
        with home.reading() as same:
            assert count(same) == 1
    with home.write(sync=False), pytest.raises(AssertionError, match="sync"):
        home.write(sync=True).__enter__()
    with home.write(), pytest.raises(AssertionError, match="inside one of"):
        Record(silo.folder / "other").write().__enter__()
    with home.reading() as db:
        assert count(db) == 1


def test_what_was_parsed_is_gone_with_its_reply(silo, no_search):
    """A message's passage has its masks, which do not have the message."""
    import weakref

    with flower_identity():
        message = Message(RecordDict({"config": ConfigRecord({"round": 1})}), 1, "train")
        node: Any = {"name": "north", "state-dir": str(silo.state)}
        context = Context(9, 1, node, RecordDict(), {"strategy": "fedavg"})
        terms = gate.Terms(policy=None, error=SiteError("unreadable"))
        parsed = described(message, context, terms, allowed=False)
    gone = weakref.ref(parsed)
    del parsed
    assert gone() is None
