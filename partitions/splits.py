"""Containers of samples: one split, one silo, one whole data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from partitions.common.names import Names
from partitions.schema import NO_SCHEMA, Schema
from partitions.stored import OnDisk, concatenate, fits, in_batches, in_memory, rows_in

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]  # by their names
Shape = tuple[int, ...]
SPLITS = ("train", "val", "test")
VOID = 255  # the label of an ignored pixel of a mask


@dataclass(frozen=True)
class Split:
    """Samples of one part (train, val or test).

    * ``x``: pictures (n, h, w, c), volumes (n, d, h, w, c), signals (n, t, c), texts (n, tokens), a table
      (n, columns), or several inputs: a structured array (n,) with a field for each. ``inputs.py`` has their types. An
      array, or samples that stay on disk (``stored.py``).
    * ``y``: labels (n, ...) as in ``labels.py``, classes int64 (n,); masks may stay on disk.
    * ``patient``: int64 (n,), equal numbers for samples of one patient, or None (``patients.py``).
    * ``subgroup``: text (n,), or None (``patients.py``).
    """

    x: Any
    y: Any
    patient: Array | None = None
    subgroup: Array | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def units(self) -> Array:
        """The patient of each sample (n,); without patients, each sample has its own number."""
        return np.arange(len(self)) if self.patient is None else self.patient

    @property
    def people(self) -> int:
        """The number of patients; without patients, of samples."""
        return len(self) if self.patient is None else len(np.unique(self.patient))


# Compared by identity, because == of arrays is an array, and caches use it as key
@dataclass(frozen=True, eq=False)
class SiloData:
    """All samples of one silo. ``val`` may be empty, ``train`` and ``test`` are not.

    * ``classes``: the number of outputs for its task: classes, findings, measurements.
    * ``vocabulary``: the number of tokens of its texts.
    * ``schema``: the file's statements on columns and labels.
    * ``recipe``: how the file was made from a csv, as JSON, or ""; it stays in the silo.
    * ``cohort``: the file's name for the people in the data.
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

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """The samples of each of :data:`SPLITS`."""
        return self.train, self.val, self.test

    @cached_property
    def dtype(self) -> str:
        """The number format of the samples."""
        return dtype_of(self.train.x)

    @cached_property
    def input_shape(self) -> tuple[Any, ...]:
        """Shape of one sample as a model sees it (models/shapes.py)."""
        return input_shape(self.train.x, self.vocabulary)

    def measured(self, split: str) -> int:
        """Return how many people a split's losses and metrics are of: those with a label, of findings a known one."""
        part: Split = getattr(self, split)
        if self.task != "multilabel":
            return part.people
        return len(np.unique(part.units[(part.y >= 0).any(1)]))

    def scored(self, split: str) -> int:
        """Return how many people every metric of a split is of: Dice leaves out those without an outline."""
        if self.task != "segmentation":
            return self.measured(split)
        if split not in self._outlined:
            part: Split = getattr(self, split)
            masks = (batch.reshape(len(batch), -1) for batch in in_batches(part.y))
            drawn = [((mask > 0) & (mask != VOID)).any(1) for mask in masks]
            outlined = np.concatenate([np.zeros(0, bool), *drawn])
            self._outlined[split] = len(np.unique(part.units[outlined]))
        return self._outlined[split]

    @cached_property
    def _outlined(self) -> dict[str, int]:
        """By split that was asked for: all its masks are read for it."""
        return {}


@dataclass(frozen=True)
class Dataset:
    """A whole data set before partitioning; its arrays are read-only.

    * ``groups``: the data set's own silos (name -> row indices into train followed by test), or None.
    * ``own_test``: whether these keep the data set's own division into train and test.
    * ``recipe``: as in :class:`SiloData`, or ``recipes``: one for each of ``groups``.
    * ``unlabelled``: that of each of ``groups`` in place of the schema's.
    """

    name: str
    train: Split
    test: Split
    classes: int
    groups: Arrays | None = None
    task: str = "multiclass"
    own_test: bool = False
    vocabulary: int = 0
    schema: Schema = NO_SCHEMA
    recipe: str = ""
    recipes: Mapping[str, str] = field(default_factory=dict)
    unlabelled: Mapping[str, Names] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[Any, ...]:
        """Shape of one sample as a model sees it (models/shapes.py)."""
        return input_shape(self.train.x, self.vocabulary)

    @property
    def labels(self) -> Array:
        """Labels of the pooled samples, train followed by test, (n_train + n_test, ...)."""
        return np.concatenate([self.train.y, self.test.y])


