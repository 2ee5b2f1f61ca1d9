"""Clipped sums where weights, buffers or inputs overflow: no unit adds more than the clip norm, whatever the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clipped_by_hand import Layers, by_hand, clipped, tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st
from near import near
from representatives import sampled
from torch import Tensor, nn

from models.flat import FlatModel
from models.initialisation import flat_model
from models.metrics import loss_function
from models.networks.fusion import Gru
from models.privacy import layers
from models.privacy.clipping import Clipping, length
from models.privacy.noise import add_noise, derive_key
from models.tasks.multilabel import binary_loss
from models.tasks.regression import square_loss
from models.tasks.segmentation import segmentation_loss
from models.trainable import Part
from models.training import OnFeatures
from partitions.common.errors import UserError

EXTREMES = (math.inf, -math.inf, math.nan, 3.4e38, -1e38, 1e19, 1e-3, 0.0, 1e-23, -1e-40)
CLIP = 0.5
EXAMPLES = 8


class Mixed(nn.Module):
    """Layers on measurements: one is a GRU, one is scaled by a buffer, one is called twice."""

    block_names = ("fc", "gru", "group", "out")

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.gru = Gru(4, 4)
        self.group = nn.GroupNorm(2, 6)
        self.out = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        z = self.group(self.gru(self.fc(x).relu() * self.scale)).sum(1)
        return self.out(z)


class Twice(Mixed):
    def forward(self, x):
        return super().forward(x) + self.out(self.fc(x).sum(1))


def small_features(logits, h, y):
    return F.cross_entropy(logits, y) + h.square().sum(1).mean()


def network(*of):
    """One of its own: the one that a process shares would keep what a test plants, such as nan."""
    return flat_model.__wrapped__(*of)


def of_classes(model, *shape):
    return model, torch.randn(6, *shape), torch.arange(6) % 3


def of_findings():
    return *of_classes(network("mlp", (4,), 3, None, "cpu"), 4)[:2], torch.randint(
        -1, 2, (6, 3)
    ).float()


def of_measurements():
    return *of_classes(network("mlp", (4,), 2, None, "cpu"), 4)[:2], torch.randn(6, 2)


def of_outlines():
    model = network("unet", (1, 8, 8), 3, None, "cpu")
    return model, torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6, 8, 8))


def with_lora():
    return network(
        "fasttext", ("tokens", 9, 11), 3, None, "cpu", None, Part("head", 5, None, 2, 8.0)
    ), *tokens(6)


KINDS: dict[str, tuple[Callable[[], tuple[FlatModel, Tensor, Tensor]], Any]] = {
    "table": (lambda: of_classes(network("mlp", (4,), 3, None, "cpu"), 4), F.cross_entropy),
    "focal": (
        lambda: of_classes(network("mlp", (4,), 3, None, "cpu"), 4),
        loss_function("focal", 2.0),
    ),
    "on features": (
        lambda: of_classes(network("mlp", (4,), 3, None, "cpu"), 4),
        OnFeatures(small_features),
    ),
    "findings": (of_findings, binary_loss),
    "measurements": (of_measurements, square_loss),
    "outlines": (of_outlines, segmentation_loss),
    "picture": (
        lambda: of_classes(network("small-cnn", (1, 8, 8), 3, None, "cpu"), 1, 8, 8),
        F.cross_entropy,
    ),
    "every layer": (lambda: (FlatModel(Layers()), *tokens(6)), F.cross_entropy),
    "gru": (lambda: of_classes(FlatModel(Mixed()), 6, 3), F.cross_entropy),
    "one by one": (lambda: of_classes(FlatModel(Twice()), 6, 3), F.cross_entropy),
    "lora": (with_lora, F.cross_entropy),
    "attention": (
        lambda: (network("player-transformer", ("tokens", 9, 11), 3, None, "cpu"), *tokens(6)),
        F.cross_entropy,
    ),
}
PATIENTS = [[2], [1], [0, 3], [5, 4]]


def planted(target, plants):
    """Write each value at its place, a share of the vector's length."""
    for place, value in plants:
        target.view(-1)[int(place * (target.numel() - 1))] = value


