"""The table that all hospitals share: made from a first recipe, and used to make other hospitals' recipes.

The schema's section ``table`` has the common part: columns with kind, unit, range, categories and the way to fill gaps.
A hospital's recipe has its own part: names in its csv, signs, formats, codes, conversions, values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partitions.common.errors import DataError
from partitions.common.names import Names, nearest, words_in
from partitions.common.parsed import parse_content
from partitions.recipes.cells import date_formats, latest_of
from partitions.recipes.draft import without_unit
from partitions.recipes.lines import Lines, cells_in
from partitions.recipes.pipeline import shorten_cell
from partitions.recipes.recipe import (
    MEND,
    Column,
    Recipe,
    RecipePart,
    Text,
    check_column,
    check_recipe,
)
from partitions.recipes.signs import Asked, evidence_of, join_signs, signs_of
from partitions.recipes.toml import as_toml
from partitions.schema import Schema, few, tidy

# One hospital's
OWN = {*words_in("from decimal thousands factor offset values format latest fill-value")}


@dataclass(frozen=True)
class Mapped:
    """A hospital's mapping of its csv: its column for each shared one, and the shared category of cells, by column."""

    columns: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Shared(RecipePart):
    """The section ``table``: columns without a hospital's own keys, labels, and the column of patients."""

    ALWAYS = ("label", "task", "columns")

    label: tuple[Text, ...] = ()
    task: str = ""
    patient: str = ""
    columns: tuple[Column, ...] = ()


# The first hospital


def schema_of(recipe: Recipe) -> Schema:
    """Return the schema of all hospitals from the recipe of one. Raises DataError where it has not been used yet."""
    if recipe.task == "auto":
        raise DataError(
            "the recipe has no task yet: import the rows with it, and take the recipe that is written then"
        )
    if recipe.text.column:
        raise DataError("a shared schema is of tables; this recipe takes texts")
    used = {name for column in recipe.used for name in (column.origin, column.since)}
    sources = {column.origin: column.name for column in recipe.columns}
    columns = list[dict[str, Any]]()
    for column in recipe.columns:
        if column.origin in used:
            kept = column.content
            for key in own_keys(column):
                kept.pop(key, None)
            kept |= {"since": sources[column.since]} if column.since in sources else {}
            columns.append(kept)
    several = len(recipe.label) > 1
    named = recipe.classes if several and recipe.classes else recipe.label
    table = Shared(label=named, task=recipe.task, patient=recipe.patient).content
    table["columns"] = columns
    labels = recipe.classes or recipe.label * (several and recipe.task != "survival")
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return Schema(recipe.features, tuple(map(tidy, labels)), "float32", text)


def own_keys(column: Column) -> set[str]:
    """Return the keys of a column that are one hospital's: not the value for gaps, if it is stated and no statistic."""
    return OWN - {"fill-value"} if column.fill == "value" else OWN


def schema_toml(schema: Schema) -> str:
    """Return the schema as TOML with comments."""
    content = schema.content
    table = content["table"]
    table["columns"] = [
        {"name": column["name"], "kind": column["kind"], **column}
        for column in table["columns"]
    ]
    about = "The columns and labels of all hospitals: ship it in the bundles (`schema:` in federation.yaml)."
    return as_toml(content, about)


def parse_shared(schema: Schema) -> Shared:
    """Parse the section ``table`` of a schema. Raises DataError where there is none, or for other columns."""
    if not schema.table:
        raise DataError(
            "the schema has no section [table]: make one with silofl schema OURS.recipe.toml"
        )
    shared = parse_content(Shared, json.loads(schema.table), MEND, check_shared)
    if [f for column in shared.columns for f in column.features] != list(schema.features):
        raise DataError(
            "the schema's [table] makes other columns than its features: make it again with silofl schema"
        )
    return shared


def check_shared(shared: Shared) -> None:
    """Raise DataError for a column with a hospital's own keys, or with keys that do not fit its kind."""
    for column in shared.columns:
        if strange := own_keys(column).intersection(column.content):
            raise DataError(
                f"{min(strange)} of a column is a hospital's own: it stands in a recipe, not in a schema"
            )
        # A date's format is the hospital's own; a placeholder allows the check of all other keys.
        check_column(column.model_copy(update={"format": "%Y-%m-%d"}))


# Every other hospital


