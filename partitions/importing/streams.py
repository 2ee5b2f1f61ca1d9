"""Pictures and masks: described by their headers first, then streamed into the file one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.importing.images import SampleSource, kind_of, name_of, probe, read, read_mask
from partitions.importing.scans import ImageInfo, ReadOptions
from partitions.labels import read_count
from partitions.splits import Array


def blank(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Shape and type of pictures or masks that are not in memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def rows_of(array: Array, chosen: Array) -> Array:
    """These samples; of pictures and masks, which are blank, as many blank ones."""
    return array[chosen] if array.ndim <= 2 else np.broadcast_to(array[:1], (len(chosen), *array.shape[1:]))


def probe_all(samples: Sequence[SampleSource], reading: ReadOptions) -> list[ImageInfo]:
    """Probe each picture: read its image info from the header."""
    return [probe(sample, reading) for sample in tqdm(samples, desc="looking", unit="")]


def describe(samples: Sequence[SampleSource], infos: Sequence[ImageInfo]) -> Array:
    """Blank pictures, uint8 or float32 (n, h, w, c), c = 1, or 3 if any is in colour."""
    first, plain = infos[0], None  # the first one that is no scan, whose depth is what its maker chose
    for sample, info in zip(samples, infos, strict=True):
        assert sample.file is not None
        what = f"{sample.where}: {name_of(sample.file)}"
        if (info.height, info.width) != (first.height, first.width):
            sizes = f"{info.width} x {info.height}, those before it {first.width} x {first.height}"
            raise DataError(f"{what} is {sizes}; use --size")
        if kind_of(sample.file) == "picture":
            plain = plain or info
            if info.deep != plain.deep:
                raise DataError(f"{what} mixes 8-bit and 16-bit pictures; convert them alike")
    deep, channels = any(info.deep for info in infos), max(info.channels for info in infos)
    return blank((len(samples), first.height, first.width, channels), np.float32 if deep else np.uint8)


def count_notes(infos: Sequence[ImageInfo]) -> list[str]:
    """Return the notes for the hospital, each with its number of pictures."""
    return [
        f"{count} of {len(infos)} pictures {note}" for note, count in Counter(n for f in infos for n in f.notes).items()
    ]


def read_pictures(
    samples: Sequence[SampleSource], reading: ReadOptions, like: Array, progress: tqdm[NoReturn]
) -> Iterator[Array]:
    """One picture after the other, in the shape and type of ``like``."""
    for sample in samples:
        picture = read(sample, reading)
        if like.dtype == np.float32 and picture.dtype == np.uint8:
            picture = picture.astype(np.float32) / 255
        yield np.broadcast_to(picture, like.shape[1:])
        progress.update()


def probe_masks(samples: Sequence[SampleSource], reading: ReadOptions) -> tuple[Array, tuple[str, ...], int]:
    """Blank masks uint8 (n, h, w), no names, and the number of classes: each is read here, and again to be written."""
    first, seen = None, np.zeros(256, bool)
    for sample in tqdm(samples, desc="masks", unit=""):
        assert sample.mask is not None
        mask = read_mask(sample, reading)
        first = mask if first is None else first
        if mask.shape != first.shape:
            raise DataError(f"{sample.where}: {name_of(sample.mask)} has another size than those before it; use --size")
        seen[np.unique(mask)] = True
    assert first is not None
    y = blank((len(samples), *first.shape), np.uint8)
    return y, (), read_count("segmentation", {}, {"all": np.flatnonzero(seen)})
