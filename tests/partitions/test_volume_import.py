"""`silofl import --volume`: DICOM series and NIfTI on one grid, outlines, and one line for what is no volume."""

from __future__ import annotations

import tracemalloc
from typing import Any

import highdicom
import numpy as np
import pydicom
import pytest
from failing import fails
from near import near
from numpy.testing import assert_array_equal
from pydicom import Dataset
from pydicom.sequence import Sequence
from scans import leaks, write_dicom, write_nifti
from taken import imported, silofl, splits_of, write_lines
from volumes import AXIAL, SHAPE, box, values, write_rtstruct, write_seg, write_series

from partitions.importing.readers.volumes import volume
from partitions.importing.readers.volumes.grid import RAS, Grid, resample
from partitions.importing.readers.volumes.series import inside, read_series
from partitions.importing.readers.volumes.volume import write_segmentation
from partitions.recipes.reading import ReadOptions
from server.cli.main import main

WINDOW = (500.0, 1000.0)


def read(files, **options):
    wish = ReadOptions(**({"volume": SHAPE, "window": WINDOW} | options))
    info = volume.probe_volume(files, "here", wish)
    made = volume.read_volume(files, "here", wish)
    assert made.shape == (*wish.volume, 1) == (info.depth, info.height, info.width, 1)  # type: ignore[misc]
    assert made.dtype == np.float32
    return made[..., 0]


# Where voxels are


def test_a_series_is_stacked_by_its_places(tmp_path):
    """Whatever the files' order and numbers: from feet to head, front to back, the patient's right to the left."""
    near(read(write_series(tmp_path, values())) * 1000, values(), 1e-2)
    near(read(write_series(tmp_path / "b", values(), apart=-3.0))[::-1] * 1000, values(), 1e-2)


def test_nifti_of_the_same_patient_is_the_same_volume(tmp_path):
    """Stored along other axes, as converters do: i to the right, k from head to feet."""
    series = write_series(tmp_path / "s", values())
    affine = RAS @ read_series(series).grid.affine
    stored = np.transpose(values(), (2, 1, 0))  # (column, row, slice)
    columns = affine[:, [2, 1, 0, 3]]
    path = write_nifti(tmp_path / "v.nii.gz", stored.astype(np.int16), columns)
    near(read([path]), read(series))
    turned = columns.copy()
    turned[:3, 3] += turned[:3, 2] * (SHAPE[0] - 1)
    turned[:3, 2] *= -1
    path = write_nifti(tmp_path / "w.nii", stored[:, :, ::-1].astype(np.int16), turned)
    near(read([path]), read(series))


@pytest.mark.parametrize(
    "directions, plane",
    [([0, 1, 0, 0, 0, -1], "sagittal"), ([1, 0, 0, 0, 0, -1], "coronal"), (AXIAL, "axial")],
)
def test_other_planes_get_the_same_axes(tmp_path, directions, plane):
    """A cube of 2 mm whose voxels say where they are, cut along other planes."""
    row, column = np.array(directions, float).reshape(2, 3)
    normal = np.cross(row, column)
    grid = np.indices((6, 6, 6))
    places = sum(
        2.0 * g[..., np.newaxis] * axis
        for g, axis in zip(grid, (normal, column, row), strict=True)
    )
    # X, y, z of the patient
    stored = (places @ np.array([1.0, 10.0, 50.0]) + 600).astype(np.uint16)
    files = []
    for k in range(6):
        plane_at = {
            "ImageOrientationPatient": directions,
            "ImagePositionPatient": (2.0 * k * normal).tolist(),
        }
        files.append(
            write_dicom(
                tmp_path / f"{k}", stored[k], number=k + 1, PixelSpacing=[2, 2], **plane_at
            )
        )
    made = read(files, volume=(6, 6, 6), window=(600, 2000)) * 2000 - 400
    near(np.diff(made, axis=0), 100, 0.1)  # 2 mm to the head
    near(np.diff(made, axis=1), 20, 0.1)  # to the back
    near(np.diff(made, axis=2), 2, 0.1)  # to the left
    assert read_series(files).acquired.plane == plane


