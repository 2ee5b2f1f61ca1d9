"""DenseNet-121 (Huang et al., CVPR 2017) as in torchvision: the same tensors, initialisation and outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.networks.blocks import Stem

GROWTH, BOTTLENECK = 32, 4  # k channels per layer; its 1x1 convolution has 4 k
DEPTHS = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """Dense layer: outputs its inputs and ``GROWTH`` more channels."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * GROWTH)
        self.conv2 = nn.Conv2d(BOTTLENECK * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.norm1(x).relu())
        new = self.conv2(self.norm2(new).relu())
        return torch.cat([x, new], 1)


class Stage(nn.Module):
    """A dense block, then a transition that halves channels and picture, or the last normalisation.

    A picture with a side of one pixel is not halved, so that small pictures are possible.
    """

    def __init__(self, inputs: int, depth: int, *, last: bool) -> None:
        super().__init__()
        self.layers = tuple(f"denselayer{index + 1}" for index in range(depth))
        for index, name in enumerate(self.layers):
            self.add_module(name, DenseLayer(inputs + index * GROWTH))
        width = inputs + depth * GROWTH
        self.outputs = width if last else width // 2
        self.norm = nn.BatchNorm2d(width)
        self.conv: nn.Module | None = (
            None if last else nn.Conv2d(width, self.outputs, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for name in self.layers:
            x = self.get_submodule(name)(x)
        x = self.norm(x).relu()
        if self.conv is not None:
            x = self.conv(x)
            x = F.avg_pool2d(x, 2) if min(x.shape[-2:]) > 1 else x
        return x


class DenseNet(nn.Module):
    """DenseNet-121. Blocks: stem, stage1, ..., stage4, classifier.

    Convolutions start Kaiming-normal (fan-in), the last bias at zero.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, stem: str) -> None:
        super().__init__()
        width = 2 * GROWTH
        self.stem = Stem(input_shape[0], width, stem)
        self.stages = tuple(f"stage{index + 1}" for index in range(len(DEPTHS)))
        for name, depth in zip(self.stages, DEPTHS, strict=True):
            stage = Stage(width, depth, last=name == self.stages[-1])
            self.add_module(name, stage)
            width = stage.outputs
        self.classifier = nn.Linear(width, classes)
        self.block_names = ("stem", *self.stages, "classifier")
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.classifier(x.mean((-2, -1)))
        return logits


# torchvision's names (norm.1 for norm1 in its first versions), MONAI's, and ours.
PUBLISHED = (
    (r"^features\.conv0\.", "stem.conv1."),
    (r"^features\.norm0\.", "stem.bn1."),
    (r"^features\.(?:denseblock|transition)(\d)\.", r"stage\1."),
    (r"^features\.norm5\.", "stage4.norm."),
    (r"\.(norm|conv)\.([12])\.", r".\1\2."),
    (r"\.layers\.", "."),
    (r"^class_layers\.out\.", "classifier."),
)
