"""`silofl import` guesses nothing: patients, label, decimal sign and an earlier file are named, or one line asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from failing import fails
from PIL import Image
from taken import are_apart, imported, refused, silofl, splits_of, write_lines

from partitions.importing.options import ImportOptions, Take
from partitions.importing.source import import_source
from partitions.recipes.recipe import load_recipe
from partitions.silo_file import check_silo_file
from server.cli.main import main

N = 120


def table(path, patient="Patient-ID", label="label"):
    """120 visits of 40 patients; the first column says whose they are, and so does the patient's age."""
    rows = [f"{7000 + i % 40},{i % 40},{i / 2},{i % 2}" for i in range(N)]
    return write_lines(path, f"{patient},age,dose,{label}", *rows)


def test_a_source_that_is_a_device_has_the_system_s_reason(tmp_path, capsys):
    assert silofl("import", "/dev/null", "--out", str(tmp_path / "a.npz")) == 2
    assert "/dev/null cannot be read (Not a directory)\n" in capsys.readouterr().err


# Patients


@pytest.mark.parametrize(
    "column",
    [
        "Patient-ID",
        "patient_id",
        "PatientID",
        "MRN",
        "mrn",
        "subject",
        "Subject ID",
        "case_id",
        "ID",
        "pat.no",
        "Patienten-ID",
        "Patientennummer",
        "Fall-Nr",
        "Probanden-Kennung",
    ],
)
def test_a_column_that_may_tell_patients_apart_is_asked_for(tmp_path, column):
    source = table(tmp_path / "t.csv", column)
    refused(
        source,
        f"which column says whose each row is? Of {N} rows, {column} has 40 different values; name it with",
    )


def test_every_candidate_is_named_with_its_distinct_values(tmp_path):
    """Rows of a patient would be divided by the column that comes first, in which each row differs."""
    rows = [f"{i},{i % 40},{i % 3},{i / 2},{i % 2}" for i in range(N)]
    source = write_lines(tmp_path / "t.csv", "case_id,person_id,ward_id,dose,label", *rows)
    refused(
        source,
        f"Of {N} rows, case_id has {N}, person_id has 40 different values; name it with --patient COLUMN",
    )
    divided = f"each of {N} rows is of another patient, but person_id has 40 different values: one patient may be in"
    for take in (Take(patient="case_id"), Take(patient=None)):
        notes = imported(source, tmp_path / "out.npz", take=take).notes
        assert sum(divided in note for note in notes) == 1
    kept = imported(source, tmp_path / "out.npz", patient="person_id")
    assert not any("of another patient" in note for note in kept.notes)


# All at once

MESSY = (
    "mrn,crp,day,label",
    "1,<5,01/02/2024,ill",
    *(f'{i},"{i},5",02/03/2024,well' for i in range(2, 9)),
    "9,1,1,",
)


def test_all_problems_of_a_csv_are_in_one_line(tmp_path):
    source = write_lines(tmp_path / "t.csv", *MESSY)
    refused(source, "(2) line 10 has no label; ")
    refused(
        source, "(1) which column says whose each row is? Of 9 rows, mrn has 9 different values"
    )
    refused(source, "(3) line 2: crp is '<5', no number; write a number in its place")
    refused(source, "(4) line 10: day is '1', and other dates of it are written")
    source.write_text("a,a,,label\n1,2,3,0\n1,2\n1,2,3\n1,2\n")
    refused(source, "has 4 problems: (1) a column has no name")
    refused(
        source,
        "named 'a'; rename or remove one; (3) line 3 has 2 cells, the header 4; fill its cells",
    )
    refused(source, "of the table; so has line 5; (4) line 4 has 3 cells, the header 4")


