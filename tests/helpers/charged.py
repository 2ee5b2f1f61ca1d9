"""Replies of a silo under a privacy budget, as its gate notes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from forks import in_fork
from tiny import write_silo

from client.commands.budget import budgets
from client.protocol.policy import Policy
from client.site.budget.accounting import MessageCost, data_file
from client.site.budget.ledger import Ledger, Release
from client.site.record import Record, close_records
from client.site.study import approvals

POLICY = Policy(epsilon=50.0)
COST = MessageCost("record", 200, 0.1, 1.5, 10, 1e-5)


def reply(state: Path, number: int = 1) -> None:
    """A charged message and its reply."""
    state.parent.mkdir(exist_ok=True)
    if not (file := state.parent / "data.npz").exists():
        write_silo(file, np.zeros((200, 3)), [0, 1] * 100)
    data = data_file(state, "a" * 64, "clinic", file)
    release = Release(f"message {number}", "clinic", "run-1", "run", number, data, COST)
    Ledger(state).charge(release, POLICY)
    Ledger(state).note_reply(release, f"bits {number}", POLICY)
    record = Record(state)
    with record.write() as db:
        entry = approvals.decision("clinic", "train", "", "", "server", [])
        record.note_reply(db, {**entry, "round": number, "cohort": "a" * 64})


def answered(state: Path, *numbers: int) -> None:
    """Another process answers these messages."""

    def answer() -> None:
        for number in numbers:
            reply(state, number)
        close_records()

    assert in_fork(answer) == 0


def spent(state: Path) -> float:
    return float(budgets(state, POLICY)[0]["spent"])
