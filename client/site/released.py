"""The total of what has ever left from each version of this silo's data file; kept, since old logs may be moved away.

    STATE_DIR/released.json    {SHA-256 of the data file: {from, to, models, surveys, exact, bytes, runs,
                                                           own_models, studies: {NAME: models}}}

Training replies, survey answers and the silo's own models count before they leave; `exact`: answers with exact sums for
ComBat. A missing record is rebuilt from the log at hand. A damaged one blocks replies until someone has repaired it.

Standard library only, as in trust/policy.py.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SiteError
from .trust.audit import verify
from .trust.chain import write_whole
from .trust.message_rules import OWN_MODEL

FILE = "released.json"
Record = dict[str, dict[str, Any]]


def is_model(entry: Mapping[str, Any]) -> bool:
    """Return whether a log line is for a training reply, and not for an error in its place."""
    return str(entry.get("asked", "")).partition(".")[0] == "train" and not _failed(entry)


def is_survey(entry: Mapping[str, Any]) -> bool:
    """Return whether a log line is for a survey answer."""
    return str(entry.get("asked", "")) == "query.survey" and not _failed(entry)


def is_own_model(entry: Mapping[str, Any]) -> bool:
    """Return whether a log line is for the silo's own model, sent at the end of a run."""
    return str(entry.get("asked", "")) == OWN_MODEL and not _failed(entry)


def counts(entry: Mapping[str, Any]) -> bool:
    """Return whether a log line is for something that is counted here."""
    return is_model(entry) or is_survey(entry) or is_own_model(entry)


def is_exact(entry: Mapping[str, Any]) -> bool:
    """Return whether a log line is for an answer with exact sums of columns, for ComBat."""
    return is_survey(entry) and any(
        str(key).startswith("combat.") for record in entry["sent"] for key in record.get("keys", ())
    )


def _failed(entry: Mapping[str, Any]) -> bool:
    return any(record["name"] == "error" for record in entry["sent"])


def note_release(state: Path, entry: Mapping[str, Any]) -> None:
    """Count a reply that is about to leave. Raises SiteError or OSError if it cannot be counted."""
    if not counts(entry):
        return
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(state / ".released.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = read_released(state)
        add(found, entry)
        write_whole(state / FILE, json.dumps(found, indent=1) + "\n")
    finally:
        os.close(lock)


def read_released(state: Path) -> Record:
    """Return the record, rebuilt from the log if there is none yet. Raises SiteError for a damaged one."""
    path, found = state / FILE, Record()
    if not path.exists():
        for entry in verify(state / "audit").entries:
            if counts(entry):
                add(found, entry)
        return found
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for cohort, one in content.items():
            fields = {"from": str(one["from"]), "to": str(one["to"]), "models": int(one["models"])}
            fields |= {
                "surveys": int(one.get("surveys", 0)),
                "own_models": int(one.get("own_models", 0)),
                "exact": int(one.get("exact", 0)),
                "bytes": int(one["bytes"]),
                "runs": [*map(str, one["runs"])],
            }
            found[cohort] = {**fields, "studies": {str(name): int(count) for name, count in one["studies"].items()}}
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SiteError(
            f"{path} is damaged ({type(error).__name__}): restore it from a backup; without it, it is made from the log"
        ) from None


def add(found: Record, entry: Mapping[str, Any]) -> None:
    """Add a reply to the record of its data file."""
    time, name = entry["time"], entry.get("study", {}).get("name", "")
    none = {"models": 0, "surveys": 0, "exact": 0, "own_models": 0, "bytes": 0}
    empty: dict[str, Any] = {"from": time, "to": time, **none, "runs": [], "studies": {}}
    one = found.setdefault(str(entry.get("cohort", "")), empty)
    model = is_model(entry)
    one["to"], one["bytes"] = time, one["bytes"] + entry["bytes"]
    one["models" if model else "own_models" if is_own_model(entry) else "surveys"] += 1
    one["exact"] += is_exact(entry)
    one["runs"] = sorted({*one["runs"], str(entry["run-id"])})
    one["studies"][name] = one["studies"].get(name, 0) + model
