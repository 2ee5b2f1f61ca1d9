"""Outlines of a DICOM series, from SEG and RTSTRUCT objects, as classes on the series' own voxels.

An outline is found by its name, in upper or lower case: the segment's label in SEG, the ROI's name in RTSTRUCT. The
requested names become the classes 1, 2, ...; where outlines overlap, the later name is used. A name that ends in ``?``
may be missing. Messages contain no name of an object, because it may contain a patient's.

* SEG: binary, fractional (from one half on), and label maps, whose frames lie on the slices of the series.
* RTSTRUCT: closed planar contours on the slices. A voxel belongs to an outline if its centre is inside an odd number of
  its contours on that slice (so that a contour inside another one is a hole).

Source: DICOM PS3.3, A.51 and C.8.20 (segmentation), A.19 and C.8.8.6 (ROI contours).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.sizes import check_picture, check_size
from partitions.importing.dicom import KIND, place_of, spacing_of
from partitions.importing.dicom_file import check_decoder, frames_of, load, of_frame, pixels_of
from partitions.importing.scans import Paths, ScanError, pseudonym
from partitions.importing.volumes.grid import Grid
from partitions.splits import Array, Shape

if TYPE_CHECKING:
    from pydicom import Dataset

OUTLINES = ("SEG", "RTSTRUCT")
PARSED = 60  # bytes of memory per byte of contours, which are decimal texts
OF_SEG = re.findall(
    r"\w+",
    "SegmentationType SegmentSequence MaximumFractionalValue ReferencedSeriesSequence SharedFunctionalGroupsSequence "
    "PerFrameFunctionalGroupsSequence BitsAllocated PixelSpacing ImagePositionPatient",
)
OF_RTSTRUCT = re.findall(
    r"\w+", "StructureSetROISequence ROIContourSequence ReferencedFrameOfReferenceSequence"
)
OFF_THE_SLICES = "its outlines do not lie on the slices of their series"


def referenced_series(path: Path) -> set[str]:
    """Return the pseudonyms of the series that an object outlines; empty for another object."""
    if kind_of_outlines(path) not in OUTLINES:
        return set()
    dataset = load(path, ("ReferencedSeriesSequence", "ReferencedFrameOfReferenceSequence"))
    named = list(dataset.get("ReferencedSeriesSequence") or [])
    for frame in dataset.get("ReferencedFrameOfReferenceSequence") or []:
        for study in frame.get("RTReferencedStudySequence") or []:
            named += study.get("RTReferencedSeriesSequence") or []
    return {pseudonym(str(item.get("SeriesInstanceUID") or "").strip()) for item in named} - {
        ""
    }


def kind_of_outlines(path: Path) -> str:
    """Return an object's modality. Raises TooLargeError where its contours are too large to be parsed."""
    kind = str(load(path, ("Modality",)).get("Modality"))
    if kind == "RTSTRUCT":  # the pixels of all others are not parsed
        check_size(PARSED * path.stat().st_size, "its file of outlines")
    return kind


def draw(files: Paths, names: Sequence[str], grid: Grid) -> Array:
    """Return the classes of a series' voxels, uint8 of the shape of ``grid``. ``names``: of the classes 1, 2, ...

    Raises ScanError where an outline is missing, or does not lie on the series.
    """
    check_picture(grid.shape, "its mask")
    drawn = np.zeros(grid.shape, np.uint8)
    found = [own for path in files for own in outlines_of(path, grid)]
    for number, name in enumerate(names, 1):
        wanted = name.removesuffix("?").strip().casefold()
        own = [mask for label, mask in found if label == wanted]
        if not own and not name.endswith("?"):
            raise ScanError(
                f"its {len(found)} outlines have none called {name!r}; if a patient may have none, write {name}?"
            )
        for mask in own:
            drawn[mask()] = number
    return drawn


def outlines_of(path: Path, grid: Grid) -> Iterator[tuple[str, Any]]:
    """Yield each outline's name in lower case, and a function that returns its voxels: bool, shape of ``grid``."""
    kind = kind_of_outlines(path)
    if kind not in OUTLINES:
        raise ScanError("its mask is neither SEG nor RTSTRUCT")
    dataset = load(path, (*KIND, *OF_SEG, *OF_RTSTRUCT))
    yield from segments(dataset, path, grid) if kind == "SEG" else contours(dataset, grid)


