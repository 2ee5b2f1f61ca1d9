"""NIfTI volumes and masks as axial slices in one orientation.

A volume is turned to the nearest canonical orientation (RAS), so that slices are axial for all axes of files. A slice
is oriented as in viewers and in DICOM: the front above, the patient's right on the left. Of a series in time the first
volume is used. Values are converted by the file's slope and intercept. Then the range from the 0.5th to the 99.5th
percentile of the whole volume, or the requested window, is mapped to 0..1. Nothing else in the header is used.
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
        depth = _canonical(load(path))[0][2]
        return parts_of(depth, reading.slices), depth


def probe(path: Path, where: str, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a slice. The volume counts as a patient, so that its slices are all in one split."""
    with redacted_errors(where, "NIfTI"):
        (width, height, _), (across, along, _) = _canonical(load(path))
        sides = fitted(height, width, (along, across), reading)
        taken = Acquisition("nifti", plane="axial", pixel=min(across, along))
        notes = (FIRST,) if len(shape_of(load(path))) > 3 else ()
        return ImageInfo(*sides, 1, True, hashed(str(path.resolve())), notes, taken)


def read(path: Path, where: str, reading: ReadOptions, part: int | None) -> Array:
    """Read a slice, float32 (h, w, 1) in 0..1."""
    with redacted_errors(where, "NIfTI"):
        values, spacing, low, high = _volume(path, path.stat().st_mtime_ns, reading.window)
        scale = high - low
        shown = np.clip((_slice(values, part) - low) / (scale if scale > 0 else 1), 0, 1)
        picture = Image.fromarray(np.ascontiguousarray(shown, np.float32))
        return np.asarray(fit(picture, spacing, reading, Image.Resampling.BILINEAR))[..., np.newaxis]


def read_mask(path: Path, mask: Path, where: str, reading: ReadOptions, part: int | None) -> Array:
    """Read a slice of the volume's mask, uint8 (h, w). Raises an error unless the mask has the volume's geometry."""
    with redacted_errors(where, "NIfTI"):
        ours, theirs = load(mask), load(path)
        if len(shape_of(ours)) != 3:
            raise ScanError("its mask has several times or channels: save classes 0, 1, 2, ... in one")
        same = _canonical(ours)[0] == _canonical(theirs)[0] and np.allclose(ours.affine, theirs.affine, atol=1e-2)
        if not same:
            raise ScanError("its mask does not lie on its volume: another shape or another affine")
        values, spacing = _labels(mask, mask.stat().st_mtime_ns)
        picture = Image.fromarray(np.ascontiguousarray(_slice(values, part)))
        return np.asarray(fit(picture, spacing, reading, Image.Resampling.NEAREST))


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


def _canonical(image: Any) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Return shape and mm of a voxel along the patient's axes: left to right, back to front, feet to head."""
    axes = _nibabel().orientations.io_orientation(image.affine)[:, 0].astype(int).tolist()
    shape, zooms = [0, 0, 0], [0.0, 0.0, 0.0]
    for axis, place in enumerate(axes):
        shape[place], zooms[place] = image.shape[axis], abs(float(image.header.get_zooms()[axis]))
    if not all(0 < zoom < 1000 for zoom in zooms):
        raise ScanError("its header does not say how large a voxel is")
    return (shape[0], shape[1], shape[2]), (zooms[0], zooms[1], zooms[2])


def _values(path: Path) -> tuple[Array, tuple[float, float]]:
    """Read the first volume in canonical orientation, float32 (x, y, z), and the mm between rows and columns."""
    image, turning = load(path), _nibabel().orientations
    turned = turning.apply_orientation(stored(image), turning.io_orientation(image.affine))
    _, (across, along, _) = _canonical(image)
    return finite(turned), (along, across)


@lru_cache(maxsize=1)  # the slices of a volume are read consecutively
def _volume(
    path: Path, changed: int, window: tuple[float, float] | None
) -> tuple[Array, tuple[float, float], float, float]:
    """Return values, mm of a pixel, and the values of black and white."""
    values, spacing = _values(path)
    if window:
        return values, spacing, window[0] - window[1] / 2, window[0] + window[1] / 2
    low, high = np.percentile(values, PERCENTILES)
    return values, spacing, float(low), float(high)


@lru_cache(maxsize=1)
def _labels(path: Path, changed: int) -> tuple[Array, tuple[float, float]]:
    """Return classes, uint8 (x, y, z), and mm of a pixel."""
    values, spacing = _values(path)
    return classes_of(values), spacing


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


def _slice(volume: Array, part: int | None) -> Array:
    """Return an axial slice (h, w): rows from the front to the back, columns from the patient's right to the left."""
    return volume[::-1, ::-1, volume.shape[2] // 2 if part is None else part].T
