"""The evidence that a silo may report at the end of a run, and how the server reads it (``models/evidence/``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flwr.app import MetricRecord

from models.evidence.calibration import BINS, LARGEST, THRESHOLDS
from models.evidence.measure import EVIDENCE, MEASUREMENT, PREFIX, Evidence
from partitions.common.errors import DataError
from partitions.patients import LONGEST, MOST_GROUPS
from strategies.base.transport.reporting import MOST

WORDS = {  # the policy's words for values of another name
    "conformal_sets": "conformal",
    "conformal_width": "conformal",
    "conformal_intervals": "conformal",
    "value_bins": "reliability",
}
OF_MEASUREMENTS = (  # the values that each of several measurements has under its name
    *(
        "calibration_slope",
        "calibration_intercept",
        "calibration_in_the_large",
        "agreement",
        "value_bins",
    ),
    *("conformal_width", "conformal_intervals"),
)
LARGEST_VALUE = 1e12  # of a measurement, in its own unit
ACTION = "evidence"  # of the message that asks for it: "evaluate.evidence"


def split_name(name: str) -> tuple[str, str]:
    """Return the measurement that a value belongs to ("" for any other value), and the value's name there."""
    if not name.startswith(MEASUREMENT):
        return "", name
    measurement, _, key = name.removeprefix(MEASUREMENT).rpartition(".")
    return measurement, key


def evidence_kind(name: str) -> str:
    """Return the word by which a policy allows this value; empty for an unknown name."""
    if name.startswith(PREFIX):
        return "subgroups"
    measurement, name = split_name(name)
    if measurement and name not in OF_MEASUREMENTS:
        return ""
    return WORDS.get(name, name if name in EVIDENCE and name != "subgroups" else "")


def fewest(name: str, value: float | list[float]) -> float:
    """Return the fewest samples behind any number of this value; infinite where all test samples are."""
    if not isinstance(value, list):
        return math.inf
    _, name = split_name(name)
    if name in ("reliability", "value_bins"):
        return min(value[:: 3 if name == "reliability" else 4], default=0.0)
    return (
        value[0] if evidence_kind(name) in ("conformal", "agreement", "subgroups") else math.inf
    )


def read_evidence(record: object, measured: Collection[str] = ()) -> Evidence:
    """Return the evidence of a reply. ``measured``: the names of the measurements, if there are several.

    Raises DataError, with one line, for a value that is unknown or out of range.
    """
    if not isinstance(record, MetricRecord):
        raise DataError("the reply carries no evidence")
    values: Evidence = {}
    for name, given in record.items():
        value: Any = given
        measurement, key = split_name(name)
        if not evidence_kind(name) or (name != key and measurement not in measured):
            raise DataError(f"'{name[:80]}' is no evidence that is known here")
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, list) == (key in RANGES) or not all(
            math.isfinite(v) for v in numbers
        ):
            raise DataError(f"the evidence '{name}' is {value!r:.80}")
        if not _fits(key, [float(v) for v in numbers]):
            raise DataError(f"the evidence '{name}' is out of range: {value!r:.80}")
        values[name] = [float(v) for v in value] if isinstance(value, list) else float(value)
    if (groups := sum(name.startswith(PREFIX) for name in values)) > MOST_GROUPS:
        raise DataError(
            f"the evidence is of {groups} subgroups; at most {MOST_GROUPS} are read"
        )
    return values


RANGES = {
    "brier": (0.0, 1.0),
    "calibration_slope": (-LARGEST, LARGEST),
    "calibration_in_the_large": (-LARGEST_VALUE, LARGEST_VALUE),  # of a measurement in its unit
    "calibration_intercept": (-LARGEST_VALUE, LARGEST_VALUE),
    "ece": (0.0, 1.0),
    "dice_worst_decile": (0.0, 1.0),
}


def _fits(name: str, values: Sequence[float]) -> bool:
    if name in RANGES:
        return RANGES[name][0] <= values[0] <= RANGES[name][1]
    return _group(name, values) if name.startswith(PREFIX) else LISTS[name](values)


def _bins(v: Sequence[float]) -> bool:
    rows = [v[i : i + 3] for i in range(0, len(v), 3)]
    return (
        0 < len(v) <= 3 * BINS
        and len(v) % 3 == 0
        and all(_count(r[0]) and _shares(r[1:]) for r in rows)
    )


def _benefits(v: Sequence[float]) -> bool:
    return len(v) == 2 * len(THRESHOLDS) and all(-LARGEST <= value <= 1 for value in v)


def _threshold(v: Sequence[float]) -> bool:
    return len(v) == 2 and _count(v[0]) and _shares(v[1:])


def _sets(v: Sequence[float]) -> bool:
    return (
        len(v) == 7
        and _count(v[0])
        and _shares(v[1::2])
        and all(0 <= size <= MOST for size in v[2::2])
    )


def _group(name: str, v: Sequence[float]) -> bool:
    group = name.removeprefix(PREFIX)
    named = group.isprintable() and 0 < len(group) <= LONGEST
    if len(v) == 5:  # of measurements: errors
        return named and _count(v[0]) and all(0 <= value <= LARGEST_VALUE for value in v[1:])
    return (
        named
        and len(v) == 4
        and _count(v[0])
        and all(-LARGEST <= value <= 1 for value in v[1:])
    )


def _agreement(v: Sequence[float]) -> bool:
    return (
        len(v) == 4 and _count(v[0]) and -LARGEST_VALUE <= v[2] <= v[1] <= v[3] <= LARGEST_VALUE
    )


def _value_bins(v: Sequence[float]) -> bool:
    rows = [v[i : i + 4] for i in range(0, len(v), 4)]
    return (
        0 < len(v) <= 4 * BINS
        and len(v) % 4 == 0
        and all(_count(r[0]) and _values(r[1:]) and r[3] >= 0 for r in rows)
    )


def _width(v: Sequence[float]) -> bool:
    return len(v) == 2 and _count(v[0]) and 0 <= v[1] <= LARGEST_VALUE


def _intervals(v: Sequence[float]) -> bool:
    return (
        len(v) == 7
        and _count(v[0])
        and _shares(v[1::2])
        and all(0 <= w <= 2 * LARGEST_VALUE for w in v[2::2])
    )


def _values(values: Sequence[float]) -> bool:
    return all(-LARGEST_VALUE <= value <= LARGEST_VALUE for value in values)


def _count(value: float) -> bool:
    return 1 <= value <= MOST and value == int(value)


def _shares(values: Sequence[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


LISTS: dict[str, Callable[[Sequence[float]], bool]] = {
    "reliability": _bins,
    "net_benefit": _benefits,
    "conformal": _threshold,
    "conformal_sets": _sets,
    "conformal_width": _width,
    "conformal_intervals": _intervals,
    "agreement": _agreement,
    "value_bins": _value_bins,
}
