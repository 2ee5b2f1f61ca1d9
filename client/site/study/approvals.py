"""The studies that this site has approved: kept in its state directory, one folder each.

    STATE_DIR/studies/NAME/study.toml       the file, as it was approved
    STATE_DIR/studies/NAME/approval.json    who approved it, when, its digest, its signer, the warnings shown
    STATE_DIR/studies/NAME/revoked.json     who ended it, and when; missing while the approval holds

Standard library only, as in trust/policy.py.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SiteError
from ..record import Record
from ..trust.chain import utc_now, write_whole
from ..trust.policy import Policy
from .accounting import folder
from .protocol import Study, parse_study

STUDY, APPROVAL, REVOKED = "study.toml", "approval.json", "revoked.json"
REQUIRED = "required"


@dataclass(frozen=True)
class Approved:
    """A study of this site, and its state."""

    study: Study
    by: str
    when: str
    signer: str  # the signer's fingerprint; empty: unsigned
    revoked: str = ""  # when it was ended; empty: it holds


def study_for(policy: Policy, state: Any, run: Mapping[str, Any]) -> Study | None:
    """Return the approved study that a run names; None if it names none and needs none.

    Raises SiteError, one line, if the policy requires a study, or if the named one is not approved here.
    """
    name = str(run.get("study") or "")
    if not name and policy.studies != REQUIRED:
        return None
    if not name:
        raise SiteError(f"its policy has {policy.line('studies')}, and the run names none: study = NAME")
    found = find(Path(str(state)), name) if state else None
    if found is None:
        raise SiteError(f"no study {name[:80]!r} is approved here: silofl approve FILE")
    if found.revoked:
        raise SiteError(f"the study {name} was revoked here on {found.revoked[:10]}")
    return found.study


def find(state: Path, name: str) -> Approved | None:
    """Return the study of this name; None if it was never approved here.

    Raises SiteError if its files cannot be read, or differ from the approved ones.
    """
    place = state / folder(name)
    if Path(name).name != name or not (place / APPROVAL).is_file():
        return None
    try:
        text = (place / STUDY).read_text(encoding="utf-8")
        approval = json.loads((place / APPROVAL).read_text(encoding="utf-8"))
        revoked = (place / REVOKED).read_text(encoding="utf-8") if (place / REVOKED).exists() else "{}"
        ended = str(json.loads(revoked).get("when", ""))
        fields = {key: str(approval[key]) for key in ("by", "when", "signer", "digest")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SiteError(f"{place} is damaged ({type(error).__name__}): approve the study again") from None
    study = parse_study(text, str(place / STUDY))
    if study.digest != fields.pop("digest"):
        raise SiteError(f"{place / STUDY} is not what was approved: approve the study again")
    return Approved(study, **fields, revoked=ended)


def approved(state: Path) -> list[Approved]:
    """Return all studies of this site, by name. Raises SiteError if one cannot be read."""
    names = sorted(path.parent.name for path in (state / "studies").glob(f"*/{APPROVAL}"))
    return [one for name in names if (one := find(state, name))]


def approve(state: Path, silo: str, text: str, by: str, signer: str, warnings: Iterable[str]) -> Study:
    """Store a study as approved, after writing the approval to the audit log. Raises SiteError, OSError.

    Another version of a study that holds is refused: a person has to revoke that one first.
    """
    study = parse_study(text, STUDY)
    before = find(state, study.name)
    if before and not before.revoked and before.study.digest != study.digest:
        raise SiteError(
            f"another version of the study {study.name} is approved here since {before.when[:10]}: "
            f"silofl revoke {study.name}, then approve this one; what was used so far stays counted"
        )
    place, when = state / folder(study.name), utc_now()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    note(state, silo, "study approved", study.name, study.digest, by, [*warnings])
    fields = {"by": by, "when": when, "signer": signer, "digest": study.digest, "warnings": [*warnings]}
    write_whole(place / STUDY, text)
    write_whole(place / APPROVAL, json.dumps(fields, indent=1) + "\n")
    (place / REVOKED).unlink(missing_ok=True)
    return study


def revoke(state: Path, silo: str, name: str, by: str) -> None:
    """End a study at once: its next message is refused. Raises SiteError if there is none of this name."""
    place = state / folder(name)
    if Path(name).name != name or not (place / APPROVAL).is_file():
        raise SiteError(f"no study {name[:80]!r} is approved here; `silofl studies` lists them")
    if (place / REVOKED).exists():
        raise SiteError(f"the study {name} was revoked before; `silofl studies` says when")
    write_whole(place / REVOKED, json.dumps({"by": by, "when": utc_now()}) + "\n")
    note(state, silo, "study revoked", name, "", by, [])


def note(state: Path, silo: str, what: str, name: str, digest: str, by: str, warnings: list[str]) -> None:
    """Write a decision of this site into its audit log. Raises OSError."""
    entry = {"time": utc_now(), "silo": silo, "asked-by": by, "run-id": "", "run": name, "round": 0, "asked": what}
    entry |= {"method": "", "app": "", "settings": "", "rule": "", "bytes": 0, "sent": []}
    record = Record(state)
    with record.writing() as db:
        record.append(db, {**entry, "study": {"name": name, "digest": digest}, "warnings": warnings})
