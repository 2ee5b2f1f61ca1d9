"""``strategy = survey``: statistics of the data before a training, without a model.

It is no method, and no comparison lists it. A silo answers one message with the statistics of its columns and labels
that its policy allows (``models/survey.py``). The answer does not depend on the message's content. A policy
allows it by listing ``survey`` by name; ``all`` does not include it.
"""

from __future__ import annotations

from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.strategy import PersonalizedStrategy

SURVEY = "survey"
ACTION = "survey"  # of the message that asks for it: "query.survey"


class Survey(PersonalizedStrategy):
    info: ClassVar[MethodInfo] = MethodInfo(
        name=SURVEY,
        title="Statistics of the data, without a model",
        paper="no method: silofl survey",
        spelling="survey",
        sends=("0", "0"),
        uploads=(),
        whole=False,
        own_model="kept",
        note="nothing leaves but counts, shares and rounded sums",
        receives="nothing",
        not_dp="a survey has no mechanism, and no share of the budget",
        asks="survey",
        listed=True,
    )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        raise UserError("strategy = survey trains nothing: silofl survey runs it")
