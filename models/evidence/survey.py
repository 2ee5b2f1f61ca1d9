"""Statistics of one hospital's columns and labels, released under its policy: counts, missing values, moments.

Each column is a table of cells that cover all samples: ten equal parts of the range in the hospital's own schema, or
the categories of its recipe, and the missing values. So a server cannot choose a border. Cells of few patients are
suppressed, and with them others from which they would follow (``evidence/subgroups.py``). An empty cell is reported
like a suppressed one.

All statistics are per patient, so that a patient with a thousand records has no more influence than one with a single
record. A count is of the patients with a sample in the cell, in multiples of :data:`STEP`. Means and deviations are of
the patients' means of values clipped to the range. They are rounded like the sums of a training
(``standardisation.rounded_sums``), to :data:`DIGITS` digits. The answer depends on the data alone, and a repeated
query gives the same one.

Source: Willenborg and de Waal, Elements of Statistical Disclosure Control (2001), on suppression and rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.evidence.subgroups import releasable_subgroups
from models.standardisation import rounded_sums
from partitions.labels import ONE_CLASS
from partitions.recipes.recipe import Recipe
from partitions.schema import Feature, Schema
from partitions.splits import Array, Split, tables_of

BINS = 10  # cells of a range
STEP = 5  # counts are multiples of it
DIGITS = 4  # of a mean, a deviation
MISSING = "missing"  # the name of a cell
EVENT = "event"  # the name of a survival task's label
Item = dict[str, Any]  # the released statistics of a column, as JSON


@dataclass(frozen=True)
class ReleaseLimits:
    """Limits that a policy sets on a release.

    * ``cell``: fewest patients of a count.
    * ``sums``: fewest patients of a mean; 0: no mean may leave.
    * ``classes``: whether counts of the labels may leave.
    * ``exact``: for public data: nothing is rounded or withheld for want of a range, and an empty cell is 0.
    """

    cell: int = 10
    sums: int = 50
    classes: bool = False
    exact: bool = False


@dataclass(frozen=True)
class TableColumn:
    """A column of the schema, or the several columns of one category: indices in the table, and categories."""

    name: str
    kind: str  # number, date, category
    places: tuple[int, ...]
    unit: str = ""
    range: tuple[float, float] | None = None
    levels: tuple[str, ...] = ()


def survey(
    split: Split,
    gaps: Array | None,
    schema: Schema,
    recipe: Recipe | None,
    classes: int,
    task: str,
    limits: ReleaseLimits,
    rows: Array | None = None,
) -> Item:
    """Return the number of patients, and an :data:`Item` for each column and each label, by name.

    ``split``: all samples of the hospital; ``gaps`` (n, columns): which values were missing; None: none was.
    ``rows`` (n,): of these samples alone, and without an item of a survival task's events.
    """
    kept = slice(None) if rows is None else rows
    table, units, y = table_of(split)[kept], split.units[kept], split.y[kept]
    gone = np.zeros(table.shape, bool) if gaps is None else gaps[kept]
    columns = columns_of(schema, recipe, table.shape[1]) if table.shape[1] else []
    items = {
        c.name: of_column(c, table[:, c.places], gone[:, c.places[0]], units, limits)
        for c in columns
    }
    labels = dict(of_labels(y, schema.labels, classes, task, units, limits))
    if rows is not None:
        labels.pop(EVENT, None)  # its counts, less those of the curve, may be of few patients
    return {"n": round_count(len(np.unique(units)), limits), "columns": items, "labels": labels}


def table_of(split: Split) -> Array:
    """Return the columns (n, columns) of all inputs that are tables."""
    tables = [*tables_of(split.x).values()]
    return np.hstack(tables) if tables else np.empty((len(split), 0), np.float32)


def of_column(
    column: TableColumn, values: Array, gone: Array, units: Array, limits: ReleaseLimits
) -> Item:
    """Return a column's :data:`Item`. ``values`` (n, places), ``gone`` (n,): missing, ``units`` (n,): patients."""
    item: Item = {"kind": column.kind}
    item |= {"unit": column.unit} if column.unit else {}
    if column.kind == "category":
        counts = cells(level_of(column, values), len(column.levels), gone, units, limits)
        return item | {"levels": list(column.levels)} | counts
    if column.range is None:
        item |= cells(np.zeros(len(values), int), 0, gone, units, limits)
        return item | (moments(values[~gone, 0], units[~gone], limits) if limits.exact else {})
    low, high = column.range
    clipped = np.clip(values[:, 0].astype(np.float64), low, high)
    place = np.minimum(((clipped - low) / (high - low) * BINS).astype(int), BINS - 1)
    item |= {"range": [low, high]} | cells(place, BINS, gone, units, limits)
    return item | moments(clipped[~gone], units[~gone], limits)


