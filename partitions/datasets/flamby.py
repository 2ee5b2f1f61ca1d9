"""UCI Heart Disease, and federations of FLamby (NeurIPS 2022, arXiv 2210.04620) with its centres and test parts.

Procedures as in FLamby's public code (owkin/FLamby), which describe the
data; the partition ``natural`` keeps centres and test parts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import words_in
from partitions.datasets.registry import Source, read_rgb
from partitions.splits import Array, Arrays, Dataset, Split

# Heart disease

HEART_FEATURES = words_in("age sex cp trestbps chol fbs restecg thalach exang oldpeak")
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
    return source.divide_table(
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
    names = list(dict.fromkeys(centre.tolist()))
    return by_test(source, x, y, centre, heart_test(y, centre), names)


def read_tables(source: Source, whole: bool = False) -> tuple[Array, Array]:
    """Read all hospitals' tables (:func:`read_table`); return all rows, and the hospital of each, text (n,)."""
    tables = [read_table(source.fetch(file), whole) for file in source.described.files]
    names = [file.split(".")[1] for file in source.described.files]
    return np.concatenate(tables), np.repeat(names, [len(table) for table in tables])


def read_table(path: Path, whole: bool) -> Array:
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
    sizes = {"test_size": HEART_TEST, "train_size": 1 - HEART_TEST}
    for hospital in np.unique(centre):
        rows = np.flatnonzero(centre == hospital)
        counts = np.unique(y[rows], return_counts=True)[1]
        by_class = y[rows] if len(counts) > 1 and counts.min() > 2 else None
        split = train_test_split(rows, random_state=HEART_SEED, stratify=by_class, **sizes)
        in_test[split[1]] = True
    return in_test


def by_test(
    source: Source, x: Array, y: Array, centre: Array, in_test: Array, names: Sequence[str]
) -> Dataset:
    """Return a data set as :func:`by_centre`, of samples in any order. ``in_test``: those for testing, bool (n,)."""
    order, n_train = np.argsort(in_test, kind="stable"), int((~in_test).sum())
    return by_centre(source, x[order], y[order], centre[order], n_train, names)


def by_centre(
    source: Source, x: Any, y: Array, centre: Array, n_train: int, names: Sequence[str]
) -> Dataset:
    """Return a data set with its own centres and test parts.

    ``centre``: the centre of each sample, text (n,); the first ``n_train`` samples are for training; ``names``: the
    centres in order.
    """
    groups = {name: np.flatnonzero(centre == name) for name in names}
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
        whole = pd.read_csv(table, dtype={"pid": str})
        whole = whole.merge(known, on="pid", validate="many_to_one")
        part = whole["fold2"].str.split("_", n=1, expand=True)
        x = whole.drop(columns=["pid", "E", "T", "fold2"]).to_numpy(np.float32)
        y = whole[["T", "E"]].to_numpy(np.float32)
        known_parts, events = part[0].isin(["train", "test"]), np.isin(y[:, 1], (0, 1))
        if not all(fits.all() for fits in (known_parts, events, y >= 0, np.isfinite(x))):
            raise DataError("parts are not train and test, or events not 0 and 1")
    regions, in_test = ("region-" + part[1]).to_numpy(str), part[0].to_numpy() == "test"
    return by_test(source, x, y, regions, in_test, sorted({*regions.tolist()}))


# Skin lesions, and brains

ISIC_PICTURES = "ISIC_2019_Training_Input"  # the challenge's folder; the name of FLamby's begins with it, too
# Pixels: the shorter side after resizing, and the side of the central crop
ISIC_SHORT, ISIC_SIDE = 224, 200


