"""Scans, NIfTI or a DICOM series, as whole volumes or slices: image info, values in 0..1, and classes.

* Values are in the machine's unit. The requested window, or else the range from the 0.5th to the 99.5th percentile of
  the volume without padding, is mapped to 0..1. MONOCHROME1 is inverted.
* A volume is turned to canonical axes (``grid.py``), so that its slices are axial: the front above, the patient's right
  on the left, as in viewers. A whole volume is resampled to the requested voxels.
* A NIfTI file and a DICOM series of the same scan give the same result.
* Predicted outlines are written as NIfTI, and for a DICOM series also as a SEG object, with the voxels of the source.
  The NIfTI file has the source's affine, and nothing else of its header. The SEG object belongs to the source's study.
  As the standard requires, it repeats patient and study of the source's header, and refers to each slice. It is for the
  hospital's archive.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from partitions.common.files import write_atomically
from partitions.common.names import words_in
from partitions.common.sizes import check_picture
from partitions.importing.readers.reader import (
    ImageInfo,
    Paths,
    ScanError,
    first_bytes,
    fit_picture,
    fitted_size,
    hash_text,
    load_library,
    redacted_errors,
    slices_taken,
)
from partitions.importing.readers.volumes.grid import RAS, Grid, resample, steps
from partitions.importing.readers.volumes.nifti_file import (
    ENDINGS,
    begins_nifti,
    load_nifti,
    nifti_grid,
    nifti_shape,
    says_how_it_lies,
    stored_classes,
    stored_values,
)
from partitions.importing.readers.volumes.series import Scan, draw_outlines, read_series
from partitions.recipes.reading import Acquisition, Pair, ReadOptions
from partitions.splits import Array

PERCENTILES = (0.5, 99.5)
NO_UNIT_WINDOW = "have no window: they reach over their own 99 %; --window gives all the same"
FIRST = "have several times or channels: the first is taken"
NO_PLACE = "do not say how the patient lies (no qform, no sform): left and right, or the slices, may be exchanged"


def is_volume(files: Paths) -> bool:
    """Return whether this is a NIfTI file, not a series."""
    start, name = first_bytes(files[0]), files[0].name.lower()
    return len(files) == 1 and (begins_nifti(start) or name.endswith(ENDINGS))


def title_of(files: Paths) -> str:
    """Return the name of the files' format, for messages."""
    return "NIfTI" if is_volume(files) else "DICOM"


def open_scan(files: Paths, *, whole: bool) -> Scan:
    """Read the headers of a scan, to be used as a whole or slice by slice. Raises ScanError."""
    if not is_volume(files):
        return read_series(files)
    path = files[0]
    image = load_nifti(path)
    several = len(nifti_shape(image)) > 3
    if whole and several:
        raise ScanError(
            "its file is a series in time; save the volume to be used as a file of its own"
        )

    def values() -> tuple[Array, Array]:
        stored = stored_values(image)
        return stored, ~np.isfinite(stored)

    # The volume counts as a patient, so that its slices are all in one split.
    whose = (hash_text(str(path.resolve())),) * 2
    grid, taken = nifti_grid(image, straight=whole), Acquisition("nifti", plane="axial")
    notes = (FIRST,) * several + (NO_PLACE,) * (not says_how_it_lies(image))
    return Scan(grid, taken, notes, whose, values)


def volume_parts(path: Path, where: str, reading: ReadOptions) -> tuple[list[int | None], int]:
    """Return which axial slices of a NIfTI volume to use, and how many it has."""
    with redacted_errors(where, "NIfTI"):
        depth = open_scan((path,), whole=False).grid.canonical.shape[0]
        return [*slices_taken(depth, reading.slices)], depth


