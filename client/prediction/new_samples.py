"""New samples for ``silofl predict``: a data file, or rows of a csv, pictures or scans by a recipe; and the answers."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client.exporting.model_card import Card
from client.faults import as_user_error
from partitions.array_names import (
    EXTRA_NAMES,
    array_name,
    check_ranges,
    known_names,
    make_schema,
    read_features,
    read_names,
)
from partitions.common.errors import UserError
from partitions.common.names import guard_formula, is_formula, unknown_name
from partitions.importing.collect import read_table_inputs
from partitions.importing.discovery import find_others
from partitions.importing.files import Faults
from partitions.importing.options import ImportOptions
from partitions.importing.readers import formats
from partitions.importing.readers import pictures as picture_files
from partitions.importing.readers.dicom import IDENTITY, read_key
from partitions.importing.readers.dicom_file import is_dicom
from partitions.importing.readers.reader import SampleSource
from partitions.importing.readers.registry import kind_of
from partitions.importing.source import reading, with_recipe
from partitions.importing.streams import new_pictures
from partitions.importing.table_source import Listing, lines_by, rows_by_recipe
from partitions.inputs import count_columns, vocabulary_size
from partitions.labels import Fault
from partitions.own.index import arrays_at
from partitions.recipes.pictures import AnyRecipe, PictureRecipe, load_any, parse_any
from partitions.recipes.reading import ReadOptions
from partitions.recipes.recipe import Recipe
from partitions.schema import Schema
from partitions.silo_file import read_x
from partitions.splits import Array, dtype_of

TO_PREDICT = ("test", "all")  # the first of these parts in a file is used
INDEX, FILE = "index", "file"
KEYS = (FILE, "patient", "study", "accession")  # possible keys of a picture
# Columns of the answers, by class or measurement
NUMBERED = re.compile(r"(p|y|pixels|set|low|high)_(\d+)")


@dataclass(frozen=True)
class NewSamples:
    """The samples (n, ...), their vocabulary size, their file's schema, their keys, and notes.

    ``key``: the name of the column of the keys (n,): the csv's column of patients, one of KEYS, or ``index``, from 0.
    """

    x: Any
    vocabulary: int
    schema: Schema
    keys: Sequence[str]
    key: str = INDEX
    # Of pictures and scans, which ``x`` reads from their files
    reading: ReadOptions | None = None
    notes: Sequence[str] = ()


def read_asked(
    data: Path, card: Card, recipe: Path | None = None, as_gaps: bool = False, key: str = ""
) -> NewSamples:
    """Return the samples of a data file, or of a csv, pictures or scans by the ``recipe`` or else the card's.

    ``key``: the key of pictures (KEYS). Raises UserError, one line.
    """
    if not needs_recipe(data):
        if recipe or as_gaps or key:
            option = "--recipe" if recipe else "--as-gaps" if as_gaps else "--key"
            raise UserError(
                f"{option} is of new rows or pictures; an .npz file has gone through its recipe already"
            )
        x, vocabulary, schema = read_samples(data)
        return NewSamples(x, vocabulary, schema, [str(i) for i in range(len(x))])
    with as_user_error():
        used = load_any(recipe) if recipe else recipe_of(card)
    if isinstance(used, Recipe):
        if key:
            raise UserError(
                "--key is of pictures and scans; a table has its column of patients"
            )
        samples = asked_rows(data, used, as_gaps)
    elif as_gaps:
        raise UserError("--as-gaps is of a table: pictures have no cells")
    else:
        samples = asked_pictures(data, used, key)
    for note in samples.notes:
        print(f"note: {note}", file=sys.stderr)
    return samples


def needs_recipe(data: Path) -> bool:
    """Return whether this is a table, a folder, a picture or a scan; anything else is a data file."""
    return (
        data.is_dir()
        or data.name.lower().endswith((*formats.ENDINGS, *picture_files.ENDINGS))
        or kind_of(data) != "picture"
    )


def asked_rows(data: Path, used: Recipe, as_gaps: bool) -> NewSamples:
    """Return the rows of a csv, read by a recipe. Raises UserError, one line."""
    if data.suffix.lower() not in formats.ENDINGS:
        raise UserError(f"{data} is no csv, and the recipe is of a table")
    with as_user_error(), reading(data):
        lines, notes = lines_by(data, used)
        samples = asked_of(rows_by_recipe(lines, used, as_gaps, labelled=False), used)
    without = sum(not key for key in samples.keys)
    return replace(
        samples,
        notes=[
            *notes,
            *samples.notes,
            *[f"{without} rows of {data} have no {samples.key}"] * (without > 0),
        ],
    )


def asked_of(listing: Listing, used: Recipe) -> NewSamples:
    """Return the rows of a table, which a recipe has read, as samples. Raises DataError for gaps without a value."""
    x, vocabulary, notes = read_table_inputs(listing.rows, listing.table, used)
    keys = (
        [row.key for row in listing.rows] if used.patient else [str(i) for i in range(len(x))]
    )
    schema = make_schema(used.features, (), dtype_of(x))
    return NewSamples(
        x, vocabulary, schema, keys, used.patient or INDEX, notes=[*listing.notes, *notes]
    )


def asked_pictures(data: Path, recipe: PictureRecipe, key: str = "") -> NewSamples:
    """Return the pictures of a folder, a csv with a column ``file``, or one picture, from their headers.

    ``key``: one of :data:`KEYS`; "": the csv's column of patients, for DICOM files the PatientID, otherwise the file.
    Raises UserError, one line; notes list what was skipped.
    """
    if key and key not in KEYS:
        raise unknown_name("--key", key, KEYS)
    if not data.exists():
        raise UserError(
            f"there is no {data}; name a folder of pictures or scans, a csv, or an .npz file"
        )
    with as_user_error(), reading(data):
        options = with_recipe(ImportOptions(pictures=recipe, faults=Faults(None)))
        listing = find_others(data, recipe, options, labelled=False)
        options.problems.refuse(data)
        pictures, notes = new_pictures(listing.rows, recipe)
        column, keys = keys_of(data, pictures.samples, listing.patient, key)
    if data.is_dir() and (
        lists := sum(path.suffix.lower() == ".csv" for path in data.iterdir())
    ):
        notes = (
            *notes,
            f"{lists} csv files in {data} are not read; --data FILE.csv asks about what one lists",
        )
    if without := keys.count(""):
        notes = (*notes, f"{without} of {len(keys)} {recipe.kind} have no {column}")
    schema = make_schema((), (), dtype_of(pictures))
    notes = (*listing.notes, *notes)
    return NewSamples(pictures, 0, schema, keys, column, recipe.reading, notes)


def keys_of(
    data: Path, samples: Sequence[SampleSource], patient: str, wanted: str
) -> tuple[str, list[str]]:
    """Return the name of the keys' column, and each picture's key. ``patient``: the csv's column of patients, or ""."""
    if wanted in ("", "patient") and patient:
        return patient, [sample.key for sample in samples]
    scans = all(
        sample.file is not None and kind_of(sample.file) != "nifti" and is_dicom(sample.file)
        for sample in samples
    )
    wanted = wanted or ("patient" if scans else FILE)
    if wanted == FILE:
        return FILE, [name_below(data, sample) for sample in samples]
    if not scans:
        raise UserError(
            f"--key {wanted} is of DICOM files, and of a csv's column patient; here it is --key file"
        )
    assert wanted in IDENTITY
    return wanted, [
        read_key(sample.file, sample.where, wanted) for sample in samples if sample.file
    ]


