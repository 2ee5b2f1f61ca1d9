"""Files that mean harm, or that a mistake has made huge: refused before they cost memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
from failing import fails
from taken import all_x, imported, refused

from partitions.common import sizes
from partitions.silo_file import read_silo_file


def header(shape, dtype):
    """How an ``.npy`` of this shape begins."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


def trap(file, **members):
    """An ``.npz`` of these members; a pair is a beginning, and so many zeros behind it."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            begin, zeros = content if isinstance(content, tuple) else (content, 0)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                out.write(begin)
                for _ in range(zeros >> 20):
                    out.write(bytes(1 << 20))
    return file


def assert_cheap(file, reason, most=2e6):
    """Refused for this reason, in one line, with at most so many bytes of memory."""
    tracemalloc.start()
    try:
        fails(ValueError, reason, read_silo_file, file)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_a_small_file_that_unpacks_to_much(tmp_path):
    """0.2 MB for 150 MB of zeros, with names, shapes and types as they are wanted."""
    x = (header((136 << 10, 1024), "|u1"), 136 << 20)
    file = trap(tmp_path / "x.npz", x_train=x, y_train=(header((1 << 20,), "<i8"), 8 << 20))
    assert file.stat().st_size < 300_000
    assert_cheap(
        file,
        r"would unpack to 151 MB, \d+ times its size; if that is what you mean, save it uncompressed",
    )


def test_many_members_of_the_same_bytes(tmp_path, monkeypatch):
    """What counts is their sum; a file that is as large as what it holds is read, however large."""
    monkeypatch.setattr(sizes, "LARGEST_UNPACKED", 1 << 20)
    parts = {
        name: (header((1 << 19,), "|u1"), 1 << 20)
        for name in ("x_train", "y_train", "x_test", "y_test")
    }
    assert_cheap(trap(tmp_path / "x.npz", **parts), "would unpack to 4 MB")
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        f"x_{s}": rng.integers(256, size=(2000, 28, 28), dtype=np.uint8)
        for s in ("train", "test")
    }
    np.savez(
        tmp_path / "y.npz", **arrays, y_train=np.arange(2000) % 2, y_test=np.zeros(2000, int)
    )
    assert len(read_silo_file(tmp_path / "y.npz").test) == 2000


@pytest.mark.parametrize("shape", [(10**12,), (1 << 40, 1 << 40), (-1, 5)])
def test_a_header_that_asks_for_more_than_there_is(tmp_path, shape):
    """numpy makes the array first, and then looks whether the file has it."""
    assert_cheap(trap(tmp_path / "x.npz", x=header(shape, "<f4") + bytes(64)), "x is damaged")


@pytest.mark.parametrize("dtype", ["<U200000000", "|V300000000"])
def test_elements_of_any_size(tmp_path, dtype):
    assert_cheap(
        trap(tmp_path / "x.npz", label_names=header((9,), dtype) + bytes(64)),
        "label_names is damaged",
    )


def test_a_header_that_is_code_for_the_parser(tmp_path):
    """The header is a Python literal: of any depth, if nobody looks."""
    for text in (b"(" * 60_000, b"{'descr':" * 5000, b"-" * 9000 + b"1", b"\xff" * 50):
        begin = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text
        assert_cheap(trap(tmp_path / "x.npz", x=begin), "x is damaged", most=5e7)


@pytest.mark.parametrize("number", ["1_000", "１２", "0x10", "1e", "1__0", "1 0", "inf"])
def test_a_number_is_what_other_programs_take_for_one(tmp_path, number):
    """Python reads 1_000 as 1000, and digits of any script."""
    table = tmp_path / "table.csv"
    table.write_text(f"age;label\n1;0\n2;1\n{number};0\n3;1\n4;0\n5;1\n", encoding="utf-8")
    refused(table, "table.csv, line 4: age is ", ", no number")


def test_numbers_as_they_are_written(tmp_path):
    table = tmp_path / "table.csv"
    numbers = ["1", "-2", "+3.5", ".5", "4.", "1e3", "-2.5E-3", "007"]
    table.write_text(
        "age,label\n" + "".join(f"{number},{i % 2}\n" for i, number in enumerate(numbers * 3))
    )
    made = imported(table).data
    x = all_x(made)
    assert sorted(set(x[:, 0].tolist())) == sorted(
        {np.float32(number).item() for number in map(float, numbers)}
    )
