"""``strategy = survey``: statistics of the data before a training, without a model.

It is no method, and no comparison lists it. A silo answers one message with the statistics of its columns and labels
that its policy allows (``models/survey.py``). The answer does not depend on the message's content. A policy
allows it by listing ``survey`` by name; ``all`` does not include it.

A silo's answer to a survey: its format in a message, and the server's checks (``models/survey.py``).

The record has a key for each column and each label, so that the hospital's audit log names them: ``column.age``,
``label.state``; the values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from flwr.app import ConfigRecord

from models.survey import BINS, MISSING
from partitions.common.errors import DataError
from partitions.schema import LONGEST_NAME
from strategies.base.info import MethodInfo
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import LARGEST, MOST, is_whole

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


RECORD = "survey"
PARTS = {"column": "columns", "label": "labels"}
KINDS = ("number", "date", "category")
KEYS = {"kind", "unit", "range", "levels", MISSING, "cells", "mean", "sd"}
MOST_LEVELS = 10_000
Answer = dict[str, Any]


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


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise DataError(f"the survey names a column {name!r:.80}")
    return name


def _item(name: str, text: object) -> dict[str, Any]:
    """Return one column's numbers."""
    try:
        item = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict) or item.get("kind") not in KINDS or not set(item) <= KEYS:
        raise DataError(f"the survey of {name[:80]!r} cannot be read")
    levels = item.get("levels", [])
    cells = item.get("cells", [])
    range_ = item.get("range", [0, 1])
    category = item["kind"] == "category"
    right = (
        isinstance(levels, list) and len(levels) <= MOST_LEVELS and all(map(_is_text, levels))
    )
    right = (
        right
        and isinstance(cells, list)
        and all(map(_is_count, [*cells, item.get(MISSING, "none")]))
    )
    right = right and category == ("levels" in item) and not (category and "range" in item)
    right = right and len(cells) == (
        len(levels) if category else BINS if "range" in item else 0
    )
    right = (
        right and isinstance(range_, list) and len(range_) == 2 and all(map(_is_number, range_))
    )
    right = right and range_[0] < range_[1] and _is_text(item.get("unit", "unit"))
    right = (
        right
        and all(_is_number(item[key]) for key in ("mean", "sd") if key in item)
        and item.get("sd", 0) >= 0
    )
    if not right or ("mean" in item) != ("sd" in item):
        raise DataError(f"the survey of {name[:80]!r} is out of range")
    return item


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def _is_count(value: object) -> bool:
    return value is None or is_whole(value, 0, MOST)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    )