def recipe_for(
    lines: Lines,
    shared: Shared,
    labels: Sequence[str],
    mapped: Mapped,
    options: Asked,
    gaps: Names,
    **roles: Any,
) -> Recipe:
    """Return a hospital's recipe that makes the shared columns from its csv. ``labels``: the schema's.

    ``roles``: more fields. Raises DataError where a column or a cell has no shared name and no mapping.
    """
    sources = find_sources(lines, shared, mapped)
    cells = {name: cells_in(lines, source, gaps) for name, source in sources.items()}
    evidence = {
        c.name: evidence_of(cells[c.name]) for c in shared.columns if c.kind == "number"
    }
    whole = join_signs(evidence.values())
    columns = []
    for column in shared.columns:
        name, source = column.name, sources[column.name]
        changed: dict[str, Any] = {"source": source if source != name else ""}
        if column.kind == "number":
            signs = signs_of(source, evidence[name], whole, options)
            changed |= {"decimal": signs.decimal, "thousands": signs.thousands}
        elif column.kind == "category":
            others = column.levels, mapped, bool(column.other)
            changed["values"] = codes_of(name, source, cells[name], *others)
        else:
            form = format_of(source, cells[name], options)
            since = sources.get(column.since, column.since)
            changed |= {"format": form, "latest": latest_of(form), "since": since}
        columns.append(column.model_copy(update=changed))
    values = {}
    if len(shared.label) == 1 and labels and shared.task != "multilabel":
        name = shared.label[0]
        values = codes_of(name, sources[name], cells[name], labels, mapped, False)
    used = {*sources.values(), *roles.values()}
    recipe = Recipe(
        columns=(*columns, *unused_columns(lines.header, used, columns)),
        outputs=len(labels),
        label=tuple(sources[name] for name in shared.label),
        task=shared.task,
        classes=tuple(labels),
        label_values=values,
        **roles,
    )
    check_recipe(recipe)
    return recipe


def unused_columns(
    header: Sequence[str], used: Collection[str], columns: Sequence[Column]
) -> Iterator[Column]:
    """Yield the columns that only the csv has, under names that are free."""
    taken = {column.name for column in columns}
    for name in header:
        if name not in used:
            free = tidy(name) + " (left out)" * (tidy(name) in taken)
            yield Column(name=free, kind="skip", source=name)


def find_sources(lines: Lines, shared: Shared, mapped: Mapped) -> dict[str, str]:
    """Return the csv's column for each shared name: as mapped, or of the same name. Raises DataError."""
    path, header = lines.path, lines.header
    units = {column.name: column.unit for column in shared.columns}
    names = [*units, *shared.label]
    for name, source in mapped.columns.items():
        pair = f"--map {name}={source}"
        if name not in names:
            raise DataError(f"{pair}: the schema has no column {name!r}{nearest(name, names)}")
        if source not in header:
            raise DataError(f"{pair}: {path} has no column {source!r}{nearest(source, header)}")
    same = {tidy(name): name for name in header}
    for name in header:  # "LDL (mmol/L)" is the schema's LDL, if that is in mmol/L
        short, unit = without_unit(name, header)
        if unit and units.get(tidy(short)) == unit:
            same.setdefault(tidy(short), name)
    sources = {name: mapped.columns.get(name, same.get(name, "")) for name in names}
    used = list(sources.values())
    if missing := [name for name, source in sources.items() if not source]:
        left = few([name for name in header if name not in used], 20)
        raise DataError(
            f"{path} has no column {few(missing, 20)}: name its own with --map {missing[0]}=COLUMN, "
            f"one for each; not used yet: {left or 'none'}"
        )
    if twice := next((source for source in used if used.count(source) > 1), ""):
        raise DataError(f"{path}: {twice} stands for two columns of the schema; see --map")
    return sources


def codes_of(
    name: str,
    source: str,
    cells: Mapping[str, str],
    levels: Sequence[str],
    mapped: Mapped,
    other: bool,
) -> dict[str, str]:
    """Return the category of each cell with another name. Raises DataError where one has no category."""
    stated = mapped.cells.get(name, {})
    if strange := [level for level in stated.values() if level not in levels]:
        raise DataError(
            f"--codes {name}: {strange[0]!r} is none of {few(levels, 20)}{nearest(strange[0], levels)}"
        )
    same = {tidy(cell): cell for cell in cells}
    values = {
        cell: level for level, cell in same.items() if level in levels and cell != level
    } | dict(stated)
    unknown = [cell for cell in cells if cell not in levels and cell not in values]
    if unknown and not other:
        raise DataError(
            f"{cells[unknown[0]]}: {source} is {shorten_cell(unknown[0])}, and {name} has the categories "
            f"{few(levels, 20)}: say what {few([shorten_cell(cell) for cell in unknown], 10)} mean, "
            f"--codes {name}:CELL=CATEGORY, one for each"
        )
    return values


def format_of(source: str, cells: Mapping[str, str], options: Asked) -> str:
    """Return the format of a column's dates. Raises DataError where it is ambiguous."""
    formats = date_formats(list(cells))
    if options.dates and (options.dates in formats or not formats):
        return options.dates
    if len(formats) != 1:
        cell = next(iter(cells), "")
        how = " or ".join(map(repr, formats)) or "FORMAT, for example %d.%m.%Y"
        raise DataError(
            f"{cells.get(cell, source)}: {source} is {shorten_cell(cell)}: how are its dates written? --dates {how}"
        )
    return formats[0]
