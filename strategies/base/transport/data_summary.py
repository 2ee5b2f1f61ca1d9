"""Reconciliation of silos' data summaries: no single silo decides the values that all others compute with.

The setting ``agreed`` holds the federation file's values as JSON: ``{"shape": [13], "classes": 2, "samples":
{"north": 50}}``, and optionally ``task`` and ``schema``. Columns and labels are compared by their names
(partitions/schema.py): if only the order differs, a silo maps its own to the agreed one. A value that the file does
not contain is decided by the majority of silos. In a tie, the value whose silo's name comes first is used. For the
number of classes it is the largest value, because a silo that lacks the last classes reports fewer in good faith.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.shapes import Shape, columns, read_shape, write_shape
from partitions.common.errors import UserError
from partitions.common.parsed import parse_json, shorten
from partitions.inputs import order_of
from partitions.labels import MOST_CLASSES, ONE_CLASS, TASKS
from partitions.schema import (
    NO_SCHEMA,
    Schema,
    difference,
    majority,
    parse_schema,
    parse_shared_schema,
    read_schema,
)
from strategies.base.transport.reporting import (
    MOST,
    SCHEMA,
    SUMS,
    WITHHELD,
    is_shape,
    is_whole,
    printable,
)

Summary = Mapping[str, Any]
SCHEMAS = ("declared", SCHEMA)
SPEC = ("own_file", "task", "shape", "classes", *SCHEMAS)
NEEDED = {
    "task": f"one of {', '.join(TASKS)} is needed here",
    "shape": "a list of one to four whole numbers is needed here, or of texts as a silo's data summary has them",
    "classes": f"a whole number up to {MOST_CLASSES} is needed here",
    "samples": "a whole number from 1 on for each silo is needed here",
}
FAR = 100.0  # times a column's usual value: the silo's sums are not used
IMPLAUSIBLE = 1e12  # times: the silo is left out. Units differ by at most 1e9 (cells per litre, 10^9 per litre)


@dataclass(frozen=True)
class DataSpec:
    """The data properties that all silos of a run have in common."""

    own_file: bool  # else their data are simulated
    shape: Shape
    classes: int  # or findings, or measurements: the outputs of the network
    task: str = "multiclass"
    # The federation file's schema: every silo must have all names in it
    declared: Schema = NO_SCHEMA
    schema: Schema = NO_SCHEMA  # the same, completed by the majority of silos

    @property
    def values(self) -> dict[str, Any]:
        """Return the values by name."""
        return {**vars(self)}

    def to_json(self) -> dict[str, Any]:
        """Return the values in their JSON form."""
        return (
            self.values
            | {"shape": write_shape(self.shape)}
            | {key: self.values[key].content for key in SCHEMAS}
        )


@dataclass(frozen=True)
class Reconciled:
    """The summaries that are used, without unused sums; and the silos left out, each with its reason in one line."""

    data_spec: DataSpec
    summaries: dict[str, dict[str, Any]]
    left_out: dict[str, str]


def read_agreed(text: str) -> dict[str, Any]:
    """Return the parsed setting ``agreed``; raise UserError if it is invalid."""
    try:
        stated = parse_json(text or "{}")
    except ValueError:
        stated = None
    if not isinstance(stated, dict) or not set(stated) <= {*NEEDED, SCHEMA}:
        raise UserError(
            f"agreed = {text[:80]!r}: a JSON object of task, shape, classes, samples, schema is needed here"
        )
    samples = stated.get("samples", {})
    fits = {
        "task": stated.get("task", TASKS[0]) in TASKS,
        "shape": is_shape(stated.get("shape", [1])),
        "classes": is_whole(stated.get("classes", 1), 1, MOST_CLASSES),
        "samples": isinstance(samples, dict)
        and all(is_whole(n, 1, MOST) for n in samples.values()),
    }
    if wrong := next((key for key, right in fits.items() if not right), ""):
        raise UserError(f"agreed: {wrong} = {shorten(stated[wrong])}: {NEEDED[wrong]}")
    if SCHEMA in stated:
        check_schema(stated)
    return stated


def check_schema(stated: Mapping[str, Any]) -> None:
    """Raise UserError if the agreed schema is invalid, or its numbers of columns or labels differ from the agreed."""
    try:
        schema = parse_shared_schema(stated[SCHEMA])
    except ValueError as error:
        raise UserError(f"agreed: schema: {error}") from None
    if schema.labels and stated.get("classes", len(schema.labels)) != len(schema.labels):
        raise UserError(
            f"agreed: schema names {len(schema.labels)} labels, and classes = {stated['classes']}"
        )
    shape = read_shape(stated["shape"]) if "shape" in stated else ()
    if schema.features and shape and columns(shape) != len(schema.features):
        raise UserError(
            f"agreed: schema names {len(schema.features)} columns, and shape = {stated['shape']}"
        )


def declared_spec(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a :class:`DataSpec` that ``agreed`` fixes; its schema's labels fix the number of classes."""
    fixed = {key: stated[key] for key in ("task", "shape", "classes") if key in stated}
    schema = stated.get(SCHEMA, {})
    if labels := schema.get("labels"):
        fixed["classes"] = len(labels)
    return fixed | {"declared": schema}


