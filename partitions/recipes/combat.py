"""The section ``[combat]`` of a recipe: the numbers that harmonise a hospital's columns (``silofl survey``).

    [combat]
    silo = "north"                 # the hospital of gamma and delta
    covariates = ["age", "sex=male"]
    columns = [{name = "glucose", alpha = 5.9, beta = [0.01, 0.2], sigma = 1.1, gamma = 0.4, delta = 1.3}]

A value becomes ((y - a) / sigma - gamma) / sqrt(delta) * sigma + a with a = alpha + sum of beta times the covariates
(Johnson, Li and Rabinovic 2007, section 3.4; ``models/survey/combat.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.recipes.values import number, refuse_unknown, table_of, texts, typed
from partitions.schema import few
from partitions.splits import Array

Terms = Mapping[str, tuple[int, int | None]]  # a covariate's column in the table, and its code there, if it has one


@dataclass(frozen=True)
class Harmonised:
    """The numbers of one column; ``beta``: of each covariate."""

    name: str
    alpha: float
    beta: tuple[float, ...]
    sigma: float
    gamma: float
    delta: float

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and self.delta > 0):
            raise DataError(f"[combat] {self.name!r}: sigma and delta are above 0")


@dataclass(frozen=True)
class Combat:
    """Harmonisation of one hospital's columns. ``covariates``: a column of numbers, or COLUMN=CATEGORY."""

    silo: str
    covariates: tuple[str, ...]
    columns: tuple[Harmonised, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def content(self) -> dict[str, Any]:
        """The section for TOML."""
        columns = [asdict(column) | {"beta": list(column.beta)} for column in self.columns]
        return {"silo": self.silo, "covariates": list(self.covariates), "columns": columns}


def parse_combat(content: object) -> Combat:
    """Parse the section of a recipe. Raises DataError, one line."""
    table = table_of(content, "[combat]")
    refuse_unknown(table, ("silo", "covariates", "columns"), "[combat]")
    covariates, columns = texts(table.get("covariates", []), "covariates of [combat]"), table.get("columns")
    if not isinstance(columns, list) or not columns:
        raise DataError("columns of [combat] is a list of tables, one or more")
    made = tuple(parse_harmonised(own, len(covariates)) for own in columns)
    if len({own.name for own in made}) < len(made):
        raise DataError("[combat] has a column twice")
    return Combat(typed(table, "silo", ""), covariates, made)


def parse_harmonised(content: object, covariates: int) -> Harmonised:
    """Parse the numbers of one column. Raises DataError."""
    table = table_of(content, "a column of [combat]")
    keys = tuple(own.name for own in fields(Harmonised))
    refuse_unknown(table, keys, "a column of [combat]")
    name = typed(table, "name", "")
    numbers = {key: number(table.get(key), f"{key} of {name!r}") for key in ("alpha", "sigma", "gamma", "delta")}
    return Harmonised(name, beta=parse_beta(table.get("beta"), name, covariates), **numbers)


def parse_beta(content: object, name: str, covariates: int) -> tuple[float, ...]:
    """Parse a number for each covariate. Raises DataError."""
    if not isinstance(content, list) or len(content) != covariates:
        raise DataError(f"beta of {name!r} is a list of {covariates} numbers, one for each covariate")
    return tuple(number(own, f"beta of {name!r}") for own in content)


def harmonised(x: Array, combat: Combat, places: Mapping[str, int], terms: Terms) -> Array:
    """Return the table ``x`` (n, columns) with harmonised columns, by the equation above, float32.

    ``places``: indices of the columns that may be harmonised; ``terms``: of each covariate (``places.py``). Each row is
    computed separately, in a fixed order, so that its result does not depend on other rows in any bit. Raises DataError
    where a column or a covariate is missing.
    """
    if missing := [name for name in combat.names if name not in places]:
        raise DataError(f"[combat] harmonises {few(missing)}, and the recipe has no such column of numbers")
    found, result = design(x, combat.covariates, terms), x.copy()
    for column in combat.columns:
        level = np.full(len(x), column.alpha)
        for beta, values in zip(column.beta, found.T, strict=True):
            level += beta * values
        y = x[:, places[column.name]].astype(np.float64)
        scaled = ((y - level) / column.sigma - column.gamma) / np.sqrt(column.delta)
        result[:, places[column.name]] = scaled * column.sigma + level
    return result


def design(x: Array, covariates: Sequence[str], terms: Terms) -> Array:
    """Return the covariates' values, float64 (n, p). Raises DataError where one is missing."""
    if missing := [name for name in covariates if name not in terms]:
        raise DataError(f"[combat] has the covariates {few(missing)}, which are none of the recipe's: {few([*terms])}")
    found = np.zeros((len(x), len(covariates)))
    for j, name in enumerate(covariates):
        place, code = terms[name]
        found[:, j] = x[:, place] if code is None else x[:, place] == code
    return found
