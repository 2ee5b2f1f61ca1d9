"""Files as folders have them: taken, passed over with a count, left out by --skip-bad, or refused; never lost."""

from __future__ import annotations

import os
from typing import Any

import nibabel
import numpy as np
import pytest
from failing import fails
from PIL import Image
from scans import leaks, write_dicom, write_nifti
from taken import imported, silofl, splits_of

from partitions.common.errors import DataError
from partitions.importing import collect
from partitions.importing.files import Faults
from partitions.importing.options import Take
from partitions.importing.readers import registry
from partitions.importing.readers.pictures import is_picture
from partitions.importing.readers.reader import SampleSource
from partitions.recipes.reading import ReadOptions

NOBODY = Take(patient=None)


def picture(path, value=0, mode="L", **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (4, 4), value).save(path, **how)
    return path


def classes(root, ending=".png", form="PNG"):
    for i in range(30):
        picture(
            root / "abc"[i % 3] / f"{i:02}{ending if i % 3 == 2 else '.png'}",
            i,
            format=form if i % 3 == 2 else "PNG",
        )
    return root


def made_of(root, tmp_path, *, skip=False, **options):
    own: dict[str, Any] = {"take": NOBODY, "overwrite": True} | options
    return imported(root, tmp_path / "o.npz", faults=Faults(skip), **own)


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_folders_of_classes_are_no_numbers(tmp_path, task):
    reason = f"task = {task} needs one label column"
    fails(DataError, reason, made_of, classes(tmp_path / "x"), tmp_path, task=task)


def count(made):
    return sum(len(part) for part in splits_of(made.data))


def remarks(path):
    return registry.probe_sample(
        SampleSource("here", (), "", "", file=path), ReadOptions()
    ).notes


@pytest.mark.parametrize(
    "ending, form",
    [(".jfif", "JPEG"), (".JP2", "JPEG2000"), (".PNG", "PNG"), (".avif", "AVIF"), ("", "PNG")],
)
def test_endings_of_pictures(tmp_path, ending, form):
    made = made_of(classes(tmp_path / "x", ending, form), tmp_path)
    assert made.label_names == ("a", "b", "c") and count(made) == 30
    # AVIF of so few pixels makes two pictures one
    assert [note for note in made.notes if "have the same picture" not in note] == []


def test_a_class_without_a_picture_is_refused_or_named(tmp_path):
    root = classes(tmp_path / "x", ".raw")
    with pytest.raises(
        ValueError,
        match=r"x/c: its 10 files are no pictures \(10 \.raw\): convert them, or take it out",
    ):
        made_of(root, tmp_path)
    made = made_of(root, tmp_path, skip=True)
    assert (
        made.label_names == ("a", "b")
        and "10 of 30 files are passed over: 10 .raw" in made.notes
    )
    assert any("x/c: its 10 files are no pictures" in note for note in made.notes)


