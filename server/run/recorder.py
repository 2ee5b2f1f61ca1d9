"""Record of a run's rounds: rows of the history, seconds and bytes, and the round that the report shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from flwr.app import Message

from models.tasks import Task
from server.results.history import JOINED, Chosen, History, Row
from server.run.reporter import Reporter
from strategies.base.plan import SiloInfo
from strategies.base.settings import Common
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import (
    EPSILON,
    PRIVACY,
    SNAPSHOTS,
    metrics_of_reply,
    read_replies,
)


@dataclass
class Recorder:
    """Writer of one run's history; it also tracks the round that the report would show."""

    common: Common
    history: History

    def __post_init__(self) -> None:
        self.chosen = Chosen("", "")
        self.improved = Chosen("", "")  # the last round that was better by min-delta

    def rewind(self, strategy: PersonalizedStrategy, task: Task, done: int) -> None:
        """Drop the rows after round ``done``, and find the reported round among the rest."""
        which = self.common.which
        self.history.forget(*which, after=done)
        self.chosen = Chosen(strategy.info.reports, task.score)
        self.improved = Chosen(strategy.info.reports, task.score, self.common.min_delta)
        for _, rows in groupby(self.history.of(*which), key=lambda row: row.round):
            self.follow(list(rows))

    def follow(self, rows: Sequence[Row]) -> None:
        """Update the reported round with the rows of the next round."""
        self.chosen.add(rows)
        self.improved.add(rows)

    def add_round(
        self,
        strategy: PersonalizedStrategy,
        metrics: Mapping[str, Mapping[str, float]],
        replies: Iterable[Message],
        task: Task,
        state_lost: Mapping[str, int],
        seconds: float,
    ) -> list[Row]:
        """Add the strategy's round, which took ``seconds``, to the history; return its rows."""
        rows = self.rows(strategy, strategy.round, metrics, task, state_lost)
        rows += self._joins(strategy.round, strategy.plan.joined)
        rows += self._privacy(strategy, replies)
        rows += self._secure(strategy)
        rows += self.totals(strategy.round, seconds, strategy.bytes_down, strategy.bytes_up)
        self.history.add(rows)
        self.follow(rows)
        return rows

    def rows(
        self,
        strategy: PersonalizedStrategy,
        server_round: int,
        metrics: Mapping[str, Mapping[str, float]],
        task: Task,
        state_lost: Mapping[str, int],
    ) -> list[Row]:
        """Return a round's rows: metrics by silo, then rejected silos, lost states and bounded updates."""
        rows: list[Row] = []
        for name, measured in metrics.items():
            rows += silo_rows(
                strategy, strategy.silos[name], measured, server_round, task.score
            )
        rows.sort(key=lambda r: (r.silo, r.split, r.snapshot, r.metric))
        of_silos: dict[str, Mapping[str, float]] = {
            "rejected": dict.fromkeys(strategy.rejected, 1.0),
            "state_lost": state_lost,
            "bounded": {silo: share for silo, (share, _) in strategy.bounded.items()},
        }
        return rows + [
            self._row(server_round, metric, value, silo)
            for metric, values in of_silos.items()
            for silo, value in sorted(values.items())
        ]

    def _privacy(self, strategy: PersonalizedStrategy, replies: Iterable[Message]) -> list[Row]:
        """Return each silo's privacy cost so far; a reply that is not used also costs privacy.

        Without ``dp = true`` there is none, whatever a silo sends.
        """
        if not self.common.dp:
            return []
        by_silo, _ = read_replies(replies, strategy.plan.nodes, metrics_of_reply)
        return [
            self._row(strategy.round, name, metrics[name], silo)
            for silo, metrics in sorted(by_silo.items())
            for name in sorted(PRIVACY)
            if name in metrics
        ]

    def count_attended(self) -> dict[str, int]:
        """Return by silo the number of its rounds with differential privacy in this run."""
        if not self.common.dp:
            return {}
        return dict(
            Counter(
                row.silo
                for row in self.history.of(*self.common.which)
                if row.metric == EPSILON and row.silo
            )
        )

    def _joins(self, server_round: int, joined: Mapping[str, int]) -> list[Row]:
        """Return the rows of the silos that join in this round."""
        return [
            self._row(server_round, JOINED, 1.0, silo)
            for silo, first in joined.items()
            if first == server_round
        ]

    def _secure(self, strategy: PersonalizedStrategy) -> list[Row]:
        """Return the rows of a sum: of how many silos it is (0: it changed no model), and the attempts at it."""
        if not self.common.secure_aggregation or not strategy.upload_names():
            return []
        number = strategy.round
        silos = sum(last == number for last in strategy.state.counted.values())
        values = {"secure_silos": float(silos), "secure_attempts": float(strategy.plan.attempt)}
        return [self._row(number, metric, value) for metric, value in values.items()]

    def totals(self, server_round: int, seconds: float, down: int, up: int) -> list[Row]:
        """Return the rows of a round as a whole."""
        values = {"round_seconds": seconds, "bytes_down": float(down), "bytes_up": float(up)}
        return [self._row(server_round, metric, value) for metric, value in values.items()]

    def _row(self, server_round: int, metric: str, value: float, silo: str = "") -> Row:
        return Row(*self.common.which, server_round, silo, "", "", metric, value, None)


