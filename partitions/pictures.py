"""One picture of a source after the other: what it is like (``look``), and itself (``read``).

Whoever imports looks at all of them first, at their headers alone, and then reads them one by one: no more than one is
ever held. PNG and its like are named by their file; a scan (DICOM, NIfTI) never is, because hospitals write patients'
names into file names: it is told by its place, a line of a csv or a number.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from partitions.splits import Array

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".pgm", ".ppm")
NIFTI = (".nii", ".nii.gz")
DICOM = (".dcm", ".dicom", ".ima")  # what is called so is never named, be it DICOM or not
MOST_SIDE = 1 << 14  # pixels; a longer side after resampling is a mistake in the spacing
ORIENTATION = 0x0112  # of EXIF
KEY = secrets.token_bytes(32)  # of this process; it is never written


@dataclass(frozen=True)
class Row:
    """One sample before it is read: where it was found, and what is said of it."""

    where: str  # for messages: "table.csv, line 7"
    labels: tuple[str, ...]  # or none, where there is a mask
    split: str  # "" = not given
    patient: str  # "" = not given
    file: Path | None = None
    mask: Path | None = None
    values: tuple[float, ...] = ()
    text: str = ""
    part: int | None = None  # which slice of a volume; None: the middle one


@dataclass(frozen=True)
class Wish:
    """How pictures shall be read. ``size``: pixels of a side; ``window``: centre and width, in the scan's own units;
    ``spacing``: mm of a pixel; ``slices``: of each series or volume; ``series``: a pattern for its description.
    """

    size: int | None = None
    window: tuple[float, float] | None = None
    spacing: float | None = None
    slices: int = 1
    series: str = ""

    def __post_init__(self) -> None:
        for name, number in (("size", self.size), ("slices", self.slices)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be 1 or more")
        for name, value in (("the window's width", self.window and self.window[1]), ("spacing", self.spacing)):
            if value is not None and not 0 < value < np.inf:
                raise ValueError(f"{name} is {value:g}; it must be above 0")


@dataclass(frozen=True)
class Form:
    """What a picture is like, known without its pixels.

    ``deep``: it becomes float32 in 0..1 and not uint8; ``patient``: a pseudonym, "" where nobody is named; ``notes``:
    what a hospital must know of it, each a text that ends the sentence "12 of 340 pictures ...".
    """

    height: int
    width: int
    channels: int
    deep: bool
    patient: str = ""
    notes: tuple[str, ...] = field(default=())


def kind_of(path: Path) -> str:
    """``dicom`` by what is in the file (or by its name), ``nifti`` by its name; all else is a ``picture``."""
    if path.name.lower().endswith(NIFTI):
        return "nifti"
    return "dicom" if path.name.lower().endswith(DICOM) or is_dicom(path) else "picture"


def is_dicom(path: Path) -> bool:
    """Whether a file begins as DICOM files do: 128 bytes of any kind, then DICM."""
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:  # whoever reads it says so
        return False


def pseudonym(name: str) -> str:
    """A keyed hash in a patient's name's place, another one in every process; "" stays ""."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), key=KEY, digest_size=16).hexdigest() if name else ""


def look(row: Row, wish: Wish) -> Form:
    """What a row's picture will be like. Raises ValueError, one line, where it cannot be read."""
    assert row.file is not None
    kind = kind_of(row.file)
    if kind == "dicom":
        from partitions import dicom

        return dicom.look(row.file, row.where, wish, row.part)
    if kind == "nifti":
        from partitions import nifti

        return nifti.look(row.file, row.where, wish)
    with _opened(row.file, row.where) as picture:
        if picture.mode in ("I", "F"):
            raise ValueError(f"its pixels are 32-bit ({picture.mode}); convert it to 8 or 16 bit")
        width, height = picture.size
        if picture.getexif().get(ORIENTATION, 1) >= 5:  # turned by a quarter
            width, height = height, width
        height, width = fitted(height, width, None, wish)
        deep = picture.mode.startswith("I;16")
        return Form(height, width, 1 if deep or picture.mode in ("1", "L", "LA") else 3, deep)


def read(row: Row, wish: Wish) -> Array:
    """Read a row's picture: uint8 (h, w, 1 or 3), or float32 (h, w, 1) in 0..1 if it is grey of more than 8 bits.

    Raises ValueError, one line, where it cannot be read.
    """
    assert row.file is not None
    kind = kind_of(row.file)
    if kind == "dicom":
        from partitions import dicom

        return dicom.read(row.file, row.where, wish, row.part)
    if kind == "nifti":
        from partitions import nifti

        return nifti.read(row.file, row.where, wish, row.part)
    with _opened(row.file, row.where) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):
            picture = Image.fromarray(np.asarray(picture).astype(np.float32) / 65535)
        else:
            picture = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
        array = np.asarray(fit(picture, None, wish, Image.Resampling.BILINEAR))
    return array[..., np.newaxis] if array.ndim == 2 else array


