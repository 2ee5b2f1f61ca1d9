"""The evidence that a silo may report at the end of a run, and how the server reads it (``models/evidence/``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
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
    for name, content in record.items():
        value: Any = content
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


COUNT, SHARE, SIZE = (1.0, MOST), (0.0, 1.0), (0.0, MOST)
BENEFIT, VALUE = (-LARGEST, 1.0), (-LARGEST_VALUE, LARGEST_VALUE)
DISTANCE, WIDTH = (0.0, LARGEST_VALUE), (0.0, 2 * LARGEST_VALUE)
# The ends of a single number
RANGES = {
    "brier": SHARE,
    "calibration_slope": (-LARGEST, LARGEST),
    "calibration_in_the_large": VALUE,  # of a measurement in its unit
    "calibration_intercept": VALUE,
    "ece": SHARE,
    "dice_worst_decile": SHARE,
}
# The ends of each number in a row of a list, and its fewest and most rows
LISTS = {
    "reliability": ([COUNT, SHARE, SHARE], 1, BINS),
    "net_benefit": ([BENEFIT], 2 * len(THRESHOLDS), 2 * len(THRESHOLDS)),
    "conformal": ([COUNT, SHARE], 1, 1),
    "conformal_sets": ([COUNT, *[SHARE, SIZE] * 3], 1, 1),
    "conformal_width": ([COUNT, DISTANCE], 1, 1),
    "conformal_intervals": ([COUNT, *[SHARE, WIDTH] * 3], 1, 1),
    "agreement": ([COUNT, VALUE, VALUE, VALUE], 1, 1),
    "value_bins": ([COUNT, VALUE, VALUE, DISTANCE], 1, BINS),
}
SCORES, ERRORS = [COUNT, *[BENEFIT] * 3], [COUNT, *[DISTANCE] * 4]  # of a subgroup


def _fits(name: str, values: Sequence[float]) -> bool:
    if name.startswith(PREFIX):
        group = name.removeprefix(PREFIX)
        row, fewest, most = ERRORS if len(values) == len(ERRORS) else SCORES, 1, 1
        if not group.isprintable() or not 0 < len(group) <= LONGEST:
            return False
    else:
        row, fewest, most = LISTS.get(name) or ([RANGES[name]], 1, 1)
    rows, rest = divmod(len(values), len(row))
    return (
        not rest
        and fewest <= rows <= most
        and all(low <= v <= high for v, (low, high) in zip(values, row * rows, strict=True))
        and all(
            v == int(v) for v, ends in zip(values, row * rows, strict=True) if ends is COUNT
        )
        and (name != "agreement" or values[2] <= values[1] <= values[3])
    )
