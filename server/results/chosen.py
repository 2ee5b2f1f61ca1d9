"""The round that a run's report takes its scores from, tracked round by round: overall, and for each silo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from server.results.history import Row


class Chosen:
    """The round with the best mean validation score; without validation data, the last tested round.

    The result equals that of :func:`server.results.summary.run_summary` on the whole history. It is updated round by
    round, so that the time per round does not grow. A silo that misses a round keeps its last earlier score, or else
    has its first one. A round is better if its mean is higher by more than ``min_delta``.
    """

    def __init__(self, snapshot: str, score: str, min_delta: float = 0.0) -> None:
        self.snapshot = snapshot
        self.score = score
        self.min_delta = min_delta
        self.round = 0  # 0: nothing is evaluated yet
        self.evaluated = 0  # the last evaluated round
        self.rounds: dict[str, int] = {}  # silo -> the round of its score
        self._last: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._best: dict[str, float] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Add the history's rows of the next round."""
        known = [
            r
            for r in rows
            if (r.snapshot, r.metric) == (self.snapshot, self.score)
            and r.split in ("val", "test")
            and not math.isnan(r.value)
        ]
        if not known:
            return
        self.evaluated = number = known[0].round
        found = {r.silo: r.value for r in known if r.split == "val"}
        for silo in {r.silo for r in known}:
            if silo not in self._last:  # its first score also applies to earlier rounds
                self.rounds[silo] = number
                self._best |= {silo: found[silo]} if silo in found else {}
            self._last[silo] = number
            self._values.pop(silo, None)
        self._values |= found
        if (
            mean(self._values) > mean(self._best) + self.min_delta
            or not self._best
            or not self.round
        ):
            self.round = number
            self.rounds = dict(self._last)
            self._best = dict(self._values)

    @property
    def best(self) -> dict[str, float]:
        """The silos' validation scores at the chosen round; empty if there are none."""
        return dict(self._best)

    @property
    def validated(self) -> bool:
        """Whether a silo has reported a validation score."""
        return bool(self._best)

    def of(self, silos: Iterable[str]) -> dict[str, int]:
        """Return each silo's round, or the chosen one if its scores are withheld; empty before the first score."""
        return {silo: self.rounds.get(silo, self.round) for silo in silos} if self.round else {}


def mean(values: Mapping[str, float]) -> float:
    """Return the mean over silos; -inf if empty. The sum runs in the order of the names, for equal last bits."""
    return sum(values[name] for name in sorted(values)) / len(values) if values else -math.inf
