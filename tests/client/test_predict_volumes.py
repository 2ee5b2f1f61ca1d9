"""Volumes from import to outlines in the hospital's own formats: train, predict, and read back what is written."""

from __future__ import annotations

import csv
import tracemalloc
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from PIL import Image
from scans import NAMED, leaks, write_dicom, write_nifti
from taken import silofl

from client.prediction import predict
from client.prediction.new_samples import NewSamples
from models import samples
from partitions.array_names import make_schema
from partitions.importing.readers.reader import SampleSource, pseudonym
from partitions.importing.readers.volumes import volume
from partitions.importing.readers.volumes.grid import RAS
from partitions.importing.readers.volumes.series import read_series, referenced_series
from partitions.importing.streams import open_pictures
from partitions.recipes.pictures import PictureRecipe, made_by
from partitions.recipes.reading import ReadOptions
from server.cli.main import main

SHAPE = (8, 8, 8)


def organ(i):
    """A box that is elsewhere in each patient, bool (slice, row, column)."""
    made = np.zeros(SHAPE, bool)
    made[1:5, 1 + i % 3 : 5 + i % 3, 2:6] = True
    return made


def scan(folder, i):
    """A series from head to feet, whose organ is bright."""
    files = []
    for k, pixels in enumerate(np.where(organ(i), 900, 100).astype(np.uint16)):
        place: dict[str, Any] = {
            "ImagePositionPatient": [-10.0, -20.0, -3.0 * k],
            "FrameOfReferenceUID": f"1.2.3.{i}",
        }
        place["ImageOrientationPatient"] = [1, 0, 0, 0, 1, 0]
        path = folder / f"{i}" / f"IM{k}"
        files.append(
            write_dicom(
                path,
                pixels,
                patient=f"P{i}",
                study=i,
                number=k + 1,
                PixelSpacing=[2, 1],
                **place,
            )
        )
    return files


