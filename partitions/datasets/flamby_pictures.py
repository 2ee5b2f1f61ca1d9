"""FLamby's federations of pictures: skin lesions (Fed-ISIC2019) and brains (Fed-IXI); `flamby.py` has its tables."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.datasets.download import Source, read_rgb
from partitions.datasets.flamby import by_centre
from partitions.splits import Array, Dataset

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
    found = [table.parent / f"{ISIC_PICTURES}{ending}" for ending in ("_preprocessed", "")]
    folder = next((one for one in found if one.is_dir()), None)
    if folder is None:
        raise source.fault(
            f"there is no folder {found[1]}; unpack the challenge's {ISIC_PICTURES}.zip there"
        )
    pictures = [folder / f"{row.picture}.jpg" for row in rows]
    if missing := [picture for picture in pictures if not picture.is_file()]:
        raise source.fault(
            f"{len(missing)} of {len(rows)} pictures are missing, first {missing[0]}"
        )

    def decode() -> dict[str, Array]:
        x = np.empty((len(pictures), ISIC_SIDE, ISIC_SIDE, 3), np.uint8)
        for own, picture in zip(x, tqdm(pictures, desc=source.name, unit=""), strict=True):
            own[:] = read_isic(source, picture, prepared=folder == found[0])
        return {"x": x}

    x = source.once([table, *pictures], decode)["x"]
    y = np.array([row.label for row in rows], np.int64)
    centre = np.array([row.centre for row in rows])
    n_train = sum(not row.test for row in rows)
    return by_centre(source, x, y, centre, n_train, source.about["centres"])


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
    whitened: Array = values * np.sqrt(np.mean(light**2)) / light
    return np.clip(whitened, 0, 255).astype(np.uint8)


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
    found = (
        one
        for folder in source.folders
        for one in (folder / "IXI_sample", *sorted(folder.glob("*/IXI_sample")))
    )
    root = next((one for one in found if one.is_dir()), None)
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

    def decode() -> dict[str, Array]:
        from partitions.importing.volumes.nifti import read_stored

        x = np.empty((len(subjects), *IXI_SHAPE, 1), np.float32)
        y = np.empty((len(subjects), *IXI_SHAPE), np.uint8)
        for i, path in enumerate(tqdm(files, desc=source.name, unit="")):
            values = average_pool(read_stored(path, f"{source.name}: {path}"), IXI_SHAPE)
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
        if strange := [subject for subject in subjects if of[subject] not in ("train", "test")]:
            raise source.fault(
                f"{table} says neither train nor test of {strange[0]}; copy it again"
            )
        return {subject for subject in subjects if of[subject] == "test"}
    rng = np.random.RandomState(IXI_SEED)
    tested = set()
    for centre, number in source.about["sizes"].items():
        ours = [subject for subject in subjects if centre_of(subject) == centre]
        if len(ours) != number:
            raise source.fault(
                f"{root} has {len(ours)} of the {number} subjects of {centre}; unpack the whole "
                f"archive, or put FLamby's metadata_tiny.csv, which has the test parts, into {root.parent}"
            )
        n_train = round(number * IXI_TRAIN)
        drawn = ["train"] * n_train + ["test"] * (number - n_train)
        rng.shuffle(drawn)
        tested |= {subject for subject, part in zip(ours, drawn, strict=True) if part == "test"}
    return tested


def centre_of(subject: str) -> str:
    """Return the centre in a subject's name: ``Guys`` in ``IXI002-Guys-0828``."""
    return subject.split("-")[1]


def one_file(source: Source, folder: Path) -> Path:
    """Return the only volume in a folder. Raises DataError for none or several."""
    found = sorted(folder.glob("*.nii.gz"))
    if len(found) != 1:
        raise source.fault(
            f"{folder} has {len(found)} files *.nii.gz, not one; unpack the archive again"
        )
    return found[0]


def average_pool(volume: Array, shape: Sequence[int]) -> Array:
    """Resize the volume to another shape, as in PyTorch's adaptive average pooling.

    Cell i of m along an axis of n is the mean of the cells floor(i n / m) to ceil((i + 1) n / m), exclusive.
    """
    for axis, m in enumerate(shape):
        n = volume.shape[axis]
        weights = np.zeros((m, n), np.float64)
        for i in range(m):
            first, last = i * n // m, -(-(i + 1) * n // m)
            weights[i, first:last] = 1 / (last - first)
        volume = np.moveaxis(np.tensordot(weights, volume, axes=(1, axis)), 0, axis)
    return volume
