"""Four small data sets that scikit-learn carries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sklearn import datasets

from partitions.datasets.download import Source
from partitions.splits import Dataset, Split


def load_digits(source: Source) -> Dataset:
    """Load scikit-learn's 1797 handwritten digits, 8 x 8, 10 classes; grey values 0..16 are scaled to 0..255, rounded.

    There is no test file: a fixed 20 % of each class are the test samples.
    """
    bunch = datasets.load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    return source.divided(x, bunch.target.astype(np.int64))


def load_digit_findings(source: Source) -> Dataset:
    """Load the pictures of `digits` with three findings each: even, at least five, with a closed loop.

    An example of several labels per sample with real pictures; divided like `digits`.
    """
    own = Source(source.name, "", replace(source.described, classes=10, task="multiclass"))
    digits = load_digits(own)
    train, test = (
        Split(
            s.x,
            np.stack([s.y % 2 == 0, s.y >= 5, np.isin(s.y, (0, 6, 8, 9))], 1).astype(
                np.float32
            ),
        )
        for s in (digits.train, digits.test)
    )
    return source.in_parts(train, test)


def load_diabetes(source: Source) -> Dataset:
    """Load scikit-learn's diabetes: 442 patients, 10 features, progression of the disease after a year (25 to 346).

    A fixed 20 % of the patients are the test samples. Features are in their own units.
    """
    bunch = datasets.load_diabetes(scaled=False)
    return source.divided(
        bunch.data.astype(np.float32), bunch.target.astype(np.float32)[:, np.newaxis]
    )


def load_breast_cancer(source: Source) -> Dataset:
    """Load scikit-learn's Breast Cancer Wisconsin (diagnostic): 569 rows, 30 features, 0 = malignant, 1 = benign.

    Split like `digits`. Features are in their own units (their ranges differ by a factor of 1e5).
    """
    bunch = datasets.load_breast_cancer()
    return source.divided(bunch.data.astype(np.float32), bunch.target.astype(np.int64))
