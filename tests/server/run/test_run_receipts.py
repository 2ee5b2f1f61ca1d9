"""The server signs what silos say of their audit logs, keeps it, and sends it on: over kill -9 and resume."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from taken import silofl
from tiny import audited, federate, notes, random_silos, round_of

from client.flower.messages import set_sender
from client.protocol import receipts
from client.protocol.keys import make_signing_key
from client.site.head import Head
from client.site.trust import audit
from client.site.trust.receipts import known_key
from server.run.receipts import KEY, Receipts
from server.run.registration.data_summaries import IdentityRegistry
from server.simulation.engine import flower_identity

SILOS = {"a": 6, "b": 11, "c": 8}


def site(grid):
    """Around each silo's app what the site's own process does: it takes the receipt, and writes down what leaves."""
    for context in grid.contexts.values():
        node = context.node_config
        node["state-dir"] = str(Path(str(node["data"])).parent / "site" / str(node["name"]))
    audited(grid, takes_receipts=True)


def run(folder, rounds, prepare=site, **more):
    files = {name: folder / f"{name}.npz" for name in SILOS}
    if not all(file.exists() for file in files.values()):
        files = dict(random_silos(folder, SILOS))
    states = folder / "states"
    given = {"strategy": "fedavg", "rounds": rounds, **more}
    return federate(files, directory=folder / "run", state_dir=states, prepare=prepare, **given)


@pytest.fixture(autouse=True)
def key(tmp_path, monkeypatch):
    file = tmp_path / "receipt.key"
    make_signing_key(file)
    monkeypatch.setenv(KEY, str(file))
    return file


def log_of(folder, silo):
    """A silo's log, which is whole, and the receipts that it keeps."""
    place = folder / "site" / silo / "audit"
    found = audit.verify_log(place)
    assert not found.faults
    return (
        found.entries,
        [receipts.read_receipt(text) for text in receipts.read_kept(place / receipts.FILE)],
        place,
    )


def servers(folder, silo):
    texts = receipts.read_kept(folder / "run" / receipts.FILE)
    return [one for one in map(receipts.read_receipt, texts) if one.silo == silo]


def test_both_keep_them(tmp_path, capsys):
    """Card, two rounds, the closing evaluation: the server signs four lines, and three come back within the run."""
    found = run(tmp_path, 2)
    assert not found.strategy.rejected and notes(tmp_path / "run") == []
    for silo in SILOS:
        entries, own, place = log_of(tmp_path, silo)
        theirs = servers(tmp_path, silo)
        assert [entry["asked"] for entry in entries] == ["query", "train", "train", "evaluate"]
        assert [(one.line, one.hash) for one in theirs] == [
            (entry["line"], entry["hash"]) for entry in entries
        ]
        assert [one.text for one in own] == [one.text for one in theirs[:3]]
        assert [entry.get("receipt", {}).get("line") for entry in entries] == [None, 1, 2, 3]
        names = {record["name"] for entry in entries for record in entry["sent"]}
        # A line cannot have its own hash; that leaves beside what it lists
        assert receipts.RECORD not in names
        assert known_key(place) == theirs[0].key
        assert silofl("audit", place) == 0
        assert "  receipts  of the server, up to line 3\n" in capsys.readouterr().out
    assert "receipt" not in capsys.readouterr().err


def test_the_numbers_are_the_same_with_and_without(tmp_path, monkeypatch):
    with_them = run(tmp_path, 2).rows
    monkeypatch.delenv(KEY)
    (tmp_path / "other").mkdir()
    without = run(tmp_path / "other", 2).rows
    seconds = ("round_seconds",)
    assert [r for r in with_them if r.metric not in seconds] == [
        r for r in without if r.metric not in seconds
    ]
    assert not (tmp_path / "other/run" / receipts.FILE).exists()


def test_a_server_without_a_key_is_named_and_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(KEY, "")
    assert not run(tmp_path, 2).strategy.rejected
    err = capsys.readouterr().err
    # Once in the run at each site
    assert err.count("gives no receipt for the audit log") == len(SILOS)
    entries, own, place = log_of(tmp_path, "a")
    assert own == [] and "gives no receipt" in entries[-1]["receipt"]["fault"]
    assert silofl("audit", place) == 0
    assert (
        "  receipts  the server gives no receipt for the audit log" in capsys.readouterr().out
    )


def test_a_server_with_another_key_is_named_and_stops_nothing(tmp_path, monkeypatch, capsys):
    run(tmp_path, 1)
    make_signing_key(tmp_path / "other.key")
    monkeypatch.setenv(KEY, str(tmp_path / "other.key"))
    assert not run(tmp_path, 3, resume=True).strategy.rejected
    assert capsys.readouterr().err.count("is signed by another key, SHA256:") == len(SILOS)
    keys = {one.key for one in log_of(tmp_path, "a")[1]}
    assert len(keys) == 1 and len({one.key for one in servers(tmp_path, "a")}) == 2