def stored(files, i):
    """The mask of a series along NIfTI's axes, and its affine."""
    affine = (RAS @ read_series(files).grid.affine)[:, [2, 1, 0, 3]]
    return np.transpose(organ(i)[::-1], (2, 1, 0)).astype(np.uint8), affine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A U-Net for volumes of two silos; series and their masks in a csv."""
    folder = tmp_path_factory.mktemp("model")
    lines = ["file,mask,patient"]
    for i in range(12):
        mask, affine = stored(scan(folder / "x", i), i)
        write_nifti(folder / f"m{i}.nii.gz", mask, affine)
        lines.append(f"x/{i},m{i}.nii.gz,P{i}")
    (folder / "l.csv").write_text("\n".join(lines))
    data = folder / "ours.npz"
    options = f"--volume 8,8,8 --window=500,1000 --labels background,organ --out {data}".split()
    assert silofl("import", folder / "l.csv", *options) == 0
    settings = [
        "unet.levels=1",
        "unet.width=4",
        "optimizer=adam",
        "learning-rate=0.02",
        "local-epochs=12",
    ]
    run = [*f"--partition iid --silos 2 --rounds 2 --out {folder}/run --set".split(), *settings]
    assert (
        silofl(
            *f"simulate --data {data} --strategy fedavg".split(),
            *run,
            "threads=1",
            "batch-size=4",
        )
        == 0
    )
    export = f"export {folder}/run --silo hospital-01 --which last --out".split()
    assert silofl(*export, folder / "m.safetensors") == 0
    return folder / "m.safetensors"


def test_outlines_come_back_on_the_source_s_voxels(tmp_path, model, capsys):
    """Of a DICOM series as NIfTI and SEG, which say the same and lie on the series; the truth is found again."""
    files = scan(tmp_path / "new", 20)
    out, masks = tmp_path / "p.csv", tmp_path / "masks"
    command = f"predict --model {model} --data {tmp_path}/new --out {out}".split()
    assert silofl(*command, "--masks", masks) == 0
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == ["patient", "pixels_background", "pixels_organ", "mask"]
    assert (row["patient"], row["mask"]) == ("P20", "0001.nii.gz")
    assert sorted(path.name for path in masks.iterdir()) == ["0001.dcm", "0001.nii.gz"]
    image: Any = nibabel.load(masks / "0001.nii.gz")
    wanted, affine = stored(files, 20)
    np.testing.assert_allclose(image.affine, affine, atol=1e-4)
    drawn = np.asarray(image.dataobj)
    assert drawn.sum() == int(row["pixels_organ"])
    assert 2 * (drawn & wanted).sum() / (drawn.sum() + wanted.sum()) > 0.9
    wish = ReadOptions(volume=SHAPE, outlines=("organ",))
    from_seg = volume.read_volume_mask(files, [masks / "0001.dcm"], "here", wish)
    np.testing.assert_array_equal(
        from_seg, volume.read_volume_mask(files, [masks / "0001.nii.gz"], "here", wish)
    )
    seg = pydicom.dcmread(masks / "0001.dcm")
    header = pydicom.dcmread(files[0], stop_before_pixels=True)
    assert (seg.Modality, seg.PatientID) == (
        "SEG",
        "P20",
    ) and seg.StudyInstanceUID == header.StudyInstanceUID
    assert referenced_series(masks / "0001.dcm") == {pseudonym(header.SeriesInstanceUID)}
    assert seg.SegmentSequence[0].SegmentLabel == "organ" and NAMED[
        "PatientComments"
    ] not in str(seg)
    assert leaks(image.to_bytes().decode("latin-1")) == []
    assert silofl(*command, "--masks", masks) == 2
    assert "is there already, and not an empty folder" in capsys.readouterr().err


def test_nifti_gets_its_own_affine_back(tmp_path, model):
    """A volume stored along other axes; the recipe of a DICOM hospital must allow NIfTI first."""
    files = scan(tmp_path / "dicom", 21)
    _, affine = stored(files, 21)
    values = np.where(organ(21)[::-1], 900, 100).astype(np.int16)
    turned = affine[:, [2, 1, 0, 3]]  # slices first
    write_nifti(tmp_path / "new/v.nii.gz", values, turned)
    recipe = (model.parent / "ours.recipe.toml").read_text()
    (tmp_path / "r.toml").write_text(
        recipe.replace('formats = ["dicom"]', 'formats = ["dicom", "nifti"]')
    )
    command = f"predict --model {model} --data {tmp_path}/new --masks {tmp_path}/masks".split()
    assert main(command) == 2
    assert silofl(*command, *f"--recipe {tmp_path}/r.toml --out {tmp_path}/p.csv".split()) == 0
    image: Any = nibabel.load(tmp_path / "masks/0001.nii.gz")
    assert image.shape == values.shape and [
        path.name for path in (tmp_path / "masks").iterdir()
    ] == ["0001.nii.gz"]
    np.testing.assert_allclose(image.affine, turned, atol=1e-4)
    drawn = np.asarray(image.dataobj).astype(bool)
    assert 2 * (drawn & organ(21)[::-1]).sum() / (drawn.sum() + organ(21).sum()) > 0.9
    assert (tmp_path / "p.csv").read_text().splitlines()[1].startswith("v.nii.gz,")


def test_a_folder_of_masks_is_for_volumes(tmp_path, model, capsys):
    data, masks = model.parent / "ours.npz", tmp_path / "masks"
    assert main(f"predict --model {model} --data {data} --masks {masks}".split()) == 2
    assert (
        "a folder is for volumes, which scans give; name a file that ends in .npz"
        in capsys.readouterr().err
    )
    assert main(f"predict --model {model} --data {data} --masks {tmp_path}/m.npz".split()) == 0
    assert main(f"predict --model {model} --data {data} --masks {tmp_path}/m.npz".split()) == 0
    np.savez(tmp_path / "theirs.npz", masks=np.zeros(2), x=np.zeros(2))
    (tmp_path / "notes.npz").write_text("notes")
    for other in (tmp_path / "theirs.npz", tmp_path / "notes.npz"):
        before = other.read_bytes()
        assert main(f"predict --model {model} --data {data} --masks {other}".split()) == 2
        assert "is there already, and is no masks file" in capsys.readouterr().err
        assert other.read_bytes() == before
    with np.load(tmp_path / "m.npz") as npz:
        assert npz["masks"].shape[1:] == SHAPE and not masks.exists()


def test_volumes_are_read_one_after_the_other(tmp_path, model, capsys, monkeypatch):
    """A second series whose last slice is cut short: the first one's outlines are there by then, and no csv is."""
    monkeypatch.setattr(samples, "VOLUME_VALUES", 1)
    scan(tmp_path / "new", 20)
    last = scan(tmp_path / "new", 21)[-1]
    last.write_bytes(last.read_bytes()[:-20])
    out, masks = tmp_path / "p.csv", tmp_path / "masks"
    command = f"predict --model {model} --data {tmp_path}/new --out {out} --masks".split()
    assert silofl(*command, masks) == 2
    assert f"; 1 of 2 outlines are in {masks}\n" in capsys.readouterr().err and not out.exists()
    assert sorted(path.name for path in masks.iterdir()) == ["0001.dcm", "0001.nii.gz"]
    assert silofl(*command, tmp_path / "m.npz") == 2
    assert "outlines are in" not in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["masks", "new"]


def test_memory_does_not_grow_with_pictures(tmp_path, monkeypatch):
    picture, count = np.full((128, 128), 7, np.uint8), 200
    Image.fromarray(picture).save(tmp_path / "a.png")
    sources = [SampleSource("here", (), "", "", file=tmp_path / "a.png")] * count
    recipe = PictureRecipe(pictures=made_by((*picture.shape, 1), "uint8", ReadOptions()))
    monkeypatch.setattr(samples, "VALUES", 4 * picture.size)
    asked = NewSamples(
        open_pictures(sources, recipe), 0, make_schema((), (), "uint8"), [""] * count
    )
    tracemalloc.start()
    sizes = [(len(batch), int(batch.min())) for batch in predict.batches_of(asked, "here")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sizes == [(4, 7)] * (count // 4) and peak < count * picture.size / 4
