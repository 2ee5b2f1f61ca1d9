"""Lines of a csv, stored by column: equal cells are one object, and a line's place is its number."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

Line = tuple[str, Mapping[str, str]]  # "table.csv, line 7", and its cells by column


class Lines(Sequence[Line]):
    """The lines of a csv. ``columns``: the cells of each; ``numbers``: of the lines in the file, from 1."""

    def __init__(self, path: Path, columns: Mapping[str, Sequence[str]], numbers: Sequence[int]) -> None:
        self.path, self.columns, self.numbers = path, columns, numbers

    def where(self, i: int) -> str:
        """Return the place of a line, for messages."""
        return f"{self.path}, line {self.numbers[i]}"

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: Any) -> Any:
        return self.where(i), {name: cells[i] for name, cells in self.columns.items()}

    def __iter__(self) -> Iterator[Line]:
        for i, cells in enumerate(zip(*self.columns.values(), strict=True)):
            yield self.where(i), dict(zip(self.columns, cells, strict=True))


NO_LINES = Lines(Path(), {}, [])


class Places(Mapping[str, str]):
    """The ``different`` cells of a column ``name``, each with its first place."""

    def __init__(self, lines: Lines, name: str, different: Collection[str]) -> None:
        self.lines, self.name, self.different = lines, name, different

    @cached_property
    def first(self) -> Mapping[str, int]:
        """The first line of each cell, from 0; few columns are asked for it."""
        cells = self.lines.columns[self.name]
        return dict(zip(reversed(cells), range(len(cells) - 1, -1, -1), strict=True))

    def __getitem__(self, cell: str) -> str:
        return self.lines.where(self.first[cell])

    def __iter__(self) -> Iterator[str]:
        return iter(self.different)

    def __len__(self) -> int:
        return len(self.different)


def column_of(lines: Sequence[Line], name: str) -> Sequence[str]:
    """Return the cells of a column, one for each line."""
    return lines.columns[name] if isinstance(lines, Lines) else [row[name] for _, row in lines]


def cells_in(lines: Lines, name: str, gaps: Collection[str]) -> Places:
    """Return the different cells of a column without gaps, in the order of the lines, each with its first place."""
    different = dict.fromkeys(lines.columns[name])
    for gap in gaps:
        different.pop(gap, None)
    return Places(lines, name, different)
