"""What this site's record has of its messages, over all runs: counters, what left, own models that left (`record.py`).

They are compared with the rules of its policy and with the limits of its studies. A message counts before it is
answered, and bytes before they leave, so both also count if the process is killed. The server assigns a run's number.
So it can start new runs at will; only ``runs-per-day`` and a study's limits bound that. Approving a study again, or a
new version of it under its name, does not reset its counts.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..protocol.parsed import SiteError
from ..protocol.policy import Policy
from ..protocol.study import StudyLimits, StudyProtocol
from .record import Record, disclose

BYTES = "bytes"
# For a kind of message, besides `max_messages`
RULES = {"train": "max_rounds", "evaluate": "max_evaluations"}
# Of a study, besides `messages`
LIMITS = {"train": "rounds", "evaluate": "evaluations", "query": "queries"}


def counted_limits(policy: Policy, kind: str) -> dict[str, int]:
    """Return the rules that count a message of this kind, with their limits, without those that allow any number."""
    names = ("runs_per_day", *([RULES[kind]] if kind in RULES else []), "max_messages")
    return {name: limit for name in names if (limit := getattr(policy, name))}


def count_faults(
    db: sqlite3.Connection, policy: Policy, run: str, silo: str, kind: str, day: str
) -> list[str]:
    """Return which rules do not allow another message of this run to this silo on this day."""
    faults, limits = [], counted_limits(policy, kind)
    if "runs_per_day" in limits:
        runs = {
            number
            for (number,) in db.execute(
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
    rows = "FROM messages WHERE study = ? AND study != '' AND silo = ?" + (
        "" if before is None else " AND rowid < ?"
    )
    place = (study, silo) if before is None else (study, silo, before)
    runs, days, messages = db.execute(
        f"SELECT count(DISTINCT run), count(DISTINCT day), count(*) {rows}", place
    ).fetchone()
    kinds = dict(db.execute(f"SELECT kind, count(*) {rows} GROUP BY kind", place))
    counts = {limit: kinds.get(kind, 0) for kind, limit in LIMITS.items()}
    return {"runs": runs, "days": days, "messages": messages, **counts}


def study_budget(
    db: sqlite3.Connection, name: str, silo: str, size: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return a silo's use of each limit of a study without its last message, and with it; its reply has ``size`` bytes.

    A silo answers one message at a time, and each counts before its reply.
    """
    rows = "FROM messages WHERE study = ? AND study != '' AND silo = ?"
    (last,) = db.execute(f"SELECT max(rowid) {rows}", (name, silo)).fetchone()
    sent = sent_bytes(db, name)
    return {**count_used(db, name, silo, last), BYTES: sent}, {
        **count_used(db, name, silo),
        BYTES: sent + size,
    }


def count_used_up(state: Path, study: StudyProtocol) -> dict[str, int]:
    """Return the use of each limit: the largest of all silos in this state directory."""
    used = dict.fromkeys(StudyLimits.model_fields, 0)
    with Record(state).reading() as db:
        names = db.execute(
            "SELECT DISTINCT silo FROM messages WHERE study = ? AND study != ''", (study.name,)
        )
        for (silo,) in list(names):
            used |= {
                name: max(used[name], count)
                for name, count in count_used(db, study.name, silo).items()
            }
        return {**used, BYTES: sent_bytes(db, study.name)}


# --- what left ---
# The total of what has ever left from each version of this silo's data file; kept, since old logs may be moved away.
# Replies are rows of the record, written with their line of the audit log before they leave.


KINDS = {"model": "models", "survey": "surveys", "own model": "own_models"}


def charge_bytes(db: sqlite3.Connection, study: StudyProtocol, size: int) -> None:
    """Raise SiteError if a study allows no reply of this size."""
    sent, most = sent_bytes(db, study.name), study.limits.bytes
    if sent + size > most:
        raise SiteError(
            f"the study {study.name} has limits.bytes = {most}; {sent} have left, and {size} follow"
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
    of_data: dict[str, dict[str, Any]] = {}
    none = {"models": 0, "surveys": 0, "own_models": 0, "bytes": 0}
    with Record(state).reading() as db:
        rows = db.execute(
            "SELECT data, kind, study, run, sum(count), sum(bytes), min(time), max(time) FROM replies "
            "WHERE kind != '' GROUP BY data, kind, study, run ORDER BY min(time), min(rowid)"
        )
        for data, kind, study, run, count, size, first, last in rows:
            released = of_data.setdefault(
                data, {"from": first, "to": last, **none, "runs": set(), "studies": {}}
            )
            released["from"], released["to"] = (
                min(released["from"], first),
                max(released["to"], last),
            )
            released[KINDS[kind]] += count
            released["bytes"] += size
            released["runs"] |= {run} - {""}
            released["studies"][study] = released["studies"].get(study, 0) + (
                count if kind == "model" else 0
            )
    return {
        data: {**released, "runs": sorted(released["runs"])}
        for data, released in of_data.items()
    }


# --- models of the silo's own that have left ---
# One per run, after which the run trains no further here. Every name of a run counts. Flower's number identifies one
# submission: one model leaves per number, whatever run its messages name. A model is noted under all numbers of its
# training, with commas, and under that of the message. A silo stores its state under the run's own id, which stays the
# same when the run is resumed under another number. So a server cannot get the model at several rounds of one training,
# nor the models of many trainings in one run.


KIND = "own model"
Names = tuple[str, frozenset[str]]  # the run's own id, and Flower's numbers


def run_number(run: int) -> str:
    """Return Flower's number of a run in the form that the record uses."""
    return f"{run:016x}"


def names_of(sent: Mapping[str, Any], run: int, trained: Iterable[str] = ()) -> Names:
    """Return a run's names in the record, from its message's config and Flower's number; ``trained``: earlier ones."""
    number = run_number(run)
    name = str(sent.get("run_id") or number)  # as in client/store.py
    return hashlib.sha256(name.encode()).hexdigest(), frozenset({number, *trained})


def claim_own_model(state: Any, run: Names, silo: str, data: str, model: str) -> str:
    """Note that this model is about to leave. Return why it may not, or an empty text; the same model may leave again.

    ``data``, ``model``: their SHA-256. Raises SiteError if it cannot be noted.
    """
    if not state:
        return "it has no state-dir to note that its own model leaves"
    numbers = ",".join(sorted(run[1]))
    with Record(Path(str(state))).write() as db:
        if _models(db, run, silo) - {model}:
            return "its own model leaves once per run, and another one of this run has left"
        disclose(db, KIND, silo=silo, run=run[0], data=data, model=model, question=numbers)
    return ""


def has_left(state: Any, run: Names, silo: str) -> bool:
    """Return whether a model of this silo has left in this run. Raises SiteError if the record cannot be read."""
    if not state:
        return False
    with Record(Path(str(state))).reading() as db:
        return bool(_models(db, run, silo))


def _models(db: sqlite3.Connection, run: Names, silo: str) -> set[str]:
    """Return the models of a silo that have left under one of the run's names."""
    rows = db.execute(
        "SELECT model, run, question FROM disclosed WHERE kind = ? AND silo = ?", (KIND, silo)
    )
    return {
        model
        for model, name, numbers in rows
        if name == run[0] or run[1] & {*numbers.split(",")}
    }