def input_shape(x: Any, vocabulary: int) -> tuple[Any, ...]:
    """Return a sample's shape for models: (n, h, w, c) -> (c, h, w); (n, d) -> (d,).

    Tokens (n, t) -> ("tokens", t, vocabulary); several inputs: a pair of name and shape for each.
    """
    if x.dtype.names:
        return tuple((name, input_shape(x[name], vocabulary)) for name in x.dtype.names)
    if x.dtype == np.int32:
        return ("tokens", x.shape[1], vocabulary)
    return (x.shape[-1], *x.shape[1:-1]) if x.ndim > 2 else tuple(x.shape[1:])


def inputs_of(x: Any) -> dict[str, Any]:
    """Return the array (n, ...) of each input by its name; a single input has the name ``""``."""
    return {name: x[name] for name in x.dtype.names} if x.dtype.names else {"": x}


def is_table(x: Any) -> bool:
    """Return whether an input (n, ...) is a table, whose columns have names."""
    return bool(x.ndim == 2 and x.dtype == np.float32)


def tables_of(x: Any) -> Arrays:
    """Return the inputs that are tables, by name, in memory."""
    return {name: in_memory(part) for name, part in inputs_of(x).items() if is_table(part)}


def dtype_of(x: Any) -> str:
    """Return the number format; for several inputs that of each: ``image uint8, notes int32``."""
    return ", ".join(f"{name} {part.dtype}".strip() for name, part in inputs_of(x).items())


def take(dataset: Dataset, indices: Array) -> Split:
    """Return the samples with these indices into train followed by test, in the order given: copies of arrays."""
    train, test = dataset.train, dataset.test
    x, y = _take(train.x, test.x, indices), _take(train.y, test.y, indices)
    groups = both(train.patient, test.patient), both(train.subgroup, test.subgroup)
    return Split(x, y, *(None if group is None else group[indices] for group in groups))


def _take(train: Any, test: Any, indices: Array) -> Any:
    if isinstance(train, np.ndarray) and isinstance(test, np.ndarray):
        return OnDisk([train, test], train.dtype)[indices]
    return rows_in(concatenate([train, test]), indices)


def both(first: Array | None, second: Array | None) -> Array | None:
    """Concatenate an array of two splits, such as their patients; None where one split has none."""
    return None if first is None or second is None else np.concatenate([first, second])


def load_splits(*splits: Split) -> list[Split]:
    """Return the splits of a data set with their samples in memory, if all of them fit there."""
    if not fits(x for split in splits for x in (split.x, split.y)):
        return [*splits]
    return [replace(split, x=in_memory(split.x), y=in_memory(split.y)) for split in splits]


def unread(dataset: Dataset) -> Dataset:
    """Return a data set whose large mapped inputs stay on disk, so that its silos copy none of them."""
    splits = (dataset.train, dataset.test)
    if fits(split.x for split in splits):
        return dataset
    train, test = (
        replace(split, x=OnDisk([np.asarray(split.x)], split.x.dtype))
        if isinstance(split.x, np.memmap)
        else split
        for split in splits
    )
    return replace(dataset, train=train, test=test)


def join_splits(parts: Sequence[Split]) -> Split:
    """Concatenate the samples of several parts."""
    patient, subgroup = (
        reduce(both, [getattr(part, key) for part in parts]) for key in ("patient", "subgroup")
    )
    x, y = (concatenate([getattr(part, key) for part in parts]) for key in ("x", "y"))
    return Split(x, y, patient, subgroup)
