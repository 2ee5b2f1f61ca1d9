"""Scans made to do harm: each ends in one clear line, without the memory that it asks for."""

from __future__ import annotations

import gzip
import tracemalloc
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from failing import fails
from numpy.testing import assert_array_equal
from pydicom import Dataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import JPEGLSLossless, RLELossless
from scans import sample_at, write_dicom, write_nifti
from volumes import SHAPE, box, values, write_rtstruct, write_seg, write_series

from partitions.common.errors import DataError
from partitions.importing.readers import dicom
from partitions.importing.readers.volumes import volume
from partitions.importing.readers.volumes.series import referenced_series
from partitions.recipes.reading import ReadOptions

WISH = ReadOptions(volume=SHAPE, window=(500, 1000), outlines=("liver",))
MOST = 64e6  # bytes that a refusal may take


def changed(path, **attributes):
    """The file with attributes that are not true of its pixels."""
    dataset = pydicom.dcmread(path)
    for keyword, value in attributes.items():
        setattr(dataset, keyword, value)
    dataset.save_as(path)
    return path


def refusal(read):
    """The one line in which it ends, within the memory that it may take."""
    tracemalloc.start()
    try:
        said = fails(DataError, None, read)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    text = said
    assert "\n" not in text
    return text


def test_a_header_of_terabytes(tmp_path):
    """Rows and Columns of 65535, in a file of a kilobyte: of one slice, of each of a series, of a SEG object."""
    files = write_series(tmp_path / "s", values())
    for path in files:
        changed(path, Rows=65535, Columns=65535)
    assert "GB of memory" in refusal(lambda: volume.probe_volume(files, "here", WISH))
    assert "GB of memory" in refusal(
        lambda: dicom.READER.read(sample_at(files[0]), ReadOptions())
    )
    series = write_series(tmp_path / "t", values())
    seg = write_seg(tmp_path / "seg", series, {"liver": box()})
    changed(seg, NumberOfFrames=2_000_000_000)
    assert "GB of memory" in refusal(
        lambda: volume.read_volume_mask(series, [seg], "here", WISH)
    )


def test_a_series_that_is_large_in_all(tmp_path, monkeypatch):
    """Each slice is within the limit, the volume is not: nothing is decoded."""
    # 2147 bytes: 6 slices of 8 x 8 voxels take 3072
    monkeypatch.setenv("SILOFL_LARGEST_FILE", "0.000002")
    files = write_series(tmp_path, values())
    small = ReadOptions(volume=(2, 2, 2), window=(500, 1000))
    assert "its volume would take" in refusal(lambda: volume.probe_volume(files, "here", small))


BOMB = (  # of JPEG-LS: a picture of 65535 x 65535
    b"\xff\xd8\xff\xf7\x00\x0b\x10\xff\xff\xff\xff\x01\x01\x11\x00\xff\xda\x00\x08\x01\x01\x00\x00\x00\x00"
    + b"\0" * 100
    + b"\xff\xd9"
)


def encoded(path, syntax, frame):
    """A picture of 8 x 8 pixels, whose one frame is these bytes."""
    return recoded(write_dicom(path, np.zeros((8, 8), np.uint16)), syntax, [frame])


def recoded(path, syntax, frames):
    """The file, whose frames are these bytes."""
    dataset = pydicom.dcmread(path)
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.PixelData = encapsulate(frames)
    dataset["PixelData"].VR = "OB"
    dataset.save_as(path)
    return path


def test_a_bomb_within_a_compressed_frame(tmp_path, monkeypatch):
    """RLE whose runs become 64 times the file, 26 MB here and gigabytes in a larger one; JPEG-LS of 65535 x 65535."""
    header = np.zeros(16, "<u4")
    header[:3] = 2, 64, 64 + 200_000
    runs = b"\x81\x00" * 1_000_000
    path = encoded(tmp_path / "a", RLELossless, header.tobytes() + runs)
    monkeypatch.setenv("SILOFL_LARGEST_FILE", "0.1")
    for read in (dicom.READER.read, dicom.READER.probe):
        assert "its picture, unpacked, would take 0.1 GB" in refusal(
            lambda read=read: read(sample_at(path), ReadOptions())
        )
    assert "unpacked" in refusal(lambda: volume.probe_volume([path, path], "here", WISH))
    monkeypatch.delenv("SILOFL_LARGEST_FILE")
    path = encoded(tmp_path / "b", JPEGLSLossless, BOMB)
    assert "its picture would take 34.4 GB" in refusal(
        lambda: dicom.READER.read(sample_at(path), ReadOptions())
    )


def test_a_bomb_within_outlines(tmp_path):
    """A SEG object of three frames, which say that they are 65535 x 65535."""
    files = write_series(tmp_path / "s", values())
    path = write_seg(tmp_path / "seg", files, {"liver": box()}, "FRACTIONAL")
    recoded(path, JPEGLSLossless, [BOMB] * 3)
    assert "its picture would take 34.4 GB" in refusal(
        lambda: volume.read_volume_mask(files, [path], "here", WISH)
    )