def test_an_enhanced_file_of_frames(tmp_path):
    """One file; places, orientation and spacing in functional groups, frames in another order."""

    def item(**own):
        made = Dataset()
        for keyword, value in own.items():
            setattr(made, keyword, value)
        return made

    order = [3, 0, 5, 1, 4, 2]
    shared = item(
        PixelMeasuresSequence=Sequence([item(PixelSpacing=[2.0, 1.0])]),
        PlaneOrientationSequence=Sequence([item(ImageOrientationPatient=AXIAL)]),
    )
    frames = [
        item(PlanePositionSequence=Sequence([item(ImagePositionPatient=[0.0, 0.0, 3.0 * k])]))
        for k in order
    ]
    groups: dict[str, Any] = {
        "SharedFunctionalGroupsSequence": [shared],
        "PerFrameFunctionalGroupsSequence": frames,
    }
    path = write_dicom(tmp_path / "IM", values()[order], NumberOfFrames=6, **groups)
    near(read([path]) * 1000, values(), 1e-2)


def test_spacing_cuts_and_widens_about_the_centre(tmp_path):
    """Voxels of 3 x 2 x 1 mm: with the same spacing and 4 x 4 x 12 voxels the middle, and black beside it."""
    files = write_series(tmp_path, values() + 1)
    made = read(files, volume=(4, 4, 12), voxel=(3.0, 2.0, 1.0)) * 1000
    near(made[:, :, 2:10], (values() + 1)[1:5, 2:6], 1e-2)
    assert made[:, :, :2].max() == made[:, :, 10:].max() == 0
    halved = read(files, volume=(3, 4, 4), voxel=(6.0, 4.0, 2.0))
    assert abs(halved[1, 1, 1] * 1000 - (values() + 1)[2:4, 2:4, 2:4].mean()) < 0.1


def test_without_a_window_by_percentiles_without_the_padding(tmp_path):
    voxels = values().astype(np.int16)
    voxels[0] = -2000
    files = write_series(tmp_path, voxels, PixelPaddingValue=-2000, BitsStored=16, HighBit=15)
    made, seen = read(files, window=None), voxels[1:]
    low, high = np.percentile(seen, (0.5, 99.5))
    near(made[1:], np.clip((seen - low) / (high - low), 0, 1), 1e-5)
    assert made[0].max() == 0


def test_rescaling_slice_by_slice_and_inversion(tmp_path):
    files = write_series(tmp_path, values(), RescaleSlope=2, RescaleIntercept=-100)
    near(read(files, window=(500, 4000)), (2.0 * values() - 100 + 1500) / 4000, 1e-5)
    files = write_series(tmp_path / "b", values(), PhotometricInterpretation="MONOCHROME1")
    near(
        read(files, window=None),
        1 - read(write_series(tmp_path / "c", values()), window=None),
        1e-4,
    )
    rescaled: dict[str, Any] = {
        "RescaleSlope": 2,
        "RescaleIntercept": -100,
        "PhotometricInterpretation": "MONOCHROME1",
    }
    files = write_series(tmp_path / "d", values(), **rescaled)
    near(read(files, window=(500, 4000)), 1 - (2.0 * values() - 100 + 1500) / 4000, 1e-5)
    files = write_series(
        tmp_path / "e",
        values() + 1,
        PhotometricInterpretation="MONOCHROME1",
        PixelPaddingValue=1,
    )
    made = read(files, window=(500, 4000))
    # Padding is black all the same
    assert made[0, 0, 0] == 0 and abs(made[0, 0, 1] - (1 - (2 + 1500) / 4000)) < 1e-5


# What is no volume


def damaged(tmp_path, what):
    files = write_series(tmp_path, values())
    slice_3: dict[str, Any] = {
        "ImagePositionPatient": [-10.0, -20.0, 39.0],
        "PixelSpacing": [2.0, 1.0],
        "ImageOrientationPatient": AXIAL,
    }

    def again(**attributes):
        write_dicom(files[3], values()[3], number=4, **(slice_3 | attributes))

    if what == "gap":
        files[3].unlink()
        del files[3]
    elif what == "twice":
        again(ImagePositionPatient=[-10.0, -20.0, 36.0])
    elif what == "localiser":
        again(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])
    elif what == "size":
        write_dicom(files[3], values()[3][:4], number=4, **slice_3)
    elif what == "spacing":
        again(PixelSpacing=[2.0, 1.1])
    elif what == "nowhere":
        again(ImagePositionPatient=None)
    elif what == "one":
        files = files[:1]
    elif what == "inverted":
        again(PhotometricInterpretation="MONOCHROME1")
    elif what == "colour":
        write_dicom(files[3], np.zeros((8, 8, 3), np.uint8), number=4, **slice_3)
    elif what == "tilted":
        for k, path in enumerate(files):
            place = [-10.0, -20.0 + 1.5 * k, 30.0 + 3.0 * k]
            write_dicom(
                path, values()[k], number=k + 1, **(slice_3 | {"ImagePositionPatient": place})
            )
    return files


