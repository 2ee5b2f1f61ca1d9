"""Losses, the metrics of one model on one silo's samples, and the metrics of a group of silos.

Everything is in 0..1 (losses aside). A value that does not exist (no samples, one class only) is ``nan``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from partitions.common.errors import DataError

IGNORED = -100  # the label that PyTorch's losses ignore


# ---- Losses ------------------------------------------------------------------------------------------------


MMD_WIDTHS = (10.0, 15.0, 20.0, 50.0)


def mmd(a: Tensor, b: Tensor, *, of_batch: bool = False) -> Tensor:
    """Return the squared maximum mean discrepancy of two batches of features (b, K), for a sum of Gaussian kernels.

    The kernels are exp(-d² / 2s), with the fixed s of ``MMD_WIDTHS``; ``of_batch``: with 2s = 1/4, 1/2, 1, 2, 4 times
    the mean d² of two different samples of both batches, which has no gradient.
    """
    both, n = torch.cat([a, b]), len(a)
    squares = both.square().sum(1)
    distances = squares.unsqueeze(1) + squares - 2 * both @ both.T
    widths: Sequence[float | Tensor] = MMD_WIDTHS
    if of_batch:
        mean = distances.detach().sum() / (4 * n * n - 2 * n) + 1e-8
        widths = [mean * share / 2 for share in (0.25, 0.5, 1, 2, 4)]
    kernel = torch.stack([(-distances / (2 * width)).exp() for width in widths]).sum(0)
    return (kernel[:n, :n] + kernel[n:, n:] - kernel[:n, n:] - kernel[n:, :n]).mean()


def loss_function(
    name: str, gamma: float = 1.0, smoothing: float = 0.0, weights: Tensor | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the training loss as a function of logits (b, C) and labels (b,), averaged over the batch.

    * "cross-entropy": mean of -log p_y, with p the softmax of the logits; ``smoothing`` is torch's label_smoothing,
      ``weights`` (C,) its weight.
    * "focal": mean of -(1 - p_y)^gamma log p_y (Lin et al., ICCV 2017, equation 4); gamma = 0 is the
      cross-entropy. PLayer-FL's code has a different "focal" loss, with terms for the wrong classes and constant
      class weights; its paper does not give it.

    Samples labelled -100 (PyTorch's ``ignore_index``) are ignored, so that batches can be padded with them.

    The settings have no other name, and no gamma below 0. Raises DataError for what only the cross-entropy has.
    """
    if smoothing and name != "cross-entropy":
        raise DataError(
            f"label-smoothing = {smoothing:g}: loss = cross-entropy has it, {name} has not"
        )

    def focal(logits: Tensor, y: Tensor) -> Tensor:
        log_p = -F.cross_entropy(logits, y, reduction="none")
        # Kept above zero: for gamma < 1 the power has an infinite derivative there, and the gradient would be nan.
        missing = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny)
        return -(missing**gamma * log_p).sum() / (y != IGNORED).sum()

    if smoothing or weights is not None:
        return partial(F.cross_entropy, weight=weights, label_smoothing=smoothing)
    return F.cross_entropy if name == "cross-entropy" or gamma == 0 else focal


METRICS = ("loss", "accuracy", "balanced_accuracy", "macro_f1", "weighted_f1", "auc")
LOSSES = ("loss", "mae", "rmse")  # less is better
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


# ---- One model, one silo -----------------------------------------------------------------------------------


