"""Silos' reports in addition to their vectors: listed metrics, and the data summary; with the server's checks.

A silo sends nothing that is not on these lists (``client/egress.py``). The server accepts nothing else and nothing out
of range: one silo's invalid values must not stop the others or enter the history.

A silo's reply when its state is damaged: the text is written and read here.

Only the text of an error reply reaches the server, so both directions are in one file.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Message, MetricRecord

from models.metrics import RANGES
from models.privacy.accountant import LEAST_NOISE, ORDERS
from models.shapes import columns, read_shape, write_shape
from models.tasks import TASKS, all_metrics
from partitions.common.errors import DataError, UserError
from partitions.common.names import escape
from partitions.common.parsed import shorten
from partitions.labels import MOST_CLASSES
from partitions.schema import read_schema

T = TypeVar("T")
SNAPSHOTS = ("received", "personal")
SPLITS = ("train", "val", "test")
SECONDS = ("seconds.train", "seconds.evaluate")
EPSILON, DELTA, STEPS = "epsilon", "delta", "dp_steps"
PRIVACY = (EPSILON, DELTA, STEPS)  # this silo's privacy cost in the run so far

# Whole numbers, with the minimum of each
COUNTS = {"n_train": 1, "n_val": 0, "n_test": 0, "threads": 1}
SUMS = ("sum", "square_sum")  # per column of a table, and per measurement that is to be learned
KINDS = ("own_file", "simulated")  # one is true
TEXTS = ("device", "versions")
WITHHELD = "sums_withheld"  # the reason why a silo sends no sums
# Names of columns and labels, units, ranges, number format, settings of the import, as JSON (partitions/schema.py)
SCHEMA = "schema"
COLUMNS = "columns"  # of a survey under masks: what it states of them, as JSON
OPTIONAL = (*SUMS, WITHHELD, SCHEMA, COLUMNS)
SUMMARY = ("name", *COUNTS, "task", "shape", "classes", *KINDS, *TEXTS, *OPTIONAL)
LONGEST = 300  # characters of any text from a silo
LONGEST_NAME = 100
MOST = 2**31  # samples of a silo
LARGEST = 3.5e38  # more than any float32


@cache
def allowed_metrics() -> frozenset[str]:
    """Return the names of the scalars that may leave a silo."""
    return frozenset(
        {f"{s}.{p}.{m}" for s in SNAPSHOTS for p in SPLITS for m in all_metrics()}
        | {*SECONDS, *PRIVACY}
    )


def read_metrics(record: object) -> dict[str, float]:
    """Return the metrics of a reply; raise DataError, with one line, for one that is unlisted or out of range."""
    if not isinstance(record, MetricRecord):
        raise DataError("the reply carries no metrics")
    allowed, metrics = allowed_metrics(), dict[str, float]()
    for name, value in record.items():
        if name not in allowed:
            raise DataError(f"'{name[:80]}' is no metric that is known here")
        if isinstance(value, list) or not _in_range(name, value):
            raise DataError(f"the metric '{name}' is {shorten(value)}")
        metrics[name] = float(value)
    if fault := cost_fault({name: metrics[name] for name in PRIVACY if name in metrics}):
        raise DataError(fault)
    return metrics


def read_replies(
    replies: Iterable[Message], names: Mapping[int, str], read: Callable[[Message, str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Return by silo what ``read(reply, silo)`` makes of its reply, and why another silo's cannot be used.

    Only DataError is a silo's fault; any other error is one of the program.
    """
    values, faults = dict[str, T](), dict[str, str]()
    for reply in replies:
        silo = names.get(reply.metadata.src_node_id, f"node {reply.metadata.src_node_id}")
        try:
            if reply.has_error():
                raise DataError(reason_of(reply.error.reason))
            values[silo] = read(reply, silo)
        except DataError as error:
            faults[silo] = str(error)
    return values, faults


def metrics_of_reply(reply: Message, silo: str = "") -> dict[str, float]:
    """Return a reply's metrics. Raises DataError if it has none that are usable."""
    return read_metrics(reply.content.get("metrics"))


