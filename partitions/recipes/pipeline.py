"""Application of a recipe, column by column: cells become values, misfits are reported, gaps filled, categories coded.

Only the values for gaps are fitted, from the training part alone, and are then stored in the recipe. So the same recipe
gives the same result for other rows, bit for bit, and nothing is pickled.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names, nearest
from partitions.recipes.cells import DAYS, EPOCH, parse_date, parse_number
from partitions.recipes.lines import Cells, Lines
from partitions.recipes.recipe import Column, Recipe
from partitions.schema import few
from partitions.splits import Array
from partitions.tokens import file_digest

if TYPE_CHECKING:
    from pandas import DataFrame

LONGEST_SHOWN = 40  # characters of a cell in a message
MOST_SHOWN = 3  # cells in a message
ENOUGH_VALUES = 10  # least number of values for the check of a fill value


@dataclass(frozen=True)
class Misfit:
    """A cell that does not fit a recipe. ``taken_as``: the category for all others, "" if the column has none."""

    row: int
    where: str
    what: str
    taken_as: str
    column: str


def convert_columns(lines: Lines, recipe: Recipe) -> tuple[DataFrame, list[Misfit]]:
    """Return the used columns as float64 with NaN for gaps, or as categories; and the misfits.

    Misfits are gaps in the columns, or the category ``other``. The columns are numbered.
    """
    import pandas as pd

    misfits: list[Misfit] = []
    values_of: dict[int, Any] = {}
    gaps = frozenset(recipe.file.gaps)
    formats = {c.origin: c for c in recipe.columns if c.format}
    for j, column in enumerate(recipe.used):
        cells = lines.columns[column.origin]
        if (plain := plain_numbers(cells, column, gaps)) is not None:
            values_of[j] = plain
            continue
        # Each different cell is converted once, or each pair of cells for the time between two dates.
        pairs = [(cell, "") for cell in cells.different]
        codes = cells.codes
        if column.since in formats:
            start = lines.columns[column.since]
            width = len(start.different)
            both, codes = np.unique(
                cells.codes * np.int64(width) + start.codes, return_inverse=True
            )
            pairs = [
                (cells.different[pair // width], start.different[pair % width])
                for pair in both.tolist()
            ]
        read = [
            (None, "") if cell in gaps else value_of(cell, other, column, gaps, formats)
            for cell, other in pairs
        ]
        values = [value for value, _ in read]
        if column.kind == "category":
            values_of[j] = pd.Categorical(values, column.levels)[codes]
        else:
            values_of[j] = np.array(values, float)[codes]
        faulty = np.array([bool(fault) for _, fault in read])
        for i in np.flatnonzero(faulty[codes]).tolist():
            value, fault = read[codes[i]]
            what = f"{column.name} is {shorten_cell(pairs[codes[i]][0])}, {fault}"
            misfits.append(Misfit(i, lines.where(i), what, str(value or ""), column.name))
    frame = pd.DataFrame(values_of, index=range(len(lines)), copy=False)
    return frame, sorted(misfits, key=lambda misfit: misfit.row)


def plain_numbers(cells: Cells, column: Column, gaps: Collection[str]) -> Array | None:
    """Return the values of a column of many numbers, NaN for gaps; None for another, or if a cell may not fit."""
    numbers = cells.numbers
    fits = numbers and numbers.fits(column.decimal, column.thousands, gaps)
    if column.kind != "number" or not numbers or not fits:
        return None
    values = numbers.values  # not copied where nothing changes
    if (column.factor, column.offset) != (1, 0):
        values = values * column.factor + column.offset
    low, high = column.range or (-np.inf, np.inf)
    return None if ((values < low) | (values > high)).any() else values


def value_of(
    cell: str, other: str, column: Column, gaps: Collection[str], formats: Mapping[str, Column]
) -> tuple[Any, str]:
    """Return a cell's value, and the fault in it, if any. ``other``: the date from which its own counts."""
    if column.kind == "category":
        level = column.values.get(cell, cell)
        if level in column.levels:
            return level, ""
        return (
            column.other or None,
            f"none of {few(column.levels, 8)}{nearest(cell, column.levels)}",
        )
    if column.kind == "date":
        value, fault = elapsed_time(cell, other, column, gaps, formats)
    else:
        value = parse_number(cell, column.decimal, column.thousands)
        fault = "" if value is not None else f"no number (decimal sign {column.decimal!r})"
        value = None if value is None else value * column.factor + column.offset
    if value is not None and column.range and not column.range[0] <= value <= column.range[1]:
        return None, "outside of its range {:g}..{:g}".format(*column.range)
    return value, fault


def elapsed_time(
    cell: str, other: str, column: Column, gaps: Collection[str], formats: Mapping[str, Column]
) -> tuple[float | None, str]:
    """Return days or years from the column's ``since`` to the date in a cell, and the fault in it, if any."""
    when = parse_date(cell, column.format, column.latest)
    if when is None:
        return None, f"no date as {column.format}"
    first = formats.get(column.since)
    if first and other in gaps:
        return None, ""
    start = (
        parse_date(other, first.format, first.latest)
        if first
        else datetime.fromisoformat(column.since or EPOCH)
    )
    if first and start is None:
        return None, f"and {column.since} is no date as {first.format}"
    assert start
    return (when - start).total_seconds() / 86400 / DAYS[column.per], ""