@pytest.mark.parametrize(
    "what, words",
    [
        ("gap", "slices 3 and 4 of 5 lie 6 mm apart, others 3: one is missing"),
        ("twice", "slices 3 and 4 lie at one place: several times or echoes"),
        ("localiser", "slices have several orientations"),
        ("size", "slices have several sizes"),
        ("spacing", "slices have several sizes"),
        ("nowhere", "a slice does not say where it lies"),
        ("one", "its series has one slice"),
        ("colour", "its slices are in colour"),
        ("inverted", "its slices are MONOCHROME1 and MONOCHROME2"),
        ("tilted", "slices are shifted in their planes"),
    ],
)
def test_what_is_no_volume_is_one_line(tmp_path, what, words):
    files = damaged(tmp_path, what)
    said = fails(
        ValueError,
        words,
        volume.probe_volume,
        files,
        "x, file 1 of 6",
        ReadOptions(volume=SHAPE),
    )
    assert said.startswith("x, file 1 of 6: ")


def test_nifti_that_is_no_volume(tmp_path):
    sheared = np.eye(4)
    sheared[0, 1] = 0.3
    for values_, affine, words in (
        (np.zeros((4, 4, 4, 2), np.int16), np.eye(4), "a series in time"),
        (np.zeros((4, 4, 4), np.int16), sheared, "its axes are not at right angles"),
    ):
        path = write_nifti(tmp_path / "v.nii", values_, affine)
        fails(ValueError, words, volume.probe_volume, [path], "here", ReadOptions(volume=SHAPE))


# Outlines


def mask_of(files, objects, *names, **options):
    wish = ReadOptions(**({"volume": SHAPE, "outlines": names} | options))
    return volume.read_volume_mask(files, objects, "here", wish)


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL"])
def test_a_seg_object(tmp_path, kind):
    """Two segments; where they overlap the later name counts, in whatever order the object has them."""
    files, core = write_series(tmp_path, values()), np.zeros(SHAPE, bool)
    core[2, 3:5, 4:6] = True
    path = write_seg(tmp_path / "seg", files, {"Core": core, "Liver ": box()}, kind)
    assert_array_equal(mask_of(files, [path], "liver", "core"), box() + core.astype(np.uint8))
    assert_array_equal(mask_of(files, [path], "core", "liver"), np.where(box(), 2, 0))
    assert_array_equal(mask_of(files, [path], "liver", "spleen?"), box())
    with pytest.raises(
        ValueError,
        match=r"its 2 outlines have none called 'spleen'; if a patient may have none",
    ):
        mask_of(files, [path], "liver", "spleen")


def test_highdicom_s_own_seg_is_read(tmp_path):
    """An object of the library that many programs use, also as a label map."""
    files = write_series(tmp_path, values())
    write_segmentation(
        tmp_path / "seg.dcm", files, box().astype(np.uint8), ("background", "liver"), "here"
    )
    assert highdicom.seg.segread(tmp_path / "seg.dcm").number_of_segments == 1
    assert_array_equal(mask_of(files, [tmp_path / "seg.dcm"], "LIVER"), box())


def test_a_label_map(tmp_path, monkeypatch):
    """The newer kind of SEG, whose pixels are numbers of segments."""
    made = highdicom.seg.Segmentation

    def label_map(*, segmentation_type, **others):
        return made(segmentation_type="LABELMAP", **others)

    monkeypatch.setattr(highdicom.seg, "Segmentation", label_map)
    files, mask = write_series(tmp_path, values()), box().astype(np.uint8)
    mask[2, 3, 4] = 2
    write_segmentation(
        tmp_path / "seg.dcm", files, mask, ("background", "liver", "core"), "here"
    )
    assert pydicom.dcmread(tmp_path / "seg.dcm").SegmentationType == "LABELMAP"
    assert_array_equal(mask_of(files, [tmp_path / "seg.dcm"], "liver", "core"), mask)


