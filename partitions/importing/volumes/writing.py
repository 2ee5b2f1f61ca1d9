"""Files of predicted outlines: NIfTI, and for a DICOM series also a SEG object.

Both have the voxels of the source. The NIfTI file has the source's affine, and nothing else of its header. The SEG
object belongs to the source's study. As the standard requires, it repeats patient and study of the source's header, and
refers to each slice. It is for the hospital's archive.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.files import write_atomically
from partitions.importing.scans import Paths, ScanError, Unavailable, redacted_errors
from partitions.importing.volumes import nifti
from partitions.importing.volumes.grid import RAS
from partitions.importing.volumes.series import Series, read_series
from partitions.importing.volumes.volume import as_source, is_nifti
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array

# What the standard allows to be empty, but not to be missing (PS3.3, C.7.1.1 and C.7.2.1).
MAY_BE_EMPTY = re.findall(
    r"\w+",
    "PatientName PatientID PatientBirthDate PatientSex StudyDate StudyTime StudyID AccessionNumber "
    "ReferringPhysicianName",
)
SERIES = 9001  # number of the series of outlines in its study
# The category of every segment, whose label gives the meaning
TISSUE = ("85756007", "SCT", "Tissue")


def check_writable(sources: Iterable[Paths]) -> None:
    """Raise DataError where the library that writes SEG objects is missing, and one of the sources is a series."""
    if any(not is_nifti(files) for files in sources):
        _highdicom()


def _highdicom() -> Any:
    try:
        import highdicom
    except ImportError:
        raise Unavailable("a SEG object", "highdicom", "written") from None
    return highdicom


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
    own, grid = as_source(mask, files, where, reading)
    written = [to.with_name(f"{to.name}.nii.gz")]
    if is_nifti(files):
        write_nifti(written[0], own, np.asarray(nifti.load(files[0]).affine))
    else:
        write_nifti(
            written[0], np.transpose(own, (2, 1, 0)), (RAS @ grid.affine)[:, [2, 1, 0, 3]]
        )
        written.append(to.with_name(f"{to.name}.dcm"))
        write_segmentation(written[1], files, own, classes, where)
    return written


def write_nifti(path: Path, mask: Array, affine: Array) -> None:
    """Write classes (i, j, k), uint8, as a compressed NIfTI file; the same classes give the same bytes."""
    import nibabel

    make: Any = nibabel.Nifti1Image
    image = make(np.ascontiguousarray(mask, np.uint8), affine)
    write_atomically(path, gzip.compress(image.to_bytes(), mtime=0))


def _sources(series: Series) -> list[Any]:
    """Return the headers of a series' files, with what the standard demands of the source of outlines."""
    from pydicom import dcmread

    paths = list(dict.fromkeys(plane.path for plane in series.planes))
    sources = [dcmread(own, stop_before_pixels=True) for own in paths]
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

        highdicom, series = _highdicom(), read_series(files)
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
        made = highdicom.seg.Segmentation(
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
        made.save_as(content)
    write_atomically(path, content.getvalue())