def test_sequences_within_sequences(tmp_path):
    """A thousand of them, where functional groups are looked for."""
    item = Dataset()
    for _ in range(1000):
        outer = Dataset()
        outer.SharedFunctionalGroupsSequence = Sequence([item])
        item = outer
    path = write_dicom(tmp_path / "IM")
    content = path.read_bytes()
    start, end = b"\xfe\xff\x00\xe0\xff\xff\xff\xff", b"\xfe\xff\x0d\xe0\x00\x00\x00\x00"
    sequence = b"\x00\x52\x29\x92SQ\x00\x00\xff\xff\xff\xff"
    close = b"\xfe\xff\xdd\xe0\x00\x00\x00\x00"
    nested = (sequence + start) * 5000 + (end + close) * 5000
    at = content.rindex(b"\xe0\x7f\x10\x00")  # before the pixels
    path.write_bytes(content[:at] + nested + content[at:])
    text = refusal(lambda: dicom.READER.probe(sample_at(path), ReadOptions()))
    assert text == "here: its file cannot be read as DICOM (RecursionError)"


def test_contours_of_nonsense(tmp_path):
    """No numbers, too few, infinite ones, and a hundred thousand points for nothing."""
    files = write_series(tmp_path / "s", values())
    for points in ([["nan"] * 3] * 4, [[1e300] * 3] * 3, [[0.0, 0.0, 1e6]] * 3):
        path = write_rtstruct(tmp_path / "rt", files, {"liver": [np.array(points, float)]})
        assert "here: " in refusal(
            lambda path=path: volume.read_volume_mask(files, [path], "here", WISH)
        )
    path = write_rtstruct(tmp_path / "rt", files, {"liver": [np.zeros((3, 3))]})
    dataset = pydicom.dcmread(path)
    dataset.ROIContourSequence[0].ContourSequence[0].ContourData = ["1", "2"]
    dataset.save_as(path)
    assert "cannot be read as DICOM (ValueError)" in refusal(
        lambda: volume.read_volume_mask(files, [path], "here", WISH)
    )


def test_a_file_of_outlines_that_is_too_large(tmp_path, monkeypatch):
    """Contours are texts, and become much larger; of SEG objects, doses and pictures the pixels are not parsed."""
    files = write_series(tmp_path / "s", values())
    contours = write_rtstruct(tmp_path / "rt", files, {"liver": [np.zeros((3, 3))]})
    seg = write_seg(tmp_path / "seg", files, {"liver": box()})
    dose = write_dicom(tmp_path / "dose", Modality="RTDOSE")
    monkeypatch.setenv("SILOFL_LARGEST_FILE", "0.00006")  # 64 kB: 60 times about 1 kB
    fails(DataError, "its file of outlines would take", referenced_series, contours)
    assert "its file of outlines would take" in refusal(
        lambda: volume.read_volume_mask(files, [contours], "here", WISH)
    )
    assert len(referenced_series(seg)) == 1
    assert all(
        60 * path.stat().st_size > 64_424 and referenced_series(path) == set()
        for path in (dose, *files)
    )
    assert_array_equal(volume.read_volume_mask(files, [seg], "here", WISH), box())


def test_nifti_that_unpacks_to_much(tmp_path):
    """A header of a terabyte, and a small .gz of a large volume, whole and cut short."""
    path = write_nifti(tmp_path / "v.nii", np.zeros((4, 4, 4), np.int16))
    content = bytearray(path.read_bytes())
    content[40:48] = np.array([3, 32000, 32000, 32000], "<i2").tobytes()
    path.write_bytes(bytes(content))
    assert "GB of memory" in refusal(lambda: volume.probe_volume([path], "here", WISH))
    packed = tmp_path / "v.nii.gz"
    packed.write_bytes(gzip.compress(bytes(content) + b"\0" * 20_000_000))
    assert "GB of memory" in refusal(lambda: volume.read_volume([packed], "here", WISH))


@pytest.mark.parametrize(
    "affine", [np.zeros((4, 4)), np.full((4, 4), np.nan), np.diag([1e9, 1, 1, 1])]
)
def test_an_affine_that_is_none(tmp_path, affine):
    path = write_nifti(tmp_path / "v.nii", np.zeros((4, 4, 4), np.int16))
    image: Any = nibabel.load(path)
    image.header["sform_code"], image.header["qform_code"] = 2, 0
    for name, row in zip(("srow_x", "srow_y", "srow_z"), affine, strict=False):
        image.header[name] = row
    content = bytearray(path.read_bytes())
    content[: image.header.sizeof_hdr if hasattr(image.header, "sizeof_hdr") else 348] = (
        image.header.structarr.tobytes()
    )
    path.write_bytes(bytes(content))
    assert "here: " in refusal(lambda: volume.probe_volume([path], "here", WISH))
