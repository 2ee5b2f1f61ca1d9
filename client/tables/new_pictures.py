"""New pictures and scans for ``silofl predict``, read by the recipe in a model's card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partitions.common.errors import DataError, UserError
from partitions.common.names import unknown_name
from partitions.importing.dicom import IDENTITY, read_key
from partitions.importing.discovery import find_others
from partitions.importing.files import Faults
from partitions.importing.images import SampleSource, kind_of
from partitions.importing.new_rows import NewPictures, new_pictures
from partitions.importing.options import ImportOptions
from partitions.importing.source import reading, with_recipe
from partitions.recipes.pictures import PictureRecipe

FILE = "file"
KEYS = (FILE, "patient", "study", "accession")  # possible keys of a prediction's row


@dataclass(frozen=True)
class Pictures:
    """Each picture's key, the name of the keys' column, the source of the pictures, and notes."""

    column: str
    keys: list[str]
    source: NewPictures
    notes: tuple[str, ...]


def read_new_pictures(data: Path, recipe: PictureRecipe, key: str = "") -> Pictures:
    """Return the pictures of a folder, a csv with a column ``file``, or one picture, from their headers.

    ``key``: one of :data:`KEYS`; "": the csv's column of patients, for DICOM files the PatientID, otherwise the file.
    Raises UserError, one line; notes list what was skipped.
    """
    if key and key not in KEYS:
        raise unknown_name("--key", key, KEYS)
    if not data.exists():
        raise UserError(f"there is no {data}; name a folder of pictures or scans, a csv, or an .npz file")
    try:
        with reading(data):
            options = with_recipe(ImportOptions(pictures=recipe, faults=Faults(None)))
            found = find_others(data, recipe, options, labelled=False)
            pictures, notes = new_pictures(found, recipe)
            column, keys = keys_of(data, pictures.samples, found.patient, key)
    except DataError as error:
        raise UserError(str(error)) from None
    if data.is_dir() and (lists := sum(path.suffix.lower() == ".csv" for path in data.iterdir())):
        notes = (*notes, f"{lists} csv files in {data} are not read; --data FILE.csv asks about what one lists")
    if without := keys.count(""):
        notes = (*notes, f"{without} of {len(keys)} pictures have no {column}")
    return Pictures(column, keys, pictures, (*found.notes, *notes))


def keys_of(data: Path, samples: Sequence[SampleSource], patient: str, wanted: str) -> tuple[str, list[str]]:
    """Return the name of the keys' column, and each picture's key. ``patient``: the csv's column of patients, or ""."""
    if wanted in ("", "patient") and patient:
        return patient, [sample.key for sample in samples]
    scans = all(sample.file is not None and kind_of(sample.file) == "dicom" for sample in samples)
    wanted = wanted or ("patient" if scans else FILE)
    if wanted == FILE:
        return FILE, [name_below(data, sample) for sample in samples]
    if not scans:
        raise UserError(f"--key {wanted} is of DICOM files, and of a csv's column patient; here it is --key file")
    assert wanted in IDENTITY
    return wanted, [read_key(sample.file, sample.where, wanted) for sample in samples if sample.file]


def name_below(data: Path, sample: SampleSource) -> str:
    """Return a picture's path below the source, or its own name."""
    assert sample.file is not None
    below = data if data.is_dir() else data.parent
    return sample.file.relative_to(below).as_posix() if sample.file.is_relative_to(below) else sample.file.name
