"""State of each run and silo, updated event by event from ``progress.jsonl``.

The events come from the server's or the site's own process, but contain text from silos and from the server. An
event with a field of another type is ignored.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError

from server.results.history import Chosen, Row, mean
from server.results.reading import RunEvent

NOTES = 50  # lines of the log that are shown
# Events whose message is such a line
NOTED = ("note", "refused", "stopped", "error", "left_out")
POINTS = 400  # maximum points of the curve
PACE = 10  # number of last rounds for the estimate of the remaining time
# A silo is late after this multiple of the others' median, at least these seconds
LATE_FACTOR, LATE_FLOOR = 2.0, 5.0
ALONE = "local"  # the method without any exchange
PARTS = {"val": "validation", "test": "test"}


@dataclass
class WatchedSilo:
    """One silo in one run."""

    name: str
    doing: str = ""  # train, evaluate; empty once it has answered
    since: float | None = None  # time of the last request, Unix time
    seconds: float | None = None  # duration of its last reply
    left_out: str = ""  # why its last reply was not used
    bounded: str = ""
    missed: int = 0  # rounds that went on without it
    validation: float | None = None
    test: float | None = None
    epsilon: float | None = None


@dataclass
class WatchedRun:
    """One run: a method with a seed."""

    strategy: str
    seed: int
    state: str = "waiting"  # running, done, failed
    why: str = ""
    rounds: int = 0
    round: int = 0
    # Start of the current round, Unix time; None: no round is in progress
    begun: float | None = None
    closing: bool = False
    score: str = ""
    silos: dict[str, WatchedSilo] = field(default_factory=dict)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=PACE))
    took: float = 0.0  # all rounds together
    bytes: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    transfer: str = ""
    curve: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    chosen: Chosen = field(default_factory=lambda: Chosen("", ""))
    best: dict[str, float] = field(default_factory=dict)  # test scores at the chosen round

    def silo(self, name: str) -> WatchedSilo:
        return self.silos.setdefault(name, WatchedSilo(name))

    def rest(self) -> None:
        """End the current round: no silo's reply is awaited."""
        self.begun = None
        for silo in self.silos.values():
            silo.doing = ""

    def pace(self) -> float | None:
        return statistics.fmean(self.seconds) if self.seconds else None

    def remaining_seconds(self) -> float | None:
        """Return the estimated seconds to the end from the last rounds; None if unknown."""
        pace = self.pace()
        if pace is None or self.state != "running" or not self.rounds:
            return None
        return pace * max(self.rounds - self.round, 0)

    def late(self, now: float) -> set[str]:
        """Return the late silos; empty until half of the silos have answered."""
        waiting = {
            name: now - silo.since
            for name, silo in self.silos.items()
            if silo.doing and silo.since
        }
        took = [
            s.seconds
            for s in self.silos.values()
            if not s.doing and s.since == self.begun and s.seconds
        ]
        if len(took) < (len(waiting) + len(took) + 1) // 2 or not took:
            return set()
        limit = max(LATE_FLOOR, LATE_FACTOR * statistics.median(took))
        return {name for name, seconds in waiting.items() if seconds > limit}

    def scores(self, part: str) -> dict[str, float]:
        """Return the last scores of the silos that have one."""
        by_silo = {name: getattr(silo, part) for name, silo in self.silos.items()}
        return {name: value for name, value in by_silo.items() if value is not None}


