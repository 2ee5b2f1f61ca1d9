"""Clipped sums and noise: layer by layer against single backward passes, the grid, the key streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clipped_by_hand import Layers, by_hand, clipped, tokens
from failing import fails
from near import near
from representatives import seldom
from torch import nn

from models.flat import FlatModel
from models.initialisation import flat_model
from models.networks.fusion import Gru
from models.privacy.chunks import chunk_size
from models.privacy.clipping import Clipping, Drawn, length
from models.privacy.noise import (
    GRID,
    add_noise,
    derive_key,
    digest_of,
    gaussians,
    poisson_sample,
)
from models.tasks.multilabel import binary_loss
from models.tasks.segmentation import segmentation_loss
from models.trainable import Part
from models.training import OnFeatures, taught_gradient
from partitions.common.errors import UserError


class Twice(nn.Module):
    """A layer that is called twice, and a weight of its own that no layer has: neither can go together."""

    block_names = ("fc", "out")

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.fc(self.fc(x).relu()))


def check_patients(model, x, y, loss=F.cross_entropy):
    """Five records of three patients: together as one by one, a backward pass for each patient."""
    patients = [torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([4, 2])]
    together, single = Clipping(model, 0.3), Clipping(model, 0.3, together=False)
    expected, value = single.total(x[:5], y[:5], loss, None, patients)
    found, own_value = together.total(x[:5], y[:5], loss, None, patients)
    assert list(together.tried.values()) == [True] and not single.tried
    assert torch.allclose(found, expected, atol=2e-5) and float(own_value) == pytest.approx(
        float(value), rel=1e-5
    )
    assert (
        int(together.clipped) == int(single.clipped) > 0 and together.units == single.units == 3
    )


def test_known_layers_go_together_and_are_those_of_single_passes():
    model, (x, y) = FlatModel(Layers()), tokens(7)
    clipping = Clipping(model, 0.4)
    total, value = clipping.total(x, y, F.cross_entropy, None, None)
    assert list(clipping.tried.values()) == [True]
    near(total, by_hand(model, x, y, 0.4))
    assert float(value) == pytest.approx(
        7 * float(F.cross_entropy(model.module(x), y).detach()), rel=1e-6
    )
    assert int(clipping.clipped) > 0 and clipping.units == 7
    check_patients(model, x, y)


def test_what_cannot_go_together_goes_one_by_one():
    model = FlatModel(Twice())
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    total, together = clipped(model, x, y, 0.1)
    assert together == [False]
    near(total, by_hand(model, x, y, 0.1), 1e-7)


@pytest.mark.parametrize(
    "text", ["DefaultCPUAllocator: can't allocate memory", "CUDA out of memory"]
)
def test_memory_that_ran_out_is_no_fault_of_a_record(text):
    """The batch would be skipped without a word; any other error is kept here, for it may be a record's."""
    model, x, y = FlatModel(Twice()), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])

    def failing(error):
        def loss(*_):
            raise RuntimeError(error)

        return loss

    assert not Clipping(model, 0.1).total(x, y, failing("record 3"), None, None)[0].any()
    fails(RuntimeError, text, Clipping(model, 0.1).total, x, y, failing(text), None, None)


def test_each_loss_has_a_trial_of_its_own():
    """One that uses the parameters itself has not that of one before it, whose records may go together."""
    model, (x, y) = FlatModel(Layers()), tokens(7)
    clipping = Clipping(model, 0.4)

    def decayed(logits, y):
        return F.cross_entropy(logits, y) + sum(p.square().sum() for p in model.parameters)

    for loss in (F.cross_entropy, decayed):
        total, _ = clipping.total(x, y, loss, None, None)
        near(total, by_hand(model, x, y, 0.4, loss))
    assert list(clipping.tried.values()) == [True, False]


