"""What a finished run measured of each silo's reported model at that silo itself: the diagonal of the matrix.

A silo's own model mostly never left its hospital, so no other hospital can evaluate it. The run's history has the
metrics that its own hospital gave of it, in the round that the report shows: the bits that an evaluation would give.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from server.results.history import History, guarded
from server.results.run_directory import RunDirectory
from server.results.summary import entries
from server.run.evaluation.loop import HEADER, Cell
from strategies.base.run_settings import RunSettings


def entry_of(source: Path, run: RunSettings) -> Mapping[str, Any]:
    """Return the entry of ``summary.json`` of a finished run. Raises UserError where the run has not ended."""
    directory, which = RunDirectory(source), (run.common.strategy, run.common.seed)
    for entry in entries(directory) if directory.summary.exists() else []:
        if (entry["strategy"], entry["seed"]) == which:
            return entry
    raise UserError(f"{source}: {run.run_key} has not come to its end: its silos' models are not chosen yet")


def own_cells(source: Path, run: RunSettings) -> list[Cell]:
    """Return the rows of each silo's reported model at that silo, under the silo's name, from the run's history.

    Raises UserError where the run has not ended, or lacks its history.
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
    """Add these rows to ``matrix.csv`` where it has none of their model at their silo, and write it at once.

    The models of ``silos`` stand in this order, behind the others. The file is made where there is none.
    """
    with io.StringIO(matrix.read_text() if matrix.exists() else "", newline="") as text:
        rows = list(csv.reader(text))[1:]
    measured, places = {(row[0], row[1]) for row in rows}, {guarded(silo): at for at, silo in enumerate(silos)}
    rows += [row for cell in cells if (row := cell.cells()) and (row[0], row[1]) not in measured]
    rows.sort(key=lambda row: (places.get(row[0], -1), row[1]))
    with io.StringIO(newline="") as text:
        csv.writer(text, lineterminator="\n").writerows([HEADER, *rows])
        write_atomically(matrix, text.getvalue())
