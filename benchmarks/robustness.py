"""What one or three of twelve silos that lie do to the others, with and without robust aggregation; what clip bounds.

``python -m benchmarks.robustness attacks`` (a quarter of an hour) and ``ratios`` (as long). *attacks*: digits over 12
silos, ``dirichlet.beta = 1``, ``mlp``, 10 rounds; the number is the mean test accuracy of the honest silos in percent,
of the snapshot that the method evaluates, in the closing exchange where that is the received model, else in the last
round. The attackers are the first silos by name; they change what their silo sends, or the labels it trains on:

    sign-flip   -v of every vector        noise       v + a normal vector of 10 times v's length
    x10, x100, x900                       label-flip  label y becomes C - 1 - y
    lied n      the card says n = 10⁶, the labels are flipped
    backdoor    every sample comes a second time with its brightest corner, as class 0, and the step is sent tenfold;
                the number behind the stroke is the share of honest silos' other samples that the corner turns into 0

*ratios*: over honest runs the largest step of a silo, in the measure of ``robust-clip`` (strategies/base/robust.py).
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from flwr.app import Context, Message, MessageType
from torch import Tensor

from benchmarks.common import table
from client.app import app as client_app
from models.initial import flat_model
from models.training import Samples, predict
from partitions.names import silo_name
from partitions.simulated import part_of
from server.run.engine import InProcessGrid, flower_identity
from server.run.loop import RoundLoop
from strategies import strategies
from strategies.base import bounded
from strategies.base.payload import array_record, tensor_of
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.settings import UserError
from strategies.base.silo import GLOBAL

SILOS, CLASSES, TARGET = 12, 10, 0
RUN: dict[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "dataset": "digits",
    "partition": "dirichlet",
    "dirichlet.beta": 1.0,
    "silos": SILOS,
    "model": "mlp",
    "mlp.hidden": "32",
    "rounds": 10,
    "batch-size": 10,
    "local-epochs": 2,
    "evaluate-every": 10,
    "min-metric-samples": 1,
    "apple.common-init": True,
    "apple.dr-learning-rate": 0.01,
}


# ---------------------------------------------------------------------------------------------------------------------
# Attackers


def noise(vector: Tensor) -> Tensor:
    random = torch.randn(vector.shape, generator=torch.Generator().manual_seed(vector.numel()))
    return vector.add(random, alpha=float(10 * vector.norm() / random.norm()))


SENT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sign-flip": lambda v: -v,
    "x10": lambda v: 10 * v,
    "x100": lambda v: 100 * v,
    "x900": lambda v: 900 * v,
    "noise": noise,
}
ATTACKS = (*SENT, "label-flip", "lied n", "backdoor")


def cornered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The pictures (n, h, w, c) with the first 3 x 3 points as bright as can be."""
    marked = x.copy()
    marked[:, :3, :3] = np.iinfo(x.dtype).max if x.dtype == np.uint8 else x.max()
    return marked


def poisoned(attack: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """What an attacker trains on."""
    if attack in ("label-flip", "lied n"):
        return x, CLASSES - 1 - y
    if attack == "backdoor":
        return np.concatenate([x, cornered(x)]), np.concatenate([y, np.full_like(y, TARGET)])
    return x, y


@dataclass
class Federation:
    """Twelve silos in this process, of which the first ``liars`` do what ``attack`` says."""

    settings: RunSettings
    attack: str
    liars: int
    folder: Path

    def __post_init__(self) -> None:
        self.names = [silo_name(i) for i in range(SILOS)]
        self.parts = [part_of(self.settings.division, i) for i in range(SILOS)]

    def run(self) -> RoundLoop:
        grid = InProcessGrid(self.app, SILOS, self.settings.flat())  # type: ignore[arg-type]
        for i, context in enumerate(grid.contexts.values()):
            context.node_config = {"name": self.names[i], "data": str(self.file(i)), "policy": "public"}
        self.loop = RoundLoop(grid, self.settings)
        with flower_identity():
            self.strategy = self.loop.run()
        self.contexts = grid.contexts
        return self.loop

    def file(self, i: int) -> Path:
        part, file = self.parts[i], self.folder / f"{self.names[i]}-{self.attack}-{i < self.liars}.npz"
        if not file.exists():
            arrays: dict[str, Any] = {}
            for split in ("train", "val", "test"):
                x, y = getattr(part, split).x, getattr(part, split).y
                if split == "train" and i < self.liars:
                    x, y = poisoned(self.attack, x, y)
                arrays |= {f"x_{split}": x, f"y_{split}": y}
            np.savez(file, classes=np.array(CLASSES), **arrays)
        return file

    def app(self, message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if context.node_config["name"] not in self.names[: self.liars] or reply.has_error():
            return reply
        if message.metadata.message_type == MessageType.QUERY and self.attack == "lied n":
            next(iter(reply.content.config_records.values()))["n_train"] = 10**6
        if message.metadata.message_type == MessageType.TRAIN:
            for key, record in list(reply.content.array_records.items()):
                vector, sent = tensor_of(record["vector"]), message.content.array_records.get(f"model.{GLOBAL}")
                if self.attack in SENT:
                    vector = SENT[self.attack](vector)
                elif self.attack == "backdoor" and sent is not None:
                    start = tensor_of(sent["vector"])
                    vector = start + 10 * (vector - start) if len(start) == len(vector) else vector
                reply.content[key] = array_record({"vector": vector})
        return reply

    def honest(self) -> float:
        """Mean test accuracy of the honest silos, in percent."""
        reports = self.strategy.reports
        last = self.settings.common.rounds + (reports == "received")
        found = {
            r.silo: r.value
            for r in self.loop.history.rows
            if (r.snapshot, r.split, r.metric) == (reports, "test", "accuracy") and r.round <= last
        }
        values = [found.get(name, 0.0) for name in self.names[self.liars :]]
        return 100 * float(np.mean(np.nan_to_num(values)))

    def turned(self) -> float:
        """The share of honest silos' test samples of other classes that the corner turns into the target, in percent.

        By the model that the method evaluates, as far as there is one for all; else by each silo's personal one.
        """
        name, options = self.settings.model_for((1, 8, 8))
        model = flat_model(name, (1, 8, 8), CLASSES, options, "cpu", None)
        shared = self.strategy.state.arrays.get(GLOBAL)
        one = shared is not None and len(shared) == model.layout.size and self.strategy.reports == "received"
        hits = total = 0
        for part, context in list(zip(self.parts, self.contexts.values(), strict=True))[self.liars :]:
            arrays: Any = context.state["arrays"]
            model.load(shared if one and shared is not None else tensor_of(arrays["personal"]))
            others = part.test.y != TARGET
            found = predict(model, Samples(cornered(part.test.x[others]), part.test.y[others])).argmax(1)
            hits, total = hits + int((found == TARGET).sum()), total + len(found)
        return 100 * hits / max(total, 1)


def cell(strategy: str, attack: str, liars: int, folder: Path, **changes: Any) -> str:
    """One cell of the table: the accuracy, and for the backdoor how often it opens."""
    given = {k.replace("_", "-"): v for k, v in changes.items()}
    federation = Federation(parse_settings({**RUN, "strategy": strategy, **given}), attack, liars, folder)
    try:
        federation.run()
    except RuntimeError:  # no usable update any more
        return "stops"
    found = f"{federation.honest():.0f}"
    return f"{found} / {federation.turned():.0f}" if attack == "backdoor" else found


METHODS: Mapping[str, Sequence[str]] = {  # with the rules that are tried beside none and clip
    "fedavg": ("geometric-median", "multi-krum"),
    "apple": (),
    "scaffold": ("geometric-median",),
    "heurfedamp": (),
}


def attacks(methods: Sequence[str]) -> None:
    """The table, a row per method, rule and number of attackers."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in methods or METHODS:
            for liars in (0, 1, 3):
                for rule in ("none", "clip", *METHODS.get(method, ())):
                    tried = ("no attack",) if not liars else ATTACKS
                    options = {"robust": rule, "robust_attackers": max(liars, 1)}
                    cells = [cell(method, attack, liars, Path(folder), **options) for attack in tried]
                    rows.append([method, str(liars), rule, *cells])
                    print("| " + " | ".join(rows[-1]) + " |", file=sys.stderr, flush=True)
    attacked, header = [row for row in rows if row[1] != "0"], ["method", "attackers", "robust"]
    free = {(row[0], row[2]): row[3] for row in rows if row[1] == "0"}
    print(table([[*row[:3], free[row[0], row[2]], *row[3:]] for row in attacked], [*header, "no attack", *ATTACKS]))


# ---------------------------------------------------------------------------------------------------------------------
# What honest silos reach


PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "digits, dirichlet 0.5": {"dirichlet.beta": 0.5},
    "digits, dirichlet 0.1": {"dirichlet.beta": 0.1},
    "digits, pathological": {"partition": "pathological"},
    "heart-disease": {"dataset": "heart-disease", "partition": "natural", "silos": 4},
}


def ratios(methods: Sequence[str]) -> None:
    """Per method and partition the largest step of an honest silo over its measure, over 20 rounds and all vectors."""
    largest: list[float] = []
    found = bounded.beyond

    def beyond(norms: Any, measures: Any, factor: float) -> dict[str, dict[str, float]]:
        ratios = found(norms, measures, 1e-9)
        largest.extend(ratio for of in ratios.values() for ratio in of.values())
        return {}

    rows = []
    with mock.patch.object(bounded, "beyond", beyond):
        for method in methods or sorted(strategies()):
            cells = []
            for changes in PARTITIONS.values():
                largest.clear()
                try:
                    settings = parse_settings({**RUN, "rounds": 20, "evaluate-every": 0, **changes, "strategy": method})
                    grid = InProcessGrid(client_app, settings.common.silos, settings.flat())
                    with flower_identity():
                        RoundLoop(grid, settings).run()
                except UserError:
                    cells.append("")
                    continue
                cells.append(f"{max(largest, default=0.0):.2f}")
            if any(float(ratio or 0) for ratio in cells):
                rows.append([method, *cells])
                print("| " + " | ".join(rows[-1]) + " |", file=sys.stderr, flush=True)
    print(table(rows, ["method", *PARTITIONS]))


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    {"attacks": attacks, "ratios": ratios}[sys.argv[1]](sys.argv[2:])
