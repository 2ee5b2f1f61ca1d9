"""Shapes of samples: what kinds there are, and how they are written down."""

from __future__ import annotations

import pytest
import torch
from failing import fails

from models.shapes import columns, example, inputs_of, kind_of, read_shape, write_shape

TEXT = ("tokens", 5, 9)
SEVERAL = (("image", (1, 2, 3)), ("notes", TEXT), ("age", (2,)), ("lab", (3,)))


@pytest.mark.parametrize(
    "shape, kind, text",
    [
        ((3,), "table", [3]),
        ((3, 4), "signal", [3, 4]),
        ((1, 2, 3), "picture", [1, 2, 3]),
        ((1, 2, 3, 4), "volume", [1, 2, 3, 4]),
        (TEXT, "text", ["tokens 5 9"]),
        (SEVERAL, "several", ["image 1 2 3", "notes tokens 5 9", "age 2", "lab 3"]),
        ((("notes", TEXT),), "several", ["notes tokens 5 9"]),
    ],
)
def test_a_shape_is_written_down_and_read_again(shape, kind, text):
    assert (kind_of(shape), write_shape(shape), read_shape(text)) == (kind, text, shape)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, 2, 3, 4, 5],
        [0],
        [-1, 2],
        [True],
        [1.5],
        [2**28, 2],
        ["a"],
        [""],
        ["tokens 3"],
        ["tokens x y"],
        ["tokens 3 0"],
        ["a 1", "a 2"],
        ["a 1 b"],
        ["a tokens 1"],
        ["Image 1"],
        ["class 1"],
        ["_a 1"],
        ["a 1", 2],
        [f"a{i} 1" for i in range(9)],
        ["a ²"],
    ],
)
def test_what_is_no_shape_is_refused_in_one_line(value):
    fails(ValueError, "an input must be", read_shape, value)


def test_columns_are_those_of_all_tables():
    assert [columns(shape) for shape in ((4,), (4, 2), TEXT, SEVERAL)] == [4, 0, 0, 5]
    assert inputs_of((4,)) == {"": (4,)} and list(inputs_of(SEVERAL)) == [
        "image",
        "notes",
        "age",
        "lab",
    ]


def test_an_example_is_what_a_network_gets():
    batch = example(SEVERAL, 7)
    assert batch._fields == ("image", "notes", "age", "lab")
    assert [tuple(part.shape) for part in batch] == [(7, 1, 2, 3), (7, 5), (7, 2), (7, 3)]
    assert (
        batch.notes.dtype == torch.int32
        and 0 <= int(batch.notes.min()) <= int(batch.notes.max()) < 9
    )
