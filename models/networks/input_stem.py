"""Input stem of residual and dense networks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from models.networks.blocks import batch_norm, convolution, max_pool

STEMS = ("7x7", "3x3")


@dataclass(frozen=True)
class StemSettings:
    """Selection of the stem: 7x7 or 3x3."""

    stem: str = field(
        default="7x7",
        metadata={
            "help": "7x7: stride 2 and max-pooling, the papers'; 3x3: keeps the size, for small pictures",
            "choices": STEMS,
        },
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
