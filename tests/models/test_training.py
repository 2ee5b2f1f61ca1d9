"""Local training on vectors: optimisers against torch.optim, batches, random generators, samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from near import near
from torch import nn
from torch.testing import assert_close

from models.flat import FlatModel
from models.optimizers import Adam, Sgd, make_optimizer
from models.samples import Samples
from models.training import batches, generator, loss_gradient, predict

# ---- Optimisers ----------------------------------------------------------------------------------------------------

SGD = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.01},
    {"momentum": 1.0},
]
ADAM = [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"amsgrad": True, "weight_decay": 1e-4}]


def trajectories(ours, theirs, options):
    """Ten steps on the same gradients, which shrink from step to step so that AMSGrad differs from Adam."""
    rng = torch.Generator().manual_seed(3)
    vector = torch.randn(50, generator=rng)
    parameter = nn.Parameter(vector.clone())
    reference = theirs([parameter], lr=0.05, **options)
    for step in range(10):
        gradient = torch.randn(50, generator=rng) * 0.3**step
        parameter.grad = gradient.clone()
        before = gradient.clone()
        ours.step(vector, gradient)
        reference.step()
        assert torch.equal(gradient, before)  # a step does not change the gradient it was given
        yield vector.clone(), parameter.detach().clone()


@pytest.mark.parametrize("options", SGD)
def test_sgd_is_torchs_bit_for_bit(options):
    for ours, theirs in trajectories(Sgd(0.05, **options), torch.optim.SGD, options):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", ADAM)
def test_adam_is_torchs(options):
    for ours, theirs in trajectories(Adam(0.05, **options), torch.optim.Adam, options):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_amsgrad_is_not_adam():
    """Shrinking gradients: AMSGrad keeps the largest v and takes smaller steps (so the test above can tell them)."""
    plain = [v for v, _ in trajectories(Adam(0.05), torch.optim.Adam, {})][-1]
    ams = [
        v
        for v, _ in trajectories(Adam(0.05, amsgrad=True), torch.optim.Adam, {"amsgrad": True})
    ][-1]
    assert (plain - ams).abs().max() > 1e-4


@pytest.mark.parametrize("make", [lambda: Sgd(0.05, 0.9), lambda: Adam(0.05, amsgrad=True)])
def test_the_state_is_all_there_is(make):
    """A new optimiser that is given another's arrays goes on as that one would."""
    rng = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 20, generator=rng)
    straight, w = make(), torch.zeros(20)
    for g in gradients:
        straight.step(w, g)
    first, v = make(), torch.zeros(20)
    for g in gradients[:3]:
        first.step(v, g)
    second = make()
    second.state = {name: tensor.clone() for name, tensor in first.state.items()}
    for g in gradients[3:]:
        second.step(v, g)
    assert torch.equal(v, w)


def test_make_optimizer():
    sgd = make_optimizer("sgd", 0.1, 0.9, 0.01)
    adam = make_optimizer("adam", 0.1, 0.9, 0.01, True)
    assert isinstance(sgd, Sgd) and (sgd.lr, sgd.momentum, sgd.weight_decay) == (0.1, 0.9, 0.01)
    assert isinstance(adam, Adam) and (adam.lr, adam.weight_decay, adam.amsgrad) == (
        0.1,
        0.01,
        True,
    )


# ---- Batches -------------------------------------------------------------------------------------------------------


