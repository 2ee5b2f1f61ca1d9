"""What ``silofl predict`` writes, read."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np


def read_csv(text: str) -> tuple[list[int], list[int], Any]:
    """index, label and the probabilities (n, classes) of a prediction."""
    header, *rows = csv.reader(io.StringIO(text))
    assert header == ["index", "label", *(f"p_{c}" for c in range(len(header) - 2))]
    return ([int(r[0]) for r in rows], [int(r[1]) for r in rows], np.array([[float(v) for v in r[2:]] for r in rows]))
