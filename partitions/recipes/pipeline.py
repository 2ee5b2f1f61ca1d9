"""Application of a recipe: cells become values, misfits are reported, scikit-learn fills, encodes and joins columns.

Only the values for gaps are fitted, from the training part alone, and are then stored in the recipe. So the same recipe
gives the same result for other rows, bit for bit, and nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import nearest
from partitions.recipes.cells import DAYS, EPOCH, parse_date, parse_number, parse_numbers
from partitions.recipes.lines import Line, column_of
from partitions.recipes.recipe import Column, Recipe
from partitions.schema import few
from partitions.splits import Array

LONGEST_SHOWN = 40  # characters of a cell in a message
MOST_SHOWN = 3  # cells in a message
ENOUGH_VALUES = 10  # least number of values for the check of a fill value


@dataclass(frozen=True)
class Misfit:
    """A cell that does not fit a recipe."""

    where: str
    what: str
    taken_as: str = ""  # the category for all others, if the column has one
    column: str = ""


def convert(lines: Sequence[Line], recipe: Recipe) -> tuple[Array, list[Misfit]]:
    """Return the cells as floats and categories, object (n, used columns), None for gaps; and the misfits.

    Misfits are gaps in the array, or the category ``other`` of their column.
    """
    found: list[tuple[int, Misfit]] = []
    made = np.full((len(lines), len(recipe.used)), None, object)
    gaps, formats = frozenset(recipe.gaps), {c.source or c.name: c for c in recipe.columns if c.format}
    for j, column in enumerate(recipe.used):
        cells = column_of(lines, column.source or column.name)
        if (numbers := plain_numbers(cells, column, gaps)) is not None:
            made[:, j] = [numbers.get(cell) for cell in cells]
            continue
        # Each different cell is converted once, or each pair of cells for the time between two dates.
        others = column_of(lines, column.since) if column.since in formats else [""] * len(cells)
        values = {
            (cell, other): (None, "") if cell in gaps else value_of(cell, column, {column.since: other}, gaps, formats)
            for cell, other in dict.fromkeys(zip(cells, others, strict=True))
        }
        made[:, j] = [values[own][0] for own in zip(cells, others, strict=True)]
        if not any(fault for _, fault in values.values()):
            continue
        for i, own in enumerate(zip(cells, others, strict=True)):
            value, fault = values[own]
            if fault:
                what = f"{column.name} is {shown(own[0])}, {fault}"
                found.append((i, Misfit(lines[i][0], what, str(value or ""), column.name)))
    return made, [misfit for _, misfit in sorted(found, key=lambda own: own[0])]


def plain_numbers(cells: Sequence[str], column: Column, gaps: Collection[str]) -> dict[str, float] | None:
    """Return the values of a column of numbers by its cells, without gaps; None where a cell does not fit."""
    if column.kind != "number":
        return None
    found = parse_numbers([c for c in dict.fromkeys(cells) if c not in gaps], column.decimal, column.thousands)
    values = {cell: value * column.factor + column.offset for cell, value in found.items() if value is not None}
    low, high = column.range or (-np.inf, np.inf)
    fits = len(values) == len(found) and all(low <= value <= high for value in values.values())
    return values if fits else None


def value_of(
    cell: str, column: Column, row: Mapping[str, str], gaps: frozenset[str], formats: Mapping[str, Column]
) -> tuple[Any, str]:
    """Return a cell's value, and the fault in it, if any."""
    if column.kind == "category":
        level = column.values.get(cell, cell)
        if level in column.levels:
            return level, ""
        return column.other or None, f"none of {few(column.levels, 8)}{nearest(cell, column.levels)}"
    if column.kind == "date":
        value, fault = elapsed(cell, column, row, gaps, formats)
    else:
        value = parse_number(cell, column.decimal, column.thousands)
        fault = "" if value is not None else f"no number (decimal sign {column.decimal!r})"
        value = None if value is None else value * column.factor + column.offset
    if value is not None and column.range and not column.range[0] <= value <= column.range[1]:
        return None, "outside of its range {:g}..{:g}".format(*column.range)
    return value, fault


def elapsed(
    cell: str, column: Column, row: Mapping[str, str], gaps: frozenset[str], formats: Mapping[str, Column]
) -> tuple[float | None, str]:
    """Return days or years from the column's ``since`` to the date in a cell, and the fault in it, if any."""
    when = parse_date(cell, column.format, column.latest)
    if when is None:
        return None, f"no date as {column.format}"
    start: datetime | None
    if column.since in formats:
        other = row[column.since]
        if other in gaps:
            return None, ""
        first = formats[column.since]
        start = parse_date(other, first.format, first.latest)
        if start is None:
            return None, f"and {column.since} is no date as {first.format}"
    else:
        start = datetime.fromisoformat(column.since or EPOCH)
    return (when - start).total_seconds() / 86400 / DAYS[column.per], ""


def check_misfits(misfits: Sequence[Misfit], as_gaps: bool) -> tuple[str, ...]:
    """Return notes on misfits. Raises DataError, one line that names them, unless they may be gaps."""
    refused = [misfit for misfit in misfits if not misfit.taken_as]
    if refused and not as_gaps:
        first, more = refused[0], len(refused) - 1
        others = "".join(f"; {own.where.rpartition(', ')[2]}: {own.what}" for own in refused[1:MOST_SHOWN])
        others += f" and {more - MOST_SHOWN + 1} cells more" if more >= MOST_SHOWN else ""
        raise DataError(
            f"{first.where}: {first.what}{others}; correct the cells or the recipe, or take them as gaps with --as-gaps"
        )
    taken: dict[str, list[Misfit]] = {}
    for own in misfits:
        if own.taken_as:
            taken.setdefault(own.column, []).append(own)
    notes = [f"{own.where}: {own.what}: taken as a gap" for own in refused]
    for found in taken.values():
        like = f", and {len(found) - 1} cells more like it" if len(found) > 1 else ""
        notes.append(f"{found[0].where}: {found[0].what}: taken as {found[0].taken_as!r}{like}")
    return tuple(notes)


def future_notes(made: Array, recipe: Recipe) -> tuple[str, ...]:
    """Return a note for each column with dates in the future. ``made``: from :func:`convert`."""
    notes = []
    for column, values in zip(recipe.used, made.T, strict=True):
        if column.kind == "date" and column.since not in {own.source or own.name for own in recipe.columns}:
            since = datetime.fromisoformat(column.since or EPOCH)
            now = (datetime.now() - since).total_seconds() / 86400 / DAYS[column.per]
            if later := sum(value is not None and value > now for value in values):
                notes.append(f"{later} dates of {column.name} lie in the future: are its years right?")
    return tuple(notes)


def gaps_in(made: Array) -> Array:
    """Return which cells of an array of objects are None, bool of its shape."""
    missing: Array = np.equal(made, np.array(None, object))
    return missing.astype(bool)


def check_gaps(made: Array, lines: Sequence[Line], recipe: Recipe) -> None:
    """Raise DataError where a column whose gaps are refused has a gap."""
    for j, column in enumerate(recipe.used):
        empty = np.flatnonzero(gaps_in(made[:, j])) if column.fill == "refuse" else np.empty(0, int)
        if len(empty):
            raise DataError(
                f'{lines[empty[0]][0]}: {column.name} is missing, and the recipe says fill = "refuse"; fill it, or '
                f"give the column another fill"
            )


def check_fills(made: Array, recipe: Recipe) -> None:
    """Raise DataError where a recipe's median or mean is outside the values ``made``, which indicates another unit."""
    for j, column in enumerate(recipe.used):
        known = [value for value in made[:, j] if value is not None]
        if column.fill not in ("median", "mean") or column.fill_value is None or len(known) < ENOUGH_VALUES:
            continue
        if not min(known) <= column.fill_value <= max(known):
            raise DataError(
                f"{column.name}: the recipe fills gaps with {column.fill_value:g}, the {column.fill} of other values, "
                f"and the training part's lie within {min(known):g} to {max(known):g}; delete fill-value of that "
                "column, and it is taken from these"
            )


