"""Several findings per sample, each present, absent or unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.intervals import areas, of_area
from models.tasks.base import ENDS, Chances, SingleLossTask


def binary_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the binary cross-entropy of outputs (b, L) as logits and y (b, L), averaged over all known labels."""
    known = (y >= 0).float()
    each = F.binary_cross_entropy_with_logits(outputs, y.clamp(min=0), reduction="none")
    return (each * known).sum() / known.sum().clamp(min=1)


@dataclass(frozen=True)
class Multilabel(SingleLossTask):
    """Several findings per sample. The score is not accuracy: with fourteen rare findings, "always no" gets 95 %."""

    name = "multilabel"
    metrics = ("loss", "auc", "accuracy", "macro_f1", *ENDS)
    score = "auc"
    score_label = "AUC"
    column = "p"
    secondary_metrics: ClassVar[dict[str, str]] = {
        "accuracy": "Accuracy",
        "macro_f1": "Macro F1",
    }
    secondary_text = (
        "At a probability of one half, mean over findings and silos. Of rare findings, always saying no is very "
        "accurate."
    )
    own_loss = staticmethod(binary_loss)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of ``metrics``.

        * ``auc``: mean over the findings that some samples have and some have not. Where all findings are such, it is
          MedMNIST's official one.
        * ``accuracy``: mean over findings, at probability 0.5, as in MedMNIST.
        * ``macro_f1``: mean over the findings that occur among labels or predictions.
        """
        if not len(y):
            return dict.fromkeys(self.metrics, math.nan)
        logits = outputs.detach().double().cpu()
        labels = y.double().cpu()
        known = (labels >= 0).numpy()
        truth = (labels == 1).numpy()
        predicted = (logits > 0).numpy()
        areas_of, effects, counts, few = [], [], [], 0.0
        scores = logits.numpy()
        for k in range(labels.shape[1]):
            rows = known[:, k]
            area, effect, hidden = areas(scores[rows, k], truth[rows, k])
            if not math.isnan(area):
                areas_of.append(area)
                few += hidden
                effects.append(np.zeros(len(labels)))
                effects[-1][rows] = effect
                counts.append((int(truth[rows, k].sum()), int((~truth[rows, k]).sum())))
        area = float(np.mean(areas_of)) if areas_of and np.isfinite(scores).all() else math.nan
        variance = 0.0
        if effects:
            variance = float((np.mean(effects, axis=0) ** 2).sum()) + few / len(effects) ** 2
        ends = of_area(area, variance, *min(counts, key=min, default=(1, 1)))
        right = [
            float((predicted == truth)[known[:, k], k].mean())
            for k in range(labels.shape[1])
            if known[:, k].any()
        ]
        hits = (truth & predicted & known).sum(0)
        all_ = (truth & known).sum(0) + (predicted & known).sum(0)
        occur = all_ > 0
        return {
            "loss": float(binary_loss(logits, labels)),
            "auc": area,
            "accuracy": float(np.mean(right)) if right else math.nan,
            "macro_f1": float((2 * hits[occur] / all_[occur]).mean())
            if occur.any()
            else math.nan,
            **dict(zip(ENDS, ends, strict=True)),
        }

    def chances(self, outputs: Tensor, y: Tensor) -> Chances | None:
        """Return :meth:`Task.chances`, with one event for every known label of every sample."""
        p = torch.sigmoid(outputs.detach().double()).cpu().numpy()
        labels = y.detach().cpu().numpy()
        known = labels >= 0
        return p[known], (labels[known] > 0).astype(np.float64), np.nonzero(known)[0]

    def predictions(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)
