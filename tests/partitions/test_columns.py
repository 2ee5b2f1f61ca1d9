"""Columns of numbers that are read at once: the same as cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partitions.recipes import cells as reading
from partitions.recipes.cells import are_plain, parse_number, parse_numbers
from partitions.recipes.draft import Asked, Evidence, evidence_of, find_gaps, share_of_numbers
from partitions.recipes.lines import Lines, cells_in
from partitions.recipes.pipeline import convert
from partitions.recipes.recipe import Column, Recipe

COLUMNS = [
    ["1", "-2", "+3", "007"],
    ["1.5", "-.5", "2", "1e5", "1.5e-3"],
    ["1.234", "2", "3.5"],
    ["5.", "1"],
    ["1,5", "2"],
    ["1.234.567", "2"],
    ["1e99", "2"],
    ["nan", "1"],
    ["1_0", "1"],
    ["\uff11", "1"],
    ["1\n2", "3"],
    ["1", "x"],
    ["", "1"],
    [],
]


@pytest.mark.parametrize("cells", COLUMNS)
@pytest.mark.parametrize("signs", [(".", ""), (".", ","), (",", "."), (",", "")])
def test_a_column_at_once_is_its_cells(cells: list[str], signs: tuple[str, str], monkeypatch: Any) -> None:
    lines = Lines(Path("t.csv"), {"x": cells}, range(2, 2 + len(cells)))
    assert parse_numbers(cells, *signs) == {cell: parse_number(cell, *signs) for cell in cells}
    recipe = Recipe((Column("x", "number", decimal=signs[0], thousands=signs[1], factor=2, range=(0, 9)),))

    def found() -> tuple[Evidence, float, list[object], list[str]]:
        own = cells_in(lines, "x", [""])
        made, misfits = convert(lines, recipe)
        return evidence_of(own), share_of_numbers(own), made.tolist(), [misfit.what for misfit in misfits]

    at_once = found()
    for module in ("partitions.recipes.cells", "partitions.recipes.draft"):
        monkeypatch.setattr(f"{module}.are_plain", lambda cells: False)
    monkeypatch.setattr("partitions.recipes.pipeline.plain_numbers", lambda *_: None)
    assert at_once == found()


def test_only_numbers_with_points_are_plain() -> None:
    assert [are_plain(cells) for cells in COLUMNS] == [True] * 3 + [False] * 3 + [True] + [False] * 7
    assert reading.LARGEST < 1e99


def test_gaps_are_found_among_short_cells() -> None:
    lines = Lines(Path("t.csv"), {"x": ["NaN", "#N/A", "missing", "1", "?"]}, range(5))
    assert find_gaps(lines, ["x"], Asked()) == ("", "#N/A", "?", "NaN")