def test_what_is_passed_over_is_counted(tmp_path):
    root = classes(tmp_path / "x")
    picture(root / "beside.png")
    for name in (
        "a/Thumbs.db",
        "a/.DS_Store",
        "__MACOSX/a/._00.png",
        ".cache/1.png",
        "a/notes.txt",
        "LICENSE",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    (root / "b/loop").symlink_to(root)
    (root / "b/gone.png").symlink_to(root / "nothing.png")
    made = made_of(root, tmp_path)
    assert count(made) == 30 and made.notes == (
        "7 of 37 files are passed over: 1 .png, 1 .txt, 4 hidden or of the system, 1 without an ending",
        "2 links to folders, or to nothing, are passed over",
    )


def test_pictures_that_a_csv_does_not_list_are_counted(tmp_path):
    root = tmp_path / "x"
    for i in range(20):
        picture(root / f"{i}.png", i)
    (root / "l.csv").write_text(
        "file,label\n" + "".join(f"{i}.png,{i % 2}\n" for i in range(18))
    )
    assert "2 of 21 files are passed over: 2 .png" in made_of(root, tmp_path).notes
    # A list that the user names may be of a part
    assert made_of(root / "l.csv", tmp_path).notes == ()


def damaged(root):
    """One file that the header shows, one that its pixels show, an empty one, and one that is of another kind."""
    cut = picture(root / "a/90.jpg")
    cut.write_bytes(cut.read_bytes()[:-40])
    (root / "a/91.png").write_bytes(b"")
    (root / "b/92.png").write_bytes(b"nothing")
    picture(root / "b/93.tif", mode="F")
    return ["90.jpg", "91.png cannot be read (it is empty)", "92.png", "93.tif"]


def test_skip_bad_leaves_out_with_a_count_and_a_list(tmp_path, capsys):
    root = classes(tmp_path / "x")
    usual = made_of(root, tmp_path).file.read_bytes()
    names = damaged(root)
    with pytest.raises(
        ValueError, match=r"4 of 34 files cannot be read: .*--skip-bad leaves such files out"
    ):
        made_of(root, tmp_path)
    assert (
        silofl(
            "import",
            root,
            "--no-patient",
            "--skip-bad",
            "--overwrite",
            "--out",
            tmp_path / "o.npz",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "note: 4 files cannot be read: left out (--skip-bad)\n" in said
    assert all(sum(name in line for line in said.splitlines()) == 1 for name in names)
    assert (tmp_path / "o.npz").read_bytes() == usual


def test_files_that_only_their_pixels_show_to_be_bad_are_all_named(tmp_path):
    root = classes(tmp_path / "x")
    for name in ("a/90.jpg", "b/91.jpg"):
        cut = picture(root / name)
        cut.write_bytes(cut.read_bytes()[:-40])
    with pytest.raises(
        ValueError, match=r"2 of 32 files cannot be read: .*9[01]\.jpg.*9[01]\.jpg"
    ):
        made_of(root, tmp_path)
    assert not (tmp_path / "o.npz").exists()


def test_a_class_of_bad_files_alone_is_refused(tmp_path):
    root = classes(tmp_path / "x")
    for path in (root / "c").iterdir():
        path.write_bytes(b"")
    fails(ValueError, "no file of class c can be read", made_of, root, tmp_path, skip=True)


def test_a_file_that_vanishes_writes_nothing(tmp_path, monkeypatch):
    root, look = classes(tmp_path / "x"), collect.probe_all

    def then_gone(*args):
        found = look(*args)
        (root / "a/00.png").unlink()
        return found

    monkeypatch.setattr(collect, "probe_all", then_gone)
    with pytest.raises(ValueError, match=r"00\.png cannot be read \(there is no such file\)"):
        made_of(root, tmp_path, skip=True)
    assert not (tmp_path / "o.npz").exists()


def test_skip_bad_of_scans(tmp_path):
    root = tmp_path / "x"
    for i in range(12):
        write_dicom(root / f"{i:02}", np.full((4, 6), i, np.uint16), study=i, patient=f"P{i}")
    (root / "03").write_bytes((root / "03").read_bytes()[:400])
    (root / "Doe.dcm").write_bytes(b"")
    write_dicom(root / "05", study=5, patient="P5", PixelRepresentation=None)
    (tmp_path / "l.csv").write_text(
        "patient,label\n" + "".join(f"P{i},{'ab'[i % 2]}\n" for i in range(12))
    )
    options = {"labels_from": tmp_path / "l.csv", "take": Take(), "labels": ["a", "b"]}
    said = fails(
        ValueError,
        "file 13 of 13: it is called like a DICOM file and is none",
        made_of,
        root,
        tmp_path,
        **options,
    )
    made = made_of(root, tmp_path, skip=True, **options)
    assert count(made) == 10 and "2 files cannot be read: left out (--skip-bad)" in made.notes
    assert leaks(said, *made.notes) == [] and "Doe" not in "".join(made.notes)


def test_skip_bad_is_not_of_a_table(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    with pytest.raises(ValueError, match="--skip-bad is of pictures and scans"):
        made_of(tmp_path / "t.csv", tmp_path, skip=True)


SEVERAL = "have several frames or pages: the first is taken"
CLEAR = "have transparency: it is dropped, and what lies below it is seen"


@pytest.mark.parametrize(
    "name, mode, how, said",
    [
        ("x.png", "L", {}, ()),
        ("x.gif", "L", {"frames": True}, (SEVERAL,)),
        ("x.png", "L", {"frames": True}, (SEVERAL,)),
        ("x.webp", "RGB", {"frames": True}, (SEVERAL,)),
        ("x.tif", "L", {"frames": True}, (SEVERAL,)),
        ("x.tif", "L", {"frames": True, "big_tiff": True}, (SEVERAL,)),
        ("x.png", "RGBA", {}, (CLEAR,)),
        ("x.png", "LA", {}, (CLEAR,)),
        ("x.png", "P", {"transparency": 0}, (CLEAR,)),
        (
            "x.jpg",
            "CMYK",
            {},
            ("are CMYK, as for print: Pillow makes red, green and blue of it",),
        ),
    ],
)
def test_what_is_not_taken_of_a_picture_is_said(tmp_path, name, mode, how, said):
    if how.pop("frames", False):
        how |= {"save_all": True, "append_images": [Image.new(mode, (4, 4), 9)]}
    assert remarks(picture(tmp_path / name, 0, mode, **how)) == said


def test_sixteen_bits_of_a_colour_are_named(tmp_path):
    """Pillow writes none: the header and the pixels of a PNG of 1 x 1 by hand."""
    import struct
    import zlib

    def chunk(name, content):
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    content = (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(7)))
        + chunk(b"IEND", b"")
    )
    (tmp_path / "x.png").write_bytes(content)
    assert remarks(tmp_path / "x.png") == (
        "have 16 bits for each colour: the upper 8 are taken",
    )


def test_white_may_be_zero_in_a_tiff_of_16_bits(tmp_path):
    values = np.array([[0, 65535], [13107, 26214]], np.uint16)
    Image.fromarray(values).save(tmp_path / "x.tif", tiffinfo={262: 0})
    made = registry.read_sample(
        SampleSource("here", (), "", "", file=tmp_path / "x.tif"), ReadOptions()
    )
    assert np.array_equal(made[..., 0].astype(float).round(6), np.array([[1, 0], [0.8, 0.6]]))


def test_kinds_of_pixels_that_are_not_converted_are_refused_at_once(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"x\.tif cannot be read \(its pixels are of a kind that is not read \(LAB\)",
    ):
        remarks(picture(tmp_path / "x.tif", mode="LAB"))


def test_a_file_is_no_picture_by_another_program_s_format(tmp_path):
    """Pillow starts Ghostscript for one."""
    (tmp_path / "x").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"
    )
    os.link(tmp_path / "x", tmp_path / "x.png")
    assert not is_picture(tmp_path / "x")
    fails(ValueError, "it is no picture", remarks, tmp_path / "x.png")


def nifti(tmp_path, shape, **options):
    for i in range(10):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + i
        write_nifti(tmp_path / "x" / "ab"[i % 2] / f"{i}.nii.gz", values)
    return made_of(tmp_path / "x", tmp_path, labels=["a", "b"], **options)


@pytest.mark.parametrize(("unit", "scale"), [("mm", 1), ("meter", 1000)])
def test_scans_that_do_not_say_how_the_patient_lies_are_counted(tmp_path, unit, scale):
    """Without qform and sform codes nibabel guesses from the sides, whatever the unit."""
    usual = nifti(tmp_path / "usual", (4, 5, 6), volume=(4, 5, 6))
    assert not any("how the patient lies" in note for note in usual.notes)
    for i in range(10):
        image = nibabel.Nifti1Image(np.random.default_rng(i).random((4, 5, 6)), None)
        image.header.set_zooms(np.ones(3) / scale)
        image.header.set_xyzt_units(unit)
        (folder := tmp_path / "x" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        image.to_filename(folder / f"{i}.nii.gz")
    made = made_of(tmp_path / "x", tmp_path, labels=["a", "b"], volume=(4, 5, 6))
    assert any(
        "10 of 10 pictures do not say how the patient lies" in note for note in made.notes
    )


@pytest.mark.parametrize("behind", [(1,), (1, 1)])
@pytest.mark.parametrize("options", [{"volume": (4, 4, 4)}, {}])
def test_axes_of_length_one_behind_a_volume(tmp_path, behind, options):
    usual = nifti(tmp_path / "3d", (4, 5, 6), **options)
    made = nifti(tmp_path / "4d", (4, 5, 6, *behind), **options)
    assert made.notes == usual.notes
    assert all(
        (a.x == b.x).all()
        for a, b in ((made.data.train, usual.data.train), (made.data.test, usual.data.test))
    )


def test_the_first_of_several_times_and_the_middle_slice_are_named(tmp_path):
    assert nifti(tmp_path, (4, 5, 6, 2)).notes[:2] == (
        "10 volumes have several slices: the middle one is taken (--slices)",
        "10 of 10 pictures have several times or channels: the first is taken",
    )
    with pytest.raises(
        ValueError, match="its file is no volume of grey values, but 4 x 5 x 6 x 1 x 3"
    ):
        nifti(tmp_path, (4, 5, 6, 1, 3))
