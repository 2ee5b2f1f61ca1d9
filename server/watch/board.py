"""State of each run and silo, updated event by event from ``progress.jsonl``.

The events come from the server's or the site's own process, but contain text from silos and from the server. Every
field is checked for its type, and ignored if it has another one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.results.chosen import Chosen, mean
from server.results.history import Row

NOTES = 50  # lines of the log that are shown
POINTS = 400  # maximum points of the curve
PACE = 10  # number of last rounds for the estimate of the remaining time
LATE_FACTOR, LATE_FLOOR = 2.0, 5.0  # a silo is late after this multiple of the others' median, at least these seconds
LONGEST = 500  # maximum characters of a line
ALONE = "local"  # the method without any exchange

Event = Mapping[str, Any]


@dataclass
class SiloState:
    """One silo in one run."""

    doing: str = ""  # train, evaluate; empty once it has answered
    since: float = 0.0  # time of the last request, Unix time
    seconds: float | None = None  # duration of its last reply
    left_out: str = ""  # why its last reply was not used
    missed: int = 0  # rounds that went on without it
    bounded: str = ""
    val: float | None = None
    test: float | None = None


@dataclass
class RunState:
    """One run: a method with a seed."""

    strategy: str
    seed: int
    state: str = "waiting"  # running, stopped early, done, failed
    why: str = ""
    rounds: int = 0
    round: int = 0
    asked: float = 0.0  # start of the current round, Unix time; 0: no round is in progress
    closing: bool = False
    score: str = ""
    silos: dict[str, SiloState] = field(default_factory=dict)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=PACE))
    took: float = 0.0  # all rounds together
    bytes: int = 0
    down: int = 0
    up: int = 0
    transfer: str = ""
    epsilon: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    chosen: Chosen = field(default_factory=lambda: Chosen("", ""))
    best: dict[str, float] = field(default_factory=dict)  # test scores at the chosen round

    @property
    def key(self) -> str:
        return f"{self.strategy}-{self.seed}"

    def silo(self, name: str) -> SiloState:
        return self.silos.setdefault(name, SiloState())

    def left(self) -> float | None:
        """Return the estimated seconds to the end from the last rounds; None if unknown."""
        if self.state != "running" or not self.seconds or not self.rounds:
            return None
        return statistics.fmean(self.seconds) * max(self.rounds - self.round, 0)

    def late(self, now: float) -> dict[str, float]:
        """Return the late silos with the seconds since their request; empty until half of the silos have answered."""
        waiting = {name: now - silo.since for name, silo in self.silos.items() if silo.doing and silo.since}
        took = [s.seconds for s in self.silos.values() if not s.doing and s.since == self.asked and s.seconds]
        if not waiting or len(took) < (len(waiting) + len(took) + 1) // 2:
            return {}
        limit = max(LATE_FLOOR, LATE_FACTOR * statistics.median(took))
        return {name: seconds for name, seconds in waiting.items() if seconds > limit}


class Board:
    """All runs of one directory. ``own``: keep only this silo's row, and ignore other silos in the events."""

    def __init__(self, own: str = "") -> None:
        self.own = own
        self.runs: dict[tuple[str, int], RunState] = {}
        self.current: RunState | None = None
        self.notes: deque[tuple[str, str]] = deque(maxlen=NOTES)  # (time, line)
        self.handlers = {
            "begin": self._begin,
            "reply": self._reply,
            "round": self._round,
            "closed": self._closed,
            "transfer": self._transfer,
            "silos": self._silos,
            "left_out": self._left_out,
            "stopped": self._stopped,
            "error": self._error,
            "done": self._done,
        }

    def take(self, event: Event) -> None:
        """Process one event; unknown kinds are ignored."""
        kind = text(event.get("event"))
        if kind in ("note", "refused", "stopped", "error", "left_out"):
            self.notes.append((text(event.get("time")), line(event.get("message"))))
        handler = self.handlers.get(kind)
        strategy, seed = text(event.get("strategy")), whole(event.get("seed"))
        if handler is None or not strategy or seed is None:
            return
        run = self.runs.setdefault((strategy, seed), RunState(strategy, seed))
        if self.current is None or kind in ("begin", "round") or self.current.state != "running":
            self.current = run
        handler(run, event)

    def _names(self, value: object) -> Iterator[tuple[str, Any]]:
        """Yield the entries of a table by silo; on a site's own page only the site's entry."""
        for name, found in value.items() if isinstance(value, Mapping) else ():
            if isinstance(name, str) and self.own in ("", name):
                yield name, found

    def _silos(self, run: RunState, event: Event) -> None:
        for name, _ in self._names(event.get("samples")):
            run.silo(name)
        for name, why in self._names(event.get("left_out")):
            run.silo(name).left_out = line(why)

    def _left_out(self, run: RunState, event: Event) -> None:
        """Record that the site failed on a message: the round goes on without it."""
        for name, why in self._names({text(event.get("silo")): event.get("message")}):
            silo = run.silo(name)
            silo.doing, silo.left_out = "", line(why)
            silo.missed += 1
            run.asked = 0.0

    def _begin(self, run: RunState, event: Event) -> None:
        run.state, run.why, run.transfer = "running", "", ""
        run.rounds = whole(event.get("rounds")) or run.rounds
        run.closing = event.get("closing") is True
        run.asked = number(event.get("time")) or 0.0
        for silo in run.silos.values():
            silo.doing = ""
        for name, kind in self._names(event.get("silos")):
            silo = run.silo(name)
            silo.doing, silo.since = text(kind), run.asked

    def _reply(self, run: RunState, event: Event) -> None:
        for name, seconds in self._names({text(event.get("silo")): event.get("seconds")}):
            silo = run.silo(name)
            silo.doing, silo.seconds = "", number(seconds)
            run.transfer = ""

    def _round(self, run: RunState, event: Event) -> None:
        run.state = "running"
        run.round, run.rounds = whole(event.get("round")) or 0, whole(event.get("rounds")) or 0
        seconds = number(event.get("seconds")) or 0.0
        run.seconds.append(seconds)
        run.took += seconds
        run.bytes += whole(event.get("bytes")) or 0
        run.down += whole(event.get("bytes_down")) or 0
        run.up += whole(event.get("bytes_up")) or 0
        run.epsilon |= {n: v for n, found in self._names(event.get("epsilon")) if (v := number(found)) is not None}
        run.asked, run.transfer = 0.0, ""
        bounded = dict(self._names(event.get("bounded")))
        rejected = dict(self._names(event.get("rejected")))
        for name in rejected:
            run.silo(name)
        for name, silo in run.silos.items():
            silo.doing = ""
            silo.left_out, silo.bounded = line(rejected.get(name, "")), line(bounded.get(name, ""))
            silo.missed += name in rejected
        self._scores(run, event, run.round)
        values = [silo.test for silo in run.silos.values() if silo.test is not None]
        if not run.curve or run.curve[-1][0] != run.round:
            known = mean({n: s.val for n, s in run.silos.items() if s.val is not None})
            shown = statistics.fmean(values) if values else None
            run.curve.append((run.round, known if math.isfinite(known) else None, shown))

    def _scores(self, run: RunState, event: Event, server_round: int) -> None:
        """Store the silos' scores of a round, and update the round that the report would show."""
        score = text(event.get("score"))
        if score and run.score != score:
            run.score, run.chosen = score, Chosen("", score)
        rows = []
        for name, found in self._names(event.get("per_silo")):
            silo = run.silo(name)
            for split in ("val", "test"):
                value = number(found.get(split)) if isinstance(found, Mapping) else None
                if value is not None:
                    setattr(silo, split, value)
                    rows.append(Row(run.strategy, run.seed, server_round, name, split, "", run.score, value, None))
            seconds = number(found.get("seconds")) if isinstance(found, Mapping) else None
            silo.seconds = silo.seconds if seconds is None else seconds
        run.chosen.add(rows)
        if rows and run.chosen.round == server_round:
            run.best = {name: silo.test for name, silo in run.silos.items() if silo.test is not None}

    def _closed(self, run: RunState, event: Event) -> None:
        self._scores(run, event, (whole(event.get("number")) or run.round) + 1)
        for silo in run.silos.values():
            silo.doing = ""
        run.asked = 0.0

    def _transfer(self, run: RunState, event: Event) -> None:
        run.transfer = "" if self.own else line(event.get("message"))

    def _stopped(self, run: RunState, event: Event) -> None:
        run.why = line(event.get("message"))

    def _error(self, run: RunState, event: Event) -> None:
        run.state, run.why, run.asked = "failed", line(event.get("message")), 0.0

    def _done(self, run: RunState, event: Event) -> None:
        run.state, run.asked = "done", 0.0
        for silo in run.silos.values():
            silo.doing = ""

    # -- the picture --------------------------------------------------------------------------------------------------

    def alone(self, run: RunState) -> Mapping[str, float]:
        """Return the silos' test scores of a finished ``local`` run with the same seed; empty if there is none."""
        found = self.runs.get((ALONE, run.seed))
        return found.best if found is not None and found is not run and found.state == "done" else {}

    def picture(self, now: float | None = None) -> dict[str, Any]:
        """Return the content of page, terminal and metrics as JSON values. ``now``: Unix time, default the present."""
        now = time.time() if now is None else now
        run = self.current
        return {
            "now": now,
            "site": self.own,
            "notes": [{"time": when, "text": found} for when, found in reversed(self.notes)],
            "runs": [self._overview(found) for found in self.runs.values()],
            "run": None if run is None else self._detail(run, now),
        }

    def _overview(self, run: RunState) -> dict[str, Any]:
        validation = mean(run.chosen.best) if run.chosen.best else None
        best = statistics.fmean(run.best.values()) if run.best else None
        gains = [gain for silo in run.best if (gain := self._gain(run, silo)) is not None]
        return {
            "strategy": run.strategy,
            "seed": run.seed,
            "state": run.state,
            "round": run.round,
            "rounds": run.rounds,
            "score": run.score,
            "best_round": run.chosen.round or None,  # the closing evaluation has the last round's number plus one
            "best_when": "" if not run.chosen.round else _when(run.chosen.round, run.round),
            "best_validation": validation,
            "best_test": best,
            "gain": statistics.fmean(gains) if gains else None,
        }

    def _gain(self, run: RunState, silo: str) -> float | None:
        alone = self.alone(run)
        return run.best[silo] - alone[silo] if silo in run.best and silo in alone else None

    def _detail(self, run: RunState, now: float) -> dict[str, Any]:
        late = run.late(now)
        every = max(1, math.ceil(len(run.curve) / POINTS))
        return {
            **self._overview(run),
            "why": run.why,
            "closing": run.closing,
            "asked": run.asked or None,
            "pace": statistics.fmean(run.seconds) if run.seconds else None,
            "left": run.left(),
            "took": run.took,
            "bytes": run.bytes,
            "bytes_down": run.down,
            "bytes_up": run.up,
            "transfer": run.transfer,
            "curve": run.curve[::-1][::every][::-1],
            "silos": [
                {
                    "name": name,
                    "doing": "late" if name in late else silo.doing,
                    "since": silo.since or None,
                    "seconds": silo.seconds,
                    "left_out": silo.left_out,
                    "bounded": silo.bounded,
                    "missed": silo.missed,
                    "validation": silo.val,
                    "test": silo.test,
                    "gain": self._gain(run, name),
                    "epsilon": run.epsilon.get(name),
                }
                for name, silo in sorted(run.silos.items())
            ],
        }


def _when(number: int, last: int) -> str:
    """Return a round's name as in the report."""
    return str(number) if number <= last else f"after {last}"


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def line(value: object) -> str:
    """Return a text as one line of at most :data:`LONGEST` characters."""
    return " ".join(text(value).split())[:LONGEST]


def number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None
