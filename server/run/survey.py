"""Survey of the silos' data: one exchange, the answers, and the reasons of silos without an answer.

With ``secure-aggregation = true`` the answers are numbers under masks: the columns that all silos state alike, then
keys and sum as in a round of a training (``server/run/secure``), over one round.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from models.evidence.pooled import Layout, cells_of, groups_in, numbers_of, read_sum
from models.evidence.survey import STEP
from partitions.common.errors import DataError, RunFailedError
from partitions.common.messages import MASKED, SHARE
from partitions.common.sum_weights import whole
from server.results.reasons import merge_reasons
from server.results.run_directory import RunDirectory
from server.results.survey import Surveyed
from server.run.collector import Collector
from server.run.exchange import Exchange, TimeoutPolicy
from server.run.limits import SUMMARY_BYTES, check_reply
from server.run.registration.data_summaries import SUMMARY_SECONDS
from server.run.registration.registration import Registration
from server.run.secure.rounds import AttemptFailedError, SecureRounds
from strategies.base.aggregation.secure import add_integers, labels_in, with_sum
from strategies.base.aggregation.spread import COUNT, gather_sums
from strategies.base.plan import RoundPlan
from strategies.base.run_settings import RunSettings
from strategies.base.survey import (
    ACTION,
    PARTS,
    RECORD,
    Answer,
    Survey,
    read_answer,
    read_columns,
)
from strategies.base.transport.payload import Update
from strategies.base.transport.reporting import COLUMNS, read_replies

SLACK = 4  # times: a rounded deviation may be larger than the range


class SurveyExchange:
    """The messages of one survey to the silos that have registered, and their replies. Raises UserError."""

    def __init__(
        self, grid: Grid, settings: RunSettings, directory: RunDirectory | None
    ) -> None:
        self.registration = r = Registration(grid, settings, directory)
        r.register()
        self.timeout = settings.common.round_timeout
        self.policy = TimeoutPolicy(min(self.timeout, SUMMARY_SECONDS))

    @property
    def names(self) -> dict[int, str]:
        return {info.node_id: name for name, info in self.registration.silos.items()}

    def messages(self, silos: Collection[str], **config: Any) -> list[Message]:
        """Return a message with this config to each of these silos."""
        return [
            Message(
                RecordDict(
                    {"config": ConfigRecord({"run": self.registration.run_name, **config})}
                ),
                dst_node_id=node,
                message_type=f"{MessageType.QUERY}.{ACTION}",
                ttl=self.timeout,
            )
            for node, name in self.names.items()
            if name in silos
        ]

    def run(self, messages: Sequence[Message]) -> list[Message]:
        r = self.registration
        exchange = Exchange(
            r.grid, self.policy, most=lambda _: SUMMARY_BYTES, receipts=r.receipts
        )
        return exchange.run(messages)

    def without(self, answered: Collection[str], faults: Mapping[str, str]) -> dict[str, str]:
        """Return the silos without an answer, and why. Raises RunFailedError if no silo answered."""
        r = self.registration
        r.reporter.note_reasons(faults.items(), "no survey of ")
        silent = {*self.names.values()} - {*answered}
        late = dict.fromkeys(silent, f"no reply within {self.policy.timeout:g} s")
        without = dict(sorted({**late, **r.left_out, **faults}.items()))
        if not answered:
            reasons = "; ".join(merge_reasons(without.items()))
            raise RunFailedError(f"no silo answered the survey ({reasons})")
        r.reporter.event("survey", silos=len(answered), without=without)
        return without


def survey_silos(
    grid: Grid,
    settings: RunSettings,
    directory: RunDirectory | None = None,
    run_config: Mapping[str, Any] | None = None,
) -> Surveyed:
    """Return the silos' answers, or their sum. Raises UserError, or RunFailedError if no silo answers.

    ``run_config``: the settings as the silos have them.
    """
    exchange = SurveyExchange(grid, settings, directory)
    if settings.common.secure_aggregation:
        return SummedSurvey(exchange, settings, run_config or settings.flat()).run()
    replies = exchange.run(exchange.messages(exchange.names.values()))
    answers, faults = read_replies(replies, exchange.names, _read_answer)
    return Surveyed(dict(sorted(answers.items())), exchange.without(answers, faults))


def _read_answer(reply: Message, silo: str) -> Answer:
    check_reply(reply.content, (RECORD,), SUMMARY_BYTES)
    return read_answer(reply.content.get(RECORD))


class SummedSurvey:
    """A survey whose silos add masks to their numbers. Raises RunFailedError if they state no column alike."""

    def __init__(
        self, exchange: SurveyExchange, settings: RunSettings, run_config: Mapping[str, Any]
    ) -> None:
        self.exchange, self.registration = exchange, exchange.registration
        self.common, method = settings.common, settings.method
        self.layout, self.unlike = self._agree()
        self.groups, self.times = groups_in(self.layout, method.by), method.edges
        # No layer of a model is needed
        self.strategy = Survey(settings.common, method, cast(Any, None))
        self.secure = SecureRounds(Collector(self.registration), None, run_config)

    def _agree(self) -> tuple[Layout, list[str]]:
        """Return what all silos state alike of their columns, and the names of the other columns."""
        r, stated = self.registration, dict[str, Layout]()
        for name, summary in r.summaries.items():
            try:
                stated[name] = read_columns(summary.get(COLUMNS))
            except DataError as error:
                r.leave_out(name, f"{name} is left out: {error}")
                del r.silos[name]
        layout: Layout = {part: {} for part in PARTS.values()}
        unlike = dict[str, None]()
        for part, columns in layout.items():
            for name, item in ((n, i) for of in stated.values() for n, i in of[part].items()):
                if all(of[part].get(name) == item for of in stated.values()):
                    columns[name] = item
                else:
                    unlike[name] = None
        if not any(layout.values()):
            raise RunFailedError("the hospitals state no column alike: nothing can be summed")
        return layout, [*unlike]

    def run(self) -> Surveyed:
        """Return the sum, repeated where it cannot be opened."""
        while True:
            try:
                if (surveyed := self._attempt()) is not None:
                    return surveyed
            except AttemptFailedError as error:
                self.secure.repeat_round(1, error)

    def _attempt(self) -> Surveyed | None:
        """Return the sum; None if too few silos are here yet. Raises AttemptFailedError."""
        strategy, cells = self.strategy, cells_of(self.times)
        plain = {"run": self.registration.run_name, "run_id": 0}
        silos = self.registration.silos.values()
        strategy.start_round(1)
        strategy.plan = RoundPlan(numbers=plain, last=1).with_silos(silos, self.common)
        if (plan := self.secure.begin(strategy, 1)) is None:
            return None
        strategy.plan = plan
        members = strategy.silos.keys() - plan.left_out.keys()
        messages = self.exchange.messages(
            members,
            **{"round": 1, "participants": len(members), SHARE: 1 / len(members)},
            **{COLUMNS: json.dumps(self.layout)},
        )
        self.secure.attach(strategy, messages)
        replies = self.exchange.run(messages)
        self.secure.take(strategy, replies)
        size = COUNT * len(numbers_of({}, self.layout, self.groups, cells))

        def read(reply: Message, silo: str) -> Tensor:
            check_reply(reply.content, (MASKED,), SUMMARY_BYTES)
            return with_sum(reply, Update(silo, 1, {}, {}, {}), size).vector

        vectors, faults = read_replies(replies, strategy.plan.nodes, read)
        summed = whole(vectors, labels_in(strategy))
        lost = dict.fromkeys(vectors, "a silo of its group is missing (secure-group)")
        lost = {name: why for name, why in lost.items() if name not in summed}
        without = self.exchange.without(summed, {**plan.left_out, **lost, **faults})
        total = add_integers([vectors[name] for name in summed])[None]
        [opened] = self.secure.unmask(strategy, total, summed)
        numbers, people = gather_sums(opened).tolist(), self._patients(summed)
        if max(numbers) > SLACK * (people + STEP * len(summed)):
            raise RunFailedError(
                f"the sum cannot be of {people} patients: a hospital sent no answer, and a sum does not show which one"
            )
        answers = read_sum(numbers, self.layout, self.groups, cells)
        return Surveyed(answers, without, summed, self.times, self.unlike)

    def _patients(self, silos: Collection[str]) -> int:
        """Return the most patients that these silos may have: the samples of their data summaries."""
        known = (self.registration.summaries[name] for name in silos)
        return sum(s["n_train"] + s["n_val"] + s["n_test"] for s in known)
