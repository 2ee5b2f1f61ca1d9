"""LoRA (Hu et al., ICLR 2022, eq. 3): a frozen linear layer learns a change of low rank, W + (α / r) B A.

A (r, inputs) starts Kaiming-uniform, B (outputs, r) at zero, so that the initial outputs are those without LoRA. The
layer's ``weight`` is the sum, computed at each access. So every reader of it (PyTorch's own attention, too) gets the
change, and a merged model has the outputs of the trained one. A method may add what is of no low rank: with a
``residual`` R (outputs, inputs), from zero, the sum is W + (α / r) (B A + R).
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from partitions.common.errors import UserError

PLACE = "parametrizations.weight"  # below a layer: where PyTorch keeps W, as ``original``, and the change, as ``0``


class LowRank(nn.Module):
    """Parametrisation W -> W + (α / r) B A."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, residual: bool = False) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, inputs))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        if residual:
            self.lora_residual = nn.Parameter(torch.zeros(outputs, inputs))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return self.adapt_weight(weight, *self.parameters())

    def adapt_weight(self, weight: Tensor, a: Tensor, b: Tensor, *residual: Tensor) -> Tensor:
        return weight + self.scale * sum(residual, b @ a)


def adapt(network: nn.Module, rank: int, alpha: float, residual: bool = False) -> nn.Module:
    """Let the network's frozen linear layers learn a change of this rank. Raises UserError where it has none."""
    layers = [
        layer
        for layer in network.modules()
        if isinstance(layer, nn.Linear)
        and not layer.weight.requires_grad
        and not parametrize.is_parametrized(layer)
    ]
    if not layers:
        raise UserError(
            f"lora-rank = {rank}: this network has no frozen linear layer that could learn a change"
        )
    owners = Counter(
        id(p) for module in network.modules() for p in module.parameters(recurse=False)
    )
    if any(owners[id(layer.weight)] > 1 for layer in layers):
        raise UserError(
            f"lora-rank = {rank}: a frozen weight of this network is in two layers, and each would change it"
        )
    for layer in layers:
        parametrize.register_parametrization(
            layer, "weight", LowRank(layer.weight, rank, alpha, residual)
        )
    return network


def merge_lora(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn the ``state_dict`` of an adapted network into that of the network without LoRA, with the same outputs."""
    for name, change in network.named_modules(remove_duplicate=False):
        if isinstance(change, LowRank):
            weight = tensors.pop(f"{name[:-1]}original")
            parts = [tensors.pop(f"{name}.{part}") for part, _ in change.named_parameters()]
            layer = name.removesuffix(f"{PLACE}.0")
            tensors[f"{layer}weight"] = change.adapt_weight(weight, *parts)
    return tensors
