"""`silofl import` of NIfTI: axial slices whatever the axes, values by window or percentile, masks, nobody named."""

from __future__ import annotations

import logging
import sys
from typing import Any

import nibabel
import numpy as np
import pytest
from failing import fails
from near import near
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from scans import SECRETS, leaks, sample_at, write_dicom, write_nifti
from taken import imported, refused, silofl, splits_of, write_lines

from partitions.importing.readers import dicom, registry
from partitions.importing.readers.reader import SampleSource, slices_taken
from partitions.importing.readers.volumes import volume as scans
from partitions.importing.readers.volumes.nifti_file import load_nifti, says_how_it_lies
from partitions.recipes.reading import ReadOptions


def volume(shape=(6, 4, 5)):
    """In RAS: 100 x + 10 y + z, so that every voxel says where it is."""
    x, y, z = np.indices(shape)
    return (100 * x + 10 * y + z).astype(np.int16)


def ten_volumes(root, suffix=".nii.gz", mask=False):
    """Volumes 0 to 9 of one value each, 100 * i, with masks where x < i, and a csv."""
    lines = ["file,mask" if mask else "file,label"]
    for i in range(10):
        name = f"Zarathustra-{i}{suffix}"
        write_nifti(root / name, np.full((6, 4, 5), 100 * i, np.int16))
        write_nifti(root / f"mask-{name}", (np.indices((6, 4, 5))[0] < i).astype(np.uint8))
        lines.append(f"{name},mask-{name}" if mask else f"{name},{i % 2}")
    write_lines(root / "list.csv", *lines)
    return root / "list.csv"


def slice_of(values, tmp_path, affine=None, part=None, **options):
    """The slice in thousandths, as its window 500, 1000 makes it unless another one is asked."""
    path = write_nifti(tmp_path / "v.nii.gz", values, affine)
    asked = ReadOptions(**({"window": (500.0, 1000.0)} | options))
    form, picture = (
        scans.probe_volume([path], "here", asked),
        scans.read_volume([path], "here", asked, part),
    )
    assert (
        picture.shape == (form.height, form.width, 1)
        and picture.dtype == np.float32
        and form.deep
    )
    return picture[..., 0] * 1000


# Where things are


def test_a_slice_is_axial_with_the_front_above_and_the_right_on_the_left(tmp_path):
    """Of 5 slices the middle one is z = 2; the first row is the front, y = 3, the first column the right, x = 5."""
    made = slice_of(volume(), tmp_path)
    rows, columns = np.indices((4, 6))
    near(made, 100 * (5 - columns) + 10 * (3 - rows) + 2, 1e-2)


@pytest.mark.parametrize("axes", ["LPS", "RAS", "PIR", "SLA"])
def test_whatever_the_file_s_axes(tmp_path, axes):
    """The same patient, stored along other axes, is the same picture."""
    turning = nibabel.orientations
    wanted = turning.axcodes2ornt(axes)
    ras = nibabel.Nifti1Image(volume(), np.diag([1.0, 2.0, 3.0, 1.0]))
    stored = ras.as_reoriented(
        turning.ornt_transform(turning.io_orientation(ras.affine), wanted)
    )
    made = slice_of(np.asarray(stored.dataobj), tmp_path, stored.affine)
    near(made, slice_of(volume(), tmp_path, ras.affine), 1e-2)
    assert made.shape == (8, 6)  # 2 mm from row to row, 1 mm from column to column


def test_metres_and_micrometres_are_read_as_mm(tmp_path):
    for unit, mm in (("meter", 1e3), ("micron", 1e-3), ("mm", 1), ("unknown", 1)):
        image = nibabel.Nifti1Image(volume(), np.diag([1 / mm, 2 / mm, 3 / mm, 1]))
        image.header.set_xyzt_units(unit)
        image.to_filename(path := tmp_path / "v.nii")
        near(load_nifti(path).affine.diagonal(), [1, 2, 3, 1], 1e-6)


@pytest.mark.parametrize("unit", ["mm", "micron", "meter"])
def test_a_scan_with_a_qform_alone_says_how_the_patient_lies(tmp_path, unit):
    image = nibabel.Nifti1Image(volume(), np.eye(4))
    image.set_qform(image.affine, 1)
    image.set_sform(image.affine, 0)
    image.header.set_xyzt_units(unit)
    image.to_filename(path := tmp_path / "v.nii")
    assert says_how_it_lies(load_nifti(path))


def test_dicom_and_nifti_of_one_patient_are_one_picture(tmp_path):
    """A DICOM slice with row i along the back and column j along the left is where NIfTI's (-x, -y) is."""
    pixels = np.arange(24, dtype=np.uint16).reshape(4, 6)
    seen = dicom.READER.read(
        sample_at(write_dicom(tmp_path / "IM", pixels)), ReadOptions(window=(500, 1000))
    )[..., 0]
    # Voxel (column, row): left and back are negative in RAS
    as_converters_write = np.diag([-1.0, -1.0, 1.0, 1.0])
    near(slice_of(pixels.T[:, :, None], tmp_path, as_converters_write), seen * 1000, 1e-2)


