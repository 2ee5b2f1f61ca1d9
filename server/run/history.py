"""The history of a study, ``history.csv``: one row per strategy, seed, round, silo, split, snapshot and metric."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from partitions.disk import write_atomically


@dataclass(frozen=True)
class Row:
    """One value. Rows about a whole round have an empty silo, split, snapshot and n. A withheld value is empty."""

    strategy: str
    seed: int
    round: int
    silo: str
    split: str
    snapshot: str
    metric: str
    value: float
    n: int | None

    def cells(self) -> list[str]:
        cells = [guarded(str(v)) for v in astuple(self)]
        cells[7] = "" if math.isnan(self.value) else repr(float(self.value))
        cells[8] = "" if self.n is None else str(self.n)
        return cells


FORMULA = re.compile(r"'*[=+\-@\t\r]")  # what a spreadsheet would compute, or what was guarded from that


def guarded(cell: str) -> str:
    """Text that no spreadsheet takes for a formula: behind an apostrophe, which :func:`unguarded` takes off."""
    return f"'{cell}" if FORMULA.match(cell) else cell


def unguarded(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


HEADER = [f.name for f in fields(Row)]


def _read(text: str, path: Path) -> Iterator[Row]:
    for line, r in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            value = float(r["value"]) if r["value"] else math.nan
            n = int(r["n"]) if r["n"] else None
            yield Row(
                unguarded(r["strategy"]),
                int(r["seed"]),
                int(r["round"]),
                unguarded(r["silo"]),
                unguarded(r["split"]),
                unguarded(r["snapshot"]),
                unguarded(r["metric"]),
                value,
                n,
            )
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}, line {line}: no row of a history") from None


def _text(rows: Iterable[Row]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(row.cells() for row in rows)
    return buffer.getvalue()


class History:
    """Rows in memory and, where there is a path, in its file, which grows by one write per round."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            text = path.read_text()
            self.rows = list(_read(text[: text.rfind("\n") + 1], path))  # a last line cut off by a crash is left out
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(HEADER) + "\n")

    def add(self, rows: Iterable[Row]) -> None:
        new = list(rows)
        self.rows += new
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(_text(new))

    def forget(self, strategy: str, seed: int, after: int) -> None:
        """Drop the rows of one run from rounds later than ``after``: they are about to be repeated."""
        self.rows = [r for r in self.rows if (r.strategy, r.seed) != (strategy, seed) or r.round <= after]
        if self.path is not None:
            text = ",".join(HEADER) + "\n" + _text(self.rows)
            write_atomically(self.path, text)

    def drop(self, silo: str) -> bool:
        """Drop all rows of a silo; whether there were any."""
        before = len(self.rows)
        self.rows = [r for r in self.rows if r.silo != silo]
        if self.path is not None and len(self.rows) < before:
            write_atomically(self.path, ",".join(HEADER) + "\n" + _text(self.rows))
        return len(self.rows) < before

    def of(self, strategy: str, seed: int) -> list[Row]:
        return [r for r in self.rows if r.strategy == strategy and r.seed == seed]


def metric_rows(
    strategy: str,
    seed: int,
    round: int,
    silo: str,
    metrics: Mapping[str, float],
    counts: Mapping[str, int],
    withheld_below: int,
) -> list[Row]:
    """Rows of one silo's reply. A split with too few samples has one empty row per snapshot, so that it is seen."""
    rows = []
    for key, value in sorted(metrics.items()):
        snapshot, _, rest = key.partition(".")
        split, _, metric = rest.partition(".")
        if snapshot in ("received", "personal"):
            rows.append(Row(strategy, seed, round, silo, split, snapshot, metric, value, counts[split]))
    snapshots = sorted({r.snapshot for r in rows}) or ["received"]
    shown = {r.split for r in rows} - {"train"}
    for split, n in sorted(counts.items()):
        withheld = bool(shown) and split not in shown  # by the silo's own policy
        if split != "train" and n > 0 and (n < withheld_below or withheld):
            rows += [Row(strategy, seed, round, silo, split, s, "accuracy", math.nan, n) for s in snapshots]
    return rows
