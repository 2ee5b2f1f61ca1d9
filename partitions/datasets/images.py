"""Data sets of pictures whose files the user downloads: EMNIST by class, and Tiny-ImageNet."""

from __future__ import annotations

import csv
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.sizes import unpack
from partitions.datasets.download import decode_once, require
from partitions.splits import Array, Dataset, Split

# EMNIST

EMNIST_CLASSES, EMNIST_SIDE = 62, 28
EMNIST_PLACES = ("emnist", "EMNIST", "EMNIST/raw", "gzip")


def load_emnist(name: str, data_dir: str) -> Dataset:
    """EMNIST by class: 697,932 and 116,323 grey pictures of 28 x 28, digits, capitals and small letters, 62 classes.

    The files store pictures column by column; they are transposed here. They are decoded once, then mapped from the
    cache.
    """
    paths = {}
    for part in ("train", "test"):
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
            file_name = f"emnist-byclass-{part}-{kind}-ubyte"
            names = [f"{file_name}.gz", file_name]
            paths[f"{key}_{part}"] = require(
                name, names, EMNIST_PLACES, data_dir, "it is in NIST's gzip.zip"
            )

    def decode() -> dict[str, Array]:
        arrays = {key: read_idx(path, "copy it again") for key, path in paths.items()}
        for part in ("train", "test"):
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            if (
                x.shape != (len(y), EMNIST_SIDE, EMNIST_SIDE)
                or y.ndim != 1
                or y.max(initial=0) >= EMNIST_CLASSES
            ):
                raise DataError(
                    f"{name}: {paths[f'x_{part}']} holds pictures {x.shape} for labels {y.shape}, up to "
                    f"{y.max(initial=0)}; copy both files again"
                )
            arrays[f"x_{part}"] = np.ascontiguousarray(x.transpose(0, 2, 1))[..., np.newaxis]
        return arrays

    arrays = decode_once(name, list(paths.values()), decode)
    splits = [
        Split(arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.int64))
        for part in ("train", "test")
    ]
    return Dataset(name, splits[0], splits[1], EMNIST_CLASSES)


# Tiny-ImageNet

TINY_FOLDER = "tiny-imagenet-200"
TINY_PLACES = ("tiny-imagenet", "tiny_imagenet", "TinyImageNet")
TINY_CLASSES, TINY_SIDE = 200, 64
TINY_WHENCE = "unpack tiny-imagenet-200.zip of Stanford's CS231n"


def load_tiny_imagenet(name: str, data_dir: str) -> Dataset:
    """Tiny-ImageNet: 100,000 and 10,000 colour pictures of 64 x 64, 200 classes in the order of their WordNet ids.

    The test samples are its validation part, because its test part has no labels. The pictures are decoded once, with
    1.4 GB of memory, then mapped from the cache.
    """
    root = require(name, [TINY_FOLDER], TINY_PLACES, data_dir, TINY_WHENCE)
    classes = sorted(path.name for path in (root / "train").glob("n*") if path.is_dir())
    if len(classes) != TINY_CLASSES:
        raise DataError(
            f"{name}: {root / 'train'} has {len(classes)} classes of {TINY_CLASSES}; {TINY_WHENCE} again"
        )
    number = {wnid: i for i, wnid in enumerate(classes)}
    train = [
        (path, number[wnid])
        for wnid in classes
        for path in sorted((root / "train" / wnid).glob("images/*.JPEG"))
    ]
    parts = {"train": train, "test": tiny_test(name, root, number)}
    for part, rows in parts.items():
        if len(np.unique([label for _, label in rows])) != TINY_CLASSES:
            raise DataError(
                f"{name}: a class in {root} is without pictures for {part}; {TINY_WHENCE} again"
            )

    def decode() -> dict[str, Array]:
        arrays = {}
        for part, rows in parts.items():
            x = np.empty((len(rows), TINY_SIDE, TINY_SIDE, 3), np.uint8)
            for i, (path, _) in enumerate(tqdm(rows, desc=f"{name}, {part}", unit="")):
                x[i] = read_tiny(name, path)
            arrays[part] = x
        return arrays

    arrays = decode_once(name, [path for rows in parts.values() for path, _ in rows], decode)
    splits = [
        Split(arrays[part], np.array([label for _, label in rows], np.int64))
        for part, rows in parts.items()
    ]
    return Dataset(name, splits[0], splits[1], TINY_CLASSES)


def tiny_test(name: str, root: Path, number: dict[str, int]) -> list[tuple[Path, int]]:
    """Return the pictures of the validation part, each with its class."""
    table = root / "val" / "val_annotations.txt"
    rows = []
    try:
        with table.open(encoding="utf-8", newline="") as file:
            for line, cells in enumerate(csv.reader(file, delimiter="\t"), 1):
                if len(cells) < 2 or cells[1] not in number or "/" in cells[0]:
                    raise DataError(f"line {line} is not a picture and its class")
                rows.append((root / "val" / "images" / cells[0], number[cells[1]]))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name}: {table} cannot be read ({error}); {TINY_WHENCE} again"
        ) from error
    if missing := [path for path, _ in rows if not path.is_file()]:
        raise DataError(
            f"{name}: {len(missing)} of {len(rows)} pictures are missing, first {missing[0]}"
        )
    return rows


def read_tiny(name: str, path: Path) -> Array:
    """Read one picture, uint8 (64, 64, 3); grey pictures become colour."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            picture = np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: {path} cannot be read ({error}); {TINY_WHENCE} again"
        ) from error
    if picture.shape != (TINY_SIDE, TINY_SIDE, 3):
        raise DataError(
            f"{name}: {path} is {picture.shape[1]} x {picture.shape[0]}; {TINY_WHENCE} again"
        )
    return picture


# Files in the IDX format of MNIST and EMNIST


def read_idx(path: Path, mend: str = "delete it and it will be downloaded again") -> Array:
    """Read an IDX file of bytes (magic number 0, 0, 8, dimensions; big-endian sizes; data), gzipped or not.

    Raises DataError, with the remedy ``mend``, for a file in another format or a truncated one.
    """
    try:
        with path.open("rb") as file:
            content = unpack(file, "its content") if path.suffix == ".gz" else file.read()
        if content[:3] != b"\0\0\x08":
            raise DataError("no IDX file of bytes")
        dimensions = content[3]
        shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(int)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); {mend}") from error
