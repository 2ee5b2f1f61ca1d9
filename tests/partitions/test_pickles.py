"""Pickles of published data sets: arrays are read, and nothing is run."""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
from failing import fails
from numpy.testing import assert_array_equal

from partitions.datasets.pickles import read_pickle


def read(value, protocol=pickle.HIGHEST_PROTOCOL):
    return read_pickle(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.arange(24, dtype=np.float64).reshape(2, 3, 4)[::2, :, ::3],
        np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(1, 2, 0),
        np.array([True, False]),
        np.zeros((0, 3), np.uint8),
        np.array(2.5),
    ],
)
def test_arrays_are_read_as_they_were(array, protocol):
    entry = ["1001/1001_DFA", "path.wav", 3, array]
    key, path, label, found = read([entry], protocol)[0]
    assert (key, path, label) == ("1001/1001_DFA", "path.wav", 3)
    assert found.dtype == array.dtype
    assert_array_equal(found, array)


def test_plain_things_are_read():
    value: Any = {"a": [1, 2.5, None, True, b"x"], 3: ("b", {"c": []})}
    assert read(value) == value


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


class Forged:
    """A dtype that says of itself that it holds no objects, whose field is one: NumPy would take the bytes behind for
    addresses.
    """

    def __reduce__(self):
        return (
            np.dtype,
            ("V8", False, True),
            (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0),
        )


class Short:
    """An array that says it has more numbers than it has."""

    def __reduce__(self):
        return (
            np.zeros(1).__reduce__()[0],
            (np.ndarray, (0,), b"b"),
            (1, (10**9,), np.dtype("f8"), False, b"12345678"),
        )


class ForgedArray:
    def __reduce__(self):
        return (
            np.zeros(1).__reduce__()[0],
            (np.ndarray, (0,), b"b"),
            (1, (1,), Forged(), False, b"AAAAAAAA"),
        )


@pytest.mark.parametrize(
    "value, fault",
    [
        (Evil(), "holds posix.system, which is not read: it could run code"),
        ([["k", "p", 0, Evil()]], "posix.system"),
        (np.array([Evil()], object), "posix.system|not of plain numbers"),
        (np.array(["a", None], object), "not of plain numbers"),
        (np.array(["text"]), "not of plain numbers"),
        (np.zeros(2, [("a", "f4")]), "not of plain numbers"),
        (np.array([1 + 2j]), "not of plain numbers"),
        (ForgedArray(), "not of plain numbers"),
        (Short(), "of another size than it says"),
        (np.float32(1), "scalar, which is not read"),
        (np.dtype("f4"), "holds a Kind"),
        ({1, 2}, "holds a set"),
        (bytearray(b"x"), "holds a bytearray|builtins.bytearray"),
    ],
)
def test_anything_else_is_refused(value, fault):
    fails(ValueError, fault, read, value)


def test_a_damaged_pickle_is_refused():
    content = pickle.dumps([["k", "p", 0, np.arange(9.0)]])
    for damaged in (
        content[:-20],
        b"",
        b"no pickle",
        b"\x80\x05]q\x00h\x00a.",
        content.replace(b"f8", b"f\xff"),
    ):
        fails(ValueError, r"\w", read_pickle, damaged)


# Of what is damaged
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
def test_whatever_is_damaged_is_a_value_error():
    """Bytes changed, taken out and put in, of each protocol: read, or refused, and nothing else."""
    rng = random.Random(0)
    entries = [["k", "p", 1, np.ones((2, 3), np.float32)], ["l", "p", 2, np.arange(6.0)[::2]]]
    seeds = [pickle.dumps(entries, protocol=protocol) for protocol in (2, 3, 4, 5)]
    refused = 0
    for _ in range(3000):
        content = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 6)):
            place, kind = rng.randrange(len(content)), rng.randrange(3)
            if kind == 0:
                content[place] = rng.randrange(256)
            elif kind == 1:
                del content[place : place + rng.randint(1, 5)]
            else:
                content[place:place] = rng.randbytes(rng.randint(1, 4))
        try:
            read_pickle(bytes(content))
        except ValueError:
            refused += 1
    assert 2000 < refused < 3000


def test_a_pickle_may_not_ask_for_memory():
    """LONG_BINPUT 0x7fffffff: the memo would take 16 GB."""
    with pytest.raises(ValueError, match="more memory than it has values for"):
        read_pickle(b"\x80\x04]r\xff\xff\xff\x7f.")
