"""Hospitals' tables with recipes, imported as a hospital does, some of them with a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.recipes.recipe import parse_recipe

RECIPE = {
    "version": 1,
    "label": ["state"],
    "task": "multiclass",
    "classes": ["well", "ill"],
    "patient": "pid",
    "file": {"encoding": "utf-8", "separator": ",", "gaps": ["", "NA"]},
    "columns": [
        {"name": "age", "kind": "number", "unit": "years", "range": [0, 120], "fill": "median"},
        {
            "name": "glucose",
            "kind": "number",
            "unit": "mmol/l",
            "range": [-100, 1000],
            "fill": "median",
        },
        {
            "name": "sex",
            "kind": "category",
            "categories": ["female", "male"],
            "fill": "most-frequent",
        },
        {
            "name": "kind",
            "kind": "category",
            "categories": ["a", "b", "c"],
            "encode": "codes",
            "fill": "most-frequent",
        },
        {
            "name": "since",
            "kind": "date",
            "format": "%Y-%m-%d",
            "range": [0, 200],
            "fill": "median",
        },
        {"name": "crp", "kind": "number", "fill": "median", "mark-gaps": True},
    ],
}
HEADER = "pid,age,glucose,sex,kind,since,crp,state"
Row = dict[str, str]


def rows(n: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        made.append(
            {
                "pid": f"p{seed}-{i}",
                "age": f"{np.clip(rng.normal(60, 12), 20, 95):.1f}",
                "glucose": f"{np.clip(rng.normal(6, 1.2), 3, 15):.2f}",
                "sex": "female" if rng.random() < 0.7 else "male",
                "kind": "abc"[rng.choice(3, p=[0.6, 0.3, 0.1])],
                "since": f"{2000 + rng.integers(0, 20)}-0{rng.integers(1, 10)}-11",
                "crp": "NA" if rng.random() < 0.2 else f"{rng.exponential(5):.1f}",
                "state": "ill" if rng.random() < 0.4 else "well",
            }
        )
    return made


def hospital(
    folder: Path, name: str, n: int, seed: int, change: Callable[[Row], Row] = lambda row: row
) -> Path:
    """The data file of a hospital whose rows are changed like this."""
    csv = folder / f"{name}.csv"
    csv.write_text(
        "\n".join([HEADER, *(",".join(change(row).values()) for row in rows(n, seed))]) + "\n"
    )
    import_source(csv, folder / f"{name}.npz", ImportOptions(recipe=parse_recipe(RECIPE)))
    return folder / f"{name}.npz"


def times(column: str, factor: float, plus: float = 0.0) -> Callable[[Row], Row]:
    return lambda row: {**row, column: f"{float(row[column]) * factor + plus:.2f}"}


def recoded(column: str, codes: Mapping[str, str]) -> Callable[[Row], Row]:
    return lambda row: {**row, column: codes.get(row[column], row[column])}


def rewritten(file: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the arrays of a data file."""
    with np.load(file) as found:
        arrays = dict(found)
    change(arrays)
    np.savez(file, **arrays)
