"""A recipe: conversion of a hospital's csv columns to inputs and labels of a data file, as TOML or JSON.

    version = 1
    label = ["state"]              # label columns; `task` and `classes` as in `silofl import`
    task = "multiclass"
    patient = "Patient-ID"
    [file]                         # the csv's format
    gaps = ["", "NA"]              # cells that mean a missing value
    [[columns]]
    name = "age"                   # in the data file; `from` is the csv's name where it is another one
    kind = "number"                # number, category, date, skip
    fill = "median"                # the value for gaps; `fill-value` is that value in the training part

A recipe contains no code and no row. Names of categories and values for gaps come from the hospital's rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field

from partitions.common.errors import DataError
from partitions.common.names import Names, composed
from partitions.common.parsed import Frozen, parse_content, parse_toml, read_text
from partitions.common.sizes import MOST_COLUMNS
from partitions.recipes.cells import DAYS, EPOCH, GROUPS
from partitions.recipes.reading import Pair
from partitions.recipes.toml import as_toml
from partitions.schema import Feature, check_name, check_range, tidy
from partitions.tokens import token_setting

VERSION = 1
OPEN = "?"  # in a draft: a kind or a column that a person must decide
MEND = "correct it as docs/inputs.md shows"
FILLS = {
    "number": ("median", "mean", "value", "refuse"),
    "category": ("most-frequent", "value", "refuse"),
    "date": ("median", "mean", "value", "refuse"),
    "skip": (),  # any: it is of no meaning there
}
MOST_CATEGORIES = 1000
LONGEST_RECIPE = 1 << 24
# Of fields with another name in a file
KEYS = {"source": "from", "pixel": "pixel-mm", "between": "slice-mm"}

T = TypeVar("T")


def one_of(*allowed: str) -> Any:
    """Return the check of a text with few values."""

    def check(value: str) -> str:
        if value not in allowed:
            raise DataError(f"must be one of {', '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


Text = Annotated[str, Field(max_length=200)]
Decimal = Annotated[str, one_of(".", ",")]


class RecipePart(Frozen):
    """A part of a recipe: keys have hyphens. ``ALWAYS``: fields that are written with their defaults, too."""

    model_config = ConfigDict(
        alias_generator=lambda name: KEYS.get(name, name.replace("_", "-")),
        validate_by_name=True,
    )
    ALWAYS: ClassVar[Names] = ()

    @property
    def content(self) -> dict[str, Any]:
        """The values for TOML and JSON, without those that are not stated."""
        content = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "why" and (value != field.default or name in self.ALWAYS):
                content[field.alias or name] = plain_value(value)
        return content

    @property
    def as_json(self) -> str:
        """The values as JSON without comments, for data files and model cards."""
        return json.dumps(
            self.content, ensure_ascii=False, separators=(",", ":"), allow_nan=False
        )


def plain_value(value: Any) -> Any:
    """Return a value as TOML and JSON have it."""
    if isinstance(value, tuple):
        return [plain_value(item) for item in value]
    return value.content if isinstance(value, RecipePart) else value


class Column(RecipePart):
    """A column of the csv. ``source``: its name there (TOML: ``from``); ``name``: its name in the data file.

    * Numbers: ``unit``, ``range``, ``decimal``, ``thousands``; the value is ``cell * factor + offset``. A column of the
      label of regression or survival is no input: it says how that is read.
    * Categories: ``values`` maps a cell to its category where the two differ, ``other`` is the category of all other
      cells, ``encode`` is ``one-hot`` or ``codes`` (the index in ``categories``).
    * Dates: ``format``; ``latest``: the last of the hundred years that two digits mean; the value is the ``days`` or
      ``years`` (``per``) ``since`` a day or the date in another column.
    """

    ALWAYS = ("name", "kind")

    name: str
    kind: Annotated[str, one_of(*FILLS)]
    source: str = ""
    unit: str = ""
    range: Pair | None = None
    decimal: Decimal = "."
    thousands: Annotated[str, one_of(*GROUPS)] = ""
    factor: float = 1.0
    offset: float = 0.0
    categories: tuple[Text, ...] = ()
    values: Mapping[str, str] = {}
    other: str = ""
    encode: Annotated[str, one_of("one-hot", "codes")] = "one-hot"
    format: str = ""
    latest: int = 0
    since: str = ""
    per: Annotated[str, one_of(*DAYS)] = "years"
    fill: str = "refuse"
    fill_value: float | str | None = None
    mark_gaps: bool = False
    why: str = ""  # a comment for the hospital; it stays in the TOML file

    @property
    def origin(self) -> str:
        """The name in the csv."""
        return self.source or self.name

    @property
    def levels(self) -> Names:
        """All categories, ``other`` last."""
        return (*self.categories, *filter(None, (self.other,)))

    @property
    def features(self) -> tuple[Feature, ...]:
        """The columns of the data file that are made from this one."""
        if self.kind == "skip":
            return ()
        unit = self.per if self.kind == "date" else self.unit
        features = [Feature(self.name, unit, self.range)]
        if self.kind == "category" and self.encode == "one-hot":
            features = [Feature(tidy(f"{self.name}={level}")) for level in self.levels]
        return *features, *[Feature(tidy(f"{self.name} missing"))] * self.mark_gaps


class FileFormat(RecipePart):
    """How a csv is written. ``decimal``: of labels; ``gaps``: cells that mean a missing value."""

    ALWAYS = ("encoding", "separator", "decimal", "gaps")

    encoding: str = "utf-8"
    separator: str = ","
    decimal: Decimal = "."
    gaps: tuple[Text, ...] = ("",)


class TextInput(RecipePart):
    """A column of texts, and how they become tokens (``options.Take``). ``sha256``: of a vocabulary's file."""

    ALWAYS = ("column", "vocabulary", "length")

    column: str = ""
    vocabulary: str = ""
    length: int = 0
    sha256: str = ""