@dataclass
class Board:
    """All runs of one directory. ``site``: keep only this silo's row, and ignore other silos in the events."""

    site: str = ""

    def __post_init__(self) -> None:
        self.runs: dict[tuple[str, int], WatchedRun] = {}
        self.current: WatchedRun | None = None
        self.notes: deque[tuple[str, str]] = deque(maxlen=NOTES)  # (time, line)

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one event; what is none, or of an unknown kind, is ignored."""
        try:
            checked = RunEvent.model_validate(event, context=self.site)
        except ValidationError:
            return
        kind, strategy, seed = checked.event, checked.strategy, checked.seed
        if kind in NOTED:
            when = checked.time if isinstance(checked.time, str) else ""
            self.notes.append((when, checked.message))
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None or not strategy or seed is None:
            return
        run = self.runs.setdefault((strategy, seed), WatchedRun(strategy, seed))
        if (
            self.current is None
            or kind in ("begin", "round")
            or self.current.state != "running"
        ):
            self.current = run
        handler(run, checked)

    def _on_silos(self, run: WatchedRun, event: RunEvent) -> None:
        for name in event.samples:
            run.silo(name)

    def _on_left_out(self, run: WatchedRun, event: RunEvent) -> None:
        """Record that the site failed on a message: the round goes on without it."""
        if self.site in ("", event.silo):
            silo = run.silo(event.silo)
            silo.doing, silo.left_out = "", event.message
            silo.missed += 1
            run.begun = None
        if self.site:  # whether others go on is not known here
            run.state, run.why = "failed", event.message

    def _on_begin(self, run: WatchedRun, event: RunEvent) -> None:
        run.rest()
        run.state, run.why, run.transfer = "running", "", ""
        run.rounds = event.rounds or run.rounds
        run.closing = event.closing
        run.begun = None if isinstance(event.time, str) else event.time
        for name, kind in event.silos.items() if isinstance(event.silos, dict) else ():
            silo = run.silo(name)
            silo.doing, silo.since = kind, run.begun

    def _on_reply(self, run: WatchedRun, event: RunEvent) -> None:
        if self.site in ("", event.silo):
            silo = run.silo(event.silo)
            silo.doing, silo.seconds = "", event.seconds
            run.transfer = ""

    def _on_round(self, run: WatchedRun, event: RunEvent) -> None:
        run.rest()
        run.state, run.transfer = "running", ""
        run.round = event.round
        run.rounds = event.rounds
        run.seconds.append(event.seconds)
        run.took += event.seconds
        run.bytes += event.bytes
        run.bytes_down += event.bytes_down
        run.bytes_up += event.bytes_up
        for name, spent in event.epsilon.items():
            run.silo(name).epsilon = spent
        for name in event.rejected:
            run.silo(name).missed += 1
        for name, silo in run.silos.items():
            silo.left_out = event.rejected.get(name, "")
            silo.bounded = event.bounded.get(name, "")
        self._score(run, event, run.round)
        if not run.curve or run.curve[-1][0] != run.round:
            validation, test = (
                mean(scores) if (scores := run.scores(part)) else None
                for part in PARTS.values()
            )
            run.curve.append((run.round, validation, test))

    def _score(self, run: WatchedRun, event: RunEvent, server_round: int) -> None:
        """Store the silos' scores of a round, and update the round that the report would show."""
        if event.score and run.score != event.score:
            run.score = event.score
            run.chosen = Chosen("", event.score)
        rows = []
        for name, scores in event.per_silo.items():
            silo = run.silo(name)
            for split, part in PARTS.items():
                if (value := getattr(scores, split)) is not None:
                    setattr(silo, part, value)
                    of = run.strategy, run.seed, server_round, name, split
                    rows.append(Row(*of, "", run.score, value, None))
        run.chosen.add(rows)
        if rows and run.chosen.round == server_round:
            run.best = run.scores("test")

    def _on_closed(self, run: WatchedRun, event: RunEvent) -> None:
        self._score(run, event, (event.number or run.round) + 1)
        run.rest()

    def _on_transfer(self, run: WatchedRun, event: RunEvent) -> None:
        run.transfer = "" if self.site else event.message

    def _on_stopped(self, run: WatchedRun, event: RunEvent) -> None:
        run.why = event.message

    def _on_error(self, run: WatchedRun, event: RunEvent) -> None:
        run.state = "failed"
        run.why = event.message
        run.begun = None

    def _on_done(self, run: WatchedRun, event: RunEvent) -> None:
        run.rest()
        run.state = "done"

    # -- the picture --------------------------------------------------------------------------------------------------

    def picture(self, now: float | None = None) -> dict[str, Any]:
        """Return the content of page, terminal and metrics as JSON values. ``now``: Unix time, default the present."""
        now = time.time() if now is None else now
        return {
            "now": now,
            "site": self.site,
            "certificates": [],  # of the server, which no event tells
            "notes": [{"time": when, "text": entry} for when, entry in reversed(self.notes)],
            "runs": [self._overview(entry) for entry in self.runs.values()],
            "run": None if self.current is None else self._detail(self.current, now),
        }

    def _gains(self, run: WatchedRun) -> dict[str, float]:
        """Return the silos' gains over a finished ``local`` run with the same seed; empty if there is none."""
        alone = self.runs.get((ALONE, run.seed))
        if alone is None or alone is run or alone.state != "done":
            return {}
        known = alone.best
        return {name: score - known[name] for name, score in run.best.items() if name in known}

    def _overview(self, run: WatchedRun) -> dict[str, Any]:
        gains, chosen = self._gains(run).values(), run.chosen
        # As in the report: the closing evaluation has the last round's number plus one.
        when = str(chosen.round) if chosen.round <= run.round else f"after {run.round}"
        return {
            **{
                key: getattr(run, key)
                for key in ("strategy", "seed", "state", "round", "rounds", "score")
            },
            "best_round": chosen.round or None,
            "best_when": when if chosen.round else "",
            "best_validation": mean(chosen.best) if chosen.best else None,
            "best_test": statistics.fmean(run.best.values()) if run.best else None,
            "gain": statistics.fmean(gains) if gains else None,
        }

    def _heard(self, run: WatchedRun) -> float | None:
        """Return when a site that waits for the server has had its last message, Unix time."""
        silo = run.silos.get(self.site)
        waits = silo is not None and not silo.doing and run.state == "running"
        return silo.since if silo is not None and waits else None

    def _detail(self, run: WatchedRun, now: float) -> dict[str, Any]:
        late, gains = run.late(now), self._gains(run)
        every = max(1, math.ceil(len(run.curve) / POINTS))
        kept = (
            "why",
            "closing",
            "begun",
            "took",
            "bytes",
            "bytes_down",
            "bytes_up",
            "transfer",
        )
        return {
            **self._overview(run),
            **{key: getattr(run, key) for key in kept},
            "heard": self._heard(run),
            "pace": run.pace(),
            "left": run.remaining_seconds(),
            "curve": run.curve[::-1][::every][::-1],
            "silos": [
                asdict(silo)
                | {"doing": "late" if name in late else silo.doing, "gain": gains.get(name)}
                for name, silo in sorted(run.silos.items())
            ],
        }
