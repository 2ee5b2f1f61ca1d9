"""What a record or patient adds to a clipped sum depends on it alone, under weights that make rounding large."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from clipped_by_hand import tokens
from near import near
from representatives import product
from torch import nn

from models.features import compute_frozen
from models.flat import FlatModel
from models.initialisation import flat_model
from models.privacy.chunks import by_chunk, chunk_size
from models.privacy.clipping import Clipping, length
from models.tasks.segmentation import segmentation_loss
from models.trainable import Part
from models.training import rows

CLIP = 1.0
WIDTH, CLASSES, SCALE = 64, 10, 1e6


def planted(seed):
    """Weights of a server's: hidden units 3c, 3c + 1 and 3c + 2 cancel but for float32's rounding, times a million.

    So a class's logit is that rounding, and the whole gradient follows from how a product was summed.
    """
    rng = torch.Generator().manual_seed(seed)
    model = flat_model("mlp", (WIDTH,), CLASSES, None, "cpu")
    model.vector.zero_()
    named = model.layout.unflatten(model.vector)
    first, second = named["fc1.weight"], named["fc2.weight"]
    for one in range(0, 6 * CLASSES, 3):
        first[one + 1] = torch.rand(WIDTH, generator=rng)
        first[one + 2] = 3 * torch.rand(WIDTH, generator=rng)
        first[one] = first[one + 1] + first[one + 2]
        second[one // 6, one : one + 3] = SCALE * torch.tensor([1.0, -1.0, -1.0])
    return model, rng


@pytest.mark.exhaustive
@pytest.mark.parametrize("most", [1, 3], ids=["records", "patients"])
def test_one_more_unit_moves_the_sum_by_the_clip_norm_at_most(most):
    """Of two records, and of one: before, the first's gradient changed with it, and the sum moved by 2.5 clip norms."""
    for seed in range(40):
        model, rng = planted(seed)
        for count in (1, 2, 3, 4, 5, 9):
            sizes = [1 + i % most for i in range(count)]
            ends = torch.tensor(sizes).cumsum(0).tolist()
            groups = [torch.arange(end - k, end) for end, k in zip(ends, sizes, strict=True)]
            x = torch.rand(ends[-1], WIDTH, generator=rng)
            y = torch.randint(CLASSES, (ends[-1],), generator=rng)
            clipping = Clipping(model, CLIP, batch=8)
            units = None if most == 1 else groups
            total, _ = clipping.total(x, y, F.cross_entropy, None, units)
            left = ends[-1] - sizes[-1]
            others = None if most == 1 else groups[:-1]
            without, _ = clipping.total(x[:left], y[:left], F.cross_entropy, None, others)
            assert float(length(total - without)) <= CLIP * (1 + 1e-5)
            assert all(clipping.tried.values()) and all(clipping.alike.values())


class Residual(nn.Module):
    """A residual network with GroupNorm, as a hospital would have one of its own."""

    block_names = ("stem", "one", "norm", "two", "out")

    def __init__(self):
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.two = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        z = self.stem(x).relu()
        z = (z + self.two(self.norm(self.one(z)).relu())).relu()
        return self.out(z.mean((2, 3)))


def vit():
    from models.networks.vit import VitSettings

    return flat_model.__wrapped__(
        "vit-s", (1, 4, 4), 3, VitSettings(patch=2), "cpu", None, Part("block11.*,head", 5)
    )


def built(name, shape):
    return lambda: flat_model.__wrapped__(name, shape, 3, None, "cpu")


NETWORKS = {
    "mlp": (built("mlp", (70,)), (70,)),
    "cnn": (built("small-cnn", (1, 8, 8)), (1, 8, 8)),
    "volume": (built("small-cnn", (1, 4, 4, 4)), (1, 4, 4, 4)),
    "resnet": (lambda: FlatModel(Residual()), (3, 8, 8)),
    "vit": (vit, (1, 4, 4)),
    "text": (built("fasttext", ("tokens", 9, 11)), ()),
    "gru": (built("fedapm-signals", (3, 16)), (3, 16)),
    "unet": (built("unet", (1, 16, 16)), (1, 16, 16)),
}
UNITS = [[i] for i in range(5)] + [[5, 6], [7, 8, 9], [10, 11], [12, 13, 14], [15, 16, 17, 18]]


