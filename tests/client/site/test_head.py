"""A state directory that goes back regains neither budget nor approvals; a crash locks no hospital out."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from charged import POLICY, reply, spent
from failing import fails
from forks import ended, fork, in_fork
from taken import silofl

from client.commands.budget import budgets
from client.protocol.parsed import SiteError
from client.site.budget.ledger import Ledger
from client.site.head import Head
from client.site.record import FILE, Record, close_records
from client.site.study import approvals
from client.site.trust.audit import verify_log

SAYS = (
    r"record\.sqlite has (\d+) entries and line \d+ of the audit log \(\w{16}\), .*head\.json had (\d+) entries .*"
    r"`silofl approve --restored`"
)
STUDY = """\
kind = "silofl study 1"
name = "heart"
purpose = "Does it help?"
contact = "A. Person"
results = "The hospitals."
retention = "Models for a year."
start = 2026-01-01
end = 2099-12-31
apps = ["{}"]
participants = 3
step = 1.0
metrics = ["loss"]

[settings]
strategy = ["fedavg"]

[limits]
runs = 2
rounds = 3
evaluations = 1
queries = 1
days = 5
messages = 9
bytes = 1000
""".format("ab" * 32)


@pytest.fixture
def state(tmp_path):
    """A state directory with two private replies and an approved study, written by another process."""
    state = tmp_path / "state"

    def begin():
        for number in (1, 2):
            reply(state, number)
        approvals.record_approval(state, "clinic", STUDY, "Dr. B", "", [])
        close_records()

    assert in_fork(begin) == 0
    return state


def restore(state, *names):
    """Put the older copy, or some of it, in the state directory's place."""
    close_records()
    older = state.with_name("older")
    for name in names:
        (state / f"{name}-wal").unlink(missing_ok=True)
        shutil.copy(older / name, state / name)
    if not names:
        shutil.rmtree(state)
        shutil.copytree(older, state)


def goes_on(state):
    """Two more charges and a revocation, in a process of its own."""

    def more():
        for number in (3, 4):
            reply(state, number)
        approvals.record_revocation(state, "clinic", "heart", "Dr. C")
        close_records()

    assert in_fork(more) == 0


@pytest.mark.parametrize("names", [(), (FILE,)], ids=["the whole folder", "the record alone"])
def test_an_older_state_is_refused_with_both_heads(state, names):
    shutil.copytree(state, state.with_name("older"))
    goes_on(state)
    after = spent(state)
    restore(state, *names)
    for call in (
        partial(reply, state, 5),
        partial(approvals.find, state, "heart"),
        partial(budgets, state, POLICY),
    ):
        fails(SiteError, SAYS, call)
    assert silofl("budget", state) == 2

    # The hospital goes on deliberately: with what was spent, and without its studies
    assert silofl("approve", "--restored", "--state-dir", state) == 2
    assert silofl("approve", "--restored", "--by", "Dr. D", "--state-dir", state) == 0
    close_records()
    assert spent(state) == pytest.approx(after)
    found = approvals.find(state, "heart")
    assert found is not None and found.revoked
    assert verify_log(state / "audit").entries[-1]["asked"] == "state restored"
    reply(state, 5)
    assert spent(state) > after and not Ledger(state).verify().faults


def test_one_step_back_is_noticed(state):
    """A revocation is one transaction; the audit log alone allowed for one that a crash had undone."""
    shutil.copytree(state, state.with_name("older"))
    approvals.record_revocation(state, "clinic", "heart", "Dr. C")
    restore(state, FILE)
    fails(SiteError, SAYS, approvals.find, state, "heart")


def test_a_deleted_state_is_no_fresh_budget(state):
    before = spent(state)
    close_records()
    shutil.rmtree(state)
    fails(SiteError, r"record\.sqlite is missing.*approve --restored", reply, state)
    state.mkdir(exist_ok=True)
    assert silofl("approve", "--restored", "--by", "Dr. D", "--state-dir", state) == 0
    assert spent(state) == pytest.approx(before)
    reply(state, 3)
    assert spent(state) > before and approvals.find(state, "heart") is None


def test_another_history_of_the_same_length_is_refused(state):
    shutil.copytree(state, state.with_name("older"))
    reply(state, 3)
    kept = Head(state).file.read_text()
    restore(state)
    Head(state).file.unlink()  # as on another machine
    reply(state, 4)
    close_records()
    Head(state).file.write_text(kept)
    fails(SiteError, SAYS, reply, state, 5)


def test_killed_between_record_and_head(state, monkeypatch):
    """The head is one transaction behind; nothing is refused, and no charge is lost."""

    def dies(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    before = spent(state)
    close_records()
    for number in range(3, 6):
        with monkeypatch.context() as patch:
            patch.setattr(Head, "write", dies)
            assert in_fork(partial(reply, state, number)) == -signal.SIGKILL
        assert spent(state) > before
        before = spent(state)
        close_records()
    reply(state, 6)
    with Record(state).reading() as db:
        assert Head(state).read() == Head(state)._of(db)


def test_killed_anywhere_no_honest_hospital_is_locked_out(state):
    for number in range(3, 15):
        child = fork(partial(_replies, state, number * 100))
        signal.pthread_sigmask(signal.SIG_BLOCK, ())
        _wait_for(0.004 * (number - 2))
        os.kill(child, signal.SIGKILL)
        ended(child)
        reply(state, number)
        close_records()
    assert not Ledger(state).verify().faults


def _replies(state, first):
    for number in range(first, first + 100):
        reply(state, number)


def _wait_for(seconds):
    import time

    time.sleep(seconds)


def test_two_processes_at_once_are_never_refused(state):
    children = [fork(partial(_some, state, first)) for first in (100, 200, 300)]
    assert [ended(child) for child in children] == [0, 0, 0]
    reply(state, 5)
    with Record(state).reading() as db:
        assert Head(state).read() == Head(state)._of(db)


def _some(state, first):
    for number in range(first, first + 6):
        reply(state, number)
        close_records()


@pytest.mark.parametrize("text", ["", "[]", "{}x", '{"id": 1}', '{"spent": 5, "id": "x"}'])
def test_a_damaged_head_allows_nothing(state, text):
    Head(state).file.write_text(text)
    fails(SiteError, r"head\.json (cannot be read|is damaged).*restore it", reply, state)


def test_without_a_second_place_nothing_leaves(state):
    """A charge that no head has counts all the same."""
    before, file = spent(state), Head(state).file
    shutil.rmtree(file.parent)
    file.parent.symlink_to("nowhere")
    fails(SiteError, "nothing leaves without it: it needs a folder", reply, state, 3)
    file.parent.unlink()
    assert spent(state) > before
    reply(state, 3)
    assert json.loads(file.read_text())["replies"] == 4


def test_the_head_lies_outside_the_state_and_is_its_owners_alone(state):
    file = Head(state).file
    assert file == Path(f"{state}.head/head.json")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
