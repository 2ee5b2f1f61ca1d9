"""Layers for pictures (c, h, w) and volumes (c, d, h, w), and initial weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_volume(input_shape: Sequence[int]) -> bool:
    """Return whether a sample of this shape is a volume (c, d, h, w)."""
    return len(input_shape) == 4


def convolution(volume: bool) -> type[nn.Conv2d] | type[nn.Conv3d]:
    return nn.Conv3d if volume else nn.Conv2d


def batch_norm(volume: bool) -> type[nn.BatchNorm2d] | type[nn.BatchNorm3d]:
    return nn.BatchNorm3d if volume else nn.BatchNorm2d


def max_pool(x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Max-pool a batch (b, c, [d,] h, w)."""
    # torch.nn.functional's are slower: they check first whether indices are requested.
    return (torch.max_pool2d if x.dim() == 4 else torch.max_pool3d)(x, kernel, stride or kernel, padding)


def mean_over_places(x: Tensor) -> Tensor:
    """Return the mean over places: (b, c, [d,] h, w) -> (b, c)."""
    return x.mean(tuple(range(2, x.dim())))


def enlarged(x: Tensor, size: Sequence[int]) -> Tensor:
    """Interpolate a batch (b, c, [d,] h, w) linearly to ``size``."""
    return F.interpolate(x, list(size), mode="bilinear" if x.dim() == 4 else "trilinear", align_corners=False)


def initialise_kaiming(module: nn.Module) -> None:
    """Initialise as PLayer-FL: Kaiming-normal weights (fan-in, gain of ReLU), zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
