"""``strategy = survey``: statistics of the data before a training, without a model.

It is no method, and no comparison lists it. A silo answers one message with the statistics of its columns and labels
that its policy allows (``models/survey/columns.py``). The answer does not depend on the message's content. A policy
allows it by listing ``survey`` by name; ``all`` does not include it. Exact sums for ComBat have their own rule,
``combat``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy

SURVEY = "survey"
ACTION = "survey"  # of the message that asks for it: "query.survey"


@dataclass(frozen=True)
class SurveySettings:
    """Settings of ComBat's sums only: with settings of the survey itself, a server could bisect.

    A study declares them, and a hospital answers only one choice of them (``client/survey/combat.py``).
    """

    harmonize: str = setting("", "ask for exact sums of these columns, with commas, or of all numbers, for ComBat")
    covariates: str = setting("", "columns, with commas, whose effects ComBat keeps: what differs between patients")
    shrink: bool = setting(
        True, "draw each hospital's shift and spread to their means over its columns (empirical Bayes)"
    )


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
        note="nothing leaves but counts, shares and rounded sums, and exact ones where `combat` allows them",
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
