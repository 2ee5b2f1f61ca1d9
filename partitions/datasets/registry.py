"""Data sets by name: four that are built in, and public ones that are found on disk or downloaded.

Files are searched in data-dir, then in the folder of the environment variable SILOFL_DATA, then in our cache; in each
also in the data set's usual sub-folders. A missing file is downloaded into data-dir, or into the cache without a
data-dir, and its published checksum is checked. The user must download some data sets; the error names the source. An
existing file is checked for its structure only.

Pictures stay uint8, tables float32 in their own units: the code that trains scales them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import unknown_name
from partitions.datasets import centres, cifar, flamby, flamby_pictures, images, signals, texts
from partitions.datasets.download import (
    RemoteFile,
    cache_dir,
    download,
    find,
    md5_of,
    named_folder,
    places,
)
from partitions.datasets.images import read_idx
from partitions.datasets.medmnist import load_medmnist, medmnist_sets
from partitions.labels import ONE_CLASS
from partitions.splits import Dataset, Split, split_table


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of the registry. ``load`` takes the entry's name and data-dir; ``classes``: of its own task."""

    title: str
    classes: int
    load: Callable[[str, str], Dataset]


def load_dataset(name: str, data_dir: str = "", task: str = "auto") -> Dataset:
    """Load a data set by name; the last few stay in memory, with read-only arrays.

    ``task``: another one than the data set's own: ``ordinal`` for classes that are grades, ``multiclass`` for several
    findings, as any of them (1) or none (0).

    Raises UserError for an unknown name. Raises DataError for a missing data-dir, a file that cannot be found or
    downloaded, a damaged file, and a task that does not fit the labels.
    """
    if data_dir:
        named_folder(data_dir)  # also for a built-in set, which does not use it
    dataset = _load(name, data_dir, os.environ.get("SILOFL_DATA", ""), str(cache_dir()))
    if task in ("auto", dataset.task):
        return dataset
    if {task, dataset.task} <= set(ONE_CLASS):
        return replace(dataset, task=task)
    if (task, dataset.task) == ("multiclass", "multilabel"):
        train, test = (
            Split(s.x, (s.y == 1).any(axis=1).astype(np.int64))
            for s in (dataset.train, dataset.test)
        )
        return Dataset(name, train, test, 2, dataset.groups)
    raise DataError(
        f"task = {task}: the labels of {name} are for {dataset.task}; leave task = auto"
    )


@lru_cache(maxsize=4)
def _load(name: str, data_dir: str, environment: str, cache: str) -> Dataset:
    # `environment` and `cache` are part of the cache's key only, because they determine where files are found.
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    dataset = DATASETS[name].load(name, data_dir)
    for split in (dataset.train, dataset.test):
        split.x.flags.writeable = False
        split.y.flags.writeable = False
    return dataset


# Built in


def load_digits(name: str, data_dir: str) -> Dataset:
    """Load scikit-learn's 1797 handwritten digits, 8 x 8, 10 classes; grey values 0..16 are scaled to 0..255, rounded.

    There is no test file: a fixed 20 % of each class are the test samples.
    """
    from sklearn.datasets import load_digits as load

    bunch = load()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    return split_table(name, x, bunch.target.astype(np.int64), classes=10)


def load_digit_findings(name: str, data_dir: str) -> Dataset:
    """Load the pictures of `digits` with three findings each: even, at least five, with a closed loop.

    An example of several labels per sample with real pictures; divided like `digits`.
    """
    digits = load_digits(name, data_dir)
    train, test = (
        Split(
            s.x,
            np.stack([s.y % 2 == 0, s.y >= 5, np.isin(s.y, (0, 6, 8, 9))], 1).astype(
                np.float32
            ),
        )
        for s in (digits.train, digits.test)
    )
    return Dataset(name, train, test, 3, task="multilabel")


def load_diabetes(name: str, data_dir: str) -> Dataset:
    """Load scikit-learn's diabetes: 442 patients, 10 features, progression of the disease after a year (25 to 346).

    A fixed 20 % of the patients are the test samples. Features are in their own units.
    """
    from sklearn.datasets import load_diabetes as load

    bunch = load(scaled=False)
    x, y = bunch.data.astype(np.float32), bunch.target.astype(np.float32)[:, np.newaxis]
    return split_table(name, x, y, classes=1, task="regression")


def load_breast_cancer(name: str, data_dir: str) -> Dataset:
    """Load scikit-learn's Breast Cancer Wisconsin (diagnostic): 569 rows, 30 features, 0 = malignant, 1 = benign.

    Split like `digits`. Features are in their own units (their ranges differ by a factor of 1e5).
    """
    from sklearn.datasets import load_breast_cancer as load

    bunch = load()
    return split_table(
        name, bunch.data.astype(np.float32), bunch.target.astype(np.int64), classes=2
    )


# MNIST and Fashion-MNIST

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
IDX_SOURCES = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        ("mnist", "MNIST", "MNIST/raw"),
    ),
    "fashion-mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        ("fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
    ),
}


