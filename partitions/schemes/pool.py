"""Pool of samples that every partition procedure works on, and the steps they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partitions.splits import Array

# One silo's samples before validation is taken: (training indices, test indices).
Parts = tuple[Array, Array]


@dataclass(frozen=True)
class Pool:
    """Labels of a whole data set, train followed by test, and the one generator that a procedure draws from.

    ``labels``: int64 (n,), 0 where samples have no class; the first ``n_train`` of them belong to the data set's own
    training file.
    """

    dataset: str
    labels: Array
    n_train: int
    classes: int
    silos: int
    rng: np.random.Generator
    groups: Mapping[str, Array] | None = None
    own_test: bool = False  # whether those keep the data set's own division into train and test

    def of_class(self, label: int) -> Array:
        """Indices of all samples of a class, shuffled."""
        return self.rng.permutation(np.flatnonzero(self.labels == label))

    def train_of_class(self, label: int) -> Array:
        """Indices of a class's training samples, shuffled."""
        return self.rng.permutation(np.flatnonzero(self.labels[: self.n_train] == label))

    def test_of_class(self, label: int) -> Array:
        """Indices of a class's test samples, shuffled."""
        return self.rng.permutation(np.flatnonzero(self.labels[self.n_train :] == label) + self.n_train)


def gather(pieces: list[Array]) -> Array:
    """Concatenate index arrays (an empty list gives an empty array)."""
    return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)


def share_of(count: int, share: float) -> int:
    """A share of ``count`` samples, rounded up to whole samples, as scikit-learn's split and APPLE do."""
    return math.ceil(round(count * share, 9))


def hold_out(indices: Array, share: float, rng: np.random.Generator) -> Parts:
    """Split at random into (kept, held out), the held-out part being ``share`` of the samples, rounded up.

    At least one sample is kept, and none is held out for a share of 0. A sample that occurs more than once
    goes to one side with all its copies, so that nothing held out is ever trained on.
    """
    samples, copies = np.unique(indices, return_inverse=True)
    count = min(share_of(len(samples), share), max(len(samples) - 1, 0))
    held = np.zeros(len(samples), bool)
    held[rng.permutation(len(samples))[:count]] = True
    return indices[~held[copies]], indices[held[copies]]