def load_isic(source: Source) -> Dataset:
    """Fed-ISIC2019: 23,247 dermatoscopic pictures of six centres, 8 classes, uint8 200 x 200 x 3.

    It needs FLamby's list ``train_test_split`` (centres and test parts) and, beside it, the pictures: those of FLamby's
    script, ``ISIC_2019_Training_Input_preprocessed``, or the challenge's, ``ISIC_2019_Training_Input``. The latter are
    resized to 224 pixels on the shorter side and corrected for the light's colour (:func:`shades_of_grey`), as in
    FLamby, but without JPEG in between. The central 200 x 200 pixels are kept, as of FLamby's test pictures (it crops
    training pictures at random). The pictures are read once, with 3 GB of memory, then mapped from the cache.
    """
    table = source.require("train_test_split")
    rows = isic_rows(source, table)
    folders = [table.parent / f"{ISIC_PICTURES}{ending}" for ending in ("_preprocessed", "")]
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        raise source.fault(
            f"there is no folder {folders[1]}; unpack the challenge's {ISIC_PICTURES}.zip there"
        )
    pictures = [folder / f"{row.picture}.jpg" for row in rows]
    source.check_there(pictures)

    def decode() -> Arrays:
        x = np.empty((len(pictures), ISIC_SIDE, ISIC_SIDE, 3), np.uint8)
        for row, picture in zip(x, tqdm(pictures, desc=source.name, unit=""), strict=True):
            row[:] = read_isic(source, picture, prepared=folder == folders[0])
        return {"x": x}

    x = source.once([table, *pictures], decode)["x"]
    _, y, centre, test = map(np.array, zip(*rows, strict=True))
    return by_centre(source, x, y, centre, int((~test).sum()), source.about["centres"])


class IsicRow(NamedTuple):
    """A line of FLamby's list."""

    picture: str
    label: int
    centre: str
    test: bool


def isic_rows(source: Source, table: Path) -> list[IsicRow]:
    """Read FLamby's list, training pictures first; ``fold2`` (``train_0`` ... ``test_5``) is the division by centre."""
    rows, centres, classes = [], source.about["centres"], source.described.classes
    with table.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            with source.reading(f"{table}, line {number},"):
                part, _, centre = row["fold2"].partition("_")
                if part not in ("train", "test") or "/" in row["image"]:
                    raise DataError(f"a picture {row['image']} in {row['fold2']}")
                label, place = int(float(row["target"])), int(centre)
                if not (0 <= label < classes and 0 <= place < len(centres)):
                    raise DataError(f"class {label} of centre {place}")
                rows.append(IsicRow(row["image"], label, centres[place], part == "test"))
    return sorted(rows, key=lambda row: row.test)


def read_isic(source: Source, path: Path, prepared: bool) -> Array:
    """Read the central crop of one picture, uint8 (200, 200, 3)."""
    with source.reading(path):
        array = read_rgb(path)
    if not prepared:
        picture = Image.fromarray(array)
        ratio = ISIC_SHORT / min(picture.size)
        size = int(picture.width * ratio), int(picture.height * ratio)
        array = shades_of_grey(np.asarray(picture.resize(size, Image.Resampling.BILINEAR)))
    top, left = (array.shape[0] - ISIC_SIDE) // 2, (array.shape[1] - ISIC_SIDE) // 2
    if min(top, left) < 0:
        raise source.fault(
            f"{path} is {array.shape[1]} x {array.shape[0]}, less than {ISIC_SIDE} pixels on a side"
        )
    return array[top : top + ISIC_SIDE, left : left + ISIC_SIDE]


def shades_of_grey(picture: Array, power: int = 6) -> Array:
    """Return the picture in white light, uint8 (h, w, 3): x_c |e| / (e_c sqrt(3)), with e_c = (mean x_c^p)^(1/p).

    A picture whose channels have equal norms e_c does not change. Values above white become white (in FLamby's script
    they overflow). Source: Finlayson and Trezzi (2004).
    """
    values = picture.astype(np.float64)
    light = np.mean(values**power, axis=(0, 1)) ** (1 / power)
    if not light.all():  # the light's colour cannot be estimated from a channel of zeros
        return picture
    whitened: Array = np.clip(values * np.sqrt(np.mean(light**2)) / light, 0, 255)
    return whitened.astype(np.uint8)


IXI_SHAPE = (48, 60, 48)
IXI_SUBJECT = re.compile(r"IXI(\d{3})-(HH|Guys|IOP)-\d+")
IXI_TRAIN, IXI_SEED = 0.8, 10