def test_a_draft_of_a_messy_csv_asks_and_is_not_imported_before_the_answers(tmp_path, capsys):
    source, draft = tmp_path / "t.csv", tmp_path / "draft.toml"
    source.write_text("\n".join(MESSY).replace("label", "state"))
    assert silofl("import", source, "--propose") == 0
    text = capsys.readouterr().out
    assert text.count('kind = "?"') == 2 and 'label = ["?"]' in text and 'patient = "?"' in text
    for old, new, words in (
        ("", "", "columns.1.kind = '?': must be one of"),
        ('kind = "?"', 'kind = "skip"', "label is still '?': name a column of the csv"),
        ('label = ["?"]', 'label = ["state"]', "'state' is the label and an input"),
        (
            '[[columns]]\nname = "state"\nkind = "category"',
            '[[columns]]\nname = "state"\nkind = "skip"',
            "",
        ),
        ('patient = "?"', 'patient = "mrn"', ""),
    ):
        text = text.replace(old, new) if old else text
        draft.write_text(text)
        assert silofl("import", source, "--recipe", draft, "--out", tmp_path / "o.npz") == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "column", ["age", "paid", "patients_seen", "idle", "casein", "incident"]
)
def test_other_columns_are_not(tmp_path, column):
    made = imported(table(tmp_path / "t.csv", column.upper()))
    assert made.feature_names[0] == column.upper()


def test_a_named_column_keeps_each_patient_in_one_part(tmp_path):
    made = imported(table(tmp_path / "t.csv"), patient="Patient-ID")
    assert made.feature_names == ("age", "dose") and made.notes == ()
    ages = [set(split.x[:, 0].tolist()) for split in splits_of(made.data)]
    assert are_apart(ages, 40)


def test_the_file_has_numbers_and_no_identifier(tmp_path):
    """Identifiers from 7000 on become 0 to 39, the same number for the same patient."""
    made = imported(table(tmp_path / "t.csv"), patient="Patient-ID")
    with np.load(made.file) as npz:
        parts = [npz[f"patient_{part}"] for part in ("train", "val", "test")]
        ages = np.concatenate([npz[f"x_{part}"][:, 0] for part in ("train", "val", "test")])
        assert not {"Patient-ID", "7000"} & {
            text for key in npz for text in npz[key].astype(str).ravel()
        }
    pooled = np.concatenate(parts)
    assert set(pooled.tolist()) == set(range(40))
    assert len({*zip(pooled.tolist(), ages.tolist(), strict=True)}) == 40
    checks = {check.name: check.detail for check in check_silo_file(made.file)}
    assert (
        checks["patients"]
        == f"train {len(set(parts[0]))}, val {len(set(parts[1]))}, test {len(set(parts[2]))}"
    )


def test_an_identifier_is_no_feature(tmp_path):
    """Said to tell nobody apart, it is left out all the same, unless it is asked for."""
    source = table(tmp_path / "t.csv")
    made = imported(source, tmp_path / "a.npz", patient=None)
    assert made.feature_names == ("age", "dose") and "left out: Patient-ID" in made.notes[0]
    with np.load(made.file) as npz:
        assert not [key for key in npz if key.startswith("patient")]
    made = imported(source, tmp_path / "b.npz", columns=("Patient-ID", "dose"))
    assert made.feature_names == ("Patient-ID", "dose")


def test_samples_without_a_patient_are_counted(tmp_path):
    source = table(tmp_path / "t.csv", "patient")
    source.write_text(source.read_text().replace("\n7001,", "\n,"))
    made = imported(source)
    assert made.notes == (
        "3 of 120 samples name no patient: each is taken for another patient's (--patient)",
    )


def test_bad_patient_columns(tmp_path):
    source = table(tmp_path / "t.csv")
    refused(source, "'patient-id' (did you mean 'Patient-ID'?)", patient="patient-id")
    refused(source, "label is named as the patients' column and as a label", patient="label")


def folders(root):
    """Two classes, five patients each with four pictures in a folder of the patient's name; pixels say whose."""
    for i in range(40):
        path = root / ("ill" if i % 2 else "well") / f"Doe-{i % 10}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 4), i % 10).save(path)
    return root