def fit(made: Array, recipe: Recipe) -> dict[str, float | str]:
    """Return the value for gaps of each column without one in the recipe. ``made``: the training part's rows."""
    fills: dict[str, float | str] = {}
    lacking: dict[tuple[bool, str], list[int]] = {}
    for j, column in enumerate(recipe.used):
        if column.fill == "refuse" or column.fill_value is not None:
            continue
        if all(value is None for value in made[:, j]):
            raise DataError(
                f"{column.name} has no value in the training part to fill gaps with; leave the column out "
                f'(kind = "skip" in the recipe), or state fill = "value" and fill-value'
            )
        lacking.setdefault((column.kind == "category", column.fill), []).append(j)
    for (texts, fill), places in lacking.items():
        found = imputer(fill, texts).fit(typed(made[:, places], texts)).statistics_
        for j, value in zip(places, found, strict=True):
            fills[recipe.used[j].name] = str(value) if texts else float(value)
    return fills


def gaps_of(made: Array, recipe: Recipe) -> Array:
    """Return which values of the data file's columns are filled, bool (n, columns). ``made``: from :func:`convert`."""
    missing = gaps_in(made)
    counts = [len(column.features) for column in recipe.used]
    flags = np.repeat(missing, counts, axis=1)
    ends = np.cumsum(counts)
    flags[:, [end - 1 for end, column in zip(ends, recipe.used, strict=True) if column.mark_gaps]] = False
    return flags


def transform(made: Array, recipe: Recipe) -> Array:
    """Return the inputs, float32 (n, columns of the data file), by a recipe with values for gaps."""
    if not recipe.used:
        return np.empty((len(made), 0), np.float32)
    from sklearn.compose import ColumnTransformer

    steps = []
    for plain, group in groupby(enumerate(recipe.used), lambda own: is_plain(own[1])):
        members = list(group)  # neighbouring plain numbers share one transformer
        for chosen in [members] if plain else [[own] for own in members]:
            places, columns = [j for j, _ in chosen], [column for _, column in chosen]
            steps.append((str(places[0]), pipeline(columns), places))
    return np.asarray(ColumnTransformer(steps, sparse_threshold=0).fit_transform(made), np.float32)


def is_plain(column: Column) -> bool:
    """Return whether a column is a number or a date whose gaps are filled without a mark."""
    return column.kind != "category" and column.fill != "refuse" and not column.mark_gaps


def pipeline(columns: Sequence[Column]) -> Any:
    """Return the scikit-learn transformer of one column, or of several plain ones."""
    from sklearn.impute import MissingIndicator
    from sklearn.pipeline import FeatureUnion, Pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder

    column, texts = columns[0], columns[0].kind == "category"
    kind = FunctionTransformer(typed, kw_args={"texts": texts})
    steps: list[tuple[str, Any]] = [("type", kind)]
    if column.fill != "refuse":
        values = typed(np.array([[own.fill_value for own in columns]], object), texts)
        known = imputer("most-frequent", texts).fit(values)  # of one row: that row
        steps.append(("fill", FunctionTransformer(known.transform)))
    if texts:
        encoder = OneHotEncoder if column.encode == "one-hot" else OrdinalEncoder
        more = {"sparse_output": False} if column.encode == "one-hot" else {}
        steps.append(("encode", encoder(categories=[np.array(column.levels, object)], **more)))
    body = Pipeline(steps)
    if not column.mark_gaps:
        return body
    missing = MissingIndicator(missing_values=missing_of(texts), features="all")
    return FeatureUnion([("value", body), ("missing", Pipeline([("type", kind), ("missing", missing)]))])


def imputer(fill: str, texts: bool) -> Any:
    """Return scikit-learn's imputer for the recipe's name of the statistic."""
    from sklearn.impute import SimpleImputer

    return SimpleImputer(missing_values=missing_of(texts), strategy=fill.replace("-", "_"))


def missing_of(texts: bool) -> float | None:
    """Return the value of a gap: NaN among numbers, None among categories."""
    return None if texts else np.nan


def typed(values: Array, texts: bool) -> Array:
    """Return columns (n, k): numbers as float64 with NaN for gaps, categories as objects."""
    return values if texts else values.astype(np.float64)


def shown(cell: str) -> str:
    """Return a cell for a message, without a long text, which may be a patient's."""
    return repr(cell) if len(cell) <= LONGEST_SHOWN else f"a text of {len(cell)} characters"
