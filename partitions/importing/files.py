"""Files of a source: all below a folder, those that are passed over or cannot be read; what all pictures have.

Messages name a file by its number among all paths in order, where paths may contain patients' names
(``find FOLDER -xtype f | LC_ALL=C sort | sed -n 17p`` is file 17).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.memory import is_out_of_memory
from partitions.common.names import Names
from partitions.common.sizes import TooLargeError
from partitions.recipes.cells import identifier
from partitions.recipes.reading import Acquisition, ReadOptions

MOST_NAMED = 3  # files in a message
SYSTEM = ("thumbs.db", "desktop.ini", "__macosx")  # files and folders that systems make
# Beside scans, where any other text after a point may be a name's
ENDINGS = re.findall(
    r"\S+",
    ".bmp .csv .db .dll .doc .docx .exe .gif .gz .htm .html .inf .ini .jar .jpeg .jpg .js .json .log .md .nii .pdf "
    ".png .tif .tiff .txt .xls .xlsx .xml .zip",
)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Faults:
    """Files that cannot be read. ``skip``: they are left out and named (--skip-bad); None: there is no such option."""

    skip: bool | None = False
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that adds the fault of a file."""
        try:
            yield
        except Unavailable:
            raise
        except DataError as error:
            self.messages.append(str(error))

    def check(self, total: int) -> None:
        """Raise DataError that names the first of ``total`` files that cannot be read, unless they are left out."""
        if not self.messages or self.skip:
            return
        advice = "" if self.skip is None else "; --skip-bad leaves such files out"
        if len(self.messages) == 1:
            raise DataError(self.messages[0] + advice)
        count, named = len(self.messages), name_first(self.messages)
        raise DataError(f"{count} of {total} files cannot be read: {named}{advice}")

    def good(
        self, items: Sequence[Item], work: Callable[[Item], Result], doing: str
    ) -> list[tuple[Item, Result]]:
        """Return the items that can be read, each with its result. Raises DataError as above, and where none can."""
        results: list[tuple[Item, Result]] = []
        for item in tqdm(items, desc=doing, unit=""):
            with self.collect():
                results.append((item, work(item)))
        self.check(len(items))
        if items and not results:
            raise DataError(f"none of the {len(items)} files can be read: {self.messages[-1]}")
        return results

    @property
    def notes(self) -> Names:
        """Return the number of files that are left out, and each of them."""
        if not self.messages:
            return ()
        return f"{len(self.messages)} files cannot be read: left out (--skip-bad)", *(
            f"left out: {f}" for f in self.messages
        )