def test_rtstruct_contours_with_a_hole(tmp_path):
    """Corners half a pixel around rows 2..5 and columns 3..6 of slice 1; within it a contour around one voxel."""
    files = write_series(tmp_path, values())

    def square(z, rows, columns):
        corners = [
            (rows[0], columns[0]),
            (rows[0], columns[1]),
            (rows[1], columns[1]),
            (rows[1], columns[0]),
        ]
        return np.array([[-10 + c, -20 + 2 * r, 30 + 3 * z] for r, c in corners])

    outer, hole = square(1, (1.5, 5.5), (2.5, 6.5)), square(1, (2.5, 3.5), (3.5, 4.5))
    path = write_rtstruct(
        tmp_path / "rt",
        files,
        {"GTV": [outer, hole], "PTV": [square(2, (0.5, 1.5), (0.5, 1.5))]},
    )
    wanted = np.zeros(SHAPE, np.uint8)
    wanted[1, 2:6, 3:7] = 1
    wanted[1, 3, 4] = 0
    wanted[2, 1, 1] = 2
    assert_array_equal(mask_of(files, [path], "gtv", "ptv"), wanted)
    between = write_rtstruct(tmp_path / "rt2", files, {"GTV": [outer + np.array([0, 0, 1.5])]})
    with pytest.raises(
        ValueError, match="its outlines do not lie on the slices of their series"
    ):
        mask_of(files, [between], "gtv")


def test_a_polygon_s_pixels():
    """A triangle with its corners at rows and columns (-0.2, -0.2), (-0.2, 6.4), (6.4, -0.2): row + column < 6.2."""
    rows, columns = np.indices((8, 8))
    made = inside(np.array([-0.2, -0.2, 6.4]), np.array([-0.2, 6.4, -0.2]), (8, 8))
    assert_array_equal(made, rows + columns <= 6)


def test_outlines_of_another_series_are_refused(tmp_path):
    files = write_series(tmp_path / "a", values())
    other = write_series(tmp_path / "b", values(), apart=4.0)
    path = write_seg(tmp_path / "seg", other, {"liver": box()})
    fails(ValueError, "its outlines do not lie on the slices", mask_of, files, [path], "liver")


def test_a_mask_goes_back_to_its_source(tmp_path):
    """Mask -> import -> back at the source's geometry: equal where the grid has as many voxels, or more."""
    files = write_series(tmp_path, values(), apart=-3.0)
    path = write_seg(tmp_path / "seg", files, {"liver": box()})
    for volume_of in (SHAPE, (12, 16, 24)):
        wish = ReadOptions(volume=volume_of, outlines=("liver",))
        made = volume.read_volume_mask(files, [path], "here", wish)
        back, grid = volume.as_source(made, files, "here", wish)
        assert grid.shape == SHAPE
        assert_array_equal(back, box())
    coarse = ReadOptions(volume=(3, 4, 4), outlines=("liver",))
    back, _ = volume.as_source(
        volume.read_volume_mask(files, [path], "here", coarse), files, "here", coarse
    )
    overlap = 2 * (back.astype(bool) & box()).sum() / (back.sum() + box().sum())
    assert overlap > 0.6  # a box of 3 x 4 x 4 voxels, on a grid half as fine


def test_resampling_turns_back_whatever_the_axes():
    rng = np.random.default_rng(0)
    affine = np.array([[0, 0, 2.0, 5], [0.1, -1.5, 0, 6], [-3, -0.05, 0, 7], [0, 0, 0, 1]])
    for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0)):
        grid = Grid((4, 5, 6), affine[:, [*order, 3]])
        voxels = rng.random(grid.shape)
        assert_array_equal(grid.turn(grid.turn(voxels), back=True), voxels)
        turned = grid.canonical
        index = np.array([1, 2, 3, 1])
        there = np.linalg.inv(turned.affine) @ grid.affine @ index
        assert grid.turn(voxels)[tuple(np.rint(there[:3]).astype(int))] == voxels[1, 2, 3]
        assert (np.abs(turned.affine[:3, :3]).argmax(0) == (2, 1, 0)).all()
    near(resample(voxels, voxels.shape, np.ones(3)), voxels)


