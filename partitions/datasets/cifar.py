"""CIFAR-10 and CIFAR-100, and the file formats in which they are read."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.download import Source, read_rgb
from partitions.datasets.pickles import read_pickle
from partitions.splits import Array, Dataset, Split

PARTS = ("train", "test")
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
    found = source.find(f"{source.name}.npz", archive, python, *sheets) or source.download(
        archive
    )
    tiles, files = found.suffix == ".webp", [found]
    if tiles:
        files = [*sorted(found.parent.glob("*.webp")), found.parent / "labels.npz"]

    def decode() -> dict[str, Array]:
        if tiles:
            return read_tiles(found.parent)
        if found.suffix == ".npz":
            with np.load(found, allow_pickle=False) as file:
                return {
                    f"{kind}_{part}": file[f"{kind}_{part}"] for part in PARTS for kind in "xy"
                }
        return read_archive(source, found)

    with source.reading(found):
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


def read_tiles(folder: Path) -> dict[str, Array]:
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
            for own, path in zip(x, sheets, strict=True):
                rows = read_rgb(path).reshape(SHEET, 32, SHEET, 32, 3)
                own[:] = rows.transpose(0, 2, 1, 3, 4)
            arrays |= {f"x_{part}": x.reshape(-1, 32, 32, 3), f"y_{part}": y}
    return arrays


def read_archive(source: Source, path: Path) -> dict[str, Array]:
    """Read a published archive: ``cifar-*-binary.tar.gz``, or ``cifar-*-python.tar.gz``.

    A record of the binary one is one label byte (CIFAR-100: a coarse and a fine one) and 3,072 bytes of planes of red,
    green and blue. A member of the other is a pickle of the same arrays; nothing else in one is read.
    """
    key = source.about["labels"]
    label_bytes = 2 if key == "fine_labels" else 1
    in_python = "python" in path.name
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
                    np.concatenate([np.asarray(one[k]) for one in batches])
                    for k in (b"data", key.encode())
                )
            else:
                records = np.frombuffer(b"".join(pieces), np.uint8).reshape(
                    -1, label_bytes + 3072
                )
                rows, labels = records[:, label_bytes:], records[:, label_bytes - 1]
            arrays[f"x_{part}"] = np.ascontiguousarray(
                rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            )
            arrays[f"y_{part}"] = labels.astype(np.int64)
    return arrays
