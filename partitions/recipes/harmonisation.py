"""``combat.toml``: the result of ``silofl survey --harmonize``, and the section ``[combat]`` of a recipe from it.

    version = 1
    covariates = ["age", "sex=male"]
    [[columns]]                    # of all hospitals
    name = "glucose"
    alpha = 5.9
    beta = [0.01, 0.2]
    sigma = 1.1
    [[silos]]                      # of one hospital
    name = "north"
    gamma = {glucose = 0.4}
    delta = {glucose = 1.3}

A hospital needs the common part and its own. The common part, with its own rows, discloses information on the others
(docs/attacks.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import nearest
from partitions.recipes.combat import Combat, Harmonised, parse_beta
from partitions.recipes.pipeline import harmonise
from partitions.recipes.recipe import Recipe, check_recipe, loaded, written
from partitions.recipes.values import number, refuse_unknown, table_of, texts, typed
from partitions.schema import check_name, few

FILE, VERSION = "combat.toml", 1


@dataclass(frozen=True)
class Harmonisation:
    """The numbers of each hospital's columns, by its name; ``covariates``: a column, or COLUMN=CATEGORY."""

    covariates: tuple[str, ...]
    silos: Mapping[str, Sequence[Harmonised]]

    def toml(self, about: Sequence[str] = ()) -> str:
        """Return the content of the file, with the lines ``about`` as comments at the top."""
        shared = {own.name: own for columns in self.silos.values() for own in columns}
        lines = [
            *(f"# {line}" for line in about),
            f"version = {VERSION}",
            f"covariates = {written([*self.covariates])}",
        ]
        for name, own in sorted(shared.items()):
            lines += ["", "[[columns]]", f"name = {written(name)}", f"alpha = {own.alpha!r}"]
            lines += [f"beta = {written([*own.beta])}", f"sigma = {own.sigma!r}"]
        for silo, columns in sorted(self.silos.items()):
            lines += ["", "[[silos]]", f"name = {written(silo)}"]
            for key in ("gamma", "delta"):
                lines.append(f"{key} = {written({own.name: getattr(own, key) for own in columns})}")
        return "\n".join(lines) + "\n"


def load_harmonisation(path: Path) -> Harmonisation:
    """Read ``combat.toml``. Raises DataError, one line that names the file."""
    return loaded(path, parse_harmonisation)


def parse_harmonisation(content: object) -> Harmonisation:
    """Parse the content of the file. Raises DataError."""
    top = table_of(content, "the file")
    refuse_unknown(top, ("version", "covariates", "columns", "silos"), "the file")
    if top.get("version") != VERSION:
        raise DataError(f"version is {str(top.get('version'))[:20]}: this silofl reads version {VERSION}")
    covariates = texts(top.get("covariates", []), "covariates")
    shared: dict[str, dict[str, Any]] = {}
    for own in tables(top, "columns"):
        refuse_unknown(own, ("name", "alpha", "beta", "sigma"), "a column")
        name = typed(own, "name", "")
        beta = parse_beta(own.get("beta", []), name, len(covariates))
        if name in shared:
            raise DataError(f"the column {name[:80]!r} is there twice")
        shared[name] = {key: number(own.get(key), f"{key} of {name!r}") for key in ("alpha", "sigma")} | {"beta": beta}
    silos: dict[str, list[Harmonised]] = {}
    for own in tables(top, "silos"):
        refuse_unknown(own, ("name", "gamma", "delta"), "a silo")
        name, gamma, delta = (
            typed(own, "name", ""),
            table_of(own.get("gamma"), "gamma"),
            table_of(own.get("delta"), "delta"),
        )
        check_name("silo", name)
        if name in silos or not gamma or gamma.keys() != delta.keys() or not gamma.keys() <= shared.keys():
            raise DataError(f"the silo {name!r} is there twice, or its gamma and delta are not of the file's columns")
        silos[name] = [
            Harmonised(
                column,
                **shared[column],
                gamma=number(gamma[column], f"gamma of {column!r}"),
                delta=number(delta[column], f"delta of {column!r}"),
            )
            for column in gamma
        ]
    return Harmonisation(covariates, silos)


def tables(top: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the list of tables under a key. Raises DataError."""
    listed = top.get(key)
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{key} are tables [[{key}]], one or more")
    return [table_of(own, f"one of {key}") for own in listed]


def with_combat(recipe: Recipe, found: Harmonisation, silo: str, path: object) -> Recipe:
    """Add a hospital's section to the recipe. Raises DataError where it has one, or lacks a column or a covariate."""
    if recipe.combat:
        raise DataError(
            f"the recipe is harmonised already, for {recipe.combat.silo!r}: take the one without [combat]; twice would "
            "move the values twice"
        )
    if silo not in found.silos:
        raise DataError(f"{path} has no silo {silo!r}: {few([*found.silos])}{nearest(silo, [*found.silos])}")
    combat = Combat(silo, found.covariates, tuple(found.silos[silo]))
    made = replace(recipe, combat=combat)
    check_recipe(made)
    harmonise(np.empty((0, len(made.features)), np.float32), made, combat)  # raises for a missing covariate
    return made