def test_several_slices(tmp_path):
    """Three of 9: the middles of three equal parts, 1, 4, 7."""
    assert (
        slices_taken(9, 3) == [1, 4, 7]
        and slices_taken(5, 1) == [2]
        and slices_taken(4, 1) == [2]
        and slices_taken(2, 9) == [0, 1]
    )
    for i in range(10):
        write_nifti(
            tmp_path / f"{i}.nii",
            np.broadcast_to(np.arange(9, dtype=np.int16) * 100 + i, (4, 4, 9)),
        )
    (tmp_path / "l.csv").write_text(
        "file,label\n" + "".join(f"{i}.nii,{i % 2}\n" for i in range(10))
    )
    data = imported(tmp_path / "l.csv", slices=3, window=(500, 1000)).data
    values = [{round(float(x.flat[0]) * 1000) for x in part.x} for part in splits_of(data)]
    assert sorted(set.union(*values)) == sorted(
        100 * z + i for z in (1, 4, 7) for i in range(10)
    )
    # All slices of a volume are in one split.
    volumes = [{value % 10 for value in part} for part in values]
    assert [len(v) for v in volumes] == [6, 2, 2] and len(set.union(*volumes)) == 10


def test_the_first_of_a_series_in_time(tmp_path):
    values = np.stack([volume(), volume() * 0], axis=3)
    assert_allclose(slice_of(values, tmp_path), slice_of(volume(), tmp_path))


# Values


def test_percentiles_of_the_whole_volume(tmp_path):
    """0 to 1000 in steps of 1: the 0.5th percentile is 5, the 99.5th 995; what is no number is 0."""
    values = np.arange(1001.0, dtype=np.float32).reshape(7, 11, 13)
    made = slice_of(values, tmp_path, part=0, window=None) / 1000
    stored = values[::-1, ::-1, 0].T
    near(made, np.clip((stored - 5) / 990, 0, 1), 1e-5)
    values[0, 0, 0] = np.nan
    assert np.isfinite(slice_of(values, tmp_path, part=0, window=None)).all()
    assert slice_of(np.full((3, 3, 3), 7.0), tmp_path, window=None).max() == 0


def test_the_file_s_own_slope_and_intercept(tmp_path):
    path = write_nifti(tmp_path / "v.nii", volume())
    image: Any = nibabel.load(path)
    scaled = nibabel.Nifti1Image(volume(), np.eye(4), image.header)
    scaled.header.set_slope_inter(0.5, 100)
    nibabel.save(scaled, path)
    image = nibabel.load(path)
    raw = np.asarray(image.dataobj)
    made = scans.read_volume([path], "here", ReadOptions(window=(500, 1000)), 2)[..., 0] * 1000
    near(made, np.clip(raw[::-1, ::-1, 2].T, 0, 1000), 1e-2)
    assert raw.max() > volume().max() / 2


# Masks


def test_masks_lie_on_their_volumes(tmp_path):
    """x < i in volume i: the mask's columns on the right, for x grows to the patient's right, on the left here."""
    made = imported(ten_volumes(tmp_path, mask=True), window=(500, 1000))
    assert made.data.task == "segmentation" and made.data.classes == 2
    for part in splits_of(made.data):
        for x, y in zip(part.x, part.y, strict=True):
            i = round(float(x[0, 0, 0]) * 10)
            assert_array_equal(y, np.broadcast_to(np.arange(6)[::-1] < i, (4, 6)))
    made = imported(tmp_path / "list.csv", size=3, slices=2)
    assert made.data.train.y.shape == (12, 3, 3)


@pytest.mark.parametrize(
    "mask, affine, words",
    [
        (np.zeros((6, 4, 4), np.uint8), None, "its mask does not lie on its volume"),
        (
            np.zeros((6, 4, 5), np.uint8),
            np.diag([1, 1, 2, 1]),
            "its mask does not lie on its volume",
        ),
        (np.full((6, 4, 5), 0.5, np.float32), None, "its mask has values that are no classes"),
        (np.full((6, 4, 5), 300, np.int16), None, "its mask has values that are no classes"),
    ],
)
def test_bad_masks(tmp_path, mask, affine, words):
    source = ten_volumes(tmp_path, mask=True)
    write_nifti(tmp_path / "mask-Zarathustra-3.nii.gz", mask, affine)
    fails(ValueError, f"list.csv, line 5: {words}", imported, source)


def test_a_mask_may_be_a_picture(tmp_path):
    source = ten_volumes(tmp_path, mask=True)
    Image.new("L", (6, 4), 1).save(tmp_path / "m.png")
    source.write_text(
        "file,mask\n" + "".join(f"Zarathustra-{i}.nii.gz,m.png\n" for i in range(10))
    )
    assert (imported(source).data.train.y == 1).all()


# Nobody is named


