"""The ledger of what differential privacy has cost at this site, and its files: a chain of lines, as the audit log.

    STATE_DIR/record.sqlite                     each line's numbers and the totals
    STATE_DIR/budget/budget-000001.jsonl ...    for a reader: a line per charge, and per reply that left
    STATE_DIR/budget/head.json                  number and hash of the last line

A training message is charged before the training, so it also counts if its process is killed. The same message of the
same Flower run is free when repeated, as long as its cost and the bits of its reply are the same. A reply with other
bits is another release of the same data, and is charged before it leaves. A resumed run is another Flower run, and is
charged again. The charges are computed by this site (`accounting.py`) and compared with the rules ``epsilon`` and
``delta``.

What was charged is what the record has (`../record.py`). The files are written from it once a transaction is on the
disk; after a crash in between, by the next one. If they are damaged, missing, or shorter than the record says, nothing
is allowed. They are verified whole where something else than this class has changed them, and once in a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.chain import (
    EVERY,
    START,
    Chain,
    append_line,
    chain_files,
    chain_line,
    read_head,
    utc_now,
    write_whole,
)
from ...protocol.parsed import SiteError
from ...protocol.policy import Policy
from ..record import OPEN, Record
from .accounting import DataFile, MessageCost, default_delta, epsilon_of, load_data_file

CHARGE, SENT = "charge", "sent"
LEAST_EPSILON = 1e-4  # that a charged message costs at least, so that a budget bounds the number of messages
FOLDER = "budget"  # in the state directory
# Of the files that this process has compared with the record, by folder: what `_stamps` returned then, the last line
KNOWN: dict[Path, tuple[list[tuple[object, ...]], int]] = {}
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """A training message and its cost. ``key``: equal for repetitions of a message, see `rules/budget.py`."""

    key: str
    silo: str
    run_id: str
    run: str
    round: int
    data: DataFile
    cost: MessageCost


@dataclass(frozen=True)
class SpentEpsilon:
    """Epsilon of a cohort before and after a release, at the cohort's delta."""

    before: float
    after: float
    delta: float


