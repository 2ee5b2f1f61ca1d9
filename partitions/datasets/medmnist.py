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
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.download import RemoteFile, cached_folder, download, find, places
from partitions.npz import read_array
from partitions.splits import Array, Dataset, Split

# Title and number of classes of the sets of medmnist 3. Kept here because importing medmnist costs seconds.
MEDMNIST = {
    "pathmnist": ("colon pathology", 9),
    "chestmnist": ("chest X-ray, 14 findings", 14),
    "dermamnist": ("dermatoscope", 7),
    "octmnist": ("retinal OCT", 4),
    "pneumoniamnist": ("chest X-ray, pneumonia", 2),
    "retinamnist": ("fundus camera, diabetic retinopathy grade", 5),
    "breastmnist": ("breast ultrasound", 2),
    "bloodmnist": ("blood cell microscope", 8),
    "tissuemnist": ("kidney cortex microscope", 8),
    "organamnist": ("abdominal CT, axial", 11),
    "organcmnist": ("abdominal CT, coronal", 11),
    "organsmnist": ("abdominal CT, sagittal", 11),
    "organmnist3d": ("abdominal CT, organs", 11),
    "nodulemnist3d": ("chest CT, lung nodules", 2),
    "adrenalmnist3d": ("abdominal CT, shape of adrenal glands", 2),
    "fracturemnist3d": ("chest CT, rib fractures", 3),
    "vesselmnist3d": ("brain MRA, shape of vessels, aneurysms", 2),
    "synapsemnist3d": ("electron microscope, synapses", 2),
}
# The others are multiclass
MEDMNIST_TASKS = {"chestmnist": "multilabel", "retinamnist": "ordinal"}
TRAIN, TEST = ("train", "val"), ("test",)


def medmnist_sets() -> dict[str, tuple[str, int]]:
    """Return every name (``pathmnist`` for 28 pixels, ``pathmnist-64`` and so on) with title and number of classes."""
    found = {}
    for size in (28, 64, 128, 224):
        for flag, (title, classes) in MEDMNIST.items():
            sides = [str(size)] * (3 if flag.endswith("3d") else 2)
            if len(sides) == 2 or size <= 64:
                found[flag if size == 28 else f"{flag}-{size}"] = (
                    f"{title}, {'x'.join(sides)}",
                    classes,
                )
    return found


def load_medmnist(name: str, data_dir: str) -> Dataset:
    """Load a MedMNIST set with its official task; the training samples are its training and validation parts.

    Raises DataError where its file cannot be found or downloaded, or is not valid.
    """
    flag, _, side = name.partition("-")
    size = int(side or 28)
    file_name = f"{flag}_{size}.npz" if side else f"{flag}.npz"
    path = find(
        [file_name], [*places(data_dir, ("medmnist", "MedMNIST")), Path.home() / ".medmnist"]
    )
    if path is None:
        from medmnist.info import INFO  # imports torch

        url, md5 = (INFO[flag][f"{key}_{size}" if side else key] for key in ("url", "MD5"))
        path = download(name, RemoteFile(file_name, url, md5), data_dir, "medmnist")
    classes, task = MEDMNIST[flag][1], MEDMNIST_TASKS.get(flag, "multiclass")
    try:
        y = {part: _labels(path, part, task, classes) for part in (*TRAIN, *TEST)}
        x = _pictures(name, path, (size,) * (3 if flag.endswith("3d") else 2))
        for parts, pictures in zip((TRAIN, TEST), x, strict=True):
            labels = sum(len(y[part]) for part in parts)
            if len(pictures) != labels:
                raise DataError(
                    f"{' and '.join(parts)}: {len(pictures)} pictures for {labels} labels"
                )
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{name}: {path} cannot be read ({error}); replace or delete it"
        ) from error
    train = Split(x[0], np.concatenate([y[part] for part in TRAIN]))
    return Dataset(name, train, Split(x[1], y["test"]), classes, task=task)


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


def _pictures(name: str, path: Path, size: tuple[int, ...]) -> tuple[Array, Array]:
    """Return pictures for training and for testing, uint8 (n, *size, c), mapped; without a cache, in memory."""
    parts = {"train": TRAIN, "test": TEST}

    def unpack(folder: Path) -> None:
        for key, members in parts.items():
            with (folder / f"{key}.npy").open("wb") as out:
                _join(path, members, size, out)

    folder = cached_folder(name, [path], unpack)
    if folder is not None:
        train, test = (
            np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in parts
        )
        return train, test
    found = []
    for members in parts.values():
        buffer = io.BytesIO()
        _join(path, members, size, buffer)
        buffer.seek(0)
        found.append(np.load(buffer, allow_pickle=False))
    return found[0], found[1]


def _join(path: Path, parts: Sequence[str], size: tuple[int, ...], out: IO[bytes]) -> None:
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


def _shape(part: str, file: IO[bytes], size: tuple[int, ...]) -> tuple[int, ...]:
    """Read the header of a part's array, and return the shape (n, *size, c) of its pictures."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(file)
    found = tuple(shape) if len(shape) == len(size) + 2 else (*shape, 1)
    if dtype != np.uint8 or fortran or found[1:-1] != size:
        wanted = " x ".join(map(str, size))
        raise DataError(
            f"{part}: pictures are {dtype} {tuple(shape)}, and not uint8 of {wanted}"
        )
    return found
