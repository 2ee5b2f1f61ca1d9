"""Round loop of all methods, in a simulation and in a deployment.

Register the silos. Per round: send the payloads, collect the replies, check, aggregate, record, checkpoint. After the
last round, one exchange evaluates the last aggregate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from client.flower.grid import RuntimeGrid
from models.initialisation import flat_model, initial_model
from models.standardisation import agreed_statistics
from partitions.common.errors import UserError
from server.results.history import History, joined_in
from server.results.run_directory import RunDirectory, shared_arrays
from server.results.study import start_strategy
from server.results.summary import FinishedRun
from server.run.checkpoints import Checkpoints, LoopState, Recovery, gone_back
from server.run.closing import Closing
from server.run.collector import Collector
from server.run.limits import check_server
from server.run.newcomers import HoldOut
from server.run.recorder import EarlyStopping, Recorder, metrics_of
from server.run.registration.readmission import Readmission
from server.run.registration.registration import Registration, note_weights, without_sums
from server.run.reporter import Progress, silo_scores
from server.run.secure.rounds import AttemptFailedError, SecureRounds
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.run_settings import RunSettings
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import SCHEMA


class RoundLoop:
    """One run of one method."""

    def __init__(
        self,
        grid: Grid,
        settings: RunSettings,
        directory: RunDirectory | None = None,
        watch: Callable[[Progress], object] | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.grid = grid
        self.settings = settings
        self.common = settings.common
        self.directory = directory
        self.history = History(directory.history if directory else None)
        self.registration = Registration(grid, settings, directory, watch)
        self.reporter = self.registration.reporter
        self.readmission = Readmission(self.registration)
        self.collector = Collector(self.registration)
        self.recorder = Recorder(self.common, self.history)
        self.stopping = EarlyStopping(self.common, self.recorder, self.reporter)
        self.recovery = Recovery(self.common, self.reporter)
        self.hold_out = HoldOut(self.collector)
        self.closing = Closing(self.collector, self.recorder, self.hold_out)
        folder = directory.checkpoint(settings.run_key) if directory else None
        self.checkpoints = Checkpoints(settings, folder, self.history, self.reporter)
        silo_settings = settings.flat() if run_config is None else run_config
        self.secure = SecureRounds(self.collector, folder, silo_settings)
        self.state = LoopState()
        self.until = 0  # the round after which the run pauses; 0: none
        # The last round that is done; the closing exchange comes after the last of all
        self.done = 0

    @property
    def last(self) -> int:
        """Number of the last round; earlier than planned once the run has stopped early."""
        return self.stopping.last

    @property
    def ended(self) -> bool:
        """Whether all rounds and the closing evaluation are done."""
        return self.done > self.last

    def run(self, until: int = 0) -> PersonalizedStrategy:
        """Execute all rounds and the closing evaluation. Raises UserError, or RunFailedError with the reason.

        ``until``: save and pause after this round, so that the run can be resumed; 0: do not pause.
        """
        self.until = until
        strategy = self.begin(self.checkpoints.load())
        while not self.ended and not 0 < until <= self.done:
            if self.done < self.last:
                self.round(strategy, self.done + 1)
            else:
                self.close(strategy)
        return strategy

    def begin(self, saved: State | None = None) -> PersonalizedStrategy:
        """Register the silos; return the strategy in its state before round 1, or in the checkpoint's state."""
        self.state = LoopState.begin(saved)
        self.registration.register(saved)
        strategy = prepare(self.settings, self.registration, self.state)
        if self.directory is not None and isinstance(self.grid, RuntimeGrid):
            folder, silos = self.directory.path, len(strategy.silos)
            log(INFO, "%s", check_server(strategy.layout.size, silos, folder))
        strategy.unmask = partial(self.secure.unmask, strategy)
        strategy.summary()
        check_patience(self.common, strategy.silos.values())
        self.done = self.checkpoints.restore(self.state, strategy, saved, self.registration)
        self.recorder.rewind(strategy, self.registration.task, self.done)
        self.registration.joined = joined_in(self.history.of(*self.common.which))
        self.stopping.check(self.done)
        strategy.follow(self.plan())
        if self.done < self.last:
            self.checkpoints.check_own_models()
        if saved is not None:
            self.checkpoints.check_history(saved, self.done)
        if self.directory is not None:
            self.directory.begin()
        return strategy

    def plan(self) -> RoundPlan:
        """Return what this loop decides of the next round."""
        r = self.registration
        plan = RoundPlan(
            silos=dict(r.silos),
            numbers=self.state.numbers,
            last=self.last,
            shown=self.recorder.chosen.of(r.silos),
            attended=self.recorder.count_attended(),
            joined=dict(r.joined),
        )
        return plan.with_silos(r.silos.values(), self.common)

    def finish_run(self) -> FinishedRun:
        """Return the values of this run that the summary needs."""
        c = self.common
        r = self.registration
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
            stopped=self.stopping.reason(),
            hold_out=self.hold_out.results,
            evidence=self.closing.evidence,
        )

    def round(self, strategy: PersonalizedStrategy, server_round: int) -> None:
        """Execute one round, or go back to an earlier one if silos' states are damaged."""
        if not self._agrees(strategy, server_round):
            return
        c = self.common
        recorder, collector = self.recorder, self.collector
        task = self.registration.task
        started = time.perf_counter()
        last = server_round in (c.rounds, self.until) or self.stopping.may_stop(server_round)
        save = last or server_round % c.checkpoint_every == 0
        self.hold_out.begin_round(strategy)
        shared = shared_arrays(
            strategy.state.arrays, self.settings.strategy, strategy.layout.size
        )
        messages = strategy.configure_train(
            server_round, ArrayRecord(), ConfigRecord({"save": save}), self.grid
        )
        replies = self.secure.attach(strategy, messages)
        self.reporter.round_begins(strategy, messages)
        sent = time.perf_counter()
        replies = replies or collector.exchange(messages, strategy, self.state.lost)
        received = time.perf_counter()
        if not self._aggregate(strategy, messages, replies):
            return
        aggregated = time.perf_counter()
        metrics = metrics_of(strategy, replies)
        rows = recorder.add_round(
            strategy, metrics, replies, task, self.recovery.lost_now, aggregated - started
        )
        if recorder.chosen.round == server_round:
            self.state.shared = {}
            if strategy.info.reports == "received":
                self.state.shared = shared
            self.state.newcomers = self.hold_out.keep(strategy)
        compute = collector.compute_seconds(metrics.values())
        self.state.add(
            *(strategy.bytes_down, strategy.bytes_up),
            total=aggregated - started,
            train=compute,
            communicate=max(received - sent - compute, 0.0),
            aggregate=aggregated - received,
        )
        if save:
            self.checkpoints.save(
                self.state, strategy, self.registration, recorder.chosen.round
            )
        self.done = server_round
        self.reporter.round_done(strategy, rows, aggregated - started, task)
        self.stopping.check(self.done)

    def _agrees(self, strategy: PersonalizedStrategy, server_round: int) -> bool:
        """Begin a round; return False if its masked sum has too few silos, so that it begins again."""
        self.readmission.readmit(server_round)
        strategy.follow(self.plan())
        try:
            plan = self.secure.begin(strategy, server_round)
        except AttemptFailedError as error:
            self.secure.repeat_round(server_round, error)
            return False
        strategy.follow(plan or self.plan())
        return plan is not None

    def _aggregate(
        self,
        strategy: PersonalizedStrategy,
        messages: Sequence[Message],
        replies: Sequence[Message],
    ) -> bool:
        """Aggregate a round's replies; return False if the run goes back, or repeats the round."""
        self.secure.take(strategy, replies)
        if self._goes_back(strategy, replies):
            return False
        try:
            strategy.aggregate_train(strategy.round, replies)
        except AttemptFailedError as error:
            self.secure.repeat_round(strategy.round, error)
            return False
        self.secure.end_attempts(strategy)
        strategy.aggregate_evaluate(strategy.round, replies)
        self.collector.reject_silent(strategy, messages, replies)
        self.collector.note_changed_counts(strategy, replies)
        self.collector.check_quorum(strategy, messages)
        return True

    def close(self, strategy: PersonalizedStrategy) -> None:
        """Evaluate at every silo the model that would start its next round, or go back to an earlier round."""
        started = time.perf_counter()
        rounds = self.last
        strategy.follow(self.plan())
        messages = strategy.configure_evaluate(
            rounds, ArrayRecord(), ConfigRecord({"save": False}), self.grid
        )
        if messages:
            self.reporter.round_begins(strategy, messages, closing=True)
            replies = self.collector.exchange(messages, strategy, self.state.lost)
            if self._goes_back(strategy, replies):
                return
            strategy.aggregate_evaluate(rounds, replies)
            self.collector.reject_silent(strategy, messages, replies)
            metrics = metrics_of(strategy, replies)
            rows = self.recorder.rows(
                strategy, rounds + 1, metrics, self.registration.task, self.recovery.lost_now
            )
            seconds = time.perf_counter() - started
            self.history.add(
                rows + self.recorder.totals(rounds + 1, seconds, strategy.bytes_down, 0)
            )
            self.recorder.chosen.add(rows)
            task = self.registration.task
            scores = silo_scores(strategy, rows, task)
            self.reporter.event("closed", number=rounds, score=task.score, per_silo=scores)
            self.closing.collect(strategy, self.state, self.checkpoints.folder)
            self.state.seconds["total"] += time.perf_counter() - started
        self.done = rounds + 1

    def _goes_back(self, strategy: PersonalizedStrategy, replies: Sequence[Message]) -> bool:
        """Go back to an earlier checkpoint if silos' states are damaged; return whether the run has gone back."""
        # A round of masked sums is not repeated over other silos
        folder = None if self.secure.masked else self.checkpoints.folder
        simulated = self.registration.simulated
        if (
            start := self.recovery.start(strategy, replies, folder, simulated=simulated)
        ) is None:
            self.state.lost |= dict.fromkeys(self.recovery.lost_now, strategy.round)
            return False
        self.checkpoints.go_back(start)
        self.readmission.take_back(start.done)
        self.recorder.rewind(strategy, self.registration.task, start.done)
        self.reporter.note(gone_back(start), about="state")
        self.stopping.resume()
        strategy.follow(self.plan())
        self.done = self.state.apply(strategy, start.state)
        return True


