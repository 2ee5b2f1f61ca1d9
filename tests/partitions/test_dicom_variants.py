"""DICOM as scanners and exports write it beside the standard: without DICM, with empty attributes, with HighBit."""

from __future__ import annotations

import numpy as np
import pydicom
import pytest
from failing import fails
from pydicom.datadict import dictionary_VR
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian
from scans import leaks, sample_at, write_dicom

from partitions.importing.readers import dicom
from partitions.importing.readers.dicom_file import is_bare, is_dicom
from partitions.recipes.reading import ReadOptions

PIXELS = np.arange(24, dtype=np.uint16).reshape(4, 6) * 100
READING = ReadOptions(window=(1200, 2400))


def pixels(path):
    dicom.READER.probe(sample_at(path), READING)
    return dicom.READER.read(sample_at(path), READING)


def refusal(path):
    said = fails(ValueError, None, dicom.READER.probe, sample_at(path), READING)
    assert leaks(said) == []
    return said


@pytest.mark.parametrize("uid", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
@pytest.mark.parametrize("meta", [True, False])
def test_files_without_dicm_are_read(tmp_path, uid, meta):
    usual = write_dicom(tmp_path / "usual", PIXELS, uid=uid)
    content = usual.read_bytes()[132:]
    length = 12 + int.from_bytes(content[8:12], "little")  # of the file's meta information
    bare = tmp_path / "bare"
    bare.write_bytes(content if meta else content[length:])
    assert is_dicom(bare) and pixels(bare).tobytes() == pixels(usual).tobytes()
    header = dicom.read_header(bare, "here")
    assert header == dicom.read_header(usual, "here")


def test_other_files_are_none(tmp_path):
    rng = np.random.default_rng(0)
    assert not any(is_bare(rng.bytes(1024)) for _ in range(2000))
    first = b"\x08\x00\x05\x00\x0a\x00\x00\x00ISO_IR 100"
    assert (
        not is_bare(b"") and not is_bare(first) and not is_bare(first + b"and so on, and so on")
    )
    assert not is_bare(first + first) and is_bare(
        first + b"\x08\x00\x08\x00\x02\x00\x00\x00A " + bytes(9)
    )


OPTIONAL = (
    "RescaleSlope",
    "RescaleIntercept",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "HighBit",
    "NumberOfFrames",
    "PixelSpacing",
    "ImagerPixelSpacing",
    "PixelAspectRatio",
    "PixelPaddingValue",
    "PixelPaddingRangeLimit",
    "InstanceNumber",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "BurnedInAnnotation",
    "PlanarConfiguration",
    "SeriesDescription",
    "Modality",
    "PatientID",
    "AccessionNumber",
    "ConversionType",
    "VOILUTSequence",
)


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("limit", [None, 7])
def test_empty_attributes_are_none(tmp_path, blank, limit):
    """Each that is optional, all at once, empty or of blanks; PixelPaddingRangeLimit beside its value, too."""
    missing = write_dicom(
        tmp_path / "missing", PIXELS, HighBit=None, InstanceNumber=None, PixelPaddingValue=limit
    )
    dataset = pydicom.dcmread(missing)
    for keyword in OPTIONAL:
        if keyword in dataset and dataset.get(keyword) == limit:
            continue
        ambiguous = keyword.startswith("PixelPadding")
        dataset.add_new(keyword, "US" if ambiguous else dictionary_VR(keyword), None)
        if (
            blank
            and keyword != "NumberOfFrames"
            and dataset[keyword].VR in ("DS", "IS", "CS", "LO")
        ):
            setattr(dataset, keyword, " ")
    dataset.save_as(tmp_path / "empty")
    assert pixels(tmp_path / "empty").tobytes() == pixels(missing).tobytes()
    reading = ReadOptions()  # by the picture's own range
    assert (
        dicom.READER.read(sample_at(tmp_path / "empty"), reading).tobytes()
        == dicom.READER.read(sample_at(missing), reading).tobytes()
    )


@pytest.mark.parametrize("signed", [False, True])
def test_values_begin_at_high_bit(tmp_path, signed):
    """Twelve bits in the upper twelve of sixteen, with something else below them."""
    values = PIXELS.astype(np.int16) - 1200 if signed else PIXELS
    window = ReadOptions(window=(0, 2400) if signed else (1200, 2400))
    usual = dicom.READER.read(sample_at(write_dicom(tmp_path / "usual", values)), window)
    upper = write_dicom(tmp_path / "upper", values * 16 + 5, HighBit=15)
    assert dicom.READER.read(sample_at(upper), window).tobytes() == usual.tobytes()


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"HighBit": 7}, "its header has HighBit 7 with 12 of 16 bits: no values are there"),
        ({"HighBit": 16}, "its header has HighBit 16 with 12 of 16 bits: no values are there"),
        (
            {"PixelRepresentation": None},
            "its header has no PixelRepresentation, without which pixels have no meaning",
        ),
        ({"Rows": 400}, "its file is cut short: "),
        (
            {"RescaleSlope": 2},
            "its header has RescaleSlope and no RescaleIntercept: in which unit its values are",
        ),
        (
            {"RescaleIntercept": -1024},
            "its header has RescaleIntercept and no RescaleSlope: in which unit its",
        ),
    ],
)
def test_what_cannot_be_read_is_found_by_the_header(tmp_path, attributes, words):
    assert words in refusal(write_dicom(tmp_path / "x", PIXELS, **attributes))


def test_a_neutral_slope_may_stand_alone(tmp_path):
    plain = write_dicom(tmp_path / "plain", PIXELS)
    assert (
        pixels(write_dicom(tmp_path / "one", PIXELS, RescaleSlope=1)).tobytes()
        == pixels(plain).tobytes()
    )


def test_the_middle_of_several_frames_is_named(tmp_path):
    path = write_dicom(tmp_path / "x", np.stack([PIXELS] * 3), NumberOfFrames=3)
    assert dicom.MIDDLE in dicom.READER.probe(sample_at(path), READING).notes
    assert dicom.MIDDLE not in dicom.READER.probe(sample_at(path, 1), READING).notes
