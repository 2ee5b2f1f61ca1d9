"""Files as a failing disk, a cut line or a bad cable leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def damaged(data: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """``count`` damaged copies and what each is: in turn bits are flipped, it is cut short, a block is zeros."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < count:
        copy, place = bytearray(data), int(rng.integers(len(data)))
        match made % 3:
            case 0:
                flips = rng.integers(8 * len(data), size=int(rng.integers(1, 9)))
                for bit in flips.tolist():
                    copy[bit // 8] ^= 1 << bit % 8
                what = f"bits {flips.tolist()} flipped"
            case 1:
                del copy[place:]
                what = f"cut to {place} of {len(data)} bytes"
            case _:
                size = min(int(rng.integers(1, 4097)), len(data) - place)
                copy[place : place + size] = bytes(size)
                what = f"zeros at {place}, {size} bytes"
        if copy != data:  # zeros may be where zeros were
            made += 1
            yield what, bytes(copy)


def flip(file: Path, bit: int = 4001) -> None:
    """One bit of a file is another."""
    data = bytearray(file.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    file.write_bytes(bytes(data))
