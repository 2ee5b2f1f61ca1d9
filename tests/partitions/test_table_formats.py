"""Tables in other formats than csv: the same samples, labels of values for codes, a format named by its first bytes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_array_equal
from scans import write_dicom
from taken import all_x, imported, refused, silofl, write_lines

from client.prediction.new_samples import asked_rows, needs_recipe
from partitions.importing.options import ImportOptions
from partitions.importing.table_draft import draft_recipe
from partitions.importing.tables import read_lines

N = 60
SEX: dict[int | float, str] = {1: "male", 2: "female"}


def frame():
    """A table of statistics: codes with labels, a float32 column, dates, a gap."""
    crp = np.round(np.linspace(0.1, 9.7, N), 1).astype(np.float32)
    crp[3] = np.nan
    return pd.DataFrame(
        {
            "pid": [f"P{i}" for i in range(N)],
            "sex": [1 + i % 2 for i in range(N)],
            "crp": crp,
            "seen": pd.date_range("2024-01-01", periods=N),
            "ill": [i // 2 % 2 for i in range(N)],
        }
    )


def as_stata(table, path):
    table.to_stata(path, write_index=False, value_labels={"sex": SEX})


def as_spss(table, path):
    import pyreadstat

    pyreadstat.write_sav(table, path, variable_value_labels={"sex": SEX})


def as_parquet(table, path):
    table.assign(sex=table.sex.map(SEX)).to_parquet(path)


def as_feather(table, path):
    table.assign(sex=table.sex.map(SEX).astype("category")).to_feather(path)


FORMATS = {
    "dta": (as_stata, "Stata"),
    "sav": (as_spss, "SPSS"),
    "parquet": (as_parquet, "Parquet"),
    "feather": (as_feather, "Feather"),
}


@pytest.mark.parametrize("ending", FORMATS)
def test_a_table_in_another_format_is_the_table_as_csv(tmp_path, ending, capsys):
    """Its values are those of a csv with the labels, bit for bit, and the recipe reads either."""
    table, (write, title) = frame(), FORMATS[ending]
    pytest.importorskip({"dta": "pandas", "sav": "pyreadstat"}.get(ending, "pyarrow"))
    write(table, tmp_path / f"t.{ending}")
    table.assign(sex=table.sex.map(SEX)).to_csv(tmp_path / "t.csv", index=False)
    options = {"label": "ill", "patient": "pid"}
    as_csv = imported(tmp_path / "t.csv", tmp_path / "csv.npz", **options)
    made = imported(tmp_path / f"t.{ending}", tmp_path / "other.npz", **options)
    assert made.feature_names == ("sex=female", "sex=male", "crp", "seen")
    assert_array_equal(all_x(made.data), all_x(as_csv.data))
    assert_array_equal(made.data.test.y, as_csv.data.test.y)
    again = imported(tmp_path / f"t.{ending}", tmp_path / "again.npz", recipe=as_csv.recipe)
    assert_array_equal(all_x(again.data), all_x(as_csv.data))
    code = silofl(
        "import",
        tmp_path / f"t.{ending}",
        "--label",
        "ill",
        "--patient",
        "pid",
        "--out",
        tmp_path / "c.npz",
    )
    assert code == 0 and capsys.readouterr().out.splitlines()[-1].endswith(
        f"c.npz, of {made_of(title)}"
    )


def made_of(title):
    return {"Feather": "Feather (Arrow)"}.get(title, title)


def test_new_patients_in_another_format_are_those_of_a_csv(tmp_path):
    table = frame()
    as_stata(table, tmp_path / "t.dta")
    table.assign(sex=table.sex.map(SEX)).to_csv(tmp_path / "t.csv", index=False)
    recipe = imported(tmp_path / "t.csv", label="ill", patient="pid").recipe
    by_csv, by_stata = (
        asked_rows(tmp_path / name, recipe, False) for name in ("t.csv", "t.dta")
    )
    assert needs_recipe(tmp_path / "t.dta") and by_stata.keys == by_csv.keys == list(table.pid)
    assert_array_equal(by_stata.x, by_csv.x)


def test_sas_transport(tmp_path):
    pyreadstat = pytest.importorskip("pyreadstat")
    table = frame().drop(columns=["seen"])
    pyreadstat.write_xport(table, tmp_path / "t.xpt", table_name="T", file_format_version=5)
    made = imported(tmp_path / "t.xpt", label="ill", patient="pid")
    assert made.feature_names == ("sex", "crp")
    np.testing.assert_allclose(np.sort(all_x(made.data)[:, 0]), np.sort(table.sex))


@pytest.mark.parametrize("package, ending", [("pyreadstat", "sav"), ("pyarrow", "parquet")])
def test_without_its_package_one_line_says_which_to_install(
    tmp_path, monkeypatch, package, ending
):
    source = tmp_path / f"t.{ending}"
    source.write_bytes(
        {"sav": b"$FL2@(#) SPSS DATA FILE", "parquet": b"PAR1\x15"}[ending] + bytes(99)
    )
    monkeypatch.setitem(sys.modules, package, None)
    refused(
        source,
        f"is read with {package}, which is not installed here: pip install {package}",
        label="x",
    )


NAMED = {
    "PAR1\x15\x04": "t.csv is Parquet, and cannot be read",
    "$FL2@(#) SPSS DATA FILE": "t.csv is SPSS, and cannot be read",
    "HEADER RECORD*******LIBRARY HEADER": "t.csv is SAS transport, and cannot be read",
    "SQLite format 3\0": "a database of SQLite",
    "MSH|^~\\&|LAB|Meier": "messages of HL7",
    "\x89PNG\r\n": "a picture",
}


@pytest.mark.parametrize("start, named", NAMED.items())
def test_a_format_is_named_by_its_first_bytes(tmp_path, start, named):
    (tmp_path / "t.csv").write_bytes(start.encode("latin-1") + b"Meier" * 80)
    pytest.importorskip("pyreadstat"), pytest.importorskip("pyarrow")
    text = refused(tmp_path / "t.csv", named, label="x")
    assert "Meier" not in text


@pytest.mark.parametrize("header", ["PAR1", "BMI", "[x]", "RDX", "FEA1", "MSH", "BZH", "GIF"])
def test_a_header_that_begins_as_a_format_does_is_one(tmp_path, header):
    rows = [f"{i / 7},P{i},{i % 2}" for i in range(N)]
    source = write_lines(tmp_path / "t.csv", f"{header},pid,ill", *rows)
    assert imported(source, label="ill", patient="pid").feature_names == (header,)


def test_fhir_is_refused_with_the_way_to_a_table(tmp_path):
    one = {"resourceType": "Patient", "name": [{"family": "Meier"}]}
    (tmp_path / "obs.ndjson").write_text("\n".join([json.dumps(one)] * 9))
    (tmp_path / "bundle.json").write_text(
        json.dumps({"resourceType": "Bundle", "entry": [one]}, indent=1)
    )
    for name in ("obs.ndjson", "bundle.json"):
        text = refused(tmp_path / name, "FHIR in JSON: make a table of it first", label="ill")
        assert "Meier" not in text
    (tmp_path / "rows.json").write_text('[{"name": "Meier"}]')
    assert "Meier" not in refused(tmp_path / "rows.json", "JSON", label="ill")


def test_a_first_line_that_is_a_row_is_not_shown(tmp_path):
    """No header, a name and a date: the line that asks for a column quotes neither."""
    source = write_lines(
        tmp_path / "t.csv", *(f"Meier{i},{i},1950-01-0{1 + i % 9}" for i in range(20))
    )
    for options in ({}, {"label": "ill"}, {"label": "Meier0", "patient": "pid"}):
        text = refused(source, "as a row has, and is not shown", **options)
        assert "Meier1" not in text and "1950" not in text


def test_values_that_are_no_cells_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    frame().assign(more=[[1, 2]] * N).to_parquet(tmp_path / "t.parquet")
    refused(
        tmp_path / "t.parquet",
        "the column more holds values of type",
        label="ill",
        patient="pid",
    )


# Units, labels and dates of birth


def test_a_unit_in_a_header_becomes_the_unit(tmp_path):
    rows = [f"P{i},{1 + i / 9:.2f},{i % 7},{i % 2}" for i in range(N)]
    source = write_lines(tmp_path / "t.csv", "pid,LDL (mmol/L),visit (last),ill", *rows)
    made = imported(source, label="ill", patient="pid")
    ldl, visit = made.recipe.used
    assert (ldl.name, ldl.source, ldl.unit) == ("LDL", "LDL (mmol/L)", "mmol/L")
    assert (visit.name, visit.unit) == ("visit (last)", "")
    assert [f.unit for f in made.data.schema.features] == ["mmol/L", ""]
    twice = write_lines(tmp_path / "u.csv", "pid,LDL (mmol/L),LDL (mg/dl),ill", *rows)
    names = imported(twice, label="ill", patient="pid").feature_names
    assert names == ("LDL (mmol/L)", "LDL (mg/dl)")


def test_a_label_has_factor_and_unit_as_a_column_has(tmp_path):
    """18 times the numbers in the csv, with its decimal sign; it is no input, and its range binds."""
    rows = [f"P{i};{20 + i};{4 + i / 20:.2f}".replace(".", ",") for i in range(N)]
    source = write_lines(tmp_path / "t.csv", "pid;age;glucose", *rows)
    options = {"label": "glucose", "task": "regression", "patient": "pid", "decimal": ","}
    plain = imported(source, tmp_path / "a.npz", **options)
    extra = plain.recipe.columns[0].model_copy(
        update={
            "name": "glucose",
            "decimal": ",",
            "factor": 18.0,
            "unit": "mg/dl",
            "fill": "refuse",
            "fill_value": None,
        }
    )
    recipe = plain.recipe.model_copy(update={"columns": (*plain.recipe.columns, extra)})
    (tmp_path / "r.toml").write_text(recipe.toml())
    assert (
        silofl("import", source, "--recipe", tmp_path / "r.toml", "--out", tmp_path / "b.npz")
        == 0
    )
    scaled = imported(source, tmp_path / "c.npz", recipe=recipe)
    assert scaled.feature_names == ("age",)
    np.testing.assert_allclose(scaled.data.train.y, 18 * plain.data.train.y, rtol=1e-6)
    narrow = extra.model_copy(update={"range": (0.0, 100.0)})
    recipe = recipe.model_copy(update={"columns": (*plain.recipe.columns, narrow)})
    refused(source, "line 34: glucose is '5,60', outside of its range 0..100", recipe=recipe)
    classes = recipe.model_copy(update={"task": "multiclass"})
    (tmp_path / "r.toml").write_text(classes.toml())
    assert (
        silofl("import", source, "--recipe", tmp_path / "r.toml", "--out", tmp_path / "d.npz")
        == 2
    )


def test_a_birth_date_as_an_input_is_noted(tmp_path):
    rows = [f"P{i},19{40 + i % 50}-01-1{i % 9},{i % 2}" for i in range(N)]
    for name, noted in (("date_of_birth", 1), ("Geburtsdatum", 1), ("admitted", 0)):
        source = write_lines(tmp_path / "t.csv", f"pid,{name},ill", *rows)
        notes = imported(source, label="ill", patient="pid").notes
        assert (
            sum("is a birth date" in note and "take the age" in note for note in notes) == noted
        )


def test_a_column_that_tells_the_label_is_noted(tmp_path):
    for name, few in (("code", 4), ("other", 3)):
        rows = [f"P{i},{i % few},{i % 2}" for i in range(N)]
        source = write_lines(tmp_path / "t.csv", f"pid,{name},ill", *rows)
        notes = imported(source, label="ill", patient="pid").notes
        assert any("code alone tells the label" in note for note in notes) == (few == 4)


def test_a_draft_reads_no_column_of_numbers_again(tmp_path):
    """Of more different numbers than are kept as cells: each reading is one of the whole file."""
    rows = [f"{i},{i}.5,{i % 2}" for i in range(5000)]
    lines = read_lines(write_lines(tmp_path / "t.csv", "pid,crea,label", *rows))
    draft_recipe(lines, ImportOptions(label="label"))
    kept = [name for name, cells in lines.columns.items() if "coded" in vars(cells)]
    assert "label" in kept and "crea" not in kept


# Rows of two kinds


def base_and_repeats(instrument="", label=True):
    """A line of base values for each patient, and two of laboratory values, as REDCap and others write them."""
    for i in range(N):
        ill = i % 2
        yield f"{i},{instrument and ''}{',' * bool(instrument)}{40 + i % 30},{ill},"
        for k in range(2):
            yield f"{i},{instrument}{',' * bool(instrument)},{ill if label else ''},{k + i % 9}"


def test_repeating_instruments_of_redcap_are_refused(tmp_path, capsys):
    for label in (True, False):
        lines = base_and_repeats("labs", label)
        source = write_lines(
            tmp_path / "t.csv", "record_id,redcap_repeat_instrument,age,ill,crp", *lines
        )
        text = refused(
            source,
            "REDCap's export of a repeating instrument: 120 of 180",
            label="ill",
            patient="record_id",
        )
        assert "merge(" in text and "total below the table" not in text
    assert (
        silofl("import", source, "--propose", "--label", "ill", "--patient", "record_id") == 0
    )
    assert "REDCap" in capsys.readouterr().out


def test_the_advice_joins_rows_of_two_kinds(tmp_path):
    """A note where labels are there, a refusal where they are not; the line of pandas in it makes one row a patient."""
    lines = [*base_and_repeats()]
    source = write_lines(tmp_path / "t.csv", "pid,age,ill,crp", *lines)
    (note,) = (
        n for n in imported(source, label="ill", patient="pid").notes if "two kinds" in n
    )
    assert "60 of 180 lines have age, and 120 others of the same patients have crp" in note
    advice = note.split("with pandas: ")[1]
    joined = eval(advice, {"t": pd.read_csv(source)})
    assert (
        len(joined) == N
        and list(joined) == ["pid", "age", "ill", "crp"]
        and not joined.isna().any().any()
    )
    without = write_lines(tmp_path / "u.csv", "pid,age,ill,crp", *base_and_repeats(label=False))
    refused(without, "has no label; rows are of two kinds", label="ill", patient="pid")


def test_gaps_of_two_groups_of_patients_are_no_two_kinds_of_rows(tmp_path):
    """PSA of men and HCG of women: never both, and never of one patient."""
    rows = [
        f"P{i % 30},{i % 5 if i % 2 else ''},{'' if i % 2 else i % 4},{i % 2}" for i in range(N)
    ]
    source = write_lines(tmp_path / "t.csv", "pid,psa,hcg,ill", *rows)
    assert not any(
        "two kinds" in note for note in imported(source, label="ill", patient="pid").notes
    )


# All problems in one run


def test_all_problems_of_pictures_are_named_before_one_is_decoded(tmp_path, capsys):
    """Sizes, labels, an option of scans, what is there already: one line each. No picture's pixels could be read."""
    from PIL import Image

    rows = ["file,label"]
    for i in range(12):
        Image.fromarray(np.full((8 + i // 11, 8), i, np.uint8)).save(tmp_path / f"{i}.bmp")
        content = (tmp_path / f"{i}.bmp").read_bytes()
        (tmp_path / f"{i}.bmp").write_bytes(content[:-40])
        rows.append(f"{i}.bmp,2")
    source = write_lines(tmp_path / "list.csv", *rows)
    (tmp_path / "o.npz").write_bytes(b"")
    assert (
        silofl("import", source, "--out", tmp_path / "o.npz", "--window=40,400", "--no-patient")
        == 2
    )
    said = capsys.readouterr().err.splitlines()
    said = [line for line in said if line.startswith("silofl import: ")]
    assert said[0].endswith("list.csv has 4 problems:") and len(said) == 5
    for line, part in zip(
        said[1:],
        ("o.npz is there already", "--window", "the 12 labels are 2", "use --size"),
        strict=True,
    ):
        assert part in line
    assert (tmp_path / "o.npz").read_bytes() == b""


def test_columns_that_are_missing_and_sizes_that_differ_are_named_in_one_run(tmp_path):
    """No label, no patients, a line without a file, and pictures of two sizes."""
    from PIL import Image

    rows = []
    for i in range(12):
        Image.fromarray(np.full((8 + i // 11, 8), i, np.uint8)).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{i % 2},{i % 5}")
    source = write_lines(tmp_path / "list.csv", "file,finding,mrn", *rows, ",1,2", ",0,2")
    text = refused(
        source, "list.csv has 4 problems: (1) unknown column", "(2) which column says whose"
    )
    assert (
        "(3) line 14 names no file; 1 lines more are like it" in text
        and "(4) line 13: 11.png is 8 x 9" in text
    )


def test_dicom_without_labels_names_damaged_files_too(tmp_path):
    for i in range(3):
        write_dicom(tmp_path / "x" / f"{i}.dcm", np.full((8, 8), i, np.int16))
    (tmp_path / "x/9.dcm").write_bytes(b"no DICOM")
    text = refused(tmp_path / "x", "x has 2 problems: (1)", "holds DICOM files and no csv")
    assert "(2) file 4 of 4: it is called like a DICOM file and is none" in text
