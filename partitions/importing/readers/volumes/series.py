"""A DICOM series as a volume: its slices in the order of their positions, or an error of one line.

These series are refused:

* slices of several orientations, sizes or pixel spacings (a localiser, or a mixed series)
* MONOCHROME1 beside MONOCHROME2
* two slices at one position (several times or echoes), or a gap (a missing slice)
* slices that are shifted in their planes (a tilted gantry), or without a position

A missing slice at an end is not detected, because no header has the number of slices.

Outlines of a series, from SEG and RTSTRUCT objects, become classes on its own voxels. An outline is found by its name,
in upper or lower case: the segment's label in SEG, the ROI's name in RTSTRUCT. The requested names become the classes
1, 2, ...; where outlines overlap, the later name is used. A name that ends in ``?`` may be missing. Messages contain no
name of an object, because it may contain a patient's.

* SEG: binary, fractional (from one half on), and label maps, whose frames lie on the slices of the series.
* RTSTRUCT: closed planar contours on the slices. A voxel belongs to an outline if its centre is inside an odd number of
  its contours on that slice (so that a contour inside another one is a hole).

Source: DICOM PS3.3, C.7.6.2.1.1 (place and orientation of a plane), A.51 and C.8.20 (segmentation), A.19 and C.8.8.6
(ROI contours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.names import Names, words_in
from partitions.common.sizes import check_picture, check_size
from partitions.importing.readers.dicom import (
    KIND,
    PIXELS,
    PLACE,
    in_unit,
    read_acquisition,
    warnings_of,
)
from partitions.importing.readers.dicom_file import (
    Place,
    attribute_text,
    check_decoder,
    check_readable,
    frame_place,
    frames_of,
    is_grey,
    load,
    of_frame,
    pixels_of,
)
from partitions.importing.readers.reader import Paths, ScanError, hash_text, pseudonym
from partitions.importing.readers.volumes.grid import Grid, check_grid
from partitions.recipes.reading import Acquisition
from partitions.splits import Array, Shape

if TYPE_CHECKING:
    from pydicom import Dataset

UNEVEN = 0.05  # largest relative difference of two neighbours' distance from the usual one
SHIFTED = 0.5  # largest shift of the last slice in its plane, in pixels


@dataclass(frozen=True)
class Plane:
    """A slice: its file and frame, its place, of which all is stated, and the number of its rows and columns."""

    path: Path
    frame: int
    place: Place
    pixels: tuple[int, int]


@dataclass(frozen=True)
class Scan:
    """A scan from its headers. ``acquired``: the properties that others must share.

    ``patient``: a pseudonym, and the hash of what it is made of; ``values``: reads the values in the machine's unit,
    float32 of the grid's shape, and which are padding, bool; ``planes``: of a series, its slices in order.
    """

    grid: Grid
    acquired: Acquisition
    notes: Names
    patient: Names
    values: Callable[[], tuple[Array, Array]]
    planes: Sequence[Plane] = ()


def read_series(files: Paths) -> Scan:
    """Read the slices of a series from their headers. Raises ScanError where they are no volume."""
    planes, notes, kinds = list[Plane](), list[str](), set[str]()
    for path in files:
        dataset = load(path, (*KIND, *PIXELS, *PLACE, "PatientID"))
        check_readable(dataset, path)
        if not is_grey(dataset):
            raise ScanError("its slices are in colour; volumes are grey")
        kinds.add(dataset.PhotometricInterpretation)
        notes += warnings_of(dataset)
        planes += [plane_of(dataset, path, frame) for frame in range(frames_of(dataset))]
    if len(kinds) > 1:
        raise ScanError(
            "its slices are MONOCHROME1 and MONOCHROME2: choose one series with --series"
        )
    first = planes[0]
    check_picture((len(planes), *first.pixels), "its volume")
    planes, grid = stack_planes(planes)
    taken = read_acquisition(dataset, of_frame(dataset, 0))
    patient = attribute_text(dataset, "PatientID")
    whose, values = (pseudonym(patient), hash_text(patient)), partial(read_planes, planes, grid)
    return Scan(grid, taken, tuple(dict.fromkeys(notes)), whose, values, planes)


def plane_of(dataset: Dataset, path: Path, frame: int) -> Plane:
    """Return the plane of a slice. Raises ScanError where the header has no position."""
    place = frame_place(of_frame(dataset, frame))
    axes = place.directions
    if not place.is_stated:
        raise ScanError(
            "a slice does not say where it lies, or how large its pixels are: it is no volume"
        )
    if not np.isfinite(place.position).all() or not np.allclose(
        axes @ axes.T, np.eye(2), atol=1e-2
    ):
        raise ScanError("a slice does not say where it lies: its orientation is none")
    return Plane(path, frame, place, (int(dataset.Rows), int(dataset.Columns)))


def stack_planes(planes: Sequence[Plane]) -> tuple[list[Plane], Grid]:
    """Return the slices in the order of their positions, and their grid. Raises ScanError where they are no volume."""
    first = planes[0].place
    if len(planes) < 2:
        raise ScanError("its series has one slice: it is no volume")
    for plane in planes:
        if not np.allclose(plane.place.directions, first.directions, atol=1e-3):
            raise ScanError(
                "its slices have several orientations (a localiser?): choose one series with --series"
            )
        if plane.pixels != planes[0].pixels or not np.allclose(
            plane.place.spacing, first.spacing, rtol=1e-3
        ):
            raise ScanError("its slices have several sizes: choose one series with --series")
    normal = first.normal
    ordered = sorted(planes, key=lambda plane: float(plane.place.position @ normal))
    places = np.array([plane.place.position @ normal for plane in ordered])
    apart = np.diff(places)
    usual = float(np.median(apart))
    if (equal := apart < 1e-3).any():
        at = int(equal.argmax())
        raise ScanError(
            f"slices {at + 1} and {at + 2} lie at one place: several times or echoes are no volume"
        )
    if (uneven := np.abs(apart - usual) > UNEVEN * usual).any():
        at = int(uneven.argmax())
        raise ScanError(
            f"slices {at + 1} and {at + 2} of {len(ordered)} lie {apart[at]:.4g} mm apart, others {usual:.4g}: "
            "one is missing, or there is one too many"
        )
    start, end = ordered[0].place.position, ordered[-1].place.position
    length = places[-1] - places[0]
    shift = end - start - length * normal
    if np.linalg.norm(shift) > SHIFTED * min(first.spacing):
        raise ScanError(
            "its slices are shifted in their planes (a tilted gantry?): resample it to a straight volume first"
        )
    affine = np.eye(4)
    affine[:3] = np.column_stack([normal * (length / (len(ordered) - 1)), first.steps, start])
    grid = Grid((len(ordered), *planes[0].pixels), affine)
    check_grid(grid, straight=True)
    return ordered, grid


def read_planes(planes: Sequence[Plane], grid: Grid) -> tuple[Array, Array]:
    """Return the values in the machine's unit, float32 (slice, row, column), and which voxels are padding, bool.

    MONOCHROME1 is not inverted yet, because a window is in the machine's unit.
    """
    values, padding = np.empty(grid.shape, np.float32), np.zeros(grid.shape, bool)
    for k, plane in enumerate(planes):
        dataset = load(plane.path, (*KIND, *PIXELS))
        stored = pixels_of(plane.path, dataset, plane.frame)
        values[k], padding[k] = in_unit(stored, of_frame(dataset, plane.frame))
    return values, padding


# Outlines

OUTLINES = ("SEG", "RTSTRUCT")
PARSED = 60  # bytes of memory per byte of contours, which are decimal texts
OF_SEG = words_in(
    "SegmentationType SegmentSequence MaximumFractionalValue ReferencedSeriesSequence SharedFunctionalGroupsSequence "
    "PerFrameFunctionalGroupsSequence BitsAllocated PixelSpacing ImagePositionPatient"
)
OF_RTSTRUCT = words_in(
    "StructureSetROISequence ROIContourSequence ReferencedFrameOfReferenceSequence"
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
    return {pseudonym(attribute_text(item, "SeriesInstanceUID")) for item in named} - {""}


def kind_of_outlines(path: Path) -> str:
    """Return an object's modality. Raises TooLargeError where its contours are too large to be parsed."""
    kind = attribute_text(load(path, ("Modality",)), "Modality")
    if kind == "RTSTRUCT":  # the pixels of all others are not parsed
        check_size(PARSED * path.stat().st_size, "its file of outlines")
    return kind


