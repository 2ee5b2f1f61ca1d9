"""Networks on volumes: a volume whose slices are all alike must give what its slice gives in two dimensions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from torch import nn
from torch.testing import assert_close

from models.flat import FlatModel
from models.networks.mlp import MlpSettings
from models.networks.registry import build
from models.networks.unet import UnetSettings
from models.samples import Samples
from models.training import predict

DEPTH, SIDE = 16, (16, 24)


def of_slices(flat, deep):
    """The network on volumes gets the other's weights: its kernels are 0 but in their middle slice.

    A first fully connected layer takes the mean over the slices that are left.
    """
    weights = flat.state_dict()
    for name, value in deep.state_dict().items():
        own = weights[name]
        if value.dim() == 5:
            value.zero_()
            value[:, :, value.shape[2] // 2] = own
        elif value.dim() == 2 and value.shape != own.shape:
            slices = value.shape[1] // own.shape[1]
            of_places = own.view(len(own), 64, 1, -1).expand(-1, -1, slices, -1) / slices
            value.copy_(of_places.flatten(1))
        else:
            value.copy_(own)


@pytest.mark.parametrize("name", ["unet", "small-cnn", "resnet8", "resnet18"])
def test_equal_slices_give_what_a_slice_gives(name):
    torch.manual_seed(3)
    flat, deep = build(name, (2, *SIDE), 3).eval(), build(name, (2, DEPTH, *SIDE), 3).eval()
    for layer in flat.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            layer.running_mean.normal_()
    of_slices(flat, deep)
    x = torch.randn(2, 2, *SIDE)
    wanted = flat(x)
    found = deep(x[:, :, None].expand(-1, -1, DEPTH, -1, -1))
    if name == "unet":
        # Padding adds nothing to a kernel of one slice; so all slices stay alike.
        wanted = wanted[:, :, None].expand(-1, -1, DEPTH, -1, -1)
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "shape, channels_last", [((1, 9, 12, 10), True), ((2, 8, 8, 16), False)]
)
def test_every_voxel_has_an_answer(shape, channels_last):
    network = build("unet", shape, 3, UnetSettings(levels=2, width=4))
    x = torch.randn(2, *shape)
    outputs = network(
        x.contiguous(memory_format=torch.channels_last_3d) if channels_last else x
    )
    assert outputs.shape == (2, 3, *shape[1:])
    outputs.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("small-cnn", (27 * 1 + 1) * 32 + (27 * 32 + 1) * 64 + (64 * 7**3 + 1) * 128 + 129 * 2),
        ("mlp", (28**3 + 1) * 64 + 65 * 2),
    ],
)
def test_number_of_parameters(name, parameters):
    assert sum(p.numel() for p in build(name, (1, 28, 28, 28), 2).parameters()) == parameters


def test_an_evaluation_takes_a_few_volumes_at_once():
    """What it says of each is what it says of them one by one; of pictures it takes 512."""
    x = np.random.default_rng(0).integers(256, size=(9, 64, 64, 64, 1)).astype(np.uint8)
    samples = Samples(x, np.zeros(9, np.int64))
    assert samples.at_once == 8 and Samples(x[:, 0], np.zeros(9, np.int64)).at_once == 512
    model = FlatModel(build("mlp", (1, 64, 64, 64), 3, MlpSettings("4")))
    sizes = []
    model.module.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    outputs = predict(model, samples)
    assert sizes == [8, 1]
    alone = predict(model, samples, batch_size=1)
    near(outputs, alone, 1e-5)
