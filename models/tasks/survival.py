"""Time to an event, with censoring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.intervals import of_pairs
from models.tasks.base import ENDS, SingleLossTask
from partitions.common.errors import DataError


def cox_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return Cox's negative log partial likelihood per event, with Breslow's handling of ties (Cox 1972; Breslow 1974).

    -(1 / D) sum_{i: event} (s_i - log sum_{j: T_j >= T_i} exp s_j), with s = outputs (b, 1) and y (b, 2) = time, event.
    The risk sets are within the batch, so batches of all samples are best. Without an event it is 0, with no gradient.
    In float64: where the order is certain, float32 leaves a gradient of 1e-6, and Adam makes whole steps of it.
    """
    if y.dim() != 2 or y.shape[1] != 2 or outputs.shape != (len(y), 1):
        raise DataError(f"outputs {tuple(outputs.shape)} for times and events {tuple(y.shape)}")
    order = torch.argsort(y[:, 0], descending=True, stable=True)
    s, time, event = outputs[order, 0].double(), y[order, 0], y[order, 1]
    at_risk = torch.logcumsumexp(s, 0)
    # Of those with an equal time
    last = torch.searchsorted(-time.contiguous(), -time.contiguous(), right=True) - 1
    loss = -(event * (s - at_risk[last])).sum() / event.sum().clamp(min=1)
    return loss.to(outputs.dtype)


@dataclass(frozen=True)
class Survival(SingleLossTask):
    """Time until an event, or until the observation ended. The output is a log risk: higher means sooner."""

    name = "survival"
    metrics = ("loss", "c_index", *ENDS)
    score = "c_index"
    score_label = "C-index"
    of_each = False
    own_loss = staticmethod(cox_loss)

    def check_outputs(self, outputs: int) -> None:
        if outputs != 1:
            raise DataError(f"survival has one output, not {outputs}")

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return ``loss``, ``c_index`` (Harrell's concordance) and the ends of its interval.

        ``c_index`` is the share of comparable pairs in which the sample with the earlier event has the higher risk;
        equal risks count half. A pair is comparable where one has the event before the other's time, or at the time
        when the other is censored. nan without such a pair.
        """
        if not len(y):
            return dict.fromkeys(self.metrics, math.nan)
        risks = outputs.detach().double().cpu()
        labels = y.double().cpu()
        concordant, comparable = concordance(
            risks[:, 0].numpy(), labels[:, 0].numpy(), labels[:, 1].numpy() > 0
        )
        share, ends = of_pairs(concordant, comparable)
        return {
            "loss": float(cox_loss(risks, labels)),
            "c_index": share,
            **dict(zip(ENDS, ends, strict=True)),
        }

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs

    def answers(self, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
        return ["risk"], outputs.tolist()


def concordance(
    risk: np.ndarray, time: np.ndarray, event: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each sample (n,) the numbers of concordant and of comparable pairs that it is in."""
    concordant = np.zeros(len(risk))
    comparable = np.zeros(len(risk))
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & ~event)
        agree = np.where(risk[i] > risk, 1.0, np.where(risk[i] == risk, 0.5, 0.0)) * later
        comparable[i] += later.sum()
        concordant[i] += agree.sum()
        comparable += later
        concordant += agree
    return concordant, comparable
