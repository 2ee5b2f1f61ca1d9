"""EMNIST by class and Tiny-ImageNet in the layouts in which they are published."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from near import near
from numpy.testing import assert_array_equal
from PIL import Image
from public_data import cannot_load, load

from partitions.datasets import pictures
from partitions.datasets.registry import _load
from partitions.schemes.registry import partition

pytestmark = pytest.mark.usefixtures("own_places")


def write_idx(path, array):
    content = (
        b"\0\0\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def emnist(folder, ending=".gz"):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 124), ("test", 62)):
        arrays[part] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        write_idx(folder / f"emnist-byclass-{part}-images-idx3-ubyte{ending}", arrays[part])
        write_idx(
            folder / f"emnist-byclass-{part}-labels-idx1-ubyte{ending}",
            np.arange(n, dtype=np.uint8) % 62,
        )
    return arrays


@pytest.mark.parametrize("folder, ending", [("gzip", ".gz"), ("EMNIST/raw", "")])
def test_letters_stand_upright(tmp_path, folder, ending):
    """The files have them column by column. The second time out of the cache."""
    arrays = emnist(tmp_path / folder, ending)
    for _ in range(2):
        data = load("emnist", tmp_path)
        assert data.input_shape == (1, 28, 28) and data.classes == 62
        assert data.train.y.tolist() == [*range(62), *range(62)] and len(data.test) == 62
        for split, part in ((data.train, "train"), (data.test, "test")):
            assert_array_equal(split.x[..., 0], arrays[part].transpose(0, 2, 1))
        _load.cache_clear()
    assert (
        sum(len(silo.train) for silo in partition(data, "player-dirichlet", silos=2, seed=0))
        > 0
    )


def test_faults_of_emnist(tmp_path):
    cannot_load(
        "emnist",
        tmp_path,
        r"emnist: there is no emnist-byclass-train-images-idx3-ubyte.gz or .*gzip.zip",
    )
    emnist(tmp_path)
    images = tmp_path / "emnist-byclass-test-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:1000])
    cannot_load(
        "emnist", tmp_path, r"emnist-byclass-test-images.* cannot be read .*copy it again"
    )
    write_idx(images, np.zeros((61, 28, 28), np.uint8))
    cannot_load(
        "emnist", tmp_path, r"holds pictures \(61, 28, 28\) for labels \(62,\).*copy both"
    )
    write_idx(tmp_path / "emnist-byclass-test-labels-idx1-ubyte.gz", np.full(61, 62, np.uint8))
    cannot_load("emnist", tmp_path, "up to 62; copy both")


def write_picture(path, value, mode="RGB", size=(64, 64)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value, value)).save(
        path, "JPEG", quality=100
    )


def tiny(root, classes=5):
    """Class i (WordNet ids not in order) has pictures of grey value 20 i and 20 i + 5, one of which is grey by mode."""
    lines = []
    for i in range(classes):
        wnid = f"n{classes - i:08d}"
        for k in range(2):
            write_picture(
                root / "train" / wnid / "images" / f"{wnid}_{k}.JPEG",
                20 * i + 5 * k,
                "L" if k else "RGB",
            )
        write_picture(root / "val/images" / f"val_{i}.JPEG", 20 * i)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(lines))
    return root


def test_classes_in_the_order_of_their_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "TINY_CLASSES", 5)
    tiny(tmp_path / "tiny-imagenet-200")
    for _ in range(2):
        data = load("tiny-imagenet", tmp_path)
        assert data.input_shape == (3, 64, 64) and data.train.x.dtype == np.uint8
        assert data.train.y.tolist() == [
            0,
            0,
            1,
            1,
            2,
            2,
            3,
            3,
            4,
            4,
        ] and data.test.y.tolist() == [4, 3, 2, 1, 0]
        near(data.train.x.mean(axis=(1, 2, 3)), [80, 85, 60, 65, 40, 45, 20, 25, 0, 5], 1)
        near(data.test.x.mean(axis=(1, 2, 3)), [0, 20, 40, 60, 80], 1)
        _load.cache_clear()


def test_faults_of_tiny_imagenet(tmp_path, monkeypatch):
    cannot_load(
        "tiny-imagenet",
        tmp_path,
        r"tiny-imagenet: there is no tiny-imagenet-200; unpack tiny-imagenet-200\.zip",
    )
    root = tiny(tmp_path / "tiny-imagenet-200")
    cannot_load("tiny-imagenet", tmp_path, r"train has 5 classes of 200")
    monkeypatch.setattr(pictures, "TINY_CLASSES", 5)
    table = root / "val/val_annotations.txt"
    right = table.read_text()
    for wrong, fault in (
        (right + "val_9.JPEG\tn00000001\n", "1 of 6 pictures are missing, first .*val_9.JPEG"),
        ("val_0.JPEG\tn99\n", "val_annotations.txt cannot be read .*line 1 is not"),
        ("../../secret.JPEG\tn00000001\n", "line 1 is not a picture"),
        (right.splitlines()[0] + "\n", "a class in .* is without pictures for test"),
    ):
        table.write_text(wrong)
        cannot_load("tiny-imagenet", tmp_path, fault)
    table.write_text(right)
    picture = next((root / "train").rglob("*.JPEG"))
    write_picture(picture, 0, size=(64, 32))
    cannot_load("tiny-imagenet", tmp_path, "is 64 x 32; unpack")
    picture.write_bytes(b"no picture")
    cannot_load("tiny-imagenet", tmp_path, "cannot be read")
