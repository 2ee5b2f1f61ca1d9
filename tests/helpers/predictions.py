"""What ``silofl predict`` writes, read."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from tiny import rows_of

from client.export import export_model
from client.prediction.predict import predict_file
from partitions.importing.options import ImportOptions, Take
from partitions.importing.source import import_source
from server.simulation.simulate import simulate


def read_csv(text: str) -> tuple[list[int], list[int], Any]:
    """index, label and the probabilities (n, classes) of a prediction."""
    header, *rows = csv.reader(io.StringIO(text))
    assert header == ["index", "label", *(f"p_{c}" for c in range(len(header) - 2))]
    return (
        [int(r[0]) for r in rows],
        [int(r[1]) for r in rows],
        np.array([[float(v) for v in r[2:]] for r in rows]),
    )


def read_rows(text: str) -> list[dict[str, str]]:
    """The rows of a prediction by column."""
    return list(csv.DictReader(io.StringIO(text)))


HEADER = "Patient-ID;age;sex;dose;state"


def visits(path: Path, n: int = 160) -> Path:
    """Who is old is ill; decimal commas, gaps in age and sex."""
    rng = np.random.default_rng(5)
    rows = [HEADER]
    for i in range(n):
        ill = i % 2
        age = "" if i % 11 == 0 else f"{rng.normal(70 if ill else 40, 6):.1f}".replace(".", ",")
        rows.append(
            f"K{i:03d};{age};{('w', 'm', 'NA')[i % 3]};{i % 7};{'ill, acute' if ill else 'well'}"
        )
    path.write_text("\n".join(rows) + "\n")
    return path


def trained_on_visits(folder: Path) -> tuple[Path, Path]:
    """The run of two silos, and the model of the first, from a file that went through a recipe."""
    take = Take(patient="Patient-ID")
    import_source(
        visits(folder / "t.csv"), folder / "t.npz", ImportOptions(label="state", take=take)
    )
    settings = {
        "dataset": str(folder / "t.npz"),
        "partition": "iid",
        "silos": 2,
        "rounds": 3,
        "threads": 1,
    }
    more = {"model": "mlp", "mlp.hidden": "", "learning-rate": 0.5, "strategy": "fedavg"}
    run = simulate({**settings, **more, "out": str(folder / "run")}, quiet=True)
    export_model(run, "hospital-01", "last", folder / "m.safetensors")
    return run, folder / "m.safetensors"


def exported_head(folder: Path, data: Path, p: Any) -> str | None:
    """The head of b's last model, exported from a run, once it predicts these probabilities of all its rows."""
    card = export_model(folder / "run", "b", "last", folder / "b.safetensors")
    _, _, given = read_csv(predict_file(folder / "b.safetensors", data))
    assert np.allclose(given, p, atol=1e-5)
    assert card.metrics["test.accuracy"] == np.mean(p.argmax(1) == rows_of(data)[1])
    return card.model.head
