"""Data files whose samples stay on disk: the same samples, division, faults and numbers as from memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from hospitals import ALL, NETWORKS, hospital_files, one_file
from representatives import seldom
from tiny import federate

from client.prediction.new_samples import NewSamples, read_samples
from client.prediction.predict import batches_of
from models import samples
from partitions import npz, stored
from partitions.common.errors import DataError
from partitions.inputs import reorder_data
from partitions.schema import Schema
from partitions.silo_file import (
    check_silo_file,
    read_dataset_file,
    read_silo_file,
    write_silo_file,
)
from partitions.simulated import parse_source, read_hospitals
from partitions.splits import SiloData, Split, inputs_of, is_table
from partitions.stored import OnDisk, in_memory, sample_digests
from server.results.manifest import write_partition


@pytest.fixture
def on_disk(monkeypatch):
    """Every array is large."""
    monkeypatch.setattr(npz, "MAPPED", 1)
    monkeypatch.setattr(stored, "IN_MEMORY", 0)
    return monkeypatch


def splits(data):
    return [data.train, *([data.val] if isinstance(data, SiloData) else []), data.test]


def assert_same(one, other):
    assert one.input_shape == other.input_shape and one.schema == other.schema
    for a, b in zip(splits(one), splits(other), strict=True):
        for x, y in ((a.x, b.x), (a.y, b.y)):
            read, wanted = in_memory(y), in_memory(x)
            assert read.dtype == wanted.dtype and read.tobytes() == wanted.tobytes()
            assert np.array_equal(sample_digests(x), sample_digests(y))
        assert np.array_equal(a.units, b.units)


@pytest.mark.parametrize("kind", ALL)
def test_large_files_give_the_samples_of_small_ones(kind, tmp_path, on_disk):
    file = one_file(tmp_path, kind)
    read = read_silo_file(file)
    inputs = inputs_of(read.train.x).values()
    assert all(isinstance(x, np.ndarray) == is_table(x) for x in inputs)
    write_silo_file(tmp_path / "again.npz", read)
    assert_same(read, read_silo_file(tmp_path / "again.npz"))
    made = write_partition(read_dataset_file(file), "iid", tmp_path / "parts", silos=2, seed=1)
    checks = [check.detail for check in check_silo_file(file)]
    whole, both = read_dataset_file(file), None
    if kind != "stays":
        both = read_hospitals(parse_source(str(tmp_path / "parts")), 1)
    on_disk.undo()
    assert_same(read_silo_file(file), read)
    assert_same(read_dataset_file(file), whole)
    assert checks == [check.detail for check in check_silo_file(file)]
    again = write_partition(read_dataset_file(file), "iid", tmp_path / "b", silos=2, seed=1)
    assert again["silos"] == made["silos"]
    assert both is None or len(both.train) == len(whole.train)


@pytest.mark.parametrize(
    "kind",
    ["segmentation", "notes"] + [seldom(kind) for kind in ("multilabel", "balls", "stays")],
)
def test_a_run_from_disk_gives_the_numbers_of_a_run_from_memory(kind, tmp_path, on_disk):
    settings = {**NETWORKS[kind], "rounds": 2, "strategy": "ditto", "batch_size": 16}
    settings |= {"augment": "flip"} if kind in ("multilabel", "segmentation", "balls") else {}
    files = hospital_files(tmp_path, kind)
    assert not isinstance(read_silo_file(files["north"]).train.x, np.ndarray)
    found = federate(files, **settings)
    on_disk.undo()
    for file in files.values():  # the silos' caches know a file by its time
        file.touch()
    wanted = federate(files, **settings)
    assert [r for r in found.rows if "seconds" not in r.metric] == [
        r for r in wanted.rows if "seconds" not in r.metric
    ]
    for silo in files:
        assert np.array_equal(found.personal(silo), wanted.personal(silo))


def test_predictions_are_for_bounded_batches_of_several_inputs_too(tmp_path, on_disk):
    on_disk.setattr(samples, "VALUES", 1000)
    file = one_file(tmp_path, "stays")

    def batches():
        return [*batches_of(NewSamples(*read_samples(file), [], "", None), str(file))]

    found = batches()
    on_disk.setattr(npz, "MAPPED", 1 << 20)
    wanted = batches()
    assert len(found) == len(wanted) > 2
    for a, b in zip(found, wanted, strict=True):
        assert a.tobytes() == b.tobytes() and a.dtype == b.dtype


def test_masks_on_disk_are_renumbered_when_read(tmp_path):
    y = np.random.default_rng(1).integers(0, 3, (9, 4, 5)).astype(np.uint8)
    x = np.zeros((9, 4, 5, 1), np.uint8)
    schema, agreed = (Schema((), names, "") for names in (("b", "t", "o"), ("b", "o", "t")))
    data = [
        SiloData(*(Split(x, own),) * 3, 3, "segmentation", schema=schema)
        for own in (y, OnDisk([y], y.dtype))
    ]
    assert_same(*(reorder_data(own, agreed) for own in data))


def test_numbers_of_other_types_are_taken_as_they_are(tmp_path):
    rng = np.random.default_rng(2)
    y = np.arange(12) % 2
    for dtype, shape in (
        ("int16", (12, 1, 6, 5)),
        ("float16", (12, 2, 4, 6, 5)),
        ("int16", (12, 3, 40)),
    ):
        x = rng.integers(-1000, 3000, shape).astype(dtype)
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        data = read_silo_file(tmp_path / "a.npz")
        assert data.dtype == dtype and data.input_shape == shape[1:]
        assert np.array_equal(np.moveaxis(x, 1, -1), data.test.x)
        write_silo_file(tmp_path / "b.npz", data)
        assert_same(data, read_silo_file(tmp_path / "b.npz"))
    for dtype in ("int16", "float16"):
        np.savez(tmp_path / "a.npz", x=rng.integers(0, 9, (12, 4)).astype(dtype), y=y)
        fails(DataError, "table", read_silo_file, tmp_path / "a.npz")


def test_faults_of_mapped_arrays_are_found(tmp_path, on_disk):
    file, y = tmp_path / "a.npz", np.arange(12) % 2
    x = np.random.default_rng(2).normal(size=(12, 2, 30)).astype(np.float32)
    np.savez(file, x=x, y=y)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    fails(DataError, r"Bad CRC-32.*copy it again", read_silo_file, file)
    on_disk.setattr(stored, "AT_ONCE", 500)  # two samples
    x[7, 1, 3] = np.nan
    np.savez(file, x=x, y=y)
    fails(DataError, "no finite number, first in sample 7", read_silo_file, file)
    np.savez(file, x=np.full((12, 2, 30), 1e300), y=y)
    fails(DataError, "no finite number, first in sample 0", read_silo_file, file)
    np.savez(file, x=np.full((12, 9), 5), y=y, vocabulary=np.array(5))
    fails(DataError, r"outside of 0\.\.4, first in sample 0", read_silo_file, file)


def test_a_compressed_file_beyond_memory_says_what_to_do(tmp_path, monkeypatch):
    x, y = np.zeros((40, 64, 64), np.uint8), np.arange(40) % 2
    x[:] = np.arange(40)[:, None, None]
    monkeypatch.setattr(npz, "available", lambda: 100_000)
    np.savez_compressed(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(DataError, match=r"save it uncompressed, with numpy\.savez"):
        read_silo_file(tmp_path / "a.npz")
    monkeypatch.setattr(npz, "MAPPED", 1000)
    np.savez(tmp_path / "b.npz", x=x, y=y)
    assert len(read_silo_file(tmp_path / "b.npz").train) == 25


LIMITED = """
import resource, sys
import numpy as np, torch
from pathlib import Path
from torch import nn
from models.flat import FlatModel
from models import samples
from models.samples import Samples
from models.training import loss_gradient, predict
from partitions import stored
from partitions.silo_file import read_silo_file
from partitions.simulated import Division, part_of

