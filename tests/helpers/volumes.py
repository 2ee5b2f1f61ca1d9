"""Volumes as hospitals have them: DICOM series, and their outlines as SEG and RTSTRUCT objects."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import UID, RTStructureSetStorage, SegmentationStorage
from scans import PREFIX, write_dicom

SHAPE = (6, 8, 8)  # slices, rows, columns
AXIAL = [1, 0, 0, 0, 1, 0]


def values(shape: tuple[int, int, int] = SHAPE) -> Any:
    """Every voxel says where it is: 100 z + 10 y + x."""
    z, y, x = np.indices(shape)
    return (100 * z + 10 * y + x).astype(np.uint16)


def write_series(
    folder: Path, voxels: Any, *, study: int = 1, apart: float = 3.0, **attributes: Any
) -> list[Path]:
    """Axial slices from feet to head at (-10, -20, z), rows 2 mm and columns 1 mm, files in another order."""
    made = []
    for k, pixels in enumerate(voxels):
        wanted: dict[str, Any] = {
            "ImageOrientationPatient": AXIAL,
            "ImagePositionPatient": [-10.0, -20.0, 30.0 + apart * k],
            "PixelSpacing": [2.0, 1.0],
            "RescaleSlope": 1,
            "RescaleIntercept": 0,
            "FrameOfReferenceUID": f"{PREFIX}5{study}",
            "StudyID": "1",
            "SeriesNumber": 1,
            "patient": f"P{study}-UMPF",
        }
        path = folder / f"IM{(k * 5) % len(voxels)}"
        made.append(
            write_dicom(path, pixels, study=study, number=k + 1, **(wanted | attributes))
        )
    return made


def box(*, shape: tuple[int, int, int] = SHAPE) -> Any:
    made = np.zeros(shape, bool)
    made[1:4, 2:6, 3:7] = True
    return made


def write_seg(
    path: Path, files: list[Path], masks: dict[str, Any], kind: str = "BINARY"
) -> Path:
    """A SEG as the standard has it, frames from head to feet, written without a library that knows SEG."""
    source = pydicom.dcmread(files[0], stop_before_pixels=True)
    ordered = sorted(
        files,
        key=lambda own: float(
            pydicom.dcmread(own, stop_before_pixels=True).ImagePositionPatient[2]
        ),
    )
    frames, groups = [], []
    for number, mask in enumerate(masks.values(), 1):
        for k in reversed(range(len(ordered))):
            if mask[k].any():
                frames.append(mask[k])
                header = pydicom.dcmread(ordered[k], stop_before_pixels=True)
                group, segment, place = Dataset(), Dataset(), Dataset()
                segment.ReferencedSegmentNumber = number
                place.ImagePositionPatient = header.ImagePositionPatient
                group.SegmentIdentificationSequence = Sequence([segment])
                group.PlanePositionSequence = Sequence([place])
                groups.append(group)
    measures, plane, shared, series = Dataset(), Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = source.PixelSpacing
    plane.ImageOrientationPatient = source.ImageOrientationPatient
    shared.PixelMeasuresSequence = Sequence([measures])
    shared.PlaneOrientationSequence = Sequence([plane])
    series.SeriesInstanceUID = source.SeriesInstanceUID
    segments = []
    for number, name in enumerate(masks, 1):
        segment = Dataset()
        segment.SegmentNumber, segment.SegmentLabel = number, name
        segments.append(segment)
    pixels = np.stack(frames).astype(np.uint8)
    packed = (
        np.packbits(pixels.ravel(), bitorder="little").tobytes()
        if kind == "BINARY"
        else (pixels * 200).tobytes()
    )
    bits = 1 if kind == "BINARY" else 8
    write_dicom(
        path,
        pixels,
        patient=source.PatientID,
        series=7,
        Modality="SEG",
        NumberOfFrames=len(frames),
        SegmentationType=kind,
        SegmentSequence=Sequence(segments),
        ReferencedSeriesSequence=Sequence([series]),
        SharedFunctionalGroupsSequence=Sequence([shared]),
        PerFrameFunctionalGroupsSequence=Sequence(groups),
        BitsStored=bits,
        HighBit=bits - 1,
        MaximumFractionalValue=None if kind == "BINARY" else 255,
    )
    dataset = pydicom.dcmread(path)
    dataset.BitsAllocated = bits
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = SegmentationStorage
    dataset.StudyInstanceUID = source.StudyInstanceUID
    dataset.PixelData = packed + b"\0" * (len(packed) % 2)
    dataset["PixelData"].VR = "OB"
    dataset.save_as(path)
    return path


def write_rtstruct(path: Path, files: list[Path], outlines: dict[str, list[Any]]) -> Path:
    """Contours (n, 3) in mm of each ROI."""
    source = pydicom.dcmread(files[0], stop_before_pixels=True)
    write_dicom(
        path,
        np.zeros((2, 2), np.uint8),
        patient=source.PatientID,
        series=8,
        Modality="RTSTRUCT",
    )
    dataset = pydicom.dcmread(path)
    for keyword in ("PixelData", "Rows", "Columns"):
        del dataset[keyword]
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = RTStructureSetStorage
    dataset.StudyInstanceUID = source.StudyInstanceUID
    frame, study, series = Dataset(), Dataset(), Dataset()
    series.SeriesInstanceUID = source.SeriesInstanceUID
    study.ReferencedSOPClassUID = "1.2.840.10008.3.1.2.3.1"
    study.ReferencedSOPInstanceUID = source.StudyInstanceUID
    study.RTReferencedSeriesSequence = Sequence([series])
    frame.FrameOfReferenceUID = source.get("FrameOfReferenceUID", UID("1.2.3"))
    frame.RTReferencedStudySequence = Sequence([study])
    dataset.ReferencedFrameOfReferenceSequence = Sequence([frame])
    rois, drawn = [], []
    for number, (name, contours) in enumerate(outlines.items(), 1):
        roi, contour_of = Dataset(), Dataset()
        roi.ROINumber, roi.ROIName = number, name
        contour_of.ReferencedROINumber = number
        items = []
        for points in contours:
            contour = Dataset()
            contour.ContourGeometricType = "CLOSED_PLANAR"
            contour.NumberOfContourPoints = len(points)
            # Of values that are wrong on purpose
            with warnings.catch_warnings(action="ignore"):
                contour.ContourData = [f"{value:.4g}" for value in np.ravel(points)]
            items.append(contour)
        contour_of.ContourSequence = Sequence(items)
        rois.append(roi)
        drawn.append(contour_of)
    dataset.StructureSetROISequence = Sequence(rois)
    dataset.ROIContourSequence = Sequence(drawn)
    with warnings.catch_warnings(action="ignore"):
        dataset.save_as(path)
    return path
