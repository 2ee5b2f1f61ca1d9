"""Lines of a csv, stored by column; a line's place is its number.

A column is its different cells, and the code of each line's cell. A column of numbers with many different cells is an
array of numbers instead: its cells are read from the file again in the rare case that they are needed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.names import Names, composed
from partitions.recipes.cells import LARGEST, ONE_GROUP, is_number
from partitions.splits import Array

Line = tuple[str, Mapping[str, str]]  # "table.csv, line 7", and its cells by column
# The different cells in the order of the lines; each line's code, int32 (n,)
Coded = tuple[Sequence[str], Array]

MOST_CODED = 4096  # different cells of a column that stay such, where they are numbers
MOST_OTHERS = 16  # different cells of a column of numbers that are none, and as many gaps that look like numbers
NUMERIC = b"0123456789+-.,eE\n"
# Of cells, each after a line break: codes; numbers whose sign may stand between thousands; all others with a sign
LEADING_ZERO = re.compile(r"\n0\d+$", re.ASCII | re.MULTILINE)
UNCLEAR = re.compile(rf"\n{ONE_GROUP.pattern}$", re.ASCII | re.MULTILINE)
DECIMAL = re.compile(rf"\n(?!{ONE_GROUP.pattern}$).*[.,].*$", re.ASCII | re.MULTILINE)
# Memory of a code, of a different cell, of a number
CODE_BYTES, CELL_BYTES, VALUE_BYTES = 4, 150, 9


@dataclass(frozen=True)
class Numbers:
    """A column of numbers whose cells have a point or a comma, ``sign``, or neither ("").

    * ``values``: float64 (n,), NaN where the cell is one of the ``others``; ``kinds``: which one, int8 (n,), or -1.
    * ``decimal``, ``unclear``: the first line, and its cell, whose sign is of decimals, or perhaps of thousands.
    * ``zeros``: whether a whole number begins with 0.
    """

    values: Array
    kinds: Array
    others: Names
    sign: str
    decimal: tuple[int, str] | None
    unclear: tuple[int, str] | None
    zeros: bool

    def between(self, gaps: Collection[str]) -> bool:
        """Return whether the others are gaps, and all other cells are none."""
        return {*filter(is_plain, gaps)} <= {*self.others} <= {*gaps}

    def fits(self, decimal: str, thousands: str, gaps: Collection[str]) -> bool:
        """Return whether all cells but the gaps are numbers with these signs."""
        return (
            self.sign in ("", decimal)
            and self.sign != (thousands or None)
            and self.between(gaps)
        )


@dataclass(eq=False)
class Cells(Sequence[str]):
    """The cells of a column. ``read``: returns the ``different`` ones and the ``codes``, when they are needed."""

    count_of_lines: int
    read: Callable[[], Coded]
    numbers: Numbers | None = None

    @classmethod
    def of(cls, cells: Sequence[str]) -> Cells:
        """Return the column of these cells."""

        def read() -> Coded:
            number = {cell: code for code, cell in enumerate(dict.fromkeys(cells))}
            codes = np.fromiter(map(number.__getitem__, cells), np.int32, len(cells))
            return [*number], codes

        return cls(len(cells), read)

    def map(self, change: Callable[[str], str]) -> Cells:
        """Return the column with its cells changed; each different one is changed once."""
        changed = Cells.of([*map(change, self.different)])
        return Cells(len(self), lambda: (changed.different, changed.codes[self.codes]))

    @cached_property
    def coded(self) -> Coded:
        """The different cells in the order of the lines, and each line's code."""
        return self.read()

    @property
    def different(self) -> Sequence[str]:
        """The different cells in the order of the lines."""
        return self.coded[0]

    @property
    def codes(self) -> Array:
        """The number of each line's cell among the different ones, int32 (n,)."""
        return self.coded[1]

    @property
    def texts(self) -> Sequence[str]:
        """The different cells; of a column of numbers, those that are none."""
        return self.numbers.others if self.numbers else self.different

    def lines_of(self, cells: Collection[str]) -> Array:
        """Return which lines have one of these cells, bool (n,)."""
        cells, numbers = frozenset(cells), self.numbers
        others = numbers and all(cell in numbers.others for cell in cells if is_plain(cell))
        different, codes = (numbers.others, numbers.kinds) if numbers and others else self.coded
        return np.isin(codes, [code for code, cell in enumerate(different) if cell in cells])

    def count_in(self, cells: Collection[str]) -> int:
        """Return the number of lines with one of these cells."""
        return int(self.lines_of(cells).sum())

    def first_of(self, cells: Collection[str]) -> int:
        """Return the first line with one of these cells, from 0."""
        return int(self.lines_of(cells).argmax())

    def head(self, count: int) -> Sequence[str]:
        """Return the first cells; none of a column of numbers."""
        return () if self.numbers else self[:count]

    def __len__(self) -> int:
        return self.count_of_lines

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.different[code] for code in self.codes[i].tolist()]
        return self.different[self.codes[i]]

    def __iter__(self) -> Iterator[str]:
        return map(self.different.__getitem__, self.codes.tolist())


