"""Counters of the runs and messages that this site has answered, kept in the record (`../record.py`).

A message counts before it is answered, so it also counts if its process is killed. The server assigns a run's number,
so it can start new runs at will; only ``runs-per-day`` and a study's limits bound that.
Standard library only, as in policy.py.
"""

from __future__ import annotations

import sqlite3

from .policy import Policy

COUNTED = {"train": "max_rounds", "evaluate": "max_evaluations"}  # rule for a kind of message, besides `max_messages`


def limits_of(policy: Policy, kind: str) -> dict[str, int]:
    """Return the rules that count a message of this kind, with their limits, without those that allow any number."""
    names = ("runs_per_day", *([COUNTED[kind]] if kind in COUNTED else []), "max_messages")
    return {name: limit for name in names if (limit := getattr(policy, name))}


def count_faults(db: sqlite3.Connection, policy: Policy, run: str, silo: str, kind: str, day: str) -> list[str]:
    """Return which rules do not allow another message of this run to this silo on this day."""
    faults, limits = [], limits_of(policy, kind)
    if "runs_per_day" in limits:
        runs = {found for (found,) in db.execute("SELECT DISTINCT run FROM messages WHERE day = ?", (day,))}
        if run not in runs and len(runs) >= policy.runs_per_day:
            rule = policy.line("runs_per_day")
            faults.append(f"its policy has {rule}, and this is run {len(runs) + 1} of {day}")
    counts = dict(
        db.execute("SELECT kind, count(*) FROM messages WHERE run = ? AND silo = ? GROUP BY kind", (run, silo))
    )
    for name in [name for name in limits if name != "runs_per_day"]:
        count = sum(counts.values()) if name == "max_messages" else counts.get(kind, 0)
        if count >= limits[name]:
            faults.append(f"its policy has {policy.line(name)}, and this is number {count + 1} of run {run}")
    return faults
