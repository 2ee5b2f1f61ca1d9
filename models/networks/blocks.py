"""What networks share: layers for pictures and volumes, the stem, initial weights, and heads that a method puts in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layout import block_names, other_names
from models.shapes import Shape
from partitions.common.errors import UserError
from partitions.common.settings import setting


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
    return (torch.max_pool2d if x.dim() == 4 else torch.max_pool3d)(
        x, kernel, stride or kernel, padding
    )


def mean_over_places(x: Tensor) -> Tensor:
    """Return the mean over places: (b, c, [d,] h, w) -> (b, c)."""
    return x.mean(tuple(range(2, x.dim())))


def enlarge(x: Tensor, size: Sequence[int]) -> Tensor:
    """Interpolate a batch (b, c, [d,] h, w) linearly to ``size``."""
    return F.interpolate(
        x, list(size), mode="bilinear" if x.dim() == 4 else "trilinear", align_corners=False
    )


def initialise_kaiming(module: nn.Module) -> None:
    """Initialise as PLayer-FL: Kaiming-normal weights (fan-in, gain of ReLU), zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


STEMS = ("7x7", "3x3")


@dataclass(frozen=True)
class StemSettings:
    """Selection of the stem: 7x7 or 3x3."""

    stem: str = setting(
        "7x7",
        "7x7: stride 2 and max-pooling, the papers'; 3x3: keeps the size, for small pictures",
        choices=STEMS,
    )


class Stem(nn.Module):
    """A 7x7 convolution of stride 2 and max-pooling, or one 3x3 convolution."""

    def __init__(self, inputs: int, outputs: int, kind: str, volume: bool = False) -> None:
        super().__init__()
        self.pooled = kind == "7x7"
        conv = convolution(volume)
        if self.pooled:
            self.conv1 = conv(inputs, outputs, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = conv(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = batch_norm(volume)(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return max_pool(x, 3, stride=2, padding=1) if self.pooled else x


class Values(nn.Module):
    """Numbers of a head as a separate layer block, set by its method and not trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.values


class Around(nn.Module):
    """Base of a method's own module around whole networks, which takes the place of its head."""

    networks: nn.ModuleList

    def __init__(self, networks: Sequence[nn.Module], block: str) -> None:
        """``own``: the name of the layer block that the method adds, below the networks' own."""
        super().__init__()
        self.add_module(block, None)
        self.networks = nn.ModuleList(networks)
        names = [
            f"networks.{i}.{name}" for i, n in enumerate(networks) for name in block_names(n)
        ]
        self.block_names = (block, *names)
        last = networks[-1]
        self.head_name = f"networks.{len(networks) - 1}." + getattr(
            last, "head_name", block_names(last)[-1]
        )
        self.has_dropout = any(getattr(n, "has_dropout", False) for n in networks)


Make = Callable[..., nn.Module] | None


def with_method(
    make: Make,
    shape: Shape,
    build: Callable[[], nn.Module],
    finish: Callable[[nn.Module], nn.Module] = lambda network: network,
) -> nn.Module:
    """Return a network with a method's own part: its head, or its module around finished networks.

    ``make``: None for neither, a head's class, or ``make(one, shape)`` for a module around what ``one()`` returns.
    """
    inner = getattr(make, "func", make)
    if isinstance(inner, type) and issubclass(inner, Around):
        assert make is not None
        return make(lambda: finish(build()), shape)
    return finish(with_head(build(), make))


def with_head(network: nn.Module, make: Callable[[nn.Linear], nn.Module] | None) -> nn.Module:
    """Replace the network's last layer by the head ``make(last layer)``, from features (b, K) to logits (b, C).

    Without ``make``, or where it returns the layer, the network is unchanged. The head lists its layer blocks in
    ``block_names``; they follow the body's, as ``fc2.policy``. It sets ``has_dropout`` where it draws random numbers
    in training. The network's own weights are those without the head. Raises UserError where its last layer is not
    linear with a bias.
    """
    if make is None:
        return network
    *body, last = block_names(network)
    layer = network.get_submodule(last)
    if type(layer) is not nn.Linear or layer.bias is None:
        raise UserError(
            f"this method needs a linear last layer with a bias, which '{last}' is not"
        )
    if tied := [
        pair
        for pair in other_names(network).items()
        if any(name.startswith(f"{last}.") for name in pair)
    ]:
        raise UserError(
            f"this method replaces the last layer, and {' and '.join(tied[0])} are one tensor"
        )
    head = make(layer)
    if head is layer:
        return network
    owner, _, leaf = last.rpartition(".")
    setattr(network.get_submodule(owner), leaf, head)
    parts = tuple(f"{last}.{part}" for part in block_names(head))
    attributes: dict[str, Any] = {"block_names": (*body, *parts), "head_name": last}
    attributes["has_dropout"] = getattr(network, "has_dropout", False) or getattr(
        head, "has_dropout", False
    )
    for name, value in attributes.items():
        setattr(network, name, value)
    return network
