"""MedMNIST: files in the official layout, every set and size; its own evaluator against our metrics."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from near import near
from numpy.testing import assert_array_equal
from public_data import DATA, cannot_load, load, needs
from representatives import sampled

from models.samples import Samples
from models.tasks import task_of
from partitions.datasets import medmnist
from partitions.datasets.registry import DATASETS, load_dataset

SETS = {name: own for name, own in DATASETS.items() if own.load.startswith("medmnist")}


pytestmark = pytest.mark.usefixtures("own_places")


def test_medmnist_table_is_medmnists_own():
    """All sets of the package in all their sizes, with its numbers of classes and its tasks."""
    info = pytest.importorskip("medmnist.info").INFO
    own = dict(info)
    sizes = {
        n: [28] + [int(key[4:]) for key in entry if key.startswith("url_")]
        for n, entry in own.items()
    }
    assert set(SETS) == {
        n if s == 28 else f"{n}-{s}" for n, known in sizes.items() for s in known
    }
    words = {"multilabel": "multi-label, binary-class", "ordinal": "ordinal-regression"}
    for name, entry in own.items():
        task = words.get(SETS[name].task, entry["task"])
        assert (SETS[name].classes, task) == (len(entry["label"]), entry["task"])
        assert task in ("multi-class", "binary-class") or SETS[name].task in words


def write_medmnist(path, **changes):
    """A file in the official layout: pictures (n, s, s), labels (n, 1)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, n in (("train", 5), ("val", 3), ("test", 2)):
        arrays[f"{split}_images"] = np.full((n, 28, 28), n, np.uint8)
        arrays[f"{split}_labels"] = (np.arange(n) % 2)[:, np.newaxis].astype(np.uint8)
    np.savez_compressed(path, **{**arrays, **changes})


@pytest.mark.parametrize("where", ["breastmnist.npz", "medmnist/breastmnist.npz"])
def test_medmnist_training_and_validation_are_one(tmp_path, where):
    write_medmnist(tmp_path / where)
    data = load("breastmnist", tmp_path)
    assert data.train.x.shape == (8, 28, 28, 1) and data.test.x.shape == (2, 28, 28, 1)
    assert data.train.x[:, 0, 0, 0].tolist() == [5] * 5 + [3] * 3
    assert data.train.y.tolist() == [0, 1, 0, 1, 0, 0, 1, 0] and data.classes == 2


def test_medmnists_own_folder_is_found(tmp_path):
    write_medmnist(tmp_path / "home/.medmnist/breastmnist.npz")
    assert len(load_dataset("breastmnist").test) == 2


def test_chestmnist_has_fourteen_findings_or_any_or_none(tmp_path):
    findings = {
        f"{split}_labels": np.zeros((n, 14), np.uint8)
        for split, n in (("train", 5), ("val", 3), ("test", 2))
    }
    findings["train_labels"][1, [3, 7]] = 1
    findings["test_labels"][0, 13] = 1
    write_medmnist(tmp_path / "chestmnist.npz", **findings)
    data = load("chestmnist", tmp_path)
    assert (data.task, data.classes, data.train.y.dtype.name) == ("multilabel", 14, "float32")
    assert (
        np.flatnonzero(data.train.y[1]).tolist() == [3, 7]
        and data.train.y.sum() == 2
        and data.test.y[0, 13] == 1
    )
    data = load_dataset("chestmnist", str(tmp_path), "multiclass")
    assert data.train.y.tolist() == [0, 1, 0, 0, 0, 0, 0, 0] and data.test.y.tolist() == [1, 0]
    with pytest.raises(
        ValueError,
        match="task = survival: the labels of chestmnist are for multilabel; leave task",
    ):
        load_dataset("chestmnist", str(tmp_path), "survival")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_labels": np.full((5, 1), 2)}, r"train: labels are not all in 0\.\.1"),
        ({"test_images": np.zeros((2, 28, 28))}, "test: pictures are float64"),
        ({"test_labels": np.zeros((3, 1))}, "for 3 labels"),
    ],
)
def test_medmnist_files_are_checked(tmp_path, changes, words):
    write_medmnist(tmp_path / "breastmnist.npz", **changes)
    cannot_load(
        "breastmnist",
        tmp_path,
        rf"breastmnist: .* cannot be read .*{words}.*; replace or delete it",
    )


