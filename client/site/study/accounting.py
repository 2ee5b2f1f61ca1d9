"""A hospital's use of a study's limits, over all its runs, kept in its record (`../record.py`).

A message counts before it is answered, and bytes count before they leave, so both also count if the process is killed.
Approving a study again, or a new version of it under its name, does not reset the counts.
Standard library only, as in trust/policy.py.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..record import Record
from ..released import sent_bytes
from .protocol import Limits, Study

BYTES = "bytes"
COUNTED = {"train": "rounds", "evaluate": "evaluations", "query": "queries"}  # limits, besides `messages`


def folder(name: str) -> str:
    """Return a study's folder in the state directory."""
    return f"studies/{name}"


def study_faults(db: sqlite3.Connection, study: Study, silo: str, run: str, kind: str, day: str) -> list[str]:
    """Return which limits of a study do not allow another message to this silo."""
    limits, before = dict(study.limits), used(db, study.name, silo)
    has = "SELECT 1 FROM messages WHERE study = ? AND silo = ? AND {} = ? LIMIT 1"
    after = {**before, "messages": before["messages"] + 1}
    if kind in COUNTED:
        after[COUNTED[kind]] += 1
    for name, key, value in (("runs", "run", run), ("days", "day", day)):
        after[name] += db.execute(has.format(key), (study.name, silo, value)).fetchone() is None
    return [
        f"the study {study.name} has limits.{name} = {limits[name]}, and this is number {count}: it is used up here"
        for name, count in after.items()
        if count > limits[name] and count > before[name]
    ]


def used(db: sqlite3.Connection, study: str, silo: str) -> dict[str, int]:
    """Count what a silo has answered in a study, by the names of the limits."""
    own = "FROM messages WHERE study = ? AND study != '' AND silo = ?"
    runs, days, messages = db.execute(
        f"SELECT count(DISTINCT run), count(DISTINCT day), count(*) {own}", (study, silo)
    ).fetchone()
    kinds = dict(db.execute(f"SELECT kind, count(*) {own} GROUP BY kind", (study, silo)))
    counts = {limit: kinds.get(kind, 0) for kind, limit in COUNTED.items()}
    return {"runs": runs, "days": days, "messages": messages, **counts}


def budget_of(
    db: sqlite3.Connection, study: Mapping[str, Any], silo: str, size: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return this silo's use of each limit without its last message, and with it; its reply has ``size`` bytes.

    A silo answers one message at a time, and each counts before its reply.
    """
    name = str(study["name"])
    after, sent = used(db, name, silo), sent_bytes(db, name)
    own = "FROM messages WHERE study = ? AND study != '' AND silo = ?"
    last = db.execute(f"SELECT run, day, kind {own} ORDER BY rowid DESC LIMIT 1", (name, silo)).fetchone()
    before = dict(after)
    if last is not None:
        before["messages"] -= 1
        if last[2] in COUNTED:
            before[COUNTED[last[2]]] -= 1
        for limit, key, value in (("runs", "run", last[0]), ("days", "day", last[1])):
            (count,) = db.execute(f"SELECT count(*) {own} AND {key} = ?", (name, silo, value)).fetchone()
            before[limit] -= count == 1
    return {**before, BYTES: sent}, {**after, BYTES: sent + size}


def used_up(state: Path, study: Study, silo: str = "") -> dict[str, int]:
    """Return the use of each limit; the largest of all silos in this state directory, if ``silo`` is empty."""
    found = dict.fromkeys(Limits.model_fields, 0)
    with Record(state).reading() as db:
        names = db.execute("SELECT DISTINCT silo FROM messages WHERE study = ? AND study != ''", (study.name,))
        for one in [silo] if silo else [name for (name,) in names]:
            found |= {name: max(found[name], count) for name, count in used(db, study.name, one).items()}
        return {**found, BYTES: sent_bytes(db, study.name)}
