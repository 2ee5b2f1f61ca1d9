"""Evaluate each model at every silo, one exchange each, and write ``matrix.csv``.

Metrics of each silo's reported model at that silo, from a finished run: the diagonal of the matrix.

A silo's own model usually stays in its hospital, so no other hospital can evaluate it. The run's history holds the
metrics of the reported round from the model's own hospital, bit for bit those that an evaluation would return.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from partitions.common.errors import RunFailedError, UserError
from partitions.common.files import write_atomically
from partitions.common.names import guard_formula
from server.results.history import History, Row, csv_text, history_file
from server.results.reading import find_entry
from server.results.reasons import merge_reasons
from server.results.run_directory import RunDirectory
from server.run.checkpoints import LoopState
from server.run.collector import Collector
from server.run.evaluated_models import EvaluatedModel, read_models
from server.run.loop import prepare
from server.run.recorder import silo_rows
from server.run.registration.registration import Registration
from strategies.base.evaluation import Evaluate, EvaluateSettings
from strategies.base.run_settings import RunSettings
from strategies.base.transport.reporting import SCHEMA, metrics_of_reply, read_replies

# In the directory: the result, and the folder with the models' files
MATRIX, MODELS = "matrix.csv", "models"
HEADER = ["model", "silo", "split", "metric", "value", "n"]
Cells = list[list[str]]  # rows of the matrix, as text


def matrix_row(model: str, row: Row) -> list[str]:
    """Return a row of the matrix; a value that a silo withheld is empty."""
    _, _, _, silo, split, _, metric, value, n = row.cells()
    return [guard_formula(model), silo, split, metric, value, n]


class EvaluationLoop:
    """One run of ``strategy = evaluate``."""

    def __init__(
        self, grid: Grid, settings: RunSettings, directory: RunDirectory | None = None
    ) -> None:
        self.settings, self.common = settings, settings.common
        self.registration = Registration(grid, settings, directory)
        self.reporter, self.collector = self.registration.reporter, Collector(self.registration)
        # Model -> silo -> reason why it returned no metrics
        self.left_out: dict[str, dict[str, str]] = {}

    def run(self, models: Sequence[EvaluatedModel]) -> Cells:
        """Return the rows of the matrix. Raises UserError, or RunFailedError if no silo evaluates any model."""
        check_models(self.settings.method, models)
        self.registration.register()
        state = LoopState(statistics={**models[0].statistics})
        strategy = prepare(self.settings, self.registration, state)
        if not isinstance(strategy, Evaluate):
            raise TypeError(f"{strategy.info.name} evaluates no given models")
        if strategy.layout.size != len(models[0].vector):
            raise UserError(
                f"the models have {len(models[0].vector)} parameters, the network {strategy.layout.size}"
            )
        # The digests cover the models' own columns and labels, so these replace what most silos have.
        model_schema = models[0].schema
        schema = replace(
            self.registration.data_spec.schema,
            features=model_schema.features,
            labels=model_schema.labels,
        )
        state.numbers |= {"run_id": state.run_id, SCHEMA: schema.text}
        cells: Cells = []
        for number, model in enumerate(models, start=1):
            numbers = {
                **state.numbers,
                **{key: list(values) for key, values in model.statistics.items()},
            }
            strategy.follow(replace(strategy.plan, numbers=numbers))
            cells += self.evaluate(strategy, number, model)
        self._note_left_out()
        if not cells:
            raise RunFailedError(
                f"no silo evaluated {', '.join(self.left_out)} ({self._reasons(self.left_out)})"
            )
        return cells

    def evaluate(self, strategy: Evaluate, number: int, model: EvaluatedModel) -> Cells:
        """Evaluate one model at every silo, and return its rows.

        A silo's own model is evaluated at that silo first; if the silo refuses, no other silo receives it.
        Raises RunFailedError if no silo evaluates a model that has no owner.
        """
        strategy.start_model(number, model.vector, model.buffers)
        owner = self.settings.method.entries[number - 1].owner
        here = [owner] if owner in strategy.silos else []
        metrics = self._ask(strategy, here)
        if here and not metrics:
            self.reporter.note(
                f"{model.name} is {owner}'s own, which did not evaluate it: no other silo was asked"
            )
        else:
            metrics |= self._ask(
                strategy, [name for name in strategy.silos if name not in here]
            )
        self.left_out[model.name] = dict(strategy.rejected)
        if not metrics and not owner:
            raise RunFailedError(
                f"no silo evaluated {model.name} ({self._reasons([model.name])})"
            )
        self.reporter.event(
            "model",
            round=number,
            model=model.name,
            silos=len(metrics),
            rejected=strategy.rejected,
        )
        rows: list[Row] = []
        for name, measured in sorted(metrics.items()):
            info, c = strategy.silos[name], self.common
            score, which = self.registration.task.score, (*c.which, number, name)
            measured_rows = silo_rows(strategy, info, measured, number, score)
            # A silo that withholds all metrics gets one empty row per split.
            empty = {"val": info.n_val, "test": info.n_test}
            rows += measured_rows or [
                Row(*which, p, "received", score, math.nan, n) for p, n in empty.items() if n
            ]
        return [matrix_row(model.name, row) for row in rows]

    def _ask(self, strategy: Evaluate, silos: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the metrics of the round's model by silo; silos without metrics are rejected with the reason."""
        if not silos:
            return {}
        messages = strategy.messages(silos)
        replies = self.collector.exchange(messages, strategy, {})
        metrics, faults = read_replies(replies, strategy.plan.nodes, metrics_of_reply)
        for name, reason in faults.items():
            strategy.reject(name, reason)
        self.collector.reject_silent(strategy, messages, replies)
        return metrics

    def _reasons(self, models: Iterable[str]) -> str:
        """Return the reasons why silos returned no metrics for these models, each reason once."""
        every = [
            line for model in models for line in merge_reasons(self.left_out[model].items())
        ]
        return "; ".join(dict.fromkeys(every))

    def _note_left_out(self) -> None:
        """Report the missing cells of the matrix: for each silo and reason, the models without metrics."""
        models = defaultdict[tuple[str, str], list[str]](list)
        for model, silos in self.left_out.items():
            for cell in silos.items():
                models[cell].append(model)
        self.reporter.note_reasons(
            (silo, f"{silo} did not evaluate {', '.join(names)}: {reason}")
            for (silo, reason), names in models.items()
        )


