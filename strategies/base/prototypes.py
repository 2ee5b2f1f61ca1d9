"""Class prototypes: the mean features of each class, which silos send and the server averages.

A table (C, K + 1), sent as one vector, has a row per class: the K numbers of its prototype, and one more. In a silo's
table that is the class's share of the silo's samples (or just 1), in the server's it is 1; 0 marks a class without a
prototype, whose numbers are 0 too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.layout import Layout
from partitions.common.errors import DataError

PROTOTYPES = "prototypes"


def table_size(layout: Layout) -> int:
    """Return C (K + 1)."""
    return layout.classes * (layout.features + 1)


def members(y: Tensor, classes: int) -> Tensor:
    """Return (n, C): 1 if a sample is of the class. (``one_hot`` would copy the labels from the device.)"""
    return (y[:, None] == torch.arange(classes, device=y.device)).float()


def class_sums(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return per class the sum of the features (C, K) and the number of samples (C,)."""
    mask = members(y, classes)
    return mask.T @ z, mask.sum(0)


def means_of(sums: Tensor, counts: Tensor) -> Tensor:
    """Return mean features (C, K); 0 for a class without samples."""
    return sums / counts.clamp_min(1)[:, None]


def make_table(prototypes: Tensor, marks: Tensor) -> Tensor:
    return torch.cat([prototypes * (marks > 0)[:, None], marks[:, None]], 1).flatten()


def read_table(table: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return prototypes (C, K) and marks (C,)."""
    rows = table.view(classes, -1)
    return rows[:, :-1], rows[:, -1]


def check_table(table: Tensor, classes: int) -> None:
    """Raise DataError if a silo's marks are not shares."""
    marks = read_table(table, classes)[1]
    if bool(((marks < 0) | (marks > 1)).any()):
        raise DataError("the shares of its classes are not between 0 and 1")


def average(
    tables: Sequence[Tensor],
    weights: Sequence[float],
    classes: int,
    before: Tensor | None,
    rule: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """Return the server's table: per class the mean over the silos that have it, weighted by mark times weight.

    ``rule`` may replace that mean. A class that no silo has keeps its prototype of ``before``.
    """
    total, mass = 0.0 * read_table(tables[0], classes)[0], 0.0 * read_table(tables[0], classes)[1]
    for table, weight in zip(tables, weights, strict=True):
        prototypes, marks = read_table(table, classes)
        total += prototypes * (marks * weight)[:, None]
        mass += marks * weight
    known = mass > 0
    prototypes = total / torch.where(known, mass, 1.0)[:, None]
    for k in range(classes) if rule is not None else ():
        held = [rows[k] for rows, marks in (read_table(table, classes) for table in tables) if marks[k] > 0]
        if rule is not None and held:
            prototypes[k] = rule(held)
    mean = make_table(prototypes, known.float())
    if before is None:
        return mean
    return torch.where(known[:, None], mean.view(classes, -1), before.view(classes, -1)).flatten()
