"""Lines of a csv by column: the same rows as line by line, each different cell once, and the place of a cell."""

from __future__ import annotations

from pathlib import Path

from representatives import product

from partitions.common.errors import Problems
from partitions.importing.options import Take
from partitions.importing.tables import read_lines
from partitions.recipes import lines as columns
from partitions.recipes import pipeline
from partitions.recipes.draft import draft_columns, find_gaps
from partitions.recipes.lines import Lines, cells_in
from partitions.recipes.pipeline import check_misfits, convert_columns
from partitions.recipes.recipe import Column, FileFormat, Recipe
from partitions.recipes.signs import Asked, evidence_of, share_of_numbers

TEXT = "age;place\n71,5; north\n\nNA;north\n71,5;south\nx;south\n80,25;north\n"


def test_rows_are_those_of_the_file(tmp_path):
    """Empty lines count for the numbers, blanks around cells do not."""
    path = tmp_path / "t.csv"
    path.write_text(TEXT)
    lines = read_lines(path)
    header = lines.header
    places = [f"{path}, line {number}" for number in (2, 4, 5, 6, 7)]
    rows = [
        ("71,5", "north"),
        ("NA", "north"),
        ("71,5", "south"),
        ("x", "south"),
        ("80,25", "north"),
    ]
    assert header == ["age", "place"] and len(lines) == 5
    assert list(lines) == [
        (where, dict(zip(header, row, strict=True)))
        for where, row in zip(places, rows, strict=True)
    ]
    assert [lines[i] for i in range(5)] == list(lines)
    assert dict(cells_in(lines, "age", ("NA",))) == {
        "71,5": places[0],
        "x": places[3],
        "80,25": places[4],
    }


def test_a_different_cell_is_read_once(tmp_path, monkeypatch):
    """A hospital's table has some hundred different cells in a column, and a million lines."""
    path = tmp_path / "t.csv"
    path.write_text(TEXT)
    lines = read_lines(path)
    asked, parse = list[str](), pipeline.parse_number

    def counted(cell, decimal, thousands):
        asked.append(cell)
        return parse(cell, decimal, thousands)

    monkeypatch.setattr(pipeline, "parse_number", counted)
    column = Column(name="age", kind="number", decimal=",", fill="median")
    recipe = Recipe(columns=(column,), file=FileFormat(gaps=("", "NA")))
    made, misfits = convert_columns(lines, recipe)
    assert made[0].fillna(-1).tolist() == [71.5, -1, 71.5, -1, 80.25] and asked == [
        "71,5",
        "x",
        "80,25",
    ]
    assert [misfit.where for misfit in misfits] == [f"{path}, line 6"]


COLUMNS = [
    ["1", "-2", "+3", "007", "12"],
    ["1.5", "-.5", "2", "1e5", "1.5e-3"],
    ["1.234", "2", "3.5", "7", "8"],
    ["5.", "1", "", "NA", " 3 "],
    ["1,5", "2", "3,25", "1,234", "-7"],
    ["1.5", "2,5", "3", "4", "5"],  # two signs
    ["1.234.567", "2", "3", "4", "5"],
    ["1e99", "2", "3", "4", "5"],
    ["nan", "1", "2", "3", "4"],
    ["1_0", "1", "2", "3", "4"],
    ["\uff11", "1", "2", "3", "4"],
    ["1\n2", "3", "4", "5", "6"],
    ["1", "x", "2", "3", "4"],
    ["1", "2", "-99", "-99", "4"],
    ["1", "2", "99", "99", "4"],
    ["-99", "1", "2", "-3", "4"],
    ["1"] * 40 + ["-1", "2"],
    ["1", "a", "b", "c", "d", "e"],
]


@product(gaps=[(), ("-99",), ("NA", "2")], cells=COLUMNS)
def test_an_array_of_numbers_is_its_cells(cells, gaps, tmp_path, monkeypatch):
    """A column of many numbers gives the same draft, values, misfits and messages as cell by cell."""
    path = tmp_path / "t.csv"
    path.write_text("x;y\n" + "".join(f'"{cell}";a\n' for cell in cells))
    monkeypatch.setattr("partitions.importing.tables.BLOCK_CELLS", 4)

    def found(most, given):
        monkeypatch.setattr(columns, "MOST_CODED", most)
        monkeypatch.setattr(columns, "MOST_OTHERS", 3)
        lines = read_lines(path, Take(gaps=given))
        missing = ("", *gaps)
        own = cells_in(lines, "x", missing)
        made = [evidence_of(own), share_of_numbers(own), dict(own), list(lines.columns["x"])]
        for decimal in ("", ".", ","):
            problems = Problems()
            drafted, sign = draft_columns(lines, ["x"], missing, Asked(decimal), "", problems)
            made += [drafted, sign, [column.why for column in drafted], list(problems)]
        for decimal, thousands in ((".", ""), (".", ","), (",", "."), (",", "")):
            column = Column(
                name="x",
                kind="number",
                decimal=decimal,
                thousands=thousands,
                factor=2,
                range=(0, 9),
            )
            values, misfits = convert_columns(
                lines, Recipe(columns=(column,), file=FileFormat(gaps=missing))
            )
            made += [values[0].fillna(-1.5).tolist(), misfits, check_misfits(misfits, True)]
        return made

    by_cell = found(1 << 20, ())
    assert found(0, gaps) == by_cell
    assert found(0, ()) == by_cell
    assert found(2, gaps) == by_cell


def test_many_numbers_are_an_array(tmp_path, monkeypatch):
    """Their cells are not kept, and are read again where one of them is asked for."""
    monkeypatch.setattr(columns, "MOST_CODED", 2)
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{i}.25,a\n" for i in range(9)) + ",a\n")
    lines = read_lines(path)
    assert [own.numbers is None for own in lines.columns.values()] == [False, True]
    path.write_text(path.read_text().replace("0.25", "0.75"))
    assert lines.columns["a"][0] == "0.75"


def test_gaps_are_found_among_short_cells():
    lines = Lines(Path("t.csv"), {"x": ["NaN", "#N/A", "missing", "1", "?"]}, range(5))
    assert find_gaps(lines, ["x"], Asked()) == ("", "#N/A", "?", "NaN")
