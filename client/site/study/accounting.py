"""A hospital's use of a study's limits, over all its runs, kept in its state directory.

A message counts before it is answered, and bytes count before they leave, so both also count if the process is killed.
Approving a study again, or a new version of it under its name, does not reset the counts.
Standard library only, as in trust/policy.py.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import SiteError
from ..trust.counters import noted
from .protocol import Limits, Study

MESSAGES, BYTES = "messages", "bytes"  # files of a study: a line per message (day run kind silo), and per reply (bytes)
COUNTED = {"train": "rounds", "evaluate": "evaluations", "query": "queries"}  # limits, besides `messages`


def folder(name: str) -> str:
    """Return a study's folder in the state directory."""
    return f"studies/{name}"


def count_message(study: Study, state: str, silo: str, run: str, kind: str, day: str) -> str:
    """Note a message of this study to this silo; return why it is not allowed, or an empty text."""
    limits = asdict(study.limits)

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        before = used(lines, silo)
        after = used([*lines, [day, run, kind, *silo.split()]], silo)
        for name, count in after.items():
            if count > limits[name] and count > before[name]:
                limit_text = f"the study {study.name} has limits.{name} = {limits[name]}"
                return "", f"{limit_text}, and this is number {count}: it is used up here"
        return f"{day} {run} {kind} {silo}", ""

    return noted(state, f"{folder(study.name)}/{MESSAGES}", f"limits for the study {study.name}", entry)


def used(lines: list[list[str]], silo: str) -> dict[str, int]:
    """Count what a silo has answered, by the names of the limits, from the words of a study's lines."""
    own = [words for words in lines if words[3:] == silo.split()]
    kinds = [words[2] for words in own]
    counts = {limit: kinds.count(kind) for kind, limit in COUNTED.items()}
    days, runs = {words[0] for words in own}, {words[1] for words in own}
    return {"runs": len(runs), "days": len(days), "messages": len(own), **counts}


def charge_bytes(study: Mapping[str, Any], state: Path, size: int) -> None:
    """Note the bytes of a reply. Raises SiteError if the study allows no more, or if they cannot be counted.

    ``study``: name, and the limit ``bytes``.
    """
    most = int(study["bytes"])

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        sent = sum(int(words[0]) for words in lines if words and words[0].isdecimal())
        if sent + size > most:
            return ("", f"the study {study['name']} has limits.bytes = {most}; {sent} have left, and {size} follow")
        return str(size), ""

    name = str(study["name"])
    if fault := noted(state, f"{folder(name)}/{BYTES}", f"limits for the study {name}", entry):
        raise SiteError(fault)


def budget_of(study: Mapping[str, Any], state: Path, silo: str, size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return this silo's use of each limit without its last message, and with it; its reply has ``size`` bytes.

    A silo answers one message at a time, and each counts before its reply.
    """
    place = state / folder(str(study["name"]))
    own = [words for words in _lines(place / MESSAGES) if words[3:] == silo.split()]
    sent = sum(int(words[0]) for words in _lines(place / BYTES) if words[0].isdecimal())
    return {**used(own[:-1], silo), BYTES: sent - size}, {**used(own, silo), BYTES: sent}


def used_up(state: Path, study: Study, silo: str = "") -> dict[str, int]:
    """Return the use of each limit; the largest of all silos in this state directory, if ``silo`` is empty."""
    lines = _lines(state / folder(study.name) / MESSAGES)
    silos = {" ".join(words[3:]) for words in lines} if not silo else {silo}
    found = dict.fromkeys(Limits.__dataclass_fields__, 0)
    for one in silos:
        found |= {name: max(found[name], count) for name, count in used(lines, one).items()}
    sent = sum(int(words[0]) for words in _lines(state / folder(study.name) / BYTES) if words[0].isdecimal())
    return {**found, BYTES: sent}


def _lines(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    return [line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
