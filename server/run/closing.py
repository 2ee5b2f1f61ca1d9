"""Requests after a run's closing exchange: evidence, silos' own models, and metrics of held-out hospitals."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from models.evidence.measure import Evidence
from server.results.evidence import collect_evidence, wants_evidence
from server.run.checkpoints import RunState
from server.run.collector import Collector
from server.run.evaluation.kept import collect_models
from server.run.newcomers.hold_out import HoldOut
from server.run.recorder import Recorder
from server.run.registration.registration import Registration
from strategies.base.evaluation.own_model import asks_for_models
from strategies.base.strategy import PersonalizedStrategy


class Closing:
    """The end of one run."""

    def __init__(self, registration: Registration, collector: Collector, recorder: Recorder, hold_out: HoldOut) -> None:
        self.registration, self.collector, self.recorder, self.hold_out = registration, collector, recorder, hold_out
        self.reporter = registration.reporter
        self.evidence: dict[str, Evidence] = {}  # of the reported models, by silo

    def collect(self, strategy: PersonalizedStrategy, state: RunState, folder: Path | None) -> None:
        """Collect evidence, own models and newcomers' metrics of the reported round. ``folder``: of checkpoints."""
        reported = self.recorder.chosen
        strategy.shown = reported.of(strategy.silos)
        exchange = partial(self.collector.exchange, strategy=strategy, lost=state.lost)
        if wants_evidence(strategy, self.registration.simulated):
            self.evidence = collect_evidence(strategy, exchange, self.reporter.note)
        if asks_for_models(strategy.info, strategy.common) and folder:
            kept = collect_models(strategy, exchange, folder, self.reporter.note)
            self.reporter.event("models", silos=kept)
        self.hold_out.begin_round(strategy)
        if reported.round in (0, strategy.round):
            state.newcomers = self.hold_out.keep(strategy)
        self.recorder.history.add(self.hold_out.evaluate(strategy, state.newcomers))
