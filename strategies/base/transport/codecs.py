"""Number formats of vectors in messages, and their encoding against a *base*: a vector that both ends have.

    format     bytes of a number     what is lost
    float32    4                     nothing
    float16    2                     all but 11 significant bits, and values above 65,504
    bfloat16   2                     all but 8 significant bits
    int8       1 + 4 / 1024          rounded to 1/127 of the largest number in its block of 1024
    topk       8 for each sent       all but the k largest numbers

A vector travels whole, or (``form``) as a *change*, which is added to the base, or *sparse*: the numbers that are
not bit for bit those of the base, in runs. A sparse vector arrives exactly as the whole one would. int8 and topk are
formats of changes only.

Received data are not trusted: every function that reads raises ValueError, one line, for invalid data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from partitions.common.errors import DataError

PLAIN = ("float32", "float16", "bfloat16")  # formats of whole vectors
OF_CHANGES = ("int8", "topk")
CHANGE, SPARSE = "change", "sparse"
BLOCK = 1024  # numbers that share a scale
RUN_BYTES = 8  # bytes of a run in addition to its numbers


@dataclass(frozen=True)
class Encoded:
    """A vector as it travels: tensors by name, the format of its numbers, and its form (whole, change, sparse)."""

    tensors: Mapping[str, Tensor]
    dtype: str = "float32"
    form: str = ""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def narrow(vector: Tensor, dtype: str) -> Tensor:
    """Return a vector in one of the plain formats; bfloat16 as int16, because NumPy has no bfloat16."""
    if dtype == "float16":
        return vector.half()
    return vector.bfloat16().view(torch.int16) if dtype == "bfloat16" else vector


def widen(tensor: Tensor, dtype: str) -> Tensor:
    """Convert back to float32 (a float32 tensor is returned as it is); raise DataError if the format differs."""
    if dtype == "float32":
        return tensor
    if dtype not in PLAIN or tensor.dtype not in (torch.float16, torch.int16):
        raise DataError(f"its bytes are no array of {dtype:.80}")
    return tensor.view(getattr(torch, dtype)).float()


def read(encoded: Encoded, base: Tensor | None) -> Tensor:
    """Return the vector (n,) that was sent; with a base, n is the base's length."""
    if not encoded.form:
        return widen(part(encoded, "vector"), encoded.dtype)
    if base is None:
        raise DataError("it is encoded against a base, and there is no such base")
    if encoded.form == CHANGE:
        change = read_change(encoded, len(base))
        return base.to(change.device) + change
    if encoded.form == SPARSE:
        return read_sparse(encoded, base)
    raise DataError(f"unknown form of a vector: '{encoded.form:.80}'")


