"""The tasks, one object each: labels, outputs, loss, metrics, score and its interval.

| task | label of a sample | outputs | loss | score |
|---|---|---|---|---|
| multiclass | a class 0..C-1 | C | cross-entropy, focal | accuracy |
| ordinal | a grade 0..C-1 | C | as multiclass | accuracy |
| multilabel | 0 or 1 for each of L findings, -1: unknown | L | binary cross-entropy | AUC, mean over findings |
| regression | k numbers | k | squared error | R2, mean over outputs |
| survival | time, and event (1) or censored (0) | 1 | Cox | concordance index |
| segmentation | a class 0..C-1 for each pixel, 255: ignored | C maps | cross-entropy + soft Dice | Dice |

The score (higher is better) selects rounds; gains and the report use it. ``score_low`` and ``score_high`` are the ends
of its 95 % interval, where the number of samples alone does not give it. ``partitions/labels.py`` reads the labels of a
data file. A method uses none of this: it calls ``self.gradient(x, y)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from models.tasks.base import ENDS, Task, probabilities
from models.tasks.multilabel import Multilabel, binary_loss
from models.tasks.ordinal import Ordinal
from models.tasks.regression import Regression, square_loss
from models.tasks.segmentation import VOID, Segmentation, pixel_losses, segmentation_loss
from models.tasks.survival import Survival, concordance, cox_loss
from partitions.common.errors import DataError

__all__ = [
    "ENDS",
    "MULTICLASS",
    "TASKS",
    "VOID",
    "Multilabel",
    "Ordinal",
    "Regression",
    "Segmentation",
    "Survival",
    "Task",
    "all_metrics",
    "binary_loss",
    "concordance",
    "cox_loss",
    "pixel_losses",
    "probabilities",
    "segmentation_loss",
    "square_loss",
    "task_of",
]

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Task, Ordinal, Multilabel, Regression, Survival, Segmentation)
}

MULTICLASS = Task()


@cache
def all_metrics() -> tuple[str, ...]:
    """Return the names of the metrics of all tasks."""
    return tuple(dict.fromkeys(metric for task in TASKS.values() for metric in task.metrics))


def task_of(
    name: str,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    unlabelled: tuple[int, ...] = (),
) -> Task:
    """Return the task of this name; ``mean`` and ``std`` are those of a regression's labels.

    ``unlabelled``: the classes that a hospital does not outline. A finding that it does not know is -1 in each label.

    Raises DataError for an unknown name.
    """
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}; there are: {', '.join(TASKS)}")
    if name == "segmentation":
        return Segmentation(unlabelled)
    return Regression(tuple(mean), tuple(std)) if name == "regression" else TASKS[name]()
