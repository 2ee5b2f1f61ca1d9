"""A metric oracle: a server that reads test patients from evaluations of models of its own making."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Context, Message, RecordDict
from tiny import settings_of, write_silo

from client.app import app
from strategies.base.state import GLOBAL
from strategies.base.transport.payload import Model, Payload, Wire, encode

Numbers = npt.NDArray[np.float64]
PATIENTS, COLUMNS, TILT, BITS = 10, 3, 0.01, 22


class Oracle:
    """A server that evaluates models of its own making at one hospital, and never trains there."""

    def __init__(self, folder: Path, policy: str) -> None:
        rng = np.random.default_rng(3)
        self.x = rng.normal(size=(PATIENTS, COLUMNS)).astype(np.float32)
        self.x[:, 0] = rng.permutation(np.linspace(-3, 3, PATIENTS))  # such as ages
        self.y = np.arange(PATIENTS) % 2
        file = write_silo(folder / "own.npz", self.x.astype(np.float64), self.y.tolist())
        node: dict[str, Any] = {
            "name": "own",
            "data": str(file),
            "policy": policy,
            "state-dir": str(folder / "state"),
        }
        settings = settings_of({"own": file}, batch_size=8, learning_rate=0.01)
        self.context = Context(1, 1, node, RecordDict(), settings.flat())
        self.asked, self.refusal = 0, ""

    def count(self, label: int, direction: Numbers, threshold: float) -> int:
        """How many patients of this class have direction . x > threshold; an empty third class takes the others."""
        weights, bias = np.zeros((3, COLUMNS)), np.array([-1e9, -1e9, 1e6 * threshold])
        weights[2], bias[label] = -1e6 * direction, 0
        vector = torch.tensor(np.concatenate([weights.ravel(), bias]), dtype=torch.float32)
        config = {"round": 1, "classes": 3, "personal": False, "min_metric_samples": 1}
        message = Message(
            encode(Payload({GLOBAL: Model(vector)}), config, Wire()), 1, "evaluate"
        )
        reply = app(message, self.context)
        if reply.has_error():
            raise PermissionError(reply.error.reason)
        self.asked += 1
        found: Any = reply.content["metrics"]["received.test.accuracy"]
        accuracy: float = found
        return round(accuracy * PATIENTS)

    def values(self, label: int, direction: Numbers) -> list[float]:
        """direction . x of each patient of this class, in order, by bisection."""
        found: list[float] = []
        total = self.count(label, direction, -8)
        for rank in range(total, 0, -1):
            low, high = -8.0, 8.0
            for _ in range(BITS):
                middle = (low + high) / 2
                low, high = (
                    (middle, high)
                    if self.count(label, direction, middle) >= rank
                    else (low, middle)
                )
            found.append(low)
        return found

    def records(self) -> Sequence[Numbers]:
        """All columns of every patient: the first, and the others by how far a small tilt moves it."""
        found: list[Numbers] = []
        try:
            for label in (0, 1):
                first = np.array(self.values(label, np.eye(COLUMNS)[0]))
                columns = [first]
                for j in range(1, COLUMNS):
                    tilted = np.array(
                        self.values(label, np.eye(COLUMNS)[0] + TILT * np.eye(COLUMNS)[j])
                    )
                    columns.append((tilted - first) / TILT)
                found += list(np.array(columns).T)
        except PermissionError as error:
            self.refusal = str(error)
        return found

    def read(self) -> int:
        """How many of the patients it has read, to a hundredth of a standard deviation."""
        return sum(
            bool((np.abs(self.x - guess).max(1) < 0.01).any()) for guess in self.records()
        )
