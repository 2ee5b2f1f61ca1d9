"""Numbers that need a second look: what float32 cannot tell apart, and a value that may mean "unknown"."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import words_in
from partitions.common.precision import LEAVE_OUT, merged_in_float32
from partitions.recipes.cells import DAYS, EPOCH
from partitions.recipes.lines import Lines
from partitions.recipes.recipe import Column, Recipe
from partitions.splits import Array

if TYPE_CHECKING:
    from pandas import DataFrame

FEWEST_OTHERS = 5  # different values beside one that is no code
OFTEN = 5  # times a code is there, and as many times as any other value
# What systems write for "unknown": numbers, and days
NINES = (99.0, 999.0, 9999.0, 99999.0, 999999.0, 99.9, 999.9, 9999.9)
CODES = (-1.0, -8.0, -9.0, -88.0, -98.0, -99.0, -998.0, -999.0, -9999.0, *NINES)
MOST_CODES = 3  # of one column at one end
NO_DATES = frozenset(
    map(
        datetime.fromisoformat,
        words_in(
            "0001-01-01 1111-11-11 1753-01-01 1800-01-01 1899-12-30 1899-12-31 1900-01-01 1901-01-01 1970-01-01 "
            "2099-12-31 2999-12-31 3000-01-01 9999-01-01 9999-12-31"
        ),
    )
)


def day_of(value: float, per: str, since: str) -> datetime | None:
    """Return the date of a column's value, to the second; None where there is none."""
    try:
        first = datetime.fromisoformat(since or EPOCH)
        return first + timedelta(seconds=round(value * DAYS[per] * 86400))
    except (OverflowError, ValueError):
        return None


def far_values(values: Array, column: Column | None = None) -> Iterator[tuple[int, str]]:
    """Yield the row and a remark for each of the smallest and the largest values that may mean "unknown".

    These are there twice or more, and farther from all others than those are from each other; a usual code is also one
    if it is the only value below 0, farther away than the middle half of the others is wide, or much more frequent. At
    each end they are at most :data:`MOST_CODES`, such as 997 (refused), 998 (not asked) and 999 (unknown).

    ``values``: float64 (n,), NaN for gaps; ``column``: of dates, or of the numbers in a csv.
    """
    known, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    for below in (True, False):
        for size in range(MOST_CODES, 0, -1):
            at = slice(size) if below else slice(-size, None)
            if what := _apart(known, counts, at, column, below):
                for value, count in zip(known[at], counts[at], strict=True):
                    yield int((values == value).argmax()), f"{count} cells are {{}}{what}"
                break


def two_scales(values: Array) -> str:
    """Return a remark where positive values (n,) lie in two groups that are farther apart, as a factor, than wide."""
    known = np.unique(values[values > 0])
    logs = np.log(known)
    inner = np.diff(logs)[FEWEST_OTHERS - 1 : 1 - FEWEST_OTHERS]
    if not len(inner) or np.nanmin(values) <= 0:
        return ""
    at = int(inner.argmax()) + FEWEST_OTHERS
    low, high = logs[:at], logs[at:]
    if inner.max() <= max(np.ptp(low), np.ptp(high)):
        return ""
    factor = np.exp(np.median(high) - np.median(low))
    return f"{(values >= known[at]).sum()} values are about {factor:.1f} times the others: in another unit?"


def _apart(known: Array, counts: Array, at: slice, column: Column | None, below: bool) -> str:
    """Return how these values at one end of the different ones stand apart from all others; empty: they do not."""
    ends, rest = known[at], np.delete(known, at)
    times, others = counts[at], np.delete(counts, at)
    if not len(rest) or times.min() < 2:
        return ""
    value, nearest = (ends[-1], rest[0]) if below else (ends[0], rest[-1])
    inner = rest[:-1] if below else rest[1:]  # without another such value at the other end
    inner = inner if len(inner) >= FEWEST_OTHERS else rest
    gap, width = abs(value - nearest), inner[-1] - inner[0]
    low, high = np.quantile(np.repeat(rest, others), (0.25, 0.75))
    if column is not None and column.kind == "date":
        code = all(day_of(end, column.per, column.since) in NO_DATES for end in ends)
        only, close = False, high - low
    else:
        code, only = bool(np.isin(ends, CODES).all()), below and value < 0 <= nearest
        close = max(high - low, abs(value) / 2 if value > 0 else 0.0)
    often = times.min() >= OFTEN * max(1, others.max())
    by_code = code and (only or (len(ends) == 1 and (often or gap >= close)))
    if not by_code and (len(inner) < FEWEST_OTHERS or gap <= width):
        return ""
    return (
        " and no other is below 0"
        if only
        else f", far {'below' if below else 'above'} all others"
    )


def table_notes(table: DataFrame, recipe: Recipe) -> Iterator[str]:
    """Yield notes on dates in the future, and on numbers that float32 makes one. Raises DataError where much is lost.

    ``table``: from ``recipes.pipeline.convert_columns``.
    """
    origins, refused, now = {c.origin for c in recipe.columns}, list[str](), datetime.now()
    for j, column in enumerate(recipe.used):
        if column.kind == "category":
            continue
        if column.kind == "date" and column.since not in origins:
            since = now - datetime.fromisoformat(column.since or EPOCH)
            if later := int(
                (table[j] > since.total_seconds() / 86400 / DAYS[column.per]).sum()
            ):
                yield f"{later} dates of {column.name} lie in the future: are its years right?"
        merged, much = merged_in_float32(column.name, table[j].to_numpy())
        if much:
            refused.append(merged)
        elif merged:
            yield f"{merged}: is it a date or an identifier, and no measurement?"
    if refused:
        raise DataError(f"{'; '.join(refused)}: {LEAVE_OUT}")


def unknown_notes(table: DataFrame, lines: Lines, recipe: Recipe) -> Iterator[str]:
    """Yield a note on each value of a table that may mean "unknown".

    ``table``: from ``recipes.pipeline.convert_columns``.
    """
    since = {column.origin for column in recipe.columns}
    for j, column in enumerate(recipe.used):
        if column.kind == "category" or column.since in since:
            continue
        for row, remark in far_values(table[j].to_numpy(), column):
            cell = lines.columns[column.origin][row]
            yield f"{column.name}: {remark.format(cell)}: if that means unknown, add it to `gaps` in the recipe"
