"""Predicted outlines of volumes, written as files on the voxels of the scans that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from client.tables.new_samples import Asked
from partitions.common.errors import DataError, UserError
from partitions.importing.volumes.writing import check_writable, write_masks
from partitions.splits import Array


def check_folder(folder: Path, asked: Asked) -> None:
    """Raise UserError where outlines cannot go into this folder, before anything is predicted."""
    if asked.pictures is None or asked.pictures.recipe.reading.volume is None:
        raise UserError(f"--masks {folder}: a folder is for volumes, which scans give; name a file that ends in .npz")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--masks {folder} is there already, and not an empty folder: name another one")
    try:
        check_writable(sample.files for sample in asked.pictures.samples)
    except DataError as error:
        raise UserError(str(error)) from None


def write_outlines(folder: Path, asked: Asked, outlines: Array, labels: Sequence[str]) -> list[str]:
    """Write the outlines (n, d, h, w) as 0001.nii.gz, of a series also 0001.dcm; each volume's NIfTI file.

    ``labels``: names of the classes 0, 1, ..., if they have some. Raises UserError, one line.
    """
    assert asked.pictures is not None
    most = max(int(outlines.max(initial=0)), 1)
    classes = labels or [f"class {i}" for i in range(most + 1)]
    reading, names = asked.pictures.recipe.reading, []
    for number, (sample, mask) in enumerate(zip(asked.pictures.samples, outlines, strict=True), 1):
        try:
            written = write_masks(folder / f"{number:04}", mask, sample.files, classes, sample.where, reading)
        except DataError as error:
            raise UserError(f"{error}; {number - 1} of {len(outlines)} outlines are in {folder}") from None
        names.append(written[0].name)
    return names
