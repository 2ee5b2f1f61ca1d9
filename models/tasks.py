"""What there is to learn: one object per task says what the rest of the house has to know of it.

| task | label of a sample | outputs | loss | score |
|---|---|---|---|---|
| multiclass | a class 0..C-1 | C | cross-entropy, focal | accuracy |
| ordinal | a grade 0..C-1 | C | as multiclass | accuracy |
| multilabel | 0 or 1 for each of L findings, -1: not known | L | binary cross-entropy | AUC, mean over findings |
| regression | k numbers | k | squared error | R2, mean over outputs |
| survival | time, and event (1) or censored (0) | 1 | Cox | concordance index |
| segmentation | a class 0..C-1 for each pixel, 255: does not count | C maps | cross-entropy + soft Dice | Dice |

The score, higher is better, chooses rounds and is what gains and the report are about; ``score_low`` and ``score_high``
are the ends of its 95 % interval, where the number of samples alone does not give it. Which labels a data file holds:
``partitions/labels.py``. A method asks for none of this: it calls ``self.gradient(x, y)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.flat import FlatModel
from models.intervals import UNKNOWN, areas, of_area, of_mean, of_pairs, of_share
from models.metrics import METRICS, classification_metrics, loss_function, metrics_of_all
from models.training import Loss, Samples, by_batch, predict

ENDS = ("score_low", "score_high")
VOID = 255  # a pixel that does not count
INFINITE = math.inf


@dataclass(frozen=True)
class Task:
    """A task; this one is ``multiclass``."""

    name: ClassVar[str] = "multiclass"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    score: ClassVar[str] = "accuracy"
    word: ClassVar[str] = "accuracy"  # what the score is called
    beside: ClassVar[dict[str, str]] = {"macro_f1": "Macro F1", "auc": "AUC"}  # metrics that the report shows, too
    least: ClassVar[int] = 2  # outputs
    one_class: ClassVar[bool] = True  # whether a sample has one class
    per_pixel: ClassVar[bool] = False  # whether every pixel has an answer

    def check_outputs(self, outputs: int) -> None:
        """Raise ValueError where a network cannot have so many."""
        if outputs < self.least:
            raise ValueError(f"a classifier needs at least {self.least} classes, not {outputs}")

    def loss(self, name: str, gamma: float) -> Loss:
        """The training loss of outputs and labels, averaged over the batch. ValueError for one that is not for it."""
        return loss_function(name, gamma)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Every metric of ``metrics``, of the network's outputs and labels (n, ...)."""
        return classification_metrics(outputs, y)

    def measure_all(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[dict[str, float]]:
        """:meth:`measure` of several models, each on its own samples; equal up to the order of sums."""
        return metrics_of_all(outputs, labels)

    def evaluate(self, model: FlatModel, samples: Samples) -> dict[str, float]:
        """Every metric of the model as it stands, on one split."""
        if model.together is not None:
            return model.together.evaluate(self, samples)
        return self.own_evaluate(model, samples)

    def own_evaluate(self, model: FlatModel, samples: Samples) -> dict[str, float]:
        """:meth:`evaluate` of this model by itself."""
        return self.measure(predict(model, samples), samples.labels())

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        """What ``predict`` writes: the columns' names, and a row for each sample."""
        p = torch.softmax(outputs, dim=1)
        rows = [[label, *row] for label, row in zip(p.argmax(1).tolist(), p.tolist(), strict=True)]
        return ["label", *(f"p_{c}" for c in range(p.shape[1]))], rows


@dataclass(frozen=True)
class Ordinal(Task):
    """Grades: trained and predicted as classes; how far off a prediction is counts in two metrics more."""

    name: ClassVar[str] = "ordinal"
    metrics: ClassVar[tuple[str, ...]] = (*METRICS, "mae", "kappa")
    beside: ClassVar[dict[str, str]] = {"mae": "MAE", "kappa": "Quadratic κ"}

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Those of classes; ``mae``: mean distance in grades; ``kappa``: Cohen's, with squared distances as weights
        (nan where labels and predictions are all of one grade).
        """
        return super().measure(outputs, y) | self._distances(outputs, y)

    def measure_all(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[dict[str, float]]:
        found = zip(super().measure_all(outputs, labels), outputs, labels, strict=True)
        return [metrics | self._distances(o, y) for metrics, o, y in found]

    def _distances(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        grades, truth = outputs.detach().argmax(1).double().cpu(), y.double().cpu()
        if not len(truth):
            return {"mae": math.nan, "kappa": math.nan}
        chance = _mean_square(grades, truth)
        observed = (grades - truth).square().mean()
        kappa = float(1 - observed / chance) if chance > 1e-12 else math.nan
        return {"mae": float((grades - truth).abs().mean()), "kappa": kappa}


def _mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Mean of (a_i - b_j)^2 over all pairs."""
    return a.square().mean() + b.square().mean() - 2 * a.mean() * b.mean()


@dataclass(frozen=True)
class _Plain(Task):
    """A task with one loss."""

    one_class: ClassVar[bool] = False
    least: ClassVar[int] = 1

    def measure_all(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[dict[str, float]]:
        return [self.measure(o, y) for o, y in zip(outputs, labels, strict=True)]

    def check_outputs(self, outputs: int) -> None:
        if outputs < self.least:
            raise ValueError(f"{self.name} needs at least {self.least} outputs, not {outputs}")

    def loss(self, name: str, gamma: float) -> Loss:
        if name != "cross-entropy":
            raise ValueError(f"loss = {name}: {self.name} has one loss of its own; leave loss as it is")
        return self.own_loss

    @staticmethod
    def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError


def binary_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean over all known labels of -log p of what is right, p = sigmoid(outputs) (b, L), y (b, L)."""
    known = (y >= 0).float()
    each = F.binary_cross_entropy_with_logits(outputs, y.clamp(min=0), reduction="none")
    return (each * known).sum() / known.sum().clamp(min=1)


@dataclass(frozen=True)
class Multilabel(_Plain):
    """Several findings at once. Never judged by accuracy: of fourteen rare ones "always no" gets 95 %."""

    name: ClassVar[str] = "multilabel"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "auc", "accuracy", "macro_f1", *ENDS)
    score: ClassVar[str] = "auc"
    word: ClassVar[str] = "AUC"
    beside: ClassVar[dict[str, str]] = {"accuracy": "Accuracy", "macro_f1": "Macro F1"}
    own_loss = staticmethod(binary_loss)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """``auc``: mean over the findings that some samples have and some have not (where all do, MedMNIST's official
        one); ``accuracy``: mean over findings, at 0.5, as there; ``macro_f1``: mean over findings that occur.
        """
        if not len(y):
            return dict.fromkeys(self.metrics, math.nan)
        logits, labels = outputs.detach().double().cpu(), y.double().cpu()
        known, truth, said = (labels >= 0).numpy(), (labels == 1).numpy(), (logits > 0).numpy()
        found, effects, counts = [], [], []
        scores = logits.numpy()
        for k in range(labels.shape[1]):
            rows = known[:, k]
            area, effect = areas(scores[rows, k], truth[rows, k])
            if not math.isnan(area):
                found.append(area)
                effects.append(np.zeros(len(labels)))
                effects[-1][rows] = effect
                counts.append((int(truth[rows, k].sum()), int((~truth[rows, k]).sum())))
        area = float(np.mean(found)) if found and np.isfinite(scores).all() else math.nan
        variance = float((np.mean(effects, axis=0) ** 2).sum()) if effects else 0.0
        ends = of_area(area, variance, *min(counts, key=min, default=(1, 1)))
        right = [float((said == truth)[known[:, k], k].mean()) for k in range(labels.shape[1]) if known[:, k].any()]
        hits, all_ = (truth & said & known).sum(0), (truth & known).sum(0) + (said & known).sum(0)
        occur = all_ > 0
        return {
            "loss": float(binary_loss(logits, labels)),
            "auc": area,
            "accuracy": float(np.mean(right)) if right else math.nan,
            "macro_f1": float((2 * hits[occur] / all_[occur]).mean()) if occur.any() else math.nan,
            **dict(zip(ENDS, ends, strict=True)),
        }

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        return [f"p_{k}" for k in range(outputs.shape[1])], torch.sigmoid(outputs).tolist()


def square_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean over samples and outputs (b, k) of the squared difference; labels are standardised."""
    if outputs.shape != y.shape:
        raise ValueError(f"outputs {tuple(outputs.shape)} for labels {tuple(y.shape)}")
    return (outputs - y).square().mean()


@dataclass(frozen=True)
class Regression(_Plain):
    """Measurements. Trained on (y - mean) / std, with the statistics by which tables are standardised."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    name: ClassVar[str] = "regression"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "r2", "mae", "rmse", *ENDS)
    score: ClassVar[str] = "r2"
    word: ClassVar[str] = "R²"
    beside: ClassVar[dict[str, str]] = {"mae": "MAE", "rmse": "RMSE"}
    own_loss = staticmethod(square_loss)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """``r2``: 1 - sum e^2 / sum (y - mean y)^2, mean over the outputs whose labels vary; ``mae`` and ``rmse`` in
        the labels' own units, mean over outputs. The interval of R2 is the normal one of its influence function.
        """
        if not len(y):
            return dict.fromkeys(self.metrics, math.nan)
        said, truth = outputs.detach().double().cpu(), y.double().cpu()
        error = said - truth
        squares, spread = error.square(), (truth - truth.mean(0)).square()
        varies = spread.mean(0) > 1e-12
        r2, ends = math.nan, UNKNOWN
        if bool(varies.any()):
            a, b = squares.mean(0)[varies], spread.mean(0)[varies]
            r2 = float((1 - a / b).mean())
            effect = (a / b**2 * spread[:, varies] - squares[:, varies] / b).mean(1)
            ends = of_mean(r2, float(effect.var()) / len(y), most=1.0) if len(y) > 1 else UNKNOWN
        units = torch.tensor(self.std or (1.0,), dtype=torch.float64)
        return {
            "loss": float(squares.mean()),
            "r2": r2,
            "mae": float((error.abs() * units).mean()),
            "rmse": float(((squares * units**2).mean(0).sqrt()).mean()),
            **dict(zip(ENDS, ends, strict=True)),
        }

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        scale, shift = torch.tensor(self.std or (1.0,)), torch.tensor(self.mean or (0.0,))
        return [f"y_{k}" for k in range(outputs.shape[1])], (outputs * scale + shift).tolist()


def cox_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Cox's negative log partial likelihood per event, with Breslow's handling of ties (Cox 1972; Breslow 1974).

    -(1 / D) sum_{i: event} (s_i - log sum_{j: T_j >= T_i} exp s_j), with s = outputs (b, 1) and y (b, 2) = time, event.
    The risk sets are the batch's: best trained with batches of all samples. 0, and no gradient, without an event.
    """
    if y.dim() != 2 or y.shape[1] != 2 or outputs.shape != (len(y), 1):
        raise ValueError(f"outputs {tuple(outputs.shape)} for times and events {tuple(y.shape)}")
    order = torch.argsort(y[:, 0], descending=True, stable=True)
    s, time, event = outputs[order, 0], y[order, 0], y[order, 1]
    at_risk = torch.logcumsumexp(s, 0)
    last = torch.searchsorted(-time.contiguous(), -time.contiguous(), right=True) - 1  # of those with an equal time
    return -(event * (s - at_risk[last])).sum() / event.sum().clamp(min=1)


@dataclass(frozen=True)
class Survival(_Plain):
    """Time until an event, or until nobody looked any more. The output is a log risk: higher means sooner."""

    name: ClassVar[str] = "survival"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "c_index", *ENDS)
    score: ClassVar[str] = "c_index"
    word: ClassVar[str] = "C-index"
    beside: ClassVar[dict[str, str]] = {}
    own_loss = staticmethod(cox_loss)

    def check_outputs(self, outputs: int) -> None:
        if outputs != 1:
            raise ValueError(f"survival has one output, not {outputs}")

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """``c_index``: Harrell's concordance: the share of comparable pairs (one has the event before the other's time,
        or at the same time as the other is censored) in which the earlier one has the higher risk; equal risks count
        half. nan without such a pair.
        """
        if not len(y):
            return dict.fromkeys(self.metrics, math.nan)
        risks, labels = outputs.detach().double().cpu(), y.double().cpu()
        concordant, comparable = concordance(risks[:, 0].numpy(), labels[:, 0].numpy(), labels[:, 1].numpy() > 0)
        share, ends = of_pairs(concordant, comparable)
        return {"loss": float(cox_loss(risks, labels)), "c_index": share, **dict(zip(ENDS, ends, strict=True))}

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        return ["risk"], outputs.tolist()


def concordance(risk: np.ndarray, time: np.ndarray, event: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sample (n,) the pairs that it is in: concordant ones, and comparable ones."""
    concordant, comparable = np.zeros(len(risk)), np.zeros(len(risk))
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & ~event)
        agree = np.where(risk[i] > risk, 1.0, np.where(risk[i] == risk, 0.5, 0.0)) * later
        comparable[i] += later.sum()
        concordant[i] += agree.sum()
        comparable += later
        concordant += agree
    return concordant, comparable


def pixel_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Of each sample (b,): mean cross-entropy of its pixels + 1 - the mean over foreground classes of soft Dice.

    outputs (b, C, ...), y (b, ...) with classes 0..C-1, 0 the background; pixels of 255 do not count. Soft Dice is
    (2 sum p g + 1) / (sum p + sum g + 1), p the softmax and g whether a pixel is of the class.
    """
    counts = y != VOID
    spatial = tuple(range(1, y.dim()))
    cross = F.cross_entropy(outputs, y, reduction="none", ignore_index=VOID).sum(spatial)
    cross = cross / counts.sum(spatial).clamp(min=1)
    p = torch.softmax(outputs, 1)[:, 1:] * counts.unsqueeze(1)
    g = torch.stack([y == c for c in range(1, outputs.shape[1])], 1).to(p.dtype)
    across = tuple(range(2, p.dim()))
    dice = (2 * (p * g).sum(across) + 1) / (p.sum(across) + g.sum(across) + 1)
    return cross + 1 - dice.mean(1)


def segmentation_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean of :func:`pixel_losses` over a batch."""
    return pixel_losses(outputs, y).mean()


@dataclass(frozen=True)
class Segmentation(_Plain):
    """Outlines: a class for every pixel. Scored per picture and without the background, which flatters."""

    name: ClassVar[str] = "segmentation"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "dice", *ENDS)
    score: ClassVar[str] = "dice"
    word: ClassVar[str] = "Dice"
    beside: ClassVar[dict[str, str]] = {}
    least: ClassVar[int] = 2
    per_pixel: ClassVar[bool] = True
    own_loss = staticmethod(segmentation_loss)
    BATCH: ClassVar[int] = 16

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """``dice``: mean over pictures of the mean over foreground classes of 2 |A and B| / (|A| + |B|); a class that
        neither picture nor prediction has does not count (nan where none does), one that only one has counts 0.
        """
        return self._summary([self._each(outputs, y)])

    def own_evaluate(self, model: FlatModel, samples: Samples) -> dict[str, float]:
        return self._summary(by_batch(model, samples, self.BATCH, self._each))

    def _each(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (n,) and Dice (n,) of each picture."""
        said = outputs.detach().argmax(1).masked_fill(y == VOID, VOID)
        dice = []
        for c in range(1, outputs.shape[1]):
            a, b = (said == c).flatten(1), (y == c).flatten(1)
            total = (a.sum(1) + b.sum(1)).double()
            dice.append(torch.where(total > 0, 2 * (a & b).sum(1) / total, torch.nan))
        return pixel_losses(outputs.detach().double(), y).cpu(), torch.stack(dice, 1).nanmean(1).cpu()

    def _summary(self, found: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        losses, dice = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else (torch.empty(0),) * 2
        known = dice[~dice.isnan()].double()
        mean = float(known.mean()) if len(known) else math.nan
        variance = float(known.var()) / len(known) if len(known) > 1 else 0.0
        ends = of_share(mean, variance, len(known))
        loss = float(losses.mean()) if len(losses) else math.nan
        return {"loss": loss, "dice": mean, **dict(zip(ENDS, ends, strict=True))}

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        """How many pixels of each class; the masks themselves go into a file."""
        said = outputs.argmax(1).flatten(1)
        names = [f"pixels_{c}" for c in range(outputs.shape[1])]
        return names, [torch.bincount(row, minlength=len(names)).tolist() for row in said]


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Task, Ordinal, Multilabel, Regression, Survival, Segmentation)
}

MULTICLASS = Task()

# What a metric can be; those that are not named lie in 0..1.
RANGES = {
    "loss": (-INFINITE, INFINITE),
    "mae": (0.0, INFINITE),
    "rmse": (0.0, INFINITE),
    "r2": (-INFINITE, 1.0),
    "kappa": (-1.0, 1.0),
    "score_low": (-INFINITE, 1.0),
    "score_high": (-INFINITE, 1.0),
}


@cache
def all_metrics() -> tuple[str, ...]:
    """The metrics of all tasks."""
    return tuple(dict.fromkeys(metric for task in TASKS.values() for metric in task.metrics))


def task_of(name: str, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Task:
    """The task of this name; ``mean`` and ``std`` are those of a regression's labels.

    Raises ValueError for an unknown name.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; there are: {', '.join(TASKS)}")
    return Regression(tuple(mean), tuple(std)) if name == "regression" else TASKS[name]()