def test_every_sample_once_per_epoch():
    parts = list(batches(10, 4, 3, generator(1)))
    assert [len(p) for p in parts] == [4, 4, 2] * 3
    epochs = [torch.cat(parts[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_follow_the_seed():
    def order(seed):
        return [p.tolist() for p in batches(9, 4, 2, generator(seed, "a"))]

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize(
    "n, size, merged",
    [
        (9, 4, [4, 5]),
        (8, 4, [4, 4]),
        (10, 4, [4, 4, 2]),
        (1, 4, [1]),
        (3, 1, [1, 2]),
        (2, 1, [2]),
    ],
)
def test_a_single_last_sample_joins_the_batch_before(n, size, merged):
    parts = list(batches(n, size, 1, generator(1), least=2))
    assert [len(p) for p in parts] == merged
    assert sorted(torch.cat(parts).tolist()) == list(range(n))
    assert torch.equal(torch.cat(parts), torch.cat(list(batches(n, size, 1, generator(1)))))


# ---- Random generators ---------------------------------------------------------------------------------------------


def test_generators_are_told_apart_by_every_part():
    keys: list[tuple[Any, ...]] = [
        (1, "a", 1, "train"),
        (2, "a", 1, "train"),
        (1, "b", 1, "train"),
        (1, "a", 2, "train"),
        (1, "a", 1, "ala"),
        (1,),
        (11,),
        (1, 1),
        (1, "a"),
        (1, "", "a"),
    ]
    drawn = {
        tuple(torch.randint(2**31, (4,), generator=generator(*key)).tolist()) for key in keys
    }
    assert len(drawn) == len(keys)


def test_generators_do_not_depend_on_each_other_nor_on_the_process():
    """Drawing from one does not move another, nor the global one; the first values are the same in every process."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two = generator(7, "a", 1), generator(7, "b", 1)
    torch.rand(100, generator=one)
    assert torch.equal(
        torch.rand(3, generator=two), torch.rand(3, generator=generator(7, "b", 1))
    )
    assert torch.equal(torch.get_rng_state(), state)
    # sha256("42/hospital-01/3/train") starts with these eight bytes; a hash that changes by process would not.
    assert (
        generator(42, "hospital-01", 3, "train").initial_seed()
        == int("16376b72913dbb83", 16) >> 1
    )


# ---- Samples, gradients, predictions -------------------------------------------------------------------------------


def test_pictures_of_bytes_become_minus_one_to_one():
    """(x / 255 - 1/2) / (1/2): 0 -> -1, 255 -> 1, 51 -> -0.6; channels first in channels-last memory."""
    x = np.array([[[[0, 255, 51]]], [[[255, 0, 0]]]], dtype=np.uint8)  # (2, 1, 1, 3)
    samples = Samples(x, np.array([1, 0]))
    batch, labels = samples.take(torch.tensor([0]))
    assert batch.shape == (1, 3, 1, 1)
    assert batch.flatten().tolist() == pytest.approx([-1.0, 1.0, -0.6])
    assert labels.tolist() == [1] and labels.dtype == torch.int64
    big = Samples(np.zeros((4, 8, 6, 3), np.uint8), np.zeros(4)).take(slice(None))[0]
    assert big.shape == (4, 3, 8, 6) and big.is_contiguous(memory_format=torch.channels_last)
    assert len(samples) == 2


def test_float_values_are_taken_as_they_are_or_standardised():
    x = np.array([[1.0, 10.0], [3.0, 30.0]], np.float32)
    plain = Samples(x, np.array([0, 1]))
    assert plain.take(slice(None))[0].tolist() == x.tolist()
    scaled = Samples(
        x, np.array([0, 1]), mean=torch.tensor([2.0, 10.0]), std=torch.tensor([1.0, 20.0])
    )
    assert scaled.take(slice(None))[0].tolist() == [[-1, 0], [1, 1]]
    assert x[0, 0] == 1.0  # the data themselves stay


def test_read_only_data_are_not_written_to():
    x = np.zeros((2, 2, 2, 1), np.uint8)
    x.flags.writeable = False
    Samples(x, np.zeros(2)).take(slice(None))[0].add_(1)
    assert not x.any()


def test_loss_gradient_starts_from_zero_each_time():
    model = FlatModel(nn.Linear(3, 2))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    loss = loss_gradient(model, x, y, nn.functional.cross_entropy)
    first = model.gradient.clone()
    assert torch.equal(loss_gradient(model, x, y, nn.functional.cross_entropy), loss)
    assert torch.equal(model.gradient, first)
    assert first.any() and not loss.requires_grad


def test_predict_is_evaluation_and_goes_back_to_training():
    """Dropout is off, running statistics stay, and the batch size has no say."""
    model = FlatModel(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    )
    samples = Samples(
        np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32), np.zeros(7)
    )
    buffers = model.buffers.clone()
    whole = predict(model, samples)
    near(predict(model, samples, batch_size=2), whole, 1e-5)
    assert whole.shape == (7, 2) and not whole.requires_grad
    assert torch.equal(model.buffers, buffers)
    assert model.module.training
    empty = Samples(np.zeros((0, 3), np.float32), np.zeros(0))
    assert len(predict(model, empty)) == 0