NO_TEXT = TextInput()


class Recipe(RecipePart):
    """A csv's format, the roles of columns, and its columns in the order of the data file.

    * ``classes``: or the names of findings or measurements, where they are not those of the columns.
    * ``label_values``: a cell's class, where the two differ.
    * ``outputs``: number of classes, findings or measurements; 0: from the labels.
    """

    ALWAYS = ("version", "seed", "label", "task", "file", "columns")

    version: Literal[1] = 1
    seed: int = 42
    label: tuple[Text, ...] = ()
    task: str = "auto"
    classes: tuple[Text, ...] = ()
    label_values: Mapping[str, str] = {}
    outputs: int = 0
    patient: str = ""
    split: str = ""
    file: FileFormat = FileFormat()
    text: TextInput = NO_TEXT
    columns: Annotated[tuple[Column, ...], Field(max_length=MOST_COLUMNS)] = ()

    @property
    def features(self) -> tuple[Feature, ...]:
        """The columns of the data file."""
        return tuple(feature for column in self.used for feature in column.features)

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The settings with which inputs are made besides the columns', as the schema has them."""
        tokens = token_setting(self.text.vocabulary, self.text.sha256)
        return (("tokens", tokens),) if tokens else ()

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that are inputs: neither skipped nor a label's."""
        return tuple(
            column
            for column in self.columns
            if column.kind != "skip" and column.origin not in self.label
        )

    def toml(self, about: str = "") -> str:
        """Return the recipe as TOML, each column with its comment."""
        return as_toml(
            self.content,
            about,
            {f"columns.{i}": column.why for i, column in enumerate(self.columns)},
        )


# Reading


def load_recipe(path: Path) -> Recipe:
    """Load the recipe of a .toml file. Raises DataError, one line that names the file."""
    return load_toml(path, parse_recipe)


def load_toml(path: Path, parse: Callable[[object], T]) -> T:
    """Return the result of ``parse`` for a .toml file. Raises DataError, one line that names the file."""
    try:
        text = read_text(path, LONGEST_RECIPE)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    try:
        return parse(parse_toml(composed(text)))
    except ValueError as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None


def parse_recipe(content: object) -> Recipe:
    """Parse the recipe of a TOML or JSON mapping. Raises DataError, one line, for invalid content."""
    keys = content if isinstance(content, Mapping) else {}
    if "kind" in keys:
        raise DataError(
            "this recipe is of pictures or scans, and that of a table is needed here"
        )
    check_version(keys)
    return parse_content(Recipe, content, MEND, check_parts)


def check_parts(recipe: Recipe) -> None:
    """Raise DataError where a column's keys do not fit its kind, or parts of the recipe do not fit together."""
    for column in recipe.columns:
        check_column(column)
    check_recipe(recipe)