def segments(dataset: Dataset, path: Path, grid: Grid) -> Iterator[tuple[str, Any]]:
    """Yield the segments of a SEG object."""
    kind = str(dataset.get("SegmentationType"))
    frames = frames_of(dataset)
    check_picture((frames, dataset.Rows, dataset.Columns), "its outlines")
    check_decoder(dataset, path)
    if (dataset.Rows, dataset.Columns) != grid.shape[1:]:
        raise ScanError(OFF_THE_SLICES)
    slices = [slice_of(of_frame(dataset, frame), grid) for frame in range(frames)]
    numbers = [segment_of(dataset, frame) for frame in range(frames)]
    pixels = pixels_of(path, dataset, None).reshape(frames, *grid.shape[1:])
    half = (
        float(dataset.get("MaximumFractionalValue") or 255) / 2 if kind == "FRACTIONAL" else 0.5
    )

    def mask(number: int) -> Array:
        made = np.zeros(grid.shape, bool)
        for place, own, frame in zip(slices, numbers, pixels, strict=True):
            if kind == "LABELMAP":
                made[place] |= frame == number
            elif own == number:
                made[place] |= frame >= half
        return made

    for segment in dataset.get("SegmentSequence") or []:
        number = int(segment.SegmentNumber)
        yield (
            str(segment.get("SegmentLabel") or "").strip().casefold(),
            lambda number=number: mask(number),
        )


def segment_of(dataset: Dataset, frame: int) -> int:
    """Return the segment of a frame; 0 for a label map, where it is in the pixels."""
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    per_frame = dataset.get("PerFrameFunctionalGroupsSequence") or []
    for groups in (*per_frame[frame : frame + 1], *shared[:1]):
        for item in groups.get("SegmentIdentificationSequence") or []:
            return int(item.ReferencedSegmentNumber)
    return 0


def slice_of(header: Dataset, grid: Grid) -> int:
    """Return the slice of the series with the pixels of a frame. Raises ScanError where there is none."""
    (position, axes), spacing = place_of(header), spacing_of(header)
    if position is None or axes is None or not spacing:
        raise ScanError(OFF_THE_SLICES)
    row, column = axes
    steps = np.column_stack([column * spacing[0], row * spacing[1]])
    k, i, j = (np.linalg.inv(grid.affine) @ [*position, 1.0])[:3]
    fits = (
        np.allclose(steps, grid.affine[:3, 1:3], atol=1e-2 * min(spacing))
        and max(abs(i), abs(j)) < 0.1
    )
    if not fits or abs(k - round(k)) > 0.1 or not 0 <= round(k) < grid.shape[0]:
        raise ScanError(OFF_THE_SLICES)
    return int(k + 0.5)


def contours(dataset: Dataset, grid: Grid) -> Iterator[tuple[str, Any]]:
    """Yield the outlines of an RTSTRUCT object."""
    names = {
        int(roi.ROINumber): str(roi.get("ROIName") or "").strip().casefold()
        for roi in dataset.get("StructureSetROISequence") or []
    }
    for roi in dataset.get("ROIContourSequence") or []:
        drawn = list(roi.get("ContourSequence") or [])
        yield (
            names.get(int(roi.ReferencedROINumber), ""),
            lambda drawn=drawn: fill_outline(drawn, grid),
        )


def fill_outline(drawn: Sequence[Dataset], grid: Grid) -> Array:
    """Return the voxels inside an outline's contours."""
    made = np.zeros(grid.shape, bool)
    back = np.linalg.inv(grid.affine)
    for contour in drawn:
        if contour.get("ContourGeometricType") not in ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR"):
            raise ScanError("its outline has points or lines that enclose nothing")
        points = np.array(contour.ContourData, float).reshape(-1, 3)
        places = np.column_stack([points, np.ones(len(points))]) @ back.T
        k = round(float(np.median(places[:, 0])))
        if (
            not np.isfinite(places).all()
            or np.abs(places[:, 0] - k).max() > 0.25
            or not 0 <= k < grid.shape[0]
        ):
            raise ScanError(OFF_THE_SLICES)
        made[k] ^= inside(places[:, 1], places[:, 2], grid.shape[1:])
    return made


def inside(rows: Array, columns: Array, shape: Shape) -> Array:
    """Return which pixel centres are inside a polygon, bool: those left of an odd number of its edges in their row."""
    made = np.zeros(shape, bool)
    own, across = np.arange(shape[0]), np.arange(shape[1])
    for a, b, p, q in zip(rows, np.roll(rows, -1), columns, np.roll(columns, -1), strict=True):
        between = own[(np.minimum(a, b) <= own) & (own < np.maximum(a, b))]
        crossing = p + (between - a) / (b - a) * (q - p) if len(between) else np.zeros(0)
        made[between] ^= across < crossing[:, np.newaxis]
    return made
