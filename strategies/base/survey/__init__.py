"""``strategy = survey``: statistics of the data before a training, without a model.

It is no method, and no comparison lists it. A silo answers one message with what its policy lets out of its columns and
labels (``models/survey/columns.py``); the message brings nothing that the answer depends on. A policy that lists
``survey`` by name allows it; ``all`` does not mean it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.strategy import PersonalizedStrategy

SURVEY = "survey"
ACTION = "survey"  # of the message that asks for it: "query.survey"


@dataclass(frozen=True)
class SurveySettings:
    """A survey has no settings: whatever it could ask for, a server could bisect with."""


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
    Settings = SurveySettings

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        raise UserError("strategy = survey trains nothing: silofl survey runs it")
