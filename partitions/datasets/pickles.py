"""Pickles of published data sets, read without anything of theirs being run.

A pickle is a program. Here it may make lists, tuples, dictionaries, texts and numbers; where it calls for NumPy, it
gets stand-ins of ours, which only note what they are told: NumPy's own functions trust what a pickle says (a forged
dtype makes them take numbers for addresses). Arrays of plain numbers are then made of these notes; all else is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.splits import Array

PLAIN = re.compile(r"[fiu][1248]|b1")
ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
BUFFERS = ("numpy.core.numeric", "numpy._core.numeric")


def read_pickle(content: bytes, encoding: str = "ASCII") -> Any:
    """Read a pickle of plain values and arrays of numbers. Raises DataError where it holds anything else."""
    try:
        # First without doing what it says: is it whole, and does it number no more things than it has bytes for?
        for step, number, _ in pickletools.genops(content):
            if step.name.endswith("PUT") and int(str(number)) > len(content):
                raise DataError("it asks for more memory than it has values for")
        return plain(ArrayUnpickler(io.BytesIO(content), encoding=encoding).load())
    except RecursionError:
        raise DataError("it is nested too deeply") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise DataError(str(error) or "it is cut short") from error


class Kind:
    """In a ``numpy.dtype``'s place."""

    def __init__(self, text: Any = "", *_: Any) -> None:
        self.text = text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self.order = order.decode("ascii", "replace") if isinstance(order, bytes) else str(order)

    def dtype(self) -> np.dtype[Any]:
        if not PLAIN.fullmatch(self.text) or self.order not in ("<", ">", "=", "|"):
            raise DataError("it has an array that is not of plain numbers")
        return np.dtype(self.order + self.text)


class Noted:
    """In an array's place: what is said of it."""

    def __init__(self, *_: Any) -> None:
        self.arguments: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        self.arguments = (content, kind, shape, "F" if fortran else "C", None)

    def array(self) -> Array:
        if len(self.arguments) != 5:
            raise DataError("it has an array without content")
        content, kind, shape, order, axes = self.arguments
        whole = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        if not (whole and isinstance(kind, Kind) and isinstance(content, bytes | bytearray)):
            raise DataError("it has an array that is not of plain numbers")
        dtype = kind.dtype()
        if math.prod(shape) * dtype.itemsize != len(content) or order not in ("C", "F", "K"):
            raise DataError("it has an array of another size than it says")
        array: Array = np.frombuffer(content, dtype).reshape(shape, order="F" if order == "F" else "C")
        return array if axes is None else array.transpose(axes)


def noted(content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> Noted:
    """In ``_frombuffer``'s place, by which newer pickles make an array."""
    made = Noted()
    made.arguments = (content, kind, shape, order, axes)
    return made


class ArrayUnpickler(pickle.Unpickler):
    """Gives a pickle the stand-ins, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (name == "_reconstruct" and module in ARRAYS) or (module, name) == ("numpy", "ndarray"):
            return Noted
        if name == "_frombuffer" and module in BUFFERS:
            return noted
        if (module, name) == ("numpy", "dtype"):
            return Kind
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not read: it could run code")


def plain(value: Any) -> Any:
    """The value with arrays in their stand-ins' places. Of containers only lists, tuples and dictionaries."""
    if isinstance(value, Noted):
        return value.array()
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    raise DataError(f"it holds a {type(value).__name__}, which is not read")