def larger(model, x, factor):
    """Multiply what the last record alone has: its inputs, or the embedding of a token of its own."""
    if x.is_floating_point():
        x[-1] *= factor
        return
    x[x == 10] = 1
    x[-1, ::2] = 10
    next(p for p in model.module.parameters() if p.shape[0] == 11).data[10] *= factor


PLANTS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(EXTREMES)), max_size=3)
FACTORS = st.sampled_from((1.0, 1e6, 1e13, 1e19, 1e30, 3e38, 1e-20, 1e-40, math.nan))
NONE = {"weights": [], "buffers": [], "inputs": [], "scale": 1.0, "seed": 0}


@sampled("kind", KINDS, 2)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@example(**NONE, factor=3e38)
@example(**NONE, factor=math.nan)
@given(
    weights=PLANTS,
    buffers=PLANTS,
    inputs=PLANTS,
    scale=FACTORS,
    factor=FACTORS,
    seed=st.integers(0, 99),
)
def test_a_unit_adds_at_most_the_clip_norm(kind, weights, buffers, inputs, scale, factor, seed):
    """A record or a patient with extreme inputs, under extreme weights and buffers, that is there or not."""
    torch.manual_seed(seed)
    make, loss = KINDS[kind]
    model, x, y = make()
    model.vector.mul_(scale)
    larger(model, x, factor)
    planted(model.vector, weights)
    if model.buffers.numel():
        planted(model.buffers, buffers)
    if x.is_floating_point():
        planted(x[-1], inputs)
    clipping = Clipping(model, CLIP)
    for units in (list(torch.arange(6).split(1)), [torch.tensor(rows) for rows in PATIENTS]):
        torch.manual_seed(seed)
        whole, _ = clipping.total(x, y, loss, None, units)
        assert bool(torch.isfinite(add_noise(whole, CLIP, derive_key(b"", "k"))).all())
        assert float(length(whole)) <= len(units) * CLIP * 1.001
        torch.manual_seed(seed)
        others, _ = clipping.total(x, y, loss, None, units[:-1])
        assert float(length(whole - others)) <= CLIP * 1.01


def small():
    torch.manual_seed(0)
    return of_classes(network("mlp", (4,), 3, None, "cpu"), 4)


@pytest.mark.parametrize(
    "change",
    [lambda m, x: m.vector.zero_(), lambda m, x: x.zero_(), lambda m, x: x.fill_(math.nan)],
)
def test_neither_records_nor_weights_decide_whether_records_go_together(change):
    """With gradients of zero, a layer that is called twice would pass a trial of the silo's own records."""
    for make, expected in ((KINDS["one by one"][0], False), (KINDS["gru"][0], True)):
        model, x, y = make()
        change(model, x)
        before = model.vector.clone()
        _, together = clipped(model, x, y, CLIP)
        assert together == [expected] and torch.equal(model.vector, before)


class Centred(nn.Module):
    """Mixes records in training alone, and without a gradient through the mean."""

    block_names = ("out",)

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x - x.mean(0).detach() if self.training else x)


def test_records_that_mix_in_training_only_go_one_by_one():
    model, x, y = of_classes(FlatModel(Centred()), 4)
    _, together = clipped(model, x, y, CLIP)
    assert together == [False]


class Counting(nn.Module):
    """A buffer that each batch changes; ``like``: its first value."""

    block_names = ("out",)

    def __init__(self, like):
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("seen", like)

    def forward(self, x):
        if self.training:
            self.seen.add_(1 + len(x))  # type: ignore[operator]
        return self.out(x)


