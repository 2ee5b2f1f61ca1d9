"""Counters of the messages that this site has answered, over all runs, kept in its record (`record.py`).

They are compared with the rules of its policy and with the limits of its studies. A message counts before it is
answered, and bytes before they leave, so both also count if the process is killed. The server assigns a run's number.
So it can start new runs at will; only ``runs-per-day`` and a study's limits bound that. Approving a study again, or a
new version of it under its name, does not reset its counts.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .record import Record
from .released import sent_bytes
from .study.protocol import StudyLimits, StudyProtocol
from .trust.policy import Policy

BYTES = "bytes"
# For a kind of message, besides `max_messages`
RULES = {"train": "max_rounds", "evaluate": "max_evaluations"}
# Of a study, besides `messages`
LIMITS = {"train": "rounds", "evaluate": "evaluations", "query": "queries"}


def limits_of(policy: Policy, kind: str) -> dict[str, int]:
    """Return the rules that count a message of this kind, with their limits, without those that allow any number."""
    names = ("runs_per_day", *([RULES[kind]] if kind in RULES else []), "max_messages")
    return {name: limit for name in names if (limit := getattr(policy, name))}


def count_faults(
    db: sqlite3.Connection, policy: Policy, run: str, silo: str, kind: str, day: str
) -> list[str]:
    """Return which rules do not allow another message of this run to this silo on this day."""
    faults, limits = [], limits_of(policy, kind)
    if "runs_per_day" in limits:
        runs = {
            found
            for (found,) in db.execute(
                "SELECT DISTINCT run FROM messages WHERE day = ?", (day,)
            )
        }
        if run not in runs and len(runs) >= policy.runs_per_day:
            rule = policy.line("runs_per_day")
            faults.append(f"its policy has {rule}, and this is run {len(runs) + 1} of {day}")
    counts = dict(
        db.execute(
            "SELECT kind, count(*) FROM messages WHERE run = ? AND silo = ? GROUP BY kind",
            (run, silo),
        )
    )
    for name in [name for name in limits if name != "runs_per_day"]:
        count = sum(counts.values()) if name == "max_messages" else counts.get(kind, 0)
        if count >= limits[name]:
            faults.append(
                f"its policy has {policy.line(name)}, and this is number {count + 1} of run {run}"
            )
    return faults


def study_faults(
    db: sqlite3.Connection, study: StudyProtocol, silo: str, run: str, kind: str, day: str
) -> list[str]:
    """Return which limits of a study do not allow another message to this silo."""
    limits, before = dict(study.limits), count_used(db, study.name, silo)
    has = "SELECT 1 FROM messages WHERE study = ? AND silo = ? AND {} = ? LIMIT 1"
    after = {**before, "messages": before["messages"] + 1}
    if kind in LIMITS:
        after[LIMITS[kind]] += 1
    for name, key, value in (("runs", "run", run), ("days", "day", day)):
        after[name] += db.execute(has.format(key), (study.name, silo, value)).fetchone() is None
    return [
        f"the study {study.name} has limits.{name} = {limits[name]}, and this is number {count}: it is used up here"
        for name, count in after.items()
        if count > limits[name] and count > before[name]
    ]


def count_used(
    db: sqlite3.Connection, study: str, silo: str, before: int | None = None
) -> dict[str, int]:
    """Count what a silo has answered in a study, by the names of the limits; ``before``: a row of `messages`."""
    own = "FROM messages WHERE study = ? AND study != '' AND silo = ?" + (
        "" if before is None else " AND rowid < ?"
    )
    place = (study, silo) if before is None else (study, silo, before)
    runs, days, messages = db.execute(
        f"SELECT count(DISTINCT run), count(DISTINCT day), count(*) {own}", place
    ).fetchone()
    kinds = dict(db.execute(f"SELECT kind, count(*) {own} GROUP BY kind", place))
    counts = {limit: kinds.get(kind, 0) for kind, limit in LIMITS.items()}
    return {"runs": runs, "days": days, "messages": messages, **counts}


def budget_of(
    db: sqlite3.Connection, study: Mapping[str, Any], silo: str, size: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return this silo's use of each limit without its last message, and with it; its reply has ``size`` bytes.

    A silo answers one message at a time, and each counts before its reply.
    """
    name = str(study["name"])
    own = "FROM messages WHERE study = ? AND study != '' AND silo = ?"
    (last,) = db.execute(f"SELECT max(rowid) {own}", (name, silo)).fetchone()
    sent = sent_bytes(db, name)
    return {**count_used(db, name, silo, last), BYTES: sent}, {
        **count_used(db, name, silo),
        BYTES: sent + size,
    }


def count_used_up(state: Path, study: StudyProtocol, silo: str = "") -> dict[str, int]:
    """Return the use of each limit; the largest of all silos in this state directory, if ``silo`` is empty."""
    found = dict.fromkeys(StudyLimits.model_fields, 0)
    with Record(state).reading() as db:
        names = db.execute(
            "SELECT DISTINCT silo FROM messages WHERE study = ? AND study != ''", (study.name,)
        )
        for one in [silo] if silo else [name for (name,) in names]:
            found |= {
                name: max(found[name], count)
                for name, count in count_used(db, study.name, one).items()
            }
        return {**found, BYTES: sent_bytes(db, study.name)}