@pytest.mark.parametrize(
    "name, shape, options",
    [
        ("small-cnn", (1, 8, 8), Part()),
        ("small-cnn", (1, 4, 4, 4), Part()),
        ("fasttext", ("tokens", 9, 11), Part()),
        ("fasttext", ("tokens", 9, 11), Part("head", 5, None, 2, 8.0)),
        ("fedapm-signals", (3, 16), Part()),
        ("unet", (1, 8, 8), Part()),
        seldom("vit-s", (1, 4, 4), Part()),
        seldom("vit-s", (1, 4, 4), Part("block11.*,head", 5)),
        ("player-transformer", ("tokens", 9, 11), Part()),
    ],
)
def test_networks(name, shape, options):
    settings = None
    if name == "vit-s":
        from models.networks.vit import VitSettings

        settings = VitSettings(patch=2)
    model = flat_model(name, shape, 3, settings, "cpu", None, options)
    model.module.eval()  # without dropout
    n = 5
    if shape[0] == "tokens":
        x, y = tokens(n)
    else:
        x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))
        y = torch.arange(n) % 3
    loss: Any = F.cross_entropy
    if name == "unet":
        y, loss = torch.randint(0, 3, (n, *shape[1:])), segmentation_loss
    total, together = clipped(model, x, y, 0.5, loss)
    assert together == [True]
    near(total, by_hand(model, x, y, 0.5, loss), 2e-5)
    check_patients(model, x, y, loss)


def test_a_gru_s_weights_are_those_of_single_passes():
    """Each of its four parameters by itself, of sequences of 16 steps whose states all count."""

    class States(nn.Module):
        block_names = ("gru", "out")

        def __init__(self):
            super().__init__()
            self.gru, self.out = Gru(3, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.gru(x).square().sum(1))

    torch.manual_seed(0)
    model, x, y = FlatModel(States()), torch.randn(5, 16, 3), torch.arange(5) % 3
    total, together = clipped(model, x, y, 0.5)
    expected = by_hand(model, x, y, 0.5)
    assert together == [True]
    for entry in model.layout.parameters:
        part = slice(entry.start, entry.stop)
        assert torch.allclose(total[part], expected[part], atol=1e-6), entry.name
    check_patients(model, x, y)


def test_the_length_of_a_long_vector_is_not_too_short():
    """What a long gradient is clipped by; `Tensor.norm` of these is 0.1 % short."""
    vector = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))
    assert float(length(vector)) == pytest.approx(float(vector.double().norm()), rel=1e-6)


@pytest.mark.parametrize("bias", [1.0, 1e3, 1e5])
def test_no_record_counts_for_more_where_a_gradient_cancels(bias):
    """As of attention, gradients of the outputs sum to zero over positions, and a server's weights make inputs nearly
    equal: what is left of the terms is less than float32 tells of their squares. The trial's records, which are empty,
    show nothing of it.
    """

    class Cancelling(nn.Module):
        block_names = ("norm", "fc", "out")

        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.out = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 3)
            nn.init.constant_(self.norm.bias, bias)

        def forward(self, x):
            z = self.fc(self.norm(x))
            return self.out(((z - z.mean(1, keepdim=True)) * x).sum(1))

    for number in range(8):
        torch.manual_seed(number)
        model, x, y = FlatModel(Cancelling()), torch.zeros(4, 8, 64), torch.tensor([0, 1, 2, 0])
        x[3] = torch.randn(8, 64)
        clipping = Clipping(model, 0.1)
        total, _ = clipping.total(x, y, F.cross_entropy, None, None)
        others, _ = clipping.total(x[:3], y[:3], F.cross_entropy, None, None)
        assert list(clipping.tried.values()) == [True]
        assert float(length(total - others)) <= 0.1 * 1.001


@pytest.mark.parametrize("small", [3e-23, 1e-3])
def test_no_record_counts_for_more_where_a_square_is_too_small_for_float32(small):
    """Tiny inputs and huge gradients, as weights of a server's can make them: their product is an ordinary number."""

    class Scaled(nn.Module):
        block_names = ("fc",)

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1024, 3, bias=False)

        def forward(self, x):
            return self.fc(x) * (3e-4 / small)

    torch.manual_seed(0)
    model, x, y = FlatModel(Scaled()), torch.full((1, 1024), small), torch.tensor([0])
    clipping = Clipping(model, 1e-3)
    total = torch.zeros_like(model.gradient)
    norms = clipping._chunk(Drawn(x, y, F.cross_entropy, None), total, (1, 1), 1)[1]
    assert float(norms) == pytest.approx(
        float(by_hand(model, x, y, 1e9).double().norm()), rel=1e-4
    )
    assert 0.99e-3 < float(total.double().norm()) <= 1.001e-3


