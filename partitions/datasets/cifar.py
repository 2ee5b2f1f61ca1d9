"""CIFAR-10 and CIFAR-100, and the file formats in which they are read."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.download import RemoteFile, decode_once, download, find, places
from partitions.datasets.pickles import read_pickle
from partitions.splits import Array, Dataset, Split

# The published archives' members in order, per split; those of the Python archive have no ".bin".
MEMBERS = {
    10: {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    100: {"train": ["train.bin"], "test": ["test.bin"]},
}
CIFAR_MD5 = {10: "c32a1d4ab5d03f1284b67883e8d87530", 100: "03b5dce01913d631647c71ecec9e9cb8"}


def load_cifar(name: str, data_dir: str) -> Dataset:
    """Load CIFAR-10 or CIFAR-100: 50,000 and 10,000 colour pictures of 32 x 32.

    They are read from the first of these that exists: ``cifar10.npz`` (x_train, y_train, x_test, y_test), the published
    binary archive, the Python one, or (CIFAR-10) lossless WebP sheets with ``labels.npz``. CIFAR-100: its fine labels.
    Decoded arrays are stored in the cache and mapped from there.
    """
    classes = 10 if name == "cifar10" else 100
    archive = f"cifar-{classes}-binary.tar.gz"
    folders = places(data_dir, (name, name.upper(), f"cifar-{classes}"))
    names = [
        f"{name}.npz",
        archive,
        archive.replace("binary", "python"),
        *(["train_00.webp"] if classes == 10 else []),
    ]
    remote = RemoteFile(
        archive, f"https://www.cs.toronto.edu/~kriz/{archive}", CIFAR_MD5[classes]
    )
    found = find(names, folders) or download(name, remote, data_dir, name)
    tiles, sources = found.suffix == ".webp", [found]
    if tiles:
        sources = [*sorted(found.parent.glob("*.webp")), found.parent / "labels.npz"]

    def decode() -> dict[str, Array]:
        if tiles:
            return read_tiles(found.parent)
        if found.suffix == ".npz":
            with np.load(found, allow_pickle=False) as file:
                return {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test")}
        return read_archive(found, classes)

    try:
        arrays = decode_once(name, sources, decode)
        splits = [
            Split(arrays[f"x_{s}"], arrays[f"y_{s}"].reshape(-1).astype(np.int64))
            for s in ("train", "test")
        ]
        for split in splits:
            if split.x.dtype != np.uint8 or split.x.shape != (len(split.y), 32, 32, 3):
                raise DataError(
                    f"pictures are {split.x.dtype} {split.x.shape} for {len(split.y)} labels"
                )
            if len(split) and not 0 <= split.y.min() <= split.y.max() < classes:
                raise DataError(f"labels are not all in 0..{classes - 1}")
    except (OSError, EOFError, KeyError, TypeError, ValueError, tarfile.TarError) as error:
        raise DataError(
            f"{name}: {found} cannot be read ({error}); replace or delete it"
        ) from error
    return Dataset(name, splits[0], splits[1], classes)


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
                raise DataError(
                    f"{folder} has {len(sheets)} {split} sheets of 2500 pictures for {len(y)} labels"
                )
            for i, path in enumerate(sheets):
                with Image.open(path) as picture:
                    sheet = np.asarray(picture.convert("RGB"))
                rows = sheet.reshape(50, 32, 50, 32, 3).transpose(0, 2, 1, 3, 4)
                x[i * 2500 : (i + 1) * 2500] = rows.reshape(-1, 32, 32, 3)
            arrays[f"x_{split}"], arrays[f"y_{split}"] = x, y
    return arrays


def read_archive(path: Path, classes: int) -> dict[str, Array]:
    """Read a published archive: ``cifar-*-binary.tar.gz``, or ``cifar-*-python.tar.gz``.

    A record of the binary one is one label byte (CIFAR-100: a coarse and a fine one) and 3,072 bytes of planes of red,
    green and blue. A member of the other is a pickle of the same arrays; nothing else in one is read.
    """
    label_bytes, in_python = (1 if classes == 10 else 2), "python" in path.name
    arrays: dict[str, Array] = {}
    with tarfile.open(path) as archive:
        members = {member.name.rpartition("/")[2]: member for member in archive}
        for split, names in MEMBERS[classes].items():
            wanted = [name.removesuffix(".bin") if in_python else name for name in names]
            if missing := [name for name in wanted if name not in members]:
                raise DataError(f"it has no member {missing[0]}")
            pieces = [
                file.read() for name in wanted if (file := archive.extractfile(members[name]))
            ]
            if in_python:
                batches = [read_pickle(piece, encoding="bytes") for piece in pieces]
                key = b"labels" if classes == 10 else b"fine_labels"
                rows, labels = (
                    np.concatenate([np.asarray(one[k]) for one in batches])
                    for k in (b"data", key)
                )
            else:
                records = np.frombuffer(b"".join(pieces), np.uint8).reshape(
                    -1, label_bytes + 3072
                )
                rows, labels = records[:, label_bytes:], records[:, label_bytes - 1]
            arrays[f"x_{split}"] = np.ascontiguousarray(
                rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            )
            arrays[f"y_{split}"] = labels.astype(np.int64)
    return arrays
