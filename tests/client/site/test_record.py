"""The record of a state directory: one file, one transaction, and no fresh allowance where it is damaged or gone."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
from functools import partial
from pathlib import Path

import pytest
from failing import fails
from forks import in_fork
from gates import count_message

from client.protocol.parsed import SiteError
from client.protocol.policy import Policy, PolicyRefusedError
from client.site import record as site_record
from client.site.counts import has_left, read_released
from client.site.record import FILE, MESSAGE, Record, close_records, connect
from client.site.trust.audit import verify_log

THREE = Policy(max_messages=3)
ENTRY = {
    "time": "2026-01-01T00:00:00Z",
    "silo": "a",
    "asked-by": "s",
    "run-id": "1",
    "run": "r",
    "round": 1,
    "asked": "train",
    "method": "fedavg",
    "app": "",
    "settings": "",
    "rule": "",
    "sent": [],
    "bytes": 10,
    "cohort": "x",
}


def ask(state, run="1"):
    count_message(THREE, None, state, run, "a", "query", "2026-01-01")


def reply(state):
    record = Record(state)
    with record.write() as db:
        record.note_reply(db, ENTRY)


@pytest.fixture
def state(tmp_path):
    """A state directory with two messages and two replies."""
    for _ in range(2):
        ask(tmp_path / "state")
        reply(tmp_path / "state")
    close_records()
    return tmp_path / "state"


def test_only_its_owner_reads_it(state):
    with Record(state).write():
        modes = {file.name: file.stat().st_mode & 0o777 for file in state.glob(f"*{FILE}*")}
    assert modes and set(modes.values()) == {0o600}
    assert not list(state.glob(".*.new"))
    assert {folder.stat().st_mode & 0o777 for folder in (state, state / "audit")} == {0o700}


def _cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _overwrite(file):
    content = bytearray(file.read_bytes())
    content[100:8000] = b"\xff" * 7900
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        _cut,
        _overwrite,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("no record"),
    ],
)
@pytest.mark.parametrize("log", [True, False], ids=["", "without head.json"])
def test_a_damaged_or_deleted_record_allows_nothing(state, harm, log):
    harm(state / FILE)
    if not log:
        (state / "audit/head.json").unlink()
    for call in (ask, reply, read_released):
        with pytest.raises(
            (SiteError, PolicyRefusedError),
            match=r"record\.sqlite.* (missing|damaged|malformed)",
        ):
            call(state)


def test_messages_share_a_connection(state, tmp_path, monkeypatch):
    """To open the file, and to write the WAL back as it closes, cost more than a message; another file is opened."""
    opened = []

    def counted(uri):
        opened.append(uri)
        return connect(uri)

    monkeypatch.setattr(site_record, "connect", counted)
    for _ in range(3):
        reply(state)
        has_left(state, ("r", frozenset()), "a")
    assert len(opened) == 1 and (state / f"{FILE}-wal").exists()
    assert in_fork(partial(reply, state)) == 0  # with a connection of its own
    shutil.copytree(state, tmp_path / "copy")
    os.replace(tmp_path / "copy" / FILE, state / FILE)
    reply(state)
    assert len(opened) == 2
    close_records()
    assert (
        not (state / f"{FILE}-wal").exists() and len(verify_log(state / "audit").entries) == 7
    )


def test_a_wal_of_a_record_that_is_gone_does_not_enter_a_new_one(state):
    def counts_and_dies():
        ask(state, "2")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(counts_and_dies) == -signal.SIGKILL and (state / f"{FILE}-wal").exists()
    shutil.rmtree(state / "audit")
    shutil.rmtree(state.with_name("state.head"))
    (state / FILE).unlink()
    with Record(state).write() as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (0,)


def test_an_older_copy_allows_nothing(state, tmp_path):
    """A copy from before a reply lacks what has been counted since; one of another silo lacks everything."""
    shutil.copytree(state, tmp_path / "older")
    for _ in range(2):
        reply(state)
    close_records()
    shutil.copy(tmp_path / "older" / FILE, state / FILE)
    with pytest.raises(
        PolicyRefusedError,
        match=r"an older copy, or another one: record\.sqlite has 2 .*head\.json had 4 .*; restore the newest",
    ):
        ask(state)
    ask(tmp_path / "other")
    close_records()
    shutil.copy(tmp_path / "other" / FILE, state / FILE)
    fails(PolicyRefusedError, "an older copy, or another one", ask, state)
    # Where the head beside it is lost, the audit log has its number of replies
    shutil.rmtree(tmp_path / "state.head")
    fails(PolicyRefusedError, "is not the record that belongs to this audit log", ask, state)
    shutil.copy(tmp_path / "older" / FILE, state / FILE)
    fails(PolicyRefusedError, "it has 2 replies, and the audit log 4; restore", ask, state)


def test_replies_of_another_process_make_no_older_copy(state, monkeypatch):
    """A record is opened while another process replies, just when the number beside the audit log is read."""
    read = Record._read_note

    def three_replies():
        monkeypatch.undo()
        for _ in range(3):
            reply(state)

    def read_late(record):
        assert in_fork(three_replies) == 0
        return read(record)

    monkeypatch.setattr(Record, "_read_note", read_late)
    with Record(state).reading() as db:
        assert db.execute("SELECT replies FROM meta").fetchone() == (5,)


def _die_before_the_commit(state):
    record = Record(state)
    with record.write() as db:
        record.note_reply(db, ENTRY)
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_between_the_log_and_the_record(state):
    """The log has the line of a reply that did not leave; the record goes on, however often that happens."""
    for _ in range(3):
        assert in_fork(partial(_die_before_the_commit, state)) == -signal.SIGKILL
    assert read_released(state)["x"]["models"] == 2
    reply(state)
    assert read_released(state)["x"]["models"] == 3
    assert (
        len(verify_log(state / "audit").entries) == 6 and not verify_log(state / "audit").faults
    )


def _on_a_full_disk(state):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for call in (ask, reply):
        with pytest.raises((SiteError, PolicyRefusedError, OSError)):
            call(state)


def test_on_a_full_disk_nothing_is_counted_and_nothing_leaves(state):
    assert in_fork(partial(_on_a_full_disk, state)) == 0
    ask(state)  # the third message of three, where there is room again
    reply(state)
    fails(PolicyRefusedError, "max-messages = 3, and this is number 4", ask, state)


def test_a_count_is_synced_with_its_reply(state):
    for sync, level in ((False, 1), (True, 2), (False, 1)):
        with Record(state).write(sync=sync) as db:
            assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert db.execute("PRAGMA synchronous").fetchone() == (level,)


def test_a_journal_for_a_file_system_of_the_network(state, monkeypatch):
    monkeypatch.setattr(site_record, "is_remote", lambda folder: True)
    with Record(state).write(sync=False) as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        db.execute(MESSAGE, ("2026-01-01", "2", "a", "query", ""))
        assert not (state / f"{FILE}-wal").exists()
    with sqlite3.connect(state / FILE) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (3,)


# ---- Earlier versions ------------------------------------------------------------------------------------------------


def test_an_audit_log_without_its_record_allows_nothing(state):
    """Whatever else was removed with it: what has left counts."""
    shutil.rmtree(state.with_name("state.head"))
    for name in (FILE, "audit/record", "audit/head.json"):
        (state / name).unlink()
    for call in (ask, reply, read_released):
        with pytest.raises((SiteError, PolicyRefusedError), match="has an audit log and no"):
            call(state)


def test_a_record_of_silofl_0_3_goes_on(state):
    """It had no table of lines that its ledger's files lack."""
    with Record(state).write() as db:
        db.execute("DROP TABLE pending")
    close_records()
    ask(state)
    with Record(state).reading() as db:
        assert db.execute("SELECT count(*) FROM pending").fetchone() == (0,)
