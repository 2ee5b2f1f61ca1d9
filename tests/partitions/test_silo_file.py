"""The silo data file: every accepted form is read alike, every fault is one clear line."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from numpy.testing import assert_array_equal
from taken import all_x, are_apart, splits_of

from partitions.npz import write_npz
from partitions.schema import Schema
from partitions.silo_file import (
    check_silo_file,
    read_dataset_file,
    read_silo_file,
    write_silo_file,
)
from partitions.splits import SiloData, Split


def pictures(n, channels=0, seed=0):
    shape = (n, 6, 5, channels) if channels else (n, 6, 5)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def table(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)


def labels(n):
    return np.arange(n) % 3


def good(**changes):
    """A correct file of tables; a change of None takes an array out."""
    arrays = {
        "x_train": table(20),
        "y_train": labels(20),
        "x_test": table(6),
        "y_test": labels(6),
        **changes,
    }
    return {key: np.asarray(array) for key, array in arrays.items() if array is not None}


def no_val(x):
    """No validation samples are wanted of such inputs."""
    return {"x_val": x[:0], "y_val": labels(0)}


def save(path, arrays):
    np.savez(path, **arrays)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "silo.npz"


# What is accepted


def test_reads_a_table(file):
    arrays = good(x_val=table(4), y_val=labels(4))
    data = read_silo_file(save(file, arrays))
    assert (len(data.train), len(data.val), len(data.test)) == (20, 4, 6)
    assert data.classes == 3 and data.input_shape == (3,)
    assert_array_equal(data.train.x, arrays["x_train"])
    assert data.train.x.dtype == np.float32 and data.train.y.dtype == np.int64


@pytest.mark.parametrize("channels", [0, 1, 3])
def test_reads_uint8_pictures(file, channels):
    x = pictures(20, channels)
    data = read_silo_file(save(file, good(x_train=x, x_test=x[:6], **no_val(x))))
    assert data.input_shape == (channels or 1, 6, 5)
    assert_array_equal(data.train.x, x.reshape(20, 6, 5, channels or 1))


def test_reads_float_pictures_with_channels_first(file):
    x = np.random.default_rng(0).random((20, 3, 6, 5), np.float32)
    data = read_silo_file(save(file, good(x_train=x, x_test=x[:6], **no_val(x))))
    assert data.input_shape == (3, 6, 5) and data.train.x.shape == (20, 6, 5, 3)
    assert data.train.x[7, 2, 4, 1] == x[7, 1, 2, 4]


@pytest.mark.parametrize("channels", [1, 3])
def test_reads_volumes(file, channels):
    """Bytes with their channels last, float32 with their channels first; what is written is read again."""
    x = np.random.default_rng(0).integers(256, size=(20, 4, 6, 5, channels)).astype(np.uint8)
    data = read_silo_file(save(file, good(x_train=x, x_test=x[:6], **no_val(x))))
    assert data.input_shape == (channels, 4, 6, 5)
    assert_array_equal(data.train.x, x)
    first = np.moveaxis(x, -1, 1).astype(np.float32)
    data = read_silo_file(save(file, good(x_train=first, x_test=first[:6], **no_val(first))))
    assert data.input_shape == (channels, 4, 6, 5) and data.train.x.dtype == np.float32
    assert_array_equal(data.train.x, x)
    assert (
        check_silo_file(file)[3].detail
        == f"volumes of 4 x 6 x 5, {channels} channel{'s' * (channels > 1)}, float32"
    )
    write_silo_file(file, data)
    assert_array_equal(read_silo_file(file).train.x, data.train.x)


def test_four_dimensions_are_pictures_but_under_medmnists_names(file):
    """Its 3D sets are (n, 28, 28, 28); pictures of it have one channel, or three."""
    x = np.random.default_rng(0).integers(256, size=(20, 8, 6, 5)).astype(np.uint8)
    checks = check_silo_file(save(file, good(x_train=x, x_test=x[:6], **no_val(x))))
    assert (
        checks[3].detail == "pictures of 8 x 6, 5 channels, uint8; volumes are (n, d, h, w, c)"
    )
    arrays = {f"{split}_images": x for split in ("train", "test")}
    arrays |= {f"{split}_labels": labels(20) for split in ("train", "test")}
    assert read_silo_file(save(file, arrays)).input_shape == (1, 8, 6, 5)
    arrays |= {"train_images": x[..., :3], "test_images": x[..., :3]}
    assert read_silo_file(save(file, arrays)).input_shape == (3, 8, 6)


def test_reads_medmnists_own_names(file):
    arrays = {}
    for split, n in (("train", 9), ("val", 4), ("test", 5)):
        arrays[f"{split}_images"] = pictures(n)
        arrays[f"{split}_labels"] = labels(n)[:, np.newaxis].astype(np.uint8)
    data = read_silo_file(save(file, arrays))
    assert (len(data.train), len(data.val), len(data.test)) == (9, 4, 5)
    assert data.val.y.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.int32, np.uint64, np.float32, np.float64]
)
def test_labels_of_any_number_type(file, dtype):
    data = read_silo_file(
        save(file, good(y_train=labels(20).astype(dtype), **no_val(table(20))))
    )
    assert data.train.y.dtype == np.int64
    assert_array_equal(data.train.y, labels(20))


def test_true_and_false_are_labels(file):
    data = read_silo_file(
        save(file, good(y_train=labels(20) == 1, y_test=labels(6) == 1, **no_val(table(20))))
    )
    assert data.classes == 2 and data.train.y[:3].tolist() == [0, 1, 0]


def test_float64_tables_become_float32(file):
    data = read_silo_file(
        save(file, good(x_train=table(20).astype(np.float64), **no_val(table(20))))
    )
    assert data.train.x.dtype == np.float32
    assert_array_equal(data.train.x, table(20))


def test_classes_may_be_more_than_occur(file):
    assert read_silo_file(save(file, good(classes=7))).classes == 7


def test_validation_is_taken_from_training_by_the_samples_themselves(file):
    """0.15 * 20 = 3 samples, those with the lowest SHA-256; the others stay for training, in their order."""
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    data = read_silo_file(save(file, good(x_train=x)))
    lowest = sorted(range(20), key=lambda i: hashlib.sha256(x[i].tobytes()).digest())[:3]
    assert_array_equal(data.val.x, x[sorted(lowest)])
    assert_array_equal(data.train.x, np.delete(x, lowest, axis=0))
    assert len(data.test) == 6


@pytest.mark.parametrize("key", ["label_names", "feature_names"])
def test_a_name_that_steers_a_terminal_is_not_read(file, key):
    """Nor can it be written: a schema takes printable names only (test_schema.py)."""
    write_npz(
        file,
        {
            "x_train": table(6),
            "y_train": labels(6),
            "x_test": table(6),
            "y_test": labels(6),
            key: np.array(["a", "b\x9bm", "c"]),
        },
    )
    with pytest.raises(
        ValueError, match=rf"{key} holds 'b\\x9bm'; leave control characters out"
    ):
        read_silo_file(file)


def test_unsplit_files_are_divided_once(file):
    """64 / 16 / 20 %: the same in whatever order the rows stand, and with whatever labels."""
    x = np.arange(100, dtype=np.float32)[:, np.newaxis]
    data = read_silo_file(save(file, {"x": x, "y": labels(100)}))
    assert [len(data.train), len(data.val), len(data.test)] == [64, 16, 20]
    everything = all_x(data)
    assert sorted(everything[:, 0]) == list(range(100))
    for split in splits_of(data):
        assert_array_equal(split.y, split.x[:, 0] % 3)
    turned = read_silo_file(save(file, {"x": x[::-1], "y": labels(100)}))
    for name in ("train", "val", "test"):
        assert_array_equal(getattr(turned, name).x[::-1], getattr(data, name).x)


def test_a_new_patient_redraws_nobody(file):
    """Of 100 patients at most one goes over each border when there are 101, and equal rows stay on one side."""
    x = np.random.default_rng(0).normal(size=(101, 2)).astype(np.float32)
    parts = []
    for n in (100, 101):
        data = read_silo_file(save(file, {"x": x[:n], "y": labels(n)}))
        parts.append([{row.tobytes() for row in split.x} for split in splits_of(data)])
    before, after = parts
    assert sum(len(old - new) for old, new in zip(before, after, strict=True)) <= 2
    twice = read_silo_file(save(file, {"x": np.concatenate([x, x]), "y": labels(202)}))
    sides = [{row.tobytes() for row in split.x} for split in splits_of(twice)]
    assert are_apart(sides, 101)


def test_equal_samples_cannot_be_divided(file):
    save(file, {"x": np.ones((9, 2), np.float32), "y": labels(9)})
    with pytest.raises(
        ValueError, match="has only 1 different samples, too few to divide; give samples for"
    ):
        read_silo_file(file)
    assert not check_silo_file(file)[-1].ok


@pytest.mark.parametrize("kind", ["grey", "colour", "float", "table"])
@pytest.mark.parametrize("val", [0, 3])
def test_what_is_written_is_read_back(file, kind, val):
    x = {
        "grey": pictures(20, 1),
        "colour": pictures(20, 3),
        "float": np.random.default_rng(0).random((20, 6, 5, 3), np.float32),
        "table": table(20),
    }[kind]
    y = labels(20)
    data = SiloData(Split(x, y), Split(x[:val], y[:val]), Split(x[:5], y[:5]), 4)
    write_silo_file(file, replace(data, schema=Schema(labels=("a", "b", "c", "d"))))
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    read = read_silo_file(file)
    assert read.classes == 4 and len(read.val) == val
    for name in ("train", "val", "test"):
        assert_array_equal(getattr(read, name).x, getattr(data, name).x)
        assert_array_equal(getattr(read, name).y, getattr(data, name).y)
    with np.load(file) as npz:
        assert npz["label_names"].tolist() == ["a", "b", "c", "d"]
    with zipfile.ZipFile(file) as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}


def test_a_failed_write_leaves_the_old_file(file):
    write_npz(file, {"x": np.zeros(3)})
    before = file.read_bytes()
    with pytest.raises(ValueError, match="allow_pickle"):
        write_npz(file, {"x": np.ones(3), "y": np.array([object()])})
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_reads_a_file_as_a_data_set(file):
    """Validation samples join the training samples, test samples stay apart."""
    save(file, good(x_val=table(4, seed=1), y_val=labels(4)))
    data = read_dataset_file(file)
    assert (data.name, data.classes, len(data.train), len(data.test)) == ("silo", 3, 24, 6)
    assert_array_equal(data.train.x[20:], table(4, seed=1))
    with pytest.raises(ValueError, match="read-only"):
        data.train.x[0] = 0
    save(file, {"x": table(10), "y": labels(10)})
    assert [
        len(split) for split in (read_dataset_file(file).train, read_dataset_file(file).test)
    ] == [8, 2]


def test_checks_tell_what_was_found(file):
    x = pictures(20, 3)
    checks = check_silo_file(
        save(file, good(x_train=x, x_test=x[:6], y_test=[0, 0, 0, 0, 1, 3]))
    )
    assert all(check.ok and not check.fix for check in checks)
    assert [check.detail for check in checks if check.name == "note"] == [
        "6 of 6 test samples have a picture that is also in training or validation: tests are too easy by that",
        "12 of 26 samples have the same picture as another patient's: keep one of each, or give the copies one patient",
    ]
    shown = {c.name: c.detail for c in checks if c.name not in ("file", "note")}
    assert shown == {
        "names": "x_train, y_train, x_test, y_test",
        "samples": "train 20, test 6",
        "inputs": "pictures of 6 x 5, 3 channels, uint8",
        "labels": "4 classes; samples of each: train [7, 7, 6, 0], test [4, 1, 0, 1]",
        "schema": f"dtype uint8; SHA-256 {Schema(dtype='uint8').digest}",
        "split": "train 17, val 3, test 6, val drawn from train by the samples themselves; no run can change it",
    }


def test_a_hospital_may_have_few_of_the_federations_classes(file):
    """Where it says how many there are. That it has a single one is said, too."""
    checks = check_silo_file(
        save(file, good(y_train=np.full(20, 5), y_test=np.full(6, 1), classes=6))
    )
    assert all(check.ok for check in checks) and "ONE" not in checks[4].detail
    checks = check_silo_file(
        save(file, good(y_train=np.full(20, 5), y_test=np.full(6, 5), classes=6))
    )
    assert all(check.ok for check in checks)
    assert checks[4].detail.endswith(
        "train [0, 0, 0, 0, 0, 20], test [0, 0, 0, 0, 0, 6]; there is ONE class here"
    )


def test_feature_names_are_shown(file):
    checks = check_silo_file(save(file, good(feature_names=["age", "sex", "cp"])))
    assert checks[3].detail == "a table of 3 columns, float32 (age, sex, cp)"


# What is refused

BAD_ARRAYS = {
    # names
    "no arrays": ({}, "holds no samples", "the names are x_train"),
    "unknown name": (
        good(x_trian=table(3)),
        "'x_trian' of no known name (did you mean 'x_train'?)",
        "the names are",
    ),
    "capital": (
        good(X_train=table(3)),
        "'X_train' of no known name (did you mean 'x_train'?)",
        "the names are",
    ),
    "no test": (good(x_test=None, y_test=None), "has no x_test", "x_train, y_train, x_test"),
    "no labels": (good(y_train=None), "has no y_train", ""),
    "half a validation": (good(x_val=table(2)), "has no y_val", ""),
    "two sets of names": (
        good(x=table(2), y=labels(2)),
        "has both x_train and x",
        "one set of names",
    ),
    # samples
    "lengths": (
        good(y_train=labels(19)),
        "train has 20 inputs but 19 labels",
        "one label for each",
    ),
    "empty train": (good(x_train=table(0), y_train=labels(0)), "no samples in train", ""),
    "empty test": (good(x_test=table(0), y_test=labels(0)), "no samples in test", ""),
    "too few to split": (
        {"x": table(2), "y": labels(2)},
        "only 2 samples, too few to split",
        "",
    ),
    "a number": (good(x_train=1.0), "a single number", ""),
    # inputs
    "nan": (
        good(x_train=np.where(np.arange(60).reshape(20, 3) == 34, np.nan, 1.0)),
        "first in sample 11",
        "fill or",
    ),
    "infinite": (
        good(x_test=np.full((6, 3), np.inf, np.float32)),
        "x_test has a value that is no finite",
        "",
    ),
    "too large for float32": (
        good(x_test=np.full((6, 3), 1e300)),
        "x_test has a value that is no finite",
        "",
    ),
    "integers": (
        good(x_train=np.ones((20, 3), np.int32)),
        "x_train is int32",
        "tables float32 (n, d)",
    ),
    "text": (good(x_train=np.full((20, 3), "a")), "x_train is <U1", "tables float32 (n, d)"),
    "uint8 table": (
        good(x_train=np.ones((20, 3), np.uint8)),
        "x_train is uint8 (20, 3)",
        "saved as float32",
    ),
    "float of six axes": (
        good(x_train=np.ones((20, 1, 1, 6, 5, 2), np.float32)),
        "(20, 1, 1, 6, 5, 2)",
        "(n, c, h, w)",
    ),
    "tokens without vocabulary": (
        good(x_train=np.ones((20, 3), np.int64)),
        "x_train is int64",
        "with `vocabulary`",
    ),
    "one-dimensional": (
        good(x_train=np.ones(20, np.float32)),
        "x_train is float32 (20,)",
        "(n, d)",
    ),
    "channels first": (
        good(x_train=np.ones((20, 3, 6, 5), np.uint8)),
        "with its channels first",
        "transpose",
    ),
    "channels last": (
        good(x_train=np.ones((20, 6, 5, 3), np.float32)),
        "with its channels last",
        "transpose",
    ),
    "volumes, channels first": (
        good(x_train=np.ones((20, 2, 6, 5, 7), np.uint8)),
        "channels first",
        "(n, d, h, w, c)",
    ),
    "volumes, channels last": (
        good(x_train=np.ones((20, 6, 5, 7, 2), np.float32)),
        "channels last",
        "(n, c, d, h, w)",
    ),
    "six dimensions": (
        good(x_train=np.ones((20, 1, 6, 5, 7, 2), np.uint8)),
        "is uint8 (20, 1, 6, 5, 7, 2)",
        "volumes",
    ),
    "no columns": (good(x_train=np.ones((20, 0), np.float32)), "its samples are empty", ""),
    "columns differ": (
        good(x_test=np.ones((6, 4), np.float32)),
        "test has a table of 4 columns, float32, but train has a table of 3 columns",
        "same shape",
    ),
    "kinds differ": (
        good(x_test=pictures(6)),
        "test has pictures of 6 x 5, 1 channel, uint8, but train",
        "",
    ),
    "wrong feature names": (
        good(feature_names=["a"]),
        "feature_names does not hold 3 texts",
        "",
    ),
    # labels
    "negative": (good(y_train=labels(20) - 1), "y_train has a label -1", "count from 0"),
    "not whole": (good(y_train=labels(20) + 0.5), "labels that are no whole numbers", ""),
    "nan label": (good(y_train=np.full(20, np.nan)), "labels that are no whole numbers", ""),
    "text label": (good(y_train=np.full(20, "sick")), "y_train is <U4", "silofl import"),
    "several labels": (
        good(y_train=np.ones((20, 14), int)),
        "y_train is (20, 14)",
        "one label per sample",
    ),
    "codes": (good(y_test=np.full(6, 10**7)), "a label 10000000", "class numbers"),
    "beyond classes": (
        good(classes=2),
        "train has a label 2 where classes is 2",
        "0 .. classes - 1",
    ),
    "classes of text": (good(classes="3"), "classes is no positive whole number", ""),
    "a code for classes": (good(classes=10**13), "classes is 10000000000000", "at most 100000"),
    "no classes": (good(classes=0), "classes is no positive whole number", ""),
    "gaps": (
        good(y_train=np.where(labels(20) == 1, 1, 5), y_test=[1, 5] * 3),
        "has labels 1, 5, which leave",
        "classes=",
    ),
    "one class": (
        {"x": table(30), "y": np.ones(30, int)},
        "has one class alone, 1",
        "save classes=numpy.array(N)",
    ),
    "label names": (good(label_names=["a", "b"]), "label_names does not hold 3 texts", ""),
    "a name that steers a terminal": (
        good(label_names=["a", "b\x1b[2J", "c"]),
        r"label_names holds 'b\x1b[2J'",
        "",
    ),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(file, case):
    arrays, detail, fix = BAD_ARRAYS[case]
    assert_refused(save(file, arrays), detail, fix)


def assert_refused(path, detail, fix):
    """`check_silo_file` ends in one fault with a way to mend it, and both readers raise it as one line."""
    *passed, last = check_silo_file(path)
    assert all(check.ok for check in passed)
    assert not last.ok and detail in last.detail and last.fix and fix in last.fix
    for read in (read_silo_file, read_dataset_file):
        said = fails(ValueError, None, read, path)
        text = said
        assert (
            text.startswith(f"{path}: ") and detail in text and fix in text and "\n" not in text
        )


class Evil:
    """Would leave a trace if it were unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_objects_are_not_unpickled(file, tmp_path):
    trace = tmp_path / "trace"
    np.savez(file, **good(), x_val=np.array([Evil(trace)], dtype=object))
    assert_refused(file, "x_val is an array of Python objects", "plain arrays of numbers")
    assert not trace.exists()


