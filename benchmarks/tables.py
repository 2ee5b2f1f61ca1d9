"""Time and memory of ``silofl import`` of a table, against ``pandas.read_csv`` of the same file.

``python -m benchmarks.tables [rounded|exact|wide|long]...``: a made csv with numbers with decimal commas, 4 % of them
gaps, two columns of categories, a date, and patients with three rows each. ``rounded`` numbers have three decimals, so
that most are repeated; ``exact`` ones have nine, and hardly any is. ``wide`` and ``long`` have 60 columns; ``long``
takes minutes. Each is a separate process; processor time and peak of memory are measured, libraries included.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scans import measured

# Rows, columns of numbers, decimals.
KINDS = {
    "rounded": (340_000, 15, 3),
    "exact": (210_000, 15, 9),
    "wide": (60_000, 55, 15),
    "long": (3_000_000, 55, 3),
}
GAPS = ("", "NA")


def make(kind: str, path: Path) -> None:
    """Write the csv."""
    rows, count, decimals = KINDS[kind]
    own = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        numbers = ";".join(f"wert{k}" for k in range(count))
        file.write(f"Patient-ID;Aufnahme;Geschlecht;Station;{numbers};state\n")
        for i in range(rows):
            day = f"{own.randint(1, 28):02d}.{own.randint(1, 12):02d}.20{own.randint(10, 24)}"
            cells = [
                f"P{i // 3:07d}",
                day,
                own.choice(("m", "w", "divers")),
                f"Station {own.randint(0, 11)}",
            ]
            for k in range(count):
                value = f"{own.gauss(50 + k, 10):.{decimals}f}".replace(".", ",")
                cells.append(value if own.random() > 0.04 else own.choice(GAPS))
            file.write(";".join([*cells, own.choice(("gesund", "krank"))]) + "\n")


def main(kinds: Sequence[str]) -> None:
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            make(kind, path := Path(folder) / "t.csv")
            floor = measured(
                "import pandas; pandas.read_csv(sys.argv[1], sep=';', decimal=',')", str(path)
            )
            options = [
                "--label",
                "state",
                "--patient",
                "Patient-ID",
                "--decimal",
                ",",
                "--out",
                f"{folder}/o.npz",
            ]
            ours = measured(
                "from server.cli.main import main; main(sys.argv[1:])",
                "import",
                str(path),
                *options,
            )
            ratios = [f"{mine / theirs:.2f}" for mine, theirs in zip(ours, floor, strict=True)]
            rows.append([kind, *ratios, f"{ours[0]:.1f}", f"{ours[1]:.0f}"])
    from benchmarks.common import table  # imports PyTorch, which pandas does not need

    print(
        table(rows, ["csv", "time over pandas'", "peak over pandas'", "seconds", "peak, MiB"])
    )


if __name__ == "__main__":
    main(sys.argv[1:] or ["rounded", "exact", "wide"])
