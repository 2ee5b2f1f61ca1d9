"""Samples that stay on disk: arrays (n, ...) whose rows are read when a batch needs them.

A data file's inputs are memory-mapped (``npz.py``). A set of up to :data:`IN_MEMORY` bytes is then copied into memory,
once. A larger one stays as :class:`OnDisk`, or as :class:`Several` inputs: a division, a partition and a join of
hospitals choose rows of it, and copy none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partitions.common.memory import available

Array = npt.NDArray[Any]

IN_MEMORY = 1 << 29  # bytes; the largest file whose samples are kept in memory
AT_ONCE = 1 << 24  # bytes that a pass over all samples reads at once
CHECKED = 1 << 18  # bytes that checks and digests read at once


class _Samples:
    """Samples (n, ...) in their stored form (``inputs.py``).

    ``x[rows]`` reads these rows, ``x["name"]`` is one of several inputs, and ``x.part(rows)`` chooses rows unread.
    """

    shape: tuple[int, ...]
    at_once = AT_ONCE

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("samples on disk are read in batches, never all at once")


class OnDisk(_Samples):
    """Rows of one input, in one or more arrays (n, ...) one after the other.

    ``pieces``: mapped arrays, or other stored samples; ``change``: makes the stored form of values that were read.
    """

    def __init__(
        self,
        pieces: Sequence[Any],
        dtype: npt.DTypeLike,
        rows: Array | None = None,
        change: Callable[[Array], Array] | None = None,
    ) -> None:
        self.pieces, self.dtype, self.change = tuple(pieces), np.dtype(dtype), change
        self.rows = np.arange(sum(map(len, pieces))) if rows is None else rows
        self.shape = (len(self.rows), *pieces[0].shape[1:])

    def __getitem__(self, index: Any) -> Array:
        rows, start = self.rows[index], 0
        read = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for piece in self.pieces:
            here = (rows >= start) & (rows < start + len(piece))
            if here.any():
                with np.errstate(over="ignore"):
                    read[here] = piece[rows[here] - start]
            start += len(piece)
        return read if self.change is None else self.change(read)

    def cut(self, row: int, place: tuple[slice, ...]) -> Array:
        """Read a part of one sample; of a mapped file only this part is read."""
        at = int(self.rows[row])
        for piece in self.pieces:
            if at < len(piece):
                break
            at -= len(piece)
        part = piece.cut(at, place) if isinstance(piece, OnDisk) else piece[at][place]
        with np.errstate(over="ignore"):
            read: Array = np.array(part, self.dtype)
        return read if self.change is None else self.change(read)

    def part(self, rows: Array) -> OnDisk:
        return OnDisk(self.pieces, self.dtype, self.rows[rows], self.change)

    def map_values(self, change: Callable[[Array], Array]) -> OnDisk:
        """Return these samples, changed after they are read."""
        return OnDisk([self], self.dtype, change=change)

    def seed_draws(self, seed: int) -> OnDisk:
        """Return these samples, with what a hospital's own data set draws for each (``partitions/own``) by a seed."""
        pieces = [p.seed_draws(seed) if isinstance(p, OnDisk) else p for p in self.pieces]
        return OnDisk(pieces, self.dtype, self.rows, self.change)

    @property
    def digests(self) -> Array | None:
        """The digests that an index has of the samples; None where they follow from the values."""
        digests = (piece.digests for piece in self.pieces if isinstance(piece, OnDisk))
        known = [piece for piece in digests if piece is not None]
        return np.concatenate(known)[self.rows] if len(known) == len(self.pieces) else None

    @property
    def stays(self) -> bool:
        """Whether samples are never copied into memory, because they change from one reading to the next."""
        return any(isinstance(piece, OnDisk) and piece.stays for piece in self.pieces)


class Several(_Samples):
    """Several inputs of the same samples, at least one of them stored; reading gives a structured array."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = dict(sorted(inputs.items()))
        self.dtype = np.dtype([(name, x.dtype, x.shape[1:]) for name, x in self.inputs.items()])
        self.shape = (len(next(iter(self.inputs.values()))),)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.inputs[index]
        return structure_inputs({name: x[index] for name, x in self.inputs.items()})

    def part(self, rows: Array) -> Several:
        return Several({name: rows_in(x, rows) for name, x in self.inputs.items()})


def structure_inputs(inputs: Mapping[str, Array]) -> Array:
    """Join several inputs in memory to one structured array (n,), its fields in the order of their names.

    So their order in a hospital's file has no effect.
    """
    fields = [(name, x.dtype, x.shape[1:]) for name, x in sorted(inputs.items())]
    joined = np.empty(len(next(iter(inputs.values()))), fields)
    for name, x in inputs.items():
        joined[name] = x
    return joined


def together(inputs: Mapping[str, Any]) -> Any:
    """Join several inputs of the same samples: in memory, or unread where one is stored."""
    in_memory = all(isinstance(x, np.ndarray) for x in inputs.values())
    return structure_inputs(inputs) if in_memory else Several(inputs)


def rows_in(x: Any, rows: Array) -> Any:
    """Return these rows: a copy of an array's, unread of stored samples."""
    return x[rows] if isinstance(x, np.ndarray) else x.part(rows)


def concatenate(parts: Sequence[Any]) -> Any:
    """Return the samples of several parts, one after the other."""
    if all(isinstance(x, np.ndarray) for x in parts):
        return np.concatenate(parts)
    if names := parts[0].dtype.names:
        return Several({name: concatenate([x[name] for x in parts]) for name in names})
    return OnDisk(parts, parts[0].dtype)


def in_batches(x: Any, most: int = AT_ONCE) -> Iterator[Array]:
    """Yield all samples (n, ...), in arrays of at most about ``most`` bytes, or as large as stored samples say."""
    size = max(math.prod(x.shape[1:]) * x.dtype.itemsize, 1)
    count = max(1, min(most, getattr(x, "at_once", most)) // size)
    yield from (x[i : i + count] for i in range(0, len(x), count))


def one_by_one(x: Any) -> Iterator[Array]:
    """Yield each sample."""
    for read in in_batches(x):
        yield from read


def bytes_of(x: Any) -> int:
    """Return the bytes of all samples, in memory or not."""
    size: int = x.dtype.itemsize
    return size * int(math.prod(x.shape))


def fits(arrays: Iterable[Any]) -> bool:
    """Return whether a data set is small enough to be kept in memory, here and in this container."""
    samples = [*arrays]
    stays = any(isinstance(x, OnDisk) and x.stays for x in samples)
    return not stays and sum(map(bytes_of, samples)) <= min(IN_MEMORY, available() // 4)


def in_memory(x: Any) -> Array:
    """Read all samples; an array is returned as it is."""
    if isinstance(x, np.ndarray):
        return x
    read = np.empty(x.shape, x.dtype)
    done = 0
    for part in in_batches(x):
        read[done : done + len(part)] = part
        done += len(part)
    return read


def sample_digests(x: Any) -> Array:
    """Return the first 64 bits of each sample's SHA-256, uint64 (n,), or what its index has in their place."""
    if isinstance(x, OnDisk) and (known := x.digests) is not None:
        return known
    digests = []
    for batch in in_batches(x, CHECKED):
        samples = np.ascontiguousarray(batch)
        if x.dtype.names:  # several inputs: their bytes, concatenated
            samples = samples.view(np.uint8).reshape(len(batch), x.dtype.itemsize)
        digests += [hashlib.sha256(sample.data).digest()[:8] for sample in samples]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