def draw_outlines(files: Paths, names: Sequence[str], grid: Grid) -> Array:
    """Return the classes of a series' voxels, uint8 of the shape of ``grid``. ``names``: of the classes 1, 2, ...

    Raises ScanError where an outline is missing, or does not lie on the series.
    """
    check_picture(grid.shape, "its mask")
    drawn = np.zeros(grid.shape, np.uint8)
    outlines = [masks for path in files for masks in outlines_of(path, grid)]
    for number, name in enumerate(names, 1):
        wanted = name.removesuffix("?").strip().casefold()
        masks = [mask for label, mask in outlines if label == wanted]
        if not masks and not name.endswith("?"):
            raise ScanError(
                f"its {len(outlines)} outlines have none called {name!r}; if a patient may have none, write {name}?"
            )
        for mask in masks:
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
    kind = attribute_text(dataset, "SegmentationType")
    frames = frames_of(dataset)
    check_picture((frames, dataset.Rows, dataset.Columns), "its outlines")
    check_decoder(dataset, path)
    if (dataset.Rows, dataset.Columns) != grid.shape[1:]:
        raise ScanError(OFF_THE_SLICES)
    headers = [of_frame(dataset, frame) for frame in range(frames)]
    slices = [slice_index(header, grid) for header in headers]
    # None of a label map, where it is in the pixels
    numbers = [header.get("ReferencedSegmentNumber") for header in headers]
    pixels = pixels_of(path, dataset, None).reshape(frames, *grid.shape[1:])
    most = float(dataset.get("MaximumFractionalValue") or 255) if kind == "FRACTIONAL" else 1.0

    def mask(number: int) -> Array:
        voxels = np.zeros(grid.shape, bool)
        for place, segment_number, frame in zip(slices, numbers, pixels, strict=True):
            if kind == "LABELMAP":
                voxels[place] |= frame == number
            elif segment_number == number:
                voxels[place] |= frame >= most / 2
        return voxels

    for segment in dataset.get("SegmentSequence") or []:
        number = int(segment.SegmentNumber)
        yield attribute_text(segment, "SegmentLabel").casefold(), partial(mask, number)