def test_no_file(file):
    assert_refused(file, "there is no such file", "check the path")


def test_a_folder(tmp_path):
    assert_refused(tmp_path, "is no file", "name the .npz file itself")


@pytest.mark.parametrize(
    "content, detail",
    [
        (b"", "the file is empty"),
        (b"age,sex,label\n63,1,0\n", "is no .npz file, or is cut short"),
        (b"PK\x03\x04 and then nothing of an archive", "is no .npz file, or is cut short"),
    ],
)
def test_files_of_another_kind(file, content, detail):
    file.write_bytes(content)
    assert_refused(file, detail, "silofl import")


def test_a_single_npy(file):
    np.save(file.with_suffix(".npy"), table(3))
    file.with_suffix(".npy").rename(file)
    assert_refused(file, "is a single .npy array", "inputs and labels")


def test_a_truncated_file(file):
    save(file, good())
    file.write_bytes(file.read_bytes()[:-200])
    assert_refused(file, "is no .npz file, or is cut short", "")


def test_a_changed_byte(file):
    """The archive's checksum notices it."""
    save(file, good())
    content = bytearray(file.read_bytes())
    content[content.index(table(20).tobytes()) + 5] ^= 1
    file.write_bytes(content)
    assert_refused(file, "Bad CRC-32", "copy it again")


def test_an_archive_of_something_else(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("report.txt", "text")
    assert_refused(file, "holds 'report.txt', which is no array", "numpy.savez")
