"""Two processes and the same files: one acts just between two steps of the other, and nothing is lost or blamed."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from audit_lines import entry
from charged import COST, POLICY, answered, reply, spent
from forks import ended, fork, in_fork

import server.report.study as report_study
from benchmarks import reference_page
from benchmarks.reference_cells import HIDDEN, CellGroup, read_lines
from client import progress
from client.backup import archive
from client.backup import silo as backup_silo
from client.backup.archive import open_backup
from client.protocol import chain, keys
from client.protocol.envelope import fingerprint, public_pem
from client.site.budget import ledger
from client.site.budget.accounting import data_file
from client.site.budget.ledger import Ledger, Release
from client.site.head import Head
from client.site.record import OPEN, Record, close_records
from client.site.trust.audit import Log, verify_log
from partitions.common.errors import DataError
from partitions.common.files import append, hold_lock
from server.cli.main import main
from server.deploy import control, credentials, processes
from server.deploy.access.operators import Actions
from server.deploy.local import backup as server_backup
from server.deploy.local import start
from server.deploy.local.record import only_one
from server.results import history
from server.results.history import History, Row
from server.simulation.simulate import simulate
from server.watch import source

ROOT = Path(__file__).parents[1]
CALL = {
    "time": "2026-01-01T00:00:00Z",
    "name": "x",
    "role": "owner",
    "action": "ListRuns",
    "digest": "",
    "outcome": "allowed",
}


def row(number):
    return Row("fedavg", 0, number, "a", "test", "global", "accuracy", 0.5, 10)


def committed_alone(state, number):
    """Another process has committed a charge, and is about to write the ledger's files."""
    export = Ledger.export

    def ends(self, db):
        if OPEN.transaction is None:
            os._exit(0)
        export(self, db)

    def charge():
        Ledger.export = ends  # type: ignore[method-assign]
        data = data_file(state, "a" * 64, "clinic", state.parent / "data.npz")
        release = Release(f"message {number}", "clinic", "run-1", "run", number, data, COST)
        Ledger(state).charge(release, POLICY)
        os._exit(3)

    assert in_fork(charge) == 0


def in_between(monkeypatch, place, name, act, *, before=False):
    """The next call of a function meets what another process does, just after its own work, or before."""
    own = getattr(place, name)

    def late(*arguments, **named):
        monkeypatch.setattr(place, name, own)
        if before:
            act()
        try:
            return own(*arguments, **named)
        finally:
            if not before:
                act()

    monkeypatch.setattr(place, name, late)


# At a hospital


def test_a_backup_between_a_charge_and_its_line(tmp_path, monkeypatch):
    """The lines are copied before the other process writes one more, and the note of the last one after it."""
    state = tmp_path / "clinic" / "state"
    answered(state, 1, 2)
    committed_alone(state, 3)
    code = (
        "import sys; from pathlib import Path; from client.site.record import Record\n"
        "from client.site.budget.ledger import Ledger\nstate = Path(sys.argv[1])\n"
        "with Record(state).reading() as db: Ledger(state).export(db)"
    )
    others = list[Any]()

    def copied(path, target):
        copy(path, target)
        if "budget-0" in path:
            others.append(subprocess.Popen([sys.executable, "-c", code, state], cwd=ROOT))
            with suppress(subprocess.TimeoutExpired):  # it waits for the end of the copy
                others[0].wait(3)

    class Sorted:
        """The lines first, in whatever order this file system has them."""

        def __init__(self, path):
            self.entries = sorted(scandir(path), key=lambda entry: entry.name)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    copy, scandir = backup_silo.copy_now, os.scandir
    with monkeypatch.context() as patch:
        patch.setattr(backup_silo, "copy_now", copied)
        patch.setattr(os, "scandir", Sorted)
        backup_silo.back_up_silo("clinic", state, tmp_path / "b", "")
    assert others[0].wait(30) == 0
    close_records()
    with open_backup(tmp_path / "b", "", tmp_path / "beside") as (_, place):
        shutil.copytree(place / "state", tmp_path / "copy" / "state")
    assert not Ledger(tmp_path / "copy" / "state").verify().faults
    reply(tmp_path / "copy" / "state", 9)


