"""`silofl approve --restored`: a site goes on with a restored state directory, because a person there decided so.

What was charged by the head kept apart (`../head.py`), and is not in the record, is charged. Every study is revoked,
since the copy may be from before a revocation. Not restored: the messages and bytes of studies, and the answers that
leave once, since the copy.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from ...protocol.chain import utc_now
from ...protocol.parsed import SiteError
from ..head import Head, missing
from ..record import DATA_FILE, close_records
from ..study.approvals import decision
from .ledger import CHARGE, Ledger


def accept_restored(state: Path, silo: str, by: str) -> int:
    """Charge what the record lacks, revoke all studies; return the number of charges. Raises SiteError, OSError."""
    if not (kept := Head(state).read()):
        raise SiteError(
            f"{Head(state).file}: no head is kept here, so nothing tells what was spent: bring the one that was kept "
            "apart; where it is lost, begin a new state directory, and lower `epsilon` by what was spent"
        )
    ledger = Ledger(state, restored=True)
    try:
        with ledger.open() as db:
            rows = _charge(ledger, db, silo, kept["spent"])
            db.execute("UPDATE approvals SET revoked = ? WHERE revoked = ''", (utc_now(),))
            line = decision(silo, "state restored", "", str(kept["hash"]), by, [])
            ledger.record.append(db, line)
        Head(state).restored.unlink(missing_ok=True)
        return rows
    finally:
        # The next one is compared with the head again
        close_records()


def _charge(ledger: Ledger, db: sqlite3.Connection, silo: str, kept: list[list[Any]]) -> int:
    """Charge what was kept and is missing; return how many kinds of charges these are."""
    links = " ".join(name for (name,) in db.execute("SELECT sha256 FROM data_files"))
    for data, name, cohort, records, patients, *_ in kept:
        db.execute(DATA_FILE, (data, name, cohort, records, patients, links, ""))
    rows = missing(db, kept)
    for data, _, cohort, _, patients, units, rate, noise, steps, messages in rows:
        of = {"data": data, "cohort": cohort, "unit": "patient" if patients else "record"}
        cost = {"units": units, "rate": rate, "noise": noise, "steps": steps}
        run = {"run-id": "restored", "run": "restored", "round": 0, "message": "restored"}
        entry = {"time": utc_now(), "kind": CHARGE, "silo": silo, **run, **of, **cost}
        ledger.note(db, {**entry, "messages": messages})
    return len(rows)
