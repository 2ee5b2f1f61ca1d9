"""Data sets of pictures: MNIST, Fashion-MNIST, EMNIST by class, and Tiny-ImageNet."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.sizes import unpack
from partitions.datasets.download import Source, md5_of, read_rgb
from partitions.splits import Array, Dataset, Split

# Files in the IDX format

KEYS = ("x_train", "y_train", "x_test", "y_test")
SIDE = 28


def load_mnist(source: Source) -> Dataset:
    """Load MNIST or Fashion-MNIST: 60,000 and 10,000 grey pictures of 28 x 28, 10 classes; ``.gz`` or unpacked."""
    own = {Path(folder).name for folder in source.described.folders}
    paths = []
    for file, md5 in source.described.files.items():
        path = source.find(f"{file}.gz", file)
        # Outside a data set's own folder, a file of this name may be MNIST's or Fashion-MNIST's.
        if path is None or (path.parent.name not in own and md5_of(path) != md5):
            path = source.download(f"{file}.gz", file)
        paths.append(path)
    return in_parts(source, read_files(source, paths))


def load_emnist(source: Source) -> Dataset:
    """EMNIST by class: 697,932 and 116,323 grey pictures of 28 x 28, digits, capitals and small letters, 62 classes.

    The files store pictures column by column; they are transposed here. They are decoded once, then mapped from the
    cache.
    """
    paths = [source.require(f"{file}.gz", file) for file in source.described.files]

    def decode() -> dict[str, Array]:
        arrays = read_files(source, paths)
        upright = {
            key: np.ascontiguousarray(arrays[key].transpose(0, 2, 1)) for key in KEYS[::2]
        }
        return arrays | upright

    return in_parts(source, source.once(paths, decode))


def in_parts(source: Source, arrays: Mapping[str, Array]) -> Dataset:
    """Return the data set of pictures (n, h, w) and labels (n,)."""
    train, test = (
        Split(arrays[f"x_{part}"][..., np.newaxis], arrays[f"y_{part}"].astype(np.int64))
        for part in ("train", "test")
    )
    return source.in_parts(train, test)


def read_files(source: Source, paths: list[Path]) -> dict[str, Array]:
    """Read pictures and labels for training and testing. Raises DataError where they do not belong together."""
    arrays = {}
    for key, path in zip(KEYS, paths, strict=True):
        with source.reading(path):
            arrays[key] = read_idx(path)
    for place, part in ((paths[0], "train"), (paths[2], "test")):
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
        (path, number[wnid])
        for wnid in classes
        for path in sorted((root / "train" / wnid).glob("images/*.JPEG"))
    ]
    parts = {"train": train, "test": tiny_test(source, root, number)}
    labels = {part: np.array([label for _, label in rows]) for part, rows in parts.items()}
    for part, own in labels.items():
        if len(np.unique(own)) != TINY_CLASSES:
            raise source.fault(f"a class in {root} is without pictures for {part}; {again}")

    def decode() -> dict[str, Array]:
        arrays = {}
        for part, rows in parts.items():
            arrays[part] = np.empty((len(rows), TINY_SIDE, TINY_SIDE, 3), np.uint8)
            for i, (path, _) in enumerate(tqdm(rows, desc=f"{source.name}, {part}", unit="")):
                with source.reading(path):
                    picture = read_rgb(path)
                if picture.shape[:2] != (TINY_SIDE, TINY_SIDE):
                    raise source.fault(
                        f"{path} is {picture.shape[1]} x {picture.shape[0]}; {again}"
                    )
                arrays[part][i] = picture
        return arrays

    arrays = source.once([path for rows in parts.values() for path, _ in rows], decode)
    return source.in_parts(*(Split(arrays[part], own) for part, own in labels.items()))


def tiny_test(source: Source, root: Path, number: Mapping[str, int]) -> list[tuple[Path, int]]:
    """Return the pictures of the validation part, each with its class."""
    table = root / "val" / "val_annotations.txt"
    rows = []
    with source.reading(table), table.open(encoding="utf-8", newline="") as file:
        for line, cells in enumerate(csv.reader(file, delimiter="\t"), 1):
            if len(cells) < 2 or cells[1] not in number or "/" in cells[0]:
                raise DataError(f"line {line} is not a picture and its class")
            rows.append((root / "val" / "images" / cells[0], number[cells[1]]))
    if missing := [path for path, _ in rows if not path.is_file()]:
        raise source.fault(
            f"{len(missing)} of {len(rows)} pictures are missing, first {missing[0]}"
        )
    return rows
