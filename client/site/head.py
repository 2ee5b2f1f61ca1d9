"""How far this site's record had come, in a second place: an older state directory is refused, and spends nothing anew.

    STATE_DIR.head/head.json    beside the state directory, in containers a volume of its own

It has the record's identity, the number of its lines in the audit log with the hash of the last one, and what was
charged of each data file. It is written after a transaction is on the disk, and before a reply leaves. So a process
that is killed in between leaves it one transaction behind, never ahead, and an honest site is never refused. Not
noticed: both places restored together, a head that is lost, and a copy that lacks no more than that one transaction.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

from ..protocol.chain import chain_files, last_first, parse_line, write_whole
from ..protocol.parsed import SiteError
from .trust.audit import Log

SPENT = """SELECT data, f.silo, cohort, f.records, f.patients, units, rate, noise, steps, messages FROM spent AS s
    JOIN data_files AS f ON f.sha256 = s.data WHERE s.run = '' AND s.silo = '' ORDER BY data, units, rate, noise"""
RESTORED = (
    "restored.json"  # in a state directory of `silofl restore`, until a person accepts it
)
KIND = slice(0, 8)  # of such a row: what steps and messages are counted for


class Head:
    """The head of the record in one state directory."""

    def __init__(self, state: Path) -> None:
        self.file = state.parent / f"{state.absolute().name}.head" / "head.json"
        self.restored = state / RESTORED
        self.log = Log(state / "audit")

    def read(self) -> dict[str, Any]:
        """Return what was kept; empty if nothing was. Raises SiteError for a damaged file."""
        try:
            kept: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
            return kept if kept["id"] else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SiteError(
                f"{self.file} cannot be read ({type(error).__name__}): restore it from a backup"
            ) from None

    def write(self, db: sqlite3.Connection) -> None:
        """Keep the head of a record whose transaction is on the disk. Raises SiteError if it cannot be kept."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.log.hold():  # else another process's newer one is written over
                if (now := self._of(db)) != self.read():
                    write_whole(self.file, json.dumps(now) + "\n", sync_name=False)
        except OSError as error:
            raise SiteError(
                f"{self.file} cannot be written ({error.strerror}), and nothing leaves without it: it needs a folder "
                "or volume beside the state directory that is never restored with it"
            ) from None

    def check(self, db: sqlite3.Connection) -> None:
        """Raise SiteError, with both heads, for a record that lacks something of what was kept, or was restored."""
        if self.restored.exists():
            raise SiteError(
                f"the state directory was restored from a backup ({self.restored}), and nothing leaves from it before "
                f"`silofl approve --restored --by NAME` has charged what {self.file} had spent"
            )
        if not (kept := self.read()):
            return
        try:
            now, spent = self._of(db), list(missing(db, kept["spent"]))
            behind = now["id"] != kept["id"] or now["replies"] < kept["replies"]
            if not (behind or spent or self._differs(kept["line"], kept["hash"])):
                return
            have, had = (
                f"{head['replies']} entries and line {head['line']} of the audit log ({head['hash'][:16]})"
                for head in (now, kept)
            )
        except (KeyError, TypeError, ValueError):
            raise SiteError(f"{self.file} is damaged: restore it from a backup") from None
        raise SiteError(
            f"the state directory is an older copy, or another one: record.sqlite has {have}, {self.file} had {had}; "
            "restore the newest copy, or `silofl approve --restored` goes on with all that was spent"
        )

    def _of(self, db: sqlite3.Connection) -> dict[str, Any]:
        identity, replies = db.execute("SELECT id, replies FROM meta").fetchone()
        line, last, _ = self.log.end()
        spent = [list(row) for row in db.execute(SPENT)]
        return {"id": identity, "replies": replies, "line": line, "hash": last, "spent": spent}

    def _differs(self, number: int, line_hash: str) -> bool:
        """Return whether the audit log ends before a line, or has another one in its place."""
        line, _, _ = self.log.end()
        if line < number:
            return True
        for file in reversed(chain_files(self.log.folder, self.log.kind)):
            for text in last_first(file):
                entry = parse_line(text, self.log.required)
                if entry is not None and entry["line"] <= number:
                    return bool(entry["line"] == number and entry["hash"] != line_hash)
        return False  # older files were moved away


def missing(db: sqlite3.Connection, kept: list[list[Any]]) -> list[list[Any]]:
    """Return the rows of what was charged that a record lacks, with the missing steps and messages."""
    have = {tuple(row[KIND]): row[8:] for row in db.execute(SPENT)}
    lacking = []
    for row in kept:
        steps, messages = have.get(tuple(row[KIND]), (0, 0))
        if row[8] > steps or row[9] > messages:
            lacking.append([*row[KIND], max(row[8] - steps, 0), max(row[9] - messages, 1)])
    return lacking
