"""Standardisation of tables: each column by a mean and a standard deviation, a silo's own or those of all silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Columns = tuple[float, ...]  # one number per column
Array = npt.NDArray[Any]


def column_sums(x: Array) -> tuple[list[float], list[float]]:
    """Return sum and sum of squares of each column of a table (n, d), for the statistics over all silos."""
    # numpy sums rows pairwise, which is more exact, but not columns
    columns = np.ascontiguousarray(x.T, "float64")
    return columns.sum(1).tolist(), (columns * columns).sum(1).tolist()


def rounded_sums(x: Array, records: int = 1) -> tuple[list[float], list[float]]:
    """Return :func:`column_sums`, rounded so that one patient more or less is not visible in them.

    Mean and variance of each column are rounded to a grid whose step is a power of two. The step is at least four times
    what one patient can add: kR / n to the mean, kR² / n to the variance. R is the largest distance of a row from the
    mean; k, ``records``, the most rows of one patient. A variance is at least one step, so that a column in which one
    patient differs equals a column in which none does.
    """
    columns = np.ascontiguousarray(x.T, "float64")
    n = columns.shape[1]
    mean = columns.mean(1)
    reach = np.abs(columns - mean[:, None]).max(1)
    reach = np.where(reach > 1e-9 * np.abs(mean), reach, np.where(mean == 0, 1.0, np.abs(mean)))
    steps = [2.0 ** np.ceil(np.log2(4 * records * most / n)) for most in (reach, reach * reach)]
    mean = np.rint(mean / steps[0]) * steps[0]
    variance = np.rint(columns.var(1) / steps[1]) * steps[1]
    variance = np.maximum(variance, steps[1])
    return (n * mean).tolist(), (n * (variance + mean * mean)).tolist()


def agreed_statistics(
    summaries: Sequence[Mapping[str, Any]], samples: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Return mean and standard deviation of each column over the training parts of the silos that sent sums.

    A silo that sent none is standardised by its own statistics (:func:`standardisation`). ``samples``: sample counts by
    silo name that replace those of the summaries.
    """
    summaries = [s for s in summaries if "sum" in s]
    if not summaries:
        return {}
    counts = [(samples or {}).get(s["name"], s["n_train"]) for s in summaries]
    shares = torch.tensor(
        [[k / s["n_train"]] for k, s in zip(counts, summaries, strict=True)],
        dtype=torch.float64,
    )
    n = sum(counts)
    total, square = (
        (torch.tensor([s[key] for s in summaries], dtype=torch.float64) * shares).sum(0) / n
        for key in ("sum", "square_sum")
    )
    std = deviation(square - total * total, square)
    return {"mean": total.tolist(), "std": std.tolist()}


def standardisation(
    x: Array, normalization: str, agreed: Mapping[str, Any]
) -> tuple[Columns, Columns]:
    """Return mean and standard deviation that standardise a silo's inputs ``x`` (n, ...); empty: not standardised.

    ``agreed`` holds the ``mean`` and ``std`` of all silos, if there are any; ``normalization = "silo"`` uses the
    silo's own instead.
    """
    if x.ndim == 2 and normalization == "silo":
        values = torch.from_numpy(x.copy())
        return tuple(values.mean(0).tolist()), tuple(
            deviation(values.var(0, correction=0), values.square().mean(0)).tolist()
        )
    return tuple(agreed.get("mean", ())), tuple(agreed.get("std", ()))


def deviation(variance: Tensor, square: Tensor) -> Tensor:
    """Return the standard deviation; 1 for a constant column, whose variance is a rounding error of ``square``."""
    changes = variance > 1e-13 * square
    return torch.where(changes, variance, torch.ones_like(variance)).sqrt()
