"""NIfTI volumes and masks as axial slices in one orientation.

A volume is turned to the nearest canonical axes (``grid.py``), as whole volumes are, so that slices are axial for all
axes of files: the front above, the patient's right on the left, as in viewers and in DICOM. Of a series in time the
first volume is used. Values are converted by the file's slope and intercept. Then the range from the 0.5th to the
99.5th percentile of the whole volume, or the requested window, is mapped to 0..1. Nothing else in the header is used.
"""

from __future__ import annotations

import gzip
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from partitions.common.sizes import MOST_BEFORE, TooLargeError, check_picture
from partitions.importing.scans import ImageInfo, ScanError, Unavailable, fit, fitted, hashed, parts_of, redacted_errors
from partitions.importing.volumes.grid import RAS, Grid, check_spacing, same_place
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.splits import Array

FIRST = "have several times or channels: the first is taken"
PERCENTILES = (0.5, 99.5)
LONGEST_HEADER = 540  # bytes, of NIfTI-2


def read_stored(path: Path, where: str) -> Array:
    """Read a volume's values along the file's own axes, float32 (i, j, k)."""
    with redacted_errors(where, "NIfTI"):
        image = load(path)
        if len(shape_of(image)) != 3:
            raise ScanError("its file is a series in time")
        return stored(image)


def parts(path: Path, where: str, reading: ReadOptions) -> tuple[list[int], int]:
    """Return which axial slices of a volume to use, and how many it has."""
    with redacted_errors(where, "NIfTI"):
        depth = grid_of(load(path)).canonical.shape[0]
        return parts_of(depth, reading.slices), depth


def probe(path: Path, where: str, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a slice. The volume counts as a patient, so that its slices are all in one split."""
    with redacted_errors(where, "NIfTI"):
        image = load(path)
        grid = grid_of(image).canonical
        sides = fitted(*grid.shape[1:], grid.pixel, reading)
        taken = Acquisition("nifti", plane="axial", pixel=min(grid.pixel))
        notes = (FIRST,) if len(shape_of(image)) > 3 else ()
        return ImageInfo(*sides, 1, True, hashed(str(path.resolve())), notes, taken)


def read(path: Path, where: str, reading: ReadOptions, part: int | None) -> Array:
    """Read a slice, float32 (h, w, 1) in 0..1."""
    with redacted_errors(where, "NIfTI"):
        grid, values, low, high = _volume(path, path.stat().st_mtime_ns, reading.window)
        scale = high - low
        shown = np.clip((_slice(grid, values, part) - low) / (scale if scale > 0 else 1), 0, 1)
        picture = Image.fromarray(np.ascontiguousarray(shown, np.float32))
        made = fit(picture, grid.canonical.pixel, reading, Image.Resampling.BILINEAR)
        return np.asarray(made)[..., np.newaxis]


def read_mask(path: Path, mask: Path, where: str, reading: ReadOptions, part: int | None) -> Array:
    """Read a slice of the volume's mask, uint8 (h, w). Raises an error unless the mask has the volume's geometry."""
    with redacted_errors(where, "NIfTI"):
        ours = load(mask)
        if len(shape_of(ours)) != 3:
            raise ScanError("its mask has several times or channels: save classes 0, 1, 2, ... in one")
        grid = grid_of(ours)
        if not same_place(grid, grid_of(load(path))):
            raise ScanError("its mask does not lie on its volume: another shape or another affine")
        classes = _slice(grid, stored_classes(mask, mask.stat().st_mtime_ns), part)
        picture = Image.fromarray(np.ascontiguousarray(classes))
        return np.asarray(fit(picture, grid.canonical.pixel, reading, Image.Resampling.NEAREST))


def _nibabel() -> Any:
    try:
        import nibabel
    except ImportError:
        raise Unavailable("NIfTI", "nibabel") from None
    return nibabel


def load(path: Path) -> Any:
    """Open a volume and read its header; values are read on access. Its size is checked before it is unpacked."""
    nibabel = _nibabel()
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        start = file.read(LONGEST_HEADER)
    header = (nibabel.Nifti2Header if _length(start) == LONGEST_HEADER else nibabel.Nifti1Header).from_fileobj(
        io.BytesIO(start), check=False
    )
    check_picture(header.get_data_shape()[:3], "its volume")
    if not 0 <= header.get_data_offset() <= MOST_BEFORE:
        raise TooLargeError(f"its header says that the voxels begin after {MOST_BEFORE >> 20} MiB or more")
    image = nibabel.load(path)
    if len(shape_of(image)) not in (3, 4) or 0 in image.shape or image.get_data_dtype().names:
        raise ScanError(f"its file is no volume of grey values, but {' x '.join(map(str, image.shape))}")
    return image


def shape_of(image: Any) -> tuple[int, ...]:
    """Return a volume's shape without axes of length 1 behind the third."""
    shape = tuple(image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def stored(image: Any) -> Array:
    """Return a volume's values along the file's own axes, float32; of several times or channels the first."""
    first = (..., *[0] * (len(image.shape) - 3))
    values = np.asarray(image.dataobj[first] if len(image.shape) > 3 else image.dataobj, np.float32)
    return np.require(values, requirements="W")


def _length(start: bytes) -> int:
    """Return the length that a header states, in either byte order."""
    return min(int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big"))


def grid_of(image: Any) -> Grid:
    """Return the grid of a volume, or of the first one. Raises ScanError where its voxels have no size."""
    width, depth, height = image.shape[:3]
    grid = Grid((width, depth, height), RAS @ np.asarray(image.affine, float))
    check_spacing(grid)
    return grid


def _slice(grid: Grid, values: Array, part: int | None) -> Array:
    """Return an axial slice (h, w) of values along the file's own axes; None: the middle one."""
    turned: Array = grid.turned(values)
    return np.asarray(turned[len(turned) // 2 if part is None else part])


@lru_cache(maxsize=1)  # the slices of a volume are read consecutively
def _volume(path: Path, changed: int, window: tuple[float, float] | None) -> tuple[Grid, Array, float, float]:
    """Return the grid, the values along the file's own axes, and those of black and white."""
    image = load(path)
    values = finite(stored(image))
    low, high = (window[0] - window[1] / 2, window[0] + window[1] / 2) if window else np.percentile(values, PERCENTILES)
    return grid_of(image), values, float(low), float(high)


@lru_cache(maxsize=1)  # the scans of one patient, which are read consecutively, often have one mask
def stored_classes(path: Path, changed: int) -> Array:
    """Read the classes of a mask along the file's own axes, uint8 (i, j, k)."""
    return classes_of(stored(load(path)))


def finite(values: Array) -> Array:
    """Replace infinities and NaN by ``nan_to_num``; return the array itself where there are none."""
    return values if np.isfinite(values).all() else np.nan_to_num(values)


def classes_of(values: Array) -> Array:
    """Return the classes in a mask, uint8. Raises ScanError for values that are not classes."""
    values = finite(values)
    classes = np.rint(values)
    if classes.min() < 0 or classes.max() > 255 or np.abs(values - classes).max() > 1e-3:
        raise ScanError("its mask has values that are no classes 0, 1, 2, ... 254; 255 does not count")
    made: Array = classes.astype(np.uint8)
    return made