@pytest.mark.parametrize("like", [torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
def test_a_network_whose_buffers_change_is_refused(like):
    model, x, y = of_classes(FlatModel(Counting(like)), 4)
    with pytest.raises(
        UserError,
        match=r"^dp = true: not with this network: its buffer seen changes in training",
    ):
        Clipping(model, CLIP).total(x, y, F.cross_entropy, None, None)


class Strict(nn.Module):
    """Fails for some records."""

    block_names = ("out",)

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        if bool((x > 50).any()):
            raise ValueError(f"{float(x.max())} is too large")
        return self.out(x)


@pytest.mark.parametrize("together", [True, False])
def test_a_record_that_raises_an_error_adds_nothing(together):
    """The error would reach the server as the silo's answer."""
    model, x, y = of_classes(FlatModel(Strict()), 4)
    expected = by_hand(model, x[:-1], y[:-1], CLIP)
    x[-1] = 51
    total, _ = Clipping(model, CLIP, together).total(x, y, F.cross_entropy, None, None)
    near(total, expected)


def test_a_sum_that_is_too_long_is_added_again_one_by_one(monkeypatch):
    """Whatever formula of norms is wrong: here a linear layer's says 0 of the first records, which are left out."""
    (model, x, y), wrong = small(), 2
    clipping, real = Clipping(model, CLIP), layers.LinearMap.square
    clipping.total(x, y, F.cross_entropy, None, None)  # the trial
    seen, parts, x = [], clipping._parts, 900 * x
    faulty = {tuple(row) for row in x[:wrong].tolist()}

    def noted(drawn, *rest):
        seen.append(drawn.x)
        return parts(drawn, *rest)

    monkeypatch.setattr(clipping, "_parts", noted)

    def square(part, k):
        right = [tuple(row) not in faulty for row in seen[-1].tolist()]
        return real(part, k) * torch.tensor(right)

    monkeypatch.setattr(layers.LinearMap, "square", square)
    monkeypatch.setattr(layers.SummedTerms, "square", lambda part, k: 0 * part.d.sum(1))
    rest, _ = clipping.total(x[wrong:], y[wrong:], F.cross_entropy, None, None)
    total, _ = clipping.total(x, y, F.cross_entropy, None, None)
    assert float(length(rest)) > 0 and float(length(total)) <= len(y) * CLIP * 1.001
    near(total, rest, 1e-6)


@pytest.mark.parametrize("size", [1e36, 1e15, 1e14])
def test_no_record_counts_for_more_where_its_weighted_gradient_underflows(size):
    """Inputs so large that f d is below float32's normal numbers, whose rounding is coarse."""

    class Scaled(nn.Module):
        block_names = ("fc",)

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 64, bias=False)

        def forward(self, x):
            return self.fc(x) * (1e5 / size)

    model = FlatModel(Scaled())
    model.vector.zero_()
    total, together = clipped(model, torch.full((1, 1), size), torch.tensor([0]), 1e-6)
    assert together == [True]
    assert float(total.double().norm()) <= 1e-6 * 1.0001


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_sum_that_the_noise_s_grid_does_not_have_is_no_number(value):
    """As a whole number, nan would be -2^63, far beyond every noise."""
    with pytest.raises(OverflowError, match="not finite, or too large for its noise"):
        add_noise(torch.tensor([0.0, value]), 1.0, derive_key(b"", "k"))


def test_a_gpu_s_convolutions_are_summed_in_float32(monkeypatch):
    """Their terms may cancel to a thousandth, and TF32 has eleven bits."""
    seen, real = [], layers.ParameterGradients._times

    def noted(part, factors):
        seen.append((type(part), torch.backends.cudnn.allow_tf32))
        return real(part, factors)

    monkeypatch.setattr(layers.ParameterGradients, "_times", noted)
    model, x, y = KINDS["picture"][0]()
    Clipping(model, CLIP).total(x, y, F.cross_entropy, None, None)
    assert {tf32 for kind, tf32 in seen if kind is layers.Convolved} == {False}
    assert torch.backends.cudnn.allow_tf32
