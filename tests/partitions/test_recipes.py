"""A recipe of a table: what is proposed, what is asked, how it is repeated on other rows, and what does not fit it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from taken import all_x, imported, silofl, write_lines

from partitions.common.errors import DataError
from partitions.importing.options import ImportOptions, Take
from partitions.importing.source import import_source
from partitions.recipes.cells import parse_number
from partitions.recipes.pictures import read_any
from partitions.recipes.recipe import MEND, load_recipe, parse_recipe
from partitions.silo_file import check_silo_file

N = 120
HEADER = "Patient-ID;Alter;Dosis;Geschlecht;Aufnahme;Ort;Notiz;Befund"


def messy(path, n=N, encoding="utf-8"):
    """Visits of n / 2 patients: decimal commas, thousands, gaps, a category, a date, places that few live in, notes."""
    rows = [HEADER]
    for i in range(n):
        cells = [
            f"P{i % (n // 2):03d}",
            "" if i % 10 == 3 else f"{20 + i % 60},5",
            f"{1 + i % 7}.{100 + i},25",
            ("w", "m", "NA")[i % 3],
            f"{1 + i % 28:02d}.03.{2020 + i % 5}",
            "Köln" if i < n - 3 else f"Dorf {i}",
            f"note {i} of Mrs. Meier",
            "krank" if i % 2 else "gesund",
        ]
        rows.append(";".join(cells))
    path.write_text("\n".join(rows) + "\n", encoding=encoding)
    return path


def take_in(source, out, **options):
    return imported(
        source, out, **{"label": "Befund", "take": Take(patient="Patient-ID"), **options}
    )


def refused(source, words, **options):
    out = source.parent / "refused.npz"
    said = fails(ValueError, None, take_in, source, out, **options)
    assert words in said
    assert not out.exists()


def again(source, recipe, out, **options):
    return imported(source, out, recipe=recipe, **options)


@pytest.fixture
def made(tmp_path):
    """The data file of a messy table, t.csv."""
    return take_in(messy(tmp_path / "t.csv"), tmp_path / "t.npz")


def table(path, columns, separator=";"):
    rows = zip(*columns.values(), strict=True)
    path.write_text(
        "\n".join([separator.join(columns), *(separator.join(row) for row in rows)]) + "\n"
    )
    return path


def drafted(path, cells, **take):
    """An import of one column beside labels of 0 and 1."""
    columns = {"v": cells, "label": [str(i % 2) for i in range(len(cells))]}
    out = path / "v.npz"
    return imported(table(path / "v.csv", columns), out, patient=None, **take)


# What is proposed


def test_a_messy_table_becomes_a_data_file(tmp_path, made):
    """By hand: 12 ages are gaps, and become the median of the training part's ages, as no other rows know it."""
    assert made.feature_names == (
        "Alter",
        "Dosis",
        "Geschlecht=m",
        "Geschlecht=w",
        "Aufnahme",
        "Ort=Köln",
        "Ort=other",
    )
    assert made.label_names == ("gesund", "krank")
    recipe = made.recipe
    kinds = {column.name: column.kind for column in recipe.columns}
    assert (
        kinds["Notiz"] == "skip" and kinds["Aufnahme"] == "date" and "Patient-ID" not in kinds
    )
    columns = {column.name: column for column in recipe.columns}
    x = made.data.train.x
    ages, filled = x[:, 0], columns["Alter"].fill_value
    given = ages[~np.load(made.file)["gaps_train"][:, 0]]
    assert filled == np.median(given) and 0 < len(given) < len(ages)
    whole = [float(f"{20 + i % 60}.5") for i in range(N) if i % 10 != 3]
    assert filled != np.median(whole), "the test needs data whose parts differ"
    assert (x[:, 2] + x[:, 3] == 1).all() and (x[:, 5] + x[:, 6] == 1).all()
    assert set(np.round(all_x(made.data)[:, 1] % 1, 2)) == {0.25}
    assert 1100 <= all_x(made.data)[:, 1].min() <= all_x(made.data)[:, 1].max() <= 7300
    first = (np.datetime64("2020-03-01") - np.datetime64("2000-01-01")).astype(int) / 365.25
    assert np.isclose(all_x(made.data)[:, 4].min(), first, atol=0.1)
    assert all(check.ok for check in check_silo_file(made.file))


