"""``silofl predict`` on folders of pictures and scans: the recipe in the card, keys by file or patient, no labels."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scans import leaks, study_uid, write_dicom
from taken import silofl

from partitions.recipes.pictures import load_any
from server.cli.main import main


def scans(root, studies):
    """Odd studies are bright, even ones dark; each has two files, of which the middle one counts."""
    for i in studies:
        for number in (1, 2):
            pixels = np.full((4, 4), 3000 if i % 2 else 500 + i, np.uint16)
            place: dict[str, Any] = {
                "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
                "ImagePositionPatient": [0, 0, number],
            }
            path = root / f"Zarathustra {i}" / f"IM{number}"
            write_dicom(
                path,
                pixels,
                patient=f"P-{i}",
                study=i,
                number=number,
                PixelSpacing=[1, 1],
                **place,
            )
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Import, simulate, export: the model of a hospital whose odd studies are ill."""
    folder = tmp_path_factory.mktemp("model")
    rows = (f"{study_uid(i)},{'ill' if i % 2 else 'well'}\n" for i in range(40))
    (folder / "l.csv").write_text("study,label\n" + "".join(rows))
    source, data = scans(folder / "x", range(40)), folder / "ours.npz"
    command = (
        f"import {source} --labels-from {folder}/l.csv --window=2000,4000 --out {data}".split()
    )
    assert main(command) == 0
    settings = [
        "model=mlp",
        "mlp.hidden=",
        "learning-rate=0.5",
        "threads=1",
        "batch-size=8",
        "local-epochs=5",
    ]
    options = [
        *f"--partition iid --silos 2 --rounds 3 --out {folder}/run --set".split(),
        *settings,
    ]
    assert silofl(*f"simulate --data {data} --strategy fedavg".split(), *options) == 0
    export = f"export {folder}/run --silo hospital-01 --which last --out".split()
    assert silofl(*export, folder / "m.safetensors") == 0
    return folder / "m.safetensors"


def answers(model, data, *more):
    out = data.parent / "p.csv"
    # Folders of scans have blanks in their names
    given = ["--model", model, "--data", data, "--out", out]
    assert silofl("predict", *map(str, given), *more) == 0
    with out.open() as file:
        return list(csv.DictReader(file))


def test_tomorrow_s_studies(tmp_path, model, capsys):
    """Rows by PatientID, class names and probabilities, from an export without labels."""
    rows = answers(model, scans(tmp_path / "new", range(51, 54)))
    assert [list(row) for row in rows] == [["patient", "label", "p_ill", "p_well"]] * 3
    assert [row["patient"] for row in rows] == ["P-51", "P-52", "P-53"]
    assert [row["label"] for row in rows] == ["ill", "well", "ill"]
    assert all(abs(float(row["p_ill"]) + float(row["p_well"]) - 1) < 1e-5 for row in rows)
    assert (
        "3 of 3 studies have several slices: the middle one is taken" in capsys.readouterr().err
    )
    by_study = answers(model, tmp_path / "new", "--key", "study")
    assert [row["study"] for row in by_study] == [study_uid(i) for i in (51, 52, 53)]
    by_file = answers(model, tmp_path / "new", "--key", "file")
    assert [row["file"] for row in by_file] == [f"Zarathustra {i}/IM2" for i in (51, 52, 53)]
    assert [row["p_ill"] for row in by_file] == [row["p_ill"] for row in rows]


def test_a_csv_and_one_file(tmp_path, model):
    """A csv's column of patients is the key; a single file is asked about as a folder of one."""
    scans(tmp_path / "new", range(61, 63))
    table = tmp_path / "list.csv"
    table.write_text("file,patient\nnew/Zarathustra 61/IM1,A\nnew/Zarathustra 62/IM1,\n")
    assert [(row["patient"], row["label"]) for row in answers(model, table)] == [
        ("A", "ill"),
        ("", "well"),
    ]
    alone = answers(model, tmp_path / "new/Zarathustra 61/IM1")
    assert [(row["patient"], row["label"]) for row in alone] == [("P-61", "ill")]


