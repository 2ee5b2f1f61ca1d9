"""Reader of NIfTI volumes slice by slice, and of whole volumes, NIfTI or a DICOM series."""

from __future__ import annotations

from pathlib import Path

from partitions.importing.readers.reader import (
    FileSummary,
    ImageInfo,
    Paths,
    Reader,
    SampleSource,
    redacted_errors,
)
from partitions.importing.readers.volumes import volume
from partitions.importing.readers.volumes.nifti_file import ENDINGS, begins_nifti, load_nifti
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array


def files_of(sample: SampleSource) -> Paths:
    """Return the files of a sample's volume."""
    return sample.files or (sample.path,)


def _probe(sample: SampleSource, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a volume, or of its slice."""
    return volume.probe_volume(files_of(sample), sample.where, reading)


def _read(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a volume, float32 (d, h, w, 1) in 0..1, or its slice, (h, w, 1)."""
    return volume.read_volume(files_of(sample), sample.where, reading, sample.part)


def _describe(path: Path, where: str) -> FileSummary:
    """Return size, type and spacing of a volume."""
    with redacted_errors(where, "NIfTI"):
        image = load_nifti(path)
        shape = tuple(image.shape)
        zooms = [abs(float(mm)) for mm in image.header.get_zooms()[:3]]
        values = [
            ("size", " x ".join(map(str, shape[:3]))),
            ("numbers", str(image.get_data_dtype())),
        ]
        if len(shape) > 3:
            values.append(("times", "several, of which slices take the first and volumes none"))
        values.append(("spacing", " x ".join(f"{mm:.3g}" for mm in zooms) + " mm"))
        return FileSummary("NIfTI volumes", values, slices=min(shape[:3]), pixel=min(zooms))


# Of any sample of several files or a whole volume, too
READER = Reader("nifti", ENDINGS, begins_nifti, _probe, _read, _describe)