def read_data_spec(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a :class:`DataSpec`, all or some, from their JSON."""
    fixed = {key: stated[key] for key in SPEC if key in stated}
    if "shape" in stated:
        fixed["shape"] = read_shape(stated["shape"])
    return fixed | {key: parse_schema(stated[key]) for key in SCHEMAS if key in stated}


def sample_weights(
    counts: Mapping[str, int], cap: float, agreed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return each silo's weight in a mean: the agreed number of samples, or the reported one, capped.

    The cap is ``cap`` (0: none) times the (lower) median of all.
    """
    counted = {name: (agreed or {}).get(name, n) for name, n in counts.items()}
    known = [n for n in counted.values() if n > 0]
    if not cap or not known:
        return counted
    most = max(int(cap * statistics.median_low(known)), 1)
    return {name: n if name in (agreed or {}) else min(n, most) for name, n in counted.items()}


def reconcile(
    summaries: Sequence[Summary], stated: Mapping[str, Any], by: str, *, sums: bool
) -> Reconciled:
    """Return the values that all silos use, and the silos that do not fit. At least one summary; their names differ.

    ``stated`` holds the fixed values of :class:`DataSpec`, ``by`` their source: "the federation file has". ``sums``:
    whether the run needs tables' sums; else none are used.
    """
    rest = sorted(summaries, key=lambda summary: str(summary["name"]))
    spec: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for key in SPEC:
        if not rest:
            break
        spec[key] = _agreed_value(key, [_value(summary, key) for summary in rest], stated, spec)
        source = by if key in stated else "most silos have"
        for summary in rest:
            if reason := _misfit(key, _value(summary, key), spec, source):
                left_out[summary["name"]] = printable(
                    f"{summary['name']} is left out: it has {reason}"
                )
        rest = [summary for summary in rest if summary["name"] not in left_out]
    schema, unused = spec.get(SCHEMA, NO_SCHEMA), () if sums else (*SUMS, WITHHELD)
    used = {
        s["name"]: reorder_columns({k: v for k, v in s.items() if k not in unused}, schema)
        for s in rest
    }
    for name, (ratio, column) in _usual(used).items():
        times = f"values in column {column + 1} that are {ratio:.3g} times those of the others"
        if ratio > IMPLAUSIBLE:
            left_out[name] = f"{name} is left out: its sums say that it has {times}"
            del used[name]
        elif ratio > FAR:
            used[name] = {k: v for k, v in used[name].items() if k not in SUMS}
            used[name][WITHHELD] = f"it has {times}: another unit?"
    return Reconciled(
        DataSpec(**{"own_file": True, "shape": (), "classes": 1, **spec}), used, left_out
    )


def _value(summary: Summary, key: str) -> Any:
    if key in SCHEMAS:
        return read_schema(summary.get(SCHEMA, ""))
    return read_shape(summary["shape"]) if key == "shape" else summary[key]


def _agreed_value(
    key: str, values: Sequence[Any], stated: Mapping[str, Any], spec: Mapping[str, Any]
) -> Any:
    """Return the value for all silos: the stated one, or the majority's; for a schema, part by part."""
    if key == "declared":
        return stated.get(key, NO_SCHEMA)
    if key != SCHEMA:
        return stated.get(key, _most_stated(values))
    first, most = stated.get(key, spec["declared"]), majority(values)
    return Schema(
        first.features or most.features,
        first.labels or most.labels,
        first.dtype or most.dtype,
        inputs=tuple(sorted({**dict(most.inputs), **dict(first.inputs)}.items())),
    )


def reorder_columns(summary: dict[str, Any], agreed: Schema) -> dict[str, Any]:
    """Return a data summary with the sums of its columns in the agreed order, then those of a regression's labels."""
    schema = _value(summary, SCHEMA)
    d = columns(read_shape(summary["shape"]))
    order = order_of(schema.names, agreed.names) or list(range(d))
    if summary.get("task") == "regression":
        order += [
            d + i for i in order_of(schema.labels, agreed.labels) or range(summary["classes"])
        ]
    return summary | {key: [summary[key][i] for i in order] for key in SUMS if key in summary}


def _most_stated(values: Sequence[Any]) -> Any:
    """Return the most frequent value; in a tie the largest number, or else the first."""
    counts = Counter(values)
    most = [value for value, count in counts.items() if count == max(counts.values())]
    return max(most) if isinstance(most[0], int) and not isinstance(most[0], bool) else most[0]


def misfit(summary: Summary, spec: Mapping[str, Any], source: str) -> str:
    """Return a text on a silo's first value that does not fit the agreed ones; empty if all fit."""
    return next(
        (r for key in SPEC if (r := _misfit(key, _value(summary, key), spec, source))), ""
    )


def _misfit(key: str, has: Any, spec: Mapping[str, Any], source: str) -> str:
    """Return a text on a silo's value that does not fit, with the remedy; empty if it fits."""
    holds = spec[key]
    # Tasks in which a silo may lack some of the classes
    parts = spec.get("task") in (*ONE_CLASS, "segmentation")
    if key in SCHEMAS:
        return difference(has, holds, source, required=key == "declared", subset=parts)
    if has == holds or (key == "classes" and parts and has < holds):
        return ""
    match key:
        case "own_file":
            kinds = {True: "data of its own", False: "simulated data"}
            return f"{kinds[has]}, {source} {kinds[holds]}"
        case "task":
            decides = "`task` in the data file, or in the federation file, decides"
            return f"labels for {has}, {source} for {holds} ({decides})"
        case "shape":
            return f"samples of shape {has}, {source} {holds} (`shape` in the federation file decides)"
    what = "classes" if parts else "labels per sample"
    return f"{has} {what}, {source} {holds} (`classes` in the federation file, or in the data files, decides)"


def _usual(summaries: Mapping[str, Summary]) -> dict[str, tuple[float, int]]:
    """Return each silo's largest ratio of a column's root mean square to its median over silos, and that column.

    A column that is all 0 in a silo does not enter the median: a value may be measured in some hospitals only.
    """
    names = [name for name, summary in summaries.items() if "sum" in summary]
    if not names:
        return {}
    size = torch.tensor([[summaries[n]["n_train"]] for n in names], dtype=torch.float64)
    values = (
        torch.tensor([summaries[n]["square_sum"] for n in names], dtype=torch.float64) / size
    ).sqrt()
    usual = torch.where(values > 0, values, torch.nan).nanmedian(0).values
    most, column = torch.where(values > 0, values / usual, 0.0).max(1)
    return {name: (float(most[i]), int(column[i])) for i, name in enumerate(names)}
