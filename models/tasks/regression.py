"""One or several numbers per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.intervals import UNKNOWN, of_mean
from models.tasks.base import ENDS, SingleLossTask
from partitions.common.errors import DataError


def square_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the squared difference, averaged over samples and outputs (b, k); labels are standardised."""
    if outputs.shape != y.shape:
        raise DataError(f"outputs {tuple(outputs.shape)} for labels {tuple(y.shape)}")
    return (outputs - y).square().mean()


@dataclass(frozen=True)
class Regression(SingleLossTask):
    """Measurements, trained as (y - mean) / std, with statistics agreed like those of tables' columns."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    name = "regression"
    metrics = ("loss", "r2", "mae", "rmse", *ENDS)
    score = "r2"
    score_label = "R²"
    secondary_metrics: ClassVar[dict[str, str]] = {"mae": "MAE", "rmse": "RMSE"}
    secondary_text = "Mean absolute error and root of the mean squared one, in the labels' own units; mean over silos."
    own_loss = staticmethod(square_loss)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of ``metrics``.

        * ``r2``: 1 - sum e^2 / sum (y - mean y)^2, mean over the outputs whose labels vary. Its interval is the normal
          one from its influence function.
        * ``mae`` and ``rmse``: in the labels' own units, mean over outputs.
        """
        if not len(y):
            return dict.fromkeys(self.metrics, math.nan)
        predicted = outputs.detach().double().cpu()
        truth = y.double().cpu()
        error = predicted - truth
        squares = error.square()
        spread = (truth - truth.mean(0)).square()
        varies = spread.mean(0) > 1e-12
        r2, ends = math.nan, UNKNOWN
        if bool(varies.any()):
            a, b = squares.mean(0)[varies], spread.mean(0)[varies]
            r2 = float((1 - a / b).mean())
            effect = (a / b**2 * spread[:, varies] - squares[:, varies] / b).mean(1)
            ends = (
                of_mean(r2, float(effect.var()) / len(y), most=1.0) if len(y) > 1 else UNKNOWN
            )
        units = torch.tensor(self.std or (1.0,), dtype=torch.float64)
        return {
            "loss": float(squares.mean()),
            "r2": r2,
            "mae": float((error.abs() * units).mean()),
            "rmse": float(((squares * units**2).mean(0).sqrt()).mean()),
            **dict(zip(ENDS, ends, strict=True)),
        }

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs * torch.tensor(self.std or (1.0,)) + torch.tensor(self.mean or (0.0,))
