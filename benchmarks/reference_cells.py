"""Cells of the reference table (``reference.py``): their settings, the search of each, their files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import optuna

from benchmarks.common import whole_run
from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.common.files import append, hold_lock
from partitions.common.names import silo_name
from partitions.common.settings import keys_of
from partitions.datasets.registry import load_dataset
from server.report.methods import alone, exchanges
from server.results.summary import run_summary, values_by_round
from server.tuning.search import seed_of
from server.tuning.space import Space, read_space
from strategies import strategies
from strategies.base.run_settings import parse_settings


@dataclass(frozen=True)
class Form:
    """Size of the table. ``groups``: in how many parts the hospitals are left out in turn, 0: each by itself."""

    trials: int
    rounds: int
    seeds: int
    groups: int


FORMS = {"smoke": Form(2, 2, 2, 2), "short": Form(3, 10, 5, 3), "long": Form(16, 40, 10, 0)}
COMMON: dict[str, Any] = {
    "partition": "natural",
    "evaluate-every": 2,
    "robust": "none",
    "weight-cap": 0.0,
    "threads": 1,
    "device": "cpu",
}
NETWORK: dict[str, Any] = {"model": "mlp", "mlp.hidden": "16", "batch-size": 32}
TREES: dict[str, Any] = {"model": "trees", "local-epochs": 5}
BOOSTED = "-trees"  # the end of a row's name, of a method that trains both
LEARNING_RATE = "learning-rate=log(0.01,0.5)"
SETS: dict[str, dict[str, Any]] = {
    "azpro": {"silos": 16},
    "azpro-grades": {"silos": 16},
    "opt-bleeding": {"silos": 4},
    "heart-uci": {"silos": 4},
    "rand-health": {"silos": 6},
    "rand-visits": {"silos": 6},
    "aids2": {"silos": 4},
    "bmt": {"silos": 4},
    "immunisation": {"silos": 38},
    "medpar": {"silos": 30},
    # Its columns are 0 and 1, so that they need no statistics of the records
    "azpro-grades-dp": {
        "dataset": "azpro-grades",
        "silos": 16,
        "dp": True,
        "dp.noise-multiplier": 2.0,
        "normalization": "none",
    },
}
# In place of a set's privacy, for what trains alone: nothing leaves, so its own statistics and no noise
ALONE = {"normalization": "silo"}
NOTHING_TO_GAIN = "medpar"
# What a reader asks for first, so that a table which is not finished answers it.
FIRST = (
    *("local", "fedavg", "pooled", "ditto", "fedavg-ft", "fedxgb", "local-trees"),
    *("fedprox", "apfl", "fedper", "scaffold", "fedadam"),
)


class Cell(NamedTuple):
    """One place of the table; ``held``: the hospitals that are left out, with commas."""

    dataset: str
    method: str
    seed: int
    held: str

    def lines(self, every: Sequence[dict[str, Any]], form: Form) -> list[dict[str, Any]]:
        """Return the cell's lines among those of its file; trials beyond the form's do not count."""
        return [
            line
            for line in every
            if (line["seed"], line["held"]) == (self.seed, self.held)
            and line["trial"] < form.trials
        ]

    def settings(self, form: Form) -> dict[str, Any]:
        values: dict[str, Any] = {"dataset": self.dataset, **COMMON, **SETS[self.dataset]}
        strategy = strategy_of(self.method)
        if values.get("dp") and strategy == alone():
            values = {key: v for key, v in values.items() if not key.startswith("dp")} | ALONE
        if (
            self.method.endswith(BOOSTED)
            or strategies()[strategy].info.training.trees == "only"
        ):
            room = form.rounds * TREES["local-epochs"] * (values["silos"] + 1)
            values |= {**TREES, "trees.capacity": room}
        else:
            values |= NETWORK
        values |= {"rounds": form.rounds, "strategy": strategy, "seed": self.seed}
        return values | ({"hold-out": self.held} if self.held else {})


def ordered_methods() -> list[str]:
    """Return the rows: all methods that train, and boosted trees with those that have them, too; FIRST's first."""
    known = {name: method.info for name, method in sorted(strategies().items())}
    rows = [name for name, info in known.items() if info.trains]
    rows += [name + BOOSTED for name, info in known.items() if info.training.trees == "also"]
    return [*FIRST, *(name for name in rows if name not in FIRST)]


def strategy_of(method: str) -> str:
    return method.removesuffix(BOOSTED)


def cells_of(dataset: str, method: str, form: Form) -> tuple[list[Cell], list[Cell]]:
    """Return a method's cells with all hospitals, by seed, and those without some, of the first seed."""
    every = [Cell(dataset, method, seed, "") for seed in range(form.seeds)]
    strategy = strategy_of(method)
    newcomers = exchanges(strategy) and strategies()[strategy].info.newcomer
    if not newcomers or SETS[dataset].get("dp"):
        return every, []
    silos = [silo_name(i) for i in range(SETS[dataset]["silos"])]
    groups = min(form.groups or len(silos), len(silos))
    parts = (",".join(silos[i::groups]) for i in range(groups))
    return every, [Cell(dataset, method, 0, held) for held in parts]