def is_plain(cell: str) -> bool:
    """Return whether a cell is a number with a point or a comma at most."""
    return is_number(cell.replace(",", "."))


class ColumnReader:
    """Takes the cells of a column, block by block.

    ``numbers``: False keeps all different cells; ``gaps``: cells that are no numbers even if they look so.
    """

    def __init__(self, numbers: bool = True, gaps: Collection[str] = ()) -> None:
        self.gaps = [gap for gap in gaps if is_plain(gap)]
        self.numbers = numbers and len(self.gaps) < MOST_OTHERS
        self.lines = 0
        self.failed = False
        self.code: dict[str, int] = {}  # of each cell as it is written
        self.different: dict[str, int] = {}
        self.codes: list[Array] = []
        # Which grow in place: blocks would be in memory twice
        self.values, self.kinds = array("d"), array("b")
        self.others = {gap: k for k, gap in enumerate(self.gaps)}
        self.sign, self.zeros = "", False
        self.decimal: tuple[int, str] | None = None
        self.unclear: tuple[int, str] | None = None

    @property
    def size(self) -> int:
        """The memory that the column takes, in bytes."""
        return (
            CELL_BYTES * len(self.code)
            + (VALUE_BYTES if self.values else CODE_BYTES) * self.lines
        )

    def add(self, cells: Sequence[str]) -> None:
        """Take the next cells. Where a column of numbers has other cells after all, it has ``failed``."""
        if self.values:
            self.failed = self.failed or not self.add_numbers(cells)
        else:
            self.add_codes(cells)
        self.lines += len(cells)

    def add_codes(self, cells: Sequence[str]) -> None:
        for cell in dict.fromkeys(cells):
            if cell not in self.code:
                plain = composed(cell.strip())
                self.code[cell] = self.different.setdefault(plain, len(self.different))
        self.codes.append(np.fromiter(map(self.code.__getitem__, cells), np.int32, len(cells)))
        if self.numbers and len(self.different) > MOST_CODED:
            self.turn()

    def turn(self) -> None:
        """Make a column of numbers of the different cells so far, if they are numbers."""
        different, codes = [*self.different], np.concatenate(self.codes)
        self.numbers = self.add_numbers([different[code] for code in codes.tolist()])
        if self.numbers:
            self.code, self.different, self.codes = {}, {}, []
        else:
            self.values, self.kinds = array("d"), array("b")

    def add_numbers(self, cells: Sequence[str]) -> bool:
        """Take cells of numbers; return whether all but a few different ones are."""
        numbers = [cell for cell in cells if cell not in self.others] if self.others else cells
        if (values := floats_of(numbers)) is None:
            cells = [composed(cell.strip()) for cell in cells]
            others = (cell for cell in dict.fromkeys(cells) if not is_plain(cell))
            strange = [cell for cell in others if cell not in self.others]
            if len(strange) + len(self.others) > 2 * MOST_OTHERS:
                return False
            self.others |= {cell: len(self.others) + k for k, cell in enumerate(strange)}
            numbers = [cell for cell in cells if cell not in self.others]
            if (values := floats_of(numbers)) is None:
                return False  # some have points, and some commas
        kinds = np.full(len(cells), -1, np.int8)
        if len(numbers) < len(cells):
            kinds = np.fromiter(map(self.others.get, cells, repeat(-1)), np.int8, len(cells))
            known, values = values, np.full(len(cells), np.nan)
            values[kinds < 0] = known
        places = len(self.values) + np.flatnonzero(kinds < 0)
        self.values.frombytes(values.tobytes())
        self.kinds.frombytes(kinds.tobytes())
        return self.look_at("\n".join(["", *numbers]), places)

    def look_at(self, text: str, places: Array) -> bool:
        """Note the signs of numbers, each after a line break, and where they are first; return whether it is one."""
        sign = "." if "." in text else "," if "," in text else ""
        if self.sign and sign not in ("", self.sign):
            return False
        self.sign = self.sign or sign
        self.zeros = self.zeros or bool(LEADING_ZERO.search(text))
        if sign:
            self.unclear = self.unclear or first_match(UNCLEAR, text, places)
            self.decimal = self.decimal or first_match(DECIMAL, text, places)
        return True

    def make_column(self, read: Callable[[], Coded] | None = None) -> Cells:
        """Return the column. ``read``: reads it again, with all its different cells."""
        if read is None or not self.values:
            coded = [*self.different], np.concatenate(self.codes)
            return Cells(self.lines, lambda: coded)
        if self.failed:
            return Cells(self.lines, read)
        values = np.frombuffer(self.values)
        kinds = np.frombuffer(self.kinds, np.int8)
        signs = self.sign, self.decimal, self.unclear, self.zeros
        return Cells(self.lines, read, Numbers(values, kinds, tuple(self.others), *signs))


