"""Columns and cells of a table by their role: labels, numbers, and the part of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.common.sizes import MOST_LINE
from partitions.recipes.cells import GAPS, MINUS, is_number
from partitions.recipes.lines import Line
from partitions.recipes.people import is_row, unknown_column
from partitions.recipes.pipeline import LONGEST_SHOWN, shorten_cell, value_of
from partitions.recipes.recipe import Column
from partitions.schema import few

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    "test": "test",
}
WITH_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?", re.ASCII)
MOST_LISTED = 20  # columns in a message
NO_NUMBERS: Mapping[str, Column] = {}

# A column, or several joined by commas; time and event; None: the usual one
Label = str | Names | None


def label_columns(path: Path, header: list[str], label: Label, usual: Names) -> Names:
    """Return the label columns: the requested or the ``usual`` ones. A column's own name may contain commas."""
    if isinstance(label, str):
        columns = (
            (label,)
            if label in header
            else tuple(filter(None, map(str.strip, label.split(","))))
        )
    else:
        columns = label or usual
    for column in columns:
        if column not in header:
            raise unknown_column(path, column, header)
    return columns


def list_columns(header: Sequence[str]) -> str:
    """Return the columns of a csv as text for a message; a first line that may be a patient's row is not shown."""
    if is_row(header):
        return "its first line has numbers or dates, as a row has, and is not shown; write a header"
    return few(header, MOST_LISTED, MOST_LINE)


def with_point(where: str, name: str, cell: str, decimal: str) -> str:
    """Return a cell with a point for its ``decimal`` sign, if it is a number. Raises DataError for another sign."""
    if len(cell) > LONGEST_SHOWN:
        return cell
    if is_number(plain := cell.replace(MINUS, "-")) or WITH_COMMA.fullmatch(plain):
        cell = plain
    if (
        decimal == ","
        and "." in cell
        and (is_number(cell) or is_number(cell.replace(".", "").replace(",", ".")))
    ):
        raise DataError(
            f"{where}: {name} is {cell!r}, which has a point: with --decimal , write numbers as 1234,5"
        )
    if not WITH_COMMA.fullmatch(cell):
        return cell
    if decimal != ",":  # also without a requested sign
        raise DataError(
            f"{where}: {name} is {cell!r}; add --decimal , if that is a decimal comma, or else write 1234 for 1,234"
        )
    return cell.replace(",", ".")


def line_labels(
    line: Line, columns: Names, decimal: str, numbers: Mapping[str, Column] = NO_NUMBERS
) -> Names:
    """Return a line's labels, with a point in numbers for every ``decimal`` sign. Raises DataError without a label.

    ``numbers``: how a recipe reads those that are numbers, with their unit.
    """
    where, row = line
    if missing := [column for column in columns if row[column].casefold() in GAPS]:
        what = missing[0] if len(columns) > 1 else "label"
        raise DataError(
            f"{where} has no {what}; fill it, or delete the line (a total below the table?)"
        )
    return tuple(
        number_of(where, numbers[column], row[column])
        if column in numbers
        else with_point(where, column, row[column], decimal)
        for column in columns
    )


def number_of(where: str, column: Column, cell: str) -> str:
    """Return a cell as the number that a recipe makes of it. Raises DataError where it does not fit the recipe."""
    value, fault = value_of(cell, "", column, (), {})
    if fault:
        raise DataError(f"{where}: {column.origin} is {shorten_cell(cell)}, {fault}")
    return repr(value)


def split_of(line: Line) -> str:
    """Return a line's ``split``: train, val or test, or "" for none. Raises DataError for another text."""
    where, row = line
    split = row.get("split", "")
    if split and split.lower() not in SPLIT_NAMES:
        raise DataError(f"{where}: split is {split!r}; it must be train, val or test")
    return SPLIT_NAMES.get(split.lower(), "")