# The whole command


def test_a_folder_of_series_with_outlines(tmp_path, capsys):
    """Five outlined studies; one without outlines is left out and counted; the recipe repeats it; nobody is named."""
    for i in range(6):
        burnt: dict[str, Any] = {"BurnedInAnnotation": "YES" if i == 3 else None}
        files = write_series(tmp_path / "x" / f"{i}", values() + i, study=i, **burnt)
        if i == 0:
            rows, columns = np.array([1.5, 1.5, 5.5, 5.5]), np.array([2.5, 6.5, 6.5, 2.5])
            contours = [
                np.column_stack([columns - 10, 2 * rows - 20, np.full(4, 30 + 3 * z)])
                for z in (1, 2, 3)
            ]
            write_rtstruct(tmp_path / "x/rt", files, {"LIVER": contours})
        elif i < 5:
            write_seg(tmp_path / "x" / f"{i}" / "seg", files, {"Liver": box()})
    out = tmp_path / "a.npz"
    options = "--volume 6,8,8 --spacing 3,2,1 --outlines liver --window=500,1000"
    assert silofl("import", tmp_path / "x", *options.split(), "--out", out) == 0
    printed = capsys.readouterr()
    assert (
        "volumes of 6 x 8 x 8, 1 channel, float32" in printed.out and "1 = liver" in printed.out
    )
    assert (
        "1 of 6 studies have no series with a SEG or RTSTRUCT object: left out" in printed.out
    )
    assert "1 of 5 pictures say that text is burnt into them: look at them" in printed.out
    assert (
        leaks(printed.out, printed.err, (tmp_path / "a.recipe.toml").read_text(), files=(out,))
        == []
    )
    with np.load(out) as npz:
        assert npz["x_train"].shape[1:] == (1, *SHAPE) and npz["y_train"].shape[1:] == SHAPE
        assert (npz["y_train"] == box()).all() and npz["label_names"].tolist() == [
            "background",
            "liver",
        ]
        assert len({*npz["patient_train"], *npz["patient_val"], *npz["patient_test"]}) == 5
    recipe = ["--recipe", str(tmp_path / "a.recipe.toml")]
    assert silofl("import", tmp_path / "x", *recipe, "--out", tmp_path / "b.npz") == 0
    assert (tmp_path / "b.npz").read_bytes() == out.read_bytes()
    write_series(tmp_path / "y/1", values(), study=21)
    assert silofl("import", tmp_path / "y", *recipe, "--out", tmp_path / "c.npz") == 0
    assert (
        "1 samples, without labels, in one part: volumes of 6 x 8 x 8"
        in capsys.readouterr().out
    )
    write_series(tmp_path / "z/1", values(), study=22, apart=20.0)
    assert silofl("import", tmp_path / "z", *recipe, "--out", tmp_path / "d.npz") == 2
    assert (
        "from slice to slice are 20 mm, where the recipe has 2 to 6" in capsys.readouterr().err
    )


def test_volumes_with_a_label(tmp_path):
    """A csv of labels by patient; of two series the one with most slices, or the one that is named."""
    for i in range(6):
        write_series(tmp_path / "x" / f"{i}" / "a", values() + 10 * i, study=i)
        other: dict[str, Any] = {"series": 2, "SeriesDescription": "scout"}
        write_series(tmp_path / "x" / f"{i}" / "b", values()[:3], study=i, **other)
    rows = (f"P{i}-UMPF,{i % 2}\n" for i in range(6))
    (tmp_path / "l.csv").write_text("patient,label\n" + "".join(rows))
    options: dict[str, Any] = {"labels_from": tmp_path / "l.csv", "window": WINDOW}
    made = imported(tmp_path / "x", volume=SHAPE, **options)
    parts = splits_of(made.data)
    found = sorted(
        (round(float(x[0, 0, 0, 0]) * 100), int(y))
        for p in parts
        for x, y in zip(p.x, p.y, strict=True)
    )
    assert found == [(i, i % 2) for i in range(6)] and made.data.task == "multiclass"
    assert made.data.input_shape == (1, *SHAPE)
    made = imported(tmp_path / "x", volume=(3, 8, 8), series="scout", **options)
    near(made.data.train.x[0, ..., 0] * 1000, values()[:3], 1e-2)