def test_rare_values_and_notes_stay_out_of_the_recipe(tmp_path, made):
    """Three places have one visitor each; their names would travel with the model's card."""
    assert any(
        note.startswith("of fewer than 5 patients are Ort=other (3): sums of columns leave")
        for note in made.notes
    )
    for text in (
        made.recipe.as_json,
        made.recipe.toml(),
        made.file.read_bytes().decode("utf-32-le", "ignore"),
    ):
        assert "Dorf" not in text and "Meier" not in text and "P001" not in text


def test_categories_that_differ_in_blanks_and_line_breaks_are_one(tmp_path):
    made = drafted(tmp_path, ["a b", "a  b", '"a\nb"', "c", "c\a"] * 8)
    (column,) = made.recipe.used
    assert column.categories == ("a b", "c") and column.values == {"a  b": "a b", "a\nb": "a b"}
    assert "1 values of fewer than 5 patients, or unprintable, become 'other'" in column.why
    assert all_x(made.data).sum(0).tolist() == [24, 8, 8]
    rows = table(tmp_path / "new.csv", {"v": ['"a\nb"', "a  b"]})
    x = np.load(again(rows, read_any(made.recipe.as_json), tmp_path / "new.npz").file)["x"]
    assert x.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_plain_table_is_what_it_was(tmp_path):
    made = drafted(tmp_path, ["1", "2.5", "-3e2", ".5", "1"] * 4)
    assert made.feature_names == ("v",) and made.notes == ()
    assert sorted(set(all_x(made.data)[:, 0].tolist())) == [-300, 0.5, 1, 2.5]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings(tmp_path, encoding):
    made = take_in(messy(tmp_path / "t.csv", encoding=encoding), tmp_path / "t.npz")
    assert "Ort=Köln" in made.feature_names
    said = [note for note in made.notes if "is not UTF-8" in note]
    assert len(said) == (encoding == "cp1252") and all(
        "first in line 2, Ort" in note for note in said
    )
    whole = again(tmp_path / "t.csv", made.recipe, tmp_path / "again.npz")
    assert whole.file.read_bytes() == made.file.read_bytes()


@pytest.mark.parametrize(
    "cells, value",
    [
        (["1.234,5", "7"], 1234.5),
        (["1,234.5", "7"], 1234.5),
        (["1 234,5", "7"], 1234.5),
        (["1'234.5", "7"], 1234.5),
        (["1.234.567", "7"], 1234567),
        (["1,5", "7"], 1.5),
        (["1.234", "7"], 1.234),
        (["0,123", "7"], 0.123),
    ],
)
def test_signs_that_the_cells_show(tmp_path, cells, value):
    assert np.float32(value) in all_x(drafted(tmp_path, cells * 6).data)[:, 0]


def test_signs_that_the_cells_do_not_show_are_asked_for(tmp_path):
    with pytest.raises(
        ValueError, match=r"line 2: v is '1,234'; add --decimal , if .*, or --thousands , if"
    ):
        drafted(tmp_path, ["1,234", "7"] * 6)
    assert np.float32(1.234) in all_x(drafted(tmp_path, ["1,234", "7"] * 6, decimal=",").data)
    assert np.float32(1234) in all_x(drafted(tmp_path, ["1,234", "7"] * 6, thousands=",").data)
    with pytest.raises(
        ValueError, match=r"line 3: v is '2\.5', and in line 2 '1,5': write all with one sign"
    ):
        drafted(tmp_path, ["1,5", "2.5"] * 6)
    with pytest.raises(
        ValueError, match=r"line 2: v is '1\.234', which has a point: .* --thousands \. if"
    ):
        drafted(tmp_path, ["1.234", "7,5"] * 6)


def test_dates_that_can_be_read_in_two_ways_are_asked_for(tmp_path):
    """3 April or 4 March; a 13th day tells."""
    with pytest.raises(ValueError, match=r"2 ways: --dates '%d/%m/%Y' or --dates '%m/%d/%Y'"):
        drafted(tmp_path, ["03/04/2024", "05/06/2024"] * 6)
    days = all_x(drafted(tmp_path, ["03/04/2024", "05/06/2024"] * 6, dates="%m/%d/%Y").data)[
        :, 0
    ]
    assert np.isclose(days.max() - days.min(), 63 / 365.25, atol=1e-5)
    made = drafted(tmp_path, ["03/04/2024", "13/06/2024"] * 6)
    assert made.recipe.columns[0].format == "%d/%m/%Y"


