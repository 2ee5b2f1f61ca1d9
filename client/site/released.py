"""The total of what has ever left from each version of this silo's data file; kept, since old logs may be moved away.

Replies are rows of the record (`record.py`), written with their line of the audit log before they leave.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SiteError
from .record import Record
from .takeover import REPLY
from .trust.audit import kind_of

KINDS = {"model": "models", "survey": "surveys", "own model": "own_models"}


def note_reply(
    db: sqlite3.Connection, record: Record, entry: Mapping[str, Any]
) -> tuple[int, str]:
    """Write a reply's line in the audit log and its row in the record; return the line's number and hash."""
    number, own = record.append(db, entry)
    kind, study = kind_of(entry), str(entry.get("study", {}).get("name", ""))
    what = (
        entry["time"],
        kind,
        1,
        str(entry.get("cohort", "")),
        str(entry["run-id"]),
        entry["silo"],
        study,
    )
    db.execute(REPLY, (*what, entry["bytes"], number, own))
    return number, own


def charge_bytes(db: sqlite3.Connection, study: Mapping[str, Any], size: int) -> None:
    """Raise SiteError if a study (name, and the limit ``bytes``) allows no reply of this size."""
    sent, most = sent_bytes(db, str(study["name"])), int(study["bytes"])
    if sent + size > most:
        raise SiteError(
            f"the study {study['name']} has limits.bytes = {most}; {sent} have left, and {size} follow"
        )


def sent_bytes(db: sqlite3.Connection, study: str) -> int:
    """Return the bytes of a study's replies."""
    return int(
        db.execute(
            "SELECT coalesce(sum(bytes), 0) FROM replies WHERE study = ? AND study != ''",
            (study,),
        ).fetchone()[0]
    )


def read_released(state: Path) -> dict[str, dict[str, Any]]:
    """Return what left of each data file, by its SHA-256. Raises SiteError for a record that cannot be read."""
    found: dict[str, dict[str, Any]] = {}
    none = {"models": 0, "surveys": 0, "own_models": 0, "bytes": 0}
    with Record(state).reading() as db:
        rows = db.execute(
            "SELECT data, kind, study, run, sum(count), sum(bytes), min(time), max(time) FROM replies "
            "WHERE kind != '' GROUP BY data, kind, study, run ORDER BY min(time), min(rowid)"
        )
        for data, kind, study, run, count, size, first, last in rows:
            one = found.setdefault(
                data, {"from": first, "to": last, **none, "runs": set(), "studies": {}}
            )
            one["from"], one["to"] = min(one["from"], first), max(one["to"], last)
            one[KINDS[kind]] += count
            one["bytes"] += size
            one["runs"] |= {run} - {""}
            one["studies"][study] = one["studies"].get(study, 0) + (
                count if kind == "model" else 0
            )
    return {data: {**one, "runs": sorted(one["runs"])} for data, one in found.items()}