def level_of(column: TableColumn, values: Array) -> Array:
    """Return the index of each sample's category (n,)."""
    if len(column.places) > 1 or len(column.levels) == 1:
        return np.asarray(values.argmax(1))
    return np.asarray(values[:, 0].astype(int))


def cells(place: Array, count: int, gone: Array, units: Array, limits: ReleaseLimits) -> Item:
    """Return the count of each cell 0, 1, ... of ``count``, and that of missing values; None: suppressed."""
    names = np.where(gone, MISSING, place.astype(str))
    kept = set(releasable_subgroups(names, units, limits.cell))
    empty = 0 if limits.exact else None
    counts = {name: round_count(len(np.unique(units[names == name])), limits) for name in kept}
    missing = counts.get(MISSING, 0 if not gone.any() else None)
    return {MISSING: missing} | (
        {"cells": [counts.get(str(i), empty) for i in range(count)]} if count else {}
    )


def moments(values: Array, units: Array, limits: ReleaseLimits) -> Item:
    """Return mean and standard deviation of the patients' means; an empty item where the patients are too few."""
    _, patient, records = np.unique(units, return_inverse=True, return_counts=True)
    if not limits.sums or len(records) < max(limits.sums, 1):
        return {}
    table = (np.bincount(patient, values.astype(np.float64)) / records)[:, None]
    if limits.exact:
        mean, sd = float(table.mean()), float(table.std())
    else:
        (total,), (square,) = rounded_sums(table)
        mean = total / len(table)
        sd = max(square / len(table) - mean * mean, 0.0) ** 0.5
    return {"mean": digits(mean), "sd": digits(sd)}


def of_labels(
    y: Array, names: Sequence[str], classes: int, task: str, units: Array, limits: ReleaseLimits
) -> Iterator[tuple[str, Item]]:
    """Yield the labels' items: classes, findings, events; measurements of public data only, as they have no range."""
    named = names or [f"label {i + 1}" for i in range(classes)]
    if task == "regression" and limits.exact:
        for i, name in enumerate(named):
            yield name, {"kind": "number", MISSING: 0} | moments(y[:, i], units, limits)
    if not limits.classes:
        return

    def counted(place: Array, levels: list[str], gone: Array) -> Item:
        counts = cells(place, len(levels), gone, units, limits)
        return {"kind": "category", "levels": levels} | counts

    none = np.zeros(len(y), bool)
    if task in ONE_CLASS:
        yield "label", counted(y, list(names) or [str(i) for i in range(classes)], none)
    if task == "survival":
        yield EVENT, counted(y[:, 1].astype(int), ["censored", "event"], none)
    if task == "multilabel":
        for i, name in enumerate(named):
            place = np.maximum(y[:, i], 0).astype(int)
            yield name, counted(place, ["no", "yes"], y[:, i] < 0)


def round_count(count: int, limits: ReleaseLimits) -> int:
    return count if limits.exact else STEP * round(count / STEP)


def digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def is_suppressed(item: Mapping[str, Any]) -> bool:
    """Return whether a cell of this column stays in the hospital."""
    return item.get(MISSING) is None or None in item.get("cells", ())


def columns_of(schema: Schema, recipe: Recipe | None, count: int) -> list[TableColumn]:
    """Return the columns of a table with ``count`` columns, by the schema and the recipe of the hospital's own file."""
    features = schema.features or tuple(Feature(f"column {i + 1}") for i in range(count))
    if recipe is None or not recipe.used:
        return [
            TableColumn(f.name, "number", (i,), f.unit, f.range) for i, f in enumerate(features)
        ]
    columns, at = [], 0
    for column in recipe.used:
        # The column that marks gaps follows
        places = tuple(range(at, at + len(column.features) - column.mark_gaps))
        at += len(column.features)
        feature = features[places[0]]
        range_ = None if column.kind == "category" else feature.range
        columns.append(
            TableColumn(column.name, column.kind, places, feature.unit, range_, column.levels)
        )
    return columns
