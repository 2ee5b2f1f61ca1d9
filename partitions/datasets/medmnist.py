"""MedMNIST (Yang et al., Scientific Data 2023) with its official tasks: ``pathmnist``, and larger ``pathmnist-64``.

The published files are read as they are, ``pathmnist.npz`` (28 x 28) or ``pathmnist_64.npz``; the 3D sets are volumes,
``organmnist3d`` and ``organmnist3d-64``. The pictures of the largest set take 16 GB, so they are never in memory as a
whole. A file is unpacked into our cache piece by piece, the validation part after the training part, and mapped from
there, shared between processes.
"""

from __future__ import annotations

import io
import math
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.registry import Source, cached_folder, download
from partitions.npz import read_array
from partitions.splits import Array, Dataset, Shape, Split

PARTS = {"train": ("train", "val"), "test": ("test",)}


def load_medmnist(source: Source) -> Dataset:
    """Load a MedMNIST set with its official task; the training samples are its training and validation parts.

    Raises DataError where its file cannot be found or downloaded, or is not valid.
    """
    flag, _, side = source.name.partition("-")
    size, described = int(side or 28), source.described
    file_name = f"{flag}_{size}.npz" if side else f"{flag}.npz"
    at_home = Path.home() / ".medmnist" / file_name
    path = source.find(file_name) or (at_home if at_home.is_file() else None)
    if path is None:
        from medmnist.info import INFO  # imports torch

        url, md5 = (INFO[flag][f"{key}_{size}" if side else key] for key in ("url", "MD5"))
        path = download(source.name, url, md5, source.data_dir, described.folders[0], file_name)
    sides = (size,) * (3 if flag.endswith("3d") else 2)
    splits = []
    with source.reading(path):
        pictures = _pictures(source.name, path, sides)
        for x, parts in zip(pictures, PARTS.values(), strict=True):
            y = np.concatenate(
                [_labels(path, part, described.task, described.classes) for part in parts]
            )
            if len(x) != len(y):
                raise DataError(f"{' and '.join(parts)}: {len(x)} pictures for {len(y)} labels")
            splits.append(Split(x, y))
    return source.in_parts(*splits)


def _labels(path: Path, part: str, task: str, classes: int) -> Array:
    """Read the labels of one part: int64 (n,), for findings float32 (n, L)."""
    with zipfile.ZipFile(path) as archive:
        y = read_array(archive, archive.getinfo(f"{part}_labels.npy"))
    several = task == "multilabel"
    y = y.astype(np.float32) if several else y.reshape(-1).astype(np.int64)
    if several and y.shape != (len(y), classes):
        raise DataError(f"{part}: labels are {y.shape}, and not {classes} for each picture")
    largest = 1 if several else classes - 1
    if len(y) and not 0 <= y.min() <= y.max() <= largest:
        raise DataError(f"{part}: labels are not all in 0..{largest}")
    return y


def _pictures(name: str, path: Path, size: Shape) -> list[Array]:
    """Return pictures for training and for testing, uint8 (n, *size, c), mapped; without a cache, in memory."""

    def unpack(folder: Path) -> None:
        for key, members in PARTS.items():
            with (folder / f"{key}.npy").open("wb") as out:
                _join(path, members, size, out)

    if folder := cached_folder(name, [path], unpack):
        return [np.load(folder / f"{key}.npy", mmap_mode="r") for key in PARTS]
    pictures = []
    for members in PARTS.values():
        buffer = io.BytesIO()
        _join(path, members, size, buffer)
        buffer.seek(0)
        pictures.append(np.load(buffer, allow_pickle=False))
    return pictures


def _join(path: Path, parts: Sequence[str], size: Shape, out: IO[bytes]) -> None:
    """Write the pictures of these parts, concatenated, as one .npy file, with one piece at a time in memory."""
    with zipfile.ZipFile(path) as archive:
        shapes = []
        for part in parts:
            with archive.open(f"{part}_images.npy") as file:
                shapes.append(_shape(part, file, size))
        if len({shape[1:] for shape in shapes}) > 1:
            raise DataError(f"{' and '.join(parts)} hold pictures of different shapes")
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        header = {"descr": "|u1", "fortran_order": False, "shape": whole}
        np.lib.format.write_array_header_1_0(out, header)
        for part, shape in zip(parts, shapes, strict=True):
            with archive.open(f"{part}_images.npy") as file:
                _shape(part, file, size)
                start = out.tell()
                shutil.copyfileobj(file, out, 1 << 20)
                if out.tell() - start != math.prod(shape):
                    raise DataError(f"{part}: there are other pictures than the header says")


def _shape(part: str, file: IO[bytes], size: Shape) -> Shape:
    """Read the header of a part's array, and return the shape (n, *size, c) of its pictures."""
    version, _ = np.lib.format.read_magic(file)
    shape, fortran, dtype = getattr(np.lib.format, f"read_array_header_{version}_0")(file)
    full = tuple(shape) if len(shape) == len(size) + 2 else (*shape, 1)
    if dtype != np.uint8 or fortran or full[1:-1] != size:
        wanted = " x ".join(map(str, size))
        raise DataError(
            f"{part}: pictures are {dtype} {tuple(shape)}, and not uint8 of {wanted}"
        )
    return full
