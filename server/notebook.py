"""Run directory as pandas frames, models and plots: the API of ``import silofl``."""

from __future__ import annotations

import csv
import io
import json
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from client.export import export_model, read_model
from client.prediction.predict import predict_file
from partitions.common.errors import UserError
from server.report.canvas import styles
from server.report.methods import info_of, spell
from server.report.study import StudyResults
from server.results.history import mean
from server.results.models import export_shared
from server.results.summary import values_by_round
from strategies.base.settings import Value

PARTS = {"val": "validation", "test": "test"}


def load_run(path: str | Path) -> Run:
    """Return the run, or study, in a run directory; it may be unfinished.

    Raises UserError if the directory holds no run, DataError if its history is damaged.
    """
    return Run(Path(path).expanduser())


class Run:
    """One run directory at the time of loading: a run, or a study of several methods and seeds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._study = StudyResults(path)

    @property
    def config(self) -> dict[str, Value]:
        """All settings of ``config.toml`` by key."""
        return dict(self._study.config)

    @cached_property
    def history(self) -> pd.DataFrame:
        """``history.csv``: a row per strategy, seed, round, silo, split, snapshot and metric; NaN if withheld."""
        return self._study.rows.astype({"value": "float64", "n": "Int64"})

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row per finished run; ``mean``, ``weighted`` and ``worst`` of the score at the reported round.

        ``score``: the name of the score; ``chosen``: the reported round; ``rounds``: the number of completed rounds;
        ``planned``: the number of planned rounds.
        """
        rows = []
        for run in self._study.summarised:
            final, score = run["final"], run["score"]
            rows.append(
                {
                    **{key: run[key] for key in ("strategy", "seed", "rounds")},
                    "planned": (run.get("stopped") or run).get("planned", run["rounds"]),
                    "silos": len(run["silos"]),
                    "score": score,
                    "chosen": final["round"],
                    **{
                        kind: final.get(f"{score}_{kind}")
                        for kind in ("mean", "weighted", "worst")
                    },
                    "fairness_variance": final["fairness_variance"],
                    **{
                        key: run[key]
                        for key in ("bmcta", "incentivized_rate", "bytes_down", "bytes_up")
                    },
                    "seconds": run["seconds"]["total"],
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def silos(self) -> pd.DataFrame:
        """A row per finished run and silo: samples, ``score`` and other metrics on its test data, and its gains."""
        rows = [
            {
                **{key: run[key] for key in ("strategy", "seed")},
                "silo": name,
                "score": values[run["score"]],
                **values,
            }
            for run in self._study.summarised
            for name, values in run["per_silo"].items()
        ]
        return pd.DataFrame(rows)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row per run and round, also for unfinished runs: mean scores by split, seconds and bytes.

        The scores are those of the model that the method reports. A silo that misses a round has the score of its last
        earlier round, or of its first, as in the report. The round after the last is the closing evaluation.
        """
        rows: list[dict[str, Any]] = []
        for strategy, seed in self._study.history.runs():
            rows_of_run = self._study.history.of(strategy, seed)
            by_round: dict[int, dict[str, Any]] = {r.round: {} for r in rows_of_run}
            of = info_of(strategy).reports, self._study.task.score
            for part, name in PARTS.items():
                for number, values in values_by_round(rows_of_run, part, *of).items():
                    by_round[number][name] = mean(values)
            for row in rows_of_run:
                if not row.silo:
                    by_round[row.round][row.metric] = row.value
            rows += [
                {"strategy": strategy, "seed": seed, "round": number, **by_round[number]}
                for number in sorted(by_round)
            ]
        of_round = ("round_seconds", "bytes_down", "bytes_up")
        columns = ["strategy", "seed", "round", *PARTS.values(), *of_round]
        return pd.DataFrame(rows, columns=columns)

    @cached_property
    def events(self) -> pd.DataFrame:
        """``progress.jsonl``: a row per event, with the columns of its kind."""
        return pd.DataFrame(self._study.events)

    def model(
        self,
        silo: str = "",
        which: str = "",
        *,
        strategy: str | None = None,
        seed: int | None = None,
        round: int | None = None,
    ) -> LoadedModel:
        """Return a silo's model, or without a silo the shared model, as ``silofl export`` saves it.

        ``which``: ``reported`` (default: the model whose score the report shows), ``best`` or ``last``. A silo's models
        are stored with its states: in a simulation's run directory, or at the hospital in a federation. ``strategy``
        and ``seed`` select one of several runs. Raises UserError if there is no such model.
        """
        if not silo and which not in ("", "shared"):
            raise UserError(f"which = {which!r}: it needs the name of a silo")
        folder = tempfile.TemporaryDirectory(prefix="silofl-")
        file = Path(folder.name, "model.safetensors")
        if silo:
            card = export_model(
                self.path, silo, which or "reported", file, strategy, seed, round=round
            )
        else:
            card = export_shared(self.path, file, strategy, seed, round)
        return LoadedModel(file, folder, card.model.name)

    def plot_rounds(self, part: str = "validation") -> Plot:
        """Return a plot of the mean score over silos by round: per method the mean of its seeds, and their range."""
        if part not in PARTS.values():
            raise UserError(
                f"part = {part!r}: one of {', '.join(PARTS.values())} is needed here"
            )
        plot, looks = Plot(), styles(self._study)
        axes = plot.add_subplot()
        for strategy, of_method in self.rounds.dropna(subset=[part]).groupby(
            "strategy", sort=False
        ):
            name = str(strategy)
            by_round = of_method.groupby("round")[part].agg(["mean", "min", "max"])
            colour = looks[name].colour if name in looks else None
            axes.plot(by_round.index, by_round["mean"], label=spell(name), color=colour)
            axes.fill_between(
                by_round.index, by_round["min"], by_round["max"], alpha=0.15, color=colour
            )
        axes.set_xlabel("round")
        axes.set_ylabel(f"mean {part} {self._study.task.score_label}")
        return plot.add_legend()

    def plot_silos(self) -> Plot:
        """Return a plot of each silo's test score at the reported round: a marker per method, the mean of its seeds."""
        plot, looks = Plot(), styles(self._study)
        axes = plot.add_subplot()
        if not self.silos.empty:
            means = (
                self.silos.groupby(["strategy", "silo"], sort=False)["score"]
                .mean()
                .unstack("strategy")
            )
            for name in means:
                look = looks.get(str(name))
                colour, marker = (look.colour, look.marker) if look else (None, "o")
                axes.plot(
                    means.index, means[name], marker, label=spell(str(name)), color=colour
                )
            axes.tick_params(axis="x", rotation=90)
        axes.set_ylabel(f"test {self._study.task.score_label}")
        return plot.add_legend()

    def __repr__(self) -> str:
        return f"<silofl run {self.path}: {', '.join(self._study.methods) or 'no results yet'}>"


class LoadedModel:
    """An exported model. ``card``: its model card; ``module``: the network with its weights, in evaluation mode."""

    def __init__(
        self, file: Path, folder: tempfile.TemporaryDirectory[str], network: str
    ) -> None:
        self._file, self._network = file, network
        weakref.finalize(self, folder.cleanup)
        card, net = read_model(file, network)
        self.card: dict[str, Any] = json.loads(card.text)
        self.module: nn.Module = net.module.eval()

    def predict(self, data: str | Path) -> pd.DataFrame:
        """Return the predictions for a data file or csv, a row per sample, as ``silofl predict`` does."""
        text = predict_file(self._file, Path(data), network=self._network)
        key = next(csv.reader(io.StringIO(text)))[0]
        types = {} if key == "index" else {key: str}  # a patient id such as 007 keeps its zeros
        return pd.read_csv(io.StringIO(text), dtype=types).set_index(key)

    def __repr__(self) -> str:
        whose = self.card["silo"] or "all silos"
        return f"<silofl model of {whose}: {self.card['method']}, seed {self.card['seed']}, {self.card['when']}>"


class Plot(Figure):
    """A matplotlib figure that a notebook shows without set-up."""

    def __init__(self) -> None:
        super().__init__(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(self)

    def add_legend(self) -> Plot:
        """Add a legend to axes with labels, and return the plot."""
        for axes in self.axes:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)
        return self

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
