"""Federations of FLamby (NeurIPS 2022, arXiv 2210.04620) with its own centres and its own test parts.

Fed-TCGA-BRCA is in ``datasets.py``. Procedures as in FLamby's public code (owkin/FLamby), which are facts about the
data; the partition ``natural`` keeps centres and test parts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partitions import heart
from partitions.splits import Array, Dataset, Split

HEART_TEST = 0.34
HEART_SEED = 43
CHEST_PAIN, ECG = heart.FEATURES.index("cp"), heart.FEATURES.index("restecg")


def load_heart(name: str, data_dir: str) -> Dataset:
    """Fed-Heart-Disease: 740 patients of four hospitals, 13 features, 1 = heart disease of whatever grade.

    Kind of chest pain and resting ECG, columns 2 and 6, become one column for each value but the lowest, over all
    hospitals, behind the eight others. 34 % of each hospital are test samples, drawn by scikit-learn's
    ``train_test_split`` with seed 43, by class where both classes have more than two patients: 199 and 104, 172 and 89,
    30 and 16, 85 and 45. Features are in their own units (FLamby standardises by each hospital's training part:
    ``normalization=silo``).
    """
    tables = heart.read_tables(name, data_dir)
    whole = np.concatenate(list(tables.values()))
    kept = [whole[:, i] for i in range(len(heart.FEATURES)) if i not in (CHEST_PAIN, ECG)]
    dummies = [whole[:, i] == value for i in (CHEST_PAIN, ECG) for value in np.unique(whole[:, i])[1:]]
    x, y = np.column_stack([*kept, *dummies]).astype(np.float32), (whole[:, -1] > 0).astype(np.int64)
    centre = np.repeat(np.arange(len(tables)), [len(table) for table in tables.values()])
    return by_centre(name, x, y, centre, heart_test(y, centre), dict(enumerate(tables)), classes=2)


def heart_test(y: Array, centre: Array) -> Array:
    """Which rows are test samples, bool (n,)."""
    from sklearn.model_selection import train_test_split

    in_test = np.zeros(len(y), bool)
    for number in np.unique(centre):
        rows = np.flatnonzero(centre == number)
        counts = np.unique(y[rows], return_counts=True)[1]
        by_class = y[rows] if len(counts) > 1 and counts.min() > 2 else None
        sizes = {"test_size": HEART_TEST, "train_size": 1 - HEART_TEST}
        in_test[train_test_split(rows, random_state=HEART_SEED, stratify=by_class, **sizes)[1]] = True
    return in_test


def by_centre(
    name: str, x: Array, y: Array, centre: Array, in_test: Array, names: Mapping[int, str], classes: int
) -> Dataset:
    """A data set that keeps its centres and their test parts. ``centre``: int (n,), in whose order centres are."""
    order = np.concatenate([np.flatnonzero(~in_test), np.flatnonzero(in_test)])
    n_train = int((~in_test).sum())
    x, y, centre = x[order], y[order], centre[order]
    groups = {names[number]: np.flatnonzero(centre == number) for number in sorted(set(centre.tolist()))}
    train, test = Split(x[:n_train], y[:n_train]), Split(x[n_train:], y[n_train:])
    return Dataset(name, train, test, classes, groups, own_test=True)