def test_a_csv_of_volumes_and_masks(tmp_path):
    """A folder of one series, or a NIfTI file, in the column file; NIfTI masks of both, stored along other axes."""
    lines = ["file,mask,patient"]
    for i in range(6):
        name = f"v{i}.nii"
        if i % 2 == 0:
            name = f"s{i}"
            files = write_series(tmp_path / name, values() + i, study=i)
            affine = (RAS @ read_series(files).grid.affine)[:, [2, 1, 0, 3]]
        else:
            write_nifti(tmp_path / name, (values() + i).T.astype(np.int16), affine)
        write_nifti(tmp_path / f"m{i}.nii", box().T.astype(np.uint8), affine)
        lines.append(f"{name},m{i}.nii,P{i}")
    write_lines(tmp_path / "l.csv", *lines)
    made = imported(tmp_path / "l.csv", volume=SHAPE, window=WINDOW).data
    for part in splits_of(made):
        for x, y in zip(part.x[..., 0], part.y, strict=True):
            assert_array_equal(y, box())
            near(x * 1000 - round(float(x[0, 0, 0]) * 1000), values(), 1e-2)


def test_a_folder_in_a_csv_is_not_named(tmp_path, capsys):
    """Of one series it is a volume; without --volume, or with several series, it is refused by its line."""
    folder = tmp_path / "Zarathustra"
    write_series(folder / "a", values())
    (tmp_path / "l.csv").write_text("file,label\nZarathustra,0\n")
    command = ["import", str(tmp_path / "l.csv"), "--out", str(tmp_path / "a.npz")]
    assert main(command) == 2
    write_series(folder / "b", values(), series=2)
    assert silofl(*command, "--volume", "6,8,8") == 2
    said = capsys.readouterr().err
    assert "line 2: its file is a folder; --volume takes one" in said and leaks(said) == []
    assert "l.csv, line 2: its folder has 2 series; one is a volume, chosen by --series" in said


@pytest.mark.parametrize(
    "options, words",
    [
        (["--volume", "6,8"], "--volume is '6,8'; it is depth, height and width"),
        (["--volume", "6,8,99999"], "a volume has 1 to 4096 voxels on a side"),
        (["--volume", "6,8,8", "--slices", "3"], "--size and --slices are of single slices"),
        (["--spacing", "3,2,1"], "say --volume D,H,W"),
        (["--outlines", "liver"], "say --volume D,H,W"),
        (["--volume", "6,8,8", "--outlines", "a,A"], "--outlines names one twice"),
        (
            ["--volume", "6,8,8", "--outlines", "a"],
            "no study has a series with a SEG or RTSTRUCT object",
        ),
        (
            ["--volume", "6,8,8", "--outlines", "a", "--label", "x"],
            "leave out a csv and its columns",
        ),
        (
            ["--volume", "4096,4096,4096", "--labels", "1"],
            "--volume 4096,4096,4096 would take 549.8 GB of memory",
        ),
        (["--volume", "6,8,8", "--spacing", "x"], "--spacing is 'x'; it is mm"),
    ],
)
def test_bad_options(tmp_path, capsys, options, words):
    write_series(tmp_path / "x/1", values())
    assert silofl("import", tmp_path / "x", *options, "--out", tmp_path / "a.npz") == 2
    assert words in capsys.readouterr().err


def test_memory_does_not_grow_with_the_number_of_volumes(tmp_path):
    """Each becomes 442 kB. Twelve need what four need, but for the rows of the list."""
    voxels = np.random.default_rng(0).normal(size=(48, 48, 48)).astype(np.float32)
    peaks = []
    for count in (1, 4, 12):  # the first one loads libraries
        folder = tmp_path / str(count)
        names = [f"{i}.nii" for i in range(max(count, 4))]
        for name in names:
            write_nifti(folder / name, voxels)
        lines = (f"{name},{i % 2},{i}" for i, name in enumerate(names))
        (folder / "l.csv").write_text("file,label,patient\n" + "\n".join(lines))
        tracemalloc.start()
        imported(folder / "l.csv", tmp_path / f"{count}.npz", volume=(48, 48, 48))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + voxels.nbytes
