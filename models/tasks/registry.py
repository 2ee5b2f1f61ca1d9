"""The tasks by name, and the range of every metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from models.tasks.base import Task
from models.tasks.multilabel import Multilabel
from models.tasks.ordinal import Ordinal
from models.tasks.regression import Regression
from models.tasks.segmentation import Segmentation
from models.tasks.survival import Survival
from partitions.common.errors import DataError

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Task, Ordinal, Multilabel, Regression, Survival, Segmentation)
}

MULTICLASS = Task()

FARTHEST = 1e100  # farther than float32 predictions can be from a label, squared; means and variances stay finite

# Ranges of metrics; all others lie in 0..1. Only a loss, which enters no mean over silos, may overflow.
RANGES = {
    "loss": (-math.inf, math.inf),
    "mae": (0.0, FARTHEST),
    "rmse": (0.0, FARTHEST),
    "r2": (-FARTHEST, 1.0),
    "kappa": (-1.0, 1.0),
    "score_low": (-FARTHEST, 1.0),
    "score_high": (-FARTHEST, 1.0),
}


@cache
def all_metrics() -> tuple[str, ...]:
    """Return the names of the metrics of all tasks."""
    return tuple(dict.fromkeys(metric for task in TASKS.values() for metric in task.metrics))


def task_of(name: str, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Task:
    """Return the task of this name; ``mean`` and ``std`` are those of a regression's labels.

    Raises DataError for an unknown name.
    """
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}; there are: {', '.join(TASKS)}")
    return Regression(tuple(mean), tuple(std)) if name == "regression" else TASKS[name]()
