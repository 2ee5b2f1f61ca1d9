"""A DICOM series as a volume: its slices in the order of their positions, or an error of one line.

These series are refused:

* slices of several orientations, sizes or pixel spacings (a localiser, or a mixed series)
* MONOCHROME1 beside MONOCHROME2
* two slices at one position (several times or echoes), or a gap (a missing slice)
* slices that are shifted in their planes (a tilted gantry), or without a position

A missing slice at an end is not detected, because no header has the number of slices.

Source: DICOM PS3.3, C.7.6.2.1.1 (place and orientation of a plane).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partitions.common.names import Names
from partitions.common.sizes import check_picture
from partitions.importing.dicom import (
    KIND,
    PIXELS,
    PLACE,
    in_unit,
    place_of,
    read_acquisition,
    spacing_of,
    warnings_of,
)
from partitions.importing.dicom_file import (
    check_readable,
    frames_of,
    is_grey,
    load,
    of_frame,
    pixels_of,
)
from partitions.importing.scans import Paths, ScanError
from partitions.importing.volumes.grid import Grid, check_grid
from partitions.recipes.reading import Acquisition
from partitions.splits import Array

if TYPE_CHECKING:
    from pydicom import Dataset

UNEVEN = 0.05  # largest relative difference of two neighbours' distance from the usual one
SHIFTED = 0.5  # largest shift of the last slice in its plane, in pixels


@dataclass(frozen=True)
class Plane:
    """A slice: its file and frame, the mm of its first pixel, directions of its rows and columns, and its pixels."""

    path: Path
    frame: int
    position: Array
    directions: Array  # (2, 3): along a row, along a column
    spacing: tuple[float, float]  # from row to row, from column to column
    pixels: tuple[int, int]


@dataclass(frozen=True)
class Series:
    """A series' slices in order, their grid (slice, row, column), and the properties that others must share."""

    planes: tuple[Plane, ...]
    grid: Grid
    acquired: Acquisition
    notes: Names
    patient: str  # as the header has it


def read_series(files: Paths) -> Series:
    """Read the slices of a series from their headers. Raises ScanError where they are no volume."""
    planes: list[Plane] = []
    notes: list[str] = []
    kinds: set[str] = set()
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
    patient = str(dataset.get("PatientID") or "").strip()
    return Series(tuple(planes), grid, taken, tuple(dict.fromkeys(notes)), patient)


def plane_of(dataset: Dataset, path: Path, frame: int) -> Plane:
    """Return the plane of a slice. Raises ScanError where the header has no position."""
    header = of_frame(dataset, frame)
    position, axes = place_of(header)
    spacing = spacing_of(header)
    if position is None or axes is None or not spacing:
        raise ScanError(
            "a slice does not say where it lies, or how large its pixels are: it is no volume"
        )
    if not np.isfinite(position).all() or not np.allclose(axes @ axes.T, np.eye(2), atol=1e-2):
        raise ScanError("a slice does not say where it lies: its orientation is none")
    size = (int(dataset.Rows), int(dataset.Columns))
    return Plane(path, frame, position, axes, spacing, size)


def stack_planes(planes: Sequence[Plane]) -> tuple[list[Plane], Grid]:
    """Return the slices in the order of their positions, and their grid. Raises ScanError where they are no volume."""
    first = planes[0]
    if len(planes) < 2:
        raise ScanError("its series has one slice: it is no volume")
    for plane in planes:
        if not np.allclose(plane.directions, first.directions, atol=1e-3):
            raise ScanError(
                "its slices have several orientations (a localiser?): choose one series with --series"
            )
        if plane.pixels != first.pixels or not np.allclose(
            plane.spacing, first.spacing, rtol=1e-3
        ):
            raise ScanError("its slices have several sizes: choose one series with --series")
    row, column = first.directions
    normal = np.cross(row, column)
    ordered = sorted(planes, key=lambda plane: float(plane.position @ normal))
    places = np.array([plane.position @ normal for plane in ordered])
    apart = np.diff(places)
    usual = float(np.median(apart))
    if (apart < 1e-3).any():
        at = int(np.argmax(apart < 1e-3))
        raise ScanError(
            f"slices {at + 1} and {at + 2} lie at one place: several times or echoes are no volume"
        )
    if (uneven := np.abs(apart - usual) > UNEVEN * usual).any():
        at = int(uneven.argmax())
        raise ScanError(
            f"slices {at + 1} and {at + 2} of {len(ordered)} lie {apart[at]:.4g} mm apart, others {usual:.4g}: "
            "one is missing, or there is one too many"
        )
    shift = ordered[-1].position - ordered[0].position - (places[-1] - places[0]) * normal
    if np.linalg.norm(shift) > SHIFTED * min(first.spacing):
        raise ScanError(
            "its slices are shifted in their planes (a tilted gantry?): resample it to a straight volume first"
        )
    step = (places[-1] - places[0]) / (len(ordered) - 1)
    affine = np.eye(4)
    affine[:3, :3] = np.column_stack(
        [normal * step, column * first.spacing[0], row * first.spacing[1]]
    )
    affine[:3, 3] = ordered[0].position
    grid = Grid((len(ordered), *first.pixels), affine)
    check_grid(grid, straight=True)
    return ordered, grid


def values_of(series: Series) -> tuple[Array, Array]:
    """Return the values in the machine's unit, float32 (slice, row, column), and which voxels are padding, bool.

    MONOCHROME1 is not inverted yet, because a window is in the machine's unit.
    """
    values = np.empty(series.grid.shape, np.float32)
    padding = np.zeros(series.grid.shape, bool)
    for k, plane in enumerate(series.planes):
        dataset = load(plane.path, (*KIND, *PIXELS))
        stored = pixels_of(plane.path, dataset, plane.frame)
        values[k], padding[k] = in_unit(stored, of_frame(dataset, plane.frame))
    return values, padding