def probe_volume(files: Paths, where: str, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a volume, or of its slices, from the headers."""
    if reading.volume:
        check_picture(reading.volume, f"{where}: --volume {','.join(map(str, reading.volume))}")
    with redacted_errors(where, title_of(files)):
        scan = open_scan(files, whole=reading.volume is not None)
        turned, (whose, spelling) = scan.grid.canonical, scan.patient
        taken = replace(scan.acquired, pixel=min(turned.pixel))
        if not reading.volume:
            sides = fitted_size(*turned.shape[1:], turned.pixel, reading)
            return ImageInfo(*sides, 1, True, whose, scan.notes, taken)
        notes = scan.notes + (NO_UNIT_WINDOW,) * (taken.modality == "CT" and not reading.window)
        taken = replace(taken, between=float(turned.spacing[0]))
        depth, height, width = reading.volume
        return ImageInfo(height, width, 1, True, whose, notes, taken, depth, spelling)


def read_volume(
    files: Paths, where: str, reading: ReadOptions, part: int | None = None
) -> Array:
    """Read a volume, float32 (d, h, w, 1) in 0..1, or its slice ``part``, (h, w, 1); None: the middle one."""
    with redacted_errors(where, title_of(files)):
        if reading.volume is None:
            grid, values = shown_of_file(files[0], files[0].stat().st_mtime_ns, reading.window)
            plane = axial_slice(grid, values, part, reading, Image.Resampling.BILINEAR)
            return plane[..., np.newaxis]
        scan = open_scan(files, whole=True)
        shape, step = steps(scan.grid, reading)
        values = scan.grid.turn(scale_window(scan, reading.window))
        return resample(values, shape, step).astype(np.float32)[..., np.newaxis]


@lru_cache(maxsize=1)  # the slices of a volume are read consecutively
def shown_of_file(path: Path, changed: int, window: Pair | None) -> tuple[Grid, Array]:
    """Return the grid of a NIfTI file, and its values as :func:`scale_window`."""
    scan = open_scan((path,), whole=False)
    return scan.grid, scale_window(scan, window)


def axial_slice(
    grid: Grid,
    values: Array,
    part: int | None,
    reading: ReadOptions,
    resampling: Image.Resampling,
) -> Array:
    """Return an axial slice (h, w), of the requested size; None: the middle one."""
    turned = grid.turn(values)
    plane = turned[len(turned) // 2 if part is None else part]
    picture = Image.fromarray(np.ascontiguousarray(plane))
    return fit_picture(picture, grid.canonical.pixel, reading, resampling)


def scale_window(scan: Scan, window: Pair | None) -> Array:
    """Read a scan's values as 0..1, float32; in place, because a volume may take a large share of the free memory."""
    values, padding = scan.values()
    low = high = 0.0
    if window:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    elif (seen := values[~padding]).size:
        low, high = np.percentile(seen, PERCENTILES, overwrite_input=True)
        del seen
    scaled = np.nan_to_num(values, copy=False)
    scaled -= np.float32(low)
    scaled /= np.float32(high - low if high > low else 1.0)
    np.clip(scaled, 0, 1, out=scaled)
    if scan.acquired.photometric == "MONOCHROME1":
        np.subtract(1, scaled, out=scaled)
    scaled[padding] = 0
    return scaled


def read_volume_mask(
    files: Paths, masks: Paths, where: str, reading: ReadOptions, part: int | None = None
) -> Array:
    """Read the classes of a volume, uint8 (d, h, w), or of its slice, (h, w).

    They are in a NIfTI file, or outlines of a DICOM series. Raises DataError unless they lie on the volume.
    """
    whole = reading.volume is not None
    with redacted_errors(where, title_of(masks)):
        grid = open_scan(files, whole=whole).grid
        if is_volume(masks):
            image = load_nifti(masks[0])
            if len(nifti_shape(image)) != 3:
                raise ScanError(
                    "its mask has several times or channels: save classes 0, 1, 2, ... in one"
                )
            mask_grid = nifti_grid(image, straight=whole)
            here, there = mask_grid.canonical, grid.canonical  # whatever the order of storage
            if here.shape != there.shape or not np.allclose(
                here.affine, there.affine, atol=1e-2
            ):
                raise ScanError(
                    "its mask does not lie on its volume: another shape or another affine"
                )
            classes = stored_classes(masks[0], masks[0].stat().st_mtime_ns)
            if not whole:
                return axial_slice(mask_grid, classes, part, reading, Image.Resampling.NEAREST)
            turned = mask_grid.turn(classes)
        elif is_volume(files):
            raise ScanError("its mask is DICOM, and its volume NIfTI; convert one of them")
        elif not reading.outlines:
            raise ScanError(
                "its outlines need names: --outlines A,B makes them the classes 1 and 2"
            )
        else:
            turned = grid.turn(draw_outlines(masks, reading.outlines, grid))
        shape, step = steps(grid, reading)
        return resample(turned, shape, step, nearest=True)


def as_source(
    mask: Array, files: Paths, where: str, reading: ReadOptions
) -> tuple[Array, Grid]:
    """Return a mask (d, h, w) of a volume on the voxels of its source, uint8, 0 outside, and the source's grid."""
    with redacted_errors(where, title_of(files)):
        grid = open_scan(files, whole=True).grid
        _, step = steps(grid, reading)
        resampled = resample(mask, grid.canonical.shape, 1 / step, nearest=True)
        return grid.turn(resampled, back=True), grid


# Files of predicted outlines

# What the standard allows to be empty, but not to be missing (PS3.3, C.7.1.1 and C.7.2.1).
MAY_BE_EMPTY = words_in(
    "PatientName PatientID PatientBirthDate PatientSex StudyDate StudyTime StudyID AccessionNumber "
    "ReferringPhysicianName"
)
SERIES = 9001  # number of the series of outlines in its study
SEG_WRITER = ("a SEG object", "highdicom", "written")
# The category of every segment, whose label gives the meaning
TISSUE = ("85756007", "SCT", "Tissue")


def check_writable(sources: Iterable[Paths]) -> None:
    """Raise DataError where the library that writes SEG objects is missing, and one of the sources is a series."""
    if any(not is_volume(files) for files in sources):
        load_library(*SEG_WRITER)


def write_masks(
    to: Path,
    mask: Array,
    files: Paths,
    classes: Sequence[str],
    where: str,
    reading: ReadOptions,
) -> list[Path]:
    """Write a volume's mask (d, h, w) as TO.nii.gz, and for a series also as TO.dcm; return the written files.

    ``classes``: names of 0, 1, ...
    """
    on_source, grid = as_source(mask, files, where, reading)
    written = [to.with_name(f"{to.name}.nii.gz")]
    if is_volume(files):
        write_nifti(written[0], on_source, np.asarray(load_nifti(files[0]).affine))
    else:
        write_nifti(
            written[0], np.transpose(on_source, (2, 1, 0)), (RAS @ grid.affine)[:, [2, 1, 0, 3]]
        )
        written.append(to.with_name(f"{to.name}.dcm"))
        write_segmentation(written[1], files, on_source, classes, where)
    return written


def write_nifti(path: Path, mask: Array, affine: Array) -> None:
    """Write classes (i, j, k), uint8, as a compressed NIfTI file; the same classes give the same bytes."""
    import nibabel

    make: Any = nibabel.Nifti1Image
    image = make(np.ascontiguousarray(mask, np.uint8), affine)
    write_atomically(path, gzip.compress(image.to_bytes(), mtime=0))


def _sources(series: Scan) -> list[Any]:
    """Return the headers of a series' files, with what the standard demands of the source of outlines."""
    from pydicom import dcmread

    paths = list(dict.fromkeys(plane.path for plane in series.planes))
    sources = [dcmread(path, stop_before_pixels=True) for path in paths]
    for source in sources:
        for keyword in MAY_BE_EMPTY:
            if keyword not in source:
                setattr(source, keyword, None)
        if len(paths) > 1 and not source.get("SliceThickness"):
            # Of the outline: it fills the slices
            source.SliceThickness = f"{series.grid.spacing[0]:.6g}"
    return sources


def write_segmentation(
    path: Path, files: Paths, mask: Array, classes: Sequence[str], where: str
) -> None:
    """Write classes (slice, row, column) of a series as a SEG object. Raises DataError, one line."""
    with redacted_errors(
        where, "DICOM", ": a SEG object needs all that the standard demands of its source"
    ):
        from pydicom.sr.codedict import codes
        from pydicom.sr.coding import Code

        highdicom, series = load_library(*SEG_WRITER), read_series(files)
        if len(files) > 1 and len(files) < len(series.planes):
            raise ScanError(
                "its series has several files of several frames each, to which no SEG object can refer"
            )
        order = np.argsort([plane.frame for plane in series.planes])
        frames = mask if len(files) > 1 else mask[order]
        algorithm = highdicom.AlgorithmIdentificationSequence(
            name="silofl", version=version("silofl"), family=codes.DCM.ArtificialIntelligence
        )
        described = [
            highdicom.seg.SegmentDescription(
                segment_number=number,
                segment_label=label[:64],
                segmented_property_category=Code(*TISSUE),
                segmented_property_type=Code(*TISSUE),
                algorithm_type="AUTOMATIC",
                algorithm_identification=algorithm,
            )
            for number, label in enumerate(classes[1:], 1)
        ]
        segmentation = highdicom.seg.Segmentation(
            source_images=_sources(series),
            pixel_array=np.ascontiguousarray(frames, np.uint8),
            segmentation_type="BINARY",
            segment_descriptions=described,
            series_instance_uid=highdicom.UID(),
            series_number=SERIES,
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer="silofl",
            manufacturer_model_name="silofl",
            software_versions=version("silofl"),
            device_serial_number="none",
        )
        content = io.BytesIO()
        segmentation.save_as(content)
    write_atomically(path, content.getvalue())
