"""Shapes of samples, as networks receive them.

| sample | shape | a batch |
|---|---|---|
| a row of a table | (columns,) | float32 (b, columns) |
| a signal, or features over time | (channels, time) | float32 (b, channels, time) |
| a picture | (channels, height, width) | float32 (b, channels, height, width) |
| a volume | (channels, depth, height, width) | float32 (b, channels, depth, height, width) |
| a text | ("tokens", length, vocabulary) | int32 (b, length), from 0 to vocabulary - 1 |
| several of these | (("image", shape), ("notes", shape), ...) | a named tuple of them |

A shorter text or signal is padded with zeros at its end; token 0 is no word. Of several inputs, a missing one is all
zeros. Outside a process (a data summary, a model card, the federation file) a shape is a list, see :func:`write_shape`.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from partitions.common.errors import UserError
from partitions.inputs import is_input_name

Shape = tuple[Any, ...]

KINDS = {1: "table", 2: "signal", 3: "picture", 4: "volume"}  # by the number of sides
TOKENS = "tokens"
MOST_INPUTS = 8
MOST_VALUES = 2**28  # of one sample


def kind_of(shape: Shape) -> str:
    """Return ``table``, ``signal``, ``picture``, ``volume``, ``text`` or ``several``. Raises UserError for no shape."""
    if shape and shape[0] == TOKENS:
        if len(shape) == 3 and all(_is_size(size) for size in shape[1:]):
            return "text"
    elif shape and all(isinstance(part, tuple) for part in shape):
        if len(shape) <= MOST_INPUTS and all(
            len(part) == 2 and is_input_name(part[0]) for part in shape
        ):
            kinds = [kind_of(input_shape) for _, input_shape in shape]
            if "several" not in kinds and len({name for name, _ in shape}) == len(shape):
                return "several"
    elif (
        len(shape) in KINDS
        and all(_is_size(size) for size in shape)
        and math.prod(shape) <= MOST_VALUES
    ):
        return KINDS[len(shape)]
    raise UserError(
        "an input must be a table's row (d,), a signal (c, t), a picture (c, h, w), a volume (c, d, h, w), a text or "
        f"several of them, not of shape {shape}"
    )


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST_VALUES


def inputs_of(shape: Shape) -> dict[str, Shape]:
    """Return the shape of each input by its name; a single input has the name ``""``."""
    return dict(shape) if kind_of(shape) == "several" else {"": shape}


def columns(shape: Shape) -> int:
    """Count the columns of all tables of a shape, which are standardised."""
    return sum(part[0] for part in inputs_of(shape).values() if kind_of(part) == "table")


def write_shape(shape: Shape) -> list[int] | list[str]:
    """Write a shape as a list of numbers, or of texts: ``["tokens 200 65536"]``, ``["image 3 28 28", "age 1"]``."""
    if kind_of(shape) not in ("several", "text"):
        return list(shape)
    return [
        " ".join(map(str, ((name,) if name else ()) + part))
        for name, part in inputs_of(shape).items()
    ]


def read_shape(value: Sequence[Any]) -> Shape:
    """Return the shape that :func:`write_shape` wrote. Raises UserError for a list that is no shape."""
    if value and all(isinstance(part, str) for part in value):
        parts = [part.split() or [""] for part in value]
        alone = len(parts) == 1 and parts[0][0] == TOKENS
        shape = (
            _sizes(parts[0])
            if alone
            else tuple((words[0], _sizes(words[1:])) for words in parts)
        )
    else:
        shape = tuple(value)
    kind_of(shape)
    return shape


@lru_cache(maxsize=16)
def batch_type(names: tuple[str, ...]) -> Any:
    """Return the type of a batch of inputs with these names: a named tuple."""
    return namedtuple("Batch", names)


def example(shape: Shape, n: int) -> Any:
    """Return a batch of n random samples of this shape, drawn from torch's generator."""
    if kind_of(shape) == "several":
        return batch_type(tuple(name for name, _ in shape))(
            *(example(part, n) for _, part in shape)
        )
    if shape[0] == TOKENS:
        return torch.randint(shape[2], (n, shape[1]), dtype=torch.int32)
    return torch.randn(n, *shape)


def real_steps(x: torch.Tensor) -> torch.Tensor:
    """Return bool (b, t): which steps of tokens (b, t) or a signal (b, channels, t) are no padding at the end."""
    real = (x != 0) if x.dim() == 2 else (x != 0).any(1)
    return real.flip(-1).cumsum(-1).flip(-1) > 0


def _sizes(words: Sequence[str]) -> Shape:
    return tuple(int(word) if word.isdecimal() and word.isascii() else word for word in words)
