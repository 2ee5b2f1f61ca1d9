"""The schema of a silo's samples: names, units and ranges of a table's columns, names of the labels, number format,
and the settings with which inputs were made.

Hospitals with the same schema may train together. Columns and label numbers that differ only in order are reconciled by
name. As TOML, YAML or JSON:

    features = ["sex", {name = "age", unit = "years", range = [0, 120]}]
    labels = ["well", "ill"]
    dtype = "float32"
    inputs = {window = "40,400"}

Every part is optional. ``labels`` names classes in the order of their numbers, findings, or measurements. A range
states the values that a column may have; it is never computed from data. The canonical form is JSON with sorted keys
and without white space; the digest is its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Strict, model_validator

from partitions.common.errors import DataError
from partitions.common.names import Names, composed, is_formula, words_in
from partitions.common.parsed import Frozen, parse_content, parse_json, parse_toml, read_text
from partitions.common.plain_yaml import load_yaml

LONGEST_NAME = 200  # characters of a name or a unit
LONGEST_SCHEMA = 1 << 20  # characters of a schema in its canonical form
SHOWN = 2  # names that a message quotes
MEND_SCHEMA = "a schema has features, labels, dtype, inputs and table (docs/inputs.md)"
# Settings with which inputs were made (`recipes/pictures.py`, `recipes/recipe.py`)
SETTINGS = words_in("window spacing orientation size slices rate channels units tokens")


@dataclass(frozen=True)
class Feature:
    """A table's column. An empty ``unit`` or a ``range`` of None: not stated."""

    name: str
    unit: str = ""
    range: tuple[float, float] | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The column for JSON, without parts that are not stated."""
        stated = {"unit": self.unit, "range": list(self.range) if self.range else None}
        return {"name": self.name} | {key: value for key, value in stated.items() if value}

    def __str__(self) -> str:
        """Return the column as text: ``age [years, 0..120]``."""
        range_ = f"{self.range[0]:g}..{self.range[1]:g}" if self.range else ""
        stated = ", ".join(filter(None, (self.unit, range_)))
        return f"{self.name} [{stated}]" if stated else self.name


@dataclass(frozen=True)
class Schema:
    """Columns and labels in their order, and the number format (``splits.dtype_of``). Empty parts: not stated.

    ``inputs``: pairs of a setting (:data:`SETTINGS`) and its value, as text; only a recipe's settings, never its data.
    ``table``: how a hospital's table becomes these columns, as JSON (``recipes/shared.py``). It is not part of the
    digest, of a data file or of a message.
    ``unlabelled``: findings or outlines among ``labels`` that this hospital's samples are not labelled with. It is one
    hospital's own: neither part of the digest nor of a schema for all.

    Raises DataError, one line, where names repeat, or are not printable text of 1 to 200 characters.
    """

    features: tuple[Feature, ...] = ()
    labels: Names = ()
    dtype: str = ""
    table: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    unlabelled: Names = ()
    text: str = field(init=False, repr=False, compare=False, default="")  # the canonical form

    def __post_init__(self) -> None:
        for kind, names in (("column", self.names), ("label", self.labels)):
            for name in names:
                check_name(kind, name)
            if len(set(names)) < len(names):
                twice = next(name for name, times in Counter(names).items() if times > 1)
                raise DataError(f"two {kind}s are called {twice!r}")
        for feature in self.features:
            if feature.unit:
                check_name("unit", feature.unit)
            check_range(feature)
        for kind, value in (("dtype", self.dtype), *self.inputs):
            if value or kind != "dtype":
                check_name(kind, value)
        if not set(self.unlabelled) <= set(self.labels):
            raise DataError(f"unlabelled {few(self.unlabelled)} are not among its labels")
        if unknown := [key for key, _ in self.inputs if key not in SETTINGS]:
            raise DataError(
                f"inputs has {unknown[0][:40]!r}; its keys are {', '.join(SETTINGS)}"
            )
        text = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        if len(text) > LONGEST_SCHEMA:
            raise DataError(
                f"the names come to {len(text)} characters; a schema has at most {LONGEST_SCHEMA}"
            )
        object.__setattr__(self, "text", text)

    @property
    def names(self) -> Names:
        """The columns' names."""
        return tuple(feature.name for feature in self.features)

    @property
    def content(self) -> dict[str, Any]:
        """The schema for JSON, without parts that are not stated."""
        features = [feature.content for feature in self.features]
        table = json.loads(self.table) if self.table else {}
        stated = {
            "features": features,
            "labels": list(self.labels),
            "dtype": self.dtype,
            "inputs": dict(self.inputs),
            "table": table,
            "unlabelled": list(self.unlabelled),
        }
        return {key: value for key, value in stated.items() if value}

    @property
    def unlabelled_numbers(self) -> tuple[int, ...]:
        """The numbers of the unlabelled labels, ascending."""
        return tuple(sorted(map(self.labels.index, self.unlabelled)))

    @property
    def made_with(self) -> str:
        """The settings with which inputs were made, as text."""
        return few([f"{key} {value}" for key, value in self.inputs], len(SETTINGS), 60)

    @property
    def bare(self) -> Schema:
        """The schema without ``table``, as in messages."""
        return replace(self, table="") if self.table else self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hexadecimal."""
        shared = replace(self.bare, unlabelled=())
        return hashlib.sha256(shared.text.encode()).hexdigest()

    def matches(self, digest: str) -> bool:
        """Return whether a study that was approved for this digest covers the schema: it may state no ``inputs``."""
        return digest in (self.digest, replace(self, inputs=()).digest)

    def __str__(self) -> str:
        """Return the stated parts in one line, with the digest."""
        features = few([str(feature) for feature in self.features], 20, 60)
        parts = {
            "columns": features,
            "labels": few(self.labels, 20, 60),
            "unlabelled here": few(self.unlabelled, 20, 60),
            "dtype": self.dtype,
            "made with": self.made_with,
        }
        return "; ".join(
            [
                *(f"{key} {value}" for key, value in parts.items() if value),
                f"SHA-256 {self.digest}",
            ]
        )


NO_SCHEMA = Schema()  # nothing is stated


def check_name(kind: str, name: object) -> None:
    """Raise DataError where a column, label or unit cannot have this name."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= LONGEST_NAME
        or not name.isprintable()
        or tidy(name) != name
    ):
        raise DataError(
            f"the {kind} {str(name)[:40]!r} has no usable name: 1 to {LONGEST_NAME} printable characters are wanted"
        )
    if kind == "label" and is_formula(name):
        raise DataError(
            f"the label {name[:40]!r} begins with {name[0]!r}, which a spreadsheet computes: predictions are opened in "
            "one; rename the class"
        )