def check_version(keys: Mapping[str, Any]) -> None:
    """Raise DataError for a recipe of another version."""
    if keys.get("version") != VERSION:
        raise DataError(
            f"version is {str(keys.get('version'))[:20]}: this silofl reads recipes of version {VERSION}"
        )


def check_recipe(recipe: Recipe) -> None:
    """Raise DataError where two columns have one name, or a role names a missing column."""
    for what, names in (
        ("columns of the csv", [column.origin for column in recipe.columns]),
        ("columns", [feature.name for feature in recipe.features]),
    ):
        for twice in (name for name, count in Counter(names).items() if count > 1):
            raise DataError(f"two {what} are called {twice[:80]!r}")
    kinds = {column.origin: column.kind for column in recipe.columns}
    for what, name in (
        *(("label", name) for name in recipe.label),
        ("patient", recipe.patient),
    ):
        if name == OPEN:
            raise DataError(
                f"{what} is still {OPEN!r}: name a column of the csv, as the draft's comment says"
            )
        numeric = what == "label" and recipe.task in ("auto", "regression", "survival")
        if kinds.get(name, "skip") not in ("skip", "number" * numeric):
            raise DataError(
                f"{name!r} is the {what} and an input: delete its [[columns]], or skip it"
            )
    if not recipe.used and not recipe.text.column:
        raise DataError("every column is skipped; a recipe takes at least one")
    separator = recipe.file.separator
    if len(separator) != 1 or separator in '"\r\n':
        raise DataError(
            f"separator is {separator[:10]!r}; it is one sign, for example ; or a tab"
        )
    dates = {column.origin for column in recipe.columns if column.format}
    for column in recipe.used:
        if column.kind == "date" and column.since not in dates:
            try:
                date.fromisoformat(column.since or EPOCH)
            except ValueError:
                raise DataError(
                    f"since of {column.name!r} is {column.since[:40]!r}; it is a day, 2000-01-01, or a date column"
                ) from None


def check_column(column: Column) -> None:
    """Raise DataError where a column's keys do not fit its kind."""
    check_name("column", column.name)
    if fault := misfit_of(column):
        raise DataError(f"the column {column.name!r}: {fault}")
    for feature in column.features:
        check_name("column", feature.name)
        check_range(feature)


def misfit_of(column: Column) -> str:
    """Return what does not fit together in a column, or ""."""
    fills = FILLS[column.kind]
    value = column.fill_value
    if column.why:
        return "it has no key 'why'"
    if fills and column.fill not in fills:
        return f"fill is {column.fill[:40]!r}; it is one of {', '.join(map(repr, fills))}"
    if column.decimal == column.thousands:
        return f"decimal and thousands are both {column.decimal!r}"
    if column.latest and not 1000 <= column.latest <= 9999:
        return f"latest is {column.latest}; it is a year of four digits"
    if column.factor == 0:
        return "factor is 0"
    if column.kind == "date" and not column.format:
        return "a date needs its format, for example %d.%m.%Y"
    levels = column.levels if column.kind == "category" else ()
    if column.kind == "category":
        if not 0 < len(levels) <= MOST_CATEGORIES or len(set(levels)) < len(levels):
            return f"categories are 1 to {MOST_CATEGORIES} different texts"
        if strange := [level for level in column.values.values() if level not in levels]:
            return f"values name {strange[0][:40]!r}, which is none of its categories"
    if fills and column.fill == "value" and value is None:
        return 'fill = "value" needs fill-value'
    if (
        fills
        and value is not None
        and (value not in levels if levels else isinstance(value, str))
    ):
        return f"fill-value is {str(value)[:40]!r}, no {column.kind} of it"
    return ""


def without_fit(recipe: Recipe, without: str) -> Recipe:
    """Return the recipe without values fitted to a training part, and without the csv's column ``without``."""
    columns = []
    for column in recipe.columns:
        if column.origin == without:
            column = Column(name=column.name, kind="skip", source=column.source)
        columns.append(
            column if column.fill == "value" else column.model_copy(update={"fill_value": None})
        )
    if without not in {column.origin for column in columns}:
        columns.append(Column(name=tidy(f"{without} (left out)"), kind="skip", source=without))
    fitted = recipe.model_copy(update={"columns": tuple(columns)})
    check_recipe(fitted)
    return fitted
