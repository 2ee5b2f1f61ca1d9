"""Output heads with which a method replaces a network's last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.layout import block_names, other_names
from partitions.common.errors import UserError


class Values(nn.Module):
    """Numbers of a head as a separate layer block, set by its method and not trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.values


def with_head(network: nn.Module, make: Callable[[nn.Linear], nn.Module] | None) -> nn.Module:
    """Replace the network's last layer by the head ``make(last layer)``, from features (b, K) to logits (b, C).

    Without ``make`` the network is unchanged. The head lists its layer blocks in ``block_names``; they follow the
    body's, as ``fc2.policy``. It sets ``has_dropout`` where it draws random numbers in training. The network's own
    weights are those without the head. Raises UserError where its last layer is not linear with a bias.
    """
    if make is None:
        return network
    *body, last = block_names(network)
    layer = network.get_submodule(last)
    if type(layer) is not nn.Linear or layer.bias is None:
        raise UserError(f"this method needs a linear last layer with a bias, which '{last}' is not")
    if tied := [pair for pair in other_names(network).items() if any(name.startswith(f"{last}.") for name in pair)]:
        raise UserError(f"this method replaces the last layer, and {' and '.join(tied[0])} are one tensor")
    head = make(layer)
    owner, _, leaf = last.rpartition(".")
    setattr(network.get_submodule(owner), leaf, head)
    parts = tuple(f"{last}.{part}" for part in block_names(head))
    own: dict[str, Any] = {"block_names": (*body, *parts), "head_name": last}
    own["has_dropout"] = getattr(network, "has_dropout", False) or getattr(head, "has_dropout", False)
    own["any_batch"] = getattr(network, "any_batch", False) and getattr(head, "any_batch", False)
    for name, value in own.items():
        setattr(network, name, value)
    return network
