"""Lines of a csv, as hospitals' programs write them."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from partitions.names import unknown_name

SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)

LONGEST_SHOWN = 40  # characters of a cell that are put into a message
MOST_CHARACTERS = 1 << 24  # of a cell; the library's own limit is less than some hospital's notes have

Label = str | tuple[str, str] | None  # a column, or several joined by commas; time and event; None: the usual one
Line = tuple[str, dict[str, str]]  # "table.csv, line 7", and its cells by column


@contextmanager
def long_cells() -> Iterator[None]:
    """In which a csv's cells may be long; elsewhere in the process the limit stays what it was."""
    before = csv.field_size_limit(MOST_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_lines(path: Path) -> tuple[list[str], list[Line]]:
    """The columns of a csv and its lines; comma, semicolon or tab. Without a header the columns are named here."""
    with path.open(encoding="utf-8-sig", newline="") as file, long_cells():
        first = file.readline()
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    if not lines:
        raise ValueError(f"{path} is empty")
    header = lines[0][1]
    if all(is_number(cell) for cell in header):
        header = [f"column{i}" for i in range(1, len(header) + 1)]
    elif any(cell.lower() in ("", "?", "nan", "na") for cell in header):
        raise ValueError(f"{path}: a column has no name in the first line; write a header that names each")
    else:
        lines = lines[1:]
    if not lines:
        raise ValueError(f"{path} has a header but no rows")
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{path} has two columns named {twice[0]!r}")
    for number, cells in lines:
        if len(cells) != len(header):
            raise ValueError(f"{path}, line {number} has {len(cells)} cells, the header {len(header)}")
    return header, [(f"{path}, line {number}", dict(zip(header, cells, strict=True))) for number, cells in lines]


def label_columns(path: Path, header: list[str], label: Label, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The columns of the labels: as asked for, or the ``usual`` ones. A column's own name may have commas."""
    if isinstance(label, str):
        columns = (label,) if label in header else tuple(filter(None, map(str.strip, label.split(","))))
    else:
        columns = label or usual
    for column in columns:
        if column not in header:
            raise unknown_name(f"column of {path}", column, header)
    return columns


def feature_columns(path: Path, header: list[str], others: Collection[str], chosen: Sequence[str]) -> list[str]:
    """The columns of numbers: the ``chosen`` ones, or else all but the ``others``."""
    free = [name for name in header if name not in others]
    for name in chosen:
        if name not in free:
            raise unknown_name(f"column of {path} besides {', '.join(others)}:", name, free)
    return list(dict.fromkeys(chosen)) or free


def labels_of(line: Line, columns: tuple[str, ...]) -> tuple[str, ...]:
    """A line's labels; each must be there."""
    where, row = line
    if missing := [column for column in columns if not row[column]]:
        raise ValueError(f"{where} has no {missing[0] if len(columns) > 1 else 'label'}")
    return tuple(row[column] for column in columns)


def split_of(line: Line) -> str:
    """train, val or test, as a line's ``split`` says, or "" where it says nothing."""
    where, row = line
    split = row.get("split", "")
    if split and split.lower() not in SPLIT_NAMES:
        raise ValueError(f"{where}: split is {split!r}; it must be train, val or test")
    return SPLIT_NAMES.get(split.lower(), "")


def numbers_of(line: Line, columns: Sequence[str]) -> tuple[float, ...]:
    """A line's values in these columns. A long text is not shown: it may be a patient's."""
    where, row = line
    for name in columns:
        cell = row[name]
        if not is_number(cell):
            if len(cell) > LONGEST_SHOWN:
                raise ValueError(f"{where}: {name} is a text of {len(cell)} characters; --text {name} takes it as such")
            raise ValueError(f"{where}: {name} is {cell!r}, no number; fill or drop such rows")
    return tuple(float(row[name]) for name in columns)


def is_number(text: str) -> bool:
    """Whether the text is a finite number that float32 can hold, as other programs write it: not 1_000, as Python."""
    return bool(NUMBER.fullmatch(text)) and abs(float(text)) <= float(np.finfo(np.float32).max)