def load_idx(name: str, data_dir: str) -> Dataset:
    """Load MNIST or Fashion-MNIST: 60,000 and 10,000 grey pictures of 28 x 28, 10 classes; ``.gz`` or unpacked."""
    base, sums, sub_folders = IDX_SOURCES[name]
    folders = places(data_dir, sub_folders)
    arrays = []
    for file_name, md5 in zip(IDX_NAMES, sums, strict=True):
        path = find([f"{file_name}.gz", file_name], folders)
        # Outside a data set's own folder, a file of this name may be MNIST's or Fashion-MNIST's.
        if path is None or (
            path.parent.name not in folder_names(sub_folders) and md5_of(path) != md5
        ):
            path = download(
                name,
                RemoteFile(f"{file_name}.gz", f"{base}{file_name}.gz", md5),
                data_dir,
                sub_folders[0],
            )
        arrays.append(read_idx(path))
    x_train, y_train, x_test, y_test = arrays
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
            raise DataError(
                f"{name}: the files hold pictures {x.shape} for labels {y.shape}; download them again"
            )
    return Dataset(
        name,
        Split(x_train[..., np.newaxis], y_train.astype(np.int64)),
        Split(x_test[..., np.newaxis], y_test.astype(np.int64)),
        classes=10,
    )


def folder_names(sub_folders: tuple[str, ...]) -> set[str]:
    """Return the last parts of these folders' names."""
    return {Path(sub).name for sub in sub_folders}


# Heart disease


def load_heart_disease(name: str, data_dir: str) -> Dataset:
    """Load UCI Heart Disease from four hospitals: 10 of its 13 features, 5 classes (0 = none, 1..4 = grade).

    The features that most hospitals lack (slope, ca, thal) are dropped, then rows with a missing value, as
    PLayer-FL and FLamby do: 303, 261, 46 and 130 rows remain. Switzerland's cholesterol is 0 throughout. For
    partitions other than `natural`, 20 % of each class are the test samples. Features are in their own units.
    """
    tables = flamby.read_tables(name, data_dir)
    origins = np.repeat(list(tables), [len(table) for table in tables.values()])
    table = np.concatenate(list(tables.values()))
    return split_table(
        name,
        table[:, :-1].astype(np.float32),
        table[:, -1].astype(np.int64),
        classes=5,
        groups=origins,
    )


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo("handwritten digits, 8x8 grey", 10, load_digits),
    "breast-cancer": DatasetInfo("breast cancer, 30 features", 2, load_breast_cancer),
    "digit-findings": DatasetInfo(
        "handwritten digits, 8x8 grey, 3 findings", 3, load_digit_findings
    ),
    "diabetes": DatasetInfo("diabetes, 10 features, its progression", 1, load_diabetes),
    "mnist": DatasetInfo("handwritten digits, 28x28 grey", 10, load_idx),
    "fashion-mnist": DatasetInfo("clothing, 28x28 grey", 10, load_idx),
    "cifar10": DatasetInfo("objects, 32x32 colour", 10, cifar.load_cifar),
    "cifar100": DatasetInfo("objects, 32x32 colour", 100, cifar.load_cifar),
    "heart-disease": DatasetInfo(
        "heart disease in four hospitals, 10 features", 5, load_heart_disease
    ),
    "heart-flamby": DatasetInfo(
        "heart disease in four hospitals, yes or no, 13 features", 2, flamby.load_heart
    ),
    "isic2019": DatasetInfo(
        "skin lesions in six centres, 200x200 colour", 8, flamby_pictures.load_isic
    ),
    "ixi-tiny": DatasetInfo(
        "brains in three hospitals, 48x60x48 grey, outlines", 2, flamby_pictures.load_ixi
    ),
    "tcga-brca": DatasetInfo(
        "breast cancer in six regions, 39 features, survival", 1, flamby.load_tcga_brca
    ),
    "heart-uci": DatasetInfo(
        "heart disease in four hospitals, 9 features, 5 grades", 5, centres.load_heart_uci
    ),
    "azpro": DatasetInfo("length of stay in 16 hospitals, 4 features", 1, centres.load_centres),
    "azpro-grades": DatasetInfo(
        "length of stay in 16 hospitals, 4 grades", 4, centres.load_centres
    ),
    "opt-bleeding": DatasetInfo(
        "bleeding gums in four clinics, a measurement", 1, centres.load_centres
    ),
    "rand-health": DatasetInfo(
        "health of persons at six sites, 4 grades", 4, centres.load_centres
    ),
    "rand-visits": DatasetInfo(
        "visits to physicians at six sites, a measurement", 1, centres.load_centres
    ),
    "aids2": DatasetInfo("AIDS in four regions, survival", 1, centres.load_centres),
    "bmt": DatasetInfo("bone marrow of four hospitals, survival", 1, centres.load_centres),
    "immunisation": DatasetInfo(
        "immunisation in 38 communities, yes or no", 2, centres.load_centres
    ),
    "medpar": DatasetInfo(
        "deaths in 30 hospitals, a negative control", 2, centres.load_centres
    ),
    "emnist": DatasetInfo("handwritten digits and letters, 28x28 grey", 62, images.load_emnist),
    "tiny-imagenet": DatasetInfo("objects, 64x64 colour", 200, images.load_tiny_imagenet),
    "ag-news": DatasetInfo("news, texts", 4, texts.load_ag_news),
    "sent140": DatasetInfo("tweets of 15 users, texts", 2, texts.load_sent140),
    "mimic": DatasetInfo("notes of MIMIC-III in four groups, texts", 2, texts.load_mimic),
    "ku-har": DatasetInfo("activities of 63 participants, two signals", 8, signals.load_ku_har),
    "crema-d": DatasetInfo("emotions of 72 speakers, audio and video", 4, signals.load_crema_d),
    "crisis-mmd": DatasetInfo(
        "tweets of disasters, picture and text", 8, signals.load_crisis_mmd
    ),
    **{
        name: DatasetInfo(title, classes, load_medmnist)
        for name, (title, classes) in medmnist_sets().items()
    },
}