def test_a_number_that_is_none_is_named(tmp_path):
    """Eleven numbers and "<5": a laboratory's limit is no category."""
    with pytest.raises(
        ValueError,
        match=r"line 5: v is '<5', no number; .* half of the limit, or --gaps='<5' takes",
    ):
        drafted(tmp_path, ["1", "2", "3", "<5", *map(str, range(8))])
    made = drafted(tmp_path, ["1", "2", "3", "<5", *map(str, range(8))], gaps=("<5",))
    assert made.recipe.file.gaps == ("", "<5")


def test_a_dash_is_no_gap_unless_it_is_named(tmp_path):
    """Beside "+" it is a finding; among numbers it is asked for."""
    made = drafted(tmp_path, ["+", "-"] * 10)
    assert made.feature_names == ("v=+", "v=-") and (all_x(made.data).sum(0) == 10).all()
    with pytest.raises(
        ValueError, match=r"line 3: v is '-', no number; .*, or --gaps=- takes it as missing"
    ):
        drafted(tmp_path, ["1", "-", "3", "4"] * 5)
    assert not np.isnan(
        all_x(drafted(tmp_path, ["1", "-", "3", "4"] * 5, gaps=("-",)).data)
    ).any()


def test_numbers_that_may_be_coded_gaps_are_pointed_at(tmp_path):
    made = drafted(tmp_path, ["1", "-999", "3", "4"] * 5)
    assert "5 cells are -999 and no other is below 0" in made.recipe.columns[0].why
    assert -999 in all_x(made.data)
    assert -999 not in all_x(
        drafted(tmp_path, ["1", "-999", "3", "4"] * 5, gaps=("-999",)).data
    )


# Other rows


def test_the_same_rows_give_the_same_bytes(tmp_path, made):
    (tmp_path / "t.recipe.toml").write_text(made.recipe.toml("a comment"))
    recipe = load_recipe(tmp_path / "t.recipe.toml")
    assert recipe == read_any(made.data.recipe) and recipe.content == made.recipe.content
    assert (
        again(tmp_path / "t.csv", recipe, tmp_path / "again.npz").file.read_bytes()
        == made.file.read_bytes()
    )