@needs("medmnist")
def test_pneumoniamnist_itself(monkeypatch):
    """Published counts: 1214 + 135 and 3494 + 389 in train and val, 234 and 390 in test."""
    monkeypatch.setenv("SILOFL_DATA", str(DATA))
    data = load_dataset("pneumoniamnist")
    assert np.bincount(data.train.y).tolist() == [1349, 3883]
    assert np.bincount(data.test.y).tolist() == [234, 390]


# Every size, and the official evaluator


@sampled("name", SETS, 6)
def test_metrics_are_those_of_the_official_evaluator(tmp_path, name):
    """AUC and ACC of random predictions, on a file in the official layout of each set and size."""
    flag, _, side = name.partition("-")
    size = int(side or 28)
    official = pytest.importorskip("medmnist.evaluator")
    info = pytest.importorskip("medmnist.info").INFO[flag]
    rng = np.random.default_rng(size)
    classes = len(info["label"])
    sides = 3 if flag.endswith("3d") else 2
    arrays: dict[str, Any] = {}
    for split, n in (("train", 2), ("val", 1), ("test", 44)):
        shape = (n, *[size] * sides, *([3] if info["n_channels"] == 3 else []))
        arrays[f"{split}_images"] = np.full(shape, n, np.uint8)
        several = info["task"] == "multi-label, binary-class"
        y = (
            rng.integers(2, size=(n, classes))
            if several
            else (np.arange(n) % classes)[:, np.newaxis]
        )
        arrays[f"{split}_labels"] = y.astype(np.uint8)
    np.savez(tmp_path / f"{name.replace('-', '_')}.npz", **arrays)
    data = load(name, tmp_path)
    assert data.input_shape == (info["n_channels"], *[size] * sides)
    assert data.classes == DATASETS[name].classes == classes
    task = task_of(data.task)
    logits = torch.from_numpy(rng.normal(size=(44, classes)).astype(np.float32))
    found = task.measure(logits, Samples(data.test.x, data.test.y).labels())
    scores = (
        torch.sigmoid(logits.double())
        if data.task == "multilabel"
        else torch.softmax(logits.double(), 1)
    )
    # The official networks have one output there; the last column is taken
    if info["task"] == "binary-class":
        scores = scores[:, -1:]
    truth = official.Evaluator(flag, "test", size=size, root=str(tmp_path)).evaluate(
        scores.numpy()
    )
    near(found["auc"], truth.AUC)
    near(found["accuracy"], truth.ACC)


def test_pictures_are_mapped_and_unpacked_once(tmp_path, monkeypatch):
    pictures = {
        f"{split}_images": np.random.default_rng(n)
        .integers(256, size=(n, 28, 28))
        .astype(np.uint8)
        for split, n in (("train", 5), ("val", 3), ("test", 2))
    }
    write_medmnist(tmp_path / "breastmnist.npz", **pictures)
    for _ in range(2):
        data = load("breastmnist", tmp_path)
        assert isinstance(data.train.x, np.memmap) and isinstance(data.test.x, np.memmap)
        whole = np.concatenate([pictures["train_images"], pictures["val_images"]])
        assert_array_equal(data.train.x[..., 0], whole)
        assert_array_equal(data.test.x[..., 0], pictures["test_images"])
        datasets_again(monkeypatch)


def datasets_again(monkeypatch):
    """As another process, which may not unpack again."""
    from partitions.datasets import registry

    registry._load.cache_clear()
    monkeypatch.setattr(medmnist, "_join", None)


def test_pictures_stay_in_memory_without_a_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_medmnist(tmp_path / "breastmnist.npz")
    data = load("breastmnist", tmp_path)
    assert data.train.x[:, 0, 0, 0].tolist() == [5] * 5 + [3] * 3 and not isinstance(
        data.train.x, np.memmap
    )


def test_a_file_of_another_size_is_refused(tmp_path):
    write_medmnist(tmp_path / "breastmnist_64.npz")
    words = r"breastmnist-64: .* pictures are uint8 \(5, 28, 28\), and not uint8 of 64 x 64"
    cannot_load("breastmnist-64", tmp_path, words)


def test_a_damaged_file_leaves_nothing_in_the_cache(tmp_path):
    write_medmnist(tmp_path / "breastmnist.npz")
    content = bytearray((tmp_path / "breastmnist.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "breastmnist.npz") as archive:
        start = archive.getinfo("val_images.npy").header_offset + 60
    content[start : start + 8] = b"\xff" * 8
    (tmp_path / "breastmnist.npz").write_bytes(content)
    cannot_load(
        "breastmnist", tmp_path, r"breastmnist: .* cannot be read .*; replace or delete it"
    )
    assert not list((tmp_path / "cache").rglob("*.npy"))
