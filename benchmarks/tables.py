"""Time and memory of ``silofl import`` of a table, against a loop of ``csv`` and numpy that reads the same file once.

``python -m benchmarks.tables [rounded|exact]...``: a made csv of 20 columns, 15 of them numbers with decimal commas and
4 % of gaps, two of categories, a date, and patients with three rows each. ``rounded`` numbers have three decimals, so
that most are repeated; ``exact`` ones have nine, and hardly any is. The loop reads the numbers alone. Each is a
separate process; processor time and peak of memory are measured, libraries included.
"""

from __future__ import annotations

import csv
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.scans import measured

KINDS = {"rounded": (340_000, 3), "exact": (210_000, 9)}  # rows, decimals: 50 MB each
NUMBERS = 15
GAPS = ("", "NA")


def make(kind: str, path: Path) -> None:
    """Write the csv."""
    rows, decimals = KINDS[kind]
    own = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        numbers = ";".join(f"wert{k}" for k in range(NUMBERS))
        file.write(f"Patient-ID;Aufnahme;Geschlecht;Station;{numbers};state\n")
        for i in range(rows):
            day = f"{own.randint(1, 28):02d}.{own.randint(1, 12):02d}.20{own.randint(10, 24)}"
            cells = [f"P{i // 3:07d}", day, own.choice(("m", "w", "divers")), f"Station {own.randint(0, 11)}"]
            for k in range(NUMBERS):
                value = f"{own.gauss(50 + k, 10):.{decimals}f}".replace(".", ",")
                cells.append(value if own.random() > 0.04 else own.choice(GAPS))
            file.write(";".join([*cells, own.choice(("gesund", "krank"))]) + "\n")


def plain(name: str) -> None:
    """Run the plain loop."""
    with Path(name).open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file, delimiter=";")
        next(rows)
        made = [
            [np.nan if cell in GAPS else float(cell.replace(",", ".")) for cell in row[4 : 4 + NUMBERS]] for row in rows
        ]
    np.savez(f"{name}.plain.npz", x=np.array(made, np.float32))


def main(kinds: Sequence[str]) -> None:
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            make(kind, path := Path(folder) / "t.csv")
            floor = measured("from benchmarks.tables import plain; plain(sys.argv[1])", str(path))
            options = ["--label", "state", "--patient", "Patient-ID", "--decimal", ",", "--out", f"{folder}/o.npz"]
            ours = measured("from server.cli.main import main; main(sys.argv[1:])", "import", str(path), *options)
            ratios = [f"{mine / theirs:.2f}" for mine, theirs in zip(ours, floor, strict=True)]
            rows.append([kind, *ratios, f"{ours[0]:.1f}", f"{ours[1]:.0f}"])
    from benchmarks.common import table  # imports PyTorch, which the loop does not need

    print(table(rows, ["numbers", "time over the loop's", "peak over the loop's", "seconds", "peak, MiB"]))


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
