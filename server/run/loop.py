"""The round loop, once for all methods and for all three ways to run.

Register the silos. Per round: send the payloads, collect the replies, check, aggregate, record, checkpoint. After the
last round, one exchange evaluates the last aggregate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from models.evidence.measure import Evidence
from models.threads import use_threads
from partitions.common.errors import UserError
from server.results.evidence import collect_evidence, wants_evidence
from server.results.history import History
from server.results.own_models import any_kept
from server.results.reported_round import shared_arrays
from server.results.run_directory import RunDirectory
from server.results.summary import FinishedRun
from server.run.checkpoints import Checkpoints, RunState
from server.run.collector import Collector
from server.run.evaluation.kept import collect_models
from server.run.newcomers.hold_out import HoldOut
from server.run.preparation import check_patience, prepare
from server.run.receipts import Receipts
from server.run.recorder import Recorder, metrics_of
from server.run.recovery import earlier_start, gone_back, lost, refusal
from server.run.registration.readmission import Readmission
from server.run.registration.registration import Registration
from server.run.reporter import Progress, Reporter
from strategies.base.damaged import damages
from strategies.base.evaluation.own_model import asks_for_models
from strategies.base.run_settings import RunSettings
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy

UNVALIDATED = "no silo has reported a validation score so far, and without any the run does not stop early"


class RoundLoop:
    """One run of one method."""

    def __init__(
        self,
        grid: Grid,
        settings: RunSettings,
        directory: RunDirectory | None = None,
        watch: Callable[[Progress], object] | None = None,
    ) -> None:
        self.grid, self.settings, self.common, self.directory = grid, settings, settings.common, directory
        self.history = History(directory.history if directory else None)
        self.reporter = Reporter(settings, directory, watch)
        receipts = Receipts.of(directory.path if directory else None, self.reporter.note)
        self.registration = Registration(grid, settings, self.reporter, receipts)
        self.readmission = Readmission(self.registration)
        self.collector = Collector(grid, self.common, self.registration, self.reporter)
        self.recorder = Recorder(self.common, self.history)
        self.hold_out = HoldOut(self.registration, self.collector)
        self.checkpoints = Checkpoints(settings, directory, self.history, self.reporter)
        self.state = RunState()
        self.last = self.common.rounds  # the last round of all; an earlier one once the run has stopped early
        self.until = 0  # the round after which the run pauses; 0: none
        self.done = 0  # the last round that is done; the closing exchange comes after the last of all
        self.lost_now: dict[str, int] = {}  # silos that lost their state in this round, and the round that it was of
        self.evidence: dict[str, Evidence] = {}  # of the reported models, by silo
        self.repaired: set[str] = set()  # silos for which the run has gone back

    @property
    def ended(self) -> bool:
        """Whether all of the run is done, and not a part of its rounds."""
        return self.done > self.last

    def run(self, until: int = 0) -> PersonalizedStrategy:
        """Do all rounds and the closing evaluation. Raises UserError, or RunFailedError with the reason.

        ``until``: pause after this round, which is saved, so that the run can be resumed; 0: do not pause.
        """
        use_threads(self.common.threads)
        self.until = until
        strategy = self.begin(self.checkpoints.load())
        while not self.ended and not 0 < until <= self.done:
            if self.done < self.last:
                self.round(strategy, self.done + 1)
            else:
                self.close(strategy)
        return strategy

    def begin(self, saved: State | None = None) -> PersonalizedStrategy:
        """Register the silos and return the strategy, in its state before round 1 or in the checkpoint's."""
        self.state = RunState.begin(saved)
        silos = self.registration.register(saved) + self.registration.absent(saved)
        run = self.directory.name if self.directory else ""
        strategy = prepare(self.settings, self.registration, self.state, silos, run)
        strategy.summary()
        check_patience(self.common, silos)
        self.done = self.checkpoints.restore(self.state, strategy, saved, self.registration)
        self.recorder.rewind(strategy, self.registration.task, self.done)
        strategy.joined = self.recorder.joined()
        self._stop_early(strategy)
        if self.done < self.last and any_kept(self.checkpoints.folder):
            raise UserError(
                f"{self.checkpoints.folder}: silos' own models have left at the end of this run (keep-models), which "
                "trains no further: start a new one"
            )
        if saved is not None:
            self.checkpoints.check_history(saved, self.done)
        return strategy

    def finished(self) -> FinishedRun:
        """Return what the summary needs of this run."""
        c, r = self.common, self.registration
        return FinishedRun(
            strategy=c.strategy,
            seed=c.seed,
            rounds=self.last,
            silos=r.summaries,
            total_bytes=self.state.total_bytes,
            seconds=self.state.seconds,
            weight_cap=c.weight_cap,
            task=r.task,
            left_out=r.left_out,
            stopped=self._stopped(),
            hold_out=self.hold_out.results,
            evidence=self.evidence,
        )

    def round(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        """Do one round, or go back to an earlier one."""
        self.readmission.readmit(strategy, server_round)
        c, recorder, collector = self.common, self.recorder, self.collector
        started = time.perf_counter()
        last = server_round in (c.rounds, self.until) or recorder.may_stop(server_round)
        save = last or server_round % c.checkpoint_every == 0
        self.hold_out.begin_round(strategy)
        shared = shared_arrays(strategy.state.arrays, self.settings.strategy, strategy.layout.size)
        strategy.shown = recorder.chosen.of(strategy.silos)
        strategy.attended = recorder.attended()
        messages = strategy.configure_train(server_round, ArrayRecord(), ConfigRecord({"save": save}), self.grid)
        self.reporter.round_begins(strategy, messages)
        sent = time.perf_counter()
        replies = collector.exchange(messages, strategy, self.state.lost)
        received = time.perf_counter()
        if self._goes_back(strategy, replies):
            return
        strategy.aggregate_train(server_round, replies)
        strategy.aggregate_evaluate(server_round, replies)
        collector.reject_silent(strategy, messages, replies)
        collector.note_changed_counts(strategy, replies)
        collector.check_quorum(strategy, messages)
        aggregated = time.perf_counter()
        metrics = metrics_of(strategy, replies)
        rows = recorder.rows(strategy, server_round, metrics, self.registration.task, self.lost_now)
        rows += recorder.joins(server_round, strategy.joined)
        rows += recorder.privacy(strategy, server_round, replies)
        rows += recorder.totals(server_round, aggregated - started, strategy.bytes_down, strategy.bytes_up)
        recorder.history.add(rows)
        recorder.follow(rows)
        if recorder.chosen.round == server_round:
            self.state.shared = shared if strategy.info.reports == "received" else {}
            self.state.newcomers = self.hold_out.keep(strategy)
        compute = collector.compute_seconds(metrics.values())
        communicate = max(received - sent - compute, 0.0)
        self.state.add(aggregated - started, compute, communicate, aggregated - received)
        self.state.total_bytes["down"] += strategy.bytes_down
        self.state.total_bytes["up"] += strategy.bytes_up
        if save:
            self.checkpoints.save(self.state, strategy, self.registration, recorder.chosen.round)
        self.done = server_round
        self.reporter.round_done(strategy, rows, aggregated - started, self.registration.task)
        self._stop_early(strategy)

    def close(self, strategy: PersonalizedStrategy) -> None:
        """Evaluate at every silo the model that it would start the next round from, or go back to an earlier round."""
        started, rounds = time.perf_counter(), self.last
        strategy.shown = self.recorder.chosen.of(strategy.silos)
        messages = strategy.configure_evaluate(rounds, ArrayRecord(), ConfigRecord({"save": False}), self.grid)
        if messages:
            self.reporter.round_begins(strategy, messages, closing=True)
            replies = self.collector.exchange(messages, strategy, self.state.lost)
            if self._goes_back(strategy, replies):
                return
            strategy.aggregate_evaluate(rounds, replies)
            self.collector.reject_silent(strategy, messages, replies)
            metrics = metrics_of(strategy, replies)
            rows = self.recorder.rows(strategy, rounds + 1, metrics, self.registration.task, self.lost_now)
            seconds = time.perf_counter() - started
            self.history.add(rows + self.recorder.totals(rounds + 1, seconds, strategy.bytes_down, 0))
            self.recorder.chosen.add(rows)
            self.reporter.closed(strategy, rows, self.registration.task)
            strategy.shown = self.recorder.chosen.of(strategy.silos)
            exchange = partial(self.collector.exchange, strategy=strategy, lost=self.state.lost)
            if wants_evidence(strategy, self.registration.simulated):
                self.evidence = collect_evidence(strategy, exchange, self.reporter.note)
            if asks_for_models(strategy.info, self.common) and (folder := self.checkpoints.folder):
                kept = collect_models(strategy, exchange, folder, self.reporter.note)
                self.reporter.event("models", silos=kept)
            self.evaluate_newcomers(strategy)
            self.state.seconds["total"] += time.perf_counter() - started
        self.done = rounds + 1

    def evaluate_newcomers(self, strategy: PersonalizedStrategy) -> None:
        """Evaluate the held-out hospitals with what they would have got in the reported round."""
        self.hold_out.begin_round(strategy)
        if self.recorder.chosen.round in (0, strategy.round):
            self.state.newcomers = self.hold_out.keep(strategy)
        self.history.add(self.hold_out.evaluate(strategy, self.state.newcomers))

    def _stop_early(self, strategy: PersonalizedStrategy) -> None:
        """End the rounds where the mean validation score has not become better for ``patience`` rounds."""
        improved = self.recorder.improved
        if self.done < self.common.rounds and self.recorder.stops(self.done):
            self.last = strategy.last_round = self.done
            self.reporter.stopped_early(self.done, improved.round)
        elif self.common.patience and self.done == self.common.evaluate_every and not improved.validated:
            self.reporter.note(f"patience = {self.common.patience}: {UNVALIDATED}")

    def _stopped(self) -> dict[str, float] | None:
        """Return why the run ended before its last planned round; None where it did not."""
        c = self.common
        since = self.recorder.improved.round
        early = {"since": since, "planned": c.rounds, "patience": c.patience, "min_delta": c.min_delta}
        return early if self.last < c.rounds else None

    def _goes_back(self, strategy: PersonalizedStrategy, replies: Sequence[Message]) -> bool:
        """Go back where silos' states are damaged: to ``self.done``, with the strategy as it was then.

        Returns False where no state is damaged, or where the run goes on without the damaged ones, which are reported
        and marked in the history. Raises UserError in a simulation that cannot go back: its numbers would differ.
        """
        names = {info.node_id: name for name, info in strategy.silos.items()}
        found = damages(replies, names, strategy.round)
        self.lost_now = {}
        if not found:
            return False
        repairable = [d for d in found if d.silo not in self.repaired]
        folder = None if any_kept(self.checkpoints.folder) else self.checkpoints.folder  # its silos train no more
        start = earlier_start(folder, repairable, self.common.checkpoint_every)
        repaired = start.repaired if start is not None else ()
        if len(repaired) < len(found) and self.registration.simulated:
            raise UserError(refusal([damage for damage in found if damage not in repaired]))
        if start is None:
            for damage in found:
                self.reporter.note(lost(damage, strategy.round), about="state")
            self.lost_now = {damage.silo: damage.round for damage in found}
            self.state.lost |= dict.fromkeys(self.lost_now, strategy.round)
            return False
        self.repaired |= {damage.silo for damage in repaired}
        self.checkpoints.go_back(start)
        self.readmission.take_back(strategy, start.done)
        self.recorder.rewind(strategy, self.registration.task, start.done)
        self.reporter.note(gone_back(start), about="state")
        self.done = self.state.apply(strategy, start.state)
        self.last = strategy.last_round = self.common.rounds
        return True
