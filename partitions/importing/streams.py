"""Pictures and masks: described from their headers first, then streamed into the file one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.files import Faults, name_first
from partitions.importing.readers.reader import ImageInfo, Samples, SampleSource
from partitions.importing.readers.registry import (
    kind_of,
    probe_sample,
    read_mask,
    read_sample,
    shown_name,
)
from partitions.importing.readers.signals import check_signals_alike
from partitions.labels import VOID
from partitions.recipes.pictures import (
    KIND,
    SIGNALS,
    PictureRecipe,
    differences,
    expect,
    kind_by,
    made_by,
    photometric_notes,
)
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array, Shape
from partitions.stored import OnDisk


class Unread(OnDisk):
    """Pictures or masks of samples, (n, ...), each read from its file by ``read`` when it is needed."""

    at_once = 1

    def __init__(
        self,
        samples: Samples,
        read: Callable[[SampleSource], Array],
        shape: Shape,
        dtype: npt.DTypeLike,
    ) -> None:
        self.samples, self.read = samples, read
        self.shape, self.dtype = (len(samples), *shape), np.dtype(dtype)

    def __getitem__(self, index: Any) -> Array:
        return np.array([self.read(sample) for sample in self.samples[index]], self.dtype)

    def part(self, rows: Array) -> Unread:
        chosen = [self.samples[i] for i in rows]
        return Unread(chosen, self.read, self.shape[1:], self.dtype)


def probe_all(
    samples: Samples, reading: ReadOptions, faults: Faults
) -> tuple[list[SampleSource], list[ImageInfo]]:
    """Probe each picture: read its image info from the header; return those that can be read, with their patients.

    To leave out those that cannot, each is decoded here, and again when it is written.
    """

    def look(sample: SampleSource) -> ImageInfo:
        info = probe_sample(sample, reading)
        if faults.skip:
            read_sample(sample, reading)
            if sample.masks:
                read_mask(sample, reading)
        return info

    probed = faults.good(samples, look, "looking")
    # With the patient that the header names, where the source names none
    rows = [
        sample
        if sample.patient and sample.spelling
        else replace(sample, patient=sample.patient or info.patient, spelling=info.spelling)
        for sample, info in probed
    ]
    return rows, [info for _, info in probed]


def common_form(samples: Samples, infos: Sequence[ImageInfo]) -> tuple[Shape, str]:
    """Return shape and type of all pictures, uint8 or float32 (h, w, c), c = 1, or 3 if any is in colour.

    Signals are float32 (steps, channels). Raises DataError where they differ.
    """
    if signals := [info for info in infos if info.rate]:
        if len(signals) < len(infos):
            raise DataError("the samples are signals and pictures: import them one by one")
        check_signals_alike([sample.where for sample in samples], infos)
        return (signals[0].height, signals[0].channels), "float32"
    # Plain: the first that is no scan, whose depth was chosen by its maker
    first, plain = infos[0], None
    for sample, info in zip(samples, infos, strict=True):
        what = f"{sample.where}: {shown_name(sample.path)}"
        # Volumes have equal shapes already
        if (info.height, info.width) != (first.height, first.width):
            sizes = (
                f"{info.width} x {info.height}, those before it {first.width} x {first.height}"
            )
            raise DataError(f"{what} is {sizes}; use --size")
        if kind_of(sample.path) == "picture":
            plain = plain or info
            if info.deep != plain.deep:
                raise DataError(f"{what} mixes 8-bit and 16-bit pictures; convert them alike")
    return form_of(infos, first.height, first.width)


def form_of(infos: Sequence[ImageInfo], height: int, width: int) -> tuple[Shape, str]:
    """Return shape and type of pictures or volumes of this size."""
    depth = (infos[0].depth,) if infos[0].depth else ()
    channels = max(info.channels for info in infos)
    dtype = "float32" if any(info.deep for info in infos) else "uint8"
    return (*depth, height, width, channels), dtype


def check_expected(samples: Samples, infos: Sequence[ImageInfo], recipe: PictureRecipe) -> None:
    """Raise DataError, one line, with the first pictures that do not match the recipe, and the differences."""
    faults = [
        f"{sample.where}: {'; '.join(reasons)}"
        for sample, info in zip(samples, infos, strict=True)
        if (reasons := [*differences(info.acquired, recipe.expected), *unlike(info, recipe)])
    ]
    if faults:
        raise DataError(
            f"{len(faults)} of {len(samples)} {recipe.kind} do not fit the recipe: "
            f"{name_first(faults)}; take them out, or allow it under "
            "[expected] in the recipe if the model may be used for them"
        )


def unlike(info: ImageInfo, recipe: PictureRecipe) -> Iterator[str]:
    """Yield the properties of a picture that prevent conversion to the recipe's shape and type."""
    if bool(info.rate) != (recipe.kind == SIGNALS):
        yield f"it is a {'signal' if info.rate else 'picture'}, where the recipe has {recipe.kind}"
        return
    if info.rate:
        steps = recipe.pictures.shape[0]
        if info.height != steps:
            yield f"it has {info.height} steps, where the recipe has {steps}"
        return
    *depth, height, width, channels = recipe.pictures.shape
    deep = recipe.pictures.dtype == "float32"
    if info.channels > channels:
        yield "it is in colour, where the recipe has grey"
    if info.deep and not deep:
        yield "it has more than 8 bits, where the recipe has 8"
    if deep and not info.deep and info.acquired.format == "picture" and channels == 1:
        yield "it has 8 bits, where the recipe has more"
    if (info.height, info.width) != (height, width) and not depth:
        yield f"it is {info.width} x {info.height}, where the recipe has {width} x {height}"