def test_folders_of_patients(tmp_path):
    source = folders(tmp_path / "x")
    refused(
        source,
        "x has pictures in folders below its classes: --patient folder takes each of these for a patient",
    )
    made = imported(source, tmp_path / "out.npz", patient="folder")
    whose = [set(split.x[:, 0, 0, 0].tolist()) for split in splits_of(made.data)]
    assert are_apart(whose, 10)
    assert b"Doe" not in made.file.read_bytes()
    made = imported(source, tmp_path / "b.npz", patient=None)
    assert (
        len(made.data.train) + len(made.data.val) + len(made.data.test) == 40
        and made.data.train.patient is None
    )


def test_a_folder_s_name_is_in_no_message(tmp_path):
    source = folders(tmp_path / "x")
    (source / "ill/Doe-3/3.png").write_bytes(b"no picture")
    said = fails(
        ValueError,
        r"x, file 7 of 40: 3\.png cannot be read",
        imported,
        source,
        patient="folder",
    )
    assert "Doe" not in said


# The label


def test_a_table_says_which_column_is_the_label(tmp_path):
    source = table(tmp_path / "t.csv", "patient", "outcome")
    refused(
        source,
        "no column label; name the label's column with --label: patient, age, dose, outcome",
    )
    assert imported(source, label="outcome").data.classes == 2
    wide = tmp_path / "w.csv"
    wide.write_text(",".join(f"c{i}" for i in range(200)) + "\n" + ",".join(["1"] * 200))
    refused(wide, "c19 and 180 more")


@pytest.mark.parametrize(
    "labels, found",
    [("15", "1, 5"), ("1", "1"), ("02", "0, 2"), (("ill",), "'ill'")],
    ids=["15", "1", "02", "ill"],
)
def test_labels_that_cannot_be_all_classes_are_asked_for(tmp_path, labels, found):
    source = tmp_path / "t.csv"
    source.write_text(
        "age,label\n" + "\n".join(f"{i},{labels[i % len(labels)]}" for i in range(30))
    )
    refused(
        source,
        f"the 30 labels are {found}: not all classes from 0 on, two at least, are here; name every class",
    )
    known = ("ill", "well") if "ill" in labels else tuple("012345")
    made = imported(source, labels=known)
    assert made.data.classes == len(known)
    assert set(made.data.train.y.tolist()) == {known.index(label) for label in labels}


# What is there already


def test_an_earlier_file_stays(tmp_path):
    source, out = table(tmp_path / "t.csv", "patient"), tmp_path / "out.npz"
    import_source(source, out)
    before = out.read_bytes()
    with pytest.raises(
        ValueError,
        match=r"out\.npz is there already, and with it who is for testing; .* --overwrite$",
    ):
        import_source(source, out, ImportOptions(seed=7))
    assert out.read_bytes() == before
    import_source(source, out, ImportOptions(seed=7, overwrite=True))
    assert out.read_bytes() != before


# Signs


def with_commas(path, cell="27,5", separator=";"):
    rows = [separator.join([f"{i},5", cell, str(i % 2)]) for i in range(30)]
    return write_lines(path, separator.join(["age", "bmi", "label"]), *rows)


def test_decimal_commas(tmp_path):
    source = with_commas(tmp_path / "t.csv")
    refused(
        source,
        "t.csv, line 2: age is '0,5'; add --decimal , if that is a decimal comma",
        columns=("age",),
        decimal=".",
    )
    assert set(imported(source).data.train.x[:, 1].tolist()) == {27.5}
    made = imported(source, decimal=",")
    assert set(made.data.train.x[:, 1].tolist()) == {27.5}
    assert set((made.data.train.x[:, 0] % 1).tolist()) == {0.5}