def name_below(data: Path, sample: SampleSource) -> str:
    """Return a picture's path below the source, or its own name."""
    assert sample.file is not None
    below = data if data.is_dir() else data.parent
    return (
        sample.file.relative_to(below).as_posix()
        if sample.file.is_relative_to(below)
        else sample.file.name
    )


def recipe_of(card: Card) -> AnyRecipe:
    """Return the recipe in a model's card. Raises UserError if it has none."""
    if not card.recipe:
        raise UserError(
            "the model's card has no recipe, so it cannot read a csv or pictures: name one with --recipe "
            "OURS.recipe.toml, or make an .npz file with silofl import"
        )
    return parse_any(card.recipe)


def describe_disclosed(recipe: AnyRecipe) -> str:
    """Return one line on what a recipe in a card reveals of the hospital's patients."""
    if isinstance(recipe, PictureRecipe):
        return (
            "the card holds the recipe of your pictures: how they are read, modalities and a rounded range of pixel "
            "sizes; --no-recipe leaves it out"
        )
    values = sum(column.fill_value is not None for column in recipe.used)
    levels = sum(len(column.categories) for column in recipe.used)
    return (
        f"the card holds the recipe of your table: names of {len(recipe.columns)} columns and {levels} categories, and "
        f"{values} medians, means or most frequent values of your training part; --no-recipe leaves it out"
    )


def named_columns(columns: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return the answers' column names with label names: ``p_ill`` for ``p_1``."""
    matches = [NUMBERED.fullmatch(name) for name in columns]
    if {int(match[2]) for match in matches if match} != set(range(len(labels))):
        return list(columns)
    return [
        f"{match[1]}_{labels[int(match[2])]}" if match else name
        for name, match in zip(columns, matches, strict=True)
    ]


def answers_csv(
    samples: NewSamples, columns: Sequence[str], rows: Sequence[Sequence[float | str]]
) -> str:
    """Return the answers as csv, a row for each sample."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([samples.key, *columns])
    for key, row in zip(samples.keys, rows, strict=True):
        shown = guard_formula(key) if is_formula(key) else key
        writer.writerow(
            [shown, *(value if isinstance(value, str) else f"{value:.6g}" for value in row)]
        )
    return out.getvalue()


def read_samples(file: Path) -> tuple[Array, int, Schema]:
    """Return the samples to predict as one array (partitions/inputs.py), the vocabulary size, the file's schema."""
    try:
        arrays = arrays_at(file)
        vocabulary = vocabulary_size(arrays)
        by_place: dict[tuple[str, str], Array] = {}
        for key, meaning in known_names(arrays).items():
            if key in arrays and meaning[0] != "y":
                by_place.setdefault(meaning, arrays[key])  # the first of two names counts
        part = next(
            (part for part in TO_PREDICT if part in (split for _, split in by_place)), None
        )
        if part is None:
            names = ", ".join(key for key in arrays if key not in EXTRA_NAMES) or "nothing"
            raise Fault(
                f"has no samples to predict, but {names}",
                "name them x_test or test_images or x",
            )
        for (kind, split), x in by_place.items():
            if split == part and (x.ndim == 0 or not len(x)):
                raise Fault(
                    f"{array_name(split, kind, arrays)} holds no samples",
                    "save an array of n samples",
                )
        if len({len(x) for (_, split), x in by_place.items() if split == part}) > 1:
            raise Fault(
                "has inputs of different numbers of samples",
                "save one row of each for each sample",
            )
        x = read_x(part, by_place, arrays, vocabulary)
        features = read_features(arrays, count_columns(x))
        check_ranges(features, {part: x})
        return (
            x,
            vocabulary,
            make_schema(features, read_names(arrays, "label_names", None), dtype_of(x)),
        )
    except Fault as fault:
        raise UserError(f"{file}: {fault.detail}; {fault.fix}") from None