def classification_metrics(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Return metrics of logits (n, C) against labels (n,) in 0..C-1; all ``nan`` where n = 0.

    * ``loss``: mean cross-entropy.
    * ``accuracy``: share of samples whose largest logit is the label's (the lower class among equal ones).
    * ``balanced_accuracy``: unweighted mean, over the classes that occur among the labels, of the share of their
      samples that are recognised.
    * ``weighted_f1``: mean of the F1 of every class, weighted by its labels.
    * ``macro_f1``: unweighted mean of the F1 of every class that occurs among the labels or the predictions
      (scikit-learn's macro average with zero_division=0).
    * ``auc``: unweighted mean, over the classes that occur among the labels, of the area under the ROC curve
      of that class against the rest, scored by its softmax probability; equal scores count half. With C = 2
      it is the binary AUC. ``nan`` where only one class occurs, and where a logit is not finite.

    Raises DataError where a label is not in 0..C-1.
    """
    n, classes = logits.shape
    if n == 0:
        return dict.fromkeys(METRICS, math.nan)
    scores = logits.detach().double().cpu()
    labels = y.detach().long().cpu()
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        raise DataError(f"labels must lie in 0..{classes - 1}, found {lowest}..{highest}")
    log_p = F.log_softmax(scores, dim=1)
    predicted = scores.argmax(1)
    # Samples, predictions and hits of each class.
    counts, guesses, right = (
        torch.bincount(values, minlength=classes)
        for values in (labels, predicted, labels[predicted == labels])
    )
    # F1 = 2 TP / (2 TP + FP + FN), and the denominator is the class's labels plus its predictions.
    occurrences = counts + guesses
    f1 = 2.0 * right.double() / occurrences.clamp(min=1)
    return {
        "loss": float(F.nll_loss(log_p, labels)),
        "accuracy": int(right.sum()) / n,
        "balanced_accuracy": float((right.double() / counts)[counts > 0].mean()),
        "macro_f1": float(f1[occurrences > 0].mean()),
        "weighted_f1": float((f1 * counts).sum() / n),
        "auc": _one_vs_rest_auc(log_p.exp().numpy(), labels.numpy(), counts.numpy()),
    }


def _one_vs_rest_auc(p: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> float:
    """Return the mean over classes of P(score of a positive > score of a negative), equal scores counting half.

    Each of the k positives is compared with all n scores of its class, twice: smaller, and smaller or equal. Pairs of
    positives add k² to these counts, whatever their scores, and are subtracted.
    """
    present = np.flatnonzero(counts)
    if len(present) < 2 or not np.isfinite(p).all():
        return math.nan
    n, stops = len(labels), counts.cumsum()
    scores = p.T.copy()
    scores.sort()
    # The positives' scores, class by class
    of_label = p[np.arange(n), labels][labels.argsort(kind="stable")]
    areas = []
    for label in (present[1:] if p.shape[1] == 2 else present).tolist():
        k = int(counts[label])
        # Sorted needles search several times faster
        positives = np.sort(of_label[stops[label] - k : stops[label]])
        below = scores[label].searchsorted(positives, side="left").sum()
        not_above = scores[label].searchsorted(positives, side="right").sum()
        areas.append((int(below) + int(not_above) - k * k) / (2 * (n - k) * k))
    return float(np.mean(areas))


# ---- A group of silos, a group of methods ------------------------------------------------------------------


def fairness_variance(values: Sequence[float]) -> float:
    """Return the population variance of the silos' metric; smaller is fairer (PLayer-FL, "fairness").

    (1 / C) sum_c (P_c - mean P)^2. Silos whose value is ``nan`` are left out; ``nan`` where none is left.
    """
    known = [value for value in values if not math.isnan(value)]
    return float(np.var(known)) if known else math.nan


def incentivised_rate(
    personal: Sequence[float], local: Sequence[float], fedavg: Sequence[float]
) -> float:
    """Return the share of silos, in 0..1, with a better value than by training alone and than by FedAvg.

    #{c: P_c > max(S_c, G_c)} / C, strictly (PLayer-FL, "incentivised participation rate"). The three
    sequences list the same silos in the same order. Silos that lack one of the values (``nan``) are left out;
    ``nan`` where none is left. Raises DataError where the lengths differ.
    """
    if not len(personal) == len(local) == len(fedavg):
        raise DataError(
            f"not the same silos: {len(personal)}, {len(local)} and {len(fedavg)} values"
        )
    rows = np.array([personal, local, fedavg], dtype=float)
    alone, *others = rows[:, ~np.isnan(rows).any(axis=0)]
    return float((alone > np.maximum(*others)).mean()) if alone.size else math.nan


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval for a share of ``correct`` out of ``n`` samples (Wilson, JASA 1927).

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z the normal quantile of 0.975: at 95 %.
    Stays within 0..1 and is not empty at p = 0 or 1, unlike p +- z sqrt(p(1-p)/n). ``nan`` twice where n = 0.
    Raises DataError where not 0 <= correct <= n.
    """
    if not 0 <= correct <= n:
        raise DataError(f"{correct} correct out of {n} is impossible")
    if n == 0:
        return math.nan, math.nan
    z = NormalDist().inv_cdf(0.975)
    p = correct / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # Rounding can exceed the ends by one unit in the last place.
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def mean_rank(table: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the average rank of each method over data sets (or silos); 1 is best, ties share their mean rank.

    ``table[method]`` lists the method's values, one per data set, the same data sets for all. A data set
    where any method has no value (``nan``) is left out for all, so that ranks stay comparable; ``nan`` where
    none is left. Raises DataError where the lists differ in length.
    """
    lengths = {len(values) for values in table.values()}
    if len(lengths) > 1:
        raise DataError(
            f"every method needs one value per data set, got lists of {sorted(lengths)} values"
        )
    values = np.array(list(table.values()), dtype=float).reshape(len(table), *lengths)
    values = values[..., ~np.isnan(values).any(axis=0)]
    if values.size == 0:
        return dict.fromkeys(table, math.nan)
    # Rank = 1 + number of better values + half the number of other equal values.
    better = (values[None] > values[:, None]).sum(axis=1)
    equal = (values[None] == values[:, None]).sum(axis=1) - 1
    ranks = (1 + better + equal / 2).mean(axis=1)
    return {method: float(rank) for method, rank in zip(table, ranks, strict=True)}