def first_match(kind: re.Pattern[str], text: str, places: Array) -> tuple[int, str] | None:
    """Return the place of the first cell of this kind, and the cell. ``text``: each after a line break."""
    match = kind.search(text)
    return match and (int(places[text.count("\n", 0, match.start())]), match[0][1:])


def floats_of(cells: Sequence[str]) -> Array | None:
    """Return numbers with a point each, or a comma each, or neither; None where there is any other cell."""
    text = "\n".join(cells)
    if (
        not text.isascii()
        or text.encode().translate(None, NUMERIC)
        or text.count("\n") != len(cells) - 1
    ):
        return None if cells else np.empty(0)
    if "," in text:
        if "." in text:
            return None
        cells = text.replace(",", ".").split("\n")
    try:
        values = np.fromiter(map(float, cells), np.float64, len(cells)) + 0.0  # 0 for -0
    except ValueError:
        return None
    return values if np.abs(values).max() <= LARGEST else None


class Lines(Sequence[Line]):
    """The lines of a csv. ``columns``: the cells of each; ``numbers``: of the lines in the file, from 1.

    ``word``: what a line is called, with what stands before it; ``separator``, ``encoding``: of the file.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Sequence[str]],
        numbers: Sequence[int] | Array,
        word: str = "",
        separator: str = "",
        encoding: str = "",
    ) -> None:
        self.path, self.numbers, self.header = path, numbers, [*columns]
        self.columns = {
            name: column if isinstance(column, Cells) else Cells.of(column)
            for name, column in columns.items()
        }
        self.word = word or f"{path}, line"
        self.separator, self.encoding = separator, encoding

    def where(self, i: int) -> str:
        """Return the place of a line, for messages."""
        return f"{self.word} {self.numbers[i]}"

    def only(self, names: Collection[str]) -> Lines:
        """Return the lines with some of their columns."""
        columns = {name: self.columns[name] for name in names}
        return Lines(self.path, columns, self.numbers, self.word)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: Any) -> Any:
        return self.where(i), {name: cells[i] for name, cells in self.columns.items()}

    def __iter__(self) -> Iterator[Line]:
        for i, cells in enumerate(zip(*self.columns.values(), strict=True)):
            yield self.where(i), dict(zip(self.columns, cells, strict=True))


NO_LINES = Lines(Path(), {}, [])


class Places(Mapping[str, str]):
    """The different cells of a column without gaps, in the order of the lines, each with its first place.

    ``numbers``: the column, if all of these are numbers and they are many.
    """

    def __init__(self, lines: Lines, column: Cells, gaps: Collection[str]) -> None:
        self.lines, self.column, self.gaps = lines, column, gaps
        numbers = column.numbers
        self.numbers = numbers if numbers and numbers.between(gaps) else None

    @cached_property
    def different(self) -> Mapping[str, int]:
        """The code of each cell."""
        return {
            cell: code
            for code, cell in enumerate(self.column.different)
            if cell not in self.gaps
        }

    @cached_property
    def first(self) -> Array:
        """The first line of each different cell of the column; few columns are asked for it."""
        return np.unique(self.column.codes, return_index=True)[1]

    def __getitem__(self, cell: str) -> str:
        return self.lines.where(self.first[self.different[cell]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.different)

    def __len__(self) -> int:
        return len(self.different)


def cells_in(lines: Lines, name: str, gaps: Collection[str]) -> Places:
    """Return the different cells of a column without gaps, in the order of the lines, each with its first place."""
    return Places(lines, lines.columns[name], gaps)