def check_range(feature: Feature) -> None:
    """Raise DataError unless the range is two finite numbers, the smaller one first."""
    if feature.range is not None and not (
        all(map(math.isfinite, feature.range)) and feature.range[0] < feature.range[1]
    ):
        low, high = feature.range
        raise DataError(
            f"the range of {feature.name!r} is [{low}, {high}]: two numbers, the smaller one first"
        )


def tidy(name: str) -> str:
    """Return a name in Unicode's composed form with single blanks: programs may write the same name differently."""
    return " ".join(composed(name).split())


def few(names: Iterable[str], most: int = SHOWN, longest: int = 30) -> str:
    """Return the first names as text, each shortened, and the number of further ones."""
    every = list(names)
    shown = ", ".join(
        name if len(name) <= longest else f"{name[: longest - 3]}..." for name in every[:most]
    )
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown


# Reading


class WrittenFeature(Frozen):
    """A column as files have it: its name alone, or with unit and range."""

    name: str
    unit: str = ""
    range: Annotated[tuple[float, float], Strict(False)] | None = None  # a list in files

    @model_validator(mode="before")
    @classmethod
    def name_alone(cls, content: Any) -> Any:
        """Return the mapping of a column that is its name alone."""
        return {"name": content} if isinstance(content, str) else content


class WrittenSchema(Frozen):
    """A schema as files have it. ``recipes/shared.py`` checks the content of ``table``."""

    features: tuple[WrittenFeature, ...] = ()
    labels: tuple[str, ...] = ()
    dtype: str = ""
    inputs: Mapping[str, str] = {}
    table: Mapping[str, Any] = {}
    unlabelled: tuple[str, ...] = ()


def parse_schema(content: object) -> Schema:
    """Return the schema of a TOML, YAML or JSON mapping. Raises DataError, one line, for invalid content."""
    written = parse_content(WrittenSchema, content, MEND_SCHEMA)
    table = written.table
    return Schema(
        tuple(Feature(tidy(f.name), tidy(f.unit), f.range) for f in written.features),
        tuple(map(tidy, written.labels)),
        written.dtype,
        json.dumps(table, sort_keys=True, separators=(",", ":")) if table else "",
        tuple(sorted(written.inputs.items())),
        tuple(map(tidy, written.unlabelled)),
    )


def parse_shared_schema(content: object) -> Schema:
    """Return a schema for all hospitals. Raises DataError for invalid content, and for what is one hospital's own."""
    schema = parse_schema(content)
    if schema.unlabelled:
        raise DataError("unlabelled is one hospital's own: it stands in its data file")
    return schema


@lru_cache(maxsize=64)
def read_schema(text: str) -> Schema:
    """Return the schema of a JSON text, as a silo sends it. Raises DataError, one line, for invalid content."""
    if len(text) > LONGEST_SCHEMA:
        raise DataError(f"a schema has at most {LONGEST_SCHEMA} characters")
    try:
        content = parse_json(text or "{}")
    except ValueError:
        raise DataError(f"it is no JSON; {MEND_SCHEMA}") from None
    return parse_schema(content)


