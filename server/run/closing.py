"""Requests after a run's closing exchange: evidence, silos' own models, and metrics of held-out hospitals.

Evidence is requested from every silo once, for its reported model. A second message sends the silos their common
conformal threshold: the mean of their own thresholds, weighted by calibration samples. (The quantile of the pooled
scores would need the scores, which stay in the hospitals.)

Silos' own reported models are requested, and kept, with ``keep-models``.

A silo that refuses, or whose answer cannot be used, is reported in one line; the run's results do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from flwr.app import Message, MessageType

from client.evidence import COMMON
from models.evidence.measure import MEASUREMENT, Evidence, measurements
from partitions.common.adding import added
from partitions.common.errors import DataError
from partitions.common.messages import OWN_MODEL
from partitions.schema import read_schema
from server.results.models import keep_model
from server.run.checkpoints import LoopState
from server.run.collector import Collector
from server.run.newcomers import HoldOut
from server.run.recorder import Recorder
from server.run.reporter import Reporter
from strategies.base.evaluation import asks_for_models
from strategies.base.evidence import ACTION, read_evidence
from strategies.base.plan import OFFLINE
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Number, Payload, read_reply
from strategies.base.transport.reporting import SCHEMA, read_replies

# Sends messages, and returns the replies
Exchanges = Callable[[Sequence[Message]], Sequence[Message]]
# The silos' thresholds that are averaged; a task has one of the two
OWN = ("conformal", "conformal_width")
HOSPITALS = 2  # minimum number of hospitals with a threshold for a common one


@dataclass
class Closing:
    """The end of one run. ``evidence``: of the reported models, by silo."""

    collector: Collector
    recorder: Recorder
    hold_out: HoldOut
    evidence: dict[str, Evidence] = field(default_factory=dict)

    def collect(
        self, strategy: PersonalizedStrategy, state: LoopState, folder: Path | None
    ) -> None:
        """Collect evidence, own models and newcomers' metrics of the reported round. ``folder``: of checkpoints."""
        reported, reporter = self.recorder.chosen, self.collector.reporter
        strategy.follow(replace(strategy.plan, shown=reported.of(strategy.silos)))
        exchange = partial(self.collector.exchange, strategy=strategy, lost=state.lost)
        if wants_evidence(strategy, self.collector.registration.simulated):
            self.evidence = collect_evidence(strategy, exchange, reporter)
        if asks_for_models(strategy.info, strategy.common) and folder:
            kept = collect_models(strategy, exchange, folder, reporter)
            reporter.event("models", silos=kept)
        self.hold_out.begin_round(strategy)
        if reported.round in (0, strategy.round):
            state.newcomers = self.hold_out.keep(strategy)
        self.recorder.history.add(self.hold_out.evaluate(strategy, state.newcomers))


def _requests(
    strategy: PersonalizedStrategy,
    silos: Iterable[str],
    kind: str,
    numbers: Mapping[str, Number],
) -> list[Message]:
    """Return a message to each silo about the model that the report shows of it."""
    return [
        strategy.message(
            strategy.silos[silo].node_id,
            f"{MessageType.EVALUATE}.{kind}",
            Payload({}, numbers),
            {"round": strategy.round, "reported": strategy.plan.shown[silo]},
        )
        for silo in silos
    ]


def wants_evidence(strategy: PersonalizedStrategy, simulated: bool) -> bool:
    """Return whether the run requests evidence; ``auto`` does so if all data are simulated.

    Never with differential privacy: evidence has no mechanism and no share of the budget.
    """
    setting = "off" if strategy.common.dp else strategy.common.evidence
    return strategy.common.evaluate_every > 0 and (
        setting == "on" or (setting == "auto" and simulated)
    )


def collect_evidence(
    strategy: PersonalizedStrategy, exchange: Exchanges, reporter: Reporter
) -> dict[str, Evidence]:
    """Return by silo the evidence for its reported model (rounds in ``strategy.plan.shown``)."""
    names = measurement_names(strategy)

    def ask(silos: Iterable[str], numbers: Mapping[str, Number]) -> dict[str, Evidence]:
        nodes = {
            node: silo for silo in silos if (node := strategy.silos[silo].node_id) != OFFLINE
        }
        answers, faults = read_replies(
            exchange(_requests(strategy, nodes.values(), ACTION, numbers)),
            nodes,
            lambda reply, _: read_evidence(reply.content.get("metrics"), names),
        )
        reporter.note_reasons(faults.items(), "no evidence of ")
        return dict(sorted(answers.items()))

    by_silo = ask(strategy.plan.shown, {})
    keys: list[Sequence[str]] = [
        [f"{MEASUREMENT}{name}.conformal_width"] for name in names
    ] or [OWN]
    common = [threshold for key in keys if (threshold := _common(by_silo, key)) is not None]
    if len(common) == len(keys):
        for silo, values in ask(by_silo, {COMMON: common if names else common[0]}).items():
            by_silo[silo].update(values)
    return by_silo


def measurement_names(strategy: PersonalizedStrategy) -> list[str]:
    """Return the names of the predicted measurements if there are several; empty for one, or for another task."""
    if strategy.plan.numbers["task"] != "regression":
        return []
    return measurements(
        read_schema(str(strategy.plan.numbers.get(SCHEMA, ""))).labels,
        int(str(strategy.plan.numbers["classes"])),
    )


def _common(evidence: Mapping[str, Evidence], key: Sequence[str]) -> float | None:
    """Return the weighted mean of the silos' thresholds under these names; None if too few silos have one."""
    values = [v[name] for v in evidence.values() for name in key if name in v]
    pairs = [(n[0], n[1]) for n in values if isinstance(n, list)]
    if len(pairs) < HOSPITALS:
        return None
    common = added(n * threshold for n, threshold in pairs) / sum(n for n, _ in pairs)
    # Rounding may exceed the maximum
    return min(common, max(threshold for _, threshold in pairs))


def collect_models(
    strategy: PersonalizedStrategy, exchange: Exchanges, checkpoint: Path, reporter: Reporter
) -> list[str]:
    """Keep the silos' models of the rounds in ``strategy.plan.shown``; return the silos whose model was kept."""
    standardised_alone = strategy.plan.numbers.get("own_statistics", ())
    names = dict[int, str]()
    missing = dict[str, str]()
    for silo in strategy.plan.shown:
        if silo in standardised_alone:
            missing[silo] = "it is used with the statistics of this silo, which stay there"
        elif (node := strategy.silos[silo].node_id) == OFFLINE:
            missing[silo] = "it was offline when the run was resumed"
        else:
            names[node], missing[silo] = silo, "no reply in time"

    def keep(reply: Message, silo: str) -> None:
        payload, config = read_reply(reply, silo)
        if config.get("silo") != silo or config.get("round") != strategy.round:
            raise DataError(
                f"a reply of {config.get('silo')!r:.80} for round {config.get('round')!r:.80}"
            )
        keep_model(checkpoint, silo, strategy.plan.shown[silo], payload, strategy.layout)

    kept, faults = read_replies(
        exchange(_requests(strategy, names.values(), OWN_MODEL, {})), names, keep
    )
    absent = [pair for pair in sorted({**missing, **faults}.items()) if pair[0] not in kept]
    reporter.note_reasons(absent, "no model of ")
    return sorted(kept)