def test_a_budget_counts_what_is_written_into_the_files_meanwhile(tmp_path, monkeypatch):
    state = tmp_path / "clinic" / "state"
    answered(state, 1, 2)
    committed_alone(state, 3)
    before = spent(state)
    close_records()
    in_between(monkeypatch, Ledger, "lines", lambda: answered(state, 4))
    assert spent(state) >= before


def test_the_first_line_of_a_log_is_no_fault(tmp_path, monkeypatch):
    (log := tmp_path / "audit").mkdir()
    in_between(monkeypatch, chain, "read_head", lambda: Log(log).append(entry(1)))
    assert not verify_log(log).faults


def test_the_first_charge_is_no_fault(tmp_path, monkeypatch):
    """Another process reads the ledger between its first line and the note of it."""
    state, readers = tmp_path / "clinic" / "state", list[int]()

    def read():
        close_records()
        spent(state)

    def reads():
        readers.append(fork(read))
        time.sleep(0.3)

    in_between(monkeypatch, ledger, "append_line", reads)
    reply(state, 1)
    assert ended(readers[0]) == 0


def test_a_record_that_is_made_meanwhile_is_not_missing(tmp_path, monkeypatch):
    state = tmp_path / "state"
    in_between(monkeypatch, Record, "_check_new", lambda: answered(state, 1), before=True)
    with Record(state).reading() as db:
        assert db.execute("SELECT replies FROM meta").fetchone() == (1,)


def test_an_older_head_is_not_written_over_a_newer_one(tmp_path, monkeypatch):
    """A process that computes its head holds the lock that the other's lines need."""
    state = tmp_path / "clinic" / "state"
    answered(state, 1)
    told, tell = os.pipe()

    def silo():
        os.read(told, 1)
        for number in (2, 3):
            reply(state, number)
        close_records()

    def goes_on():
        os.write(tell, b"!")
        time.sleep(1)

    other = fork(silo)  # before there is a lock to inherit
    with Record(state).write() as db:
        db.execute("UPDATE meta SET ledger = ledger")
        in_between(monkeypatch, Head, "_of", goes_on)
    assert ended(other) == 0
    with Record(state).reading() as db:
        (count,) = db.execute("SELECT replies FROM meta").fetchone()
    assert Head(state).read()["replies"] == count == 3


def test_a_request_is_signed_by_the_key_that_stays(tmp_path, monkeypatch):
    def another():
        assert in_fork(lambda: keys.make_request("north", tmp_path, None)) == 0
        shutil.copy(tmp_path / "north.request", tmp_path / "sent.request")

    in_between(monkeypatch, keys, "new_key", another)
    keys.make_request("north", tmp_path, None)
    sent = keys.read_request(tmp_path / "sent.request").fingerprint
    assert sent == fingerprint(public_pem(keys.load_key(tmp_path / "node.key")))


def test_a_key_on_a_file_system_without_second_names(tmp_path, monkeypatch):
    """Such as that of a stick."""
    monkeypatch.setattr(os, "link", no_link)
    keys.make_request("north", tmp_path, None)
    names = {path.name for path in tmp_path.iterdir()}
    assert keys.load_key(tmp_path / "node.key") and names == {"node.key", "north.request"}


def no_link(*_):
    raise PermissionError(errno.EPERM, "Operation not permitted")


# At the server