def test_measured_labels_with_decimal_commas_are_no_classes(tmp_path):
    source = with_commas(tmp_path / "t.csv")
    take = Take(columns=("age",), decimal=",")
    assert imported(source, label="bmi", take=take).data.task == "regression"
    refused_source = tmp_path / "b.csv"
    refused_source.write_text("age;label\n" + "\n".join(f"{i};{i},5" for i in range(30)))
    with pytest.raises(ValueError, match=r"line 2: label is '0,5'; add --decimal , if"):
        imported(refused_source, tmp_path / "b.npz", decimal=".")
    assert imported(refused_source, tmp_path / "b.npz").data.task == "regression"


@pytest.mark.parametrize("cell", ["1.234", "12.5"])
def test_a_point_beside_decimal_commas_is_refused(tmp_path, cell):
    """1.234 is one thousand and more in such a table, or a little more than one: nobody can tell."""
    refused(
        with_commas(tmp_path / "t.csv", cell),
        f"line 2: bmi is {cell!r}, which has a point",
        decimal=",",
    )


def test_commas_between_cells_and_in_numbers(tmp_path):
    refused(
        with_commas(tmp_path / "t.csv", separator=","),
        "line 2 has 5 cells, the header 3; if its numbers have decimal commas, save it separated by semicolons and add",
    )


def test_a_separator_that_the_first_line_hides(tmp_path):
    """Three commas in the names, two semicolons between them."""
    source = tmp_path / "t.csv"
    source.write_text(
        "age, in years;dose, in mg, daily;label\n"
        + "\n".join(f"{i};{i / 2};{i % 2}" for i in range(30))
    )
    made = imported(source, separator=";")
    assert made.feature_names == ("age, in years", "dose, in mg, daily")
    for separator, decimal in ((",", ","), ("::", "."), ("", "x")):
        fails(ValueError, r"--separator|--decimal", Take, separator=separator, decimal=decimal)


# What Excel makes of a table


def export(path, head="", end="", encoding="utf-8-sig"):
    """60 patients of two visits each: umlauts, decimal commas, points between thousands, an empty column, a gap."""
    lines = [f"{head}Patienten-ID;Größe (cm);Leukozyten/µl;Kosten;leer;überlebt{end}"]
    for i in range(N):
        cells = [
            f"P{i // 2:03d}",
            f"{150 + i % 40},5",
            f"{4 + i % 9}.{100 + i}",
            f"1.{200 + i},50",
            "",
            "nein" if i % 2 else "ja",
        ]
        cells[1] = "#NV" if i == 7 else cells[1]
        lines.append(";".join(cells) + end)
    path.write_bytes(("\r\n".join([*lines, ";" * (5 + len(end))]) + "\r\n").encode(encoding))
    return path


@pytest.mark.parametrize(
    "head, end, encoding",
    [
        ("", "", "utf-8-sig"),
        ("", "", "cp1252"),
        ("", "", "utf-16"),
        ("sep=;\r\n", "", "utf-8-sig"),
        ('"sep=;"\r\n', ";", "cp1252"),
        ("", ";;", "utf-8"),
    ],
)
def test_a_table_as_excel_saves_it(tmp_path, head, end, encoding):
    """Mark, encoding, `sep=;`, separators at the end, an empty last row: always the same samples, by --recipe too."""
    options = ImportOptions(label="überlebt", take=Take(patient="Patienten-ID"))
    source = export(tmp_path / "t.csv", head, end, encoding)
    made = import_source(source, tmp_path / "t.npz", options)
    assert made.feature_names == ("Größe", "Leukozyten/µl", "Kosten")
    splits = splits_of(made.data)
    found = np.concatenate([split.x for split in splits])
    assert len(found) == N
    i = np.arange(N)
    height = 150.5 + i % 40
    keep = i != 7
    wanted = np.stack([height, 1000.0 * (4 + i % 9) + 100 + i, 1200.5 + i], 1).astype(
        np.float32
    )
    rows = {tuple(row) for row in wanted[keep]}
    assert (
        rows <= {tuple(row) for row in found} and len({tuple(row) for row in found} - rows) == 1
    )
    again = ImportOptions(recipe=made.recipe)
    assert np.array_equal(
        import_source(source, tmp_path / "u.npz", again).data.train.x, made.data.train.x
    )


