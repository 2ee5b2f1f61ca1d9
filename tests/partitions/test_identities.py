"""Patients, dates and classes that quietly become something else: spellings, centuries, parts without a class."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from numpy.testing import assert_array_equal
from PIL import Image
from taken import are_apart, imported, silofl, splits_of, write_lines

from partitions.common.errors import DataError
from partitions.importing.division import assign_splits, missing_notes
from partitions.importing.options import ImportOptions, Take
from partitions.importing.readers.reader import SampleSource
from partitions.importing.table_draft import shared_recipe
from partitions.recipes.cells import identifier
from partitions.recipes.lines import Lines
from partitions.recipes.people import check_identifiers
from partitions.recipes.recipe import load_recipe, parse_recipe, without_fit
from partitions.recipes.shared import Mapped, schema_of
from partitions.silo_file import check_silo_file

# Patients


@pytest.mark.parametrize(
    "one, other",
    [
        ("7", "007"),
        ("7", "7.0"),
        ("7", "7,0"),
        ("P7", "p7"),
        ("P7", "P007"),
        ("100000", "1e+05"),
        ("0", "000"),
        ("M\u00fcller", "Mu\u0308ller"),
        ("7", "\ufeff7"),
        ("7", "\uff17"),
        ("P 7", "P\u00a07"),
        ("A\u20137", "A-7"),
        ("\u04207", "P7"),  # a dash; a Cyrillic letter
    ],
)
def test_spellings_of_one_identifier_are_one(one, other):
    assert identifier(one) == identifier(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ("7", "70"),
        ("7", "7.05"),
        ("A7", "B7"),
        ("1.2.10", "1.2.1"),
        ("12e4", "120000"),
        ("1-12", "11-2"),
        ("1.02", "1.2"),
    ],
)
def test_other_identifiers_stay_others(one, other):
    assert identifier(one) != identifier(other)


@pytest.mark.parametrize("gap", ["", " ", "NA", "NaN", "?"])
def test_a_gap_is_nobody(gap):
    assert identifier(gap) == ""


@pytest.mark.parametrize("pair", [("7", "P7"), ("P-7", "P7"), ("007", "p7")])
def test_what_may_be_one_patient_is_asked(pair):
    lines = Lines(Path("t.csv"), {"pid": ["P1", *pair]}, [2, 3, 4])
    with pytest.raises(
        DataError, match="line 4: pid has the number of line 3, with another prefix or mark"
    ):
        check_identifiers(lines, "pid")


def test_other_numbers_are_not_asked():
    check_identifiers(
        Lines(Path("t.csv"), {"pid": ["A7", "B7", "8", "A9", "1-12", "11-2"]}, range(2, 8)),
        "pid",
    )


def visits(path, spelled):
    """Two rows of each of 60 patients, whose number is their value."""
    rows = [f"{spelled(1 + i // 2, i % 2)},{1000 + i // 2},{i % 4 // 2}" for i in range(120)]
    write_lines(path, "pid,v,label", *rows)
    return imported(path, path.with_suffix(".npz"), patient="pid")


@pytest.mark.parametrize(
    "spelled",
    [
        lambda p, odd: f"{p:03}" if odd else f"{p}",
        lambda p, odd: f"{p}.0" if odd else f"{p}",
        lambda p, odd: f"P{p}" if odd else f"p{p}",
    ],
)
def test_a_patient_in_two_spellings_is_in_one_part(tmp_path, spelled):
    made = visits(tmp_path / "t.csv", spelled)
    own = [{float(v) for v in part.x[:, 0]} for part in splits_of(made.data)]
    assert are_apart(own, 60)
    (note,) = (note for note in made.notes if "several ways" in note)
    assert (
        note.startswith("60 of 60 patients are written in several ways")
        and "line 2 and line 3" in note
    )


def test_rows_without_an_identifier_are_not_one_patient(tmp_path):
    made = visits(tmp_path / "t.csv", lambda p, odd: "NA" if p % 2 else p)
    assert any(note.startswith("60 of 120 samples name no patient") for note in made.notes)


# Dates


def dated(path, years):
    rows = [
        f"P{i};{1 + i % 28:02}.05.{years[i % len(years)]};{i % 7};{'ja' if i % 2 else 'nein'}"
        for i in range(60)
    ]
    write_lines(path, "pid;geb;wert;label", *rows)
    return imported(path, path.with_suffix(".npz"), patient="pid")


def test_years_of_two_digits_are_not_in_the_future(tmp_path):
    made = dated(tmp_path / "t.csv", ("45", "75", "60", "80", "20"))
    assert made.recipe.used[0].latest == datetime.now().year
    assert "two digits mean 1" in made.recipe.used[0].why
    found = np.concatenate([part.x[:, 0] for part in splits_of(made.data)])
    assert sorted({int(2000 + v) for v in found}) == [1945, 1960, 1975, 1980, 2020]


def test_the_century_is_the_recipe_s(tmp_path):
    made = dated(tmp_path / "t.csv", ("45", "75"))
    path = tmp_path / "own.toml"
    other = (
        without_fit(made.recipe, "wert")
        .toml()
        .replace(f"latest = {datetime.now().year}", "latest = 1950")
    )
    path.write_text(other)
    again = imported(tmp_path / "t.csv", recipe=load_recipe(path))
    assert {int(2000 + v) for v in again.data.train.x[:, 0]} == {1875, 1945}
    with pytest.raises(
        DataError, match="the column 'geb': latest is 26; it is a year of four digits"
    ):
        parse_recipe(
            made.recipe.content
            | {"columns": [{"name": "geb", "kind": "date", "format": "%y", "latest": 26}]}
        )


def test_dates_in_the_future_are_named(tmp_path):
    made = dated(tmp_path / "t.csv", ("1945", "2945", "1975"))
    assert "20 dates of geb lie in the future: are its years right?" in made.notes


# Classes in parts


def people(count):
    return [SampleSource(f"line {i}", ("0",), "", str(i)) for i in range(count)]


def test_every_part_has_its_share_of_each_class():
    y = np.array([0] * 90 + [1] * 9 + [2] * 3)
    present = np.equal.outer(y, np.arange(3))
    for seed in range(20):
        places = assign_splits(people(102), np.arange(102), present, seed)
        counts = {
            part: np.bincount(y[places == part], minlength=3).tolist()
            for part in ("train", "val", "test")
        }
        assert counts == {"train": [57, 6, 1], "val": [15, 1, 1], "test": [18, 2, 1]}, seed


def test_a_patient_of_two_classes_counts_for_the_rarer_one():
    """Patients 0 to 5 have a sample of class 1 each, beside samples of class 0: two of them are held out."""
    patients, y = np.repeat(np.arange(30), 2), np.zeros(60, int)
    y[1:12:2] = 1
    for seed in range(10):
        places = assign_splits(people(60), patients, np.equal.outer(y, np.arange(2)), seed)
        assert all((y[places == part] == 1).any() for part in ("train", "val", "test"))
        assert all(len(set(places[patients == own])) == 1 for own in range(30))


def test_without_classes_the_draw_is_as_it_was():
    rng = np.random.default_rng(42)
    drawn = rng.permutation(10)
    places = assign_splits(people(10), np.arange(10), None, 42)
    assert sorted(np.flatnonzero(places == "test")) == sorted(drawn[:2])


def test_a_part_without_a_class_is_named():
    present = np.eye(2, dtype=bool)[[0, 0, 1, 0]]
    places = np.array(["train", "val", "train", "test"])
    notes = list(missing_notes(present, ("well", "ill"), places))
    assert [note[:31] for note in notes] == [
        "no sample of the val part has i",
        "no sample of the test part has ",
    ]


# Labels


def findings(path, cells, label="edema,mass"):
    rows = [f"P{i},{40 + i % 40},{cells[i % len(cells)]},{cells[i % 2]}" for i in range(60)]
    write_lines(path, "pid,age,edema,mass", *rows)
    return imported(path, path.with_suffix(".npz"), label=label, patient="pid")


def test_findings_written_with_decimals_are_findings(tmp_path):
    whole, points = (
        findings(tmp_path / f"{i}.csv", c)
        for i, c in enumerate([("1", "0", "-1"), ("1.0", "0.0", "-1.0")])
    )
    assert whole.data.task == points.data.task == "multilabel"
    assert whole.file.read_bytes() == points.file.read_bytes()


def test_a_class_in_two_notations_is_one(tmp_path):
    made = findings(tmp_path / "t.csv", ("1.0", "0", "1", "0.0"), "edema")
    assert made.data.task == "multiclass" and made.data.classes == 2 and not made.label_names


def test_one_label_in_two_spellings_is_refused(tmp_path):
    for i, other in enumerate(("yes ", "Yes", "y\u0435s", "ye\u200bs")):
        if other.strip() != "yes":
            with pytest.raises(
                DataError, match=r"the label is '.*', elsewhere '.*': case and blanks count"
            ):
                findings(tmp_path / f"{i}.csv", ("yes", "no", other), "edema")


def test_a_class_for_no_label_is_asked_about(tmp_path):
    made = findings(tmp_path / "t.csv", ("yes", "no", "Unknown"), "edema")
    assert any(
        "class 'Unknown': if that means that they have no label" in note for note in made.notes
    )


# Masks


def masks(folder, values, ending=".png", **options):
    """Import 20 pictures, of which each has a mask of these values in equal stripes."""
    rows = ["file,mask,patient"]
    for i in range(20):
        mask = np.repeat(np.resize(np.array(values, np.uint8), 16), 16).reshape(16, 16)
        Image.fromarray(mask).save(folder / f"m{i}{ending}")
        Image.fromarray(np.full((16, 16), i, np.uint8)).save(folder / f"i{i}.png")
        rows.append(f"i{i}.png,m{i}{ending},p{i}")
    write_lines(folder / "t.csv", *rows)
    return imported(folder / "t.csv", folder / "o.npz", **options)


def test_masks_of_0_and_255_have_class_1(tmp_path):
    made = masks(tmp_path, (0, 255))
    assert np.unique(made.data.train.y).tolist() == [0, 1] and made.data.classes == 2
    assert (
        "masks have 0 and 255 alone: 255 is class 1, what was drawn (binary-masks in the recipe)"
        in made.notes
    )
    assert made.pictures.reading.binary_masks
    again = masks(tmp_path, (0, 255), pictures=made.pictures)
    assert_array_equal(again.data.train.y, made.data.train.y)
    with pytest.raises(
        DataError,
        match="line 2: its mask has values besides 0 and 255, and the recipe says binary",
    ):
        masks(tmp_path, (0, 1, 255), pictures=made.pictures)


def test_255_beside_a_class_does_not_count(tmp_path):
    made = masks(tmp_path, (0, 1, 255))
    assert np.unique(made.data.train.y).tolist() == [0, 1, 255]
    with pytest.raises(
        DataError, match="0 and 255 alone, and 255 does not count by the recipe"
    ):
        masks(tmp_path, (0, 255), pictures=made.pictures)


@pytest.mark.parametrize(
    "values, ending, words",
    [
        (
            (0, 1, 2, 4),
            ".png",
            "values 0, 1, 2, 4, but no 3: name every class of the federation",
        ),
        ((0,), ".png", "masks of 0 alone"),
        (
            (0, 1),
            ".jpg",
            r"m0.jpg cannot be read \(JPEG changes the values of classes: save masks as PNG\)",
        ),
    ],
)
def test_masks_that_are_refused(tmp_path, values, ending, words):
    fails(DataError, words, masks, tmp_path, values, ending)


def test_named_classes_may_be_missing(tmp_path):
    made = masks(tmp_path, (0, 1, 2, 4), labels=("background", "a", "b", "c", "d"))
    assert made.data.classes == 5 and all(check.ok for check in check_silo_file(made.file))


# Names, and numbers of rows


def table(path, column, cells, **take):
    """Import 60 rows of three columns, one of which is ``column``."""
    rows = [f'{40 + i % 7},"{cells(i)}",{i % 2}' for i in range(60)]
    write_lines(path, f"age,{column},label", *rows)
    return imported(path, path.with_suffix(".npz"), patient=None, **take)


SURNAMES = [
    "Zyskind",
    "Meier",
    "Huber",
    "Schmid",
    "Weber",
    "O'Brien",
    "Keller",
    "Frey",
    "Graf",
    "Roth",
    "Moser",
    "Bau",
]


@pytest.mark.parametrize(
    "column, cells, why",
    [
        *(
            (name, lambda i: 9000 + 7 * i, "an identifier of rows")
            for name in ("visit_occurrence_id", "rownames", "rowNo")
        ),
        ("visit_id", lambda i: 9000 + i // 2, "an identifier of rows"),
        *(
            (name, lambda i: "Meier" if i % 2 else "Zyskind", "it may name people")
            for name in ("surname", "LAST_NAME")
        ),
        ("treated by", lambda i: "Dr. Meier" if i % 2 else "Dr Zyskind", "it may name people"),
        ("contact", lambda i: f"z{i % 3}@example.org", "it may name people"),
        ("ref", lambda i: SURNAMES[i % 12], "it may name people"),
        ("ref", lambda i: SURNAMES[i % 12].upper(), "it may name people"),
        ("who", lambda i: "Zyskind, Anna" if i % 2 else "Meier, Jörg", "it may name people"),
    ],
)
def test_names_and_numbers_of_rows_are_left_out(tmp_path, column, cells, why):
    made = table(tmp_path / "t.csv", column, cells)
    assert made.feature_names == ("age",)
    assert any(column in note and why in note for note in made.notes)
    for text in (
        str(made.data.schema),
        made.data.recipe,
        (made.recipe and made.recipe.toml()) or "",
    ):
        assert "Zyskind" not in text and "zyskind" not in text
    taken = table(tmp_path / "b.csv", column, cells, columns=("age", column))
    assert len(taken.feature_names) > 1


def test_few_or_small_words_are_no_surnames(tmp_path):
    made = table(
        tmp_path / "t.csv", "ward", lambda i: ["Cardiology", "Surgery", "Neurology"][i % 3]
    )
    assert len(made.feature_names) == 4
    made = table(tmp_path / "b.csv", "drug", lambda i: SURNAMES[i % 12].lower())
    assert len(made.feature_names) == 13


@pytest.mark.parametrize("column", ["hospital_name", "number of visits", "zip", "drug name"])
def test_other_columns_stay(tmp_path, column):
    made = table(tmp_path / "t.csv", column, lambda i: i % 5)
    assert made.feature_names == ("age", column) and not made.notes


def test_a_rare_text_of_one_patient_in_several_spellings_is_unnamed(tmp_path):
    """Six rows of one patient, 7, 007, ...: they count once, and "Zyskind" is of fewer than five patients."""
    path = tmp_path / "t.csv"
    odd = [f"{'0' * i}7,Zyskind,{i % 2}" for i in range(6)]
    write_lines(path, "pid,place,label", *odd, *(f"{100 + i},Ulm,{i % 2}" for i in range(60)))
    made = imported(path, patient="pid")
    assert made.feature_names == ("place=Ulm", "place=other") and made.recipe is not None
    assert "Zyskind" not in made.recipe.toml() + made.recipe.as_json


def test_a_draft_quotes_no_cell(tmp_path, capsys):
    """It is sent to a colleague; the import's own message, on the hospital's screen, quotes the cell."""
    path = tmp_path / "t.csv"
    cells = ["Zyskind", *(f"1{i},5" for i in range(59))]
    path.write_bytes(
        "\n".join(
            ["wert;ort;label", *(f"{c};M\u00fcller{i};{i % 2}" for i, c in enumerate(cells))]
        ).encode("cp1252")
    )
    assert silofl("import", path, "--propose") == 0
    draft = capsys.readouterr().out
    assert "line 2: wert is '...', no number" in draft and "first in line 2, ort" in draft
    assert "Zyskind" not in draft and "M\u00fcller" not in draft
    assert silofl("import", path, "--out", tmp_path / "o.npz") == 2
    assert "wert is 'Zyskind', no number" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["crea", "patient's crea"])
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_draft_quotes_no_part_of_a_long_cell(tmp_path, capsys, name, others):
    odd = {i: f"refused by Mr Ole Johansson {i} (wife)" for i in range(others)}
    rows = [f"{i},{odd.get(i, i / 17)},{i % 2}" for i in range(60)]
    table = write_lines(tmp_path / "t.csv", f"patient,{name},label", *rows)
    assert silofl("import", table, "--propose") == 0
    draft = capsys.readouterr().out
    assert f"{name} is '...', no number" in draft and "Johan" not in draft


def test_a_schema_gets_no_names_without_a_word(tmp_path):
    made = table(
        tmp_path / "t.csv",
        "surname",
        lambda i: "Meier" if i % 2 else "Zyskind",
        columns=("age", "surname"),
    )
    schema = schema_of(made.recipe)
    with pytest.raises(
        DataError,
        match=r"asks for surname, .* may name people; if that is meant, say --map surname=",
    ):
        shared_recipe(
            tmp_path / "t.csv", schema, Mapped(), ImportOptions(take=Take(patient=None))
        )
    asked = Mapped({"surname": "surname"})
    assert shared_recipe(
        tmp_path / "t.csv", schema, asked, ImportOptions(take=Take(patient=None))
    ).columns
