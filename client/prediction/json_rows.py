"""New patients as JSON, for ``silofl predict --serve``: read by the recipe, with the same checks as a csv.

    {"rows": [{"Patient-ID": "P1", "age": "81,5", "dose": 3, "sex": null}]}

A cell is a text as in a csv, a number, or null for a gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from client.prediction.predict import answer
from client.tables.new_samples import INDEX, Asked
from models.flat import FlatModel
from partitions.common.errors import DataError, UserError
from partitions.importing.csv_source import check_columns, table_rows
from partitions.importing.new_rows import new_inputs
from partitions.recipes.lines import Lines
from partitions.recipes.recipe import Recipe
from partitions.silo_file import make_schema
from partitions.splits import dtype_of

MOST_ROWS = 1000
MOST_BYTES = 2**20


def predict_rows(
    card: Mapping[str, Any], net: FlatModel, recipe: Recipe, body: bytes, as_gaps: bool = False
) -> dict[str, Any]:
    """Return ``{"rows": [{key, answers...}], "notes": [...]}`` for the rows in a request's body.

    Raises UserError, one line without a path, for a body that is no such JSON or does not fit the recipe.
    """
    try:
        lines = lines_of(body, recipe)
        found = table_rows(lines, recipe, (), as_gaps)
        x, vocabulary, notes = new_inputs(found, recipe)
    except DataError as error:
        raise UserError(str(error).replace("with --as-gaps", "with ?as-gaps=1")) from None
    key = recipe.patient or INDEX
    keys = [row.key for row in found.rows] if recipe.patient else [str(i) for i in range(len(lines))]
    asked = Asked(x, vocabulary, make_schema(recipe.features, (), dtype_of(x)), keys, key)
    answers = answer(card, net, asked, "the request", "the model")
    rows = [
        {key: own, **dict(zip(answers.columns, row, strict=True))} for own, row in zip(keys, answers.rows, strict=True)
    ]
    return {"rows": rows, "notes": [*found.notes, *notes]}


def lines_of(body: bytes, recipe: Recipe) -> Lines:
    """Return the rows of a request as a csv's lines. Raises DataError, one line."""
    try:
        content = json.loads(body, parse_constant=refuse_constant, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"the request is no JSON ({str(reason)[:80]})") from None
    rows = content.get("rows") if isinstance(content, dict) and set(content) == {"rows"} else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row for row in rows):
        raise DataError('the request is no {"rows": [{"COLUMN": cell, ...}, ...]}')
    if not 0 < len(rows) <= MOST_ROWS:
        raise DataError(f"the request has {len(rows)} rows; 1 to {MOST_ROWS} are answered at once")
    signs = {column.source or column.name: column.decimal for column in recipe.used}
    read = list[dict[str, str]]()
    for number, row in enumerate(rows, 1):
        check_columns(f"row {number}", list(row), recipe)
        cells = {name: cell_of(cell, signs.get(name, "."), f"row {number}, {name[:40]}") for name, cell in row.items()}
        read.append(cells)
    names = dict.fromkeys(name for cells in read for name in cells)
    columns = {name: [cells.get(name, "") for cells in read] for name in names}
    return Lines(Path(), columns, range(1, len(rows) + 1), "row")


def cell_of(cell: object, decimal: str, where: str) -> str:
    """Return a cell as csv text. Raises DataError for a list, an object, true or false."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell.strip()
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return repr(cell).replace(".", decimal)
    raise DataError(f"{where} is no text, number or null")


def refuse_constant(name: str) -> NoReturn:
    raise DataError(f"{name} is no number")


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its pairs. Raises DataError for a repeated key."""
    if len(found := dict(pairs)) < len(pairs):
        raise DataError("a column is named twice in one row")
    return found