def test_a_nameless_column_with_values_is_refused(tmp_path):
    source = tmp_path / "t.csv"
    source.write_text(
        "age;dose;label;\n"
        + "".join(f"{i};{i};{i % 2};{'x' if i == 30 else ''}\n" for i in range(60))
    )
    refused(source, "a column has no name in the first line")


def visits(edit=None, head="PatNr;Alter;Wert;Befund", separator=";", rows=60):
    """60 visits of as many patients. ``edit``: a visit's cells, by its number."""
    lines = [head.replace(";", separator)]
    for i in range(rows):
        cells = [f"{i:05}", f"{20 + i},5", f"{i % 7}", "krank" if i % 2 else "gesund"]
        lines.append(separator.join(edit(i, cells) if edit else cells))
    return "\n".join(lines) + "\n"


def cells(column, *values, rows=()):
    """An edit: the column's cells are these in turns, or some rows' are the first."""

    def edit(i, own):
        if not rows or i in rows:
            own[column] = values[i % len(values)] if not rows else values[0]
        return own

    return edit


VALUE, LABEL = 2, 3
PLAIN = visits()


@pytest.mark.parametrize(
    "text, words",
    [
        ("Auswertung;;;\n" + PLAIN, "has no name in the first line; write a header that names each; delete the lines"),
        ("Auswertung\n" + PLAIN, "line 3 has 2 cells, the header 1; delete a title above the header"),
        (PLAIN.encode("utf-16-le"), "line 1 has a zero byte: read UTF-16 with --encoding utf-16-le, or export"),
        (PLAIN.encode("utf-16-be"), "line 1 has a zero byte: read UTF-16 with --encoding utf-16-be, or export"),
        (PLAIN.replace("00009;", "0000\0;"), "t.csv, line 11 has a zero byte: the file is damaged; export it again"),
        (visits(cells(VALUE, "süß")).encode() + "7;1;früh;krank".encode("cp1252"), "line 2 is UTF-8, and line 62 is"),
        (PLAIN.replace(";3;", ';"3;', 1), 'line 5: unexpected end of data: a quote is missing or out of place'),
        (PLAIN.replace(";3;", ';"3" cm;', 1), "line 5: ';' expected after '\"': a quote is missing or out of place"),
        (PLAIN + "Erstellt am 1.1.2024\n", "line 62 has 1 cells, the header 4; fill its cells, or delete it"),
        (PLAIN + "Summe;60;;\n", "line 62 has no label; fill it, or delete the line (a total below the table?)"),
        (PLAIN.replace("gesund", "gesund;x", 1), "line 2 has 5 cells, the header 4; a cell that has a ';' stands in"),
        (visits(head="PatNr;Alter;Alter;Befund"), "two columns named 'Alter'; rename or remove one"),
        (visits(cells(VALUE, "03.04.2024", "2024-05-13", "23.04.2024")), "line 3: Wert is '2024-05-13', and other"),
        (visits(cells(VALUE, *(f"{i}.4.24" for i in range(1, 31)), "31.4.24")), "line 32: Wert is '31.4.24', and"),
        (visits(cells(VALUE, *(f"{i},5" for i in range(9)), "5,3 mmol/l")), "no number; write numbers without units"),
        (visits(cells(VALUE, *"123456789", "<0,1")), "'<0,1', no number; write a number in its place, such as half"),
        (visits(cells(VALUE, *"123456789", "<0,1")), "or --gaps='<0,1' takes it as missing; 5 cells more are"),
        (visits(cells(VALUE, *map(str, range(18)), "-", "k.A.")), "5 cells more are no numbers: 'k.A.'"),
        (visits(cells(VALUE, *"123456789", "#WERT!")), "or --gaps='#WERT!' takes it as missing"),
        (visits(cells(LABEL, "krank", "Krank", "gesund")), "line 3: the label is 'Krank', elsewhere 'krank': case"),
        (visits(cells(LABEL, "-", rows=(9,))), "line 11: the label is '-'; fill it or drop the row, or name all"),
        (visits(cells(0, "1,23457E+11")), "line 2: PatNr is '1,23457E+11', an identifier that Excel has rounded"),
        (b"PK\3\4" + bytes(range(200)), "t.csv is no csv, but an Excel workbook or a zip archive: save the sheet as"),
        (b"\x1f\x8b" + bytes(range(200)), "t.csv is no csv, but compressed with gzip: unpack it first"),
        ("\n <html><table>", "t.csv is no csv, but a web page: export the table as csv first"),
    ],
)  # fmt: skip
def test_a_messy_export_is_asked_about_in_one_line(tmp_path, text, words):
    source = tmp_path / "t.csv"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(source, words, label="Befund", patient="PatNr")


