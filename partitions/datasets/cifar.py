"""Readers of the file formats of CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.pickles import read_pickle
from partitions.splits import Array

# The published archives: per split the members, in order.
BINARY_MEMBERS = {
    10: {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    100: {"train": ["train.bin"], "test": ["test.bin"]},
}
PYTHON_MEMBERS = {
    10: {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    100: {"train": ["train"], "test": ["test"]},
}


def read_tiles(folder: Path) -> dict[str, Array]:
    """Read WebP sheets ``train_NN.webp``/``test_NN.webp`` (50 x 50 pictures each, row by row) and ``labels.npz``."""
    from PIL import Image

    arrays: dict[str, Array] = {}
    with np.load(folder / "labels.npz", allow_pickle=False) as labels:
        for split in ("train", "test"):
            y = labels[f"{split}_labels"].ravel().astype(np.int64)
            x = np.empty((len(y), 32, 32, 3), np.uint8)
            sheets = sorted(folder.glob(f"{split}_*.webp"))
            if len(sheets) * 2500 != len(y):
                raise DataError(f"{folder} has {len(sheets)} {split} sheets of 2500 pictures for {len(y)} labels")
            for i, path in enumerate(sheets):
                with Image.open(path) as picture:
                    sheet = np.asarray(picture.convert("RGB"))
                rows = sheet.reshape(50, 32, 50, 32, 3).transpose(0, 2, 1, 3, 4)
                x[i * 2500 : (i + 1) * 2500] = rows.reshape(-1, 32, 32, 3)
            arrays[f"x_{split}"], arrays[f"y_{split}"] = x, y
    return arrays


def read_binary(path: Path, classes: int) -> dict[str, Array]:
    """Read the published ``cifar-*-binary.tar.gz``.

    A record is a label byte (CIFAR-100: coarse and fine) and 3072 bytes of pixels.
    """
    label_bytes = 1 if classes == 10 else 2
    arrays: dict[str, Array] = {}
    for split, pieces in read_members(path, BINARY_MEMBERS[classes]).items():
        records = np.concatenate([np.frombuffer(piece, np.uint8).reshape(-1, label_bytes + 3072) for piece in pieces])
        arrays[f"x_{split}"] = to_pictures(records[:, label_bytes:])
        arrays[f"y_{split}"] = records[:, label_bytes - 1].astype(np.int64)
    return arrays


def read_python(path: Path, classes: int) -> dict[str, Array]:
    """Read the published ``cifar-*-python.tar.gz``; its members are pickles, and only arrays are admitted."""
    key = b"labels" if classes == 10 else b"fine_labels"
    arrays: dict[str, Array] = {}
    for split, pieces in read_members(path, PYTHON_MEMBERS[classes]).items():
        batches = [read_pickle(piece, encoding="bytes") for piece in pieces]
        if not all(isinstance(batch, dict) for batch in batches):
            raise DataError("a member is no dictionary")
        arrays[f"x_{split}"] = to_pictures(np.concatenate([batch[b"data"] for batch in batches]))
        arrays[f"y_{split}"] = np.concatenate([np.asarray(batch[key], np.int64) for batch in batches])
    return arrays


def read_members(path: Path, wanted: dict[str, list[str]]) -> dict[str, list[bytes]]:
    """Return the bytes of the members ``wanted`` (by the last part of their names), per split.

    Raises DataError if one is missing.
    """
    content: dict[str, bytes] = {}
    names = {name for members in wanted.values() for name in members}
    with tarfile.open(path) as archive:
        for member in archive:
            base = member.name.rpartition("/")[2]
            if base in names and (file := archive.extractfile(member)) is not None:
                content[base] = file.read()
    if missing := sorted(names - set(content)):
        raise DataError(f"{path} has no member {', '.join(missing)}")
    return {split: [content[name] for name in members] for split, members in wanted.items()}


def to_pictures(rows: Array) -> Array:
    """Reshape rows (n, 3072), with the red, green and blue planes concatenated, to (n, 32, 32, 3)."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