def _run_until_killed(folder, key):
    os.environ[KEY] = key

    def prepare(grid):
        site(grid)
        inner = grid.before

        def before(silo, message, context):
            if silo == "b" and round_of(message) == 2:
                # Silo a has written down its reply, and the server has not seen it
                os.kill(os.getpid(), signal.SIGKILL)
            inner(silo, message, context)

        grid.before = before

    run(folder, 3, prepare)


@pytest.mark.exhaustive
def test_over_kill_9_and_resume(tmp_path, key, capsys):
    """What was signed before is still there, what follows covers the line whose reply was lost; no log goes back."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run_until_killed, args=(tmp_path, str(key))
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = {silo: servers(tmp_path, silo) for silo in SILOS}
    assert all([one.line for one in found] == [1, 2] for found in before.values())
    with (tmp_path / "run" / receipts.FILE).open("a") as file:
        file.write('{"receipt": "{')  # torn, as a kill within the write leaves it
    run(tmp_path, 3, resume=True)
    assert notes(tmp_path / "run") == []
    for silo in SILOS:
        entries, own, _ = log_of(tmp_path, silo)
        theirs = [one for one in _readable(tmp_path) if one.silo == silo]
        assert [one.line for one in theirs[:2]] == [1, 2] and theirs[-1].line == entries[-1][
            "line"
        ]
        hashes = {entry["line"]: entry["hash"] for entry in entries}
        assert (
            all(hashes[one.line] == one.hash for one in [*theirs, *own])
            and own[-1].line == theirs[-2].line
        )
    assert "receipt" not in capsys.readouterr().err


def _readable(folder):
    texts = receipts.read_kept(folder / "run" / receipts.FILE)
    return [receipts.read_receipt(text) for text in texts if text.endswith("}")]


def test_a_log_that_goes_back_is_noted(tmp_path, capsys):
    """Somebody at hospital b deletes its log between two runs of the same directory, and its head."""
    run(tmp_path, 2)
    _, _, place = log_of(tmp_path, "b")
    for file in (*place.iterdir(), Head(place.parent).file):
        file.unlink()
    run(tmp_path, 3, resume=True)
    assert notes(tmp_path / "run") == [
        "b: its audit log goes back from line 4 to line 1: lines were taken out, or the log is a new one"
    ]


def test_a_silo_says_nonsense_of_its_log(tmp_path):
    """Nothing of it is signed, and the reply counts as any other."""
    good: dict[str, Any] = {"silo": "a", "line": 1, "hash": "0" * 64}
    bad: list[dict[str, Any]] = [
        {},
        {"line": 0},
        {"line": 2**60},
        {"line": True},
        {"line": 1.0},
        {"hash": "x"},
    ]
    bad += [{"silo": ""}, {"silo": "x" * 999}, {"silo": 5}, {"hash": b"0" * 64}]
    found = Receipts.of(tmp_path, lambda line: None, {})
    with flower_identity():
        asked = Message(
            RecordDict({"config": ConfigRecord({})}), dst_node_id=1, message_type="train"
        )
        for change in bad:
            record = ConfigRecord({**good, **change} if change else {})
            reply = Message(
                RecordDict({receipts.RECORD: record, "config": ConfigRecord({})}),
                reply_to=asked,
            )
            found.take([reply])
            assert list(reply.content) == ["config"]
        assert not (tmp_path / receipts.FILE).exists()
        found.take([Message(RecordDict({receipts.RECORD: ConfigRecord(good)}), reply_to=asked)])
    assert len(receipts.read_kept(tmp_path / receipts.FILE)) == 1
    assert json.loads(receipts.read_kept(tmp_path / receipts.FILE)[0])["receipt"]


def test_a_silo_has_receipts_for_its_own_log_alone(tmp_path):
    """Another hospital would be accused of lines that it has not: names are the registered ones, also of who left."""
    identities, said = IdentityRegistry(), list[str]()
    nodes = [
        SimpleNamespace(node_id=n, name=name, public_key=b"")
        for n, name in enumerate(["a", "b", ""])
    ]
    identities.update(nodes)
    identities.update(nodes[:1])
    found = Receipts.of(tmp_path, said.append, identities.names)
    with flower_identity():
        for node, line in ((0, 5), (1, 10**12), (2, 10**12), (0, 6)):
            asked = Message(
                RecordDict({"config": ConfigRecord({})}), dst_node_id=node, message_type="train"
            )
            record = ConfigRecord({"silo": "a", "line": line, "hash": "0" * 64})
            reply = Message(RecordDict({receipts.RECORD: record}), reply_to=asked)
            found.take([set_sender(reply, asked)])
    kept = map(receipts.read_receipt, receipts.read_kept(tmp_path / receipts.FILE))
    assert [(receipt.silo, receipt.line) for receipt in kept] == [("a", 5), ("a", 6)]
    assert said == [
        f"{name} says that its audit log is a's: no receipt" for name in ("b", "node 2")
    ]
