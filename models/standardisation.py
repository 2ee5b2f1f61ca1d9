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
    """Sum and sum of squares of each column of a table (n, d), from which all silos' statistics are agreed."""
    columns = np.ascontiguousarray(x.T, "float64")  # numpy adds up rows pairwise, columns one by one
    return columns.sum(1).tolist(), (columns * columns).sum(1).tolist()


def rounded_sums(x: Array, records: int = 1) -> tuple[list[float], list[float]]:
    """:func:`column_sums`, so rounded that they do not tell of one patient more or less.

    Mean and variance of each column are put on a grid whose step, a power of two, is at least four times what any one
    patient can add to them, kR / n and kR² / n, with R the largest distance of a row from the mean and k, ``records``,
    the most rows of one patient; a variance is one step at least, so that a column in which one patient differs looks
    like a column in which none does.
    """
    columns = np.ascontiguousarray(x.T, "float64")
    n = columns.shape[1]
    mean = columns.mean(1)
    reach = np.abs(columns - mean[:, None]).max(1)
    reach = np.where(reach > 1e-9 * np.abs(mean), reach, np.where(mean == 0, 1.0, np.abs(mean)))
    steps = [2.0 ** np.ceil(np.log2(4 * records * most / n)) for most in (reach, reach * reach)]
    mean, variance = np.rint(mean / steps[0]) * steps[0], np.rint(columns.var(1) / steps[1]) * steps[1]
    variance = np.maximum(variance, steps[1])
    return (n * mean).tolist(), (n * (variance + mean * mean)).tolist()


def agreed_statistics(
    summaries: Sequence[Mapping[str, Any]], samples: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Mean and standard deviation of each column over silos' training parts, from the sums of those that give any.

    A silo that gives none is standardised by its own statistics (:func:`standardisation`). ``samples``: how many a
    silo, by its name, counts as, where that is not what its summary says.
    """
    summaries = [s for s in summaries if "sum" in s]
    if not summaries:
        return {}
    counts = [(samples or {}).get(s["name"], s["n_train"]) for s in summaries]
    shares = torch.tensor([[k / s["n_train"]] for k, s in zip(counts, summaries, strict=True)], dtype=torch.float64)
    n = sum(counts)
    total, square = (
        (torch.tensor([s[key] for s in summaries], dtype=torch.float64) * shares).sum(0) / n
        for key in ("sum", "square_sum")
    )
    std = _spread(square - total * total, square)
    return {"mean": total.tolist(), "std": std.tolist()}


def standardisation(x: Array, normalization: str, agreed: Mapping[str, Any]) -> tuple[Columns, Columns]:
    """Mean and standard deviation by which a silo's inputs ``x`` (n, ...) are standardised; empty: they are not.

    ``agreed`` holds the ``mean`` and ``std`` of all silos, if there are any; ``normalization = "silo"`` takes the
    silo's own instead.
    """
    if x.ndim == 2 and normalization == "silo":
        own = torch.from_numpy(x.copy())
        return tuple(own.mean(0).tolist()), tuple(_spread(own.var(0, correction=0), own.square().mean(0)).tolist())
    return tuple(agreed.get("mean", ())), tuple(agreed.get("std", ()))


def _spread(variance: Tensor, square: Tensor) -> Tensor:
    """Standard deviation; 1 for a column that never changes, whose variance is rounding of its mean ``square``."""
    changes = variance > 1e-13 * square
    return torch.where(changes, variance, torch.ones_like(variance)).sqrt()