def new_rows(path, *rows, header="Aufnahme;Alter;Ort;Geschlecht;Dosis;Notiz;Patient-ID"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_new_rows_without_labels(tmp_path, made):
    """In another order of columns; gaps become what they became in the training part. All rows are there."""
    fills = {column.name: column.fill_value for column in made.recipe.columns}
    source = new_rows(
        tmp_path / "new.csv", "01.03.2021;31,5;Köln;w;1.000,25;x;P900", ";;Bonn;;2,5;y;P901"
    )
    whole = again(source, made.recipe, tmp_path / "new.npz")
    with np.load(whole.file) as npz:
        assert "y" not in npz and npz["feature_names"].tolist() == list(made.feature_names)
        x = npz["x"]
    assert (
        x.shape == (2, 7)
        and x[0, :4].tolist() == [31.5, 1000.25, 0, 1]
        and x[0, 5:].tolist() == [1, 0]
    )
    assert x[1, 0] == np.float32(fills["Alter"]) and x[1, 4] == np.float32(fills["Aufnahme"])
    assert x[1, 2:4].tolist() == [fills["Geschlecht"] == "m", fills["Geschlecht"] == "w"]
    assert whole.notes == (
        f"{source}, line 3: Ort is 'Bonn', none of Köln, other: taken as 'other'",
    )


def test_too_few_labelled_rows_to_divide_are_all_there(tmp_path, made):
    source = write_lines(
        tmp_path / "two.csv", *(tmp_path / "t.csv").read_text().splitlines()[:3]
    )
    with np.load(again(source, made.recipe, tmp_path / "two.npz").file) as npz:
        assert (
            len(npz["x"]) == 2
            and npz["y"].tolist() == [0, 1]
            and npz["label_names"].tolist() == ["gesund", "krank"]
        )


def test_what_does_not_fit_is_named_and_never_dropped(tmp_path, made):
    content = made.recipe.content
    content["columns"][0]["range"] = [0, 120]
    recipe = parse_recipe(content)
    source = new_rows(
        tmp_path / "new.csv",
        "01.03.2021;340;Köln;x;1,5;x;P900",
        "31.02.2021;30;Köln;w;1,5;y;P901",
        ";30;;W;;;",
    )
    with pytest.raises(ValueError) as caught:
        again(source, recipe, tmp_path / "new.npz")
    said = str(caught.value)
    for words in (
        "line 2: Alter is '340', outside of its range 0..120",
        "line 2: Geschlecht is 'x', none of m, w",
    ):
        assert words in said
    assert (
        "and 1 cells more" in said
        and "--as-gaps" in said
        and not (tmp_path / "new.npz").exists()
    )
    whole = again(source, recipe, tmp_path / "new.npz", as_gaps=True)
    assert [note.rpartition(", line ")[2] for note in whole.notes] == [
        "2: Alter is '340', outside of its range 0..120: taken as a gap",
        "2: Geschlecht is 'x', none of m, w: taken as a gap",
        "3: Aufnahme is '31.02.2021', no date as %d.%m.%Y: taken as a gap",
        "4: Geschlecht is 'W', none of m, w (did you mean 'w'?): taken as a gap",
    ]
    with np.load(whole.file) as npz:
        assert len(npz["x"]) == 3 and npz["x"][0, 0] == np.float32(recipe.columns[0].fill_value)


@pytest.mark.parametrize(
    "header, words",
    [
        (
            "Aufnahme;Alter;Ort;Geschlecht;Dosis;Notiz;Patient-ID;BMI",
            "has columns that the recipe does not have: BMI; rename",
        ),
        (
            "Aufnahme;Age;Ort;Geschlecht;Dosis;Notiz;Patient-ID",
            "does not have: Age and lacks Alter; rename or remove them",
        ),
        (
            "Aufnahme;Ort;Geschlecht;Dosis;Notiz;Patient-ID",
            "has no column Alter, which the recipe takes; there are",
        ),
        (
            "Aufnahme;Alter;Ort;Geschlecht;Dosis;Notiz",
            "has no column Patient-ID, which the recipe takes; there are",
        ),
    ],
)
def test_other_columns_are_refused(tmp_path, header, words, made):
    source = new_rows(
        tmp_path / "new.csv", ";".join("1" for _ in header.split(";")), header=header
    )
    fails(ValueError, words, again, source, made.recipe, tmp_path / "new.npz")


# What a recipe can say


COLUMNS = [
    {
        "name": "glucose",
        "from": "Glukose",
        "kind": "number",
        "unit": "mg/dl",
        "factor": 18,
        "offset": 1,
        "fill": "mean",
    },
    {
        "name": "sex",
        "kind": "category",
        "categories": ["f", "m"],
        "values": {"W": "f", "M": "m"},
        "fill": "refuse",
    },
    {
        "name": "nyha",
        "kind": "category",
        "categories": ["I", "II", "III"],
        "encode": "codes",
        "fill": "most-frequent",
    },
    {
        "name": "stay",
        "from": "out",
        "kind": "date",
        "format": "%Y-%m-%d",
        "since": "in",
        "per": "days",
        "fill": "median",
    },
    {"name": "in", "kind": "skip", "format": "%Y-%m-%d"},
    {"name": "crp", "kind": "number", "fill": "value", "fill-value": 0, "mark-gaps": True},
]


def own_recipe(**changes):
    return {
        "version": 1,
        "label": ["label"],
        "file": {"separator": ";"},
        "columns": COLUMNS,
        **changes,
    }


def test_units_codes_dates_and_marks(tmp_path):
    """By hand: 5 mmol/l * 18 + 1 = 91; NYHA III is code 2; 11 days from 2024-02-20 to 2024-03-02; a gap is marked."""
    columns = {
        "Glukose": ["5", "5.5"] * 10,
        "sex": ["W", "M"] * 10,
        "nyha": ["III", "I"] * 10,
        "in": ["2024-02-20", "2024-01-01"] * 10,
        "out": ["2024-03-02", "2024-01-02"] * 10,
        "crp": ["", "7"] * 10,
        "label": ["0", "1"] * 10,
    }
    source = table(tmp_path / "t.csv", columns)
    made = again(source, parse_recipe(own_recipe()), tmp_path / "t.npz")
    assert made.feature_names == (
        "glucose",
        "sex=f",
        "sex=m",
        "nyha",
        "stay",
        "crp",
        "crp missing",
    )
    rows = {tuple(row) for row in all_x(made.data).tolist()}
    assert rows == {(91, 1, 0, 2, 11, 0, 1), (100, 0, 1, 0, 1, 7, 0)}
    assert str(made.data.schema.features[0]) == "glucose [mg/dl]"
    source.write_text(source.read_text().replace("5;W", "5;", 1))
    with pytest.raises(
        ValueError, match=r'line 2: sex is missing, and the recipe says fill = "refuse"'
    ):
        again(source, parse_recipe(own_recipe()), tmp_path / "b.npz")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"version": 2}, "reads recipes of version 1"),
        ({"label": "state"}, "label = 'state': must be a list; correct it as docs/inputs.md"),
        ({"colums": []}, "'colums' is no key of it (did you mean 'columns'?)"),
        (
            {"columns": [{"name": "a", "kind": "nummer"}]},
            "columns.1.kind = 'nummer': must be one of 'number'",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "fill": "zero"}]},
            "fill is 'zero'; it is one of 'median'",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "rang": [0, 1]}]},
            "'columns.1.rang' is no key of it (did you mean 'range'?)",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "why": "x"}]},
            "the column 'a': it has no key 'why'",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "fill_value": 1}]},
            "'columns.1.fill_value' is no key of it",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "range": [0, True]}]},
            "columns.1.range.2 = True: must be a",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "range": [2, 1]}]},
            "the smaller one first",
        ),
        (
            {"columns": [{"name": "a", "kind": "category"}]},
            "categories are 1 to 1000 different texts",
        ),
        ({"columns": [{"name": "a", "kind": "skip"}]}, "every column is skipped"),
        ({"columns": [{"name": "a", "kind": "date"}]}, "a date needs its format"),
        (
            {"columns": [{"name": "a", "kind": "number"}] * 2},
            "two columns of the csv are called 'a'",
        ),
        (
            {"columns": [{"name": "a", "kind": "number", "decimal": ",", "thousands": ","}]},
            "are both ','",
        ),
        ({"file": {"separator": ";;"}}, "separator is ';;'; it is one sign"),
        ({"file": {"separator": '"'}}, "separator is '\"'; it is one sign"),
        (
            {"columns": [{"name": "a", "kind": "number", "fill": "value"}]},
            'fill = "value" needs fill-value',
        ),
    ],
)
def test_bad_recipes(changes, words):
    said = fails(ValueError, None, parse_recipe, own_recipe(**changes))
    assert words in said and (said.endswith(MEND) or "version" in changes)


