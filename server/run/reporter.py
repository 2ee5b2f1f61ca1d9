"""Reports of a run's events: to the log, to ``progress.jsonl`` and to a caller's ``watch``."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING

from flwr.app import Message
from flwr.common import log

from client.faults import FAULT
from models.tasks import Task
from server.results.history import Row, mean
from server.results.reasons import merge_reasons
from server.results.run_directory import RunDirectory
from strategies.base.settings import Common
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import printable

WEIGHTS = "weights"  # the part of the notes on what silos count as


@dataclass
class Progress:
    """The outcome of a round."""

    round: int
    rounds: int
    silos: int
    score: float  # unweighted mean over silos of the task's test score, for the snapshot that the method reports
    seconds: float
    bytes: int
    rejected: dict[str, str] = field(default_factory=dict)
    # Silo whose update was scaled down -> reason
    bounded: dict[str, str] = field(default_factory=dict)


def silo_scores(
    strategy: PersonalizedStrategy, rows: Sequence[Row], task: Task
) -> dict[str, dict[str, float]]:
    """Return the silos' ``val`` and ``test`` scores for the snapshot that the method reports."""
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        known = not math.isnan(row.value)
        if known and (row.snapshot, row.metric) == (strategy.info.reports, task.score):
            scores[row.silo][row.split] = row.value
    return dict(scores)


def epsilons(rows: Sequence[Row]) -> dict[str, float]:
    """Return the epsilon spent so far by each silo that trains with differential privacy."""
    return {
        row.silo: row.value
        for row in rows
        if (row.metric, row.split) == ("epsilon", "") and row.silo
    }


# The format of client.faults.report
REPORTED_FAULT = re.compile(rf"\w+( in [\w./]+:\d+)?: {FAULT};")


@dataclass
class Reporter:
    """Reporter of one run; without a directory it writes no ``progress.jsonl``."""

    common: Common
    directory: RunDirectory | None
    watch: Callable[[Progress], object] | None = None

    def event(self, kind: str, **values: object) -> None:
        """Add an event of this run to ``progress.jsonl``."""
        if self.directory is not None:
            strategy, seed = self.common.which
            self.directory.progress(kind, strategy=strategy, seed=seed, **values)

    def note(self, line: str, **details: str) -> None:
        """Log a warning about a silo or the server, and add it to ``progress.jsonl``."""
        line = printable(line)
        log(WARNING, "%s", line)
        self.event(
            "note",
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            message=line,
            **details,
        )

    def note_reasons(self, reasons: Iterable[tuple[str, str]], what: str = "") -> None:
        """Note the reasons of silos, each once (:func:`merge_reasons`), with ``what`` before it."""
        for line in merge_reasons(reasons, bare=bool(what)):
            self.note(what + line)

    def log_refused(self, reason: str) -> None:
        """Log that a node is refused."""
        log(WARNING, "refused: %s", reason)
        if self.directory is not None:
            self.directory.progress("refused", message=reason)

    def silo_fault(self, name: str, reason: str) -> None:
        """Log an exception that a silo reports."""
        if REPORTED_FAULT.match(reason):
            log(ERROR, "%s reports an exception: %s", name, reason)

    def transfer(self, line: str) -> None:
        """Log the progress of a long transfer, or of the wait for silos."""
        log(INFO, "%s", line)
        self.event("transfer", message=line)

    def round_begins(
        self,
        strategy: PersonalizedStrategy,
        messages: Sequence[Message],
        *,
        closing: bool = False,
    ) -> None:
        """Report the silos that receive a message in this round, with the message types."""
        names = strategy.plan.nodes
        kinds = {names[m.metadata.dst_node_id]: m.metadata.message_type for m in messages}
        number, rounds = strategy.round - closing, self.common.rounds
        self.event(
            "begin",
            number=number,
            rounds=rounds,
            closing=closing,
            time=time.time(),
            silos=kinds,
        )

    def stopped_early(self, last: int, since: int) -> None:
        """Report that early stopping ends the run after round ``last``; round ``since`` was the last better one."""
        c = self.common
        line = (
            f"{c.strategy} seed {c.seed} stops after round {last} of {c.rounds}: no better mean validation score since "
            f"round {since} (patience = {c.patience}, min-delta = {c.min_delta:g})"
        )
        log(INFO, "%s", line)
        self.event("stopped", after=last, rounds=c.rounds, since=since, message=line)

    def round_done(
        self, strategy: PersonalizedStrategy, rows: Sequence[Row], seconds: float, task: Task
    ) -> None:
        """Report the round that the strategy has just finished. ``rows``: the round's rows of the history."""
        number, rounds = strategy.round, self.common.rounds
        scores = silo_scores(strategy, rows, task)
        tested = {silo: of["test"] for silo, of in scores.items() if "test" in of}
        score = mean(tested) if tested else math.nan
        silos = len({r.silo for r in rows if r.silo and r.split}) or len(strategy.silos) - len(
            strategy.rejected
        )
        total = strategy.bytes_down + strategy.bytes_up
        rejected = dict(strategy.rejected)
        bounded = {silo: why for silo, (_, why) in strategy.bounded.items()}
        result = f"{task.score_label} {score:.4f}" if tested else "not evaluated"
        log(
            INFO,
            "round %d/%d: %d silos, %s, %.1f s, %d bytes",
            number,
            rounds,
            silos,
            result,
            seconds,
            total,
        )
        self.event(
            "round",
            round=number,
            rounds=rounds,
            silos=silos,
            task=task.name,
            score=task.score,
            seconds=seconds,
            bytes=total,
            rejected=rejected,
            bounded=bounded,
            bytes_down=strategy.bytes_down,
            bytes_up=strategy.bytes_up,
            per_silo=scores,
            **({"epsilon": spent} if (spent := epsilons(rows)) else {}),
            **{task.score: None if math.isnan(score) else score},
        )
        if self.watch is not None:
            self.watch(
                Progress(number, rounds, silos, score, seconds, total, rejected, bounded)
            )
