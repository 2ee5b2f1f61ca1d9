"""Metrics of each silo's reported model at that silo, from a finished run: the diagonal of the matrix.

A silo's own model usually stays in its hospital, so no other hospital can evaluate it. The run's history holds the
metrics of the reported round from the model's own hospital, bit for bit those that an evaluation would return.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.common.names import guarded
from server.results.history import History
from server.results.reading import read_summary
from server.results.run_directory import RunDirectory
from server.run.evaluation.loop import HEADER, Cell
from strategies.base.run_settings import RunSettings


def entry_of(source: Path, run: RunSettings) -> Mapping[str, Any]:
    """Return a finished run's entry of ``summary.json``. Raises UserError if the run has not ended."""
    directory, which = RunDirectory(source), (run.common.strategy, run.common.seed)
    runs: list[dict[str, Any]] = read_summary(directory.summary)["runs"]
    for entry in runs:
        if (entry["strategy"], entry["seed"]) == which:
            return entry
    raise UserError(f"{source}: {run.run_key} has not come to its end: its silos' models are not chosen yet")


def own_cells(source: Path, run: RunSettings) -> list[Cell]:
    """Return from the run's history the rows of each silo's reported model at that silo, named after the silo.

    Raises UserError if the run has not ended, or its history is missing.
    """
    entry = entry_of(source, run)
    rounds = {silo: found.get("round") for silo, found in entry["per_silo"].items()}
    directory = RunDirectory(source)
    if not directory.history.is_file():
        raise UserError(
            f"there is no {directory.history}, which has what the run measured: the run directory is wanted"
        )
    rows = History(directory.history).of(run.common.strategy, run.common.seed)
    return [
        Cell(row.silo, row)
        for row in rows
        if row.silo in rounds
        and (row.round, row.snapshot) == (rounds[row.silo], entry["reports"])
        and row.split != "train"
    ]


def add_cells(matrix: Path, cells: Sequence[Cell], silos: Sequence[str]) -> None:
    """Add to ``matrix.csv`` the rows whose model and silo it does not have yet; create the file if it is missing.

    The models named in ``silos`` stand last, in this order. The file is written atomically.
    """
    with io.StringIO(matrix.read_text() if matrix.exists() else "", newline="") as text:
        rows = list(csv.reader(text))[1:]
    measured, places = {(row[0], row[1]) for row in rows}, {guarded(silo): at for at, silo in enumerate(silos)}
    rows += [row for cell in cells if (row := cell.cells()) and (row[0], row[1]) not in measured]
    rows.sort(key=lambda row: (places.get(row[0], -1), row[1]))
    with io.StringIO(newline="") as text:
        csv.writer(text, lineterminator="\n").writerows([HEADER, *rows])
        write_atomically(matrix, text.getvalue())
