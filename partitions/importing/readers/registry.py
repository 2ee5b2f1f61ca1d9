"""The readers of samples: the one of a file, and its samples one by one (``read_sample``).

Messages name a scan by a line of a csv or by a number, because hospitals write patients' names into file names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.importing.readers import dicom, edf, nifti, pictures, waveform, wfdb
from partitions.importing.readers.reader import ImageInfo, Reader, SampleSource, first_bytes
from partitions.importing.readers.volumes import volume
from partitions.labels import VOID
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array

# A new format is a module like these, and its place here: the first that recognises a file reads it
READERS: tuple[Reader, ...] = (
    waveform.READER,  # before DICOM, which it is
    dicom.READER,
    nifti.READER,
    edf.READER,
    wfdb.READER,
    pictures.READER,
)
# Of samples that no folder of DICOM files has, and whose names may be patients'
SCANS = (*nifti.ENDINGS, *edf.READER.endings, *wfdb.READER.endings)


def reader_of(path: Path) -> Reader:
    """Return the reader of a file, by its first bytes or else by its ending; that of pictures for any other file."""
    start, name = first_bytes(path), path.name.lower()
    by_start = (reader for reader in READERS if reader.recognises(start))
    by_name = (reader for reader in READERS if name.endswith(reader.endings))
    return next(by_start, None) or next(by_name, pictures.READER)


def kind_of(path: Path) -> str:
    """Return the name of a file's reader: nifti, signal, dicom or picture."""
    return reader_of(path).name


def is_sample(path: Path) -> bool:
    """Return whether a file is a picture, a NIfTI volume or a signal."""
    return path.name.lower().endswith(SCANS) or pictures.is_picture(path)


def paths_of(sample: SampleSource) -> list[Path]:
    """Return the files that a sample is read from, those that its header names included."""
    return [*(wfdb.record_files(sample.file) if sample.file else ()), *sample.masks]


def shown_name(path: Path) -> str:
    """Return a file's name for messages."""
    return path.name if kind_of(path) == "picture" else "its file"


def probe_sample(sample: SampleSource, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a sample. Raises DataError, one line, where it cannot be read."""
    if sample.path.is_dir():
        raise DataError(
            f"{sample.where}: its file is a folder; --volume takes one with a DICOM series as a volume"
        )
    return _reader_for(sample).probe(sample, reading)


def read_sample(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a sample: a picture, a slice or a signal as its reader does, a volume float32 (d, h, w, 1).

    Raises DataError, one line.
    """
    return _reader_for(sample).read(sample, reading)


def _reader_for(sample: SampleSource) -> Reader:
    reader = reader_of(sample.path)
    return nifti.READER if sample.files and reader.name != "signal" else reader


# Masks


def read_mask(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a sample's mask of classes, uint8 (h, w) or (d, h, w); of binary masks 255 is class 1. Raises DataError."""
    if reading.volume or kind_of(sample.masks[0]) == "nifti":
        files = nifti.files_of(sample)
        mask = volume.read_volume_mask(files, sample.masks, sample.where, reading, sample.part)
    else:
        mask = pictures.read_stored_classes(sample.masks[0], sample.where, reading)
    if not reading.binary_masks:
        return mask
    if not ((mask == 0) | (mask == VOID)).all():
        raise DataError(
            f"{sample.where}: its mask has values besides 0 and 255, and the recipe says binary-masks"
        )
    return np.asarray(mask == VOID, np.uint8)
