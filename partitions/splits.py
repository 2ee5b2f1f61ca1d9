"""The shapes in which samples travel: one split, one silo, one whole data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Samples of one kind (train, val or test), preloaded.

    ``x``: pictures uint8 or float32 (n, h, w, c), volumes (n, d, h, w, c), or a table float32 (n, columns); ``y``:
    labels (n, ...) as ``labels.py`` has them, classes int64 (n,).
    """

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class SiloData:
    """All samples of one silo. ``val`` may be empty, ``train`` and ``test`` are not.

    ``classes``: how many outputs its task needs: classes, findings, measurements.
    """

    train: Split
    val: Split
    test: Split
    classes: int
    task: str = "multiclass"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model sees it: (c, h, w) of pictures, (c, d, h, w) of volumes, (d,) of tables."""
        return input_shape(self.train.x)


@dataclass(frozen=True)
class Dataset:
    """A whole data set before partitioning; its arrays are read-only.

    ``groups`` holds the silos a data set comes with (name -> row indices into train followed by test), or None;
    ``own_test``: whether these keep the data set's own division into train and test.
    """

    name: str
    train: Split
    test: Split
    classes: int
    groups: dict[str, Array] | None = None
    task: str = "multiclass"
    own_test: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model sees it: (c, h, w) of pictures, (c, d, h, w) of volumes, (d,) of tables."""
        return input_shape(self.train.x)

    @property
    def labels(self) -> Array:
        """Labels of the pooled samples, train followed by test, (n_train + n_test, ...)."""
        return np.concatenate([self.train.y, self.test.y])


def input_shape(x: Array) -> tuple[int, ...]:
    """(n, h, w, c) -> (c, h, w); (n, d, h, w, c) -> (c, d, h, w); (n, d) -> (d,)."""
    return (x.shape[-1], *x.shape[1:-1]) if x.ndim > 2 else tuple(x.shape[1:])


def take(dataset: Dataset, indices: Array) -> Split:
    """Copy the samples with these indices into train followed by test, in the order given."""
    n_train = len(dataset.train)
    from_train = indices < n_train
    x = np.empty((len(indices), *dataset.train.x.shape[1:]), dataset.train.x.dtype)
    y = np.empty((len(indices), *dataset.train.y.shape[1:]), dataset.train.y.dtype)
    for split, rows, offset in ((dataset.train, from_train, 0), (dataset.test, ~from_train, n_train)):
        x[rows] = split.x[indices[rows] - offset]
        y[rows] = split.y[indices[rows] - offset]
    return Split(x, y)
