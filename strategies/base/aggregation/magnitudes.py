"""Secure sums of numbers of at least 0 of unknown magnitude: squares, sensitivities.

Fixed point has one scale for all, so a silo sends a number x at several:

    f_k(x) = min(1, 16^k x),   k = -8 ... 15,   divided by the square root of how many numbers these are

The server reads the mean at the finest scale at which no silo can have been cut: where the mean at the coarser one is
below 1/16 of the least weight. There it is at least that, far above the sum's error. This holds for numbers between
2^-60 and 2^32; larger ones count as 2^32, and smaller ones lose digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COUNT = 24  # numbers that travel for each


def scales(like: Tensor) -> Tensor:
    """Return 16^k (COUNT,), on the device of ``like``."""
    exponents = torch.arange(COUNT, dtype=torch.float64, device=like.device) - 8
    return 16**exponents


def spread(numbers: Tensor) -> Tensor:
    """Return numbers (n,) at all scales (n COUNT,), of length 1 at most."""
    positive = numbers.double().clamp(min=0)
    levels = (positive[:, None] * scales(numbers)).clamp(max=1)
    return levels.flatten() / math.sqrt(max(levels.numel(), 1))


def gathered(mean: Tensor, least: float) -> Tensor:
    """Return the mean (n,) of numbers from that of their scales. ``least``: the smallest weight in the mean."""
    levels = mean.view(-1, COUNT) * math.sqrt(max(len(mean), 1))
    uncut = levels[:, :-1] < least / 16
    finest = uncut.long().cumprod(1).sum(1)
    values = levels.gather(1, finest[:, None]).squeeze(1)
    return (values / scales(mean)[finest]).clamp(min=0)
