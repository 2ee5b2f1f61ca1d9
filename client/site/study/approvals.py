"""The studies that this site has approved: rows of its record (`../record.py`), and lines of its audit log."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.chain import utc_now
from ...protocol.parsed import SiteError
from ...protocol.policy import Policy
from ...protocol.study import StudyProtocol, parse_study
from ..record import Record

REQUIRED = "required"
APPROVAL = "INSERT OR REPLACE INTO approvals VALUES (?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True)
class Approved:
    """A study of this site, and its state."""

    study: StudyProtocol
    by: str
    when: str
    signer: str  # the signer's fingerprint; empty: unsigned
    revoked: str = ""  # when it was ended; empty: it holds


def study_for(policy: Policy, state: Any, run: Mapping[str, Any]) -> StudyProtocol | None:
    """Return the approved study that a run names; None if it names none and needs none.

    Raises SiteError, one line, if the policy requires a study, or if the named one is not approved here.
    """
    name = str(run.get("study") or "")
    if not name and policy.studies != REQUIRED:
        return None
    if not name:
        raise SiteError(
            f"its policy has {policy.line('studies')}, and the run names none: study = NAME"
        )
    approved = find(Path(str(state)), name) if state else None
    if approved is None:
        raise SiteError(f"no study {name[:80]!r} is approved here: silofl approve FILE")
    if approved.revoked:
        raise SiteError(f"the study {name} was revoked here on {approved.revoked[:10]}")
    return approved.study


def find(state: Path, name: str) -> Approved | None:
    """Return the study of this name; None if it was never approved here. Raises SiteError if it cannot be read."""
    with Record(state).reading() as db:
        return _find(db, name)


def list_approved(state: Path) -> list[Approved]:
    """Return all studies of this site, by name. Raises SiteError if one cannot be read."""
    with Record(state).reading() as db:
        names = db.execute("SELECT name FROM approvals ORDER BY name").fetchall()
        return [study for (name,) in names if (study := _find(db, name))]


def record_approval(
    state: Path, silo: str, text: str, by: str, signer: str, warnings: Iterable[str]
) -> StudyProtocol:
    """Store a study as approved, together with its line in the audit log. Raises SiteError, OSError.

    Another version of a study that holds is refused: a person has to revoke that one first.
    """
    study, listed, record = parse_study(text, "study.toml"), [*warnings], Record(state)
    with record.write() as db:
        before = _find(db, study.name)
        if before and not before.revoked and before.study.digest != study.digest:
            raise SiteError(
                f"another version of the study {study.name} is approved here since {before.when[:10]}: "
                f"silofl revoke {study.name}, then approve this one; what was used so far stays counted"
            )
        db.execute(APPROVAL, (study.name, text, by, utc_now(), signer, json.dumps(listed), ""))
        record.append(
            db, decision(silo, "study approved", study.name, study.digest, by, listed)
        )
    return study


def record_revocation(state: Path, silo: str, name: str, by: str) -> None:
    """End a study at once: its next message is refused. Raises SiteError if there is none of this name."""
    record = Record(state)
    with record.write() as db:
        row = db.execute("SELECT revoked FROM approvals WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise SiteError(
                f"no study {name[:80]!r} is approved here; `silofl studies` lists them"
            )
        if row[0]:
            raise SiteError(f"the study {name} was revoked before; `silofl studies` says when")
        db.execute("UPDATE approvals SET revoked = ? WHERE name = ?", (utc_now(), name))
        record.append(db, decision(silo, "study revoked", name, "", by, []))


def _find(db: sqlite3.Connection, name: str) -> Approved | None:
    row = db.execute(
        "SELECT protocol, by, time, signer, revoked FROM approvals WHERE name = ?", (name,)
    ).fetchone()
    return (
        None
        if row is None
        else Approved(parse_study(row[0], f"the approved study {name}"), *row[1:])
    )


def decision(
    silo: str, what: str, name: str, digest: str, by: str, warnings: list[str]
) -> dict[str, Any]:
    """Return the line of a decision of this site in its audit log."""
    entry = {
        "time": utc_now(),
        "silo": silo,
        "asked-by": by,
        "run-id": "",
        "run": name,
        "round": 0,
        "asked": what,
    }
    entry |= {"method": "", "app": "", "settings": "", "rule": "", "bytes": 0, "sent": []}
    return {**entry, "study": {"name": name, "digest": digest}, "warnings": warnings}
