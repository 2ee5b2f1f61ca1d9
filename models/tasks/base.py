"""The base of all tasks, which is multiclass, and the base of tasks with a single loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.metrics import METRICS, classification_metrics, loss_function
from models.samples import Samples
from models.training import Loss, Network, predict
from partitions.common.errors import DataError

ENDS = ("score_low", "score_high")
Array = npt.NDArray[np.float64]
# Probabilities; 1 where the event happened, else 0; sample indices
Chances = tuple[Array, Array, npt.NDArray[np.intp]]


def probabilities(outputs: Tensor) -> Array:
    """Return the softmax of logits (n, C), in double precision."""
    return np.asarray(torch.softmax(outputs.detach().double().cpu(), dim=1).numpy())


@dataclass(frozen=True)
class Task:
    """Base class of tasks, and the task ``multiclass``."""

    name: ClassVar[str] = "multiclass"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    score: ClassVar[str] = "accuracy"
    score_label: ClassVar[str] = "accuracy"  # the score's name in texts
    # Further metrics in the report
    secondary_metrics: ClassVar[dict[str, str]] = {"macro_f1": "Macro F1", "auc": "AUC"}
    secondary_text: ClassVar[str] = (  # the report's text on them
        "Accuracy's companions that do not let common classes hide rare ones; mean over silos."
    )
    minimum_outputs: ClassVar[int] = 2
    single_label: ClassVar[bool] = True  # whether a sample has one class
    per_pixel: ClassVar[bool] = False  # whether there are outputs for every pixel
    of_each: ClassVar[bool] = True  # whether a batch's loss is the mean of its samples' losses

    def check_outputs(self, outputs: int) -> None:
        """Raise DataError where a network for this task cannot have this number of outputs."""
        if outputs < self.minimum_outputs:
            raise DataError(
                f"a classifier needs at least {self.minimum_outputs} classes, not {outputs}"
            )

    def loss(
        self, name: str, gamma: float, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Loss:
        """Return the training loss of outputs and labels, averaged over the batch.

        Raises DataError for a loss that does not fit the task.
        """
        return loss_function(name, gamma, smoothing, weights)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return every metric of ``metrics`` for a network's outputs (n, ...) and labels (n, ...)."""
        return classification_metrics(outputs, y)

    def evaluate(self, model: Network, samples: Samples) -> dict[str, float]:
        """Return every metric of the model in its present state, on one split."""
        return self.measure(predict(model, samples), samples.labels())

    def chances(self, outputs: Tensor, y: Tensor) -> Chances | None:
        """Return probabilities, events and their samples (events,), for calibration; None where there are none.

        With two classes the event is class 1. With more it is a correct prediction, so that the calibration is that of
        the model's confidence (Guo et al., ICML 2017).
        """
        p = probabilities(outputs)
        labels = y.detach().long().cpu().numpy()
        if p.shape[1] == 2:
            return p[:, 1], (labels == 1).astype(np.float64), np.arange(len(p))
        return p.max(1), (p.argmax(1) == labels).astype(np.float64), np.arange(len(p))

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return predictions from a network's outputs (n, C, ...): here probabilities of classes."""
        return torch.softmax(outputs, dim=1)

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        """Return the table that ``predict`` writes: the columns' names, and a row for each sample."""
        p = self.predictions(outputs)
        rows = [
            [label, *row] for label, row in zip(p.argmax(1).tolist(), p.tolist(), strict=True)
        ]
        return ["label", *(f"p_{c}" for c in range(p.shape[1]))], rows


@dataclass(frozen=True)
class SingleLossTask(Task):
    """Base class of tasks with a single loss."""

    secondary_metrics: ClassVar[dict[str, str]] = {}
    secondary_text = ""
    # What the columns of the outputs are called, before their numbers
    column: ClassVar[str] = "y"
    single_label = False
    minimum_outputs = 1

    def chances(self, outputs: Tensor, y: Tensor) -> Chances | None:
        return None

    def check_outputs(self, outputs: int) -> None:
        if outputs < self.minimum_outputs:
            raise DataError(
                f"{self.name} needs at least {self.minimum_outputs} outputs, not {outputs}"
            )

    def loss(
        self, name: str, gamma: float, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Loss:
        if smoothing or weights is not None:
            raise DataError(
                f"label-smoothing and class-weights are for samples of one class each, not for {self.name}"
            )
        if name != "cross-entropy":
            raise DataError(
                f"loss = {name}: {self.name} has one loss of its own; leave loss as it is"
            )
        return self.own_loss

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        predicted = self.predictions(outputs)
        return [f"{self.column}_{k}" for k in range(outputs.shape[1])], predicted.tolist()

    @staticmethod
    def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError
