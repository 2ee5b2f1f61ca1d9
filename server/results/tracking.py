"""Tracking of a study with TensorBoard or MLflow: ``simulate --log tensorboard --log mlflow``.

Optional: ``pip install -e '.[tracking]'`` installs both libraries. The logged values are those of the history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from server.results.history import History, Row, mean
from strategies.base.run_settings import RunSettings
from strategies.base.settings import choose


class Tracker:
    """Interface to one library: ``start`` before each run, ``record`` after each round, ``end`` after the run."""

    def start(self, run: RunSettings, out: Path) -> None:
        raise NotImplementedError

    def record(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in ``RUN/tensorboard/STRATEGY-SEED``; view them with ``tensorboard --logdir RUN/tensorboard``."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer_class = SummaryWriter

    def start(self, run: RunSettings, out: Path) -> None:
        self.writer: Any = self.writer_class(str(out / "tensorboard" / run.run_key))
        rows = "\n".join(f"| {key} | {value} |" for key, value in run.flat().items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def end(self, failed: bool) -> None:
        self.writer.close()


class MLflow(Tracker):
    """Runs of the experiment ``silofl`` in ``RUN/mlflow.db``; view them with
    ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``.
    """

    def __init__(self) -> None:
        import mlflow

        self.mlflow: Any = mlflow

    def start(self, run: RunSettings, out: Path) -> None:
        uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
        self.client: Any = self.mlflow.MlflowClient(tracking_uri=uri)
        known = self.client.get_experiment_by_name("silofl")
        artifacts = (out / "mlartifacts").resolve().as_uri()
        experiment = (
            known.experiment_id if known else self.client.create_experiment("silofl", artifacts)
        )
        self.run_id = self.client.create_run(experiment, run_name=run.run_key).info.run_id
        entities = self.mlflow.entities
        parameters = [entities.Param(key, str(value)) for key, value in run.flat().items()]
        self.client.log_batch(self.run_id, params=parameters)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow allows fewer characters in a name than TensorBoard; one batch takes at most 1000 values.
        now = self.mlflow.utils.time.get_current_time_millis()
        metrics = [
            self.mlflow.entities.Metric(name, value, now, step)
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def end(self, failed: bool) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def open_trackers(names: Sequence[str]) -> list[Tracker]:
    """Return the trackers by name, each once. Raises UserError for an unknown name or a missing library."""
    trackers = []
    for name in dict.fromkeys(names):
        choose("--log", name, TRACKERS)
        try:
            trackers.append(TRACKERS[name]())
        except ImportError as error:
            raise UserError(
                f"--log {name} needs a library that is not installed ({error.name or error}): "
                f"pip install -e '.[tracking]' in the checkout, or pip install {name}"
            ) from None
    return trackers


def round_values(
    history: History, strategy: str, seed: int, server_round: int
) -> dict[str, float]:
    """Return the values of one round: means over silos, values of the round as a whole, and values of each silo.

    ``test/accuracy/personal`` is an unweighted mean over silos; ``hospital-03/test/accuracy/personal`` is one silo's.
    """

    def of_round(row: Row) -> bool:
        return (row.strategy, row.seed, row.round) == (strategy, seed, server_round)

    # A round's rows are added together, at the end
    rows = list(takewhile(of_round, reversed(history.rows)))
    values: dict[str, float] = {}
    by_silo: dict[str, dict[str, float]] = {}
    for row in reversed(rows):
        if math.isnan(row.value):
            continue
        if row.snapshot:
            name = f"{row.split}/{row.metric}/{row.snapshot}"
            by_silo.setdefault(name, {})[row.silo] = row.value
            values[f"{row.silo}/{name}"] = row.value
        elif not row.silo:
            values[f"round/{row.metric}"] = row.value
    return {name: mean(each) for name, each in by_silo.items()} | values