@pytest.fixture
def trio(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    (state := tmp_path / "home/silofl/trio").joinpath("credentials").mkdir(parents=True)
    (state / "credentials/ca.key").write_text("key")
    (tmp_path / "federation.yaml").write_text("name: trio")
    return state, SimpleNamespace(name="trio", path=tmp_path / "federation.yaml", silos=[])


def test_a_server_logs_a_call_while_it_is_backed_up(trio, tmp_path, monkeypatch):
    state, federation = trio
    log = Actions(state / "actions")
    log.append(CALL)
    in_between(monkeypatch, archive.tarfile, "open", lambda: log.append(CALL))
    server_backup.back_up_server(federation, [], tmp_path / "b", "")
    with open_backup(tmp_path / "b", "", tmp_path / "beside") as (manifest, _):
        assert any("actions" in name for name in manifest.files)


def test_a_run_goes_on_while_it_is_backed_up(trio, tmp_path, monkeypatch):
    run = tmp_path / "run"
    (older := run / "checkpoint/round-000001.safetensors").parent.mkdir(parents=True)
    older.write_bytes(b"x")
    (run / "config.toml").write_text("")

    files_below = server_backup.files_below

    def found(folder, prefix):
        files = files_below(folder, prefix)
        if folder == run:
            older.unlink()  # by the next round
        return files

    monkeypatch.setattr(server_backup, "files_below", found)
    server_backup.back_up_server(trio[1], [run], tmp_path / "b", "")
    with open_backup(tmp_path / "b", "", tmp_path / "beside") as (manifest, _):
        assert "runs/run/config.toml" in manifest.files


def test_a_repair_that_fails_ends_what_it_started_alone(trio, monkeypatch):
    """A run that an earlier part began meanwhile goes on."""
    directory = trio[0]

    def spawn(part, *words):
        command = [sys.executable, "-c", "import time; time.sleep(60)", *words]
        where = {"directory": directory, "log": directory / "x.log"}
        return processes.start_process(part, command, environment=dict(os.environ), **where)

    def is_there():
        return any("deploy.superlink" in p.command for p in processes.find(directory))

    superlink, begun, started = spawn("superlink", "server.deploy.superlink"), [], []

    def fails_late(*_):
        begun.append(spawn("superlink", "flwr-serverapp"))
        started.append(spawn("new-silo", "private.py site.runtime.supernode"))
        time.sleep(0.3)
        raise start.PartFailedError("new-silo ended by itself")

    monkeypatch.setattr(start, "bring_up", fails_late)
    try:
        until = time.monotonic() + 30
        while not is_there() and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(start.PartFailedError):
            start.up(trio[1])
        assert (superlink.runs(), begun[0].runs(), started[0].runs()) == (True, True, False)
    finally:
        processes.end([superlink, *begun, *started], grace=0)


def test_no_silo_is_added_while_the_federation_starts(trio, tmp_path, monkeypatch, capsys):
    """It unregisters for good a key that it finds no file of, and the file comes last."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (file := tmp_path / "federation.yaml").write_text(
        "name: trio\ndemo: {dataset: digits}\nsilos: [{name: a, data: demo}, {name: b, data: demo}]\n"
    )
    control.write_connection(control.Connection("trio", "127.0.0.1:1", "/ca"))
    with only_one(trio[0]):
        assert main(["add-silo", "north", "--federation", str(file)]) == 2
    assert "`add-silo` of 'trio' is at work; wait for it" in capsys.readouterr().err


def test_two_federations_that_start_both_keep_their_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    north, south = (
        control.Connection(name, "127.0.0.1:1", "/ca") for name in ("north", "south")
    )
    other = threading.Thread(target=control.write_connection, args=[south])

    def another():
        other.start()
        other.join(0.5)

    in_between(monkeypatch, control, "write_atomically", another, before=True)
    control.write_connection(north)
    other.join()
    assert control.read_connection("north") == north
    assert control.read_connection("south") == south


def test_killed_between_a_key_and_its_certificate(tmp_path):
    """The next start makes both anew."""
    folder = tmp_path / "c"
    credentials.ensure_credentials(folder, silos=["a"], hosts=["localhost"])
    write = credentials.write_atomically

    def ends(path, *rest, **named):
        if path.name == "server.crt":
            os._exit(0)
        write(path, *rest, **named)

    def renews():
        credentials.write_atomically = ends
        credentials.ensure_credentials(folder, silos=["a"], hosts=["localhost", "10.0.0.1"])

    assert in_fork(renews) == 0
    credentials.ensure_credentials(folder, silos=["a"], hosts=["localhost"])
    pair = folder / "server.crt", folder / "server.key"
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair)


# A run's directory


def test_a_history_is_compressed_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "history.csv"
    History(path).add([row(number) for number in range(50)])

    def grows():
        history.LARGE = 100
        History(path).add([row(50)])

    def another():
        assert in_fork(grows) == 0

    in_between(monkeypatch, history, "_load", another)
    assert len(History.stored(path).rows) == 51


def test_a_progress_that_is_begun_anew_is_followed(tmp_path, monkeypatch):
    folder = tmp_path / "run" / "fedavg-0" / "a" / ("run-" + "0" * 16)
    folder.mkdir(parents=True)
    progress.add_event(folder, "begin", strategy="fedavg", seed=0)
    (watched := source.WatchSource(tmp_path, "a")).poll()
    gone = (folder / "progress.jsonl").unlink
    in_between(monkeypatch, source.Followed, "_look", gone, before=True)
    watched.poll()
    progress.add_event(folder, "round", round=1)
    watched.poll()


def test_a_run_that_ends_while_its_report_is_read(tmp_path, monkeypatch):
    """Its rows are written before its entry in the summary: what is shown as finished has all rows."""
    values: dict[str, Any] = {"dataset": "digits", "silos": 2, "rounds": 1, "threads": 1}
    run = simulate(
        {**values, "strategy": "local,fedavg", "out": str(tmp_path / "r")}, quiet=True
    )
    rows, summary = History(run / "history.csv").rows, (run / "summary.json").read_bytes()
    history.write_history(run / "history.csv", [r for r in rows if r.strategy == "local"])
    part = json.loads(summary)
    part["runs"] = [of for of in part["runs"] if of["strategy"] == "local"]
    (run / "summary.json").write_text(json.dumps(part))

    def ends():
        history.write_history(run / "history.csv", rows)
        (run / "summary.json").write_bytes(summary)

    in_between(monkeypatch, report_study, "read_events", ends, before=True)
    results = report_study.StudyResults(run)
    assert [of["strategy"] for of in results.summarised] == ["local"]


def test_the_budget_of_a_run_that_waits_writes_nothing(tmp_path, capsys):
    (tmp_path / "config.toml").write_text('strategy = "fedavg"\n')
    assert main(["budget", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_cells_that_a_worker_measures_are_not_restored_over_it(tmp_path):
    (published := tmp_path / "docs").mkdir()
    cells, stem = CellGroup("azpro", HIDDEN, 0, "local"), reference_page.stem("short")
    tables: dict[str, list[Any]] = {
        f"{stem}.csv": [reference_page.COLUMNS, [*cells, 0, 0, "h1", 10, 0.5, 0.5]],
        f"{stem}-runs.csv": [reference_page.RUN_COLUMNS, [*cells, 0, 0, 1, 2, 0.5, 100, "{}"]],
        f"{stem}-missing.csv": [[*CellGroup._fields, "reason"]],
    }
    for name, lines in tables.items():
        with (published / name).open("w") as file:
            csv.writer(file).writerows(lines)
    (path := cells.file(tmp_path / "out")).parent.mkdir(parents=True)
    with hold_lock(path, "busy"):
        reference_page.restore_cells(published, tmp_path / "out", "short")
        append(path, json.dumps({"seed": 0}) + "\n")
        with pytest.raises(DataError), hold_lock(path, "busy"):
            pass
    assert read_lines(path) == [{"seed": 0}]
    path.write_text('{"seed": 0, "fo')  # killed as it wrote its first line
    reference_page.restore_cells(published, tmp_path / "out", "short")
    assert len(read_lines(path)) == 1
