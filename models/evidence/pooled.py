"""What the surveys of several hospitals say together: numbers of each that are added up, and the sum read again.

A hospital's numbers are those of its own answer (``survey.py``), under its own policy: what it withholds is 0. Its
patients may be in groups, each with an answer of its own. Survival is a table of patients: events until each of the
times that all hospitals have agreed on, and others by the time when they were last seen, the last cell for later:

    d_1 .. d_K, c_1 .. c_K, later

A small cell of this table is not 0: its patients would be at risk for ever. Events are taken in the order of time, in
sets of ``min-cell`` patients, and a remainder joins the last set; all of a set count at the time of its middle one. So
it is with the others. At each time fewer than ``min-cell`` of a hospital's events are missing, or too many, before
cumulative counts become multiples of ``STEP``. A group with fewer events, or others, than ``min-cell`` has no table.

Source: sets in place of single values are microaggregation (Domingo-Ferrer and Mateo-Sanz, IEEE TKDE 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

import numpy as np

from models.evidence.subgroups import releasable_subgroups
from models.evidence.survey import (
    BINS,
    MISSING,
    Item,
    ReleaseLimits,
    columns_of,
    is_suppressed,
    level_of,
    round_count,
    table_of,
)
from partitions.common.errors import UserError
from partitions.recipes.recipe import Recipe
from partitions.schema import Schema
from partitions.splits import Array, Split

PARTS = ("columns", "labels")
ALL = "all"  # the one group of a survey without groups
STATED = ("kind", "unit", "levels", "range")  # what hospitals must say alike of a column
CURVE, WITHHELD = "curve", "withheld"
Layout = dict[
    str, dict[str, Item]
]  # by part and name of a column, what all hospitals state of it
HEAD = 5  # numbers of a column: hospitals that withhold of it, missing; of its mean patients, sum and sum of squares


def stated_columns(answer: Item) -> Layout:
    """Return what an answer says of its columns and labels, without any number of patients."""
    return {
        part: {n: {k: item[k] for k in STATED if k in item} for n, item in answer[part].items()}
        for part in PARTS
    }


# --- a hospital's half ------------------------------------------------------------------------------------------------


def group_names(
    by: str, split: Split, gaps: Array | None, schema: Schema, recipe: Recipe | None
) -> Array:
    """Return the category of each sample in the column ``by``, text (n,); empty where it is missing.

    Without ``by`` all are one group. Raises UserError without such a column.
    """
    if not by:
        return np.full(len(split), ALL)
    table = table_of(split)
    for column in columns_of(schema, recipe, table.shape[1]) if table.shape[1] else ():
        if column.name == by and column.kind == "category":
            names = np.array(column.levels)[level_of(column, table[:, column.places])]
            return names if gaps is None else np.where(gaps[:, column.places[0]], "", names)
    raise UserError(f"survey.by = {by[:80]}: no column with categories has this name")


def grouped(
    names: Array, split: Split, limits: ReleaseLimits, answer: Callable[[Array], Item]
) -> dict[str, Item]:
    """Return ``answer(rows)`` of each group that may leave. ``names`` (n,): the group of each sample."""
    kept = releasable_subgroups(names, split.units, limits.cell)
    return {name: answer(names == name) for name in kept}


def survival_table(
    y: Array, units: Array, times: Sequence[float], limits: ReleaseLimits
) -> Item:
    """Return the item of times (n,) and events (n,) as ``y`` (n, 2): of each patient the last; empty: withheld."""
    order = np.lexsort((y[:, 0], units))
    last = order[np.append(units[order][1:] != units[order][:-1], True)]
    place = np.searchsorted(times, y[last, 0])  # a time until times[k] is in cell k
    died = (y[last, 1] > 0) & (place < len(times))
    events, others = (
        in_sets(np.sort(of), cells, limits)
        for of, cells in ((place[died], len(times)), (place[~died], len(times) + 1))
    )
    return {"cells": [*events, *others]} if events and others else {}


def in_sets(place: Array, cells: int, limits: ReleaseLimits) -> list[int]:
    """Return the count of each cell, of sets of patients in order, each in the cell of its middle; empty: too few."""
    starts = np.arange(0, len(place) - limits.cell + 1, limits.cell)
    if not len(starts):
        return [0] * cells if limits.exact else []
    sizes = np.diff(np.append(starts, len(place)))
    totals = np.bincount(place[starts + sizes // 2], sizes, cells).cumsum()
    rounded = [0, *(round_count(int(total), limits) for total in totals)]
    return [b - a for a, b in pairwise(rounded)]


# --- the numbers, in their order --------------------------------------------------------------------------------------


def groups_in(layout: Layout, by: str) -> list[str]:
    """Return the names of the groups. Raises UserError if the layout has no category ``by``."""
    if not by:
        return [ALL]
    levels: list[str] = layout["columns"].get(by, {}).get("levels", [])
    if not levels:
        raise UserError(f"survey.by = {by[:80]}: no category that all hospitals state alike")
    return levels


def cells_of(times: Sequence[float]) -> int:
    """Return the length of a survival table with these times; 0 without."""
    return 2 * len(times) + 1 if times else 0


def numbers_of(
    groups: Mapping[str, Item], layout: Layout, names: Sequence[str], cells: int
) -> list[float]:
    """Return a hospital's numbers, each at least 0. ``names``: of all groups; ``cells``: of a survival table."""
    numbers = list[float]()
    for name in names:
        answer: Item = groups.get(name) or {"n": 0, **{part: {} for part in PARTS}}
        numbers.append(answer["n"])
        for part in PARTS:
            for column, stated in layout[part].items():
                numbers += _of_item(answer[part].get(column), stated, answer["n"])
        if cells:
            curve = answer.get(CURVE) or {}
            numbers += [float(not curve), *curve.get("cells", [0] * cells)]
    return numbers


