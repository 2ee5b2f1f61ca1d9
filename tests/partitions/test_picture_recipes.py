"""The recipe of pictures and scans: what an import writes down, repeated on others, and what differs is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from failing import fails
from near import near
from PIL import Image
from scans import accession, leaks, study_uid, write_dicom, write_nifti
from taken import imported, silofl, write_lines

from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.recipes.pictures import PictureRecipe, load_any, parse_any, read_any
from partitions.recipes.recipe import MEND
from server.cli.main import main


def studies(root, n=10, first=0, **attributes):
    """Studies of one grey value each, 100 * study; spacing 2 mm, axial, rescaled, of 12 bits."""
    wanted: dict[str, Any] = {
        "PixelSpacing": [2.0, 2.0],
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
        "RescaleSlope": 1,
        "RescaleIntercept": 0,
    }
    for i in range(first, first + n):
        pixels = np.full((4, 4), 100 * (i % 10), np.uint16)
        write_dicom(
            root / f"{i}" / "IM0",
            pixels,
            patient=f"PAT-{i}-UMPF",
            study=i,
            **(wanted | attributes),
        )
    return root


def labels(path, n=10, first=0):
    rows = (f"{study_uid(i)},{'ill' if i % 2 else 'well'}\n" for i in range(first, first + n))
    path.write_text("study,finding\n" + "".join(rows))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The recipe of ten studies of CT, made by the command."""
    folder = tmp_path_factory.mktemp("made")
    table, out = labels(folder / "l.csv"), folder / "ours.npz"
    command = [
        "import",
        str(studies(folder / "x")),
        "--labels-from",
        str(table),
        "--label",
        "finding",
    ]
    assert silofl(*command, "--out", out, "--window=500,1000", "--size", "4") == 0
    return folder / "ours.recipe.toml"


def test_the_recipe_says_what_was_done_and_names_nobody(made):
    recipe = load_any(made)
    assert isinstance(recipe, PictureRecipe)
    assert recipe.content == {
        "version": 1,
        "kind": "pictures",
        "seed": 42,
        "labels-by": "study",
        "label": ["finding"],
        "task": "multiclass",
        "classes": ["ill", "well"],
        "outputs": 2,
        "pictures": {
            "shape": [4, 4, 1],
            "dtype": "float32",
            "resize": True,
            "window": [500.0, 1000.0],
        },
        "expected": {
            "formats": ["dicom"],
            "modalities": ["CT"],
            "planes": ["axial"],
            "photometric": ["MONOCHROME2"],
            "rescaled": ["yes"],
            "pixel-mm": [1.0, 4.0],
        },
    }
    with np.load(made.with_name("ours.npz")) as npz:
        assert npz["recipe"].item() == recipe.as_json
    assert read_any(recipe.as_json) == parse_any(json.loads(recipe.as_json)) == recipe
    assert leaks(made.read_text(), files=(made.with_name("ours.npz"),)) == []


def test_it_repeats_the_import_bit_for_bit(tmp_path, made):
    """On the same files the same data file; on others the same pictures, with their labels by the same column."""
    source, table = studies(tmp_path / "x"), labels(tmp_path / "l.csv")
    options = ImportOptions(pictures=pictures(made), labels_from=table)
    import_source(source, tmp_path / "a.npz", options)
    assert (tmp_path / "a.npz").read_bytes() == made.with_name("ours.npz").read_bytes()
    recipe = ["--recipe", str(made), "--labels-from", str(labels(tmp_path / "m.csv", 2, 11))]
    assert (
        silofl("import", studies(tmp_path / "y", 2, 11), *recipe, "--out", tmp_path / "b.npz")
        == 0
    )
    with np.load(tmp_path / "b.npz") as npz:
        assert npz["y"].tolist() == [0, 1] and npz["label_names"].tolist() == ["ill", "well"]
        near(npz["x"][:, 0, 0, 0], [0.1, 0.2], 1e-5)
        assert (
            npz["patient"].tolist() == [0, 1] and npz["recipe"].item() == pictures(made).as_json
        )


def pictures(path):
    recipe = load_any(path)
    assert isinstance(recipe, PictureRecipe)
    return recipe


