"""Residual networks (He et al. 2016), for pictures and volumes."""

from __future__ import annotations

from torch import Tensor, nn

from models.networks.blocks import Stem, batch_norm, convolution, is_volume, mean_over_places
from models.shapes import Shape


def make_shortcut(inputs: int, outputs: int, stride: int, volume: bool) -> nn.Module | None:
    """Return the layers of a shortcut that changes size or channels; None: it is the input itself."""
    if stride == 1 and inputs == outputs:
        return None
    layer = convolution(volume)(inputs, outputs, 1, stride, bias=False)
    return nn.Sequential(layer, batch_norm(volume)(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation beside a shortcut (He et al. 2016, Figure 2)."""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int, volume: bool = False) -> None:
        super().__init__()
        conv, norm = convolution(volume), batch_norm(volume)
        self.conv1 = conv(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = make_shortcut(inputs, outputs, stride, volume)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x)).relu()
        x = (self.bn2(self.conv2(x)) + shortcut).relu()
        return x


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2016, Figure 5); the last widens fourfold.

    The 3x3 convolution has the stride, as in torchvision (ResNet v1.5); in the paper the first one has it.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, volume: bool = False) -> None:
        super().__init__()
        outputs = self.expansion * width
        conv = convolution(volume)
        norm = batch_norm(volume)
        self.conv1 = conv(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = conv(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.downsample = make_shortcut(inputs, outputs, stride, volume)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        x = (self.bn3(self.conv3(x)) + shortcut).relu()
        return x


class ResNet(nn.Module):
    """Residual stages of 64, 128, 256, ... channels; every stage but the first halves the picture.

    Blocks: stem, layer1, layer2, ..., fc (FedALA, Table 5). Apart from the prefix ``stem.``, the names of the
    parameters are torchvision's. Convolutions start Kaiming-normal (fan-out), as in torchvision and Fling.
    """

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        depths: tuple[int, ...],
        stem: str,
        block: type[BasicBlock | Bottleneck] = BasicBlock,
    ) -> None:
        super().__init__()
        width, volume = 64, is_volume(input_shape)
        self.stem = Stem(input_shape[0], width, stem, volume)
        self.stages = tuple(f"layer{index + 1}" for index in range(len(depths)))
        for index, (name, depth) in enumerate(zip(self.stages, depths, strict=True)):
            inner = 64 * 2**index
            blocks = [block(width, inner, 1 if index == 0 else 2, volume)]
            width = block.expansion * inner
            blocks += [block(width, inner, 1, volume) for _ in range(depth - 1)]
            self.add_module(name, nn.Sequential(*blocks))
        self.fc = nn.Linear(width, classes)
        self.block_names = ("stem", *self.stages, "fc")
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        x = self.fc(mean_over_places(x))
        return x


RESNET_PUBLISHED = ((r"^(conv1|bn1)\.", r"stem.\1."),)  # torchvision's names, and ours
