"""Predicted outlines of volumes, written as files on the voxel grids of their scans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from client.tables.new_samples import Asked
from partitions.common.errors import DataError, UserError
from partitions.importing.volumes.writing import check_writable, write_masks
from partitions.splits import Array


def check_folder(folder: Path, asked: Asked) -> None:
    """Raise UserError if outlines cannot be written to this folder, before anything is predicted."""
    if asked.pictures is None or asked.pictures.recipe.reading.volume is None:
        raise UserError(f"--masks {folder}: a folder is for volumes, which scans give; name a file that ends in .npz")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--masks {folder} is there already, and not an empty folder: name another one")
    try:
        check_writable(sample.files for sample in asked.pictures.samples)
    except DataError as error:
        raise UserError(str(error)) from None


def write_outlines(folder: Path, asked: Asked, outlines: Iterable[Array], classes: Sequence[str]) -> list[str]:
    """Write the outlines, each (d, h, w), as 0001.nii.gz, for a series also 0001.dcm; return the NIfTI files.

    ``classes``: names of the classes 0, 1, .... Raises UserError, one line, also where a volume cannot be read.
    """
    assert asked.pictures is not None
    reading, samples, names = asked.pictures.recipe.reading, asked.pictures.samples, list[str]()
    try:
        for sample, mask in zip(samples, outlines, strict=True):
            to = folder / f"{len(names) + 1:04}"
            names.append(write_masks(to, mask, sample.files, classes, sample.where, reading)[0].name)
    except DataError as error:
        done = f"; {len(names)} of {len(samples)} outlines are in {folder}" if names else ""
        raise UserError(f"{error}{done}") from None
    return names