def part(
    encoded: Encoded,
    name: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return one of its tensors; raise DataError if it is missing, or not of this type and shape."""
    tensor = encoded.tensors.get(name)
    if tensor is None:
        raise DataError(f"its '{name}' are missing")
    if dtype not in (None, tensor.dtype) or shape not in (None, tuple(tensor.shape)):
        raise DataError(
            f"its '{name}' are {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of {shape}"
        )
    return tensor


# ---- Changes -------------------------------------------------------------------------------------------------------


def write_change(change: Tensor, dtype: str, share: float = 0.01) -> Encoded:
    """Encode a change (n,), with or without a residual; ``share``: the share of its numbers that topk keeps."""
    if dtype == "int8":
        tensors = _quantise(change)
    elif dtype == "topk":
        places = largest(change, max(1, round(share * len(change))))
        tensors = {"places": places.to(torch.int32), "values": change[places]}
    else:
        tensors = {"vector": narrow(change, dtype)}
    return Encoded(tensors, dtype, CHANGE)


def read_change(encoded: Encoded, size: int) -> Tensor:
    """Return the decoded change (size,)."""
    if encoded.dtype == "int8":
        values = part(encoded, "values", torch.int8, (size,))
        scales = part(encoded, "scales", torch.float32, (-(-size // BLOCK),))
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise DataError("its scales are no sizes of steps")
        return values.float().mul_(scales.repeat_interleave(BLOCK)[:size])
    if encoded.dtype == "topk":
        values = part(encoded, "values", torch.float32)
        places = part(encoded, "places", torch.int32, tuple(values.shape)).long()
        check_places(places, size)
        return torch.zeros(size, device=values.device).index_copy_(0, places, values)
    return widen(part(encoded, "vector", shape=(size,)), encoded.dtype)


def _quantise(change: Tensor) -> dict[str, Tensor]:
    """Return integers from -127 to 127 and a scale per block, nearest to the change (halves round to even)."""
    blocks = torch.nn.functional.pad(change, (0, -len(change) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    steps = torch.where(scales > 0, scales, 1.0)
    values = (blocks / steps[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return {"values": values.flatten()[: len(change)].clone(), "scales": scales}


def largest(change: Tensor, k: int) -> Tensor:
    """Return the indices of the k numbers farthest from 0, ascending; ties go to the first, on every device."""
    if not len(change):
        return torch.zeros(0, dtype=torch.long, device=change.device)
    sizes = change.abs()
    least = sizes.topk(k, sorted=False).values.min()
    above = (sizes > least).nonzero().flatten()
    equal = (sizes == least).nonzero().flatten()[: k - len(above)]
    return torch.cat([above, equal]).sort().values


def check_places(places: Tensor, size: int) -> None:
    """Raise DataError if ``places`` (k,) are not distinct, ascending indices of a vector (size,)."""
    if places.dim() != 1 or (len(places) and (int(places[0]) < 0 or int(places[-1]) >= size)):
        raise DataError(f"its places are not all in a vector of {size} numbers")
    if bool((places.diff() <= 0).any()):
        raise DataError("its places are not in ascending order, each once")


# ---- Sparse --------------------------------------------------------------------------------------------------------


def write_sparse(vector: Tensor, base: Tensor, dtype: str) -> Encoded | None:
    """Encode the numbers of the vector (n,) that are not the base's, in runs; None if that saves no bytes.

    This leaves out an embedding's rows that no sample used: in a vector they are stretches without a change. Short
    unchanged stretches are included if another run would take more bytes.
    """
    values, bits = narrow(vector, dtype), torch.int32 if dtype == "float32" else torch.int16
    changed = values.view(bits) != narrow(base, dtype).view(bits)
    places = changed.nonzero().flatten()
    ends = places.diff() > 1 + RUN_BYTES // values.element_size()
    yes = torch.ones(min(len(places), 1), dtype=torch.bool, device=ends.device)
    starts, stops = places[torch.cat([yes, ends])], places[torch.cat([ends, yes])] + 1
    runs = torch.stack([starts, stops - starts], dim=1)
    encoded = Encoded(
        {"runs": runs.to(torch.int32), "values": values[within(runs)]}, dtype, SPARSE
    )
    return encoded if encoded.bytes < values.nbytes else None


def read_sparse(encoded: Encoded, base: Tensor) -> Tensor:
    """Return the base with the sent numbers in their places."""
    values = widen(part(encoded, "values"), encoded.dtype)
    runs = part(encoded, "runs", torch.int32)
    if runs.dim() != 2 or runs.shape[1] != 2 or bool((runs[:, 1] <= 0).any()):
        raise DataError("its runs are no pairs of a place and a length")
    runs = runs.long()
    if values.shape != (int(runs[:, 1].sum()),):  # before that many indices are allocated
        raise DataError(
            f"its values are of shape {tuple(values.shape)}, which its runs are not"
        )
    places = within(runs)
    check_places(places, len(base))
    return base.to(values.device).index_copy(0, places, values)


def within(runs: Tensor) -> Tensor:
    """Return the indices of the runs (r, 2), each (first index, length)."""
    lengths = runs[:, 1]
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=runs.device) + (
        runs[:, 0] - before
    ).repeat_interleave(lengths)
