"""Positions of a scan's voxels, its reorientation and resampling, and the inverse for outlines.

Positions are in mm in DICOM's patient coordinates: x to the patient's left, y to the back, z to the head (LPS). A
volume is turned, without resampling, to the nearest canonical axes (nibabel): slices from feet to head, rows from front
to back, columns from the patient's right to the left. An oblique volume stays oblique.

Then each axis is resampled separately about its centre: values by linear interpolation over max(1, step) voxels, as in
Pillow's bilinear filter (a triangle, which averages where voxels become fewer), classes by the nearest voxel. Outside
the source the value is 0. scipy.ndimage does not average where voxels become fewer.

Of NIfTI files headers, values and classes are read along a file's own axes; nothing else in a header is used.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.sizes import MOST_BEFORE, TooLargeError, check_picture
from partitions.importing.files import ScanError, load_library, redacted_errors
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array, Shape

# nibabel's orientation: to the head, to the back, to the left
CANONICAL = np.array([[2, 1], [1, -1], [0, -1]])
RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # from NIfTI's coordinates to DICOM's, and back
LARGEST_COSINE = 0.02  # between axes that are at right angles; more is a sheared volume


@dataclass(frozen=True)
class Grid:
    """Voxels (n0, n1, n2); ``affine`` (4, 4) gives the mm of the voxel with indices (i0, i1, i2, 1)."""

    shape: tuple[int, int, int]
    affine: Array

    @property
    def spacing(self) -> Array:
        """The mm between voxels along each axis, (3,)."""
        return np.asarray(np.linalg.norm(self.affine[:3, :3], axis=0))

    @property
    def pixel(self) -> tuple[float, float]:
        """The mm between rows, and between columns, of a slice across the first axis."""
        return float(self.spacing[1]), float(self.spacing[2])

    @property
    def orientation(self) -> Array:
        """The axis and the direction of each axis of the source, as nibabel has them, (3, 2)."""
        return np.asarray(load_library("a volume", "nibabel").io_orientation(RAS @ self.affine))

    @property
    def canonical(self) -> Grid:
        """The grid along canonical axes."""
        orientations = load_library("a volume", "nibabel").orientations
        transform = orientations.ornt_transform(self.orientation, CANONICAL)
        shape = [self.shape[axis] for axis in np.argsort(transform[:, 0])]
        return Grid(
            (shape[0], shape[1], shape[2]),
            self.affine @ orientations.inv_ornt_aff(transform, self.shape),
        )

    def turn(self, values: Array) -> Array:
        """Turn values (n0, n1, n2) to canonical axes."""
        return self._turn_part(values, self.orientation, CANONICAL)

    def turned_back(self, values: Array) -> Array:
        """Turn values from canonical axes to those of the source."""
        return self._turn_part(values, CANONICAL, self.orientation)

    def _turn_part(self, values: Array, start: Array, end: Array) -> Array:
        orientations = load_library("a volume", "nibabel").orientations
        return np.asarray(
            orientations.apply_orientation(values, orientations.ornt_transform(start, end))
        )


def check_grid(grid: Grid, *, straight: bool) -> None:
    """Raise ScanError where voxels have no size or, if it is to be ``straight``, axes are not at right angles."""
    if (
        not np.isfinite(grid.affine).all()
        or not ((grid.spacing > 0) & (grid.spacing < 1000)).all()
    ):
        raise ScanError("its header does not say how large a voxel is")
    cosines = grid.affine[:3, :3] / grid.spacing
    if straight and np.abs(cosines.T @ cosines - np.eye(3)).max() > LARGEST_COSINE:
        raise ScanError(
            "its axes are not at right angles (a tilted gantry?): resample it to a straight volume first"
        )


def same_place(grid: Grid, other: Grid) -> bool:
    """Return whether two grids have their voxels at the same places, independent of their storage order."""
    a, b = grid.canonical, other.canonical
    return a.shape == b.shape and np.allclose(a.affine, b.affine, atol=1e-2)


def steps(grid: Grid, reading: ReadOptions) -> tuple[tuple[int, int, int], Array]:
    """Return the new shape of a turned volume, and the width of a new voxel in old voxels along each axis."""
    assert reading.volume is not None
    if reading.voxel is None:
        return reading.volume, np.array(grid.canonical.shape) / np.array(reading.volume)
    return reading.volume, np.array(reading.voxel) / grid.canonical.spacing


def resample(
    values: Array, shape: Sequence[int], step: Array, *, nearest: bool = False
) -> Array:
    """Resample values (n0, n1, n2) to ``shape`` voxels, each ``step`` old voxels wide, about the centre; 0 outside."""
    for axis, (count, width) in enumerate(zip(shape, step, strict=True)):
        count_before = values.shape[axis]
        places = (count_before - 1) / 2 + (np.arange(count) - (count - 1) / 2) * width
        if nearest:
            index = np.floor(places + 0.5).astype(np.int64)
            inside = (index >= 0) & (index < count_before)
            values = np.take(values, np.clip(index, 0, count_before - 1), axis)
            if not inside.all():
                values = values * inside.reshape(
                    [-1 if i == axis else 1 for i in range(3)]
                ).astype(values.dtype)
        elif count != count_before or width != 1:
            values = np.moveaxis(
                np.tensordot(weights(count_before, places, width), values, (1, axis)), 0, axis
            )
    return values


def weights(count_before: int, places: Array, width: float) -> Array:
    """Return the weights of ``own`` voxels for the value at each of ``places``, float32 (places, own)."""
    reach = max(1.0, width)
    triangle = np.clip(
        1 - np.abs(np.arange(count_before) - places[:, np.newaxis]) / reach, 0, None
    )
    outside = (places < -0.5) | (places > count_before - 0.5)
    triangle /= np.maximum(triangle.sum(1, keepdims=True), 1e-12)
    triangle[outside] = 0
    return triangle.astype(np.float32)


# NIfTI files

LONGEST_HEADER = 540  # bytes, of NIfTI-2


def read_stored(path: Path, where: str) -> Array:
    """Read a volume's values along the file's own axes, float32 (i, j, k)."""
    with redacted_errors(where, "NIfTI"):
        image = load_nifti(path)
        if len(nifti_shape(image)) != 3:
            raise ScanError("its file is a series in time")
        return stored_values(image)


def load_nifti(path: Path) -> Any:
    """Open a volume and read its header; values are read on access. Its size is checked before it is unpacked."""
    nibabel = load_library("a volume", "nibabel")
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        start = file.read(LONGEST_HEADER)
    # In either byte order
    length = min(int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big"))
    kind = nibabel.Nifti2Header if length == LONGEST_HEADER else nibabel.Nifti1Header
    header = kind.from_fileobj(io.BytesIO(start), check=False)
    check_picture(header.get_data_shape()[:3], "its volume")
    if not 0 <= header.get_data_offset() <= MOST_BEFORE:
        raise TooLargeError(
            f"its header says that the voxels begin after {MOST_BEFORE >> 20} MiB or more"
        )
    image = nibabel.load(path)
    if (
        len(nifti_shape(image)) not in (3, 4)
        or 0 in image.shape
        or image.get_data_dtype().names
    ):
        raise ScanError(
            f"its file is no volume of grey values, but {' x '.join(map(str, image.shape))}"
        )
    return image


def nifti_shape(image: Any) -> Shape:
    """Return a volume's shape without axes of length 1 behind the third."""
    shape = tuple(image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def nifti_grid(image: Any, *, straight: bool) -> Grid:
    """Return the grid of a volume, or of the first one. Raises ScanError where it is none."""
    width, depth, height = image.shape[:3]
    grid = Grid((width, depth, height), RAS @ np.asarray(image.affine, float))
    check_grid(grid, straight=straight)
    return grid


def stored_values(image: Any) -> Array:
    """Return a volume's values along the file's own axes, float32; of several times or channels the first."""
    first = (..., *[0] * (len(image.shape) - 3))
    values = np.asarray(
        image.dataobj[first] if len(image.shape) > 3 else image.dataobj, np.float32
    )
    return np.require(values, requirements="W")


# The scans of one patient, which are read consecutively, often have one mask
@lru_cache(maxsize=1)
def stored_classes(path: Path, changed: int) -> Array:
    """Read the classes of a mask along the file's own axes, uint8 (i, j, k). Raises ScanError for other values."""
    values = np.nan_to_num(stored_values(load_nifti(path)), copy=False)
    classes = np.rint(values)
    if classes.min() < 0 or classes.max() > 255 or np.abs(values - classes).max() > 1e-3:
        raise ScanError(
            "its mask has values that are no classes 0, 1, 2, ... 254; 255 does not count"
        )
    stored: Array = classes.astype(np.uint8)
    return stored
