"""What every reader of samples has: the protocol, a sample before it is read, its image info, and redacted errors.

A reader takes files of one format. ``registry.py`` lists all readers, and chooses the one of a file. An import probes
all samples first, from their headers alone. It then reads them one by one, so that at most one is in memory.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from partitions.common.errors import DataError
from partitions.common.memory import is_out_of_memory
from partitions.common.names import Names, composed
from partitions.common.sizes import TooLargeError
from partitions.recipes.cells import identifier
from partitions.recipes.reading import Acquisition, Pair, ReadOptions
from partitions.splits import Array

MOST_SIDE = 1 << 14  # pixels; a longer side after resampling is a mistake in the spacing
START = 1024  # first bytes of a file, by which its reader is chosen

Paths = Sequence[Path]
KEY = secrets.token_bytes(32)  # of this process, never written


@dataclass(frozen=True)
class FileSummary:
    """What a file holds, for ``--propose``, from its header.

    * ``kind``: of file, in the plural; ``values``: (property, value) pairs that samples should share.
    * ``identity``: pseudonyms of patient, study and series, "" where the header has none.
    * ``slices``: of the file; ``pixel``: mm of a pixel's smaller side; ``without``: what a file without a picture is.
    """

    kind: str
    values: Sequence[tuple[str, str]] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    slices: int = 1
    pixel: float | None = None
    without: str = ""


@dataclass(frozen=True, slots=True)
class SampleSource:
    """One sample before it is read: its place, and its label, split and patient."""

    where: str  # for messages: "table.csv, line 7"
    labels: Names = ()  # none where there is a mask
    split: str = ""  # "" = not given
    patient: str = ""  # "" = not given
    file: Path | None = None
    text: str = ""
    subgroup: str = ""  # "" = not known
    spelling: str = ""  # the hash of the patient's identifier as it is written
    # The csv's identifier of the patient, for predictions; no file of ours contains it
    key: str = ""
    part: int | None = None  # the slice of a volume; None: the middle one
    files: tuple[Path, ...] = ()  # of a whole volume: a NIfTI file, or all files of a series
    masks: tuple[
        Path, ...
    ] = ()  # a picture or NIfTI file; of a whole volume also SEG and RTSTRUCT objects

    def __post_init__(self) -> None:
        # A folder's name, as macOS writes it
        object.__setattr__(self, "labels", tuple(map(composed, self.labels)))

    @property
    def path(self) -> Path:
        """The file; a row of a table has none."""
        assert self.file is not None
        return self.file


Samples = Sequence[SampleSource]


@dataclass(frozen=True)
class ImageInfo:
    """Properties of a picture from its header.

    * ``deep``: it becomes float32 in 0..1, not uint8.
    * ``patient``: a pseudonym, "" without a patient; ``spelling``: the hash of its identifier as it is written.
    * ``notes``: remarks for the hospital, each a text that ends the sentence "12 of 340 pictures ...".
    * ``acquired``: the properties that other pictures must share.
    * ``rate``: of a signal, Hz after resampling; its ``height`` is the number of steps.
    """

    height: int
    width: int
    channels: int
    deep: bool
    patient: str = ""
    notes: Names = field(default=())
    acquired: Acquisition = field(default_factory=Acquisition)
    depth: int = 0  # of a volume
    spelling: str = ""
    rate: float = 0.0


@dataclass(frozen=True)
class Reader:
    """Reads the samples in files of one format. Every error is a DataError of one line that begins with ``where``.

    * ``name``: of the format: picture, dicom, nifti or signal.
    * ``endings``: of files that are of this format although their first bytes are of none; they may be damaged.
    * ``recognises``: returns whether a file that begins so has this format.
    * ``probe``: returns the image info from the header; nothing is decoded.
    * ``read``: returns the sample: uint8 or float32 (h, w, c), of a signal float32 (steps, channels).
    * ``describe``: returns what a file holds, by its path and its name in messages.
    """

    name: str
    endings: Names
    recognises: Callable[[bytes], bool]
    probe: Callable[[SampleSource, ReadOptions], ImageInfo]
    read: Callable[[SampleSource, ReadOptions], Array]
    describe: Callable[[Path, str], FileSummary]


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file; none where it cannot be read, which its reader reports."""
    try:
        with path.open("rb") as file:
            return file.read(START)
    except OSError:
        return b""