def read_mask(row: Row, wish: Wish) -> Array:
    """Read a row's mask, uint8 (h, w): a grey (or palette) picture, or NIfTI, of classes, 0 the background."""
    assert row.file is not None and row.mask is not None
    if kind_of(row.mask) == "nifti":
        from partitions import nifti

        return nifti.read_mask(row.file, row.mask, row.where, wish, row.part)
    with _opened(row.mask, row.where) as opened:
        mask: Image.Image = ImageOps.exif_transpose(opened)
        if mask.mode not in ("1", "L", "P"):
            raise ValueError(f"its pixels are {mask.mode}; save classes 0, 1, 2, ... as 8-bit grey")
        return np.asarray(fit(mask, None, wish, Image.Resampling.NEAREST)).astype(np.uint8)


def name_of(path: Path) -> str:
    """What to call a file in a message."""
    return "its file" if kind_of(path) in ("dicom", "nifti") else path.name


@contextmanager
def _opened(path: Path, where: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as picture:
            yield picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{where}: {path.name} cannot be read ({reason})") from error


# Sizes


def fitted(height: int, width: int, spacing: tuple[float, float] | None, wish: Wish) -> tuple[int, int]:
    """Height and width of a picture once it is as wished: as :func:`fit` makes it."""
    sides = square(height, width, spacing, wish.spacing)
    return (wish.size, wish.size) if wish.size else sides


def square(
    height: int, width: int, spacing: tuple[float, float] | None, wanted: float | None = None
) -> tuple[int, int]:
    """Height and width in square pixels of ``wanted`` mm, or of the smaller side of those that there are.

    ``spacing``: mm from row to row and from column to column, or None where nobody knows.
    """
    if spacing is None:
        if wanted:
            raise Plain("it does not say how large its pixels are; leave --spacing out")
        return height, width
    pixel = wanted or min(spacing)
    sides = max(1, round(height * spacing[0] / pixel)), max(1, round(width * spacing[1] / pixel))
    if max(sides) > MOST_SIDE:
        raise Plain(f"it would have {max(sides)} pixels on a side; give another --spacing, in mm")
    return sides


def fit(
    picture: Image.Image, spacing: tuple[float, float] | None, wish: Wish, resampling: Image.Resampling
) -> Image.Image:
    """A picture with square pixels, of the wished size.

    Without a wished spacing it is stretched to the size; with one it is cut, or widened with 0, about its centre, so
    that a pixel keeps its mm.
    """
    height, width = square(picture.height, picture.width, spacing, wish.spacing)
    if wish.size and wish.spacing is None:
        height = width = wish.size
    if (width, height) != picture.size:
        picture = picture.resize((width, height), resampling)
    if wish.size and (width, height) != (wish.size, wish.size):
        left, top = (width - wish.size) // 2, (height - wish.size) // 2
        picture = picture.crop((left, top, left + wish.size, top + wish.size))
    return picture


def parts_of(depth: int, count: int) -> list[int]:
    """Which of ``depth`` slices to take: the middle ones of ``count`` equal parts, so one is the middle of all."""
    count = min(count, depth)
    return [(2 * i + 1) * depth // (2 * count) for i in range(count)]


# What others' libraries say is not passed on


class Plain(ValueError):
    """What is wrong with a scan, in words of ours that hold nothing of its header."""


class Unavailable(ValueError):
    """The library that reads a kind of scan is not installed."""

    def __init__(self, kind: str, package: str) -> None:
        super().__init__(
            f"{kind} is read with {package}, which is not installed here: pip install {package}, "
            "or `make install` in a checkout of silofl"
        )


@contextmanager
def discreet(where: str, kind: str, hint: str = "") -> Iterator[None]:
    """Errors, warnings and logs of a library that reads scans may quote what a header says: nothing of them is shown.

    Raises ValueError, one line: ``where`` and a text of ours, or the kind of error alone.
    """
    loggers = [logging.getLogger(name) for name in ("pydicom", "nibabel", "nibabel.global")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FileNotFoundError:
        raise ValueError(f"{where}: there is no such file") from None
    except Unavailable:
        raise
    except Plain as error:
        raise ValueError(f"{where}: {error}") from None
    except Exception as error:
        raise ValueError(f"{where}: its file cannot be read as {kind} ({type(error).__name__}){hint}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