def name_first(faults: Sequence[str]) -> str:
    """Return the first faults as text for a message, and the number of further ones."""
    more = len(faults) - MOST_NAMED
    return "; ".join(faults[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, in the order of their paths as bytes."""
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return (Path(path) for path in sorted(paths, key=os.fsencode) if os.path.isfile(path))


def count_unfollowed(folder: Path) -> int:
    """Count the links to folders, which are not followed, and those to nothing."""
    walked = (
        (place, name)
        for place, folders, names in os.walk(folder)
        for name in (*folders, *names)
    )
    paths = (os.path.join(place, name) for place, name in walked)
    return sum(os.path.islink(path) and not os.path.isfile(path) for path in paths)


def place_of(source: Path, number: int, total: int) -> str:
    """Return a file's name for messages; ``number`` counts from 0."""
    return f"{source}, file {number + 1} of {total}"


def outside(folder: Path, files: Iterable[tuple[str, Path | None]]) -> Iterator[str]:
    """Yield the names of files outside the folder after following links; ``files``: name for messages, and path."""
    inside = os.path.realpath(folder)
    return (
        where
        for where, path in files
        if path and not Path(os.path.realpath(path)).is_relative_to(inside)
    )


def check_links(folder: Path, files: Iterable[tuple[str, Path | None]]) -> None:
    """Raise DataError where a file is a link out of the folder; ``files``: name for messages, and path."""
    for where in outside(folder, files):
        raise DataError(
            f"{where} is a link that leads out of the folder: copy what it points to into its place, or take it out"
        )


def is_hidden(path: Path, source: Path) -> bool:
    """Return whether a file, or a folder between it and the source, is hidden or made by a system."""
    return any(
        name.startswith(".") or name.lower() in SYSTEM
        for name in path.relative_to(source).parts
    )


def kind_of_other(path: Path, source: Path, *, named: bool) -> str:
    """Return what a file is that is no picture. ``named``: whether its name may be shown."""
    ending = path.suffix.lower()
    if is_hidden(path, source):
        return "hidden or of the system"
    if not ending:
        return "without an ending"
    return ending if (named and len(ending) < 12) or ending in ENDINGS else "others"


def list_kinds(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def passed_over(source: Path, taken: Collection[Path | None], *, named: bool = True) -> Names:
    """Return the note on files below a folder that are not ``taken``, and on links."""
    files, taken_paths = list(files_below(source)), set(taken)
    kinds = Counter(
        kind_of_other(path, source, named=named) for path in files if path not in taken_paths
    )
    notes = [
        f"{kinds.total()} of {len(files)} files are passed over: {list_kinds(kinds)}"
    ] * bool(kinds)
    return *notes, *link_notes(source)


def link_notes(source: Path) -> Names:
    """Return the note on links that are not followed."""
    links = count_unfollowed(source)
    return (f"{links} links to folders, or to nothing, are passed over",) if links else ()


# What pictures and scans have, and their errors

MOST_SIDE = 1 << 14  # pixels; a longer side after resampling is a mistake in the spacing

Paths = Sequence[Path]
KEY = secrets.token_bytes(32)  # of this process, never written


@dataclass(frozen=True)
class ImageInfo:
    """Properties of a picture from its header.

    * ``deep``: it becomes float32 in 0..1, not uint8.
    * ``patient``: a pseudonym, "" without a patient; ``spelling``: the hash of its identifier as it is written.
    * ``notes``: remarks for the hospital, each a text that ends the sentence "12 of 340 pictures ...".
    * ``acquired``: the properties that other pictures must share.
    * ``rate``: of a signal, Hz after resampling; its ``height`` is the number of steps.
    * ``seen``: of DICOM, properties that pictures should share, with their values, for ``--propose``.
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
    seen: tuple[tuple[str, str], ...] = ()


def pseudonym(name: str) -> str:
    """Return a keyed hash that replaces an identifier, different in every process; "" stays "".

    All spellings of an identifier have the same one (``patients.identifier``).
    """
    return hash_text(identifier(name))


def hash_text(text: str) -> str:
    """Return a keyed hash of a text as it is written; "" stays ""."""
    return (
        hashlib.blake2b(
            text.encode(errors="surrogatepass"), key=KEY, digest_size=16
        ).hexdigest()
        if text
        else ""
    )


def fitted_size(
    height: int, width: int, spacing: tuple[float, float] | None, reading: ReadOptions
) -> tuple[int, int]:
    """Return height and width of a picture after :func:`fit`."""
    sides = square(height, width, spacing, reading.spacing)
    return (reading.size, reading.size) if reading.size else sides


def square(
    height: int, width: int, spacing: tuple[float, float] | None, wanted: float | None = None
) -> tuple[int, int]:
    """Return height and width in square pixels of ``wanted`` mm, or of the smaller side of the present pixels.

    ``spacing``: the distances of rows and columns in mm, or None if unknown.
    """
    if spacing is None:
        if wanted:
            raise ScanError("it does not say how large its pixels are; leave --spacing out")
        return height, width
    pixel = wanted or min(spacing)
    sides = (
        max(1, round(height * spacing[0] / pixel)),
        max(1, round(width * spacing[1] / pixel)),
    )
    if max(sides) > MOST_SIDE:
        raise ScanError(
            f"it would have {max(sides)} pixels on a side; give another --spacing, in mm"
        )
    return sides


def fit(
    picture: Image.Image,
    spacing: tuple[float, float] | None,
    reading: ReadOptions,
    resampling: Image.Resampling,
) -> Image.Image:
    """Return a picture with square pixels, of the requested size.

    Without a requested spacing it is stretched to the size. With one it is cropped, or padded with 0, about its centre,
    so that a pixel keeps its mm.
    """
    height, width = square(picture.height, picture.width, spacing, reading.spacing)
    if reading.size and reading.spacing is None:
        height = width = reading.size
    if (width, height) != picture.size:
        picture = picture.resize((width, height), resampling)
    if reading.size and (width, height) != (reading.size, reading.size):
        left = (width - reading.size) // 2
        top = (height - reading.size) // 2
        picture = picture.crop((left, top, left + reading.size, top + reading.size))
    return picture


def parts_of(depth: int, count: int) -> list[int]:
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
    loggers = [
        logging.getLogger(name)
        for name in ("pydicom", "nibabel", "nibabel.global", "highdicom")
    ]
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