@product(threads=[1, 2], name=list(NETWORKS))
def test_a_unit_s_numbers_are_the_same_bits_alone(name, threads, monkeypatch):
    """Activations, gradients of outputs and norms, in a batch of ten units and in one of that unit alone."""
    make, shape = NETWORKS[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        model, loss = make(), cast(Any, F.cross_entropy)
        model.module.eval()
        (x, y), seen = tokens(19), dict[bytes, Any]()
        if shape:
            x = torch.randn(19, *shape).contiguous(
                memory_format=torch.channels_last if len(shape) == 3 else torch.preserve_format
            )
        if name == "unet":
            y, loss = torch.randint(0, 3, (19, *shape[1:])), segmentation_loss
        clipping, real = Clipping(model, CLIP, batch=34), Clipping._parts
        groups = [torch.tensor(unit) for unit in UNITS]
        clipping.total(x, y, loss, None, groups)  # the trials

        def noted(self, drawn, shape, many):
            value, parts = real(self, drawn, shape, many)
            count, k = shape
            for i in range(count):
                numbers = [v[i].clone() for part in parts for v in part.of_units(k)]
                seen.setdefault(
                    rows(drawn.x, torch.arange(i * k, i * k + k)).numpy().tobytes(), []
                ).append(numbers)
            return value, parts

        monkeypatch.setattr(Clipping, "_parts", noted)
        clipping.total(x, y, loss, None, groups)
        for group in groups:
            clipping.total(rows(x, group), y[group], loss, None, [torch.arange(len(group))])
    finally:
        torch.set_num_threads(before)
    assert all(clipping.tried.values()) and all(clipping.alike.values())
    assert len(clipping.alike) == 4 and len(seen) == len(UNITS)
    for beside, alone in seen.values():
        assert all(torch.equal(a, b) for a, b in zip(beside, alone, strict=True))


def test_a_network_whose_numbers_depend_on_the_place_goes_one_by_one():
    """By one part in a million, which the comparison with single passes would let through."""

    class ByPlace(nn.Module):
        block_names = ("fc",)

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x):
            return self.fc(x) * (1 + 1e-6 * torch.arange(len(x)).unsqueeze(1))

    model, x, y = FlatModel(ByPlace()), torch.randn(6, 5), torch.arange(6) % 3
    clipping = Clipping(model, CLIP)
    total, _ = clipping.total(x, y, F.cross_entropy, None, None)
    assert list(clipping.tried.values()) == [True] and list(clipping.alike.values()) == [False]
    alone = sum(
        clipping.total(x[i : i + 1], y[i : i + 1], F.cross_entropy, None, None)[0]
        for i in range(6)
    )
    near(total, alone, 1e-6)


def test_what_a_frozen_network_says_of_a_record_is_the_same_beside_any_others():
    """MOON's and FedNTD's teachers: of one record alone, and of the same one in a batch."""
    model, rng = planted(0)
    tensors = model.layout.unflatten(model.vector.clone())
    x = torch.rand(9, WIDTH, generator=rng)
    plain = [compute_frozen(model, tensors, part)[1] for part in (x, x[:1])]
    assert not torch.equal(plain[0][:1], plain[1])  # of the library, one row is another product

    class Private:
        def by_chunk(self, of, *batch):
            return by_chunk(of, batch, chunk_size(batch[0], 4))

    model.private = Private()
    try:
        found = compute_frozen(model, tensors, x)[1]
        for i in range(9):
            assert torch.equal(
                found[i : i + 1], compute_frozen(model, tensors, x[i : i + 1])[1]
            )
        assert not len(compute_frozen(model, tensors, x[:0])[1])
    finally:
        model.private = None


def test_products_are_in_float32_whatever_a_network_has_set(monkeypatch):
    seen, real = [], nn.Linear.forward

    def noted(self, x):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    try:
        model, rng = planted(0)
        x = torch.rand(2, WIDTH, generator=rng)
        Clipping(model, CLIP).total(x, torch.tensor([0, 1]), F.cross_entropy, None, None)
        assert (
            torch.get_float32_matmul_precision() == "medium" and torch.backends.cudnn.benchmark
        )
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.benchmark = False
    assert set(seen) == {("highest", False)}