@pytest.mark.parametrize("mask", [False, True])
def test_nobody_is_named_in_any_output(tmp_path, capfd, caplog, mask):
    """Not what a header says (descrip, aux_file, db_name, intent_name, extensions), nor a file's own name."""
    source, out = ten_volumes(tmp_path / "x", mask=mask), tmp_path / "ours.npz"
    raw = write_nifti(tmp_path / "raw.nii", volume()).read_bytes().decode("latin-1")
    assert (
        {"Zarathustra", "19310417", "PAT-4711", "UMPF", "Xylander", "20190823"}
        <= {*leaks(raw)}
        <= {*SECRETS}
    )
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    assert silofl("import", source, "--out", out) == 0
    printed = capfd.readouterr()
    assert leaks(printed.out, printed.err, caplog.text, files=(out,)) == []


def test_cut_files_name_nobody(tmp_path, capfd, caplog):
    source = ten_volumes(tmp_path / "x", ".nii")
    path = tmp_path / "x/Zarathustra-3.nii"
    whole = path.read_bytes()
    for length in (0, 10, 200, 347, 348, 353, 500, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert silofl("import", source, "--out", tmp_path / "ours.npz") == 2
        printed = capfd.readouterr()
        assert leaks(printed.out, printed.err, caplog.text) == [], length
        assert (
            "list.csv, line 5: its file cannot be read as NIfTI" in printed.err
            and "Traceback" not in printed.err
        )
    path.unlink()
    with pytest.raises(
        ValueError,
        match=r"list.csv, line 5: there is no such file; --skip-bad leaves such files out$",
    ):
        imported(source, tmp_path / "ours.npz")


def test_folders_are_classes_only_where_they_are_named(tmp_path):
    """A folder per patient must not become a class."""
    for i in range(10):
        write_nifti(
            tmp_path / "x" / ("ill" if i % 2 else "well") / f"{i}.nii.gz",
            np.full((4, 4, 3), i, np.int16),
        )
    with pytest.raises(ValueError, match="holds NIfTI files and no csv: name them"):
        imported(tmp_path / "x", tmp_path / "a.npz")
    made = imported(tmp_path / "x", tmp_path / "a.npz", labels=("well", "ill"), window=(5, 10))
    for part in (made.data.train, made.data.test):
        assert [round(float(x[0, 0, 0]) * 10) % 2 for x in part.x] == part.y.tolist()
    made.file.unlink()
    (tmp_path / "x/well/2.nii.gz").write_bytes(b"")
    # Ill/ has 5
    with pytest.raises(ValueError, match=r"x, file 7 of 10: its file cannot be read as NIfTI"):
        imported(tmp_path / "x", tmp_path / "a.npz", labels=("well", "ill"))
    write_nifti(tmp_path / "x/Zarathustra/a.nii", volume())
    with pytest.raises(ValueError, match="x has 1 folders besides well, ill"):
        imported(tmp_path / "x", tmp_path / "a.npz", labels=("well", "ill"))


# Faults


def test_what_is_no_volume(tmp_path):
    for values in (np.zeros((4, 4), np.int16), np.zeros((4, 4, 3, 2, 2), np.int16)):
        path = write_nifti(tmp_path / "v.nii", values)
        with pytest.raises(ValueError, match="here: its file is no volume of grey values"):
            scans.probe_volume([path], "here", ReadOptions())
    refused(path, "is one scan; name the folder that it lies in, or a csv")


def test_one_line_where_the_library_is_missing(tmp_path, monkeypatch):
    source = ten_volumes(tmp_path)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    refused(source, "a volume is read with nibabel, which is not installed here: pip install")


def test_a_format_is_recognised_by_its_first_bytes(tmp_path):
    """Whatever its name says: DICOM called NIfTI is read as DICOM, NIfTI without its ending is named as such."""
    picture = np.arange(64, dtype=np.int16).reshape(8, 8)
    write_dicom(tmp_path / "a.dcm", picture)
    (tmp_path / "b.nii").write_bytes((tmp_path / "a.dcm").read_bytes())
    one, other = (
        SampleSource("here", (), "", "", file=tmp_path / name) for name in ("a.dcm", "b.nii")
    )
    assert_array_equal(
        registry.read_sample(other, ReadOptions()), registry.read_sample(one, ReadOptions())
    )
    for name, packed in (("c", ".nii"), ("d", ".nii.gz")):
        write_nifti(tmp_path / f"{name}{packed}", volume())
        (tmp_path / f"{name}{packed}").rename(tmp_path / f"{name}.dat")
        assert registry.kind_of(tmp_path / f"{name}.dat") == "nifti"
        source = write_lines(tmp_path / "l.csv", "file,label", f"{name}.dat,0")
        refused(source, "line 2: it is NIfTI by its first bytes: let its name end in .nii")
    (tmp_path / "e.nii").write_bytes(b"no volume")
    assert registry.kind_of(tmp_path / "e.nii") == "nifti"  # damaged, and never named