def test_a_recipe_in_a_data_file_is_of_its_columns(tmp_path, made):
    with np.load(made.file) as npz:
        arrays = dict(npz)
    for text, words in (
        ("{}", "version is None"),
        (parse_recipe(own_recipe()).as_json, "a recipe of other columns"),
    ):
        np.savez(tmp_path / "b.npz", **{**arrays, "recipe": np.array(text)})
        assert words in check_silo_file(tmp_path / "b.npz")[-1].detail


@pytest.mark.parametrize("cell", ["1.23.4", "1.2345", "12.34", "1.234,", "1,2,3", "a", ""])
def test_groups_that_are_no_thousands_are_no_number(cell):
    assert parse_number(cell, ",", ".") is None


# The command


def test_the_way_of_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messy(Path("t.csv"))
    command = ["import", "t.csv", "--label", "Befund", "--patient", "Patient-ID"]
    assert silofl(*command, "--propose") == 0
    draft = capsys.readouterr().out
    assert (
        "# category, one column for each of m, w; 40 gaps become the training part's most frequent"
        in draft
    )
    assert "The label is Befund. For the parts, Patient-ID says whose each row is." in draft
    assert not Path("t.npz").exists()
    Path("draft.toml").write_text(
        draft.replace('name = "Alter"', 'name = "age"\nfrom = "Alter"\nrange = [0, 120]')
    )
    assert silofl("import", "t.csv", "--recipe", "draft.toml", "--out", "ours.npz") == 0
    assert load_recipe(Path("ours.recipe.toml")).columns[0].fill_value is not None
    assert silofl("import", "t.csv", "--recipe", "ours.recipe.toml", "--out", "again.npz") == 0
    assert (
        Path("ours.npz").read_bytes() == Path("again.npz").read_bytes()
        and not Path("again.recipe.toml").exists()
    )
    capsys.readouterr()
    for more, words in (
        (
            ["--recipe", "ours.recipe.toml", "--out", "x.npz"],
            "--label beside --recipe: the recipe says that",
        ),
        (["--out", "ours.npz"], "ours.recipe.toml is there already: use it with --recipe"),
        (
            ["--propose", "--out", "x.npz"],
            "--propose prints a draft, and takes no --recipe and no --out",
        ),
        (["--as-gaps", "--out", "x.npz"], "--as-gaps goes with --recipe"),
        ([], "--out FILE.npz is missing"),
    ):
        assert silofl(*command, *more) == 2
        assert words in capsys.readouterr().err
    assert silofl("import", "t.csv", "--recipe", "draft.toml", "--out", "draft.npz") == 0
    Path("new.recipe.toml").write_text(draft)
    assert silofl("import", "t.csv", "--recipe", "new.recipe.toml", "--out", "new.npz") == 2
    assert "give the draft another name" in capsys.readouterr().err
    lines = Path("t.csv").read_text().splitlines()
    Path("few.csv").write_text("\n".join(line.rpartition(";")[0] for line in lines[:4]))
    assert silofl("import", "few.csv", "--recipe", "draft.toml", "--out", "few.npz") == 2
    assert "the recipe has no fill-value for age, Dosis and 3 more" in capsys.readouterr().err


