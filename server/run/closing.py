"""Requests after a run's closing exchange: evidence, silos' own models, and metrics of held-out hospitals.

Request each silo's own reported model at the end of a run (``keep-models``), and keep it.

A silo that refuses, or whose model cannot be used, is reported in one line; the run's results do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from flwr.app import Message

from models.evidence.measure import Evidence
from partitions.common.errors import DataError
from server.results.evidence import collect_evidence, wants_evidence
from server.results.models import keep_model
from server.run.checkpoints import LoopState
from server.run.collector import Collector
from server.run.newcomers import HoldOut
from server.run.recorder import Recorder
from strategies.base.evaluation import KIND, asks_for_models
from strategies.base.info import OFFLINE
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload, encode, read_reply
from strategies.base.transport.reporting import read_replies


class Closing:
    """The end of one run."""

    def __init__(self, collector: Collector, recorder: Recorder, hold_out: HoldOut) -> None:
        self.collector = collector
        self.recorder = recorder
        self.hold_out = hold_out
        self.registration = collector.registration
        self.reporter = collector.reporter
        self.evidence: dict[str, Evidence] = {}  # of the reported models, by silo

    def collect(
        self, strategy: PersonalizedStrategy, state: LoopState, folder: Path | None
    ) -> None:
        """Collect evidence, own models and newcomers' metrics of the reported round. ``folder``: of checkpoints."""
        reported = self.recorder.chosen
        strategy.follow(replace(strategy.plan, shown=reported.of(strategy.silos)))
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


# Sends messages, and returns the replies
Exchanges = Callable[[Sequence[Message]], Sequence[Message]]


def collect_models(
    strategy: PersonalizedStrategy,
    exchange: Exchanges,
    checkpoint: Path,
    note: Callable[[str], object],
) -> list[str]:
    """Keep the silos' models of the rounds in ``strategy.plan.shown``; return the silos whose model was kept."""
    own = cast(Sequence[str], strategy.plan.numbers.get("own_statistics", ()))
    names = dict[int, str]()
    missing = dict[str, str]()
    for silo in strategy.plan.shown:
        if silo in own:
            missing[silo] = "it is used with the statistics of this silo, which stay there"
        elif strategy.silos[silo].node_id == OFFLINE:
            missing[silo] = "it was offline when the run was resumed"
        else:
            names[strategy.silos[silo].node_id], missing[silo] = silo, "no reply in time"

    def keep(reply: Message, silo: str) -> None:
        payload, config = read_reply(reply, silo)
        if config.get("silo") != silo or config.get("round") != strategy.round:
            raise DataError(
                f"a reply of {config.get('silo')!r:.80} for round {config.get('round')!r:.80}"
            )
        keep_model(checkpoint, silo, strategy.plan.shown[silo], payload, strategy.layout)

    kept, faults = read_replies(
        exchange([_message(strategy, silo) for silo in names.values()]), names, keep
    )
    for silo, reason in sorted({**missing, **faults}.items()):
        if silo not in kept:
            note(f"no model of {silo}: {reason}")
    return sorted(kept)


def _message(strategy: PersonalizedStrategy, silo: str) -> Message:
    content = encode(
        Payload(),
        {
            **strategy.plan.numbers,
            "round": strategy.round,
            "reported": strategy.plan.shown[silo],
        },
    )
    node = strategy.silos[silo].node_id
    ttl = strategy.common.round_timeout
    return Message(content, dst_node_id=node, message_type=KIND, ttl=ttl)
