"""Hospitals' files of a table whose columns and classes have names, in an order of each file's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Files

COLUMNS, LABELS = ("age", "sex", "chol"), ("well", "ill", "dead")
DECLARED = json.dumps(
    {"schema": {"features": COLUMNS, "labels": LABELS}}, separators=(",", ":")
)


def save(
    path: Path, columns: Sequence[str] = COLUMNS, labels: Sequence[str] = LABELS, **names: Any
) -> Path:
    """A hospital's file, whose samples depend on its name alone: its columns and labels in the order of these names.

    ``names``: what the file calls them, where that is not so; None: it names none.
    """
    rng = np.random.default_rng(sum(map(ord, path.stem)))
    arrays: dict[str, Any] = {}
    for split, n in (("train", 14), ("val", 6), ("test", 6)):
        x = rng.normal(size=(n, 3)).astype(np.float32) * np.array([10, 1, 300], np.float32)
        y = (x[:, 0] > 0).astype(np.int64) + (x[:, 2] > 200)
        arrays[f"x_{split}"] = np.ascontiguousarray(
            x[:, [COLUMNS.index(name) for name in columns]]
        )
        arrays[f"y_{split}"] = np.array([labels.index(LABELS[k]) for k in y])
    arrays |= {
        "feature_names": np.array(columns),
        "label_names": np.array(labels),
        "classes": np.array(len(labels)),
    }
    arrays |= {key: np.array(value) for key, value in names.items() if value is not None}
    np.savez(
        path,
        **{
            key: value
            for key, value in arrays.items()
            if key not in names or names[key] is not None
        },
    )
    return path


def hospitals(folder: Path, **changes: dict[str, Any]) -> Files:
    folder.mkdir(exist_ok=True)
    return {
        name: save(folder / f"{name}.npz", **changes.get(name, {})) for name in ("a", "b", "c")
    }


PERMUTED = {"columns": ("chol", "age", "sex"), "labels": ("dead", "well", "ill")}
