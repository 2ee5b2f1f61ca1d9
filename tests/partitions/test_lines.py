"""Lines of a csv by column: the same rows as line by line, each text once, and the place of a cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from partitions.importing.tables import read_lines
from partitions.recipes import pipeline
from partitions.recipes.lines import cells_in, column_of
from partitions.recipes.pipeline import convert
from partitions.recipes.recipe import Column, Recipe

TEXT = "age;place\n71,5; north\n\nNA;north\n71,5;south\nx;south\n80,25;north\n"


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    """Empty lines count for the numbers, blanks around cells do not."""
    path = tmp_path / "t.csv"
    path.write_text(TEXT)
    header, lines = read_lines(path)
    places = [f"{path}, line {number}" for number in (2, 4, 5, 6, 7)]
    rows = [("71,5", "north"), ("NA", "north"), ("71,5", "south"), ("x", "south"), ("80,25", "north")]
    assert header == ["age", "place"] and len(lines) == 5
    assert list(lines) == [
        (where, dict(zip(header, row, strict=True))) for where, row in zip(places, rows, strict=True)
    ]
    assert [lines[i] for i in range(5)] == list(lines)
    assert list(column_of(lines, "age")) == list(column_of(list(lines), "age"))
    assert dict(cells_in(lines, "age", ("NA",))) == {"71,5": places[0], "x": places[3], "80,25": places[4]}


def test_a_cell_that_comes_again_is_kept_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hospital's table has some hundred different cells in a column, and a million lines."""
    path = tmp_path / "t.csv"
    path.write_text(TEXT)
    lines = read_lines(path)[1]
    ages = lines.columns["age"]
    assert ages[0] is ages[2]
    asked, parse = list[str](), pipeline.parse_number

    def counted(cell: str, decimal: str, thousands: str) -> float | None:
        asked.append(cell)
        return parse(cell, decimal, thousands)

    monkeypatch.setattr(pipeline, "parse_number", counted)
    recipe = Recipe((Column("age", "number", decimal=",", fill="median"),), gaps=("", "NA"))
    made, misfits = convert([*lines, *lines], recipe)
    assert made[:, 0].tolist() == [71.5, None, 71.5, None, 80.25] * 2 and asked == ["71,5", "x", "80,25"]
    assert [misfit.where for misfit in misfits] == [f"{path}, line 6"] * 2