class Ledger(Chain):
    """The ledger in one state directory."""

    kind = "budget"
    required = EVERY | {"kind", "silo", "run-id", "message"}

    def __init__(self, state: Path, *, restored: bool = False) -> None:
        super().__init__(state / FOLDER)
        self.state, self.record = state, Record(state, restored=restored)

    def lines(self) -> Sequence[Line]:
        """Return all lines of the files. Raises SiteError if one is changed or missing."""
        if read_head(self.folder) is None and not chain_files(self.folder, self.kind):
            return []
        verdict = self.verify()
        if verdict.faults:
            raise SiteError(
                f"the ledger {self.folder} is not whole: {verdict.faults[0]}; restore the state directory"
            )
        return verdict.entries

    def charge(self, release: Release, policy: Policy, attended: int = 0) -> SpentEpsilon:
        """Charge a message, unless it was charged before at the same cost.

        ``attended``: the rounds of this run in which this silo's reply arrived; a ledger with fewer is an old copy.
        Raises SiteError if the budget does not allow it, OSError if it cannot be written.
        """
        with self.open() as db:
            find = "SELECT DISTINCT round FROM charges WHERE run = ? AND silo = ? AND round != ? LIMIT ?"
            place = release.run_id, release.silo, release.round, attended
            rounds = len(db.execute(find, place).fetchall())
            if rounds < attended:
                raise SiteError(
                    f"the server has had {attended} rounds of this run, and the ledger {self.folder} has {rounds}: "
                    "the state directory is an older copy, or another one; restore the newest"
                )
            if count_paid(db, release):
                return self._read_unchanged(db, release, policy)
            return self._charge(db, release, policy)

    def note_reply(self, release: Release, reply: str, policy: Policy) -> SpentEpsilon:
        """Note the digest of a reply before it leaves; charge it if another reply left for the same message.

        Only charges of the same cost cover it. Raises SiteError if the budget does not allow it, OSError if it cannot
        be written.
        """
        with self.open() as db:
            rows = db.execute("SELECT reply FROM sent WHERE message = ?", (release.key,))
            sent = {digest for (digest,) in rows}
            spent, count = self._read_unchanged(db, release, policy), count_paid(db, release)
            if reply in sent and count:
                return spent
            if count <= len(sent):
                spent = self._charge(db, release, policy)
            self.note(db, {**self._entry(release, SENT), "reply": reply})
            return spent

    @contextlib.contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """Open the record in a transaction, once the files are what it has. Raises SiteError, OSError."""
        with self.record.write() as db:
            number, last = db.execute("SELECT ledger, hash FROM meta").fetchone()
            if KNOWN.get(self.folder) != (self._stamps(), number):
                self.export(db)
                lines = self.lines()
                if len(lines) < number or (number and lines[number - 1]["hash"] != last):
                    raise SiteError(
                        f"the ledger {self.folder} has {len(lines)} lines, and {number} were written: it was deleted, "
                        "or is an older copy; restore the state directory"
                    )
                for line in lines[
                    number:
                ]:  # of a crash under silofl 0.3, which wrote the file first
                    add_line(db, line)
                    number = line["line"]
                    db.execute("UPDATE meta SET ledger = ?, hash = ?", (number, line["hash"]))
                KNOWN[self.folder] = self._stamps(), number
            db.execute("DELETE FROM pending WHERE line <= ?", (number,))
            yield db

    def export(self, db: sqlite3.Connection) -> None:
        """Write the record's lines into the files that lack them. Raises OSError."""
        with self.hold():
            stamps, number = KNOWN.get(self.folder, ([], 0))
            if changed := stamps != self._stamps():
                number, _, torn = self.end()
                if torn:
                    cut_torn(chain_files(self.folder, self.kind)[-1])
            for line, line_hash, text in pending_lines(db, number):
                number = line
                append_line(self._file(), text)
                head = json.dumps({"line": number, "hash": line_hash}) + "\n"
                write_whole(self.folder / "head.json", head, sync_name=False)
            if not changed:
                KNOWN[self.folder] = self._stamps(), number

    def _stamps(self) -> list[tuple[object, ...]]:
        """Return names, sizes and times of the ledger's files: a change by anything else shows in them."""
        stats = [(file.name, file.stat()) for file in chain_files(self.folder, self.kind)]
        return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]

    def note(self, db: sqlite3.Connection, entry: Line) -> None:
        """Add a line to the record; it is in the files once the transaction is on the disk."""
        number, before = db.execute("SELECT ledger + 1, hash FROM meta").fetchone()
        line = {"line": number, "previous": before or START, **entry}
        text, last = chain_line(line)
        add_line(db, line)
        db.execute("INSERT INTO pending VALUES (?, ?, ?)", (number, last, text))
        db.execute("UPDATE meta SET ledger = ?, hash = ?", (number, last))
        OPEN.exports[self.folder] = self.export

    def _charge(self, db: sqlite3.Connection, release: Release, policy: Policy) -> SpentEpsilon:
        """Write a charge, if the budget allows it."""
        of_cohort = self.of_cohort(db, release.data)
        new = {**release.cost.fields, "data": release.data.sha256}
        delta = delta_of([*of_cohort, new], policy)
        before, after = spent_of(of_cohort, delta), spent_of([*of_cohort, new], delta)
        if policy.epsilon and after > policy.epsilon:
            raise SiteError(
                f"its policy has {policy.line('epsilon')}, and this round would bring what is spent from {before:.3g} "
                f"to {after:.3g} (delta {delta:.1g}): silofl budget"
            )
        spent = {
            "epsilon-before": before,
            "epsilon-after": after,
            "delta": delta,
            "budget": policy.epsilon,
        }
        self.note(
            db, {**self._entry(release, CHARGE), **new, **spent, "cohort": release.data.cohort}
        )
        return SpentEpsilon(before, after, delta)

    def _read_unchanged(
        self, db: sqlite3.Connection, release: Release, policy: Policy
    ) -> SpentEpsilon:
        of_cohort = self.of_cohort(db, release.data)
        delta = delta_of(of_cohort, policy)
        total = spent_of(of_cohort, delta)
        return SpentEpsilon(total, total, delta)

    def of_cohort(self, db: sqlite3.Connection, data: DataFile) -> list[Line]:
        """Return what was charged to the people that a data file is about, equal steps together.

        Raises SiteError if the record lacks a charged version, since its people are then unknown.
        """
        charged = db.execute(
            "SELECT DISTINCT data FROM spent WHERE run = '' AND silo = ''"
        ).fetchall()
        files = {name: load_data_file(db, name) for (name,) in charged}
        versions = cohort_of(data, files)
        return [line for line in totals(db) if line["data"] in versions]

    def _entry(self, release: Release, kind: str) -> dict[str, Any]:
        run = {"run-id": release.run_id, "run": release.run, "round": release.round}
        now = utc_now()
        return {"time": now, "kind": kind, "silo": release.silo, **run, "message": release.key}


