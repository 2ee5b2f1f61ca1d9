"""Secure sums of numbers of at least 0 and of unknown magnitude: squares, sensitivities.

Fixed point has one scale for all, so a silo sends a number x, times its weight, at five:

    q_k = round(2^(20 k - 12) x)  mod 2^32,   k = 0 ... 4

A sum mod 2^32 lacks a multiple of 2^32. At the coarsest scale it is 0, and each scale tells the next finer one's: it is
exact to N/2, so to N 2^19 of the next one's units, below 2^31 for N < 4096. What is opened at all scales is thus the
sum alone, to N 2^-69. (A number cut at 2^32 at each scale would show the smallest silo's.) Above 2^40 all count as it.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNT = 5  # numbers that travel for each
STEP = 2**20
COARSEST = 2.0**-12


def spread(numbers: Tensor) -> Tensor:
    """Return numbers (n,) as integers at all scales (n COUNT,), int32: mod 2^32."""
    bounded = numbers.double().clamp(0, 2.0**40)
    levels = [(bounded * COARSEST * float(STEP**k)).round() for k in range(COUNT)]
    return torch.stack(levels, 1).remainder(2**32).long().flatten().int()


def gather_sums(integers: Tensor) -> Tensor:
    """Return the sums (n,) from those of all scales (n COUNT,), mod 2^32."""
    result = []
    for levels in integers.view(-1, COUNT).tolist():
        total = 0
        for level in levels:
            total *= STEP
            total += (level - total + 2**31) % 2**32 - 2**31
        result.append(max(total, 0) / STEP ** (COUNT - 1) / COARSEST)
    return torch.tensor(result, dtype=torch.float64, device=integers.device)
