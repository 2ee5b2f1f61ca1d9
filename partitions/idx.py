"""Files of the IDX format, in which MNIST and its like are published."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from partitions.splits import Array


def read_idx(path: Path, mend: str = "delete it and it will be downloaded again") -> Array:
    """Read an IDX file of bytes (magic number 0, 0, 8, dimensions; big-endian sizes; data), gzipped or not.

    Raises ValueError, with how to ``mend`` that, if it is none, or cut short.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise ValueError("no IDX file of bytes")
        dimensions = content[3]
        shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(int)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {mend}") from error