def _of_item(item: Item | None, stated: Item, n: int) -> list[float]:
    size = len(stated.get("levels", ())) or BINS * ("range" in stated)
    if item is None:
        return [1.0] + [0.0] * (HEAD - 1 + size)
    missing, sums = item[MISSING] or 0, [0.0, 0.0, 0.0]
    if "mean" in item and "range" in stated:
        low, high = stated["range"]
        mean, sd = (item["mean"] - low) / (high - low), item["sd"] / (high - low)
        k = max(n - missing, 0)
        sums = [k, k * max(mean, 0.0), k * (mean * mean + sd * sd)]
    counts = (count or 0 for count in item.get("cells", ()))
    return [float(is_suppressed(item)), missing, *sums, *counts]


def read_sum(
    numbers: Sequence[float], layout: Layout, names: Sequence[str], cells: int
) -> dict[str, Item]:
    """Return the answer of each group over all hospitals, as one hospital's would be; ``withheld``: by how many."""
    rest, answers = iter(numbers), dict[str, Item]()
    for name in names:
        answer = answers[name] = {"n": round(next(rest))}
        for part in PARTS:
            answer[part] = {
                column: stated | _read_item(rest, stated)
                for column, stated in layout[part].items()
            }
        if cells:
            withheld, *counts = map(round, islice(rest, cells + 1))
            answer[CURVE] = {"cells": counts, WITHHELD: withheld}
    return answers


def _read_item(rest: Iterator[float], stated: Item) -> Item:
    size = len(stated.get("levels", ())) or BINS * ("range" in stated)
    withheld, missing, k, total, squares, *counts = islice(rest, HEAD + size)
    item: Item = {MISSING: round(missing), WITHHELD: round(withheld)}
    if size:
        item["cells"] = [round(count) for count in counts]
    if k > 0 and "range" in stated:
        low, high = stated["range"]
        mean = total / k
        item["mean"] = low + (high - low) * mean
        item["sd"] = (high - low) * max(squares / k - mean * mean, 0.0) ** 0.5
    return item