def check_models(settings: EvaluateSettings, models: Sequence[EvaluatedModel]) -> None:
    """Raise UserError if these are not the models that the run's settings name."""
    digests = [(model.name, model.digest) for model in models]
    if digests != [(entry.name, entry.digest) for entry in settings.entries]:
        raise UserError(
            "the files in models/ are not the models that evaluate.models names: run silofl evaluate again"
        )


def models_in(directory: Path, settings: RunSettings) -> list[EvaluatedModel]:
    """Read the models that a run's settings name from its directory."""
    files = [directory / MODELS / f"{name}.safetensors" for name, *_ in settings.method.entries]
    return read_models(files, settings.common.model)


def write_matrix(directory: Path, cells: Cells) -> Path:
    """Write ``matrix.csv``."""
    write_atomically(directory / MATRIX, csv_text([HEADER, *cells]))
    return directory / MATRIX


def entry_of(source: Path, run: RunSettings) -> Mapping[str, Any]:
    """Return a finished run's entry of ``summary.json``. Raises UserError if the run has not ended."""
    if (entry := find_entry(RunDirectory(source).summary, run.common.which)) is None:
        raise UserError(
            f"{source}: {run.run_key} has not come to its end: its silos' models are not chosen yet"
        )
    return entry


def own_cells(source: Path, run: RunSettings) -> Cells:
    """Return from the run's history the rows of each silo's reported model at that silo, named after the silo.

    Raises UserError if the run has not ended, or its history is missing.
    """
    entry = entry_of(source, run)
    rounds = {silo: values.get("round") for silo, values in entry["per_silo"].items()}
    file = RunDirectory(source).history
    if not history_file(file).is_file():
        raise UserError(
            f"there is no {file}, which has what the run measured: the run directory is wanted"
        )
    return [
        matrix_row(row.silo, row)
        for row in History(file).of(*run.common.which)
        if row.silo in rounds
        and (row.round, row.snapshot) == (rounds[row.silo], entry["reports"])
        and row.split != "train"
    ]


def add_cells(matrix: Path, cells: Cells, silos: Sequence[str]) -> None:
    """Add to ``matrix.csv`` the rows whose model and silo it does not have yet; create the file if it is missing.

    The models named in ``silos`` stand last, in this order.
    """
    with io.StringIO(matrix.read_text() if matrix.exists() else "", newline="") as text:
        rows = list(csv.reader(text))[1:]
    measured = {(row[0], row[1]) for row in rows}
    places = {guard_formula(silo): at for at, silo in enumerate(silos)}
    rows += [row for row in cells if (row[0], row[1]) not in measured]
    rows.sort(key=lambda row: (places.get(row[0], -1), row[1]))
    write_atomically(matrix, csv_text([HEADER, *rows]))
