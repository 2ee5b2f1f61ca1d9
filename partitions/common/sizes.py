"""Limits on the memory that a received file may need, checked before it is decoded.

A few kilobytes can say that they are a volume of terabytes, or unpack to gigabytes. Every reader of a hospital's or a
researcher's file asks here first. ``SILOFL_LARGEST_FILE=8`` lets one file become 8 GiB, where that is meant.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from partitions.common.errors import DataError

LARGEST = 2.0  # GiB that one file may become
VARIABLE = "SILOFL_LARGEST_FILE"
MOST_COLUMNS = 100_000  # of a csv
MOST_LINE = 1 << 24  # characters of a csv's line; also of one cell
CELL_BYTES = 150  # that a csv's cell takes while it is read
MOST_FRAMES = 100_000  # of a DICOM file
MOST_BEFORE = 1 << 26  # bytes of a NIfTI file before its voxels: the header and its extensions
BLOCK = 1 << 20


class TooLargeError(DataError):
    """One line: what would be too large, and how to allow it."""


def largest() -> int:
    """Bytes that one file may become. Raises DataError where the environment names no such number."""
    text = os.environ.get(VARIABLE) or str(LARGEST)
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < 1e6:
        raise DataError(f"{VARIABLE}={text[:40]} is no number of GiB above 0")
    return int(gib * 2**30)


def available() -> int:
    """Bytes of memory that are free on this machine, as Linux counts them; where it does not tell, no limit."""
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 1 << 62


def check_size(size: int, what: str) -> None:
    """Raise TooLargeError where something would take this many bytes, and that is too much."""
    if size > (most := largest()):
        gib = math.ceil(size / 2**30)
        raise TooLargeError(
            f"{what} would take {size / 1e9:.1f} GB of memory, and {most / 1e9:.1f} GB is the most; if that is what "
            f"you mean, set {VARIABLE}={gib}"
        )
    if size > (free := available()):
        raise TooLargeError(f"{what} would take {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB is free here")


def unpacked(file: IO[bytes], what: str, *, wbits: int = 31, keep: bool = True) -> bytes:
    """The unpacked content of a stream: gzip (``wbits`` 31, one member) or raw deflate (-15). It never holds more than
    may be; without ``keep`` it is only counted.

    Raises TooLargeError; EOFError or zlib.error where it is damaged.
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
    """The lines of a text file. Raises TooLargeError at one of more than :data:`MOST_LINE` characters."""
    while line := file.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise TooLargeError(f"{path} has a line of more than {MOST_LINE} characters: is it a csv?")
        yield line


def check_columns(count: int, path: Path) -> None:
    """Raise TooLargeError where a csv has too many columns."""
    if count > MOST_COLUMNS:
        raise TooLargeError(f"{path} has {count} columns, and {MOST_COLUMNS} are the most: leave some out")


def check_picture(shape: tuple[Any, ...], what: str = "its picture") -> None:
    """Raise TooLargeError where values of this shape, of 8 bytes each while they are read, are too many."""
    check_size(8 * math.prod(max(int(n), 0) for n in shape), what)
