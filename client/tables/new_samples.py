"""New samples for ``silofl predict``: from a data file, or rows of a csv by a recipe; and the output of answers."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.model_card import Card
from client.tables.new_pictures import Pictures, read_new_pictures
from partitions.array_names import EXTRA_NAMES, known_names, names_of
from partitions.common.errors import DataError, UserError
from partitions.common.names import guarded, is_formula
from partitions.importing.images import PICTURES, kind_of
from partitions.importing.new_rows import NewPictures, read_new_rows
from partitions.inputs import read_vocabulary
from partitions.labels import Fault
from partitions.npz import read_arrays
from partitions.recipes.pictures import AnyRecipe, PictureRecipe, load_any, parse_any
from partitions.recipes.recipe import Recipe
from partitions.reorder import count_columns
from partitions.schema import Schema
from partitions.silo_file import check_ranges, make_schema, read_features, read_names, read_x
from partitions.splits import Array, dtype_of

TO_PREDICT = ("test", "all")  # the first of these parts in a file is used
INDEX = "index"
NUMBERED = re.compile(r"(p|y|pixels|set|low|high)_(\d+)")  # columns of the answers, by class or measurement


@dataclass(frozen=True)
class Asked:
    """The samples (n, ...), their vocabulary size, their file's schema, and their keys.

    ``key``: the name of the column of the keys (n,): the csv's column of patients, or ``index``, from 0.
    """

    x: Array
    vocabulary: int
    schema: Schema
    keys: Sequence[str]
    key: str = INDEX
    pictures: NewPictures | None = None  # the source of pictures or scans; ``x`` has only their shape and type


def read_asked(data: Path, card: Card, recipe: Path | None = None, as_gaps: bool = False, key: str = "") -> Asked:
    """Return the samples of a data file, or of a csv, pictures or scans by the ``recipe`` or else the card's.

    ``key``: the key of pictures (``new_pictures.KEYS``). Raises UserError, one line.
    """
    if not needs_recipe(data):
        if recipe or as_gaps or key:
            option = "--recipe" if recipe else "--as-gaps" if as_gaps else "--key"
            raise UserError(f"{option} is of new rows or pictures; an .npz file has gone through its recipe already")
        x, vocabulary, schema = read_samples(data)
        return Asked(x, vocabulary, schema, [str(i) for i in range(len(x))])
    try:
        used = load_any(recipe) if recipe else recipe_of(card)
    except DataError as error:
        raise UserError(str(error)) from None
    if isinstance(used, Recipe):
        if key:
            raise UserError("--key is of pictures and scans; a table has its column of patients")
        return asked_rows(data, used, as_gaps)
    if as_gaps:
        raise UserError("--as-gaps is of a table: pictures have no cells")
    found = read_new_pictures(data, used, key)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return asked_pictures(found)


def asked_pictures(found: Pictures) -> Asked:
    """Return pictures as samples to predict."""
    x = found.source.like
    schema = make_schema((), (), dtype_of(x))
    return Asked(x, 0, schema, found.keys, found.column, found.source)


def needs_recipe(data: Path) -> bool:
    """Return whether this is a csv, a folder, a picture or a scan; anything else is a data file."""
    return data.is_dir() or data.name.lower().endswith((".csv", *PICTURES)) or kind_of(data) != "picture"


def asked_rows(data: Path, used: Recipe, as_gaps: bool) -> Asked:
    """Return the rows of a csv, read by a recipe. Raises UserError, one line."""
    if data.suffix.lower() != ".csv":
        raise UserError(f"{data} is no csv, and the recipe is of a table")
    try:
        rows = read_new_rows(data, used, as_gaps)
        schema = make_schema(used.features, (), dtype_of(rows.x))
    except Fault as fault:
        raise UserError(f"{data}: {fault.detail}; {fault.fix}") from None
    except (DataError, csv.Error) as error:
        raise UserError(str(error)) from None
    for note in rows.notes:
        print(f"note: {note}", file=sys.stderr)
    keys = rows.patients or [str(i) for i in range(len(rows.x))]
    if without := sum(not key for key in keys):
        print(f"note: {without} rows of {data} have no {rows.key}", file=sys.stderr)
    return Asked(rows.x, rows.vocabulary, schema, keys, rows.key or INDEX)


def recipe_of(card: Card) -> AnyRecipe:
    """Return the recipe in a model's card. Raises UserError if it has none."""
    if not card.recipe:
        raise UserError(
            "the model's card has no recipe, so it cannot read a csv or pictures: name one with --recipe "
            "OURS.recipe.toml, or make an .npz file with silofl import"
        )
    return parse_any(card.recipe)


def about_recipe(text: str) -> dict[str, Any]:
    """Return the recipe as a card's entry."""
    return {"recipe": json.loads(text)} if text else {}


def disclosed(recipe: AnyRecipe) -> str:
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
    found = [NUMBERED.fullmatch(name) for name in columns]
    if {int(match[2]) for match in found if match} != set(range(len(labels))):
        return list(columns)
    return [
        f"{match[1]}_{labels[int(match[2])]}" if match else name for name, match in zip(columns, found, strict=True)
    ]


def answers_csv(asked: Asked, columns: Sequence[str], rows: Sequence[Sequence[float | str]]) -> str:
    """Return the answers as csv, a row for each sample."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([asked.key, *columns])
    for key, row in zip(asked.keys, rows, strict=True):
        own = guarded(key) if is_formula(key) else key
        writer.writerow([own, *(value if isinstance(value, str) else f"{value:.6g}" for value in row)])
    return out.getvalue()


def read_samples(file: Path) -> tuple[Array, int, Schema]:
    """Return the samples to predict as one array (partitions/inputs.py), the vocabulary size, the file's schema."""
    try:
        arrays = read_arrays(file)
        vocabulary = read_vocabulary(arrays)
        found: dict[tuple[str, str], Array] = {}
        for key, meaning in known_names(arrays).items():
            if key in arrays and meaning[0] != "y":
                found.setdefault(meaning, arrays[key])  # the first of two names counts
        part = next((part for part in TO_PREDICT if part in (split for _, split in found)), None)
        if part is None:
            names = ", ".join(key for key in arrays if key not in EXTRA_NAMES) or "nothing"
            raise Fault(f"has no samples to predict, but {names}", "name them x_test or test_images or x")
        for (kind, split), x in found.items():
            if split == part and (x.ndim == 0 or not len(x)):
                raise Fault(f"{names_of(split, kind, arrays)} holds no samples", "save an array of n samples")
        if len({len(x) for (_, split), x in found.items() if split == part}) > 1:
            raise Fault("has inputs of different numbers of samples", "save one row of each for each sample")
        x = read_x(part, found, arrays, vocabulary)
        features = read_features(arrays, count_columns(x))
        check_ranges(features, {part: x})
        return x, vocabulary, make_schema(features, read_names(arrays, "label_names", None), dtype_of(x))
    except Fault as fault:
        raise UserError(f"{file}: {fault.detail}; {fault.fix}") from None