def draft_pictures(
    infos: Sequence[ImageInfo], shape: Shape, dtype: str, reading: ReadOptions, **roles: Any
) -> PictureRecipe:
    """Return the recipe by which pictures, or signals like the first one, are read. ``roles``: labels and patients."""
    first = infos[0]
    if first.rate:
        reading = replace(reading, channels=first.acquired.channels, rate=first.rate)
    return PictureRecipe(
        kind=kind_by(shape),
        pictures=made_by(shape, dtype, reading),
        expected=expect([info.acquired for info in infos]),
        **roles,
    )


def count_notes(infos: Sequence[ImageInfo]) -> list[str]:
    """Return the notes for the hospital, each with its number of pictures."""
    what = SIGNALS if any(info.rate for info in infos) else KIND
    counts = Counter(note for info in infos for note in info.notes)
    return [f"{count} of {len(infos)} {what} {note}" for note, count in counts.items()]


def open_pictures(
    samples: Samples, recipe: PictureRecipe, faults: Faults | None = None
) -> Unread:
    """Return the samples' pictures in the recipe's shape and type, to be read one by one.

    ``faults``: takes the files that cannot be read, in whose place 0 is read, and raises at the last one.
    """
    result, reading = recipe.pictures, recipe.reading

    def show_progress() -> Iterator[int]:
        yield from tqdm(range(len(samples)), desc="pictures", unit="")

    progress = show_progress()  # whose bar is shown from the first picture on

    def read_like(sample: SampleSource) -> Array:
        last = next(progress, 0) == len(samples) - 1
        picture = np.zeros(result.shape, result.dtype)
        with faults.collect() if faults else nullcontext():
            picture = read_sample(sample, reading)
        if faults and last:
            faults.check(len(samples))
        if result.dtype == "float32" and picture.dtype == np.uint8:
            picture = picture.astype(np.float32) / 255
        return np.broadcast_to(picture, result.shape)

    return Unread(samples, read_like, result.shape, result.dtype)


def open_masks(samples: Samples, reading: ReadOptions) -> tuple[Unread, Array, bool]:
    """Return masks uint8 (n, [d,] h, w), which values each one has, bool (n, 256), and whether they are binary.

    If all have 0 and 255 alone, 255 is what was drawn, class 1, and not what does not count. Each mask is read here,
    and again when it is written.
    """
    shape, seen = Shape(), np.zeros((len(samples), 256), bool)
    for values, sample in zip(seen, tqdm(samples, desc="masks", unit=""), strict=True):
        mask = read_mask(sample, reading)
        shape = shape or mask.shape
        if mask.shape != shape:
            raise DataError(
                f"{sample.where}: {shown_name(sample.masks[0])} has another size than those before it; use --size"
            )
        values[np.unique(mask)] = True
    if {*np.flatnonzero(seen.any(0)).tolist()} - {0} == {VOID}:
        reading = replace(reading, binary_masks=True)
        seen[:, [1, VOID]] = seen[:, [VOID, 1]]
    masks = Unread(samples, partial(read_mask, reading=reading), shape, np.uint8)
    return masks, seen, reading.binary_masks


def new_pictures(
    samples: Samples, recipe: PictureRecipe, faults: Faults | None = None
) -> tuple[Unread, Names]:
    """Return pictures to be read by a recipe, and notes. Raises DataError where they do not match the recipe."""
    if any(sample.file is None for sample in samples):
        raise DataError("the recipe is of pictures, and these are rows of a table")
    good, infos = probe_all(samples, recipe.reading, faults or Faults(None))
    check_expected(good, infos, recipe)
    notes = photometric_notes([info.acquired for info in infos], recipe.expected)
    return open_pictures(good, recipe), (*count_notes(infos), *notes)
