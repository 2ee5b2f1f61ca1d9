"""Data sets of pictures: scikit-learn's digits and its two tables, MNIST, EMNIST, CIFAR and Tiny-ImageNet."""

from __future__ import annotations

import csv
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.sizes import unpack
from partitions.datasets.pickles import read_pickle
from partitions.datasets.registry import Source, md5_of, read_rgb
from partitions.splits import Array, Arrays, Dataset, Split

PARTS = ("train", "test")

# Carried by scikit-learn


def load_digits(source: Source) -> Dataset:
    """Load scikit-learn's 1797 handwritten digits, 8 x 8, 10 classes; grey values 0..16 are scaled to 0..255, rounded.

    There is no test file: a fixed 20 % of each class are the test samples.
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    return source.divide_table(x, bunch.target.astype(np.int64))


def load_digit_findings(source: Source) -> Dataset:
    """Load the pictures of `digits` with three findings each: even, at least five, with a closed loop.

    An example of several labels per sample with real pictures; divided like `digits`.
    """
    plain = Source(source.name, "", replace(source.described, classes=10, task="multiclass"))
    digits = load_digits(plain)
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
    from sklearn import datasets

    bunch = datasets.load_diabetes(scaled=False)
    return source.divide_table(
        bunch.data.astype(np.float32), bunch.target.astype(np.float32)[:, np.newaxis]
    )


def load_breast_cancer(source: Source) -> Dataset:
    """Load scikit-learn's Breast Cancer Wisconsin (diagnostic): 569 rows, 30 features, 0 = malignant, 1 = benign.

    Split like `digits`. Features are in their own units (their ranges differ by a factor of 1e5).
    """
    from sklearn import datasets

    bunch = datasets.load_breast_cancer()
    return source.divide_table(bunch.data.astype(np.float32), bunch.target.astype(np.int64))


# Files in the IDX format

KEYS = ("x_train", "y_train", "x_test", "y_test")
SIDE = 28


def load_mnist(source: Source) -> Dataset:
    """Load MNIST or Fashion-MNIST: 60,000 and 10,000 grey pictures of 28 x 28, 10 classes; ``.gz`` or unpacked."""
    folders = {Path(folder).name for folder in source.described.folders}
    paths = []
    for file, md5 in source.described.files.items():
        path = source.find(f"{file}.gz", file)
        # Outside a data set's own folder, a file of this name may be MNIST's or Fashion-MNIST's.
        if path is None or (path.parent.name not in folders and md5_of(path) != md5):
            path = source.download(f"{file}.gz", file)
        paths.append(path)
    return in_parts(source, read_files(source, paths))


def load_emnist(source: Source) -> Dataset:
    """EMNIST by class: 697,932 and 116,323 grey pictures of 28 x 28, digits, capitals and small letters, 62 classes.

    The files store pictures column by column; they are transposed here. They are decoded once, then mapped from the
    cache.
    """
    paths = [source.require(f"{file}.gz", file) for file in source.described.files]

    def decode() -> Arrays:
        arrays = read_files(source, paths)
        upright = {
            key: np.ascontiguousarray(arrays[key].transpose(0, 2, 1)) for key in KEYS[::2]
        }
        return arrays | upright

    return in_parts(source, source.once(paths, decode))


def in_parts(source: Source, arrays: Arrays) -> Dataset:
    """Return the data set of pictures (n, h, w) and labels (n,)."""
    return source.in_parts(
        *(
            Split(arrays[f"x_{part}"][..., np.newaxis], arrays[f"y_{part}"].astype(np.int64))
            for part in PARTS
        )
    )


def read_files(source: Source, paths: list[Path]) -> dict[str, Array]:
    """Read pictures and labels for training and testing. Raises DataError where they do not belong together."""
    arrays = {}
    for key, path in zip(KEYS, paths, strict=True):
        with source.reading(path):
            arrays[key] = read_idx(path)
    for place, part in zip(paths[::2], PARTS, strict=True):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        largest = y.max(initial=0)
        if (
            x.shape != (*y.shape, SIDE, SIDE)
            or y.ndim != 1
            or largest >= source.described.classes
        ):
            raise source.fault(
                f"{place} holds pictures {x.shape} for labels {y.shape}, up to {largest}; copy both files again"
            )
    return arrays


def read_idx(path: Path) -> Array:
    """Read an IDX file of bytes (magic number 0, 0, 8, dimensions; big-endian sizes; data), gzipped or not."""
    with path.open("rb") as file:
        content = unpack(file, "its content") if path.suffix == ".gz" else file.read()
    if content[:3] != b"\0\0\x08":
        raise DataError("no IDX file of bytes")
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# Tiny-ImageNet

TINY_CLASSES, TINY_SIDE = 200, 64


def load_tiny_imagenet(source: Source) -> Dataset:
    """Tiny-ImageNet: 100,000 and 10,000 colour pictures of 64 x 64, 200 classes in the order of their WordNet ids.

    The test samples are its validation part, because its test part has no labels. The pictures are decoded once, with
    1.4 GB of memory, then mapped from the cache.
    """
    root, again = source.require("tiny-imagenet-200"), source.described.mend
    classes = sorted(path.name for path in (root / "train").glob("n*") if path.is_dir())
    if len(classes) != TINY_CLASSES:
        raise source.fault(
            f"{root / 'train'} has {len(classes)} classes of {TINY_CLASSES}; {again}"
        )
    number = {wnid: i for i, wnid in enumerate(classes)}
    train = [
        (path, label)
        for wnid, label in number.items()
        for path in sorted((root / "train" / wnid).glob("images/*.JPEG"))
    ]
    parts = {"train": train, "test": tiny_test(source, root, number)}
    labels = {part: np.array([label for _, label in rows]) for part, rows in parts.items()}
    for part, y in labels.items():
        if len(np.unique(y)) != TINY_CLASSES:
            raise source.fault(f"a class in {root} is without pictures for {part}; {again}")

    def decode() -> Arrays:
        arrays = {}
        for part, rows in parts.items():
            arrays[part] = np.empty((len(rows), TINY_SIDE, TINY_SIDE, 3), np.uint8)
            shown = tqdm(rows, desc=f"{source.name}, {part}", unit="")
            for row, (path, _) in zip(arrays[part], shown, strict=True):
                with source.reading(path):
                    picture = read_rgb(path)
                if picture.shape != row.shape:
                    raise source.fault(
                        f"{path} is {picture.shape[1]} x {picture.shape[0]}; {again}"
                    )
                row[:] = picture
        return arrays

    arrays = source.once([path for rows in parts.values() for path, _ in rows], decode)
    return source.in_parts(*(Split(arrays[part], y) for part, y in labels.items()))


def tiny_test(source: Source, root: Path, number: Mapping[str, int]) -> list[tuple[Path, int]]:
    """Return the pictures of the validation part, each with its class."""
    table = root / "val" / "val_annotations.txt"
    rows = []
    with source.reading(table), table.open(encoding="utf-8", newline="") as file:
        for line, cells in enumerate(csv.reader(file, delimiter="\t"), 1):
            if len(cells) < 2 or cells[1] not in number or "/" in cells[0]:
                raise DataError(f"line {line} is not a picture and its class")
            rows.append((root / "val" / "images" / cells[0], number[cells[1]]))
    source.check_there([path for path, _ in rows])
    return rows


# CIFAR-10 and CIFAR-100

SHEET = 50  # pictures in a row, and in a column, of a WebP sheet


def load_cifar(source: Source) -> Dataset:
    """Load CIFAR-10 or CIFAR-100: 50,000 and 10,000 colour pictures of 32 x 32.

    They are read from the first of these that exists: ``cifar10.npz`` (x_train, y_train, x_test, y_test), the published
    binary archive, the Python one, or (CIFAR-10) lossless WebP sheets with ``labels.npz``. CIFAR-100: its fine labels.
    Decoded arrays are stored in the cache and mapped from there.
    """
    classes = source.described.classes
    (archive,) = source.described.files
    python, sheets = archive.replace("binary", "python"), ["train_00.webp"] * (classes == 10)
    first_file = source.find(f"{source.name}.npz", archive, python, *sheets) or source.download(
        archive
    )
    tiles, files = first_file.suffix == ".webp", [first_file]
    if tiles:
        files = [*sorted(first_file.parent.glob("*.webp")), first_file.parent / "labels.npz"]

    def decode() -> Arrays:
        if tiles:
            return read_tiles(first_file.parent)
        if first_file.suffix == ".npz":
            with np.load(first_file, allow_pickle=False) as file:
                return {
                    f"{kind}_{part}": file[f"{kind}_{part}"] for part in PARTS for kind in "xy"
                }
        return read_archive(source, first_file)

    with source.reading(first_file):
        arrays = source.once(files, decode)
        splits = [
            Split(arrays[f"x_{part}"], arrays[f"y_{part}"].reshape(-1).astype(np.int64))
            for part in PARTS
        ]
        for split in splits:
            if split.x.dtype != np.uint8 or split.x.shape != (len(split.y), 32, 32, 3):
                raise DataError(
                    f"pictures are {split.x.dtype} {split.x.shape} for {len(split.y)} labels"
                )
            if len(split) and not 0 <= split.y.min() <= split.y.max() < classes:
                raise DataError(f"labels are not all in 0..{classes - 1}")
    return source.in_parts(*splits)


def read_tiles(folder: Path) -> Arrays:
    """Read WebP sheets ``train_NN.webp``/``test_NN.webp`` (50 x 50 pictures each, row by row) and ``labels.npz``."""
    arrays: dict[str, Array] = {}
    with np.load(folder / "labels.npz", allow_pickle=False) as labels:
        for part in PARTS:
            y = labels[f"{part}_labels"].ravel().astype(np.int64)
            sheets = sorted(folder.glob(f"{part}_*.webp"))
            if len(sheets) * SHEET**2 != len(y):
                raise DataError(
                    f"{folder} has {len(sheets)} {part} sheets of {SHEET**2} pictures for {len(y)} labels"
                )
            x = np.empty((len(sheets), SHEET, SHEET, 32, 32, 3), np.uint8)
            for sheet, path in zip(x, sheets, strict=True):
                sheet[:] = read_rgb(path).reshape(SHEET, 32, SHEET, 32, 3).swapaxes(1, 2)
            arrays |= {f"x_{part}": x.reshape(-1, 32, 32, 3), f"y_{part}": y}
    return arrays


def read_archive(source: Source, path: Path) -> Arrays:
    """Read a published archive: ``cifar-*-binary.tar.gz``, or ``cifar-*-python.tar.gz``.

    A record of the binary one is one label byte (CIFAR-100: a coarse and a fine one) and 3,072 bytes of planes of red,
    green and blue. A member of the other is a pickle of the same arrays; nothing else in one is read.
    """
    key, in_python = source.about["labels"], "python" in path.name
    label_bytes = 2 if key == "fine_labels" else 1
    arrays: dict[str, Array] = {}
    with tarfile.open(path) as archive:
        members = {member.name.rpartition("/")[2]: member for member in archive}
        for part in PARTS:
            wanted = [name if in_python else f"{name}.bin" for name in source.about[part]]
            if missing := [name for name in wanted if name not in members]:
                raise DataError(f"it has no member {missing[0]}")
            pieces = [
                file.read() for name in wanted if (file := archive.extractfile(members[name]))
            ]
            if in_python:
                batches = [read_pickle(piece, encoding="bytes") for piece in pieces]
                rows, labels = (
                    np.concatenate([np.asarray(batch[k]) for batch in batches])
                    for k in (b"data", key.encode())
                )
            else:
                records = np.frombuffer(b"".join(pieces), np.uint8).reshape(
                    -1, label_bytes + 3072
                )
                rows, labels = records[:, label_bytes:], records[:, label_bytes - 1]
            x = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            arrays |= {f"x_{part}": x, f"y_{part}": labels.astype(np.int64)}
    return arrays