def slice_index(header: Dataset, grid: Grid) -> int:
    """Return the slice of the series with the pixels of a frame. Raises ScanError where there is none."""
    place = frame_place(header)
    if not place.is_stated:
        raise ScanError(OFF_THE_SLICES)
    k, i, j = (np.linalg.inv(grid.affine) @ [*place.position, 1.0])[:3]
    fits = (
        np.allclose(place.steps, grid.affine[:3, 1:3], atol=1e-2 * min(place.spacing))
        and max(abs(i), abs(j)) < 0.1
    )
    if not fits or abs(k - round(k)) > 0.1 or not 0 <= round(k) < grid.shape[0]:
        raise ScanError(OFF_THE_SLICES)
    return int(k + 0.5)


def contours(dataset: Dataset, grid: Grid) -> Iterator[tuple[str, Any]]:
    """Yield the outlines of an RTSTRUCT object."""
    names = {
        int(roi.ROINumber): attribute_text(roi, "ROIName").casefold()
        for roi in dataset.get("StructureSetROISequence") or []
    }
    for roi in dataset.get("ROIContourSequence") or []:
        drawn = list(roi.get("ContourSequence") or [])
        yield names.get(int(roi.ReferencedROINumber), ""), partial(fill_outline, drawn, grid)


def fill_outline(drawn: Sequence[Dataset], grid: Grid) -> Array:
    """Return the voxels inside an outline's contours."""
    voxels, back = np.zeros(grid.shape, bool), np.linalg.inv(grid.affine)
    for contour in drawn:
        if contour.get("ContourGeometricType") not in ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR"):
            raise ScanError("its outline has points or lines that enclose nothing")
        points = np.array(contour.ContourData, float).reshape(-1, 3)
        places = (np.column_stack([points, np.ones(len(points))]) @ back.T).T
        slices, rows, columns = places[:3]
        k = round(float(np.median(slices)))
        if (
            not np.isfinite(places).all()
            or np.abs(slices - k).max() > 0.25
            or not 0 <= k < grid.shape[0]
        ):
            raise ScanError(OFF_THE_SLICES)
        voxels[k] ^= inside(rows, columns, grid.shape[1:])
    return voxels


def inside(rows: Array, columns: Array, shape: Shape) -> Array:
    """Return which pixel centres are inside a polygon, bool: those left of an odd number of its edges in their row."""
    filled = np.zeros(shape, bool)
    down, across = map(np.arange, shape)
    for a, b, p, q in zip(rows, np.roll(rows, -1), columns, np.roll(columns, -1), strict=True):
        between = down[(min(a, b) <= down) & (down < max(a, b))]
        crossing = p + (between - a) / (b - a) * (q - p) if len(between) else np.zeros(0)
        filled[between] ^= across < crossing[:, np.newaxis]
    return filled
