"""A network of every known layer, and its clipped sum with one backward pass per record."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.flat import FlatModel
from models.privacy.clipping import Clipping


class Layers(nn.Module):
    """One of every layer that is known, in one, two and three dimensions."""

    block_names = ("embed", "conv1", "conv2", "conv3", "norm", "group", "attend", "out")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.conv1 = nn.Conv1d(6, 4, 3, padding=1, stride=2)
        self.conv2 = nn.Conv2d(4, 5, (1, 2))
        self.conv3 = nn.Conv3d(5, 6, (1, 1, 2), bias=False)
        self.norm = nn.LayerNorm(6)
        self.group = nn.GroupNorm(2, 6)
        self.attend = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv1(self.embed(x).mT)
        z = self.conv3(self.conv2(z.unsqueeze(2)).unsqueeze(2)).flatten(2)
        z = self.group(z).mT
        z = self.norm(z + (self.attend(z) @ z.mT).softmax(-1) @ z)
        found: Tensor = self.out(z.mean(1).tanh())
        return found


def by_hand(
    model: FlatModel, x: Tensor, y: Tensor, clip: float, loss: Any = F.cross_entropy
) -> Tensor:
    """Σ_i g_i min(1, C / (|g_i| + 1e-6)), one backward pass for each record."""
    total = torch.zeros_like(model.vector)
    for i in range(len(y)):
        grads = torch.autograd.grad(
            loss(model.module(x[i : i + 1]), y[i : i + 1]), model.parameters
        )
        gradient = torch.cat(
            [g.to_dense().flatten() if g.is_sparse else g.flatten() for g in grads]
        )
        total += gradient * min(1.0, clip / (float(gradient.double().norm()) + 1e-6))
    return total


def clipped(
    model: FlatModel,
    x: Tensor,
    y: Tensor,
    clip: float,
    loss: Any = F.cross_entropy,
    units: Any = None,
) -> tuple[Tensor, list[bool]]:
    """The sum over units, and whether the records of each network and loss went together."""
    clipping = Clipping(model, clip)
    total, _ = clipping.total(x, y, loss, None, units)
    return total, list(clipping.tried.values())


def tokens(n: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(0, 11, (n, 9), generator=rng, dtype=torch.int32), torch.arange(n) % 3
