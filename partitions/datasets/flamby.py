"""Federations of FLamby (NeurIPS 2022, arXiv 2210.04620) with its own centres and its own test parts.

Procedures as in FLamby's public code (owkin/FLamby), which describe the
data; the partition ``natural`` keeps centres and test parts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.download import RemoteFile, found_or_downloaded
from partitions.splits import Array, Dataset, Split

# Heart disease

HEART_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
HEART_MD5 = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
HEART_FEATURES = re.findall(
    r"\w+", "age sex cp trestbps chol fbs restecg thalach exang oldpeak"
)
HEART_TEST = 0.34
HEART_SEED = 43
CHEST_PAIN, ECG = HEART_FEATURES.index("cp"), HEART_FEATURES.index("restecg")


def load_heart(name: str, data_dir: str) -> Dataset:
    """Fed-Heart-Disease: 740 patients of four hospitals, 13 features, 1 = heart disease of whatever grade.

    Kind of chest pain and resting ECG (columns 2 and 6) become one column for each value but the lowest, over all
    hospitals, after the eight others. 34 % of each hospital are test samples, drawn by scikit-learn's
    ``train_test_split`` with seed 43, by class where both classes have more than two patients: 199 and 104, 172 and 89,
    30 and 16, 85 and 45. Features are in their own units (FLamby standardises by each hospital's training part:
    ``normalization=silo``).
    """
    tables = read_tables(name, data_dir)
    whole = np.concatenate(list(tables.values()))
    kept = [whole[:, i] for i in range(len(HEART_FEATURES)) if i not in (CHEST_PAIN, ECG)]
    dummies = [
        whole[:, i] == value for i in (CHEST_PAIN, ECG) for value in np.unique(whole[:, i])[1:]
    ]
    x = np.column_stack([*kept, *dummies]).astype(np.float32)
    y = (whole[:, -1] > 0).astype(np.int64)
    centre = np.repeat(list(tables), [len(table) for table in tables.values()])
    in_test = heart_test(y, centre)
    order = np.argsort(in_test, kind="stable")
    return by_centre(
        name, x[order], y[order], centre[order], int((~in_test).sum()), list(tables), classes=2
    )


def read_tables(name: str, data_dir: str, whole: bool = False) -> dict[str, Array]:
    """Read each hospital's table (:func:`read_table`); missing files are downloaded. ``name``: for messages."""
    tables, folders = {}, ("heart_disease", "heart-disease", "fed_heart_disease")
    for hospital, md5 in HEART_MD5.items():
        file = f"processed.{hospital}.data"
        tables[hospital] = read_table(
            found_or_downloaded(
                name, RemoteFile(file, HEART_URL + file, md5), data_dir, folders
            ),
            whole,
        )
    return tables


def read_table(path: Path, whole: bool = False) -> Array:
    """Read one hospital's table, float64 (n, 11): 10 features and the label 0..4.

    Rows with a missing value are left out; ``whole``: they are kept, with ``nan``.
    """
    rows = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if cells == [""]:
            continue
        kept = [*cells[: len(HEART_FEATURES)], cells[-1]]
        if "?" in kept and not whole:
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
    name: str,
    x: Array,
    y: Array,
    centre: Array,
    n_train: int,
    names: Sequence[str],
    classes: int,
    task: str = "multiclass",
) -> Dataset:
    """Return a data set with its own centres and test parts.

    ``centre``: the centre of each sample, text (n,); the first ``n_train`` samples are for training; ``names``: the
    centres in order.
    """
    groups = {one: np.flatnonzero(centre == one) for one in names}
    train, test = Split(x[:n_train], y[:n_train]), Split(x[n_train:], y[n_train:])
    return Dataset(name, train, test, classes, groups, task, own_test=True)


# Breast cancer of The Cancer Genome Atlas

BRCA_URL = (
    "https://raw.githubusercontent.com/owkin/FLamby/edacf54d5211520583b0133d55ac39b6fda8324b/"
    "flamby/datasets/fed_tcga_brca/"
)
BRCA_FILES = {
    "brca.csv": ("", "989df4ddec084f749d9593146d7ba92f"),
    "train_test_split.csv": ("dataset_creation_scripts/", "e648057e47463ee7763924d779cd7f2d"),
}


def load_tcga_brca(name: str, data_dir: str) -> Dataset:
    """Load FLamby's Fed-TCGA-BRCA: 1,088 patients of six regions, 39 features, days until death or last follow-up.

    It has FLamby's own six centres and their division into train and test (``natural`` keeps both). 38 features are 0
    or 1; the age is in years.
    """
    tables, folders = [], ("fed_tcga_brca", "tcga-brca", "tcga_brca")
    for file, (folder, md5) in BRCA_FILES.items():
        path = found_or_downloaded(
            name, RemoteFile(file, f"{BRCA_URL}{folder}{file}", md5), data_dir, folders
        )
        with path.open(encoding="utf-8", newline="") as rows:
            tables.append((path, list(csv.DictReader(rows))))
    (path, patients), (_, places_of) = tables
    try:
        centre = {row["pid"]: row["fold2"].partition("_") for row in places_of}
        known = [row for row in patients if row["pid"] in centre]  # eight belong to no centre
        features = [key for key in known[0] if key not in ("pid", "E", "T")]
        x = np.array([[float(row[key]) for key in features] for row in known], np.float32)
        y = np.array([[float(row["T"]), float(row["E"])] for row in known], np.float32)
        part = np.array([centre[row["pid"]] for row in known])
        if not (
            np.isin(part[:, 0], ("train", "test")).all()
            and np.isin(y[:, 1], (0, 1)).all()
            and (y >= 0).all()
        ):
            raise DataError("parts are not train and test, or events not 0 and 1")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"{name}: {path} cannot be read ({error}); replace or delete it"
        ) from error
    train = part[:, 0] == "train"
    order = np.argsort(~train, kind="stable")
    regions = np.char.add("region-", part[order, 2])
    return by_centre(
        name,
        x[order],
        y[order],
        regions,
        int(train.sum()),
        sorted(set(regions.tolist())),
        1,
        "survival",
    )
