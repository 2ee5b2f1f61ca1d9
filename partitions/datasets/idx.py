"""Files in the IDX format of MNIST and similar data sets."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.common.sizes import unpacked
from partitions.splits import Array


def read_idx(path: Path, mend: str = "delete it and it will be downloaded again") -> Array:
    """Read an IDX file of bytes (magic number 0, 0, 8, dimensions; big-endian sizes; data), gzipped or not.

    Raises DataError, with the remedy ``mend``, for a file in another format or a truncated one.
    """
    try:
        with path.open("rb") as file:
            content = unpacked(file, "its content") if path.suffix == ".gz" else file.read()
        if content[:3] != b"\0\0\x08":
            raise DataError("no IDX file of bytes")
        dimensions = content[3]
        shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(int)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); {mend}") from error
