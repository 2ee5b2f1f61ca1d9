"""Cells of the reference table (``reference.py``): the design, the settings and the search of each, their files.

A **cell** is one cohort, network, method, seed and fold, with all training patients or at most so many. Its settings
come from a search of its own: trial 0 has the method's defaults, the others are drawn from what its class declares
(``search``). The trial and the round with the lowest mean loss on the hospitals' validation data count. So nothing of a
test part is in a choice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import optuna

from benchmarks.common import whole_run
from models.networks.trees import check_task
from models.tasks import task_of
from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.common.files import append, hold_lock
from partitions.datasets.registry import DATASETS, load_dataset
from server.results.summary import values_by_round
from server.tuning.search import ETA, budgets, seed_of
from server.tuning.space import Space, read_space
from strategies import strategies
from strategies.base.run_settings import defaults, parse_settings


@dataclass(frozen=True)
class Form:
    """Size of the table."""

    trials: int
    rounds: int
    seeds: int
    folds: int

    @property
    def repeats(self) -> list[tuple[int, int]]:
        """Seed and fold of each repeat."""
        return [(seed, fold) for seed in range(self.seeds) for fold in range(self.folds)]


FORMS = {"smoke": Form(3, 4, 1, 2), "short": Form(3, 20, 1, 5), "long": Form(10, 40, 2, 5)}
COMMON: dict[str, Any] = {
    "partition": "natural",
    "evaluate-every": 2,
    "robust": "none",
    "weight-cap": 0.0,
    "threads": 1,
    "device": "cpu",
}
HIDDEN, LINEAR, TREES = "hidden-16", "linear", "trees"
NETWORKS: dict[str, dict[str, Any]] = {
    HIDDEN: {"model": "mlp", "mlp.hidden": "16", "batch-size": 32},
    LINEAR: {"model": "mlp", "mlp.hidden": "", "batch-size": 32},
    TREES: {"model": "trees", "local-epochs": 5},
}
BOOSTED = "-trees"  # the end of a row's name, of a method that trains both
RATES = (0.01, 0.5)
# What they are multiplied by, where with more a hospital's training diverges
STABLE = {("rand-visits", LINEAR): 0.01}
SETS = {
    "azpro": 16,
    "rand-health": 6,
    "tcga-brca": 6,
    "immunisation": 38,
    "rand-visits": 6,
    "covid-testing": 10,
    "medpar": 30,
    "azpro-grades": 16,
    "opt-bleeding": 4,
    "heart-uci": 4,
    "aids2": 4,
    "bmt": 4,
}
COHORTS = [*SETS][:6]
TWICE = "rand-health"  # its persons are those of rand-visits
CONTROL = "medpar"  # deaths of patients whose features say little: there is nothing to gain


class Contrast(NamedTuple):
    """A hypothesis that was named before any run: the method has a lower loss than the baseline."""

    method: str
    baseline: str
    family: str  # the hypotheses of a family share the 5 % (Holm)

    def cells(self, dataset: str, network: str) -> CellGroup:
        """Return the method's cells; trees have no network."""
        return CellGroup(dataset, network_of(self.method, network), 0, self.method)


CONTRASTS = (
    Contrast("fedavg", "local", "federating"),
    *(
        Contrast(method, "fedavg", "personalising")
        for method in ("fedavg-ft", "ditto", "fedala", "apple")
    ),
    Contrast("fedxgb", "local-trees", "trees"),
)
NAMED = [*dict.fromkeys(name for c in CONTRASTS for name in (c.baseline, c.method))]
FEW = (30, 60, 120)  # most training patients of a hospital, with validation
CURVES = ("azpro", "rand-health", "rand-visits", "covid-testing")


