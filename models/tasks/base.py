"""The base of all tasks: classes, and what a task with one loss of its own adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.flat import FlatModel
from models.metrics import METRICS, classification_metrics, loss_function, metrics_of_all
from models.samples import Samples
from models.training import Loss, Network, predict
from partitions.common.errors import DataError

ENDS = ("score_low", "score_high")
Array = npt.NDArray[np.float64]
Chances = tuple[Array, Array, npt.NDArray[np.intp]]  # probabilities, whether each event happened, the sample of each


def probabilities(outputs: Tensor) -> Array:
    """Return the softmax of logits (n, C), in double precision."""
    return np.asarray(torch.softmax(outputs.detach().double().cpu(), dim=1).numpy())


@dataclass(frozen=True)
class Task:
    """A task; this one is ``multiclass``."""

    name: ClassVar[str] = "multiclass"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    score: ClassVar[str] = "accuracy"
    score_label: ClassVar[str] = "accuracy"  # what the score is called
    secondary_metrics: ClassVar[dict[str, str]] = {
        "macro_f1": "Macro F1",
        "auc": "AUC",
    }  # metrics that the report shows, too
    secondary_text: ClassVar[str] = (  # what the report says of them
        "Accuracy's companions that do not let common classes hide rare ones; mean over silos."
    )
    minimum_outputs: ClassVar[int] = 2  # outputs
    single_label: ClassVar[bool] = True  # whether a sample has one class
    per_pixel: ClassVar[bool] = False  # whether every pixel has an answer

    def check_outputs(self, outputs: int) -> None:
        """Raise DataError where a network cannot have so many."""
        if outputs < self.minimum_outputs:
            raise DataError(f"a classifier needs at least {self.minimum_outputs} classes, not {outputs}")

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
        if model.backend is not None:
            return model.backend.evaluate(self, samples)
        return self.own_evaluate(model, samples)

    def own_evaluate(self, model: Network, samples: Samples) -> dict[str, float]:
        """:meth:`evaluate` of this model by itself."""
        return self.measure(predict(model, samples), samples.labels())

    def chances(self, outputs: Tensor, y: Tensor) -> Chances | None:
        """Return probabilities, events and their samples (events,), for calibration; None where there are none.

        Of two classes the event is class 1. Of more it is that the predicted class is right, so that the calibration is
        that of the model's confidence (Guo et al., ICML 2017).
        """
        p, labels = probabilities(outputs), y.detach().long().cpu().numpy()
        if p.shape[1] == 2:
            return p[:, 1], (labels == 1).astype(np.float64), np.arange(len(p))
        return p.max(1), (p.argmax(1) == labels).astype(np.float64), np.arange(len(p))

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return what a network's outputs (n, C, ...) stand for: probabilities of classes."""
        return torch.softmax(outputs, dim=1)

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        """Return what ``predict`` writes: the columns' names, and a row for each sample."""
        p = self.predictions(outputs)
        rows = [[label, *row] for label, row in zip(p.argmax(1).tolist(), p.tolist(), strict=True)]
        return ["label", *(f"p_{c}" for c in range(p.shape[1]))], rows


@dataclass(frozen=True)
class SingleLossTask(Task):
    """A task with one loss."""

    single_label: ClassVar[bool] = False
    minimum_outputs: ClassVar[int] = 1

    def measure_all(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[dict[str, float]]:
        return [self.measure(o, y) for o, y in zip(outputs, labels, strict=True)]

    def chances(self, outputs: Tensor, y: Tensor) -> Chances | None:
        return None

    def predictions(self, outputs: Tensor) -> Tensor:
        raise NotImplementedError

    def check_outputs(self, outputs: int) -> None:
        if outputs < self.minimum_outputs:
            raise DataError(f"{self.name} needs at least {self.minimum_outputs} outputs, not {outputs}")

    def loss(self, name: str, gamma: float) -> Loss:
        if name != "cross-entropy":
            raise DataError(f"loss = {name}: {self.name} has one loss of its own; leave loss as it is")
        return self.own_loss

    @staticmethod
    def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError
