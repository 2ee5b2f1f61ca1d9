"""Positions of a scan's voxels, its reorientation and resampling, and the inverse for outlines.

Positions are in mm in DICOM's patient coordinates: x to the patient's left, y to the back, z to the head (LPS). A
volume is turned, without resampling, to the nearest canonical axes (nibabel): slices from feet to head, rows from front
to back, columns from the patient's right to the left. An oblique volume stays oblique.

Then each axis is resampled separately about its centre: values by linear interpolation over max(1, step) voxels, as in
Pillow's bilinear filter (a triangle, which averages where voxels become fewer), classes by the nearest voxel. Outside
the source the value is 0. scipy.ndimage does not average where voxels become fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partitions.importing.readers.reader import ScanError, load_library
from partitions.recipes.reading import Pair, ReadOptions
from partitions.splits import Array

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
    def pixel(self) -> Pair:
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
        a, b, c = (self.shape[axis] for axis in np.argsort(transform[:, 0]))
        affine = self.affine @ orientations.inv_ornt_aff(transform, self.shape)
        return Grid((a, b, c), affine)

    def turn(self, values: Array, *, back: bool = False) -> Array:
        """Turn values (n0, n1, n2) to canonical axes, or from these ``back`` to those of the source."""
        orientations = load_library("a volume", "nibabel").orientations
        ends = (CANONICAL, self.orientation) if back else (self.orientation, CANONICAL)
        transform = orientations.ornt_transform(*ends)
        return np.asarray(orientations.apply_orientation(values, transform))


def check_grid(grid: Grid, *, straight: bool) -> None:
    """Raise ScanError where voxels have no size or, if it is to be ``straight``, axes are not at right angles."""
    sized = (grid.spacing > 0) & (grid.spacing < 1000)
    if not np.isfinite(grid.affine).all() or not sized.all():
        raise ScanError("its header does not say how large a voxel is")
    cosines = grid.affine[:3, :3] / grid.spacing
    if straight and np.abs(cosines.T @ cosines - np.eye(3)).max() > LARGEST_COSINE:
        raise ScanError(
            "its axes are not at right angles (a tilted gantry?): resample it to a straight volume first"
        )


def steps(grid: Grid, reading: ReadOptions) -> tuple[tuple[int, int, int], Array]:
    """Return the new shape of a turned volume, and the width of a new voxel in old voxels along each axis."""
    assert reading.volume is not None
    if reading.voxel is None:
        return reading.volume, np.divide(grid.canonical.shape, reading.volume)
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
            nearby = np.clip(index, 0, count_before - 1)
            values = np.take(values, nearby, axis)
            values[(slice(None),) * axis + (index != nearby,)] = 0
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
