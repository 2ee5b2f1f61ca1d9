"""What this site has counted, released and answered over all runs: one SQLite file per state directory.

    STATE_DIR/record.sqlite
        messages     a row per allowed message, counted before it is answered
        replies      a row per line of the audit log, written together with it
        disclosed    a row per answer that leaves once: its kind, and of which data, which model, which question
        charges, sent, spent    the ledger's lines and their totals (`budget/ledger.py`)
        pending      its last lines, until its files have them
        data_files   whose each version of the data file is (`budget/accounting.py`)
        approvals    the studies that this site has approved (`study/approvals.py`)

A process keeps its connection. A transaction is on the disk as a whole, or not at all. The server hands out a run's
numbers, so what was disclosed is found by data, model and question; a run's number only narrows it further.

A record that is damaged, missing or an older copy allows nothing. Beside the audit log, `audit/record` has its
identity, and `audit/head.json` its identity and its number of replies. Beside the state directory, `head.py` keeps how
far it had come.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..protocol.chain import utc_now, write_whole
from ..protocol.ours import files
from ..protocol.parsed import SiteError
from .head import Head
from .trust.audit import Log, kind_of

FILE = "record.sqlite"
VERSION = 2  # 1 was never released
WAIT_SECONDS = 60.0  # for another process of this silo
# No shared memory for a WAL
REMOTE = ("nfs", "cifs", "smb", "9p", "fuse", "lustre", "gpfs", "ceph", "afs", "beegfs")
PENDING = """CREATE TABLE IF NOT EXISTS pending (line INTEGER PRIMARY KEY, hash TEXT NOT NULL, text BLOB NOT NULL)"""
TABLES = f"""
{PENDING};
CREATE TABLE meta (id TEXT NOT NULL, replies INTEGER NOT NULL, ledger INTEGER NOT NULL, hash TEXT NOT NULL,
    files TEXT NOT NULL);
CREATE TABLE messages (day TEXT NOT NULL, run TEXT NOT NULL, silo TEXT NOT NULL, kind TEXT NOT NULL,
    study TEXT NOT NULL);
CREATE INDEX messages_day ON messages (day, run);
CREATE INDEX messages_run ON messages (run, silo, kind);
CREATE INDEX messages_study ON messages (study, silo, kind, run, day) WHERE study != '';
CREATE TABLE replies (time TEXT NOT NULL, kind TEXT NOT NULL, count INTEGER NOT NULL, data TEXT NOT NULL,
    run TEXT NOT NULL, silo TEXT NOT NULL, study TEXT NOT NULL, bytes INTEGER NOT NULL,
    line INTEGER NOT NULL, hash TEXT NOT NULL);
CREATE INDEX replies_study ON replies (study, bytes) WHERE study != '';
CREATE TABLE disclosed (time TEXT NOT NULL, kind TEXT NOT NULL, silo TEXT NOT NULL, run TEXT NOT NULL,
    data TEXT NOT NULL, model TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, people TEXT NOT NULL);
CREATE INDEX disclosed_kind ON disclosed (kind, silo, run);
CREATE INDEX disclosed_model ON disclosed (kind, silo, model);
CREATE TABLE charges (line INTEGER PRIMARY KEY, message TEXT NOT NULL, silo TEXT NOT NULL, run TEXT NOT NULL,
    round INTEGER NOT NULL, data TEXT NOT NULL, unit TEXT NOT NULL, units INTEGER NOT NULL, rate REAL NOT NULL,
    noise REAL NOT NULL, steps INTEGER NOT NULL);
CREATE INDEX charges_message ON charges (message);
CREATE INDEX charges_run ON charges (run, silo, round);
CREATE TABLE sent (message TEXT NOT NULL, reply TEXT NOT NULL, PRIMARY KEY (message, reply)) WITHOUT ROWID;
CREATE TABLE spent (run TEXT NOT NULL, silo TEXT NOT NULL, data TEXT NOT NULL, units INTEGER NOT NULL,
    rate REAL NOT NULL, noise REAL NOT NULL, steps INTEGER NOT NULL, messages INTEGER NOT NULL,
    PRIMARY KEY (run, silo, data, units, rate, noise)) WITHOUT ROWID;