def load_ixi(source: Source) -> Dataset:
    """Fed-IXI Tiny: T1 volumes of 566 brains from three hospitals in London, float32 48 x 60 x 48, and their masks.

    It needs the folder ``IXI_sample`` of the archive that FLamby names, with ``SUBJECT/T1/*.nii.gz`` and
    ``SUBJECT/label/*.nii.gz``. Volumes and masks are averaged to one shape, as in PyTorch's adaptive pooling. Each
    volume is then standardised; a voxel is brain where all voxels averaged in it are. Test parts are FLamby's, 62, 36
    and 15 subjects: from ``metadata_tiny.csv`` beside ``IXI_sample`` if it exists, else drawn as in FLamby. The volumes
    are read once, then mapped from the cache.
    """
    folders = (
        path
        for folder in source.folders
        for path in (folder / "IXI_sample", *sorted(folder.glob("*/IXI_sample")))
    )
    root = next(filter(Path.is_dir, folders), None)
    if root is None:
        raise source.fault(
            "there is no folder IXI_sample; unpack the archive that FLamby's fed_ixi/common.py names into "
            f"{source.folders[0]}, or name its folder with data-dir or SILOFL_DATA"
        )
    subjects = sorted(path.name for path in root.iterdir() if IXI_SUBJECT.fullmatch(path.name))
    tested = ixi_test(source, root, subjects)
    subjects.sort(key=tested.__contains__)
    files = [
        one_file(source, root / subject / kind)
        for subject in subjects
        for kind in ("T1", "label")
    ]

    def decode() -> Arrays:
        import torch

        from partitions.importing.readers.volumes.nifti_file import read_stored

        pool = torch.nn.functional.adaptive_avg_pool3d
        x = np.empty((len(subjects), *IXI_SHAPE, 1), np.float32)
        y = np.empty((len(subjects), *IXI_SHAPE), np.uint8)
        for i, path in enumerate(tqdm(files, desc=source.name, unit="")):
            volume = torch.from_numpy(read_stored(path, f"{source.name}: {path}"))
            values = pool(volume.double()[None], IXI_SHAPE)[0].numpy()
            if i % 2:
                y[i // 2] = values > 1 - 1e-6
            else:
                x[i // 2, ..., 0] = (values - values.mean()) / (values.std() or 1)
        return {"x": x, "y": y}

    arrays = source.once(files, decode)
    centre = np.array([centre_of(subject) for subject in subjects])
    n_train = len(subjects) - len(tested)
    return by_centre(source, arrays["x"], arrays["y"], centre, n_train, source.about["centres"])


def ixi_test(source: Source, root: Path, subjects: Sequence[str]) -> set[str]:
    """Return the subjects for testing."""
    table = root.parent / "metadata_tiny.csv"
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            parts = {row.get("Patient ID"): row.get("Split") for row in csv.DictReader(file)}
        of = {subject: parts.get(str(int(subject[3:6]))) for subject in subjects}
        for subject, part in of.items():
            if part not in ("train", "test"):
                raise source.fault(
                    f"{table} says neither train nor test of {subject}; copy it again"
                )
        return {subject for subject, part in of.items() if part == "test"}
    rng = np.random.RandomState(IXI_SEED)
    tested = set()
    for centre, number in source.about["sizes"].items():
        ours = [subject for subject in subjects if centre_of(subject) == centre]
        if len(ours) != number:
            raise source.fault(
                f"{root} has {len(ours)} of the {number} subjects of {centre}; unpack the whole "
                f"archive, or put FLamby's metadata_tiny.csv, which has the test parts, into {root.parent}"
            )
        drawn = [i >= round(number * IXI_TRAIN) for i in range(number)]
        rng.shuffle(drawn)
        tested |= set(compress(ours, drawn))
    return tested


def centre_of(subject: str) -> str:
    """Return the centre in a subject's name: ``Guys`` in ``IXI002-Guys-0828``."""
    return subject.split("-")[1]


def one_file(source: Source, folder: Path) -> Path:
    """Return the only volume in a folder. Raises DataError for none or several."""
    files = sorted(folder.glob("*.nii.gz"))
    if len(files) != 1:
        raise source.fault(
            f"{folder} has {len(files)} files *.nii.gz, not one; unpack the archive again"
        )
    return files[0]