class CellGroup(NamedTuple):
    """The cells of all seeds and folds of one method: a file. ``most``: training patients of a hospital; 0: all."""

    dataset: str
    network: str
    most: int
    method: str

    def file(self, folder: Path) -> Path:
        few = f"-{self.most}" if self.most else ""
        return folder / "cells" / self.dataset / f"{self.network}{few}" / f"{self.method}.jsonl"

    @property
    def strategy(self) -> str:
        return self.method.removesuffix(BOOSTED)

    def settings(self, form: Form, seed: int, fold: int, rounds: int) -> dict[str, Any]:
        network, silos = NETWORKS[self.network], SETS[self.dataset]
        values = {"dataset": self.dataset, "silos": silos, **COMMON, **network}
        values |= {"strategy": self.strategy, "seed": seed, "rounds": rounds}
        values |= {"natural.folds": form.folds, "natural.fold": fold, "natural.most": self.most}
        if self.network == TREES:
            values["trees.capacity"] = rounds * network["local-epochs"] * (silos + 1)
        return values

    def why_refused(self, form: Form) -> str:
        """Return why the method does not take these settings; empty: it does."""
        try:
            run = parse_settings(self.settings(form, 0, 0, form.rounds))
            data = DATASETS[self.dataset]
            check_task(run.common.model, task_of(data.task), data.classes)
        except UserError as error:
            return str(error)
        return ""

    @property
    def times(self) -> float:
        """What the method's learning rates are multiplied by."""
        times = SETS[self.dataset] if strategies()[self.strategy].rate_times_silos else 1
        return times * STABLE.get((self.dataset, self.network), 1)

    @property
    def space(self) -> Space:
        """What the search draws."""
        ranges = {"learning-rate": RATES}
        for key, *ends in strategies()[self.strategy].search:
            common = key in ranges
            ranges[key if common else f"{self.strategy}.{key}"] = (ends[0], ends[1])
        low, high = ranges["learning-rate"]
        ranges["learning-rate"] = low * self.times, high * self.times
        entries = [f"{key}=log({low!r},{high!r})" for key, (low, high) in ranges.items()]
        return read_space(entries, [self.strategy])

    def values(self, seed: int, fold: int, trial: int) -> dict[str, Any]:
        """Return the settings of a trial: the defaults, or those that `silofl tune` draws with this seed."""
        drawn = dict(self.space.distributions)
        if not trial:
            values: dict[str, Any] = {key: defaults()[key] for key in drawn}
            return values | {"learning-rate": values["learning-rate"] * self.times}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        number = seed_of(f"{seed}-{fold}", f"{self.dataset}-{self.most}", self.method, trial)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))
        return dict(study.ask(drawn).params)

    @property
    def is_explored(self) -> bool:
        return self.method not in NAMED or self.dataset not in (*COHORTS, CONTROL)

    def rungs(self, form: Form) -> list[int]:
        """Return the rounds of each rung of the search: one, or those of successive halving."""
        return budgets(form.trials, form.rounds) if self.is_explored else [form.rounds]


def ordered_methods() -> list[str]:
    """Return all methods that train, and boosted trees with those that have them, too; the named ones first."""
    known = {name: method.info for name, method in sorted(strategies().items())}
    rows = [name for name, info in known.items() if info.trains]
    rows += [name + BOOSTED for name, info in known.items() if info.training.trees == "also"]
    return [*NAMED, *(name for name in rows if name not in NAMED)]


def network_of(method: str, network: str = HIDDEN) -> str:
    only = strategies()[method.removesuffix(BOOSTED)].info.training.trees == "only"
    return TREES if only or method.endswith(BOOSTED) else network


def named_cells(network: str) -> list[CellGroup]:
    """Return the cells of the hypotheses with this network, and of trees."""
    every = ((name, method) for name in (*COHORTS, CONTROL) for method in NAMED)
    return [CellGroup(name, network_of(method, network), 0, method) for name, method in every]


def curve_cells() -> list[CellGroup]:
    """Return the cells with few training patients."""
    few = [c._replace(most=n) for c in named_cells(HIDDEN) for n in FEW if c.network == HIDDEN]
    return [c for c in few if c.dataset in CURVES]


def all_cells() -> list[CellGroup]:
    """Return the whole table in the order in which it is measured: what was named first, then curves, then the rest."""
    rest = [CellGroup(name, network_of(m), 0, m) for name in SETS for m in ordered_methods()]
    every = (*named_cells(HIDDEN), *curve_cells(), *named_cells(LINEAR), *rest)
    return [*dict.fromkeys(every)]