@pytest.mark.parametrize(
    "text, said",
    [
        (visits(cells(VALUE, "999", *map(str, range(9)))), "6 cells are 999, far above all others: if that means"),
        (visits(cells(VALUE, "-4", rows=(9,))), "1 cells are below 0, the first in line 11: a `range` refuses such"),
        (visits(cells(VALUE, "007", "011")), 'cells begin with 0: codes need kind = "category"'),
        (visits(cells(VALUE, "55%", "61%")), "its cells are texts: to have numbers, write them without units"),
        (visits(cells(VALUE, *(f"{i} mg/dl" for i in range(60)))), "left out: 60 different texts in 60 rows; "),
        (visits(cells(VALUE, *(f"{i} mg/dl" for i in range(60)))), "its cells are texts: to have numbers, write them"),
        (visits(cells(VALUE, *(f"{i}/80" for i in range(60)))), "to have numbers, write one in each cell, and"),
        (visits(cells(VALUE, *map(str, [*range(36, 42), *range(96, 106)]))), "times the others: in another unit?"),
        (visits(cells(VALUE, "x", "")), 'if a gap means no: categories = ["x", "no"], fill = "value", fill'),
        (visits(cells(VALUE, "\u22124,5", "3,5")), "number, decimal sign ','"),
        (visits(cells(0, *map(str, range(30)))), ""),
        (visits(cells(0, *map(str, range(15)))), "15 of 15 patients have samples of several classes"),
        (visits(separator="|"), "number, decimal sign ','"),
        (visits(head="PatNr;Alter;Gro\u0308\u00dfe;Befund"), "number, decimal sign ','"),
    ],
)  # fmt: skip
def test_what_is_read_of_a_messy_export_is_told(tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    made = imported(tmp_path / "t.csv", label="Befund", patient="PatNr")
    told = [*(column.why for column in made.recipe.columns), *made.notes]
    assert any(said in line for line in told) if said else not made.notes


@pytest.mark.parametrize(
    "text, words",
    [
        (
            PLAIN.replace(",", ".").replace(";", ","),
            "has one column by the recipe's separator ';': save it so",
        ),
        (
            visits(cells(VALUE, "süß")).encode("cp1252"),
            "is no text in utf-8, as --encoding or the recipe says",
        ),
        (
            visits(lambda i, own: own[:2] + own[3:], "PatNr;Alter;Befund"),
            "has no column Wert, which the recipe takes",
        ),
    ],
)
def test_a_messy_export_of_new_rows_is_refused(tmp_path, text, words):
    (tmp_path / "t.csv").write_text(PLAIN)
    made = imported(tmp_path / "t.csv", label="Befund", patient="PatNr")
    (tmp_path / "new.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(tmp_path / "new.csv", words, recipe=made.recipe)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_a_named_encoding_is_believed_where_a_line_is_utf8_by_chance(tmp_path, encoding):
    """Ã¤ is two letters in latin-1, and ä in UTF-8. By the recipe that is written, the file is read again."""
    texts = ("süß", "Ã¤")
    (tmp_path / "t.csv").write_bytes(visits(cells(VALUE, *texts)).encode(encoding))
    take = Take(patient="PatNr")
    refused(
        tmp_path / "t.csv",
        "in one encoding, or name it with --encoding",
        label="Befund",
        take=take,
    )
    named = ImportOptions(label="Befund", take=replace(take, encoding=encoding))
    recipe = import_source(tmp_path / "t.csv", tmp_path / "ours.npz", named).recipe
    assert recipe is not None and set(recipe.columns[1].categories) == set(texts)
    imported(tmp_path / "t.csv", recipe=recipe)


def test_utf8_beside_a_recipe_of_another_encoding_is_read_as_utf8_with_a_note(tmp_path):
    (tmp_path / "t.csv").write_bytes(visits(cells(VALUE, "süß", "früh")).encode("cp1252"))
    made = imported(tmp_path / "t.csv", label="Befund", patient="PatNr")
    (tmp_path / "new.csv").write_text(visits(cells(VALUE, "süß", "früh")))
    again = imported(tmp_path / "new.csv", recipe=made.recipe)
    assert "is UTF-8, where the recipe has cp1252: it is read as UTF-8" in again.notes[0]
    assert (again.data.train.x == made.data.train.x).all() and made.recipe is not None
    assert again.recipe.columns == made.recipe.columns
    refused(tmp_path / "new.csv", "is UTF-8, and --encoding", label="Befund", encoding="cp1252")


def test_the_command_has_all_of_it(tmp_path, capsys):
    source = with_commas(tmp_path / "t.csv")
    source.write_text(source.read_text().replace("age;", "MRN;").replace("label", "state"))
    out = str(tmp_path / "out.npz")
    command = ["import", str(source), "--out", out]
    for words, more in (
        ("name the label's column with --label: MRN, bmi, state", []),
        ("name it with --patient MRN, or say --no-patient", ["--label", "state"]),
        ("add --decimal , if that is a decimal comma", ["--patient", "MRN", "--decimal", "."]),
    ):
        command += more
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert silofl(*command, "--decimal", ",", "--separator", ";") == 0
    assert "train 19, val 5, test 6 samples: a table of 1 columns" in capsys.readouterr().out
    assert (
        silofl(*command, "--decimal", ",") == 2
        and "is there already" in capsys.readouterr().err
    )
    assert silofl(*command, "--decimal", ",", "--overwrite") == 0


def test_a_table_without_an_input_is_refused(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("a,b,label\n" + "".join(f"note number {i},,{i % 2}\n" for i in range(60)))
    with pytest.raises(
        ValueError,
        match=r"t\.csv has no column that can be an input \(a is left out: 60 different",
    ):
        imported(table, tmp_path / "o.npz", patient=None)
    assert not (tmp_path / "o.npz").exists()


def test_a_column_without_a_value_is_skipped_as_the_line_says(tmp_path):
    """By changing its kind alone, while its fill still stands."""
    table = tmp_path / "t.csv"
    table.write_text("a,b,label\n" + "".join(f"{i},,{i % 2}\n" for i in range(60)))
    column = '[[columns]]\nname = "{}"\nkind = "{}"\nfill = "median"\n'
    text = 'version = 1\nlabel = ["label"]\n[file]\ngaps = [""]\n' + column.format(
        "a", "number"
    )
    out, recipe = tmp_path / "o.npz", tmp_path / "r.toml"
    recipe.write_text(text + column.format("b", "number") + "mark-gaps = true\n")
    with pytest.raises(
        ValueError, match=r"b has no value in the training part.*kind = \"skip\" in the recipe"
    ):
        imported(table, out, recipe=load_recipe(recipe))
    recipe.write_text(text + column.format("b", "skip") + "mark-gaps = true\n")
    assert imported(table, out, recipe=load_recipe(recipe)).feature_names == ("a",)