def test_without_labels_one_part(tmp_path, made, capsys):
    command = [
        "import",
        str(studies(tmp_path / "y", 3, 11)),
        "--recipe",
        str(made),
        "--out",
        str(tmp_path / "b.npz"),
    ]
    assert main(command) == 0
    assert (
        "3 samples, without labels, in one part: pictures of 4 x 4" in capsys.readouterr().out
    )
    with np.load(tmp_path / "b.npz") as npz:
        assert npz["x"].shape == (3, 1, 4, 4) and "y" not in npz
    assert silofl("check-data", tmp_path / "b.npz") == 2  # nothing can be trained on it


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"Modality": "MR"}, "its modality is MR, where the recipe has CT"),
        ({"Modality": "ZARATHUSTRA"}, "its modality is other, where the recipe has CT"),
        (
            {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]},
            "its plane is sagittal, where the recipe has axial",
        ),
        (
            {"ImageOrientationPatient": None},
            "its plane is not stated, where the recipe has axial",
        ),
        (
            {"RescaleSlope": None, "RescaleIntercept": None},
            "its values have no rescaling to a unit",
        ),
        ({"PixelSpacing": [0.5, 9.0]}, "its pixels are 0.5 mm, where the recipe has 1 to 4"),
        (
            {"PixelSpacing": None},
            "it does not say how large its pixels are, where the recipe has 1 to 4 mm",
        ),
    ],
)
def test_what_differs_is_named_and_not_dropped(tmp_path, made, capsys, attributes, words):
    source = studies(tmp_path / "y", 2, 11)
    studies(source, 1, 12, **attributes)
    command = ["import", str(source), "--recipe", str(made), "--out", str(tmp_path / "b.npz")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"1 of 2 pictures do not fit the recipe: {source}, file 2 of 2: {words}" in said
    assert (
        said.strip().splitlines()[-1].startswith("silofl import: 1 of 2") and leaks(said) == []
    )
    assert not (tmp_path / "b.npz").exists()


def test_colour_and_size_and_depth(tmp_path):
    """Pictures in folders: grey of 8 bits and 6 x 4, as they are."""
    for i in range(12):
        path = tmp_path / "x" / ("well", "ill")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 4), 20 * i).save(path)
    made = imported(tmp_path / "x", tmp_path / "a.npz")
    recipe = made.pictures
    assert (
        recipe
        and recipe.pictures.shape == (4, 6, 1)
        and recipe.pictures.dtype == "uint8"
        and recipe.labels_by == "folder"
    )
    assert recipe.pictures.shape == (4, 6, 1) and recipe.pictures.dtype == "uint8"
    assert recipe.classes == ("ill", "well") and recipe.expected.formats == ("picture",)
    again = imported(tmp_path / "x", tmp_path / "b.npz", pictures=recipe)
    assert again.file.read_bytes() == made.file.read_bytes()
    new = tmp_path / "new"
    new.mkdir()
    for name, image, words in (
        ("c.png", Image.new("RGB", (6, 4)), "it is in colour, where the recipe has grey"),
        ("d.png", Image.new("L", (4, 6)), "it is 4 x 6, where the recipe has 6 x 4"),
        (
            "e.png",
            Image.fromarray(np.zeros((4, 6), np.uint16)),
            "it has more than 8 bits, where the recipe has 8",
        ),
    ):
        image.save(new / name)
        fails(
            ValueError, f"{name}: {words}", imported, new, tmp_path / "c.npz", pictures=recipe
        )
        (new / name).unlink()
    write_nifti(new / "v.nii", np.zeros((6, 4, 3)))
    with pytest.raises(
        ValueError, match=r"file 1 of 1: its format is nifti, where the recipe has picture"
    ):
        imported(new, tmp_path / "c.npz", pictures=recipe)
    shape = recipe.pictures.model_copy(update={"shape": (4, 6, 3)})
    # A grey picture becomes one of three channels, as in training
    colour = recipe.model_copy(update={"pictures": shape})
    imported(tmp_path / "x", tmp_path / "d.npz", pictures=colour)
    with np.load(tmp_path / "d.npz") as npz:
        assert npz["x_train"].shape[1:] == (4, 6, 3) and npz["x_train"].max() > 0


def test_what_is_written_otherwise_is_noted(tmp_path, made):
    """MONOCHROME1 is inverted, as the standard has it: no reason to refuse, but one to look."""
    source = studies(tmp_path / "y", 2, 11, PhotometricInterpretation="MONOCHROME1")
    done = imported(source, pictures=pictures(made))
    assert (
        "2 of 2 pictures are MONOCHROME1, which the recipe's were not: converted as the standard"
        in str(done.notes)
    )


