"""Texts, signals and several inputs: in a silo's file, in its division, and as batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from failing import fails
from numpy.testing import assert_array_equal
from taken import all_x

from models.samples import Samples
from partitions.silo_file import (
    check_silo_file,
    read_dataset_file,
    read_silo_file,
    write_silo_file,
)
from partitions.splits import Array, dtype_of, inputs_of, take
from partitions.stored import sample_digests, together

N = 40


def several(n=N):
    rng = np.random.default_rng(0)
    return {
        "x_scan": rng.integers(1, 256, (n, 4, 5, 3), np.uint8),
        "x_notes": rng.integers(0, 9, (n, 6)),
        "x_pulse": rng.normal(size=(n, 2, 7)).astype(np.float32),
        "x_blood": rng.normal(size=(n, 3)).astype(np.float32),
        "y": rng.integers(0, 2, n),
        "vocabulary": np.array(9),
    }


def saved(path, arrays):
    np.savez(path, **arrays)
    return path


def test_several_inputs_are_read_and_written_back(tmp_path):
    arrays = several()
    data = read_silo_file(saved(tmp_path / "a.npz", arrays))
    assert data.input_shape == (
        ("blood", (3,)),
        ("notes", ("tokens", 6, 9)),
        ("pulse", (2, 7)),
        ("scan", (3, 4, 5)),
    )
    assert dtype_of(data.train.x) == "blood float32, notes int32, pulse float32, scan uint8"
    whole = all_x(data)
    rows = [int(np.flatnonzero((arrays["x_blood"] == row).all(1))[0]) for row in whole["blood"]]
    assert sorted(rows) == list(range(N))  # every sample once, with all that is its own
    assert_array_equal(whole["scan"], arrays["x_scan"][rows])
    assert_array_equal(whole["notes"], arrays["x_notes"][rows])
    assert_array_equal(whole["pulse"], arrays["x_pulse"][rows].transpose(0, 2, 1))
    labels = np.concatenate([data.train.y, data.val.y, data.test.y])
    assert_array_equal(labels, arrays["y"][rows])
    write_silo_file(tmp_path / "b.npz", data)
    with np.load(tmp_path / "b.npz") as file:
        assert {"x_scan_train", "x_pulse_val", "x_notes_test", "vocabulary"} <= set(file)
    again = read_silo_file(tmp_path / "b.npz")
    assert again.input_shape == data.input_shape
    for part in ("train", "val", "test"):
        assert (getattr(again, part).x == getattr(data, part).x).all()


def test_parts_of_their_own_and_a_whole_data_set(tmp_path):
    arrays = several()
    parts = {
        f"{key}_{part}": arrays[key][rows]
        for key in arrays
        if key != "vocabulary"
        for part, rows in PARTS.items()
    }
    path = saved(tmp_path / "a.npz", {**parts, "vocabulary": 9})
    data, whole = read_silo_file(path), read_dataset_file(path)
    assert [len(data.train), len(data.val), len(data.test)] == [20, 10, 10]
    assert (
        whole.vocabulary == 9
        and len(whole.train) == 30
        and whole.input_shape == data.input_shape
    )
    some = take(whole, np.array([35, 2, 31]))
    assert_array_equal(some.x["blood"], arrays["x_blood"][[35, 2, 31]])


PARTS = {"train": slice(0, 20), "val": slice(20, 30), "test": slice(30, 40)}


def test_a_text_and_a_signal_by_themselves(tmp_path):
    arrays = several()
    text = read_silo_file(
        saved(tmp_path / "t.npz", {"x": arrays["x_notes"], "y": arrays["y"], "vocabulary": 9})
    )
    assert text.input_shape == ("tokens", 6, 9) and text.train.x.dtype == np.int32
    signal = read_silo_file(
        saved(tmp_path / "s.npz", {"x": arrays["x_pulse"], "y": arrays["y"]})
    )
    assert signal.input_shape == (2, 7)
    write_silo_file(tmp_path / "s2.npz", signal)
    assert_array_equal(read_silo_file(tmp_path / "s2.npz").test.x, signal.test.x)
    x, _ = Samples(signal.train.x, signal.train.y).take(slice(0, 4))
    assert x.shape == (4, 2, 7) and torch.equal(x[0].T, torch.from_numpy(signal.train.x[0]))
    checks = {check.name: check.detail for check in check_silo_file(tmp_path / "t.npz")}
    assert checks["inputs"] == "texts of up to 6 tokens"


@pytest.mark.parametrize(
    "change, detail",
    [
        ({"vocabulary": None}, "x_notes is int64"),
        ({"vocabulary": np.array(8)}, "x_notes has a token outside of 0..7, first in sample"),
        ({"vocabulary": np.array(0)}, "vocabulary is no whole number"),
        ({"vocabulary": np.array("nine")}, "vocabulary is no whole number"),
        ({"x_notes": -np.ones((N, 6), int)}, "has a token outside of 0..8, first in sample 0"),
        ({"x_blood": np.ones((N - 1, 3), np.float32)}, "has 39 inputs but 40 labels"),
        (
            {"x_blood": np.full((N, 3), np.nan, np.float32)},
            "x_blood has a value that is no finite number",
        ),
        ({"x_Blood": np.ones((N, 3), np.float32)}, "an input 'Blood'"),
        ({"x_tokens": np.ones((N, 3), np.float32)}, "an input 'tokens'"),
        ({"x_import": np.ones((N, 3), np.float32)}, "an input 'import'"),
        ({"x": np.ones((N, 3), np.float32)}, "has both x_scan and x"),
        (
            {"y": np.ones((N, 4, 5), np.uint8), "task": np.array("segmentation")},
            "no pictures, and have no outlines",
        ),
    ],
)
def test_faults_in_one_line(tmp_path, change, detail):
    arrays = {key: value for key, value in (several() | change).items() if value is not None}
    fails(ValueError, detail, read_silo_file, saved(tmp_path / "a.npz", arrays))


def test_an_input_of_one_part_only_is_missed(tmp_path):
    arrays = several()
    parts = {
        f"{key}_{part}": arrays[key][rows]
        for key in ("x_scan", "x_blood", "y")
        for part, rows in PARTS.items()
    }
    del parts["x_blood_test"]
    fails(ValueError, "has no x_blood_test", read_silo_file, saved(tmp_path / "a.npz", parts))


def test_digests_tell_samples_apart_by_every_input():
    inputs = {"a": np.zeros((3, 2), np.float32), "b": np.zeros((3, 4), np.int32)}
    inputs["b"][1, 3] = 1
    first, second, third = sample_digests(together(inputs))
    assert first == third != second and len(sample_digests(together(inputs)[:0])) == 0


def test_a_batch_has_every_input_and_what_is_missing_stays_zero():
    inputs: dict[str, Array] = {
        "scan": np.full((3, 2, 2, 1), 255, np.uint8),
        "notes": np.array([[1, 2], [0, 0], [3, 0]], np.int32),
        "blood": np.array([[1.0, 5.0], [3.0, 9.0], [0.0, 0.0]], np.float32),
        "more": np.array([[2.0], [4.0], [6.0]], np.float32),
    }
    inputs["scan"][1] = 0
    samples = Samples(
        together(inputs),
        np.array([0, 1, 0]),
        mean=torch.tensor([1.0, 2.0, 3.0]),
        std=torch.tensor([2.0, 1.0, 4.0]),
    )
    x, y = samples.take(torch.tensor([2, 1]))
    assert x._fields == ("blood", "more", "notes", "scan") and y.tolist() == [0, 1]
    # Black would be -1
    assert x.scan.shape == (2, 1, 2, 2) and x.scan[0].eq(1.0).all() and x.scan[1].eq(0.0).all()
    assert x.notes.tolist() == [[3, 0], [0, 0]]
    # (3 - 1) / 2, (9 - 2) / 1; the missing one is not (0 - 1) / 2
    assert x.blood.tolist() == [[0.0, 0.0], [1.0, 7.0]]
    assert x.more.tolist() == [[0.75], [0.25]]


def test_a_single_black_picture_is_not_missing():
    x, _ = Samples(np.zeros((1, 2, 2, 1), np.uint8), np.array([0])).take(slice(0, 1))
    assert x.eq(-1.0).all()


def test_inputs_by_name():
    plain = np.ones((2, 3), np.float32)
    assert inputs_of(plain) == {"": plain} and list(
        inputs_of(together({"a": plain, "b": plain}))
    ) == ["a", "b"]
