"""Convolutional networks of the papers: convolutions and pooling, then fully connected layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from models.networks.blocks import convolution, initialise_kaiming, is_volume, max_pool
from models.shapes import Shape
from partitions.common.settings import setting


class ConvNet(nn.Module):
    """Convolution, ReLU and 2x2 max-pooling for each of ``channels``, then fully connected layers with ReLU.

    Volumes are convolved and pooled in three dimensions.

    Blocks: conv1, conv2, ..., fc1, fc2, ...
    """

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        *,
        channels: tuple[int, ...],
        kernel: int,
        padding: int,
        hidden: tuple[int, ...],
    ) -> None:
        super().__init__()
        width, *sides = input_shape
        convolutions, layers = [], []
        for index, out in enumerate(channels, start=1):
            convolutions.append(f"conv{index}")
            self.add_module(
                convolutions[-1],
                convolution(is_volume(input_shape))(width, out, kernel, padding=padding),
            )
            width = out
            sides = [(side + 2 * padding - kernel + 1) // 2 for side in sides]
        features = width * math.prod(sides)
        for index, out in enumerate((*hidden, classes), start=1):
            layers.append(f"fc{index}")
            self.add_module(layers[-1], nn.Linear(features, out))
            features = out
        self.convolutions = tuple(convolutions)
        self.layers = tuple(layers)
        self.block_names = (*convolutions, *layers)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.convolutions:
            # Equal to pooling after the ReLU (both are monotone), at a quarter of the ReLU's cost.
            x = max_pool(self.get_submodule(name)(x), 2).relu()
        x = x.flatten(1)
        for name in self.layers[:-1]:
            x = self.get_submodule(name)(x).relu()
        x = self.get_submodule(self.layers[-1])(x)
        return x


@dataclass(frozen=True)
class PlayerLayout:
    """One of PLayer-FL's picture networks: per convolution (channels, pooled or not, dropout after it)."""

    kernel: int
    padding: int
    convolutions: tuple[tuple[int, bool, float], ...]
    hidden: int


PLAYER_LAYOUTS = {
    "fmnist": PlayerLayout(5, 2, ((64, True, 0.0), (128, True, 0.0), (256, True, 0.0)), 100),
    "cifar": PlayerLayout(
        3,
        2,
        (
            (64, False, 0.3),
            (128, True, 0.3),
            (256, False, 0.3),
            (512, True, 0.3),
            (512, False, 0.3),
        ),
        100,
    ),
    "isic": PlayerLayout(
        3,
        1,
        (
            (32, False, 0.0),
            (64, False, 0.0),
            (128, True, 0.2),
            (256, True, 0.2),
            (512, True, 0.2),
        ),
        256,
    ),
}


class PlayerNet(nn.Module):
    """PLayer-FL's picture networks: convolutions (ReLU, pooling, dropout), global average pooling, two FC.

    Blocks: conv1, ..., conv3 or conv5, fc1, fc2.
    """

    def __init__(self, input_shape: Shape, classes: int, layout: PlayerLayout) -> None:
        super().__init__()
        self.layout = layout
        self.has_dropout = any(dropout for _, _, dropout in layout.convolutions)
        width = input_shape[0]
        self.convolutions = tuple(
            f"conv{index + 1}" for index in range(len(layout.convolutions))
        )
        for name, (out, _, _) in zip(self.convolutions, layout.convolutions, strict=True):
            self.add_module(name, nn.Conv2d(width, out, layout.kernel, padding=layout.padding))
            width = out
        self.fc1 = nn.Linear(width, layout.hidden)
        self.fc2 = nn.Linear(layout.hidden, classes)
        self.block_names = (*self.convolutions, "fc1", "fc2")
        initialise_kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        for name, (_, pooled, dropout) in zip(
            self.convolutions, self.layout.convolutions, strict=True
        ):
            x = self.get_submodule(name)(x)
            if pooled:
                x = F.max_pool2d(x, 2)
            x = x.relu()
            if dropout:
                x = F.dropout(x, dropout, self.training)
        x = x.mean((-2, -1))
        x = self.fc2(self.fc1(x).relu())
        return x


@dataclass(frozen=True)
class PlayerCnnSettings:
    """Selection of one of PLayer-FL's picture networks: by the shape, or by the name of a data set."""

    layout: str = setting(
        "auto",
        "auto: isic from 64 pixels on, else fmnist for grey and cifar for colour pictures",
        choices=("auto", *PLAYER_LAYOUTS),
    )