def execute_trial(
    cells: CellGroup, form: Form, repeat: tuple[int, int], trial: int, rounds: int
) -> dict[str, Any]:
    """Execute one run, and return its line: the round, and each hospital's patients, loss and score; or why none."""
    values = cells.values(*repeat, trial)
    line: dict[str, Any] = {"seed": repeat[0], "fold": repeat[1], "trial": trial}
    line |= {"rounds": rounds, "settings": values, "validation": None}
    try:
        loop = whole_run({**cells.settings(form, *repeat, rounds), **values})
        run = loop.finish_run()
    except (UserError, DataError, RunFailedError) as error:
        return {**line, "why": " ".join(str(error).split())}
    rows, score = loop.history.rows, run.task.score
    reports = strategies()[cells.strategy].info.reports

    def by_round(split: str, metric: str) -> dict[int, dict[str, float]]:
        # By its own rounds: without an event there is a loss (0), and no C-index
        return values_by_round(rows, split, reports, metric)

    # A hospital that is left out from the first round on, for its training diverges, has no loss
    validating = {name for name, of in run.silos.items() if of["n_val"]}
    validated = {
        n: statistics.fmean(losses.values())
        for n, losses in by_round("val", "loss").items()
        if losses.keys() >= validating
    }
    finite = {n: mean for n, mean in validated.items() if math.isfinite(mean)}
    if not finite:
        return {**line, "why": "no finite loss on the validation data of all hospitals"}
    chosen = min(finite, key=lambda n: finite[n])
    losses, scores = (by_round("test", metric).get(chosen, {}) for metric in ("loss", score))
    silos = {
        name: [of["n_test"], losses.get(name), scores.get(name)]
        for name, of in sorted(run.silos.items())
    }
    line |= {"validation": finite[chosen], "round": chosen}
    return {**line, "bytes": sum(run.total_bytes.values()), "silos": silos}


def best_of(
    lines: Sequence[dict[str, Any]], form: Form, repeat: tuple[int, int]
) -> dict[str, Any] | None:
    """Return the line of a cell's best trial with all rounds; None while there is none."""
    scored = [
        line
        for line in lines
        if (line["seed"], line["fold"], line["rounds"]) == (*repeat, form.rounds)
        and line["trial"] < form.trials
        and line["validation"] is not None
    ]
    return min(scored, key=lambda line: (line["validation"], line["trial"]), default=None)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return a file's lines without one that an interruption cut off."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@contextlib.contextmanager
def hold_cells(file: Path) -> Iterator[None]:
    """Hold a file of cells, without a line that was cut off. Raises DataError while another process has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(file, f"{file} is another process's"):
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        yield


def missing_trials(
    cells: CellGroup, lines: Sequence[dict[str, Any]], form: Form, repeat: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return the trials of a cell that are to be run next, with their rounds; none: the cell is finished.

    Of a published cell there is only the chosen trial.
    """
    mine = [line for line in lines if (line["seed"], line["fold"]) == repeat]
    going = [] if any("published" in line for line in mine) else [*range(form.trials)]
    for rounds in cells.rungs(form):
        ended = {line["trial"]: line["validation"] for line in mine if line["rounds"] == rounds}
        if missing := [(trial, rounds) for trial in going if trial not in ended]:
            return missing
        scored = sorted((ended[t], t) for t in going if ended[t] is not None)
        going = [trial for _, trial in scored[: max(1, len(going) // ETA)]]
    return []


def finished(
    cells: CellGroup, lines: Sequence[dict[str, Any]], form: Form
) -> list[dict[str, Any]] | None:
    """Return the best line of each repeat; None while a cell is not finished, or where one has no score."""
    if any(missing_trials(cells, lines, form, repeat) for repeat in form.repeats):
        return None
    best = [best_of(lines, form, repeat) for repeat in form.repeats]
    return None if None in best else [line for line in best if line]


def execute_missing(folder: Path, form: Form, every: Iterable[CellGroup]) -> Iterator[None]:
    """Execute the cells that are not finished, in order, file by file; yield after each run.

    Left out: a file that another process has, and the rest of a file after a cell without a score.
    """
    for cells in every:
        if cells.why_refused(form) or not has_data(cells.dataset):
            continue
        file = cells.file(folder)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(hold_cells(file))
            except DataError:  # and of no error while it is held
                continue
            lines = read_lines(file)
            for repeat in form.repeats:
                while missing := missing_trials(cells, lines, form, repeat):
                    lines.append(execute_trial(cells, form, repeat, *missing[0]))
                    append(file, json.dumps(lines[-1]) + "\n")
                    yield
                if best_of(lines, form, repeat) is None:
                    break


@cache
def has_data(dataset: str) -> bool:
    try:
        load_dataset(dataset, "")
    except (DataError, UserError) as error:
        print(f"{dataset} is left out: {error}", file=sys.stderr)
        return False
    return True
