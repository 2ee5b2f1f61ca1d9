"""Training pictures that are changed: each change against what it says, masks, draws, and where nothing may change."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from failing import fails
from near import near
from scipy import ndimage

from models.augmentation import (
    CORNERS,
    MOST,
    Augmentation,
    projections,
    read_augmentation,
    warp,
)
from models.shapes import batch_type
from models.training import generator

SIZE = (12, 9)


def pictures(n, channels=1, size=SIZE):
    """Smooth pictures in channels-last memory, no two alike."""
    drawn = np.random.default_rng(1).normal(size=(n, *size, channels))
    smooth = ndimage.gaussian_filter(drawn, (0, *[1.0] * len(size), 0))
    x = torch.from_numpy(smooth.astype(np.float32))
    return x.permute(0, -1, *range(1, x.dim() - 1))


def change(text, x, y=None, batch=1000, seed=3):
    """All samples of one epoch, changed in batches."""
    augmentation = read_augmentation(text)
    assert augmentation is not None
    y = torch.arange(len(x)) if y is None else y
    parts = list(
        augmentation.change_batches(
            zip(x.split(batch), y.split(batch), strict=True), len(x), generator(seed, "x")
        )
    )
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@pytest.mark.parametrize("text, axis", [("flip", 3), ("flip-vertical", 2)])
def test_a_flip_turns_half_of_the_pictures_over(text, axis):
    x = pictures(200, 3)
    out, y = change(text, x)
    same = (out - x).abs().amax((1, 2, 3)) < 1e-4
    turned = (out - x.flip(axis)).abs().amax((1, 2, 3)) < 1e-4
    assert bool((same ^ turned).all()) and 70 < int(turned.sum()) < 130
    assert torch.equal(y, torch.arange(200))


def test_a_crop_shifts_by_whole_pixels_over_a_reflected_edge():
    """Every shift from -2 to 2 in both directions, about as often as any other."""
    x = pictures(600)
    out, _ = change("crop:2", x)
    wide = torch.from_numpy(np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), "symmetric"))
    shifts = list(itertools.product(range(5), repeat=2))
    cuts = torch.stack([wide[..., i : i + SIZE[0], j : j + SIZE[1]] for i, j in shifts])
    fits = (cuts - out).abs().amax((2, 3, 4)) < 1e-4
    assert bool((fits.sum(0) == 1).all())
    assert int(fits.sum(1).min()) >= 8 and int(fits.sum(1).max()) <= 45  # 24 each


def test_turning_scaling_and_shifting_are_scipys():
    """A point p of the changed picture, from its centre, shows the point R(-angle) (p - t) / s of the original."""
    x, augmentation = pictures(20), read_augmentation("rotate:40,scale:0.3,shift:2.5")
    assert augmentation is not None
    drawn = torch.rand(20, 19, generator=generator(3, "x"))
    out, _ = change("rotate:40,scale:0.3,shift:2.5", x)
    middle = (np.array(SIZE) - 1) / 2
    for i, row in enumerate(drawn.double().numpy() * 2 - 1):
        # Y before x
        angle, factor, shift = row[4] * np.deg2rad(40), 1 + 0.3 * row[7], 2.5 * row[6:4:-1]
        back = (
            np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / factor
        )
        offset = middle - back @ (middle + shift)
        wanted = ndimage.affine_transform(
            x[i, 0].numpy(), back, offset, order=1, mode="reflect"
        )
        near(out[i, 0], wanted, 1e-4)


def test_a_slant_takes_the_corners_to_where_they_were_drawn():
    """And keeps the picture on this side of its horizon, whatever is drawn."""
    corners = torch.tensor(CORNERS, dtype=torch.float64)
    for strength in (0.1, MOST["perspective"]):
        inwards = torch.tensor(
            list(itertools.product([0.0, 1.0], repeat=8)), dtype=torch.float64
        ).view(-1, 4, 2)
        ends = corners * (1 - strength * inwards)
        maps = projections(ends, corners)
        at = torch.cat([ends, torch.ones(len(ends), 4, 1, dtype=torch.float64)], 2) @ maps.mT
        near(at[..., :2] / at[..., 2:], corners.expand(len(ends), 4, 2), 1e-5)
        edge = torch.cat([corners, torch.ones(4, 1, dtype=torch.float64)], 1) @ maps.mT
        assert float(edge[..., 2].min()) > 0.1


def test_half_of_the_pictures_are_slanted():
    x = pictures(200)
    out, _ = change("perspective:0.3", x)
    same = (out - x).abs().amax((1, 2, 3)) < 1e-4
    assert 70 < int(same.sum()) < 130


def test_light():
    x = pictures(300, 3)
    out, _ = change("brightness:0.2", x)
    added = (out - x).flatten(1)
    span = x.flatten(1).amax(1) - x.flatten(1).amin(1)
    near(added, added[:, :1].expand_as(added), 1e-5)
    share = added[:, 0] / span
    assert -0.2 <= float(share.min()) < -0.19 and 0.19 < float(share.max()) <= 0.2
    out, _ = change("contrast:0.3", x)
    near(out.mean((1, 2, 3)), x.mean((1, 2, 3)), 1e-5)
    factor = out.std((1, 2, 3)) / x.std((1, 2, 3))
    assert 0.7 <= float(factor.min()) < 0.71 and 1.29 < float(factor.max()) <= 1.3001


def test_masks_move_with_their_pictures():
    """Discs, whose own picture they are; 255 stays 255, and labels of another form stay as they are."""
    yy, xx = torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")
    mask = ((yy - 14) ** 2 + (xx - 22) ** 2 < 81).long().expand(50, -1, -1) * 255
    text = "flip,rotate:30,shift:3,scale:0.1,perspective:0.2"
    out, y = change(text, (mask.float() / 255)[:, None], mask)
    assert y.dtype == torch.int64 and set(y.unique().tolist()) == {0, 255}
    assert float(((out[:, 0] > 0.5) == (y == 255)).float().mean()) > 0.995
    assert not torch.equal(y, mask)
    several = torch.randint(2, (50, 3)).float()
    assert torch.equal(change(text, (mask.float() / 255)[:, None], several)[1], several)


def test_all_slices_of_a_volume_change_alike():
    text, x = "flip,rotate:20,crop:1,perspective:0.2", pictures(6, 2, (4, *SIZE))
    mask = (x[:, 0] > 0).long()
    out, y = change(text, x, mask)
    assert out.stride() == x.stride() and y.shape == mask.shape
    for i in range(4):
        alone, flat = change(
            text, x[:, :, i].contiguous(memory_format=torch.channels_last), mask[:, i]
        )
        near(out[:, :, i], alone, 1e-5)
        assert torch.equal(y[:, i], flat)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_memory_format_stays(channels):
    """Convolutions in another one are slower, and round in another way."""
    x = pictures(8, channels)
    out, _ = change("rotate:10", x)
    assert out.stride() == x.stride() and out.dtype == torch.float32


def test_what_is_drawn_hangs_on_the_epoch_only():
    """Not on the size of batches, nor on which other changes there are."""
    x = pictures(30)
    text = "flip,rotate:10,perspective:0.2,contrast:0.1"
    whole = change(text, x)[0]
    near(change(text, x, batch=7)[0], whole, 1e-5)
    assert not torch.allclose(change(text, x, seed=4)[0], whole)
    flipped, both = change("flip", x)[0], change("flip,brightness:0.5", x)[0]
    near(
        both - both.mean((2, 3), keepdim=True),
        flipped - flipped.mean((2, 3), keepdim=True),
        1e-5,
    )


def test_the_setting():
    assert read_augmentation("") is None and read_augmentation(" , ") is None
    assert read_augmentation("flip, shift:2,rotate:10") == Augmentation(
        flip=1, shift=2, rotate=10
    )
    assert read_augmentation("flip-vertical,crop:4.0") == Augmentation(flip_vertical=1, crop=4)


@pytest.mark.parametrize(
    "text, message",
    [
        ("mirror", "unknown change 'mirror'; there are: flip, flip-vertical, crop"),
        ("flip,flip", "names flip twice"),
        ("flip:0.5", "flip has no strength: write flip"),
        (
            "rotate",
            "rotate: a number above 0, at most 180, is needed there, as in 'flip,shift:2",
        ),
        ("rotate:ten", "rotate:ten: a number above 0"),
        ("rotate:200", "rotate:200: a number above 0, at most 180"),
        ("rotate:nan", "rotate:nan: a number above 0"),
        ("shift:0", "shift:0: a number above 0"),
        ("perspective:0.5", "perspective:0.5: a number above 0, at most 0.4"),
        ("crop:1.5", "crop:1.5: a whole number above 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(text, message):
    fails(ValueError, message, read_augmentation, text)


@pytest.mark.parametrize(
    "text, shape, message",
    [
        (
            "flip",
            (30,),
            "augment changes pictures: for tables, texts and signals leave it empty",
        ),
        (
            "flip",
            ("tokens", 5, 9),
            "augment changes pictures: for tables, texts and signals leave it empty",
        ),
        (
            "shift:4",
            (("a", (1, 9, 9)), ("b", (1, 4, 9))),
            "shift:4 moves pictures of 4 x 9 out of sight",
        ),
        ("shift:8", (1, 8, 20), "shift:8 moves pictures of 8 x 20 out of sight"),
        ("crop:20", (1, 32, 20, 20), "crop:20 moves pictures of 20 x 20 out of sight"),
    ],
)
def test_shapes_that_cannot_be_changed_so(text, shape, message):
    augmentation: Any = read_augmentation(text)
    fails(ValueError, message, augmentation.check, shape)
    augmentation.check((3, 28, 28))


def test_identity_is_the_picture():
    x = pictures(3)
    out, _ = warp(x, torch.zeros(3), torch.eye(3).repeat(3, 1, 1))
    near(out, x, 1e-5)


def test_of_several_inputs_the_pictures_are_changed_as_they_would_be_alone():
    augmentation: Any = read_augmentation("flip,rotate:20,brightness:0.3")
    picture, notes = torch.randn(6, 1, 8, 8), torch.randint(9, (6, 5), dtype=torch.int32)
    x, y = batch_type(("scan", "notes"))(picture, notes), torch.arange(6)

    def changed(batch):
        return next(
            iter(augmentation.change_batches([(batch, y)], 6, torch.Generator().manual_seed(0)))
        )[0]

    found = changed(x)
    assert torch.equal(found.scan, changed(picture)) and not torch.equal(found.scan, picture)
    assert found.notes is notes
