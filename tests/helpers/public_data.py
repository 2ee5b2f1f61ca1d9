"""Where the public data sets lie: SILOFL_DATA, or beside the repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from failing import fails

from partitions.datasets.registry import load_dataset
from partitions.splits import Dataset

DATA = Path(os.environ.get("SILOFL_DATA") or Path(__file__).parents[3] / "shared/data")


def needs(name: str) -> Any:
    """Skips a test where this file or folder is not among them."""
    return pytest.mark.skipif(
        not (DATA / name).exists(), reason=f"{name} is not in SILOFL_DATA"
    )


def load(name: str, folder: Path) -> Dataset:
    """A data set that lies in this folder."""
    return load_dataset(name, str(folder))


def cannot_load(name: str, folder: Path, match: str | None) -> str:
    """The line in which the reading of a data set ends, in which this regular expression is found."""
    return fails(ValueError, match, load_dataset, name, str(folder))