def test_masks_and_csv_again(tmp_path):
    """NIfTI with masks by a csv, and its patients' column."""
    rows = []
    for i in range(10):
        write_nifti(tmp_path / f"{i}.nii", np.full((6, 4, 5), i, np.int16))
        write_nifti(tmp_path / f"m{i}.nii", np.ones((6, 4, 5), np.uint8))
        rows.append(f"{i}.nii,m{i}.nii,P{i // 2}")
    write_lines(tmp_path / "l.csv", "file,mask,who", *rows)
    take = replace(ImportOptions().take, patient="who")
    first = imported(tmp_path / "l.csv", tmp_path / "a.npz", window=(5, 10), take=take)
    recipe = first.pictures
    assert (
        recipe
        and recipe.task == "segmentation"
        and recipe.patient == "who"
        and recipe.outputs == 2
    )
    again = imported(tmp_path / "l.csv", tmp_path / "b.npz", pictures=recipe)
    assert again.file.read_bytes() == first.file.read_bytes()
    (tmp_path / "n.csv").write_text("file\n3.nii\n")
    imported(tmp_path / "n.csv", tmp_path / "c.npz", pictures=recipe)
    with np.load(tmp_path / "c.npz") as npz:
        near(npz["x"], 0.3)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kind": "sounds"}, "kind = 'sounds': must be one of 'pictures'"),
        ({"version": 2}, "version is 2: this silofl reads"),
        ({"columns": []}, "'columns' is no key of it"),
        ({"pictures": {"shape": [4, 4], "dtype": "uint8"}}, r"pictures.shape = \[4, 4\]: "),
        (
            {"pictures": {"shape": [4, 4, 2], "dtype": "uint8"}},
            "shape is height, width and channels",
        ),
        (
            {"pictures": {"shape": [4, 1e9, 1], "dtype": "uint8"}},
            "pictures.shape.2 = 1000000000.0",
        ),
        (
            {"pictures": {"shape": [4, 6, 1], "dtype": "uint8", "resize": True}},
            "resize makes squares",
        ),
        ({"pictures": {"shape": [4, 4, 1], "dtype": "float64"}}, "dtype = 'float64'"),
        ({"pictures": {"shape": [4, 4, 1], "dtype": "uint8", "spacing": -1}}, "spacing is -1"),
        ({"labels-by": "luck"}, "labels-by = 'luck'"),
        ({"expected": {"modalities": ["XY"]}}, "modalities.1 = 'XY'"),
        ({"expected": {"pixel-mm": [3, 1]}}, "pixel-mm is the smallest and the largest"),
        ({"expected": {"voltage": ["high"]}}, "'expected.voltage' is no key"),
    ],
)
def test_a_recipe_is_right_or_refused_in_one_line(made, change, words):
    said = fails(ValueError, words, parse_any, {**pictures(made).content, **change})
    assert said.endswith(MEND) or "version" in change


def test_a_table_s_recipe_and_a_picture_s_are_not_mixed_up(tmp_path, made, capsys):
    (tmp_path / "t.csv").write_text("age,label\n1,a\n2,b\n")
    assert (
        silofl("import", tmp_path / "t.csv", "--recipe", made, "--out", tmp_path / "t.npz") == 2
    )
    assert "has no column file; the recipe is of pictures" in capsys.readouterr().err
    assert silofl("schema", made, "--out", tmp_path / "s.toml") == 2
    assert (
        "this recipe is of pictures or scans, and that of a table is needed here"
        in capsys.readouterr().err
    )
    assert (
        silofl("import", "x", "--recipe", made, "--size", "4", "--out", tmp_path / "t.npz") == 2
    )
    assert "--size beside --recipe: the recipe says that" in capsys.readouterr().err


def test_links_out_of_the_folder_are_refused(tmp_path, capsys):
    """An export with a link to another patient's files, or to the machine's."""
    source = studies(tmp_path / "x", 3)
    outside = studies(tmp_path / "other", 1, 7) / "7/IM0"
    (source / "0/IM1").symlink_to(outside)
    command = [
        "import",
        str(source),
        "--labels-from",
        str(labels(tmp_path / "l.csv")),
        "--label",
        "finding",
    ]
    assert silofl(*command, "--out", tmp_path / "a.npz") == 2
    assert "x, file 2 of 4 is a link that leads out of the folder" in capsys.readouterr().err
    (source / "0/IM1").unlink()
    # Within it links are files like others
    (source / "0/IM1").symlink_to(source / "1/IM0")
    imported(
        source,
        tmp_path / "a.npz",
        labels_from=tmp_path / "l.csv",
        label="finding",
        labels=["well", "ill"],
    )


@pytest.mark.parametrize("column", ["file", "mask"])
@pytest.mark.parametrize("way", ["dots", "whole", "link"])
def test_a_csv_s_paths_out_of_its_folder_are_refused(tmp_path, capsys, column, way):
    """Of a folder's own csv, for pictures and for masks; one that is named itself is the hospital's list."""
    source, other = tmp_path / "x", tmp_path / "other.png"
    source.mkdir()
    for path in (other, source / "a.png"):
        Image.new("L", (4, 4), 1).save(path)
    (source / "b.png").symlink_to(other)
    name = {"dots": "../other.png", "whole": str(other), "link": "b.png"}[way]
    row = {"file": "a.png", "mask": "a.png"} | {column: name}
    (source / "l.csv").write_text(f"file,mask\na.png,a.png\n{row['file']},{row['mask']}\n")
    assert silofl("import", source, "--out", tmp_path / "a.npz") == 2
    assert (
        "l.csv, line 3 names a file outside its folder: name the csv" in capsys.readouterr().err
    )
    assert silofl("import", source / "l.csv", "--out", tmp_path / "a.npz") == 0


def test_accession_is_a_key_too(tmp_path):
    (tmp_path / "l.csv").write_text(
        "accession,f\n" + "".join(f"{accession(i)},{i % 2}\n" for i in range(10))
    )
    options = ImportOptions(labels_from=tmp_path / "l.csv", label="f")
    made = import_source(studies(tmp_path / "x"), tmp_path / "a.npz", options)
    assert (
        made.pictures and made.pictures.labels_by == "accession" and made.pictures.outputs == 2
    )
