"""U-Net (Ronneberger et al., MICCAI 2015) for outlines, with group normalisation: no running statistics to average.

Padded convolutions keep the picture's size, so that there are outputs for every pixel. It takes pictures of any size,
and volumes, with convolutions in three dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from models.networks.blocks import convolution, enlarge, is_volume, max_pool
from partitions.common.errors import UserError
from partitions.common.settings import setting

MOST_GROUPS = 8


@dataclass(frozen=True)
class UnetSettings:
    """Depth and width of the network."""

    levels: int = setting(3, "how often the picture is halved", minimum=1, maximum=6)
    width: int = setting(
        16, "channels of the first level; each level doubles them", minimum=1, maximum=256
    )


class TwoConvolutions(nn.Module):
    """Twice a 3x3 convolution (for volumes 3x3x3), group normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, volume: bool) -> None:
        super().__init__()
        conv = convolution(volume)
        groups = next(g for g in range(MOST_GROUPS, 0, -1) if outputs % g == 0)
        self.conv1 = conv(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        return x


class Unet(nn.Module):
    """Maps pictures (b, c, h, w) to logits (b, classes, h, w), volumes (b, c, d, h, w) to (b, classes, d, h, w).

    Blocks: down0, ..., downL, then up(L-1), ..., up0, and out. An up block enlarges the output of the level below to
    the size of the down block's output at its level, and takes both.
    """

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, settings: UnetSettings
    ) -> None:
        super().__init__()
        if min(input_shape[1:]) < 2**settings.levels:
            raise UserError(
                f"unet.levels = {settings.levels} halves pictures of {input_shape[1:]} to nothing: take fewer levels"
            )
        volume = is_volume(input_shape)
        widths = [settings.width * 2**level for level in range(settings.levels + 1)]
        self.ways_down = tuple(f"down{level}" for level in range(len(widths)))
        self.ways_up = tuple(f"up{level}" for level in reversed(range(settings.levels)))
        for name, (inputs, outputs) in zip(
            self.ways_down, pairwise([input_shape[0], *widths]), strict=True
        ):
            self.add_module(name, TwoConvolutions(inputs, outputs, volume))
        for name, (below, beside) in zip(self.ways_up, pairwise(reversed(widths)), strict=True):
            self.add_module(name, TwoConvolutions(below + beside, beside, volume))
        self.out = convolution(volume)(widths[0], classes, 1)
        self.block_names = (*self.ways_down, *self.ways_up, "out")

    def forward(self, x: Tensor) -> Tensor:
        beside_of: list[Tensor] = []
        for name in self.ways_down:
            x = self.get_submodule(name)(max_pool(x, 2) if beside_of else x)
            beside_of.append(x)
        for name, beside in zip(self.ways_up, reversed(beside_of[:-1]), strict=True):
            x = enlarge(x, beside.shape[2:])
            x = self.get_submodule(name)(torch.cat([x, beside], 1))
        logits: Tensor = self.out(x)
        return logits
