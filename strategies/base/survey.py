"""``strategy = survey``: statistics of the data before a training, without a model.

It is no method, and no comparison lists it. A silo answers one message with the statistics of its columns and labels
that its policy allows (``models/evidence/survey.py``). The answer does not depend on the message's content. A policy
allows it by listing ``survey`` by name; ``all`` does not include it.

With ``secure-aggregation = true`` numbers that are made of that answer leave under masks, so that the server opens
their sum over all silos alone (``models/evidence/pooled.py``). First each silo states its columns in its data summary,
without numbers. The message has those that all state alike, and a silo that has other ones refuses.

A silo's answer to a survey: its format in a message, and the server's checks (``models/evidence/survey.py``).

The record has a key for each column and each label, so that the hospital's audit log names them: ``column.age``,
``label.state``; the values are JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from flwr.app import ConfigRecord
from pydantic import AfterValidator, Field, ValidationError, model_validator

from models.evidence.pooled import Layout
from models.evidence.survey import BINS, MISSING
from partitions.common.errors import DataError, UserError
from partitions.common.parsed import Frozen
from partitions.schema import LONGEST_NAME
from strategies.base.info import METHOD, No, Sums
from strategies.base.settings import Common, setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import LARGEST, MOST, is_whole

SURVEY = "survey"
ACTION = "survey"  # of the message that asks for it: "query.survey"
MOST_TIMES = 200


@dataclass(frozen=True)
class SurveySettings:
    """Settings of a survey under masks; an approved study fixes them, and a hospital answers one choice of them."""

    times: str = setting(
        "",
        "under masks: rising times, with commas, at which survival is counted; the last ends it",
    )
    by: str = setting("", "under masks: the column whose categories are the groups of patients")

    @property
    def edges(self) -> list[float]:
        """The times. Raises UserError if they do not rise from above 0."""
        try:
            edges = [float(text) for text in self.times.replace(",", " ").split()]
        except ValueError:
            edges = [math.nan]
        rising = all(a < b < math.inf for a, b in zip([0.0, *edges], edges, strict=False))
        if not rising or len(edges) > MOST_TIMES:
            raise UserError(
                f"survey.times = {self.times[:80]!r}: up to {MOST_TIMES} numbers above 0 that rise are needed here"
            )
        return edges

    def check(self, common: Common) -> None:
        """Raise UserError for invalid times, for settings that nothing reads without masks, and for sums of groups."""
        if common.secure_robust != "none":
            raise UserError(
                f"secure-robust = {common.secure_robust}: a survey has one sum: set it to none"
            )
        if (self.edges or self.by) and not common.secure_aggregation:
            key = "by" if self.by else "times"
            raise UserError(
                f"survey.{key} = {getattr(self, key)[:80]}: it needs secure-aggregation = true"
            )


class Survey(PersonalizedStrategy):
    info = METHOD(
        name=SURVEY,
        title="Statistics of the data, without a model",
        paper="no method: silofl survey",
        spelling="survey",
        sends=("0", "0"),
        uploads={},
        own_model="kept",
        note="nothing leaves but counts, shares and rounded sums",
        receives="nothing",
        dp=No("a survey has no mechanism, and no share of the budget"),
        sums=Sums(weights="silos", also={SURVEY: "silos"}),
        asks="survey",
        listed=True,
    )
    Settings = SurveySettings
    settings: SurveySettings


def require_printable(text: str) -> str:
    """Return the text. Raises UserError if it has other characters."""
    if not text.isprintable():
        raise UserError("it has characters that cannot be printed")
    return text


RECORD = "survey"
PARTS = {"column": "columns", "label": "labels"}
MOST_LEVELS = 10_000
Answer = dict[str, Any]
Text = Annotated[
    str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(require_printable)
]
Count = Annotated[int, Field(ge=0, le=MOST)] | None
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class ColumnAnswer(Frozen):
    """The numbers of one column or label."""

    kind: Literal["number", "date", "category"]
    missing: Count
    unit: Text = "unit"
    range: tuple[Number, Number] = (0.0, 1.0)
    levels: Annotated[tuple[Text, ...], Field(max_length=MOST_LEVELS)] = ()
    cells: tuple[Count, ...] = ()
    mean: Number = 0.0
    sd: Annotated[Number, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def check_cells(self) -> Self:
        """Check that the cells are those of the levels, or of the range."""
        present, category = self.model_fields_set, self.kind == "category"
        cells = BINS if "range" in present else 0
        if (
            category != ("levels" in present)
            or (category and "range" in present)
            or len(self.cells) != (len(self.levels) if category else cells)
            or self.range[0] >= self.range[1]
            or ("mean" in present) != ("sd" in present)
        ):
            raise UserError("its cells, or its moments, do not fit")
        return self


def written_answer(answer: Mapping[str, Any]) -> ConfigRecord:
    """Return the record of an answer: ``n``, its ``day``, and a text for each column and label."""
    values: dict[str, Any] = {"n": answer["n"], "day": answer["day"]}
    for key, part in PARTS.items():
        values |= {f"{key}.{name}": json.dumps(item) for name, item in answer[part].items()}
    return ConfigRecord(values)


def read_answer(record: object) -> Answer:
    """Return the answer of a reply; raise DataError, one line, if it is invalid."""
    if not isinstance(record, ConfigRecord):
        raise DataError("the reply carries no survey")
    answer = Answer(columns={}, labels={})
    for key, value in record.items():
        part, dot, name = key.partition(".")
        if part in PARTS and dot:
            answer[PARTS[part]][_name(name)] = _item(name, value)
        elif key in ("n", "day"):
            answer[key] = value
        else:
            raise DataError(f"the survey has {key!r:.80}, which is not known here")
    day = answer.get("day")
    if (
        not is_whole(answer.get("n"), 0, MOST)
        or not isinstance(day, str)
        or len(day) > 10
        or not day.isprintable()
    ):
        raise DataError(f"the survey says n = {answer.get('n')!r:.40}, day = {day!r:.40}")
    return answer


def read_columns(text: object) -> Layout:
    """Return what a silo states of its columns. Raises DataError, one line, if it is invalid."""
    try:
        stated = json.loads(str(text))
        for part in (stated[part] for part in PARTS.values()):
            for name, item in part.items():
                size = len(item.get("levels", ())) or BINS * ("range" in item)
                _item(_name(name), json.dumps(item | {MISSING: None, "cells": [None] * size}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error}" if isinstance(error, DataError) else ""
        raise DataError(f"it states no columns that can be read{why}") from None
    return {part: stated[part] for part in PARTS.values()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise DataError(f"the survey names a column {name!r:.80}")
    return name


def _item(name: str, text: object) -> dict[str, Any]:
    """Return one column's numbers."""
    try:
        ColumnAnswer.model_validate_json(str(text))
    except ValidationError:
        raise DataError(
            f"the survey of {name[:80]!r} cannot be read, or is out of range"
        ) from None
    item: dict[str, Any] = json.loads(str(text))
    return item
