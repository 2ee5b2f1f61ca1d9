"""A whole volume of a source: its image info, its values in 0..1 on the requested voxels, and its classes.

The requested window, or else the range from the 0.5th to the 99.5th percentile of the volume without padding, is mapped
to 0..1. MONOCHROME1 is inverted. A NIfTI file and a DICOM series of the same scan give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from partitions.common.sizes import check_picture
from partitions.importing.scans import ImageInfo, ScanError, hashed, pseudonym, redacted_errors
from partitions.importing.volumes import nifti
from partitions.importing.volumes.grid import Grid, check_grid, resampled, same_place, steps
from partitions.importing.volumes.outlines import draw
from partitions.importing.volumes.series import read_series, values_of
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.splits import Array

PERCENTILES = (0.5, 99.5)
NO_UNIT_WINDOW = "have no window: they reach over their own 99 %; --window gives all the same"


def is_nifti(files: Sequence[Path]) -> bool:
    """Return whether this is a NIfTI file, not a series."""
    return len(files) == 1 and files[0].name.lower().endswith((".nii", ".nii.gz"))


def probe(files: Sequence[Path], where: str, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a volume from its headers."""
    assert reading.volume is not None
    depth, height, width = reading.volume
    check_picture(reading.volume, f"{where}: --volume {depth},{height},{width}")
    kind = "NIfTI" if is_nifti(files) else "DICOM"
    with redacted_errors(where, kind):
        if kind == "NIfTI":
            turned = nifti_grid(files[0]).canonical
            taken, whose = Acquisition("nifti", plane="axial"), [hashed(str(files[0].resolve()))] * 2
            notes: tuple[str, ...] = ()
        else:
            series = read_series(files)
            turned, taken = series.grid.canonical, series.acquired
            whose = [pseudonym(series.patient), hashed(series.patient)]
            notes = series.notes + (() if reading.window or taken.modality != "CT" else (NO_UNIT_WINDOW,))
        between, *across = turned.spacing.tolist()
        taken = replace(taken, pixel=min(across), between=between)
        return ImageInfo(height, width, 1, True, whose[0], notes, taken, depth, whose[1])


def nifti_grid(path: Path) -> Grid:
    """Return the grid of a NIfTI file. Raises ScanError."""
    image = nifti.load(path)
    if len(nifti.shape_of(image)) != 3:
        raise ScanError("its file is a series in time; save the volume to be used as a file of its own")
    grid = nifti.grid_of(image)
    check_grid(grid)
    return grid


def grid_of(files: Sequence[Path]) -> Grid:
    """Return the grid of a volume. Raises ScanError."""
    return nifti_grid(files[0]) if is_nifti(files) else read_series(files).grid


def read(files: Sequence[Path], where: str, reading: ReadOptions) -> Array:
    """Read a volume, float32 (d, h, w, 1) in 0..1."""
    with redacted_errors(where, "NIfTI" if is_nifti(files) else "DICOM"):
        if is_nifti(files):
            grid = nifti_grid(files[0])
            values = nifti.stored(nifti.load(files[0]))
            padding, inverted = ~np.isfinite(values), False
        else:
            series = read_series(files)
            grid, (values, padding) = series.grid, values_of(series)
            inverted = series.acquired.photometric == "MONOCHROME1"
        shown = windowed(values, padding, reading.window)
        if inverted:
            np.subtract(1, shown, out=shown)
        shown[padding] = 0
        shape, step = steps(grid, reading)
        return resampled(grid.turned(shown), shape, step).astype(np.float32)[..., np.newaxis]


def windowed(values: Array, padding: Array, window: tuple[float, float] | None) -> Array:
    """Map values to 0..1, float32, in place, because a volume may take a large share of the free memory."""
    if window:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    else:
        seen = values[~padding]
        low, high = np.percentile(seen, PERCENTILES, overwrite_input=True) if seen.size else (0.0, 0.0)
        del seen
    scale = high - low if high > low else 1.0
    shown = nifti.finite(values)
    shown -= np.float32(low)
    shown /= np.float32(scale)
    return np.clip(shown, 0, 1, out=shown)


def read_mask(files: Sequence[Path], masks: Sequence[Path], where: str, reading: ReadOptions) -> Array:
    """Read the classes of a volume, uint8 (d, h, w), from NIfTI or from the outlines of a DICOM series."""
    with redacted_errors(where, "NIfTI" if is_nifti(masks) else "DICOM"):
        grid = grid_of(files)
        if is_nifti(masks):
            own = nifti_grid(masks[0])
            if not same_place(own, grid):
                raise ScanError("its mask does not lie on its volume: another shape or another affine")
            turned = own.turned(nifti.stored_classes(masks[0], masks[0].stat().st_mtime_ns))
        elif is_nifti(files):
            raise ScanError("its mask is DICOM, and its volume NIfTI; convert one of them")
        elif not reading.outlines:
            raise ScanError("its outlines need names: --outlines A,B makes them the classes 1 and 2")
        else:
            turned = grid.turned(draw(masks, reading.outlines, grid))
        shape, step = steps(grid, reading)
        return resampled(turned, shape, step, nearest=True)


def as_source(mask: Array, files: Sequence[Path], where: str, reading: ReadOptions) -> tuple[Array, Grid]:
    """Return a mask (d, h, w) of a volume on the voxels of its source, uint8, 0 outside, and the source's grid."""
    with redacted_errors(where, "NIfTI" if is_nifti(files) else "DICOM"):
        grid = grid_of(files)
        _, step = steps(grid, reading)
        return grid.turned_back(resampled(mask, grid.canonical.shape, 1 / step, nearest=True)), grid
