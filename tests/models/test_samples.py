"""Samples on disk give the batches of samples in memory, bit for bit."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from failing import fails

from models.flat import FlatModel
from models.samples import Samples, at_once
from models.training import predict
from partitions.site_split import select_rows
from partitions.splits import Dataset, Split, inputs_of, join_splits, take
from partitions.stored import OnDisk, sample_digests, together

RNG = np.random.default_rng(5)
N = 23


def made(shape, dtype):
    return RNG.integers(0, 200, (N, *shape)).astype(dtype)


def lacking(x):
    x[3:9:2] = 0
    return x


SEVERAL = {
    "image": lacking(made((5, 4, 3), "uint8")),
    "notes": lacking(made((6,), "int32")),
    "values": lacking(made((3,), "float32")),
}
INPUTS = {
    "grey": made((6, 5, 1), "uint8"),
    "coloured": made((6, 5, 3), "uint8"),
    "real": np.moveaxis(made((3, 6, 5), "float32"), 1, -1),
    "short": made((6, 5, 2), "int16"),
    "half": made((4, 6, 5, 1), "float16"),
    "signal": np.moveaxis(made((12, 30), "float32"), 1, -1),
    "text": made((9,), "int32"),
    "table": made((4,), "float32"),
}


def stored(x):
    return OnDisk([x[:10], x[10:]], x.dtype)


def same(one, other):
    pairs = [(one, other)] if isinstance(one, torch.Tensor) else [*zip(one, other, strict=True)]
    return all(
        torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs
    )


@pytest.mark.parametrize("kind", [*INPUTS, "several"])
def test_stored_samples_give_the_batches_of_the_array(kind):
    if kind == "several":
        x = together(SEVERAL)
        disk = together({name: stored(own) for name, own in SEVERAL.items()})
    else:
        x, disk = INPUTS[kind], stored(INPUTS[kind])
    y = np.arange(N) % 4
    scale: tuple[Any, ...] = ()
    if kind in ("table", "several"):
        columns = 4 if kind == "table" else 3
        scale = (torch.arange(1.0, 1 + columns), torch.arange(2.0, 2 + columns))
    held, read = Samples(x, y, "cpu", *scale), Samples(disk, y, "cpu", *scale)
    assert held.at_once == read.at_once and len(read) == N
    order: list[Any] = [
        slice(2, 9),
        *torch.randperm(N, generator=torch.Generator().manual_seed(1)).split(4),
    ]
    state = torch.random.get_rng_state()
    for (a, b), (c, d) in zip(held.batches(order), read.batches(order), strict=True):
        assert same(a, c) and torch.equal(b, d)
    assert torch.equal(state, torch.random.get_rng_state())  # dropout's numbers
    for index in (slice(2, 9), order[0], torch.empty(0, dtype=torch.int64)):
        assert same(held.take(index)[0], read.take(index)[0])
    assert read.content.keys() >= {"x", "y"}


def test_rows_of_stored_samples_are_chosen_and_not_read():
    x = INPUTS["coloured"]
    disk, y, patient = stored(x), np.arange(N), np.arange(N) // 2
    whole, there = Split(x, y, patient), Split(disk, y, patient)
    rows = np.array([7, 0, 21, 3])
    fails(TypeError, "in batches", np.asarray, disk)
    for a, b in (
        (select_rows(whole, rows), select_rows(there, rows)),
        (
            join_splits([whole, select_rows(whole, rows)]),
            join_splits([there, select_rows(there, rows)]),
        ),
        (
            take(Dataset("a", whole, select_rows(whole, rows), 2), rows),
            take(Dataset("a", there, select_rows(there, rows), 2), rows),
        ),
    ):
        assert isinstance(b.x, OnDisk) and b.x.shape == a.x.shape
        assert np.array_equal(a.x, b.x[:]) and np.array_equal(a.y, b.y)
        assert np.array_equal(sample_digests(a.x), sample_digests(b.x))
        assert a.patient is not None and b.patient is not None
        assert a.patient.tolist() == b.patient.tolist()
    both = together({"a": stored(x), "b": y})
    assert np.array_equal(both.part(rows)["b"], y[rows])
    assert np.array_equal(sample_digests(both), sample_digests(together({"a": x, "b": y})))
    assert [*inputs_of(join_splits([Split(both, y), Split(both, y)]).x)] == ["a", "b"]


@pytest.mark.parametrize(
    "shape, dtype, wanted",
    [
        ((9, 28, 28, 3), "uint8", 512),  # as before
        ((9, 512, 512, 1), "uint8", 16),
        ((9, 1024, 1024, 3), "float32", 1),
        ((9, 64, 64, 64, 1), "uint8", 8),
        ((9, 5000, 12), "float32", 6),
        ((9, 100_000), "float32", 41),
        ((9, 128), "int32", 256),
        ((9, 4000, 4000, 3), "uint8", 1),
    ],
)
def test_an_evaluation_batch_is_bounded_by_values(shape, dtype, wanted):
    assert at_once(shape, np.dtype(dtype)) == wanted


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory"), None])
def test_an_evaluation_that_runs_out_of_memory_is_repeated_in_halves(error):
    class Hungry(torch.nn.Linear):
        seen: ClassVar[list[int]] = []

        def forward(self, x):
            self.seen.append(len(x))
            if len(x) > 4:
                raise error or RuntimeError("another fault")
            return super().forward(x)

    Hungry.seen = []
    model, x = FlatModel(Hungry(4, 2)), INPUTS["table"]
    samples = Samples(x, np.zeros(N, np.int64))
    if error is None:
        fails(RuntimeError, "another", predict, model, samples, 8)
        return
    assert torch.equal(predict(model, samples, 8), predict(model, samples, 4))
    assert Hungry.seen[:3] == [8, 4, 4]
    with pytest.raises(type(error)):  # once
        predict(model, samples, 20)
