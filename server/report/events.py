"""Events of a run's ``progress.jsonl``: its notes, and the reasons why silos were rejected or bounded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from partitions.common.errors import UserError
from server.results.history import Row

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Note:
    """A line of the run's log: its first time in UTC (empty in a run of 0.1) and its number of occurrences."""

    message: str
    time: str
    times: int


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run; a line that a killed run left incomplete is skipped."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [e for e in events if isinstance(e, dict)]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the record in a JSON file; None if there is no file. Raises UserError if it cannot be read."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else None


def notes_of(events: Iterable[Event]) -> list[Note]:
    """Return each note of the log once, with its first time and its count."""
    found: dict[str, Note] = {}
    for event in events:
        if event.get("event") == "note":
            message = str(event["message"])
            first = found.get(message, Note(message, str(event.get("time", "")), 0))
            found[message] = replace(first, times=first.times + 1)
    return list(found.values())


def damages_of(events: Iterable[Event]) -> list[str]:
    """Return the notes on damaged states of silos."""
    return list(dict.fromkeys(str(e["message"]) for e in events if e.get("about") == "state"))


class SiloRounds(NamedTuple):
    """Number of a run's rounds in which an event happened to a silo, and the last reason in the log."""

    strategy: str
    seed: int
    silo: str
    rounds: int
    reason: str


def silo_rounds(rows: Iterable[Row], events: Sequence[Event], metric: str) -> list[SiloRounds]:
    """Return the silos of each run with rows of this metric."""
    counts = Counter((row.strategy, row.seed, row.silo) for row in rows if row.metric == metric)
    reasons = {
        (e.get("strategy"), e.get("seed"), silo): str(reason)
        for e in events
        for silo, reason in (e.get(metric) or {}).items()
    }
    return [SiloRounds(*key, n, reasons.get(key, "")) for key, n in sorted(counts.items())]
