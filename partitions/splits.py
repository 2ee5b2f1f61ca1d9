"""The shapes in which samples travel: one split, one silo, one whole data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from partitions.schema import NO_SCHEMA, Schema

Array = npt.NDArray[Any]

TABLE_SEED = 42  # the train/test split of data sets that come without one
TABLE_TEST = 0.2


@dataclass(frozen=True)
class Split:
    """Samples of one kind (train, val or test), preloaded.

    ``x``: pictures uint8 or float32 (n, h, w, c), volumes (n, d, h, w, c), signals float32 (n, t, c), texts int32
    (n, tokens), a table float32 (n, columns), or several inputs: a structured array (n,) with a field for each.
    ``y``: labels (n, ...) as ``labels.py`` has them, classes int64 (n,).
    ``patient``: int64 (n,), equal numbers for samples of one patient, or None (``patients.py``).
    ``subgroup``: text (n,), or None (``subgroups.py``).
    """

    x: Array
    y: Array
    patient: Array | None = None
    subgroup: Array | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def units(self) -> Array:
        """The patient of each sample (n,); where none is named, each is of another one."""
        return np.arange(len(self)) if self.patient is None else self.patient

    @property
    def people(self) -> int:
        """How many patients there are, or samples where none is named."""
        return len(self) if self.patient is None else len(np.unique(self.patient))


@dataclass(frozen=True, eq=False)  # by identity: arrays have no one answer to ==, and caches go by the data
class SiloData:
    """All samples of one silo. ``val`` may be empty, ``train`` and ``test`` are not.

    ``classes``: how many outputs its task needs: classes, findings, measurements; ``vocabulary``: how many tokens its
    texts may have; ``schema``: what its file states of columns and labels; ``recipe``: how the file was made of a csv,
    as JSON, or "". It stays in the silo. ``cohort``: whose data the file says these are.
    """

    train: Split
    val: Split
    test: Split
    classes: int
    task: str = "multiclass"
    vocabulary: int = 0
    schema: Schema = NO_SCHEMA
    recipe: str = ""
    cohort: str = ""

    @cached_property
    def dtype(self) -> str:
        """The samples' number format."""
        return dtype_of(self.train.x)

    @cached_property
    def input_shape(self) -> tuple[Any, ...]:
        """Shape of one sample as a model sees it (models/shapes.py)."""
        return input_shape(self.train.x, self.vocabulary)


@dataclass(frozen=True)
class Dataset:
    """A whole data set before partitioning; its arrays are read-only.

    ``groups`` holds the silos a data set comes with (name -> row indices into train followed by test), or None;
    ``own_test``: whether these keep the data set's own division into train and test; ``recipe``: as a silo has it, or
    ``recipes``: that of each of ``groups``.
    """

    name: str
    train: Split
    test: Split
    classes: int
    groups: dict[str, Array] | None = None
    task: str = "multiclass"
    own_test: bool = False
    vocabulary: int = 0
    schema: Schema = NO_SCHEMA
    recipe: str = ""
    recipes: Mapping[str, str] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[Any, ...]:
        """Shape of one sample as a model sees it (models/shapes.py)."""
        return input_shape(self.train.x, self.vocabulary)

    @property
    def labels(self) -> Array:
        """Labels of the pooled samples, train followed by test, (n_train + n_test, ...)."""
        return np.concatenate([self.train.y, self.test.y])


def input_shape(x: Array, vocabulary: int = 0) -> tuple[Any, ...]:
    """(n, h, w, c) -> (c, h, w); (n, d) -> (d,); of tokens (n, t) -> ("tokens", t, vocabulary); of several by name."""
    if x.dtype.names:
        return tuple((name, input_shape(x[name], vocabulary)) for name in x.dtype.names)
    if x.dtype.kind == "i":
        return ("tokens", x.shape[1], vocabulary)
    return (x.shape[-1], *x.shape[1:-1]) if x.ndim > 2 else tuple(x.shape[1:])


def inputs_of(x: Array) -> dict[str, Array]:
    """The array (n, ...) of each input by its name; of a single one, which has none, under ``""``."""
    return {name: x[name] for name in x.dtype.names} if x.dtype.names else {"": x}


def dtype_of(x: Array) -> str:
    """The number format; of several inputs each one's: ``image uint8, notes int32``."""
    return ", ".join(f"{name} {own.dtype}".strip() for name, own in inputs_of(x).items())


def together(inputs: Mapping[str, Array]) -> Array:
    """Several inputs of the same samples as one array (n,), whose rows are taken and joined as those of any other.

    They are in the order of their names, so that it makes no difference in which order a hospital's file has them.
    """
    n = len(next(iter(inputs.values())))
    joined = np.empty(n, [(name, inputs[name].dtype, inputs[name].shape[1:]) for name in sorted(inputs)])
    for name, x in inputs.items():
        joined[name] = x
    return joined


def take(dataset: Dataset, indices: Array) -> Split:
    """Copy the samples with these indices into train followed by test, in the order given."""
    n_train = len(dataset.train)
    from_train = indices < n_train
    x = np.empty((len(indices), *dataset.train.x.shape[1:]), dataset.train.x.dtype)
    y = np.empty((len(indices), *dataset.train.y.shape[1:]), dataset.train.y.dtype)
    for split, rows, offset in ((dataset.train, from_train, 0), (dataset.test, ~from_train, n_train)):
        x[rows] = split.x[indices[rows] - offset]
        y[rows] = split.y[indices[rows] - offset]
    groups = (both(getattr(dataset.train, key), getattr(dataset.test, key)) for key in ("patient", "subgroup"))
    return Split(x, y, *(None if group is None else group[indices] for group in groups))


def both(first: Array | None, second: Array | None) -> Array | None:
    """What two splits say of their samples, one behind the other; None where one says nothing."""
    return None if first is None or second is None else np.concatenate([first, second])


def split_table(
    name: str, x: Array, y: Array, classes: int, groups: Array | None = None, vocabulary: int = 0
) -> Dataset:
    """Samples without parts of their own, split 80 / 20 into train and test, class by class, always in the same way.

    ``groups``: text (n,), the silo each row comes from, if it comes from one; ``vocabulary``: of texts.
    """
    rng = np.random.default_rng(TABLE_SEED)
    in_test = np.zeros(len(y), bool)
    for label in range(classes):
        rows = rng.permutation(np.flatnonzero(y == label))
        in_test[rows[: round(TABLE_TEST * len(rows))]] = True
    own = None
    if groups is not None:
        pooled = np.concatenate([groups[~in_test], groups[in_test]])
        own = {str(group): np.flatnonzero(pooled == group) for group in dict.fromkeys(groups)}
    train, test = (Split(x[part], y[part]) for part in (~in_test, in_test))
    return Dataset(name, train, test, classes, own, vocabulary=vocabulary)