def cost_fault(cost: Mapping[str, float]) -> str:
    """Return why a silo's privacy cost cannot be; empty: it can, or there is none.

    The least noise that settings allow costs 62.5 a step at order 1.25, the smallest of the accountant's.
    """
    if not cost:
        return ""
    if cost.keys() != {*PRIVACY}:
        return f"of {', '.join(PRIVACY)} the reply has only {', '.join(cost)}"
    if not 0 < cost[DELTA] < 1 or not cost[STEPS] <= MOST:
        return f"the privacy cost has delta = {cost[DELTA]:g} and {cost[STEPS]:g} steps"
    most = cost[STEPS] * ORDERS[0] / (2 * LEAST_NOISE**2) - math.log(cost[DELTA]) / (
        ORDERS[0] - 1
    )
    if cost[EPSILON] > most:
        return f"the metric 'epsilon' is {cost[EPSILON]:g}, and {cost[STEPS]:g} steps cost at most {most:.3g}"
    return ""


def _in_range(name: str, value: float) -> bool:
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return False
    if name in (*SECONDS, *PRIVACY):
        return 0 <= value < (1 if name == DELTA else math.inf)
    low, high = RANGES.get(name.rpartition(".")[2], (0.0, 1.0))
    return math.isnan(value) or low <= value <= high


def printable(text: object) -> str:
    """Return text from a silo as one printable line of at most 300 characters, for display and storage.

    Line ends and tabs become spaces. Unprintable characters (terminal escape sequences, direction marks, half of a
    surrogate pair) become their Python escapes.
    """
    line = " ".join(str(text)[: 4 * LONGEST].split())
    shown = escape(line)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


def read_data_summary(record: object) -> dict[str, Any]:
    """Return a silo's data summary, reduced to the listed entries.

    Raises DataError, with one line, if a listed entry has the wrong type or is out of its bounds.
    """
    if not isinstance(record, ConfigRecord):
        raise DataError("the reply carries no data summary")
    summary: dict[str, Any] = {key: record[key] for key in SUMMARY if key in record}
    missing = [key for key in SUMMARY if key not in summary and key not in OPTIONAL]
    if missing:
        raise DataError(f"its data summary lacks {', '.join(missing)}")
    name = summary["name"]
    if not _is_name(name):
        raise DataError(
            f"its name is {name!r}: a line of at most {LONGEST_NAME} characters without / that begins with a letter "
            "or a digit is wanted"
        )
    for fault in _faults(summary):
        raise DataError(f"{name}'s data summary {fault}")
    return summary


