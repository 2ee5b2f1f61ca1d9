"""What earlier versions noted in files of their own, put into the record once (`record.py`).

    runs-by-day, messages/RUN, studies/NAME/messages, studies/NAME/bytes     counters
    released.json                                                            totals of what left; else the audit log
    own-models, evidence/RUN, statistics/RUN                                 answers that leave once per run
    released-sums.json, released-surveys.json                                answers that are given again
    studies/NAME/study.toml, approval.json, revoked.json                     approved studies
    budget/data/SHA256.json, SHA256.samples                                  whose data were charged

The files are moved to `STATE_DIR/before-record/` and never read again. One that cannot be read allows nothing.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..protocol.chain import EVERY, digest, utc_now
from ..protocol.chain import verify as verify_chain
from ..protocol.envelope import body_of
from ..protocol.parsed import SiteError
from .trust.audit import kind_of, verify

PLACE = "before-record"
MESSAGE = "INSERT INTO messages VALUES (?, ?, ?, ?, ?)"
REPLY = "INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
DISCLOSED = "INSERT INTO disclosed VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
DATA_FILE = "INSERT OR IGNORE INTO data_files VALUES (?, ?, ?, ?, ?, ?, ?)"
APPROVAL = "INSERT OR REPLACE INTO approvals VALUES (?, ?, ?, ?, ?, ?, ?)"


def disclose(
    db: sqlite3.Connection, kind: str, *, people: Iterable[str] = (), **fields: str
) -> None:
    """Note an answer that is about to leave. ``fields``: silo, run, data, model, question, answer; empty if missing."""
    names = ("silo", "run", "data", "model", "question", "answer")
    own = (fields.get(name, "") for name in names)
    db.execute(DISCLOSED, (utc_now(), kind, *own, "\n".join(people)))


def add_reply(db: sqlite3.Connection, entry: Mapping[str, Any], line: int, own: str) -> None:
    """Note a reply that is about to leave, by its line of the audit log, whose hash is ``own``."""
    study = str(entry.get("study", {}).get("name", ""))
    what = (entry["time"], kind_of(entry), 1, str(entry.get("cohort", "")), entry["run-id"])
    db.execute(REPLY, (*what, entry["silo"], study, entry["bytes"], line, own))


def take_over(db: sqlite3.Connection, state: Path) -> list[str]:
    """Put the files of earlier versions into a new record; return their names. Raises SiteError for a damaged one."""
    try:
        readers = _messages, _replies, _take_disclosed, _approvals, _data_files
        names = [name for read in readers for name in read(db, state)]
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
            if kind_of(entry):
                add_reply(db, entry, entry["line"], entry["hash"])
                logged[entry.get("study", {}).get("name", "")] += entry["bytes"]
    for file in sorted(state.glob("studies/*/bytes")):
        # Also of replies without a row of their own
        sent = sum(int(size) for (size,) in _words(file, 1))
        _total(db, study=file.parent.name, size=max(sent - logged[file.parent.name], 0))


def _totals(db: sqlite3.Connection, content: dict[str, dict[str, Any]]) -> None:
    """Take over `released.json`, whose totals have no replies of their own."""
    for data, one in content.items():
        first, last = str(one["from"]), str(one["to"])
        for when, run in [(first, ""), *[(last, str(run)) for run in one["runs"]]]:
            _total(db, when, "model", 0, data, run)
        for study, count in one["studies"].items():
            _total(db, last, "model", int(count), data, study=str(study))
        _total(db, last, "survey", int(one.get("surveys", 0)), data)
        _total(db, last, "own model", int(one.get("own_models", 0)), data)
        _total(db, last, "model", 0, data, size=int(one["bytes"]))


def _total(
    db: sqlite3.Connection,
    when: str = "",
    kind: str = "",
    count: int = 0,
    data: str = "",
    run: str = "",
    study: str = "",
    size: int = 0,
) -> None:
    db.execute(REPLY, (when, kind, count, data, run, "", study, size, 0, ""))


def _take_disclosed(db: sqlite3.Connection, state: Path) -> Iterator[str]:
    """Take over the answers that leave once per run; of evidence the earlier versions noted no model."""
    for model, run, numbers, *silo in _words(state / "own-models", 4):
        names = {"silo": " ".join(silo), "run": run}
        disclose(db, "own model", **names, model=model, question=numbers)
    yield "own-models"
    for file in sorted(state.glob("evidence/*")):
        for _, question, *silo in _words(file, 3):
            disclose(db, "evidence", silo=" ".join(silo), run=file.name, question=question)
    yield "evidence"
    for file in sorted(state.glob("statistics/*")):
        for own, *silo in _words(file, 2):
            disclose(db, "statistics", silo=" ".join(silo), run=file.name, question=own)
    yield "statistics"
    for one in _answers(state / "released-sums.json"):
        answer = json.dumps({key: one[key] for key in one.keys() - {"day", "samples"}})
        disclose(db, "sums", people=one["samples"], answer=answer)
    yield "released-sums.json"
    for one in _answers(state / "released-surveys.json"):
        answer, question = json.dumps(one["answer"]), str(one["how"])
        disclose(db, "survey", people=one["samples"], question=question, answer=answer)
    yield "released-surveys.json"


def _answers(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def _approvals(db: sqlite3.Connection, state: Path) -> Iterator[str]:
    """Take over the approved studies, as they were approved."""
    for file in sorted(state.glob("studies/*/approval.json")):
        protocol = (file.parent / "study.toml").read_text(encoding="utf-8")
        approval = json.loads(file.read_text())
        if digest(body_of(protocol).encode()) != approval["digest"]:
            raise SiteError(f"{file.parent.name}/study.toml is not what was approved")
        ended = file.parent / "revoked.json"
        revoked = str(json.loads(ended.read_text())["when"]) if ended.exists() else ""
        own = (str(approval[key]) for key in ("by", "when", "signer"))
        db.execute(
            APPROVAL,
            (file.parent.name, protocol, *own, json.dumps(approval["warnings"]), revoked),
        )
    yield "studies"


def _data_files(db: sqlite3.Connection, state: Path) -> Iterator[str]:
    """Take over whose data were charged. A ledger that is missing, or a note that it does not fit, allows nothing."""
    lines = verify_chain(state / "budget", 1, "budget", EVERY).entries
    bound = {line["data"]: line["note"] for line in lines if line.get("note")}
    for file in sorted(state.glob("budget/data/*.json")):
        text = file.read_text(encoding="utf-8")
        samples = file.with_suffix(".samples").read_text(encoding="utf-8")
        note = json.loads(text)
        if (
            bound.get(file.stem) not in (None, digest(text.encode()))
            or digest(samples.encode()) != note["samples"]
        ):
            raise SiteError(f"budget/data/{file.stem}: it was changed")
        if not lines:
            raise SiteError(
                "its ledger is missing; remove budget/data where no run had dp = true"
            )
        counts = str(note["cohort"]), int(note["records"]), note["patients"]
        db.execute(
            DATA_FILE, (file.stem, str(note["silo"]), *counts, " ".join(note["links"]), samples)
        )
    yield "budget/data"


def _words(file: Path, least: int) -> Iterator[list[str]]:
    """Yield the words of each line; a last one that was torn by a crash is skipped."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) >= least:
            yield words