def cut_torn(file: Path) -> None:
    """Cut off a last line without an end: of a process that was killed as it wrote the file, not the record."""
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def pending_lines(db: sqlite3.Connection, after: int) -> list[tuple[int, str, bytes]]:
    """Return number, hash and text of the lines behind this one that the files may lack."""
    rows = db.execute(
        "SELECT line, hash, text FROM pending WHERE line > ? ORDER BY line", (after,)
    )
    return rows.fetchall()


def add_line(db: sqlite3.Connection, line: Line) -> None:
    """Add a line of the ledger to the record, and a charge to the totals of all runs and of its own."""
    if line["kind"] != CHARGE:
        db.execute("INSERT OR IGNORE INTO sent VALUES (?, ?)", (line["message"], line["reply"]))
        return
    names = [
        "line",
        "message",
        "silo",
        "run-id",
        "round",
        "data",
        "unit",
        "units",
        "rate",
        "noise",
        "steps",
    ]
    values = [line[name] for name in names]
    db.execute(f"INSERT INTO charges VALUES ({', '.join('?' * len(names))})", values)
    kind = line["data"], line["units"], line["rate"], line["noise"], line["steps"]
    for scope in (("", ""), (line["run-id"], line["silo"])):
        db.execute(
            "INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET steps = steps + excluded.steps, messages = messages + excluded.messages",
            (*scope, *kind, line.get("messages", 1)),
        )


def totals(db: sqlite3.Connection, run_id: str = "", silo: str = "") -> list[Line]:
    """Return what was charged in all runs, or to a silo in one, equal steps of a data file together."""
    names = ("data", "units", "rate", "noise", "steps", "messages")
    rows = db.execute(
        f"SELECT {', '.join(names)} FROM spent WHERE run = ? AND silo = ?", (run_id, silo)
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def spent_of(lines: Iterable[Line], delta: float) -> float:
    """Return the epsilon of charges together, and at least :data:`LEAST_EPSILON` for each message."""
    lines = list(lines)
    count = sum(int(line.get("messages", 1)) for line in lines)
    return max(epsilon_of(lines, delta), LEAST_EPSILON * count)


def count_paid(db: sqlite3.Connection, release: Release) -> int:
    """Return how many charges are for this message, these data and this cost."""
    cost = release.cost.fields
    same = " AND ".join(f"{name} = ?" for name in ("message", "data", *cost))
    values = (release.key, release.data.sha256, *cost.values())
    return int(db.execute(f"SELECT count(*) FROM charges WHERE {same}", values).fetchone()[0])


def charges(lines: Iterable[Line]) -> Iterator[Line]:
    return (line for line in lines if line["kind"] == CHARGE)


def delta_of(of_cohort: Iterable[Line], policy: Policy) -> float:
    """Return the delta for a cohort's budget: the policy's, or the default for its largest version."""
    return policy.delta or default_delta(
        max((int(line["units"]) for line in of_cohort), default=0)
    )


def in_ledger(state: Path, run_id: str, silo: str) -> Sequence[Line]:
    """Return the charges of a run, equal steps together."""
    with Record(state).reading() as db:
        return totals(db, run_id, silo)


def cohort_of(data: DataFile, charged: Mapping[str, DataFile]) -> set[str]:
    """Return the charged versions of the data file, by SHA-256, that are about the same people as ``data``."""
    every = {**charged, data.sha256: data}
    linked = set[str]()
    new = {data.sha256}
    while new:
        linked |= new
        names = {every[sha256].name for sha256 in linked}
        links = {link for sha256 in linked for link in every[sha256].links}
        same = {
            sha256
            for sha256, file in every.items()
            if file.name in names or sha256 in links or not linked.isdisjoint(file.links)
        }
        new = same - linked
    return linked & charged.keys()
