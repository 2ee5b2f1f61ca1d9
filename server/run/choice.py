"""``vectorize = "auto"``: rounds of the run itself say whether silos train together from then on.

Two rounds in turns, two together, and both once more; of these last four the seconds per training sample are compared.
Nothing is computed for that alone, and which way the first rounds go hangs on their numbers only. The choice hangs on
time: it is written down (``vectorize.json`` beside the checkpoint) and holds for whoever continues the run. A run that
is repeated may choose otherwise where both ways take about as long, and agrees with the first one up to the order of
floating-point sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

import torch
from flwr.common import log

from partitions.disk import write_atomically
from strategies.base.settings import Value

WINDOW = 8  # rounds: turns, turns, together, together, and once more
UNTIMED = 4  # of these, the first: data are read, memory is taken, a method's first round may be another one
FEWEST_ROUNDS = 20  # of which four may go the slower way
MANY_ROUNDS = 100  # from which on large networks are tried, too: there the slower way may take half as long again
WORTH = 0.95  # together where it takes less than so much of the time


class Choice:
    """The choice of one run. ``file``: where it is written down (None: nowhere)."""

    def __init__(self, run_config: Mapping[str, Value], file: Path | None = None) -> None:
        self.rounds, self.file = int(run_config["rounds"]), file
        self.first = 0  # round that the window begins with, 0: it has not begun
        self.seconds: dict[str, list[float]] = {"turns": [], "together": []}  # per sample, of the timed rounds
        self.chosen: bool | None = None
        self._read()

    def together(self, server_round: int) -> bool:
        """Whether this round's silos train together."""
        if not self.first and self.chosen is None:
            if self.rounds - server_round + 1 < FEWEST_ROUNDS:  # not written down: a continuation may have more
                return self._choose(False, f"silos take turns: fewer than {FEWEST_ROUNDS} rounds are too few to tell")
            self.first = server_round
        if self.first and server_round < self.first + WINDOW:
            return server_round >= self.first and (server_round - self.first) // 2 % 2 == 1
        return bool(self.chosen)

    def tries(self) -> bool:
        """Whether networks and batches that are rarely faster together are tried all the same."""
        return self.chosen is True or self.rounds >= MANY_ROUNDS

    def took(self, server_round: int, seconds: float, samples: int, hindrance: str) -> None:
        """A round is done. ``hindrance``: why silos that were to train together took turns all the same."""
        if self.chosen is not None or not samples:
            return
        if hindrance:
            self.first = 0
            self._choose(False, f"silos take turns: {hindrance}")
            return self._write()
        way = "together" if self.together(server_round) else "turns"
        if server_round >= self.first + UNTIMED:
            self.seconds[way].append(seconds / samples)
        if server_round < self.first + WINDOW - 1:
            return self._write()
        turns, together = (min(times, default=0.0) for times in self.seconds.values())
        share = together / turns if turns and together else 1.0
        how = "train together" if share < WORTH else "take turns"
        self._choose(share < WORTH, f"silos {how}: a round of silos that train together takes {share:.2f} of the time")
        self._write()

    def _choose(self, together: bool, why: str) -> bool:
        self.chosen = together
        log(WARNING, "vectorize = auto: %s", why)
        return together

    def _write(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            state = {"first": self.first, "seconds": self.seconds, "together": self.chosen}
            write_atomically(self.file, json.dumps(state) + "\n")

    def _read(self) -> None:
        """What an earlier start of the run has found out; a file that is damaged says nothing."""
        if self.file is None or not self.file.exists():
            return
        try:
            state = json.loads(self.file.read_text())
            first, chosen = int(state["first"]), state["together"]
            seconds = {way: [float(s) for s in state["seconds"][way]] for way in self.seconds}
        except (ValueError, KeyError, TypeError) as error:
            log(WARNING, "%s cannot be read (%s): silos begin anew to find out what is faster", self.file, error)
            return
        self.first, self.seconds, self.chosen = first, seconds, None if chosen is None else bool(chosen)


def clock() -> float:
    """Seconds by which rounds are compared: of this thread alone, for other work may share the cores; with a GPU, of
    the clock.
    """
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return time.perf_counter() if on_gpu else time.thread_time()