# The examples of docs/inputs.md


def example(name):
    """The recipe of this file on the page."""
    page = (Path(__file__).resolve().parents[2] / "docs/inputs.md").read_text()
    (text,) = [
        block.split("```")[0]
        for block in page.split("```toml\n")[1:]
        if block.startswith(f"# {name}")
    ]
    return parse_recipe(tomllib.loads(text))


def test_an_extract_of_omop(tmp_path):
    """By hand: 100 umol/l are 1.13 mg/dl; concept 0 is a gap, and the label's 0 is not."""
    columns = {
        "person_id": [str(i) for i in range(20)],
        "gender_concept_id": ["8507", "8532", "8532", "0"] * 5,
        "year_of_birth": ["1950"] * 20,
        "visit_start_date": ["2024-01-01"] * 20,
        "creatinine": ["100", "", "100", "100"] * 5,
        "death_30d": ["0", "1"] * 10,
    }
    made = again(
        table(tmp_path / "o.csv", columns, ","), example("omop.toml"), tmp_path / "o.npz"
    )
    assert made.feature_names == (
        "sex=female",
        "sex=male",
        "born",
        "creatinine",
        "creatinine missing",
    )
    rows = {tuple(round(value, 4) for value in row) for row in all_x(made.data).tolist()}
    assert rows == {(0, 1, 1950, 1.13, 0), (1, 0, 1950, 1.13, 1), (1, 0, 1950, 1.13, 0)}


def test_an_extract_of_fhir(tmp_path):
    columns = {
        "patient_id": [f"p{i}" for i in range(20)],
        "gender": ["male", "female", "unknown", "other"] * 5,
        "birth_date": ["1950-03-01"] * 20,
        "encounter_start": ["2020-03-01", ""] * 10,
        "hba1c_value": ["6.5"] * 20,
        "readmitted": ["false", "true"] * 10,
    }
    source = table(tmp_path / "f.csv", columns, ",")
    made = again(source, example("fhir.toml"), tmp_path / "f.npz")
    assert made.feature_names == (
        "gender=female",
        "gender=male",
        "gender=other",
        "age",
        "hba1c",
    )
    assert set(np.round(all_x(made.data)[:, 3], 1).tolist()) == {70} and made.label_names == (
        "false",
        "true",
    )
    source.write_text(source.read_text().replace("1950-03-01", "1950-03", 1))
    with pytest.raises(
        ValueError, match=r"line 2: age is '2020-03-01', and birth_date is no date as %Y-%m-%d"
    ):
        again(source, example("fhir.toml"), tmp_path / "g.npz")
    source = table(
        tmp_path / "g.csv",
        {name: cells for name, cells in columns.items() if name != "birth_date"},
        ",",
    )
    with pytest.raises(ValueError, match="has no column birth_date, which the recipe takes"):
        again(source, example("fhir.toml"), tmp_path / "g.npz")


def test_a_fill_of_another_unit_is_refused(tmp_path):
    """A survey names mg/dl, the factor is mended, and the median that the recipe has is still in mg/dl."""
    table, values = tmp_path / "t.csv", [f"{90 + i}" if i % 5 else "" for i in range(60)]
    table.write_text(
        "glucose,label\n" + "".join(f"{v},{i % 2}\n" for i, v in enumerate(values))
    )
    fitted = imported(table, label="label").recipe
    assert fitted is not None
    column = {**fitted.content["columns"][0], "factor": 1 / 18.02}

    def mended():
        return ImportOptions(recipe=parse_recipe({**fitted.content, "columns": [column]}))

    with pytest.raises(DataError, match=r"glucose: .* delete fill-value of that column"):
        import_source(table, tmp_path / "b.npz", mended())
    before = column.pop("fill-value")
    recipe = import_source(table, tmp_path / "b.npz", mended()).recipe
    assert recipe is not None and recipe.columns[0].fill_value == pytest.approx(before / 18.02)