def pseudonym(name: str) -> str:
    """Return a keyed hash that replaces an identifier, different in every process; "" stays "".

    All spellings of an identifier have the same one (``patients.identifier``).
    """
    return hash_text(identifier(name))


def hash_text(text: str) -> str:
    """Return a keyed hash of a text as it is written; "" stays ""."""
    content = text.encode(errors="surrogatepass")
    return hashlib.blake2b(content, key=KEY, digest_size=16).hexdigest() if text else ""


def fitted_size(
    height: int, width: int, spacing: Pair | None, reading: ReadOptions
) -> tuple[int, int]:
    """Return height and width of a picture after :func:`fit_picture`."""
    sides = square(height, width, spacing, reading.spacing)
    return (reading.size, reading.size) if reading.size else sides


def square(
    height: int, width: int, spacing: Pair | None, wanted: float | None = None
) -> tuple[int, int]:
    """Return height and width in square pixels of ``wanted`` mm, or of the smaller side of the present pixels.

    ``spacing``: the distances of rows and columns in mm, or None if unknown.
    """
    if spacing is None:
        if wanted:
            raise ScanError("it does not say how large its pixels are; leave --spacing out")
        return height, width
    pixel = wanted or min(spacing)
    height, width = (
        max(1, round(side * mm / pixel))
        for side, mm in zip((height, width), spacing, strict=True)
    )
    if (most := max(height, width)) > MOST_SIDE:
        raise ScanError(f"it would have {most} pixels on a side; give another --spacing, in mm")
    return height, width


def fit_picture(
    picture: Image.Image,
    spacing: Pair | None,
    reading: ReadOptions,
    resampling: Image.Resampling,
) -> Array:
    """Return a picture with square pixels, of the requested size, as an array (h, w[, c]).

    Without a requested spacing it is stretched to the size. With one it is cropped, or padded with 0, about its centre,
    so that a pixel keeps its mm.
    """
    height, width = square(picture.height, picture.width, spacing, reading.spacing)
    size = reading.size
    if size and reading.spacing is None:
        height = width = size
    if (width, height) != picture.size:
        picture = picture.resize((width, height), resampling)
    if size and (width, height) != (size, size):
        left, top = (width - size) // 2, (height - size) // 2
        picture = picture.crop((left, top, left + size, top + size))
    return np.asarray(picture)


def slices_taken(depth: int, count: int) -> list[int]:
    """Return which of ``depth`` slices to use: the middles of ``count`` equal parts; a single one is the middle."""
    count = min(count, depth)
    return [(2 * i + 1) * depth // (2 * count) for i in range(count)]


class ScanError(DataError):
    """Fault of a scan, with a text that contains nothing from its header."""


class Unavailable(DataError):
    """Error for a missing library that reads a kind of scan."""

    def __init__(self, kind: str, package: str, done: str = "read") -> None:
        super().__init__(
            f"{kind} is {done} with {package}, which is not installed here: pip install {package}, "
            "or `make install` in a checkout of silofl"
        )


def load_library(kind: str, package: str, done: str = "read") -> Any:
    """Return an optional module, with which a kind of scan is read. Raises Unavailable."""
    try:
        return import_module(package)
    except ImportError:
        raise Unavailable(kind, package, done) from None


@contextmanager
def redacted_errors(where: str, kind: str, hint: str = "") -> Iterator[None]:
    """Context that hides errors, warnings and logs of libraries that read scans, because they may quote the header.

    Raises DataError, one line: ``where`` and a text of ours, or the kind of error alone.
    """
    loggers = [*map(logging.getLogger, ("pydicom", "nibabel", "nibabel.global", "highdicom"))]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FileNotFoundError:
        raise DataError(f"{where}: there is no such file") from None
    except Unavailable:
        raise
    except (ScanError, TooLargeError) as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise DataError(
            f"{where}: its file cannot be read as {kind} ({type(error).__name__}){hint}"
        ) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
