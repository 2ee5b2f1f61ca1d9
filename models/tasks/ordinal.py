"""Ordinal grades: trained and predicted as classes, with metrics of their distance in addition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from models.metrics import METRICS
from models.tasks.base import Task


@dataclass(frozen=True)
class Ordinal(Task):
    """Grades, trained and predicted as classes; two more metrics measure how far off a prediction is."""

    name = "ordinal"
    metrics = (*METRICS, "mae", "kappa")
    secondary_metrics: ClassVar[dict[str, str]] = {"mae": "MAE", "kappa": "Quadratic κ"}
    secondary_text = (
        "How many grades a prediction is off on average, and Cohen's κ with squared distances; "
        "mean over silos."
    )

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of classes, ``mae`` and ``kappa``.

        ``mae`` is the mean distance in grades. ``kappa`` is Cohen's, with squared distances as weights (nan where
        labels and predictions are all of one grade).
        """
        metrics = super().measure(outputs, y)
        grades = outputs.detach().argmax(1).double().cpu()
        truth = y.double().cpu()
        if not len(truth):
            return metrics | {"mae": math.nan, "kappa": math.nan}
        # The mean of (a_i - b_j)^2 over all pairs
        chance = (
            grades.square().mean() + truth.square().mean() - 2 * grades.mean() * truth.mean()
        )
        observed = (grades - truth).square().mean()
        kappa = float(1 - observed / chance) if chance > 1e-12 else math.nan
        return metrics | {"mae": float((grades - truth).abs().mean()), "kappa": kappa}