def space_of(method: str) -> Space:
    """Return what the search varies: the learning rate, and the method's own weights and rates.

    These are its numbers without an upper limit and above 0: ten times less, within their range, to ten times more
    than by default.
    """
    entries, strategy = [LEARNING_RATE], strategy_of(method)
    for key, field in keys_of(strategies()[strategy].Settings, strategy).items():
        value = field.default
        limited = field.metadata.keys() & {"maximum", "below"}
        if isinstance(value, float) and value > 0 and not limited:
            lowest = max(value / 10, field.metadata.get("minimum", 0.0))
            entries.append(f"{key}=log({lowest!r},{value * 10!r})")
    return read_space(entries, [strategy])


def draw_settings(cell: Cell, trial: int) -> dict[str, Any]:
    """Return the settings of a trial, which are those of `silofl tune` with this seed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    number = seed_of(str(cell.seed), cell.method, trial)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))
    return dict(study.ask(dict(space_of(cell.method).distributions)).params)


def execute_trial(cell: Cell, form: Form, trial: int) -> dict[str, Any]:
    """Execute one run, and return its line: validation score and summary, or why there is none."""
    values, started = draw_settings(cell, trial), time.process_time()
    line = {"seed": cell.seed, "held": cell.held, "trial": trial, "values": values}
    try:
        loop = whole_run({**cell.settings(form), **values})
    except (UserError, DataError, RunFailedError) as error:
        return {**line, "validation": None, "why": " ".join(str(error).split())}
    finished = loop.finish_run()
    entry = run_summary(loop.history, finished)
    for silo in entry["per_silo"].values():
        silo["evidence"] = {}  # lists of bins and sets, which the table does not show
    rows, score = loop.history.rows, str(entry["score"])
    validated = values_by_round(rows, "val", str(entry["reports"]), score)
    best = max((statistics.fmean(of.values()) for of in validated.values() if of), default=None)
    entry |= {"strategy": cell.method, "hold_out": finished.hold_out}
    entry["seconds"]["total"] = time.process_time() - started
    return {**line, "validation": best, "entry": entry}


def best_of(lines: Sequence[dict[str, Any]], cell: Cell, form: Form) -> dict[str, Any] | None:
    """Return the line of a cell's best trial on validation data; None where the cell is not finished, or has none."""
    trials = cell.lines(lines, form)
    scored = [line for line in trials if line["validation"] is not None]
    if len(trials) < form.trials or not scored:
        return None
    return max(scored, key=lambda line: (line["validation"], -line["trial"]))


def why_refused(dataset: str, method: str, form: Form) -> str:
    """Return why the method does not take these settings; empty: it does."""
    try:
        parse_settings(Cell(dataset, method, 0, "").settings(form))
    except UserError as error:
        return str(error)
    return ""


def file_of(folder: Path, dataset: str, method: str) -> Path:
    return folder / "cells" / dataset / f"{method}.jsonl"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return a file's lines without one that an interruption cut off."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class TableWorker:
    """What this process does: the cells that are not finished, file by file, at most ``runs`` runs."""

    def __init__(self, folder: Path, form: Form, runs: int) -> None:
        self.folder, self.form, self.left = folder, form, runs

    def work(self, datasets: Sequence[str], methods: Sequence[str]) -> None:
        """Execute the cells: FIRST's before others, and what trains with all hospitals before what does not."""
        ready = [name for name in datasets if self.has_data(name)]
        first = [name for name in methods if name in FIRST]
        rest = [name for name in methods if name not in FIRST]
        for part, unseen in itertools.product((first, rest), (False, True)):
            for method, dataset in itertools.product(part, ready):
                self.fill(dataset, method, cells_of(dataset, method, self.form)[unseen])

    def has_data(self, dataset: str) -> bool:
        try:
            load_dataset(SETS[dataset].get("dataset", dataset), "")
        except DataError as error:
            print(f"{dataset} is left out: {error}", file=sys.stderr)
            return False
        return True

    def fill(self, dataset: str, method: str, cells: Sequence[Cell]) -> None:
        """Execute what is missing of these cells, unless another process has their file, or the first has no score."""
        if not self.left or not cells or why_refused(dataset, method, self.form):
            return
        file = file_of(self.folder, dataset, method)
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(hold_lock(file, f"{file} is another process's"))
            except DataError:
                return
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
            lines = read_lines(file)
            for cell in cells:
                for line in self.missing(cell, lines):
                    append(file, json.dumps(line) + "\n")
                    lines.append(line)
                if best_of(lines, cell, self.form) is None:
                    return

    def missing(self, cell: Cell, lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the lines of the cell's trials that have none."""
        done = {line["trial"] for line in cell.lines(lines, self.form)}
        for trial in range(self.form.trials):
            if trial not in done and self.left:
                self.left -= 1
                yield execute_trial(cell, self.form, trial)
