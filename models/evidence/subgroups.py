"""A model's score in each subgroup of a hospital's test samples, with small subgroups suppressed.

The score of a subgroup of fewer than ``least`` patients stays in the hospital (primary suppression). The score of all
samples and those of all subgroups but one give that one by subtraction. So the suppressed subgroups must have at least
``least`` patients together; otherwise the smallest subgroups left are suppressed too (secondary suppression; Willenborg
and de Waal, Elements of Statistical Disclosure Control, 2001). A patient in several of them counts once. Samples of an
unknown subgroup count as suppressed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.evidence.measure import PREFIX, Evidence
from models.intervals import of_mean, of_share
from models.metrics import wilson_interval
from models.samples import Samples
from models.tasks import ENDS, Regression, Segmentation, Task
from models.training import Network, predict

Texts = npt.NDArray[np.str_]


def releasable_subgroups(
    groups: Texts, patients: npt.NDArray[np.int64] | None, least: int
) -> list[str]:
    """Return the names of the subgroups whose numbers may leave. ``groups``, ``patients``: of each sample (n,)."""
    units = np.arange(len(groups)) if patients is None else patients
    counts = {str(name): len(np.unique(units[groups == name])) for name in np.unique(groups)}
    kept = {name: n for name, n in counts.items() if name and n >= least}

    def count_hidden() -> int:
        return len(np.unique(units[~np.isin(groups, list(kept))]))

    for name in sorted(kept, key=lambda name: (kept[name], name)):
        if not 0 < count_hidden() < least:
            break
        del kept[name]
    return sorted(kept) if len(kept) > 1 or not count_hidden() else []


def find_suppressed(groups: Texts, values: Evidence) -> list[str]:
    """Return the subgroups that ``values`` lack, by the names of their values."""
    return [
        name
        for group in np.unique(groups)
        if group and (name := f"{PREFIX}{group}") not in values
    ]


def subgroup_scores(
    task: Task,
    model: Network,
    test: Samples,
    groups: Texts,
    patients: npt.NDArray[np.int64] | None,
    least: int,
) -> Evidence:
    """Return ``subgroup.NAME``: samples, score and its 95 % interval's ends, of each subgroup that may leave.

    For measurements: samples, mean absolute error, its interval's ends, and the root of the mean squared error.
    """
    if isinstance(task, Segmentation):
        dice = task.dice_by_case(model, test)
        # A case without foreground is in no number, so its patient does not count
        known = (~dice.isnan()).numpy()
        names = releasable_subgroups(
            groups[known], None if patients is None else patients[known], least
        )
        each = {name: _of_cases(dice[torch.from_numpy(groups == name)]) for name in names}
    else:
        names = releasable_subgroups(groups, patients, least)
        outputs, labels = predict(model, test), test.labels()
        each = {
            name: _of_rows(task, outputs, labels, torch.from_numpy(groups == name))
            for name in names
        }
    if not all(math.isfinite(v) for values in each.values() for v in values):
        return {}  # a missing one would follow as the difference to the whole
    return {f"{PREFIX}{name}": values for name, values in each.items()}


def _of_rows(task: Task, outputs: Tensor, labels: Tensor, rows: Tensor) -> list[float]:
    rows = rows.to(labels.device)
    metrics = task.measure(outputs[rows], labels[rows])
    n = int(rows.sum())
    score = metrics[task.score]
    if isinstance(task, Regression):  # R2 would be relative to the spread within the subgroup
        return [float(n), *_of_errors(task, outputs[rows], labels[rows]), metrics["rmse"]]
    if ENDS[0] in metrics:
        return [float(n), score, metrics[ENDS[0]], metrics[ENDS[1]]]
    return [float(n), score, *wilson_interval(round(score * n), n)]


def _of_errors(task: Regression, outputs: Tensor, labels: Tensor) -> list[float]:
    """Return the mean absolute error, mean over measurements in their own units, and its 95 % interval's ends."""
    errors = (outputs - labels).double().cpu().abs() * torch.tensor(
        task.std or (1.0,), dtype=torch.float64
    )
    each = errors.mean(1)
    low, high = of_mean(
        mean := float(each.mean()), float(each.var()) / len(each), most=math.inf
    )
    return [mean, max(low, 0.0), high]


def _of_cases(dice: Tensor) -> list[float]:
    known = dice[~dice.isnan()].double()
    n = len(known)
    mean, variance = (float(known.mean()), float(known.var()) / n) if n > 1 else (math.nan, 0.0)
    return [float(len(dice)), mean, *of_share(mean, variance, n)]
