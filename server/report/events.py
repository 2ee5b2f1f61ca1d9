"""Events of a run's ``progress.jsonl``: its notes, and the reasons why silos were rejected or bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from server.results.history import Row

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Note:
    """A line of the run's log: its first time in UTC (empty in a run of 0.1) and its number of occurrences."""

    message: str
    time: str
    times: int


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
    return list(dict.fromkeys(str(e["message"]) for e in events if e["event"] == "note" and e.get("about") == "state"))


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