def load_schema(path: Path) -> Schema:
    """Return the schema of a .toml, .yaml or .json file. Raises DataError, one line that names the file."""
    readers: dict[str, Callable[[str], object]] = {".toml": parse_toml, ".json": parse_json}
    readers |= dict.fromkeys((".yaml", ".yml"), load_yaml)
    if path.suffix not in readers:
        raise DataError(f"{path} does not end in .toml, .yaml, .yml or .json")
    try:
        text = read_text(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    try:
        return parse_shared_schema(readers[path.suffix](text))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None


# Reconciling


def majority(schemas: Sequence[Schema]) -> Schema:
    """Return the majority's schema, part by part; ``schemas`` are in the order of the silos' names.

    For columns and labels, the most frequent set of names is taken first: in a tie the larger set, then the first
    silo's. Then the most frequent order among the silos with this set is taken, and units and ranges by column.
    """
    features, labels = _most([s.names for s in schemas]), _most([s.labels for s in schemas])
    stated = [{f.name: f for f in s.features} for s in schemas if set(s.names) == set(features)]
    units = {name: _first([known[name].unit for known in stated]) or "" for name in features}
    ranges = {name: _first([known[name].range for known in stated]) for name in features}
    dtype = _first([s.dtype for s in schemas]) or ""
    settings = [dict(s.inputs) for s in schemas]
    inputs = {key: _first([values.get(key) for values in settings]) for key in SETTINGS}
    return Schema(
        tuple(Feature(name, units[name], ranges[name]) for name in features),
        labels,
        dtype,
        inputs=tuple(sorted((key, value) for key, value in inputs.items() if value)),
    )


def _most(orders: Sequence[Names]) -> Names:
    sets = Counter(frozenset(order) for order in orders if order)
    if not sets:
        return ()
    chosen = max(sets, key=lambda names: (sets[names], len(names)))
    return _first([order for order in orders if frozenset(order) == chosen])  # type: ignore[no-any-return]


def _first(values: Sequence[Any]) -> Any:
    """Return the most frequent stated value; in a tie the first."""
    return next((value for value, _ in Counter(filter(None, values)).most_common(1)), None)


MEND = "rename them in the data file, or set `schema` in the federation file"


def difference(
    schema: Schema,
    agreed: Schema,
    source: str,
    *,
    required: bool = False,
    subset: bool = True,
    mend: str = MEND,
) -> str:
    """Return the first difference by name between ``schema`` and ``agreed``, and how to mend it; empty without one.

    ``source``: a text such as "most silos have"; ``required``: whether ``schema`` must have the names of ``agreed``;
    ``subset``: whether ``schema`` may lack some labels, as in a hospital without patients of a class.
    """
    if schema.dtype and agreed.dtype and schema.dtype != agreed.dtype:
        return f"samples of {schema.dtype}, {source} {agreed.dtype}: save them alike"
    for what, key, names, known, fewer in (
        ("columns", "feature_names", schema.names, agreed.names, False),
        ("labels", "label_names", schema.labels, agreed.labels, subset),
    ):
        if known and not names and required:
            return f"no names of its {what}, {source} {few(known)}: add `{key}` to the data file (`silofl import` does)"
        if not (known and names):
            continue
        foreign = [name for name in names if name not in set(known)]
        missing = [name for name in known if name not in set(names)]
        if foreign:
            return f"{what} named {few(foreign)}, {source} {few(missing or known)}: {mend}"
        if missing and not fewer:
            return f"no {what} named {few(missing)}, {source} them: {mend}"
    settings = dict(agreed.inputs)
    for key, value in schema.inputs:
        if (setting := settings.get(key, value)) != value:
            return f"inputs made with {key} {few([value], 1, 60)}, {source} {few([setting], 1, 60)}: import them alike"
    stated = {feature.name: feature for feature in agreed.features}
    for feature in schema.features:
        other = stated.get(feature.name, feature)
        if feature.unit and other.unit and feature.unit != other.unit:
            return f"{few([feature.name])} in {few([feature.unit])}, {source} {few([other.unit])}: convert the column"
        if feature.range and other.range and feature.range != other.range:
            own_range, range_ = ("{:g}..{:g}".format(*r) for r in (feature.range, other.range))
            return f"a range of {own_range} for {few([feature.name])}, {source} {range_}: agree on one range"
    return ""


def find_moved(schema: Schema, agreed: Schema) -> list[str]:
    """Return which parts of two matching schemas are reordered by name: "columns", "labels"."""
    pairs = {"columns": (schema.names, agreed.names), "labels": (schema.labels, agreed.labels)}
    return [
        what
        for what, (names, known) in pairs.items()
        if names and known and names != known[: len(names)]
    ]