def _faults(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a summary."""
    right = {
        **{key: is_whole(summary[key], least, MOST) for key, least in COUNTS.items()},
        "shape": is_shape(summary["shape"]),
        "classes": is_whole(summary["classes"], 1, MOST_CLASSES),
        "task": isinstance(summary["task"], str) and summary["task"] in TASKS,
        **{key: isinstance(summary[key], bool) for key in KINDS},
    }
    yield from (f"says {key} = {summary[key]!r}" for key, fits in right.items() if not fits)
    if summary["own_file"] == summary["simulated"]:
        yield f"says own_file = {summary['own_file']} and simulated = {summary['simulated']}"
    for key in (*TEXTS, WITHHELD):
        text = summary.get(key, "")
        if not isinstance(text, str) or not text.isprintable() or len(text) > LONGEST:
            yield f"has no line of at most {LONGEST} characters as {key}"
    if all(right.values()):
        yield from _faulty_schema(summary)
    if any(key in summary for key in SUMS) and all(right.values()):
        yield from _faulty_sums(summary)


def _faulty_schema(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a schema, which must name all columns of the tables or none, and all labels or none."""
    text = summary.get(SCHEMA, "")
    if not isinstance(text, str):
        yield f"says schema = {text!r:.80}"
        return
    try:
        schema = read_schema(text)
    except ValueError as error:
        yield f"has no usable schema: {error}"
        return
    for what, count, names in (
        ("columns", columns(read_shape(summary["shape"])), schema.names),
        ("labels", summary["classes"], schema.labels),
    ):
        if names and len(names) != count:
            yield f"names {len(names)} {what}, of {count}"


def columns_of(summary: Mapping[str, Any]) -> int:
    """Return the number of columns with sums in a summary: a table's, and the measurements of a regression."""
    return columns(read_shape(summary["shape"])) + (
        summary["classes"] if summary.get("task") == "regression" else 0
    )


def _faulty_sums(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of sums: a sum of squares must be at least the square of the sum, divided by n."""
    count, n = columns_of(summary), summary["n_train"]
    if not count:
        yield f"has sums of columns, and samples of shape {summary['shape']}"
    for key in SUMS:
        sums = summary.get(key)
        if not isinstance(sums, list) or len(sums) != count or not all(map(_is_finite, sums)):
            yield f"has no {key} of {count} finite numbers"
    for total, square in zip(summary["sum"], summary["square_sum"], strict=True):
        if (
            abs(total) / n > LARGEST
            or not total * (total / n) * (1 - 1e-9) <= square <= n * LARGEST**2
        ):
            yield f"has a sum of {total!r} and one of squares of {square!r}, which cannot be of {n} samples"


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_name(name: object) -> bool:
    """Return whether a silo may have this name: one line, neither a path nor a spreadsheet's formula."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name) <= LONGEST_NAME
        and name == name.strip()
        and name[0].isalnum()
        and not {*name} & {"/", "\\"}
    )


def is_shape(value: object) -> bool:
    """Return whether a sample may have this shape, in the notation of models/shapes.py."""
    try:
        return isinstance(value, list) and write_shape(read_shape(value)) == value
    except ValueError:
        return False


def reason_of(text: str | None) -> str:
    """Return the silo's own text for its failure, without the class that Flower adds to errors before the app runs."""
    reason = re.sub(r"^<class '[^']*'>:<'(.*)'>$", r"\1", text or "", flags=re.DOTALL)
    return printable(reason) or "failed without a reason"


def is_refusal(reason: str) -> bool:
    """Return whether a silo's own policy is the reason (client/protocol/policy.py)."""
    return " refuses: its policy " in reason


def is_whole(value: object, lowest: int, highest: int) -> bool:
    """Return whether a value is a whole number within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


NUMBER = r"\d{1,9}"
TEXT = re.compile(
    rf"its state of round ({NUMBER}) is damaged, and it can go back to (no round|rounds? [\d, ]+): "
)
MOST_STATES = 10  # limit of the states named in a reply; a silo keeps fewer


class DamagedStateError(UserError):
    """Error for a damaged state of a silo: the server decides whether the run goes back.

    ``round`` is the round of that state, ``kept`` the rounds of earlier states that can be read (0: the damaged state
    is the silo's first, and there was none before it).
    """

    def __init__(self, round: int, kept: Sequence[int], reason: str) -> None:
        back = (
            f"round{'s' * (len(kept) > 1)} {', '.join(map(str, kept))}" if kept else "no round"
        )
        super().__init__(
            f"its state of round {round} is damaged, and it can go back to {back}: {reason}"
        )


@dataclass(frozen=True)
class Damage:
    """A damaged state of a silo, read from the silo's reply."""

    silo: str
    round: int  # the round that must be repeated to rebuild the state
    kept: tuple[int, ...]
    reason: str

    def is_mended_from(self, done: int) -> bool:
        """Return whether the silo can rebuild the state if the run goes back to the end of round ``done``."""
        goes_back = any(kept <= done for kept in self.kept)
        return done == 0 or (done < self.round and goes_back)


def damages(
    replies: Iterable[Message], names: Mapping[int, str], server_round: int
) -> list[Damage]:
    """Return the damaged states reported in a round's replies, sorted by silo. ``names``: silo names by node."""
    result = []
    for reply in replies:
        silo = names.get(reply.metadata.src_node_id)
        if silo is None or not reply.has_error():
            continue
        reason = reason_of(reply.error.reason)
        if (text := TEXT.match(reason)) is None:
            continue
        kept = tuple(int(number) for number in re.findall(NUMBER, text[2])[:MOST_STATES])
        if 0 < (number := int(text[1])) < server_round:
            result.append(Damage(silo, number, tuple(k for k in kept if k < number), reason))
    return sorted(result, key=lambda damage: damage.silo)
