"""Places of the columns of a recipe, or of a schema, in a data file's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitions.recipes.combat import Terms
from partitions.recipes.recipe import Recipe
from partitions.schema import Feature, Schema, tidy


@dataclass(frozen=True)
class TableColumn:
    """A column of the schema, or the several columns of one category: indices in the table, and categories."""

    name: str
    kind: str  # number, date, category
    places: tuple[int, ...]
    unit: str = ""
    range: tuple[float, float] | None = None
    levels: tuple[str, ...] = ()

    @property
    def terms(self) -> Terms:
        """The possible covariates, numbers and categories: the column of each, and its code there.

        A number has no code, nor has a category with its own column of 0 and 1.
        """
        if self.kind != "category":
            return {self.name: (self.places[0], None)}
        names = [tidy(f"{self.name}={level}") for level in self.levels]
        if len(self.places) == len(names):
            return {name: (place, None) for name, place in zip(names, self.places, strict=True)}
        return {name: (self.places[0], code) for code, name in enumerate(names)}


def columns_of(schema: Schema, recipe: Recipe | None, count: int) -> list[TableColumn]:
    """Return the columns of a table with ``count`` columns, by the schema and the recipe of the hospital's own file."""
    features = schema.features or tuple(Feature(f"column {i + 1}") for i in range(count))
    if recipe is None or not recipe.used:
        return [TableColumn(f.name, "number", (i,), f.unit, f.range) for i, f in enumerate(features)]
    found, at = [], 0
    for own in recipe.used:
        places = tuple(range(at, at + len(own.features) - own.mark_gaps))  # the column that marks gaps follows
        at += len(own.features)
        feature = features[places[0]]
        range_ = None if own.kind == "category" else feature.range
        found.append(TableColumn(own.name, own.kind, places, feature.unit, range_, own.levels))
    return found


def terms_of(columns: Sequence[TableColumn]) -> Terms:
    """Return the terms of all columns."""
    return {name: term for column in columns for name, term in column.terms.items()}
