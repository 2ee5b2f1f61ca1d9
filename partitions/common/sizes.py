"""Limits on the memory that a received file may need, checked before it is decoded.

The header of a few kilobytes can state a volume of terabytes, or the content can unpack to gigabytes. Every reader of a
hospital's or a researcher's file calls these checks first. ``SILOFL_LARGEST_FILE=8`` allows 8 GiB for one file.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from partitions.common.errors import DataError, UserError
from partitions.common.memory import available

LARGEST = 2.0  # GiB for one decoded file
VARIABLE = "SILOFL_LARGEST_FILE"
MOST_COLUMNS = 100_000  # of a csv
MOST_LINE = 1 << 24  # characters of a csv's line; also of one cell
MOST_FRAMES = 100_000  # of a DICOM file
MOST_BEFORE = 1 << 26  # bytes of a NIfTI file before its voxels: the header and its extensions
BLOCK = 1 << 20
# Bytes; a zip that unpacks to more, and to so many times its own size, is a trap
LARGEST_UNPACKED, MOST_TIMES = 1 << 27, 100


class TooLargeError(DataError):
    """A file, or a part of it, that is too large; the text is one line with the way to allow it."""


def largest() -> int:
    """Return the largest decoded size of a file in bytes. Raises DataError for an invalid environment variable."""
    text = os.environ.get(VARIABLE) or str(LARGEST)
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < 1e6:
        raise DataError(f"{VARIABLE}={text[:40]} is no number of GiB above 0")
    return int(gib * 2**30)


def check_size(size: int, what: str) -> None:
    """Raise TooLargeError where ``size`` bytes for ``what`` are more than :func:`largest`."""
    if size > (most := largest()):
        gib = math.ceil(size / 2**30)
        raise TooLargeError(
            f"{what} would take {size / 1e9:.1f} GB of memory, and {most / 1e9:.1f} GB is the most; if that is what "
            f"you mean, set {VARIABLE}={gib}"
        )
    if size > (free := available()):
        raise TooLargeError(
            f"{what} would take {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB is free here"
        )


def check_room(size: int, in_memory: int, on_disk: int, folder: Path, mend: str) -> str:
    """Return what a run takes here: copies of a model of ``size`` bytes, in memory and on the disk of ``folder``.

    It is the least; some methods take more. Raises UserError where it does not fit. ``mend``: what else helps.
    """
    while not folder.exists():
        folder = folder.parent
    free = {"memory": available(), "disk": shutil.disk_usage(folder).free}
    takes = {"memory": in_memory, "disk": on_disk}
    parts = [f"{n * size / 1e9:.2f} GB of {what} ({n} copies)" for what, n in takes.items()]
    line = f"a model of {size / 1e6:.0f} MB takes at least {' and '.join(parts)} here"
    for what, copies in takes.items():
        if copies * size > free[what]:
            has = f"{free[what] / 1e9:.2f} GB of {what} is free"
            raise UserError(f"{line}, and {has}: free more, or {mend}")
    return line


def trap_of(members: Iterable[zipfile.ZipInfo], packed: int) -> str:
    """Return what a small zip of ``packed`` bytes would unpack to, if that is large; empty: it is no trap."""
    size = sum(member.file_size for member in members)
    if size > LARGEST_UNPACKED and size > MOST_TIMES * packed:
        return f"would unpack to {size / 1e6:.0f} MB, {size / packed:.0f} times its size"
    return ""


def repack(content: bytes, what: str) -> io.BytesIO:
    """Return a zip with the members of a zip, for a reader of its own: it sees what was checked, and nothing else.

    Raises TooLargeError where they are too large, and what zipfile raises for a damaged zip.
    """
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as packed,
    ):
        members = archive.infolist()
        if why := trap_of(members, len(content)):
            raise TooLargeError(f"it {why}")
        check_size(sum(member.file_size for member in members), what)
        for member in members:
            packed.writestr(member.filename, archive.read(member))
    out.seek(0)
    return out


def unpack(file: IO[bytes], what: str, *, wbits: int = 31, keep: bool = True) -> bytes:
    """Unpack a stream: gzip (``wbits`` 31, one member) or raw deflate (-15), up to :func:`largest` bytes.

    Without ``keep`` the bytes are only counted. Raises TooLargeError; EOFError or zlib.error for a damaged stream.
    """
    decoder, parts, size, most = zlib.decompressobj(wbits), list[bytes](), 0, largest()
    while not decoder.eof:
        data = decoder.unconsumed_tail or file.read(BLOCK)
        part = decoder.decompress(data, BLOCK)
        if not data and not part:
            raise EOFError("it is cut short")
        size += len(part)
        if size > most:
            check_size(size, f"{what}, unpacked,")
        parts += [part] if keep else []
    return b"".join(parts)


def bounded_lines(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a text file. Raises TooLargeError at one of more than :data:`MOST_LINE` characters."""
    while line := file.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise TooLargeError(
                f"{path} has a line of more than {MOST_LINE} characters: is it a csv?"
            )
        yield line


def check_column_count(count: int, path: Path) -> None:
    """Raise TooLargeError where a csv has too many columns."""
    if count > MOST_COLUMNS:
        raise TooLargeError(
            f"{path} has {count} columns, and {MOST_COLUMNS} are the most: leave some out"
        )


def check_picture(shape: tuple[Any, ...], what: str = "its picture") -> None:
    """Raise TooLargeError where values of this shape, with 8 bytes each while they are read, take too much memory."""
    check_size(8 * math.prod(max(int(n), 0) for n in shape), what)