CREATE TABLE data_files (sha256 TEXT PRIMARY KEY, silo TEXT NOT NULL, cohort TEXT NOT NULL, records INTEGER NOT NULL,
    patients INTEGER, links TEXT NOT NULL, samples TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE approvals (name TEXT PRIMARY KEY, protocol TEXT NOT NULL, by TEXT NOT NULL, time TEXT NOT NULL,
    signer TEXT NOT NULL, warnings TEXT NOT NULL, revoked TEXT NOT NULL) WITHOUT ROWID;
"""


# Rows of the tables that several modules write
MESSAGE = "INSERT INTO messages VALUES (?, ?, ?, ?, ?)"
DISCLOSED = "INSERT INTO disclosed VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
DATA_FILE = "INSERT OR IGNORE INTO data_files VALUES (?, ?, ?, ?, ?, ?, ?)"


class OpenConnections(threading.local):
    """The connections of a thread, by their mode, each with its process and file; and its open transaction.

    ``exports``: by folder, what writes the rows of the transaction into files once they are committed.
    """

    def __init__(self) -> None:
        self.connections: dict[str, tuple[tuple[int, str, int, int], sqlite3.Connection]] = {}
        self.transaction: tuple[Path, sqlite3.Connection, bool] | None = None
        self.exports: dict[Path, Callable[[sqlite3.Connection], object]] = {}


OPEN = OpenConnections()
# By a fork: to close them would release the parent's locks
INHERITED: list[sqlite3.Connection] = []


def close_records(*modes: str) -> None:
    """Close this thread's connections, all or those of some modes. The last one writes the WAL into the file."""
    for mode in modes or [*OPEN.connections]:
        if mode in OPEN.connections:
            (pid, *_), db = OPEN.connections.pop(mode)
            if pid == os.getpid():
                db.close()
            else:
                INHERITED.append(db)


atexit.register(close_records)


class Record:
    """The record in one state directory."""

    def __init__(self, state: Path, *, restored: bool = False) -> None:
        """``restored``: a person has accepted an older copy (`budget/restored.py`)."""
        self.state, self.path, self.restored = state, state / FILE, restored
        self.head = Head(state)

    @contextlib.contextmanager
    def write(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """Run a transaction, or a part of the one that this thread has open; an error in the block undoes the block.

        ``sync``: whether it is on the disk when the block ends. If not, a power cut may undo it until the next one with
        ``sync``, which syncs the WAL as a whole. Every reply leaves after such a one, that of its audit line
        (`release.py`). A process that is killed undoes nothing.

        Raises SiteError, one line, if the record is missing, damaged or older than the audit log, or if it cannot be
        written.
        """
        if OPEN.transaction is not None:
            with self._joined(sync) as db:
                yield db
            return
        with self._faults():
            if not self.path.exists():
                self._create()
            db = self._connection("rw")
            full = sync or is_remote(self.state)
            db.execute(f"PRAGMA synchronous={'FULL' if full else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            OPEN.transaction, OPEN.exports = (self.path, db, sync), {}
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            finally:
                OPEN.transaction = None
            if sync:
                self.head.write(db)
            for export in OPEN.exports.values():
                export(db)

    @contextlib.contextmanager
    def _joined(self, sync: bool) -> Iterator[sqlite3.Connection]:
        """Run a block inside this thread's transaction, which has to sync if the block does."""
        assert OPEN.transaction is not None
        path, db, syncs = OPEN.transaction
        inside = f"a transaction of {self.path} inside one of {path}, sync = {syncs}"
        assert path == self.path and sync <= syncs, inside
        with self._faults():
            db.execute("SAVEPOINT block")
            try:
                yield db
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK TO block")
                    db.execute("RELEASE block")
                raise
            db.execute("RELEASE block")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open the record for reading; without one, an empty one. Nothing is written. Raises SiteError."""
        with self._faults():
            if not self.path.exists() and self._is_new():
                with contextlib.closing(connect(":memory:")) as db:
                    self._fill(db)
                    yield db
                return
            try:
                db = self._connection("ro")
            except sqlite3.OperationalError:  # a folder that is read-only
                db = self._connection("ro&immutable=1")
            yield db

    def append(self, db: sqlite3.Connection, entry: Mapping[str, Any]) -> tuple[int, str]:
        """Write a line of the audit log inside a transaction; return its number and hash. Raises OSError, SiteError.

        The line is on the disk before the transaction. After a crash between them the log has a line of a reply that
        did not leave.
        """
        identity, count = db.execute("SELECT id, replies FROM meta").fetchone()
        db.execute("UPDATE meta SET replies = replies + 1")
        return Log(self.state / "audit", {"id": identity, "replies": count + 1}).append(entry)

    def note_reply(self, db: sqlite3.Connection, entry: Mapping[str, Any]) -> tuple[int, str]:
        """Write a reply's line and its row inside a transaction; return the line's number and hash, as `append`."""
        number, line_hash = self.append(db, entry)
        study = str(entry.get("study", {}).get("name", ""))
        what = (entry["time"], kind_of(entry), 1, str(entry.get("cohort", "")), entry["run-id"])
        reply = (*what, entry["silo"], study, entry["bytes"], number, line_hash)
        db.execute(f"INSERT INTO replies VALUES ({', '.join('?' * len(reply))})", reply)
        return number, line_hash

    def _connection(self, mode: str) -> sqlite3.Connection:
        """Return this thread's connection, which stays open: to open one costs more than a message's transaction."""
        file = self.path.stat()
        key = os.getpid(), str(self.path), file.st_dev, file.st_ino
        for kept_mode in {mode, "rw"}:
            if (kept := OPEN.connections.get(kept_mode)) and kept[0] == key:
                return kept[1]
        close_records(mode)
        db = connect(f"{self.path.absolute().as_uri()}?mode={mode}")
        try:
            if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                raise sqlite3.DatabaseError("it is no record of this version")
            if not self.restored:
                self.head.check(db)
                self._check(db)
            if mode == "rw":
                db.execute(
                    f"PRAGMA journal_mode={'DELETE' if is_remote(self.state) else 'WAL'}"
                )
                db.execute(PENDING)  # which a record of silofl 0.3 lacks
        except BaseException:
            db.close()
            raise
        OPEN.connections[mode] = key, db
        return db

    def _create(self) -> None:
        """Make the record under another name, and rename it. One process does so, others wait."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(
            self.state / ".record.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            if not self.restored:
                self._check_new()
            new = self.state / f".{FILE}.new"
            new.unlink(missing_ok=True)
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with contextlib.closing(connect(new.absolute().as_uri())) as db:
                db.execute("PRAGMA synchronous=FULL")
                self._fill(db)
                (identity,) = db.execute("SELECT id FROM meta").fetchone()
            (self.state / "audit").mkdir(exist_ok=True, mode=0o700)
            close_records()
            # Of a record that is gone: they would change this one
            for ending in ("-wal", "-shm"):
                (self.state / f"{FILE}{ending}").unlink(missing_ok=True)
            os.replace(new, self.path)
            files.sync(self.state)
            write_whole(self.state / "audit" / "record", identity + "\n")
        finally:
            os.close(lock)

    def _fill(self, db: sqlite3.Connection) -> None:
        """Make the tables."""
        db.execute("BEGIN")
        for statement in TABLES.split(";"):
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES (?, 0, 0, '', '')", (secrets.token_hex(16),))
        db.execute(f"PRAGMA user_version={VERSION}")
        db.execute("COMMIT")

    def _is_new(self) -> bool:
        """Return whether there is no record yet; another process may make one meanwhile. Raises SiteError."""
        try:
            self._check_new()
        except SiteError:
            if not self.path.exists():
                raise
        return not self.path.exists()

    def _check_new(self) -> None:
        """Raise SiteError if a record was here before: a missing one is no fresh allowance."""
        if self._read_note() or self.head.read():
            raise SiteError(
                f"{FILE} is missing, and tells what this site has released: restore it from a backup, or "
                "`silofl approve --restored` goes on with all that was spent by the head kept apart"
            )
        if self.head.log.end()[0]:
            raise SiteError(
                f"{self.state} has an audit log and no {FILE}, so it was changed: restore it from a backup, or begin a "
                "new state directory deliberately"
            )

    def _check(self, db: sqlite3.Connection) -> None:
        """Raise SiteError if the audit log has been written beside another record, or a newer copy of this one."""
        noted = self._read_note()  # first: another process may write a reply meanwhile
        identity, count = db.execute("SELECT id, replies FROM meta").fetchone()
        noted = noted or {"id": identity, "replies": count}
        if noted["id"] != identity:
            raise SiteError(
                f"{FILE} is not the record that belongs to this audit log: restore it from a backup"
            )
        if noted["replies"] > count + 1:
            raise SiteError(
                f"{FILE} is an older copy: it has {count} replies, and the audit log {noted['replies']}; restore "
                "the newest copy"
            )

    def _read_note(self) -> dict[str, Any]:
        """Return the identity and number of replies that are noted beside the audit log; empty if there are none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads((self.state / "audit" / "head.json").read_text())["record"]
            return {"id": str(noted["id"]), "replies": int(noted["replies"])}
        with contextlib.suppress(OSError):
            return {"id": (self.state / "audit" / "record").read_text().strip(), "replies": 0}
        return {}

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        def close() -> None:
            if OPEN.transaction is None:  # else it is the outer block's to end
                close_records()

        try:
            yield
        except sqlite3.OperationalError as error:
            close()
            raise SiteError(
                f"{FILE} cannot be written or read ({error}): nothing is answered without it"
            ) from None
        except sqlite3.Error as error:
            close()
            raise SiteError(f"{FILE} is damaged ({error}): restore it from a backup") from None


def disclose(
    db: sqlite3.Connection, kind: str, *, people: Iterable[str] = (), **fields: str
) -> None:
    """Note an answer that is about to leave. ``fields``: silo, run, data, model, question, answer; empty if missing."""
    names = ("silo", "run", "data", "model", "question", "answer")
    values = (fields.get(name, "") for name in names)
    db.execute(DISCLOSED, (utc_now(), kind, *values, "\n".join(people)))


def connect(uri: str) -> sqlite3.Connection:
    """Open a connection; transactions are begun and ended by hand."""
    return sqlite3.connect(uri, timeout=WAIT_SECONDS, isolation_level=None, uri=True)


@functools.cache
def is_remote(folder: Path) -> bool:
    """Return whether a folder is on a file system of the network, where a WAL's shared memory does not work."""
    inside, longest = f"{folder.resolve()}/", ("", "")
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            place, kind = line.split()[1:3]
            place = place.replace("\\040", " ")
            if inside.startswith(place.rstrip("/") + "/") and len(place) >= len(longest[0]):
                longest = place, kind
    return longest[1].startswith(REMOTE)