def guess_formats(cell: str) -> set[str]:
    """Return the formats in which a cell may be a date, the day or the month first; none for another text."""
    from pandas.tseries.api import guess_datetime_format

    cell = re.sub("pm$", "am", re.sub("PM$", "AM", cell))  # pandas guesses mornings only
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # day before month
        guesses = {guess_datetime_format(cell, dayfirst=first) for first in (False, True)}
    return {form for form in guesses if form and "%d-%m" not in form}


def check_misfits(misfits: Sequence[Misfit], as_gaps: bool) -> Names:
    """Return notes on misfits. Raises DataError, one line that names them, unless they may be gaps."""
    refused = [misfit for misfit in misfits if not misfit.taken_as]
    if refused and not as_gaps:
        first, more = refused[0], len(refused) - 1
        others = "".join(
            f"; {entry.where.rpartition(', ')[2]}: {entry.what}"
            for entry in refused[1:MOST_SHOWN]
        )
        others += f" and {more - MOST_SHOWN + 1} cells more" if more >= MOST_SHOWN else ""
        raise DataError(
            f"{first.where}: {first.what}{others}; correct the cells or the recipe, or take them as gaps with --as-gaps"
        )
    taken = defaultdict[str, list[Misfit]](list)
    for entry in misfits:
        if entry.taken_as:
            taken[entry.column].append(entry)
    notes = [f"{entry.where}: {entry.what}: taken as a gap" for entry in refused]
    for alike in taken.values():
        like = f", and {len(alike) - 1} cells more like it" if len(alike) > 1 else ""
        notes.append(f"{alike[0].where}: {alike[0].what}: taken as {alike[0].taken_as!r}{like}")
    return tuple(notes)


def check_gaps(table: DataFrame, lines: Lines, recipe: Recipe) -> None:
    """Raise DataError where a column whose gaps are refused has a gap."""
    for j, column in enumerate(recipe.used):
        if column.fill == "refuse" and (empty := table[j].isna()).any():
            raise DataError(
                f'{lines.where(int(empty.argmax()))}: {column.name} is missing, and the recipe says fill = "refuse"; '
                f"fill it, or give the column another fill"
            )


def fit_fills(table: Any, recipe: Recipe, training: Array) -> Recipe:
    """Return the recipe with a value for the gaps of each column, from ``training`` rows, bool (n,).

    Raises DataError where a column has no value there, or where the recipe's own median or mean is outside of the
    values: another unit.
    """
    columns = []
    for j, column in enumerate(recipe.used):
        known, value = table[j][training].dropna(), column.fill_value
        if (
            column.fill in ("median", "mean")
            and value is not None
            and len(known) >= ENOUGH_VALUES
        ):
            low, high = known.min(), known.max()
            if not low <= value <= high:
                raise DataError(
                    f"{column.name}: the recipe fills gaps with {value:g}, the {column.fill} of other values, "
                    f"and the training part's lie within {low:g} to {high:g}; delete fill-value of that "
                    "column, and it is taken from these"
                )
        if column.fill != "refuse" and value is None:
            if not len(known):
                raise DataError(
                    f"{column.name} has no value in the training part to fill gaps with; leave the column out "
                    f'(kind = "skip" in the recipe), or state fill = "value" and fill-value'
                )
            if column.fill == "most-frequent":
                value = min(known.mode().tolist())  # the first one of several
            else:
                value = float(known.median() if column.fill == "median" else known.mean())
        columns.append(column.model_copy(update={"fill_value": value}))
    fitted = {column.origin: column for column in columns}
    every = (fitted.get(column.origin, column) for column in recipe.columns)
    text = recipe.text.model_copy(update={"sha256": file_digest(recipe.text.vocabulary)})
    return recipe.model_copy(update={"columns": tuple(every), "text": text})


def gaps_of(table: DataFrame, recipe: Recipe) -> Array:
    """Return which values of the data file's columns are filled, bool (n, columns).

    ``table``: from :func:`convert_columns`.
    """
    flags = [np.zeros((len(table), 0), bool)]
    for j, column in enumerate(recipe.used):
        width = len(column.features)
        flags.append(np.outer(table[j].isna(), np.arange(width) < width - column.mark_gaps))
    return np.hstack(flags)


def transform(table: DataFrame, recipe: Recipe) -> Array:
    """Return the inputs, float32 (n, columns of the data file), by a recipe with values for gaps."""
    x = np.zeros((len(table), len(recipe.features)), np.float32)
    at = 0
    for j, column in enumerate(recipe.used):
        filled = table[j] if column.fill_value is None else table[j].fillna(column.fill_value)
        if column.kind != "category":
            x[:, at] = filled
        elif column.encode == "one-hot":
            x[np.arange(len(x)), at + filled.cat.codes.to_numpy()] = 1
        else:
            x[:, at] = filled.cat.codes
        at += len(column.features)
        if column.mark_gaps:
            x[:, at - 1] = table[j].isna()
    return x


def shorten_cell(cell: str) -> str:
    """Return a cell for a message, without a long text, which may be a patient's."""
    return repr(cell) if len(cell) <= LONGEST_SHOWN else f"a text of {len(cell)} characters"