def limit(extra):
    line = next(l for l in open("/proc/self/status") if l.startswith("VmData"))
    most = int(line.split()[1]) * 1024 + extra
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))

samples.VALUES, stored.AT_ONCE = 2**21, 2**22
stored.IN_MEMORY, file, extra = int(sys.argv[2]), sys.argv[1], int(sys.argv[3])
torch.set_num_threads(1)
network = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2))
model = FlatModel(network)
x = torch.zeros(8, 3, 64, 64)
loss_gradient(model, x, torch.zeros(8, dtype=torch.int64), nn.functional.cross_entropy)
limit(extra)
d = Division(file, "", "iid", 3, 1, 0.2)
for data in (read_silo_file(file), part_of(d, 0), part_of(d, 1), part_of(d, 2)):
    train, test = (Samples(s.x, s.y) for s in (data.train, data.test))
    order = torch.randperm(len(train)).split(16)
    for x, y in train.batches(order):
        loss_gradient(model, x, y, nn.functional.cross_entropy)
    assert predict(model, test).isfinite().all()
print("done", len(data.train))
"""


def limited(file, in_memory, extra):
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(file), str(in_memory), str(extra)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # So glibc gives back what was freed: holes in its heap are counted, too, and they differ from run to run
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
        check=False,
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="limits what Linux counts")
def test_a_set_trains_and_is_divided_in_half_of_its_size(tmp_path):
    """Of anonymous memory: that of the mapped file is not counted, and the kernel takes it back."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 255, (1000, 224, 224, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(1000) % 2)
    found = limited(tmp_path / "a.npz", 1 << 20, x.nbytes // 2)
    assert found.stdout.startswith("done"), found.stderr[-2000:]
    assert "done" not in limited(tmp_path / "a.npz", 1 << 30, x.nbytes // 2).stdout
