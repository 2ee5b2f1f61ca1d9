"""Arrays of an ``.npz``: read without unpickling and within the free memory, written atomically.

A large array that is stored uncompressed, as numpy.savez and ``silofl import`` do, is not read but memory-mapped.
"""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from partitions.common.files import write_atomically
from partitions.common.memory import available
from partitions.common.sizes import trap_of
from partitions.labels import Fault
from partitions.splits import Array, Arrays
from partitions.stored import CHECKED

LOCAL_HEADER = 30  # bytes of a member's own header, before its name

MAPPED = 1 << 20  # bytes; the smallest array that is mapped


def write_npz(
    path: Path, arrays: Arrays, samples: Mapping[str, Iterable[Array]] | None = None
) -> None:
    """Write an uncompressed ``.npz`` under a temporary name and rename it. Unlike numpy.savez, it stores no time.

    ``samples``: for an array's name, samples that are written in its place one by one; at most one is in memory.
    """

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                with archive.open(member, "w", force_zip64=True) as out:
                    if not samples or name not in samples:
                        np.lib.format.write_array(
                            out, np.ascontiguousarray(array), allow_pickle=False
                        )
                        continue
                    header = np.lib.format.header_data_from_array_1_0(array)
                    np.lib.format.write_array_header_1_0(out, header | {"fortran_order": False})
                    for sample in samples[name]:
                        out.write(sample.astype(array.dtype, copy=False).tobytes())

    write_atomically(path, write)


def read_arrays(path: Path) -> Arrays:
    """Read every array of an ``.npz`` (nothing is unpickled); large uncompressed ones are mapped, read-only."""
    make = "make one with `silofl import`, or with numpy.savez"
    try:
        if not path.exists():
            raise Fault(
                "there is no such file",
                "check the path, and in a container that the folder is mounted",
            )
        if not path.is_file():
            raise Fault("is no file", f"name the .npz file itself, or {make}")
        with path.open("rb") as file:
            start = file.read(6)
        if not start:
            raise Fault("the file is empty", make)
        if start == b"\x93NUMPY":
            raise Fault(
                "is a single .npy array", "an .npz with inputs and labels is needed; " + make
            )
        if not zipfile.is_zipfile(path):
            raise Fault("is no .npz file, or is cut short", make)
        with zipfile.ZipFile(path) as archive:
            check_unpacked(archive, path.stat().st_size)
            return {
                member.filename.removesuffix(".npy"): read_array(archive, member, path)
                for member in archive.infolist()
            }
    except Fault:
        raise
    except (
        OSError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        raise Fault(
            f"is damaged or not readable ({error})", "copy it again, or " + make
        ) from error
    # Of zipfile's, about its own header
    except (ValueError, OverflowError, struct.error) as error:
        raise Fault(f"is damaged ({error})", "copy it again, or " + make) from error


def check_unpacked(archive: zipfile.ZipFile, size: int) -> None:
    """Raise Fault, before anything is unpacked, for a small file that unpacks to a large one, or beyond free memory."""
    if why := trap_of(archive.infolist(), size):
        raise Fault(why, "if that is what you mean, save it uncompressed, with numpy.savez")
    packed = sum(
        m.file_size for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED
    )
    if packed > (free := available()):
        raise Fault(
            f"is compressed and would take {packed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB is free here",
            "save it uncompressed, with numpy.savez: it is then read from disk, batch by batch",
        )


def read_array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path | None = None
) -> Array:
    """Read one array; map it if it is large, uncompressed, and of the file ``path``.

    Its header is checked first: its size must not be larger than the values in the file.
    """
    name = member.filename.removesuffix(".npy")
    again = "copy it again, or make it with `silofl import`, or with numpy.savez"
    read = {
        b"\1\0": np.lib.format.read_array_header_1_0,
        b"\2\0": np.lib.format.read_array_header_2_0,
    }
    with archive.open(member) as file:
        start = file.read(8)  # the magic bytes, and the version of the header
        if start[:6] != b"\x93NUMPY":
            raise Fault(f"holds {name!r}, which is no array", again)
        try:
            shape, fortran, dtype = read[start[6:]](file)
            header = file.tell()
        except (KeyError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise Fault(f"{name} is damaged ({error})", again) from error
    if dtype.hasobject:
        raise Fault(
            f"{name} is an array of Python objects, which are not read: they could run code",
            "save plain arrays of numbers",
        )
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size > member.file_size:
        raise Fault(
            f"{name} is damaged (its header says {dtype} {shape}, more than there is)", again
        )
    stored = member.compress_type == zipfile.ZIP_STORED
    if path is not None and stored and size >= MAPPED:
        start_at = start_of(path, member)
        check_sum(path, member, start_at)
        order: Literal["F", "C"] = "F" if fortran else "C"
        return np.memmap(path, dtype, "r", start_at + header, shape, order)
    try:
        with archive.open(member) as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            return array
    except MemoryError:
        raise Fault(
            f"{name} needs {size / 1e9:.1f} GB of memory, which is not here",
            "use a machine with more",
        ) from None


def start_of(path: Path, member: zipfile.ZipInfo) -> int:
    """Return where the bytes of an uncompressed member start in the file."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        local = file.read(LOCAL_HEADER)
    name, extra = struct.unpack("<HH", local[-4:])
    return member.header_offset + LOCAL_HEADER + int(name) + int(extra)


def check_sum(path: Path, member: zipfile.ZipInfo, start: int) -> None:
    """Raise BadZipFile if the member's bytes are damaged, as reading it would."""
    total, left = 0, member.file_size
    with path.open("rb") as file:
        file.seek(start)
        while left > 0 and (read := file.read(min(left, CHECKED))):
            total = zlib.crc32(read, total)
            left -= len(read)
    if left or total != member.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")