def metrics_of(
    strategy: PersonalizedStrategy, replies: Iterable[Message]
) -> dict[str, dict[str, float]]:
    """Return the metrics of the silos that are not rejected, by name."""
    by_silo, _ = read_replies(replies, strategy.plan.nodes, metrics_of_reply)
    return {name: metrics for name, metrics in by_silo.items() if name not in strategy.rejected}


def silo_rows(
    strategy: PersonalizedStrategy,
    info: SiloInfo,
    measured: Mapping[str, float],
    number: int,
    score: str,
) -> list[Row]:
    """Return the rows of a silo's metrics in round ``number``; a split over too few samples has one empty row each."""
    c = strategy.common
    smallest = strategy.plan.numbers["min_metric_samples"]
    counts = {"train": info.n_train, "test": info.n_test, "val": info.n_val}
    rows: list[Row] = []

    def add(split: str, snapshot: str, metric: str, value: float) -> None:
        which = *c.which, number, info.name
        rows.append(Row(*which, split, snapshot, metric, value, counts[split]))

    for key, value in sorted(measured.items()):
        snapshot, _, rest = key.partition(".")
        if snapshot in SNAPSHOTS:
            split, _, metric = rest.partition(".")
            add(split, snapshot, metric, value)
    snapshots = sorted({r.snapshot for r in rows}) or ["received"]
    shown = {r.split for r in rows} - {"train"}
    for split in ("test", "val"):
        withheld = bool(shown) and split not in shown  # by the silo's own policy
        if counts[split] and (counts[split] < smallest or withheld):
            for snapshot in snapshots:
                add(split, snapshot, score, math.nan)
    return rows


UNVALIDATED = "no silo has reported a validation score so far, and without any the run does not stop early"


@dataclass
class EarlyStopping:
    """Last round of one run: the last planned one, or an earlier one once the run has stopped early."""

    common: Common
    recorder: Recorder
    reporter: Reporter

    def __post_init__(self) -> None:
        self.last = self.common.rounds

    def may_stop(self, server_round: int) -> bool:
        """Return whether early stopping may end the run after this round, so that all states must be saved."""
        c = self.common
        since = self.recorder.improved.round
        evaluated = bool(c.evaluate_every) and server_round % c.evaluate_every == 0
        return bool(c.patience and since and evaluated) and server_round - since >= c.patience

    def check(self, done: int) -> None:
        """End the run after round ``done`` if it is evaluated and the last better one is ``patience`` rounds old."""
        c = self.common
        improved = self.recorder.improved
        if done < c.rounds and self.may_stop(done) and improved.evaluated == done:
            self.last = done
            self.reporter.stopped_early(done, improved.round)
        elif c.patience and done == c.evaluate_every and not improved.validated:
            self.reporter.note(f"patience = {c.patience}: {UNVALIDATED}")

    def resume(self) -> None:
        """Plan all rounds again after the run has gone back to an earlier one."""
        self.last = self.common.rounds

    def reason(self) -> dict[str, float] | None:
        """Return the figures of the early stop; None if the run did all planned rounds."""
        c = self.common
        since = self.recorder.improved.round
        early = {
            "since": since,
            "planned": c.rounds,
            "patience": c.patience,
            "min_delta": c.min_delta,
        }
        return early if self.last < c.rounds else None
