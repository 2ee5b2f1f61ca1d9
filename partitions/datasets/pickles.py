"""Pickles of published data sets, read without running code of theirs.

A pickle is a program. Here it may make lists, tuples, dictionaries, texts and numbers. For NumPy's functions it gets
stand-ins of ours, which only record their arguments. NumPy's own functions trust the pickle's content: with a forged
dtype they treat numbers as addresses. Arrays of plain numbers are then made from these records; everything else is
refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from typing import Any, Literal

import numpy as np

from partitions.common.errors import DataError
from partitions.splits import Array

PLAIN = re.compile(r"[fiu][1248]|b1")


def read_pickle(content: bytes, encoding: str = "ASCII") -> Any:
    """Read a pickle of plain values and arrays of numbers. Raises DataError where it holds anything else."""
    try:
        # First without executing it: check that it is complete, and has no memo index beyond its number of bytes.
        for step, number, _ in pickletools.genops(content):
            if step.name.endswith("PUT") and int(str(number)) > len(content):
                raise DataError("it asks for more memory than it has values for")
        return arrays_in(ArrayUnpickler(io.BytesIO(content), encoding=encoding).load())
    except RecursionError:
        raise DataError("it is nested too deeply") from None
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
    ) as error:
        raise DataError(str(error) or "it is cut short") from error


def text_of(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


class Kind:
    """Stand-in for ``numpy.dtype``."""

    def __init__(self, text: Any = "", *_: Any) -> None:
        self.text = text_of(text)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = text_of(state[1])

    def dtype(self) -> np.dtype[Any]:
        if not PLAIN.fullmatch(self.text) or self.order not in ("<", ">", "=", "|"):
            raise DataError("it has an array that is not of plain numbers")
        return np.dtype(self.order + self.text)


class Noted:
    """Stand-in for an array, with the arguments that describe it."""

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
        layout: Literal["C", "F"] = "F" if order == "F" else "C"
        array: Array = np.frombuffer(content, dtype).reshape(shape, order=layout)
        return array if axes is None else array.transpose(axes)


def note_array(content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> Noted:
    """Stand-in for ``_frombuffer``, with which newer pickles make an array."""
    noted = Noted()
    noted.arguments = (content, kind, shape, order, axes)
    return noted


STAND_INS = {
    "numpy.core.multiarray._reconstruct": Noted,
    "numpy.ndarray": Noted,
    "numpy.core.numeric._frombuffer": note_array,
    "numpy.dtype": Kind,
}


class ArrayUnpickler(pickle.Unpickler):
    """Unpickler that provides the stand-ins, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        known = STAND_INS.get(f"{module}.{name}".replace("numpy._core", "numpy.core"))
        if not known:
            raise pickle.UnpicklingError(
                f"it holds {module}.{name}, which is not read: it could run code"
            )
        return known


def arrays_in(value: Any) -> Any:
    """Replace stand-ins in a value by arrays. Containers may be lists, tuples and dictionaries only."""
    if isinstance(value, Noted):
        return value.array()
    if isinstance(value, list | tuple):
        return type(value)(map(arrays_in, value))
    if isinstance(value, dict):
        return {key: arrays_in(item) for key, item in value.items()}
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    raise DataError(f"it holds a {type(value).__name__}, which is not read")