def test_a_folder_s_csv_is_not_read(tmp_path, model, capsys):
    """Yesterday's list, of fewer studies, and a worklist: every study is predicted, and a note says so."""
    scans(tmp_path / "new", range(65, 68))
    (tmp_path / "new/labels.csv").write_text("file,patient,label\nZarathustra 65/IM1,A,ill\n")
    (tmp_path / "new/worklist.csv").write_text("when,who\n8:00,P-65\n")
    assert [row["patient"] for row in answers(model, tmp_path / "new")] == [
        "P-65",
        "P-66",
        "P-67",
    ]
    assert "note: 2 csv files in " in capsys.readouterr().err


def test_a_csv_that_is_named_may_list_files_elsewhere(tmp_path, model, capsys):
    scans(tmp_path / "other", range(61, 62))
    (tmp_path / "new").mkdir()
    table = tmp_path / "new/list.csv"
    table.touch()
    assert main(f"predict --model {model} --data {tmp_path}/new".split()) == 2
    assert "new has no pictures; name its csv itself (list.csv)" in capsys.readouterr().err
    for name in ("../other/Zarathustra 61/IM1", str(tmp_path / "other/Zarathustra 61/IM1")):
        table.write_text(f"file\n{name}\n")
        assert answers(model, table)[0]["label"] == "ill"


def test_a_data_file_by_the_same_recipe_says_the_same(tmp_path, model):
    source = scans(tmp_path / "new", range(71, 75))
    recipe = model.parent / "ours.recipe.toml"
    assert main(f"import {source} --recipe {recipe} --out {tmp_path}/n.npz".split()) == 0
    columns = ("label", "p_ill", "p_well")
    direct, by_file = answers(model, source), answers(model, tmp_path / "n.npz")
    assert [[row[c] for c in columns] for row in direct] == [
        [row[c] for c in columns] for row in by_file
    ]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mr", "its modality is MR, where the recipe has CT"),
        ("png", "its format is picture, where the recipe has dicom"),
        ("empty", "has no pictures and no csv that lists some"),
        ("missing", "there is no"),
        ("csv", "has no column file; the recipe is of pictures"),
        ("key", "--key study is of DICOM files"),
        ("gaps", "--as-gaps is of a table"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, model, capsys, what, words):
    new = tmp_path / "new"
    more = {"key": ["--key", "study"], "gaps": ["--as-gaps"]}.get(what, [])
    new.mkdir()
    if what == "mr":
        write_dicom(
            new / "IM",
            np.zeros((4, 4), np.uint16),
            patient="P",
            Modality="MR",
            PixelSpacing=[1, 1],
        )
    elif what in ("png", "key", "gaps"):
        Image.new("L", (4, 4)).save(new / "a.png")
    elif what == "missing":
        new = tmp_path / "nowhere"
    elif what == "csv":
        new = tmp_path / "t.csv"
        new.write_text("age\n3\n")
    if what == "key":
        (model.parent / "any.toml").write_text(any_format(model))
        more += ["--recipe", str(model.parent / "any.toml")]
    out = tmp_path / "p.csv"
    assert silofl(*f"predict --model {model} --data {new} --out {out}".split(), *more) == 2
    said = capsys.readouterr().err
    assert words in said.strip().splitlines()[-1] and not out.exists() and leaks(said) == []


def any_format(model):
    """The recipe, without what it expects, and of 8-bit pictures."""
    text = (model.parent / "ours.recipe.toml").read_text()
    assert load_any(model.parent / "ours.recipe.toml")
    return (
        text.partition("[expected]")[0]
        .replace('"float32"', '"uint8"')
        .replace("window = [2000.0, 4000.0]\n", "")
    )


def test_a_card_without_a_recipe(tmp_path, model, capsys):
    run = model.parent / "run"
    export = (
        f"export {run} --silo hospital-01 --which last --out {tmp_path}/m.safetensors".split()
    )
    assert main(export) == 0
    assert "note: the card holds the recipe of your pictures" in capsys.readouterr().out
    assert silofl(*export, "--no-recipe") == 0
    source = scans(tmp_path / "new", range(51, 52))
    assert main(f"predict --model {tmp_path}/m.safetensors --data {source}".split()) == 2
    assert "cannot read a csv or pictures: name one with --recipe" in capsys.readouterr().err
    rows = answers(
        tmp_path / "m.safetensors", source, "--recipe", str(model.parent / "ours.recipe.toml")
    )
    assert rows == answers(model, source)
