"""A recipe: conversion of a hospital's csv columns to inputs and labels of a data file, as TOML or JSON.

    version = 1
    label = ["state"]              # label columns; `task` and `classes` as in `silofl import`
    task = "multiclass"
    classes = ["well", "ill"]
    patient = "Patient-ID"
    [file]                         # the csv's format
    encoding = "utf-8"
    separator = ";"
    gaps = ["", "NA"]              # cells that mean a missing value
    [[columns]]
    name = "age"                   # in the data file; `from` is the csv's name where it is another one
    kind = "number"                # number, category, date, skip
    decimal = ","
    fill = "median"                # the value for gaps; `fill-value` is that value in the training part

A recipe contains no code and no row. Names of categories and values for gaps come from the hospital's rows.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from partitions.common.errors import DataError
from partitions.recipes.cells import DAYS, EPOCH, GROUPS
from partitions.recipes.values import cells_of, number, pair, refuse_unknown, table_of, texts, typed, year
from partitions.schema import Feature, check_name, check_range, tidy

T = TypeVar("T")

VERSION = 1
OPEN = "?"  # in a draft: a kind or a column that a person must decide
KINDS = ("number", "category", "date", "skip")
FILLS = {
    "number": ("median", "mean", "value", "refuse"),
    "category": ("most-frequent", "value", "refuse"),
    "date": ("median", "mean", "value", "refuse"),
    "skip": ("refuse",),
}
ENCODES = ("one-hot", "codes")
MOST_CATEGORIES, MOST_COLUMNS, LONGEST_RECIPE = 1000, 100_000, 1 << 24
TOP = (  # keys of a recipe
    *("version", "seed", "label", "task", "classes", "label-values", "outputs"),
    *("patient", "split", "file", "text", "columns"),
)

NO_COMBAT = (
    "ComBat left silofl in 0.3.0; train with normalization=silo, or harmonise the csv first, as with neuroCombat, and "
    "import it again"
)


@dataclass(frozen=True)
class Column:
    """A column of the csv. ``source``: its name there (TOML: ``from``); ``name``: its name in the data file.

    * Numbers: ``unit``, ``range``, ``decimal``, ``thousands``; the value is ``cell * factor + offset``.
    * Categories: ``values`` maps a cell to its category where the two differ, ``other`` is the category of all other
      cells, ``encode`` is ``one-hot`` or ``codes`` (the index in ``categories``).
    * Dates: ``format``; ``latest``: the last of the hundred years that two digits mean; the value is the ``days`` or
      ``years`` (``per``) ``since`` a day or the date in another column.
    """

    name: str
    kind: str
    source: str = ""
    unit: str = ""
    range: tuple[float, float] | None = None
    decimal: str = "."
    thousands: str = ""
    factor: float = 1.0
    offset: float = 0.0
    categories: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    other: str = ""
    encode: str = "one-hot"
    format: str = ""
    latest: int = 0
    since: str = ""
    per: str = "years"
    fill: str = "refuse"
    fill_value: float | str | None = None
    mark_gaps: bool = False
    why: str = field(default="", compare=False)  # a comment for the hospital; it stays in the TOML file

    @property
    def levels(self) -> tuple[str, ...]:
        """All categories, ``other`` last."""
        return (*self.categories, *filter(None, (self.other,)))

    @property
    def features(self) -> tuple[Feature, ...]:
        """The columns of the data file that are made from this one."""
        if self.kind == "skip":
            return ()
        if self.kind == "category" and self.encode == "one-hot":
            made = tuple(Feature(tidy(f"{self.name}={level}")) for level in self.levels)
        elif self.kind == "date":
            made = (Feature(self.name, self.per, self.range),)
        else:
            made = (Feature(self.name, self.unit, self.range),)
        return (*made, Feature(tidy(f"{self.name} missing"))) if self.mark_gaps else made

    @property
    def content(self) -> dict[str, Any]:
        """The column for TOML, without parts that are not stated."""
        made: dict[str, Any] = {}
        for own in fields(self):
            value = getattr(self, own.name)
            default = {} if own.name == "values" else own.default
            if own.name != "why" and (value != default or own.name in ("name", "kind")):
                made[KEYS.get(own.name, own.name)] = list(value) if isinstance(value, tuple) else value
        return made


OF_INPUTS = ("fill", "fill_value", "mark_gaps")  # of no meaning for a column that is skipped
KEYS = {"source": "from", "fill_value": "fill-value", "mark_gaps": "mark-gaps"}  # names of a column's fields in TOML
FIELDS = {KEYS.get(own.name, own.name): own for own in fields(Column) if own.name != "why"}


@dataclass(frozen=True)
class Recipe:
    """A csv's format, the roles of columns, and its columns in the order of the data file."""

    columns: tuple[Column, ...]
    label: tuple[str, ...] = ()
    task: str = "auto"
    classes: tuple[str, ...] = ()  # or the names of findings or measurements, where they are not those of the columns
    label_values: Mapping[str, str] = field(default_factory=dict)  # a cell's class, where the two differ
    outputs: int = 0  # number of classes, findings or measurements; 0: from the labels
    patient: str = ""
    split: str = ""
    seed: int = 42
    encoding: str = "utf-8"
    separator: str = ","
    decimal: str = "."  # of labels
    gaps: tuple[str, ...] = ("",)
    text: str = ""
    vocabulary: str = ""
    length: int = 0

    @property
    def features(self) -> tuple[Feature, ...]:
        """The columns of the data file."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that are not skipped."""
        return tuple(column for column in self.columns if column.kind != "skip")

    @property
    def content(self) -> dict[str, Any]:
        """The recipe for TOML and JSON."""
        top: dict[str, Any] = {"version": VERSION, "seed": self.seed, "label": list(self.label), "task": self.task}
        top |= {"classes": list(self.classes)} if self.classes else {}
        top |= {"label-values": dict(self.label_values)} if self.label_values else {}
        top |= {"outputs": self.outputs} if self.outputs else {}
        top |= {key: value for key, value in (("patient", self.patient), ("split", self.split)) if value}
        top["file"] = {key: getattr(self, key) for key in ("encoding", "separator", "decimal")}
        top["file"]["gaps"] = list(self.gaps)
        if self.text:
            top["text"] = {"column": self.text, "vocabulary": self.vocabulary, "length": self.length}
        return top | {"columns": [column.content for column in self.columns]}

    @property
    def json(self) -> str:
        """Return the recipe as JSON without comments, for data files and model cards."""
        return json.dumps(self.content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def toml(self, about: str = "") -> str:
        """Return the recipe as TOML, each column with its comment."""
        content = self.content
        columns, sections = content.pop("columns"), ("file", "text")
        tables = {key: content.pop(key) for key in sections if key in content}
        lines = [f"# {line}" for line in about.splitlines()]
        lines += [f"{key} = {written(value)}" for key, value in content.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {written(value)}" for key, value in table.items())]
        for column, table in zip(self.columns, columns, strict=True):
            lines += ["", *(f"# {line}" for line in column.why.splitlines()), "[[columns]]"]
            lines += [f"{key} = {written(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"


def written(value: Any) -> str:
    """Return a value in TOML's notation."""
    if isinstance(value, Mapping):
        bare = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else written(str(key)) for key in value}
        return "{" + ", ".join(f"{bare[key]} = {written(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


# Reading


def load_recipe(path: Path) -> Recipe:
    """Load the recipe of a .toml file. Raises DataError, one line that names the file."""
    return loaded(path, parse_recipe)


def loaded(path: Path, parse: Callable[[object], T]) -> T:
    """Return the result of ``parse`` for a .toml file. Raises DataError, one line that names the file."""
    try:
        if path.stat().st_size > LONGEST_RECIPE:
            raise DataError(f"a recipe has at most {LONGEST_RECIPE} bytes")
        return parse(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None


def read(text: str, parse: Callable[[object], T]) -> T:
    """Return the result of ``parse`` for a JSON text. Raises DataError, one line."""
    try:
        if len(text) > LONGEST_RECIPE:
            raise DataError(f"a recipe has at most {LONGEST_RECIPE} characters")
        return parse(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(f"the recipe cannot be used ({' '.join(str(error).split())[:300]})") from None


def parse_recipe(content: object) -> Recipe:
    """Parse the recipe of a TOML or JSON mapping. Raises DataError, one line, for invalid content."""
    top = table_of(content, "a recipe")
    if "kind" in top:
        raise DataError("this recipe is of pictures or scans, and that of a table is needed here")
    if "combat" in top:
        raise DataError(f"the recipe has [combat]: {NO_COMBAT}, by the recipe without that section")
    refuse_unknown(top, TOP, "a recipe")
    if top.get("version") != VERSION:
        raise DataError(f"version is {str(top.get('version'))[:20]}: this silofl reads recipes of version {VERSION}")
    file, text = table_of(top.get("file", {}), "[file]"), table_of(top.get("text", {}), "[text]")
    refuse_unknown(file, ("encoding", "separator", "decimal", "gaps"), "[file]")
    refuse_unknown(text, ("column", "vocabulary", "length"), "[text]")
    listed = top.get("columns", [])
    if not isinstance(listed, list) or len(listed) > MOST_COLUMNS:
        raise DataError(f"columns are at most {MOST_COLUMNS} tables [[columns]]")
    recipe = Recipe(
        columns=tuple(parse_column(own) for own in listed),
        label=texts(top.get("label", []), "label"),
        classes=texts(top.get("classes", []), "classes"),
        gaps=texts(file.get("gaps", [""]), "gaps"),
        **{key: typed(top, key, default) for key, default in (("task", "auto"), ("patient", ""), ("split", ""))},
        **{key: typed(file, key, default) for key, default in (("encoding", "utf-8"), ("separator", ","))},
        decimal=typed(file, "decimal", "."),
        seed=typed(top, "seed", 42),
        outputs=typed(top, "outputs", 0),
        label_values=cells_of(top.get("label-values", {}), "label-values"),
        text=typed(text, "column", ""),
        vocabulary=typed(text, "vocabulary", ""),
        length=typed(text, "length", 0),
    )
    check_recipe(recipe)
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Raise DataError where two columns have one name, or a role names a missing column."""
    for what, names in (
        ("columns of the csv", [column.source or column.name for column in recipe.columns]),
        ("columns", [feature.name for feature in recipe.features]),
    ):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"two {what} are called {twice[:80]!r}")
    for what, name in (*(("label", own) for own in recipe.label), ("patient", recipe.patient)):
        if name == OPEN:
            raise DataError(f"{what} is still {OPEN!r}: name a column of the csv, as the draft's comment says")
        if name in {column.source or column.name for column in recipe.used}:
            raise DataError(f"{name!r} is the {what} and an input: delete its [[columns]], or skip it")
    if not recipe.used and not recipe.text:
        raise DataError("every column is skipped; a recipe takes at least one")
    if recipe.decimal not in (".", ","):
        raise DataError(f"decimal is {recipe.decimal[:10]!r}; it is a point or a comma")
    if len(recipe.separator) != 1 or recipe.separator in '"\r\n':
        raise DataError(f"separator is {recipe.separator[:10]!r}; it is one sign, for example ; or a tab")
    dates = {column.source or column.name for column in recipe.columns if column.format}
    for column in recipe.used:
        if column.kind == "date" and column.since not in dates:
            try:
                date.fromisoformat(column.since or EPOCH)
            except ValueError:
                raise DataError(
                    f"since of {column.name!r} is {column.since[:40]!r}; it is a day, 2000-01-01, or a date column"
                ) from None


def parse_column(content: object) -> Column:
    """Parse a column of a recipe. Raises DataError."""
    table = table_of(content, "a column")
    name = typed(table, "name", "")
    check_name("column", name)
    refuse_unknown(table, tuple(FIELDS), f"the column {name!r}")
    made: dict[str, Any] = {}
    for key, own in FIELDS.items():
        if key not in table:
            continue
        value = table[key]
        if own.name == "categories":
            made[own.name] = texts(value, f"categories of {name!r}")
        elif own.name == "values":
            made[own.name] = cells_of(value, f"values of {name!r}")
        elif own.name == "range":
            made[own.name] = pair(value, name)
        elif own.name == "fill_value":
            made[own.name] = value if isinstance(value, str) else number(value, f"fill-value of {name!r}")
        elif own.name == "latest":
            made[own.name] = year(value, name)
        elif own.name in ("factor", "offset"):
            made[own.name] = number(value, f"{key} of {name!r}")
        else:
            made[own.name] = typed(table, key, "" if own.name in ("name", "kind") else own.default)
    if made.get("kind") == "skip":
        made = {key: value for key, value in made.items() if key not in OF_INPUTS}
    column = Column(**{"kind": "", **made})
    check_column(column)
    return column


def check_column(column: Column) -> None:
    """Raise DataError where a column's keys do not fit its kind."""
    own = f"the column {column.name!r}"
    for key, value, allowed in (
        ("kind", column.kind, KINDS),
        ("encode", column.encode, ENCODES),
        ("per", column.per, tuple(DAYS)),
        ("decimal", column.decimal, (".", ",")),
        ("thousands", column.thousands, GROUPS),
        ("fill", column.fill, FILLS.get(column.kind, ())),
    ):
        if value not in allowed:
            raise DataError(f"{own}: {key} is {value[:40]!r}; it is one of {', '.join(map(repr, allowed))}")
    if column.decimal == column.thousands:
        raise DataError(f"{own}: decimal and thousands are both {column.decimal!r}")
    if column.kind == "category":
        if not 0 < len(column.levels) <= MOST_CATEGORIES or len(set(column.levels)) < len(column.levels):
            raise DataError(f"{own}: categories are 1 to {MOST_CATEGORIES} different texts")
        if strange := [level for level in column.values.values() if level not in column.levels]:
            raise DataError(f"{own}: values name {strange[0][:40]!r}, which is none of its categories")
    if column.kind == "date" and not column.format:
        raise DataError(f"{own}: a date needs its format, for example %d.%m.%Y")
    if column.fill == "value" and column.fill_value is None:
        raise DataError(f'{own}: fill = "value" needs fill-value')
    if column.fill_value is not None:
        wanted = column.kind == "category"
        if isinstance(column.fill_value, str) != wanted or (wanted and column.fill_value not in column.levels):
            raise DataError(f"{own}: fill-value is {str(column.fill_value)[:40]!r}, no {column.kind} of it")
    if column.factor == 0:
        raise DataError(f"{own}: factor is 0")
    for feature in column.features:
        check_name("column", feature.name)
        check_range(feature)


def unfitted(recipe: Recipe, without: str) -> Recipe:
    """Return the recipe without values fitted to a training part, and without the csv's column ``without``."""
    columns = []
    for column in recipe.columns:
        if (column.source or column.name) == without:
            column = Column(column.name, "skip", column.source)
        columns.append(column if column.fill == "value" else replace(column, fill_value=None))
    if without not in {column.source or column.name for column in columns}:
        columns.append(Column(tidy(f"{without} (left out)"), "skip", without))
    made = replace(recipe, columns=tuple(columns))
    check_recipe(made)
    return made


def with_fills(recipe: Recipe, fills: Mapping[str, float | str]) -> Recipe:
    """Return the recipe with the training part's values for gaps, by the columns' names."""
    return replace(
        recipe,
        columns=tuple(
            replace(column, fill_value=fills[column.name]) if column.name in fills else column
            for column in recipe.columns
        ),
    )
