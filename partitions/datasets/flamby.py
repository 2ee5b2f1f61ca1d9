"""UCI Heart Disease, and federations of FLamby (NeurIPS 2022, arXiv 2210.04620) with its centres and test parts.

Procedures as in FLamby's public code (owkin/FLamby), which describe the
data; the partition ``natural`` keeps centres and test parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.download import Source
from partitions.splits import Array, Dataset, Split

# Heart disease

HEART_FEATURES = re.findall(
    r"\w+", "age sex cp trestbps chol fbs restecg thalach exang oldpeak"
)
HEART_TEST = 0.34
HEART_SEED = 43
CHEST_PAIN, ECG = HEART_FEATURES.index("cp"), HEART_FEATURES.index("restecg")


def load_heart_disease(source: Source) -> Dataset:
    """Load UCI Heart Disease from four hospitals: 10 of its 13 features, 5 classes (0 = none, 1..4 = grade).

    The features that most hospitals lack (slope, ca, thal) are dropped, then rows with a missing value, as
    PLayer-FL and FLamby do: 303, 261, 46 and 130 rows remain. Switzerland's cholesterol is 0 throughout. For
    partitions other than `natural`, 20 % of each class are the test samples. Features are in their own units.
    """
    table, hospitals = read_tables(source)
    return source.divided(
        table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64), hospitals
    )


def load_heart(source: Source) -> Dataset:
    """Fed-Heart-Disease: 740 patients of four hospitals, 13 features, 1 = heart disease of whatever grade.

    Kind of chest pain and resting ECG (columns 2 and 6) become one column for each value but the lowest, over all
    hospitals, after the eight others. 34 % of each hospital are test samples, drawn by scikit-learn's
    ``train_test_split`` with seed 43, by class where both classes have more than two patients: 199 and 104, 172 and 89,
    30 and 16, 85 and 45. Features are in their own units (FLamby standardises by each hospital's training part:
    ``normalization=silo``).
    """
    whole, centre = read_tables(source)
    kept = [whole[:, i] for i in range(len(HEART_FEATURES)) if i not in (CHEST_PAIN, ECG)]
    dummies = [
        whole[:, i] == value for i in (CHEST_PAIN, ECG) for value in np.unique(whole[:, i])[1:]
    ]
    x = np.column_stack([*kept, *dummies]).astype(np.float32)
    y = (whole[:, -1] > 0).astype(np.int64)
    in_test = heart_test(y, centre)
    order = np.argsort(in_test, kind="stable")
    names = list(dict.fromkeys(centre.tolist()))
    return by_centre(source, x[order], y[order], centre[order], int((~in_test).sum()), names)


def read_tables(source: Source, whole: bool = False) -> tuple[Array, Array]:
    """Read all hospitals' tables (:func:`read_table`); return all rows, and the hospital of each, text (n,)."""
    tables = [read_table(source.fetch(file), whole) for file in source.described.files]
    names = [file.split(".")[1] for file in source.described.files]
    return np.concatenate(tables), np.repeat(names, [len(table) for table in tables])


def read_table(path: Path, whole: bool = False) -> Array:
    """Read one hospital's table, float64 (n, 11): 10 features and the label 0..4.

    Rows with a missing value are left out; ``whole``: they are kept, with ``nan``.
    """
    rows = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        kept = [*cells[: len(HEART_FEATURES)], cells[-1]]
        if cells == [""] or ("?" in kept and not whole):
            continue
        try:
            if len(cells) != 14:
                raise DataError(f"{len(cells)} columns instead of 14")
            rows.append([math.nan if cell == "?" else float(cell) for cell in kept])
            if rows[-1][-1] not in range(5):
                raise DataError(f"the label is {kept[-1]}, not 0..4")
        except ValueError as error:
            raise DataError(
                f"heart-disease: {path}, line {number}: {error}; replace or delete the file"
            ) from error
    return np.array(rows).reshape(-1, len(HEART_FEATURES) + 1)


def heart_test(y: Array, centre: Array) -> Array:
    """Return which rows are test samples, bool (n,)."""
    from sklearn.model_selection import train_test_split

    in_test = np.zeros(len(y), bool)
    for one in np.unique(centre):
        rows = np.flatnonzero(centre == one)
        counts = np.unique(y[rows], return_counts=True)[1]
        by_class = y[rows] if len(counts) > 1 and counts.min() > 2 else None
        sizes = {"test_size": HEART_TEST, "train_size": 1 - HEART_TEST}
        in_test[
            train_test_split(rows, random_state=HEART_SEED, stratify=by_class, **sizes)[1]
        ] = True
    return in_test


def by_centre(
    source: Source, x: Any, y: Array, centre: Array, n_train: int, names: Sequence[str]
) -> Dataset:
    """Return a data set with its own centres and test parts.

    ``centre``: the centre of each sample, text (n,); the first ``n_train`` samples are for training; ``names``: the
    centres in order.
    """
    groups = {one: np.flatnonzero(centre == one) for one in names}
    train, test = Split(x[:n_train], y[:n_train]), Split(x[n_train:], y[n_train:])
    return source.in_parts(train, test, groups=groups, own_test=True)


# Breast cancer of The Cancer Genome Atlas


def load_tcga_brca(source: Source) -> Dataset:
    """Load FLamby's Fed-TCGA-BRCA: 1,088 patients of six regions, 39 features, days until death or last follow-up.

    It has FLamby's own six centres and their division into train and test (``natural`` keeps both). 38 features are 0
    or 1; the age is in years.
    """
    import pandas as pd

    table, places = map(source.fetch, source.described.files)
    with source.reading(table):
        known = pd.read_csv(places, dtype=str)[["pid", "fold2"]].drop_duplicates(
            "pid", keep="last"
        )
        # Eight patients belong to no centre
        whole = pd.read_csv(table, dtype={"pid": str}, float_precision="round_trip")
        whole = whole.merge(known, on="pid", validate="many_to_one")
        part = whole["fold2"].str.split("_", n=1, expand=True)
        x = whole.drop(columns=["pid", "E", "T", "fold2"]).to_numpy(np.float32)
        y = whole[["T", "E"]].to_numpy(np.float32)
        if not (
            part[0].isin(["train", "test"]).all()
            and np.isin(y[:, 1], (0, 1)).all()
            and (y >= 0).all()
            and np.isfinite(x).all()
        ):
            raise DataError("parts are not train and test, or events not 0 and 1")
        order = part[0].to_numpy() == "test"
    rows = np.argsort(order, kind="stable")
    regions = ("region-" + part[1]).to_numpy(str)[rows]
    return by_centre(
        source, x[rows], y[rows], regions, int((~order).sum()), sorted({*regions.tolist()})
    )
