# mypy: disable-error-code="attr-defined,dict-item"
# The pickler in Python is typed as the one in C, which has other members.
"""Data sets: built in, found on disk in every accepted form, downloaded (from file://), or refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from failing import fails
from near import near
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from public_data import DATA, cannot_load, load, needs
from sklearn.datasets import load_diabetes

from partitions.datasets import pictures as picture_sets
from partitions.datasets import registry
from partitions.datasets.pictures import read_files
from partitions.datasets.registry import DATASETS, Source, download, load_dataset, places

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


@pytest.fixture(autouse=True)
def _no_downloads(own_places, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", offline)


def offline(url, timeout):
    raise OSError("Network is unreachable")


# Built in


def test_digits():
    """scikit-learn's grey values 0..16 times 255 / 16, rounded; a fifth of each class is for testing.

    Classes of 178, 182, 177, 183, 181, 182, 181, 179, 174, 180: 36 + 36 + 35 + 37 + 36 + 36 + 36 + 36 + 35 +
    36 = 359.
    """
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    assert data.input_shape == (1, 8, 8) and data.classes == 10
    assert data.train.x.dtype == np.uint8 and data.train.x.shape == (1438, 8, 8, 1)
    assert len(data.test) == 359
    grey = load_digits().images[0]
    # v * 15.9375; 127.5 goes to the even 128
    wanted = {0: 0, 1: 16, 5: 80, 8: 128, 12: 191, 16: 255}
    first = next(x for x in data.train.x if np.array_equal(np.rint(x[..., 0] / 15.9375), grey))
    for value, scaled in wanted.items():
        assert set(first[grey == value].ravel()) <= {scaled}
    share = np.bincount(data.test.y) / np.bincount(data.labels)
    assert np.abs(share - 0.2).max() < 0.01


def test_breast_cancer():
    data = load_dataset("breast-cancer")
    assert data.input_shape == (30,) and data.classes == 2
    assert data.train.x.dtype == np.float32
    assert np.bincount(data.labels).tolist() == [212, 357]
    assert len(data.test) == 113  # 42.4 and 71.4, rounded


def test_digit_findings():
    """The pictures of digits, in the same parts; 8 is even, at least five and has a loop, 3 has none of it."""
    digits, data = load_dataset("digits"), load_dataset("digit-findings")
    assert (data.task, data.classes, data.input_shape) == ("multilabel", 3, (1, 8, 8))
    for mine, theirs in ((data.train, digits.train), (data.test, digits.test)):
        assert np.array_equal(mine.x, theirs.x)
        assert (mine.y[theirs.y == 8] == 1).all() and (mine.y[theirs.y == 3] == 0).all()
        assert (mine.y[theirs.y == 7] == [0, 1, 0]).all() and (
            mine.y[theirs.y == 0] == [1, 0, 1]
        ).all()


def test_diabetes():
    data = load_dataset("diabetes")
    assert (data.task, data.classes, data.input_shape) == ("regression", 1, (10,))
    assert (len(data.train), len(data.test)) == (354, 88)
    assert (data.labels.min(), data.labels.max(), data.labels.dtype.name) == (
        25,
        346,
        "float32",
    )
    table = load_diabetes(scaled=False)
    row = int(np.flatnonzero((table.data.astype(np.float32) == data.test.x[5]).all(1))[0])
    assert table.target[row] == data.test.y[5, 0]


BUILT_IN = [name for name, d in DATASETS.items() if not (d.folders or d.files or d.about)]


def test_built_in_sets_are_those_without_files():
    assert {"digits", "breast-cancer", "digit-findings", "diabetes"} <= {*BUILT_IN}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets_do_not_change(name):
    first = load_dataset(name)
    assert load_dataset(name) is first
    for split in (first.train, first.test):
        with pytest.raises(ValueError, match="read-only"):
            split.x[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            split.y[0] = 0


def test_registry():
    with pytest.raises(
        ValueError,
        match=r"unknown data set 'minst' \(did you mean 'mnist'\?\); there are: .*digits",
    ):
        load_dataset("minst")
    # Sizes once, not a page
    fails(ValueError, r"octmnist\[-64\|-128\|-224\], ", load_dataset, "minst", "")


# Finding and downloading


def test_places_in_order(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SILOFL_DATA", str(tmp_path / "b"))
    found = places(str(tmp_path / "a"), ("mnist", "MNIST"))
    a, b, cache = tmp_path / "a", tmp_path / "b", tmp_path / "cache/silofl"
    assert found == [
        a / "mnist",
        a / "MNIST",
        a,
        b / "mnist",
        b / "MNIST",
        b,
        cache / "mnist",
        cache / "MNIST",
        cache,
    ]


@pytest.mark.parametrize(
    "name, file, folder",
    [
        ("mnist", "train-images-idx3-ubyte.gz", "mnist"),
        ("fashion-mnist", "train-images-idx3-ubyte.gz", "fashion_mnist"),
        ("cifar10", "cifar-10-binary.tar.gz", "cifar10"),
        ("cifar100", "cifar-100-binary.tar.gz", "cifar100"),
        ("pathmnist", "pathmnist.npz", "medmnist"),
        ("chestmnist-224", "chestmnist_224.npz", "medmnist"),
        ("heart-disease", "processed.cleveland.data", "heart_disease"),
    ],
)
def test_offline_is_one_clear_line(name, file, folder, tmp_path):
    (tmp_path / "data").mkdir()
    said = cannot_load(name, tmp_path / "data", None)
    text = said
    assert text.startswith(
        f"{name}: {file} is not on this machine and could not be downloaded from http"
    )
    assert "Network is unreachable" in text and "\n" not in text
    assert f"put {file} into {tmp_path / 'data' / folder}" in text


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A published file, at a file:// address."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "remote.bin"
    source.write_bytes(b"x" * 3_000_000)
    return source.as_uri(), hashlib.md5(source.read_bytes()).hexdigest()


def test_download(published, tmp_path, capfd):
    path = download("some", published[0], published[1], str(tmp_path / "data"), "sub")
    assert path == tmp_path / "data/sub/remote.bin"
    assert path.read_bytes() == b"x" * 3_000_000
    assert [p.name for p in path.parent.iterdir()] == ["remote.bin"]
    assert "remote.bin: 100%" in capfd.readouterr().err


def test_download_without_data_dir_goes_to_the_cache(published, tmp_path):
    assert (
        download("some", published[0], published[1], "", "sub")
        == tmp_path / "cache/silofl/sub/remote.bin"
    )


def test_download_of_another_file_is_refused(published, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"some: file://.* gave a file with MD5 .* instead of 0000.*; try again",
    ):
        download("some", published[0], "0" * 32, str(tmp_path / "data"), "sub")
    assert list((tmp_path / "data/sub").iterdir()) == []


# MNIST


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(np.uint8).tobytes()
    )


def write_mnist(folder, shift=0, packed=True):
    folder.mkdir(parents=True)
    for name, n in (("train", 6), ("t10k", 2)):
        pictures = (np.arange(n * 784) % 251 + shift).reshape(n, 28, 28)
        for kind, content in (
            ("images-idx3", idx(pictures)),
            ("labels-idx1", idx(np.arange(n) % 10)),
        ):
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_files(tmp_path, folder, packed):
    write_mnist(tmp_path / folder, packed=packed)
    data = load("mnist", tmp_path)
    assert data.train.x.shape == (6, 28, 28, 1) and data.test.x.shape == (2, 28, 28, 1)
    assert data.train.x[1, 0, 0, 0] == 784 % 251
    assert data.test.y.tolist() == [0, 1] and data.test.y.dtype == np.int64


def test_data_dir_comes_before_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path / "a/mnist", shift=1)
    write_mnist(tmp_path / "b/mnist", shift=2)
    monkeypatch.setenv("SILOFL_DATA", str(tmp_path / "b"))
    assert load("mnist", tmp_path / "a").train.x[0, 0, 0, 0] == 1
    assert load_dataset("mnist").train.x[0, 0, 0, 0] == 2


def test_a_named_folder_that_is_missing_is_refused(tmp_path, monkeypatch):
    """The set is in SILOFL_DATA, or built in: what data-dir names is not passed over, nor is a missing SILOFL_DATA."""
    write_mnist(tmp_path / "b/mnist")
    monkeypatch.setenv("SILOFL_DATA", str(tmp_path / "b"))
    for name in ("mnist", "digits"):
        cannot_load(
            name,
            tmp_path / "typo",
            r"data-dir = .*/typo: there is no such folder; make it, or name the one",
        )
    monkeypatch.setenv("SILOFL_DATA", str(tmp_path / "typo"))
    fails(ValueError, r"SILOFL_DATA = .*/typo: there is no such folder", load_dataset, "mnist")
    assert load_dataset("digits").classes == 10  # has no use for the variable


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path):
    """The files have the same names: outside a folder of their own only the published ones are taken."""
    write_mnist(tmp_path / "data")
    cannot_load("fashion-mnist", tmp_path / "data", "could not be downloaded")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"text", mtime=0),
        gzip.compress(idx(np.zeros((3, 4)))[:-1], mtime=0),
    ],
)
def test_damaged_idx_file(tmp_path, content):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mnist: .*train-images.* cannot be read .*delete it"):
        read_files(Source("mnist", "", DATASETS["mnist"]), [path] * 4)


@needs("mnist")
def test_mnist_itself(monkeypatch):
    """Published class sizes, and the first label, 5."""
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    data = load_dataset("mnist")
    assert np.bincount(data.train.y).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert np.bincount(data.test.y).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert data.train.y[0] == 5
    near(data.train.x.mean() / 255, 0.1307, 5e-5)


@needs("fashion_mnist")
def test_fashion_mnist_itself(monkeypatch):
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    data = load_dataset("fashion-mnist")
    assert np.bincount(data.labels).tolist() == [7000] * 10
    near(data.train.x.mean() / 255, 0.2860, 5e-5)


# CIFAR


def pictures(n, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), np.uint8)


def planes(x):
    """The published order: all red, then green, then blue values."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), 3072)


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_cifar10_binary_archive(tmp_path):
    """Records of one label byte and 3072 pixels; five training batches in order."""
    batches = {}
    for i in range(1, 6):
        batches[f"data_batch_{i}"] = (pictures(3, i), [i, 9, 0])
    batches["test_batch"] = (pictures(2, 0), [7, 8])
    members = {
        f"cifar-10-batches-bin/{name}.bin": np.hstack(
            [np.array(y, np.uint8)[:, np.newaxis], planes(x)]
        ).tobytes()
        for name, (x, y) in reversed(batches.items())
    }
    write_tar(tmp_path / "cifar-10-binary.tar.gz", members)
    data = load("cifar10", tmp_path)
    assert data.input_shape == (3, 32, 32)
    assert data.train.y.tolist() == [1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9, 0, 5, 9, 0]
    assert_array_equal(data.train.x[3:6], batches["data_batch_2"][0])
    assert_array_equal(data.test.x, batches["test_batch"][0])


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 wrote, in which the published archive was made: all text as byte strings."""

    def save_text(self, text):
        content = text.encode() if isinstance(text, str) else text
        self.write(b"T" + struct.pack("<i", len(content)) + content)  # opcode BINSTRING
        self.memoize(text)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, str: save_text, bytes: save_text}


def python2_pickle(batch):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(batch)
    return file.getvalue()


def test_cifar100_archives_give_fine_labels(tmp_path):
    """Binary: a coarse and a fine label byte. Python: a dictionary with both lists."""
    x, coarse, fine = pictures(4, 1), [1, 2, 3, 4], [99, 0, 50, 7]
    record = np.hstack([np.array([coarse, fine], np.uint8).T, planes(x)]).tobytes()
    write_tar(
        tmp_path / "a/cifar-100-binary.tar.gz", {"c/train.bin": record, "c/test.bin": record}
    )
    batch = python2_pickle({b"data": planes(x), b"coarse_labels": coarse, b"fine_labels": fine})
    write_tar(tmp_path / "b/cifar-100-python.tar.gz", {"c/train": batch, "c/test": batch})
    for folder in ("a", "b"):
        data = load("cifar100", tmp_path / folder)
        assert data.classes == 100
        assert data.train.y.tolist() == data.test.y.tolist() == fine
        assert_array_equal(data.train.x, x)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_cifar_python_archive_runs_no_code(tmp_path):
    batch = python2_pickle({b"data": Evil(), b"fine_labels": [1]})
    write_tar(tmp_path / "cifar-100-python.tar.gz", {"c/train": batch, "c/test": batch})
    cannot_load(
        "cifar100",
        tmp_path,
        r"cifar100: .* cannot be read \(it holds posix.system, which is not read",
    )


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"x_train": pictures(2, 0), "y_train": [0, 1], "x_test": pictures(2, 0)}, "y_test"),
        (
            {
                "x_train": pictures(2, 0)[:, :8],
                "y_train": [0, 1],
                "x_test": pictures(2, 0),
                "y_test": [0, 1],
            },
            "8, 32, 3",
        ),
        (
            {
                "x_train": pictures(2, 0),
                "y_train": [0, 10],
                "x_test": pictures(2, 0),
                "y_test": [0, 1],
            },
            r"0\.\.9",
        ),
    ],
)
def test_cifar10_npz_is_checked(tmp_path, arrays, words):
    np.savez(tmp_path / "cifar10.npz", **arrays)
    cannot_load("cifar10", tmp_path, rf"cifar10: .*cifar10.npz cannot be read .*{words}")


def test_cifar10_tiles_are_decoded_once(tmp_path, monkeypatch):
    """50 x 50 pictures to a sheet, row by row: picture 51 is the second of the second row.

    The second load, by another path of the code (nothing in memory), may not decode again.
    """
    train, test = (
        np.repeat(np.arange(2500) // 10 + start, 1).astype(np.uint8) for start in (0, 1)
    )
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for split, values in (("train", train), ("test", test)):
        sheet = np.kron(values.reshape(50, 50), np.ones((32, 32), np.uint8))
        Image.fromarray(np.stack([sheet, sheet, sheet], axis=2)).save(
            folder / f"{split}_00.webp", lossless=True, method=0
        )
    y = np.arange(2500, dtype=np.uint8) % 10
    np.savez(folder / "labels.npz", train_labels=y, test_labels=y)
    data = load("cifar10", tmp_path)
    assert_array_equal(data.train.x[:, 0, 31, 2], train)
    assert_array_equal(data.test.x[:, 31, 0, 0], test)
    assert data.train.y.tolist() == y.tolist()

    monkeypatch.setattr(picture_sets, "read_tiles", None)
    registry._load.cache_clear()
    again = load("cifar10", tmp_path)
    assert isinstance(again.train.x, np.memmap)
    assert_array_equal(again.train.x, data.train.x)


def test_decoded_arrays_stay_in_memory_without_a_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    np.savez(
        tmp_path / "cifar10.npz",
        x_train=pictures(2, 0),
        y_train=[0, 1],
        x_test=pictures(2, 0),
        y_test=[0, 1],
    )
    data = load("cifar10", tmp_path)
    assert len(data.train) == 2 and not isinstance(data.train.x, np.memmap)


@needs("cifar10")
def test_cifar10_itself(monkeypatch):
    """Published class sizes and channel means."""
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)  # decoding takes seconds
    data = load_dataset("cifar10")
    assert np.bincount(data.train.y).tolist() == [5000] * 10
    assert np.bincount(data.test.y).tolist() == [1000] * 10
    near(data.train.x.mean(axis=(0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], 5e-4)


# Heart disease

ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,{grad},0.0,6.0,{label}"


def write_heart(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    for hospital in HOSPITALS:
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")


def test_heart_disease_rows(tmp_path):
    """A missing value matters only in the ten features that are kept: grad may be '?', age may not."""
    rows = [
        ROW.format(grad="?", label=3),
        ROW.format(grad="1", label=0),
        "?" + ROW.format(grad="1", label=1)[4:],
    ]
    write_heart(tmp_path, rows)
    data = load("heart-disease", tmp_path)
    assert data.classes == 5 and data.input_shape == (10,)
    assert_allclose(data.train.x[0], [63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3], rtol=1e-6)
    assert data.groups is not None
    assert {name: len(rows) for name, rows in data.groups.items()} == dict.fromkeys(
        HOSPITALS, 2
    )
    assert sorted(np.concatenate(list(data.groups.values()))) == list(range(8))


@pytest.mark.parametrize(
    "line, words",
    [
        ("1,2,3", "line 2: 3 columns instead of 14"),
        (ROW.format(grad="1", label=5), r"line 2: the label is 5, not 0\.\.4"),
        (
            ROW.format(grad="1", label=1).replace("63.0", "old"),
            "line 2: could not convert string to float: 'old'",
        ),
    ],
)
def test_heart_disease_names_the_bad_line(tmp_path, line, words):
    write_heart(tmp_path, [ROW.format(grad="1", label=0), line])
    cannot_load(
        "heart-disease", tmp_path, rf"heart-disease: .*processed.cleveland.data, {words}"
    )


@needs("heart_disease")
def test_heart_disease_itself(monkeypatch):
    """Counts per hospital as FLamby publishes them; groups are rows of the pooled arrays."""
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    data = load_dataset("heart-disease")
    assert data.groups is not None
    assert {name: len(rows) for name, rows in data.groups.items()} == {
        "cleveland": 303,
        "hungarian": 261,
        "switzerland": 46,
        "va": 130,
    }
    assert np.bincount(data.labels[data.groups["cleveland"]]).tolist() == [164, 55, 36, 35, 13]