def check_patience(common: Common, silos: Iterable[SiloInfo]) -> None:
    """Raise UserError if early stopping is set and no silo has validation data."""
    if common.patience and not any(silo.n_val for silo in silos):
        raise UserError(
            f"patience = {common.patience}: no silo has a part for validation, by which a run stops early; set "
            "validation = 0.2, or patience = 0"
        )


def prepare(
    settings: RunSettings, registration: Registration, run_state: LoopState
) -> PersonalizedStrategy:
    """Return the strategy in its state before round 1."""
    c = settings.common
    spec = registration.data_spec
    task = registration.task
    settings.check_task(task, spec.classes)
    settings.augmentation_for(spec.shape)
    name, options = settings.model_for(spec.shape, task.name)
    head = settings.head
    part = settings.part()
    sha256 = part.weights.sha256 if part.weights else ""
    if run_state.weights not in ("", sha256):
        raise UserError(
            f"init-weights = {c.init_weights} is another file than the run began with: restore it"
        )
    run_state.weights = sha256
    # Not kept: the server needs the layout alone
    model = flat_model.__wrapped__(name, spec.shape, spec.classes, options, "cpu", head, part)
    initial = initial_model(name, spec.shape, spec.classes, options, c.seed, head, part)
    strategy = start_strategy(settings, model, registration.silos.values(), initial)
    note_weights(strategy, c, registration.reporter)
    if not run_state.statistics:
        run_state.statistics = {
            **agreed_statistics(list(registration.summaries.values()), strategy.plan.samples)
        }
        if alone := without_sums(registration.summaries, c):
            run_state.statistics["own_statistics"] = alone
    run_state.numbers = {
        "classes": spec.classes,
        "task": task.name,
        "run": registration.run_name,
        "min_metric_samples": c.min_metric_samples or (10 if spec.own_file else 1),
        **run_state.statistics,
    }
    run_state.numbers |= {"weights": sha256} if sha256 else {}
    if spec.schema.features or spec.schema.labels:
        run_state.numbers[SCHEMA] = spec.schema.text
    return strategy
