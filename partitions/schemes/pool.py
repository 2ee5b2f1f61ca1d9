"""The pool of samples that partition procedures divide, and their common steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from partitions.splits import Array, Arrays

# One silo's samples before validation is taken: (training indices, test indices).
Parts = tuple[Array, Array]


@dataclass(frozen=True)
class Pool:
    """Labels of a whole data set, train followed by test, and the only generator that a procedure draws from.

    ``labels``: int64 (n,), 0 where samples have no class; the first ``n_train`` are of the data set's training file.
    """

    dataset: str
    classes: int
    silos: int
    rng: np.random.Generator
    labels: Array
    n_train: int
    groups: Arrays | None
    # Whether groups keep the data set's own division into train and test
    own_test: bool

    def of_class(self, label: int) -> Array:
        """Return the indices of all samples of a class, shuffled."""
        return self.rng.permutation(np.flatnonzero(self.labels == label))

    def train_of_class(self, label: int) -> Array:
        """Return the indices of a class's training samples, shuffled."""
        return self.rng.permutation(np.flatnonzero(self.labels[: self.n_train] == label))

    def test_of_class(self, label: int) -> Array:
        """Return the indices of a class's test samples, shuffled."""
        return self.rng.permutation(
            np.flatnonzero(self.labels[self.n_train :] == label) + self.n_train
        )


def gather(pieces: list[Array]) -> Array:
    """Concatenate index arrays (an empty list gives an empty array)."""
    return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)


def share_of(count: int, share: float) -> int:
    """Return a share of ``count`` samples, rounded up to whole samples, as scikit-learn's split and APPLE do."""
    return math.ceil(round(count * share, 9))


def hold_out(indices: Array, share: float, rng: np.random.Generator) -> Parts:
    """Split at random into (kept, held out), with ``share`` of the samples, rounded up, held out.

    At least one sample is kept; for a share of 0 none is held out. All copies of a sample go to one side, so that no
    held-out sample is trained on.
    """
    samples, copies = np.unique(indices, return_inverse=True)
    count = min(share_of(len(samples), share), max(len(samples) - 1, 0))
    held = np.zeros(len(samples), bool)
    held[rng.permutation(len(samples))[:count]] = True
    return indices[~held[copies]], indices[held[copies]]


def iid(pool: Pool, settings: object) -> list[Parts]:
    """Shuffle the training and the test samples, and divide each evenly (sizes differ by one at most)."""
    train = pool.rng.permutation(pool.n_train)
    test = pool.rng.permutation(np.arange(pool.n_train, len(pool.labels)))
    return list(
        zip(np.array_split(train, pool.silos), np.array_split(test, pool.silos), strict=True)
    )
