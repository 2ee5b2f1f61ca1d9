"""What earlier versions noted in files of their own, put into the record once (`record.py`).

    runs-by-day, messages/RUN, studies/NAME/messages, studies/NAME/bytes     counters
    released.json                                                            totals of what left; else the audit log
    own-models, evidence/RUN, statistics/RUN                                 answers that leave once per run
    released-sums.json, released-surveys.json                                answers that are given again

The files are moved to `STATE_DIR/before-record/` and never read again. One that cannot be read allows nothing.

Standard library only, as in trust/policy.py.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import SiteError
from .trust.audit import is_exact, kind_of, verify
from .trust.chain import utc_now

PLACE = "before-record"
MESSAGE = "INSERT INTO messages VALUES (?, ?, ?, ?, ?)"
REPLY = "INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
DISCLOSED = "INSERT INTO disclosed VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def take_over(db: sqlite3.Connection, state: Path) -> list[str]:
    """Put the files of earlier versions into a new record; return their names. Raises SiteError for a damaged one."""
    try:
        names = [*_messages(db, state), *_replies(db, state), *_disclosed(db, state)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SiteError(
            f"what an earlier version noted in {state} cannot be taken over ({type(error).__name__}: {error}): restore "
            "the folder from a backup"
        ) from None
    return [name for name in names if (state / name).exists()]


def _messages(db: sqlite3.Connection, state: Path) -> Iterator[str]:
    """Take over the counters; a message that a study counted was also counted for its run, and is one row."""
    in_study = Counter[tuple[str, str, str]]()
    for file in sorted(state.glob("studies/*/messages")):
        for day, run, kind, *silo in _words(file, 4):
            in_study[run, kind, " ".join(silo)] += 1
            db.execute(MESSAGE, (day, run, " ".join(silo), kind, file.parent.name))
        yield f"studies/{file.parent.name}/messages"
    for file in sorted(state.glob("messages/*")):
        for kind, *silo in _words(file, 2):
            key = file.name, kind, " ".join(silo)
            if in_study[key]:
                in_study[key] -= 1
            else:
                db.execute(MESSAGE, ("", file.name, key[2], kind, ""))
    yield "messages"
    for day, run in _words(state / "runs-by-day", 2):
        db.execute(MESSAGE, (day, run, "", "", ""))
    yield "runs-by-day"


def _replies(db: sqlite3.Connection, state: Path) -> Iterator[str]:
    """Take over the totals of what left of each data file, and of each study's bytes."""
    logged = Counter[str]()
    file = state / "released.json"
    if file.exists():
        _totals(db, json.loads(file.read_text(encoding="utf-8")))
        yield file.name
    else:
        for entry in verify(state / "audit").entries:
            if kind := kind_of(entry):
                study = entry.get("study", {}).get("name", "")
                what = entry["time"], kind, 1, entry.get("cohort", ""), entry["run-id"], entry["silo"], study
                db.execute(REPLY, (*what, is_exact(entry), entry["bytes"], entry["line"], entry["hash"]))
                logged[study] += entry["bytes"]
    for file in sorted(state.glob("studies/*/bytes")):
        name = file.parent.name
        rest = sum(int(size) for (size,) in _words(file, 1)) - logged[name]  # of replies without a row of their own
        db.execute(REPLY, ("", "", 0, "", "", "", name, 0, max(rest, 0), 0, ""))
        yield f"studies/{name}/bytes"


def _totals(db: sqlite3.Connection, content: dict[str, dict[str, Any]]) -> None:
    """Take over `released.json`, whose totals have no replies of their own."""
    for data, one in content.items():
        counts = {"survey": int(one.get("surveys", 0)), "own model": int(one.get("own_models", 0))}
        studies = {str(name): int(count) for name, count in one["studies"].items()}
        for time_of, run in [(one["from"], ""), *[(one["to"], run) for run in one["runs"]]]:
            db.execute(REPLY, (str(time_of), "model", 0, data, str(run), "", "", 0, 0, 0, ""))
        for name, count in studies.items():
            db.execute(REPLY, (str(one["to"]), "model", count, data, "", "", name, 0, 0, 0, ""))
        for kind, count in counts.items():
            db.execute(REPLY, (str(one["to"]), kind, count, data, "", "", "", 0, 0, 0, ""))
        db.execute(REPLY, (one["to"], "model", 0, data, "", "", "", int(one.get("exact", 0)), int(one["bytes"]), 0, ""))


def _disclosed(db: sqlite3.Connection, state: Path) -> Iterator[str]:
    """Take over the answers that leave once per run; of evidence the earlier versions noted no model."""
    now = utc_now()
    for model, run, numbers, *silo in _words(state / "own-models", 4):
        db.execute(DISCLOSED, (now, "own model", " ".join(silo), run, "", model, numbers, "", ""))
    yield "own-models"
    for file in sorted(state.glob("evidence/*")):
        for _, question, *silo in _words(file, 3):
            db.execute(DISCLOSED, (now, "evidence", " ".join(silo), file.name, "", "", question, "", ""))
    yield "evidence"
    for file in sorted(state.glob("statistics/*")):
        for own, *silo in _words(file, 2):
            db.execute(DISCLOSED, (now, "statistics", " ".join(silo), file.name, "", "", own, "", ""))
    yield "statistics"
    for name, kind, asked in (("released-sums.json", "sums", ""), ("released-surveys.json", "survey", "how")):
        given = json.loads((state / name).read_text(encoding="utf-8")) if (state / name).exists() else []
        for one in given:
            people, question = "\n".join(one["samples"]), str(one[asked]) if asked else ""
            answer = one["answer"] if asked else {key: one[key] for key in one.keys() - {"day", "samples"}}
            db.execute(DISCLOSED, (now, kind, "", "", "", "", question, json.dumps(answer), people))
        yield name


def _words(file: Path, least: int) -> Iterator[list[str]]:
    """Yield the words of each line; a last one that was torn by a crash is skipped."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) >= least:
            yield words