def test_frozen_parts_count_for_nothing():
    model, (x, y) = FlatModel(Layers()), tokens(5)
    frozen = slice(0, model.layout.blocks[-1].start)
    model.freeze(frozen)
    total, _ = clipped(model, x, y, 1e-3)
    assert not total[frozen].any() and float(total.norm()) <= 5e-3


def test_a_record_s_loss_is_its_own_where_the_batch_s_is_no_mean():
    """Of labels that are known in part, a batch's loss weighs records by how many each knows."""
    model = flat_model("linear", (4,), 2, None, "cpu")
    x, y = torch.randn(3, 4), torch.tensor([[1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    total, _ = clipped(model, x, y, 10.0, binary_loss)
    near(total, by_hand(model, x, y, 10.0, binary_loss))


def test_losses_on_features_are_taken_record_by_record():
    model = flat_model("mlp", (4,), 3, None, "cpu")
    x, y = torch.randn(6, 4), torch.arange(6) % 3

    def of(logits, h, y):
        return F.cross_entropy(logits, y) + h.square().sum(1).mean()

    total, _ = clipped(model, x, y, 0.3, OnFeatures(of))
    features = nn.Sequential(model.module.get_submodule("fc1"), nn.ReLU())

    def alone(logits, y):
        return F.cross_entropy(logits, y)

    expected = torch.zeros_like(total)
    for i in range(6):
        value = (
            alone(model.module(x[i : i + 1]), y[i : i + 1])
            + features(x[i : i + 1]).square().sum()
        )
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(value, model.parameters)]
        )
        expected += gradient * min(1.0, 0.3 / float(gradient.norm()))
    near(total, expected)
    check_patients(model, x, y, OnFeatures(of))


@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_fixed_numbers_go_with_their_record(clip_norm):
    """A loss near another network's outputs: each record's gradient is with its own row, by a pass for each record."""
    model = FlatModel(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    x, y, taught = torch.randn(6, 5), torch.randint(3, (6,)), torch.randn(6, 3)

    def loss(outputs, z, fixed, y):
        return F.cross_entropy(outputs, y) + (outputs - fixed).square().sum(1).mean()

    expected, before = torch.zeros_like(model.gradient), model.private
    for i in range(6):
        one = slice(i, i + 1)
        taught_gradient(model, x[one], y[one], taught[one], loss)
        own = model.gradient.clone()
        expected += own * min(1.0, clip_norm / float(own.norm()))
    clipping = Clipping(model, clip_norm)

    class Sum:
        def gradient(self, x, y, loss, network):
            total, value = clipping.total(x, y, loss, network, None)
            model.gradient.copy_(total)
            return value

    model.private = Sum()  # type: ignore[assignment]
    taught_gradient(model, x, y, taught, loss)
    model.private = before
    near(model.gradient, expected, 1e-5)
    assert list(clipping.tried.values()) == [True]


def test_a_patient_s_gradient_is_the_mean_of_their_records():
    model = flat_model("linear", (4,), 3, None, "cpu")
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    groups = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    total, _ = clipped(model, x, y, 0.2, F.cross_entropy, groups)
    expected = torch.zeros_like(total)
    for rows in groups:
        each = torch.stack(
            [by_hand(model, x[i : i + 1], y[i : i + 1], 1e9) for i in rows.tolist()]
        )
        expected += each.mean(0) * min(1.0, 0.2 / (float(each.mean(0).norm()) + 1e-6))
    near(total, expected)
    assert float(total.norm()) <= 0.4


def test_patients_of_one_record_each_go_together():
    model = flat_model("mlp", (4,), 3, None, "cpu")
    x, y, clipping = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), Clipping(model, 0.2)
    patients, _ = clipping.total(
        x, y, F.cross_entropy, None, list(torch.split(torch.arange(5), 1))
    )
    assert clipping.units == 5 and list(clipping.tried.values()) == [True]
    assert torch.equal(patients, clipping.total(x, y, F.cross_entropy, None, None)[0])


def test_a_patient_of_more_records_than_a_chunk_goes_alone():
    model = flat_model("linear", (2**14,), 3, None, "cpu")  # 16 records a chunk
    x, y, clipping = torch.randn(20, 2**14), torch.arange(20) % 3, Clipping(model, 0.2)
    assert chunk_size(x) == 16
    patients = [torch.arange(17), torch.tensor([17, 18]), torch.tensor([19])]
    total, _ = clipping.total(x, y, F.cross_entropy, None, patients)
    expected, _ = Clipping(model, 0.2, together=False).total(
        x, y, F.cross_entropy, None, patients
    )
    assert torch.allclose(total, expected, atol=1e-6) and float(length(total)) <= 0.6


def test_no_patient_counts_for_more_where_their_records_cancel():
    """Two records, equal but for float32's rounding, of opposite labels: what is left is not known to float32."""
    model = flat_model("linear", (64,), 2, None, "cpu")
    for number in range(8):
        model.vector.zero_()  # gradients of opposite labels are then opposite
        x = 1e4 * torch.randn(64, generator=torch.Generator().manual_seed(number)).repeat(2, 1)
        x[1] *= 1 + 1e-6
        total, together = clipped(
            model, x, torch.tensor([0, 1]), 0.1, F.cross_entropy, [torch.arange(2)]
        )
        assert together == [True] and float(length(total)) <= 0.1 * 1.001


def test_networks_that_mix_records_are_refused_and_another_is_named():
    model = flat_model("resnet8", (1, 8, 8), 3, None, "cpu")
    with pytest.raises(
        UserError, match=r"^dp = true: not with this network: its BatchNorm2d \(.*small-cnn"
    ):
        Clipping(model, 1.0)


def test_chunks_hold_fewer_of_larger_records():
    assert [chunk_size(torch.empty(1, n)) for n in (10, 2**10, 2**20)] == [256, 128, 16]


def test_noise_lies_on_a_grid_whatever_the_sum():
    """Two sums that differ by less than float64 tells at the noise's size still give multiples of one step."""
    key = derive_key(b"k", "noise")
    for total in (torch.tensor([1.0, 1e-9, 3.3]), torch.tensor([0.1, 0.7, -123.456])):
        found = add_noise(total.double(), 2.0, key) / (2.0 * GRID)
        assert bool((found == found.round()).all())
    assert torch.equal(add_noise(total, 2.0, key), add_noise(total, 2.0, key))
    assert not torch.equal(
        add_noise(total, 2.0, key), add_noise(total, 2.0, derive_key(b"k", "other"))
    )


def test_noise_is_normal():
    """Mean, deviation, kurtosis and tails of 400,000 numbers; the bounds are five standard errors."""
    z = torch.cat(list(gaussians(derive_key(b"k", "z"), 400_000))).numpy()
    assert (
        abs(z.mean()) < 5 / 632
        and abs(z.std() - 1) < 5 / 894
        and abs((z**4).mean() - 3) < 5 * 9.8 / 632
    )
    assert abs((np.abs(z) > 3).mean() - 0.0027) < 5 * 0.0027**0.5 / 632
    assert abs(np.corrcoef(z[:200_000], z[200_000:])[0, 1]) < 5 / 447


def test_poisson_samples_draw_each_unit_by_itself():
    """A unit that is added changes nothing about the others: their draws stay."""
    key = derive_key(b"k", "sample")
    few, many = poisson_sample(key, 100, 0.3), poisson_sample(key, 101, 0.3)
    assert few.tolist() == [i for i in many.tolist() if i < 100]
    counts = [len(poisson_sample(derive_key(b"k", i), 1000, 0.05)) for i in range(200)]
    assert (
        abs(np.mean(counts) - 50) < 5 * 6.9 / 200**0.5 and abs(np.var(counts) / 47.5 - 1) < 0.5
    )
    assert len(poisson_sample(key, 50, 1.0)) == 50


def test_keys_are_told_apart_by_every_part_of_their_purpose():
    assert (
        derive_key(b"k", "ab", "c") != derive_key(b"k", "a", "bc") != derive_key(b"", "a", "bc")
    )
    assert (
        digest_of([torch.zeros(2)])
        != digest_of([torch.zeros(2, 1)])
        != digest_of([torch.zeros(2).int()])
    )
