"""The networks the papers use, built by name from an input shape and a number of classes.

``build("fedala-cnn", (1, 28, 28), 10)`` gives an ``nn.Module`` that maps float32 inputs (batch, channels,
height, width) or (batch, features) to logits (batch, classes). Some take volumes, too: (batch, channels, depth,
height, width). Weights come from torch's global generator.

Every network has ``block_names``, its layer blocks from input to output. Each names a child module; every
parameter and buffer belongs to exactly one block and ``parameters()`` runs in block order. Layer-wise methods
(FedPer, FedALA's p, PLayer-FL's cut) count in these blocks, as the papers count layers: a weight and its bias
are one, a residual stage is one (FedALA, Table 5).

Where the papers leave something open:

* APPLE, FedALA, DiversiFed and FedAPM state their CNN for one picture size. Here the first fully connected
  layer follows from the input shape, so that each takes any picture that is large enough.
* FedAPM's paper puts a ReLU behind the last layer too; its code does not, and logits must be able to be
  negative, so neither does this.
* DiversiFed lists "three fully connected layers with 400, 120 and 84 units": LeNet-5's 400-120-84-classes,
  where 400 is the flattened feature map.
* DiversiFed gives no details of its ResNet-8. This is the one of Fling, the same group's library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.densenet import PUBLISHED as DENSENET_PUBLISHED
from models.densenet import DenseNet
from models.dimensions import batch_norm, convolution, is_volume, max_pool, mean_over_places
from models.flat import block_names
from models.own import OwnSettings, is_own, own_network
from models.shapes import Shape, kind_of
from models.stem import Stem, StemSettings
from models.unet import Unet, UnetSettings
from models.vit import PUBLISHED as VIT_PUBLISHED
from models.vit import VisionTransformer, VitSettings
from models.weights import renamed

# ---- Convolutions, pooling, fully connected layers ---------------------------------------------------------


class ConvNet(nn.Module):
    """Convolution, ReLU and 2x2 max-pooling for each of ``channels``, then fully connected layers with ReLU.

    Volumes are convolved and pooled in three dimensions.

    Blocks: conv1, conv2, ..., fc1, fc2, ...
    """

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        *,
        channels: tuple[int, ...],
        kernel: int,
        padding: int,
        hidden: tuple[int, ...],
    ) -> None:
        super().__init__()
        width, *sides = input_shape
        convolutions, layers = [], []
        for index, out in enumerate(channels, start=1):
            convolutions.append(f"conv{index}")
            self.add_module(convolutions[-1], convolution(is_volume(input_shape))(width, out, kernel, padding=padding))
            width = out
            sides = [(side + 2 * padding - kernel + 1) // 2 for side in sides]
        features = width * math.prod(sides)
        for index, out in enumerate((*hidden, classes), start=1):
            layers.append(f"fc{index}")
            self.add_module(layers[-1], nn.Linear(features, out))
            features = out
        self.convolutions, self.layers = tuple(convolutions), tuple(layers)
        self.block_names = (*convolutions, *layers)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.convolutions:
            # Equal to pooling behind the ReLU (both are monotone), at a quarter of the ReLU's work.
            x = max_pool(self.get_submodule(name)(x), 2).relu()
        x = x.flatten(1)
        for name in self.layers[:-1]:
            x = self.get_submodule(name)(x).relu()
        x = self.get_submodule(self.layers[-1])(x)
        return x


@dataclass(frozen=True)
class PlayerLayout:
    """One of PLayer-FL's picture networks: per convolution (channels, pooled or not, dropout behind it)."""

    kernel: int
    padding: int
    convolutions: tuple[tuple[int, bool, float], ...]
    hidden: int


PLAYER_LAYOUTS = {
    "fmnist": PlayerLayout(5, 2, ((64, True, 0.0), (128, True, 0.0), (256, True, 0.0)), 100),
    "cifar": PlayerLayout(
        3, 2, ((64, False, 0.3), (128, True, 0.3), (256, False, 0.3), (512, True, 0.3), (512, False, 0.3)), 100
    ),
    "isic": PlayerLayout(
        3, 1, ((32, False, 0.0), (64, False, 0.0), (128, True, 0.2), (256, True, 0.2), (512, True, 0.2)), 256
    ),
}


class PlayerNet(nn.Module):
    """PLayer-FL's picture networks: convolutions (ReLU, pooling, dropout), global average pooling, two FC.

    Blocks: conv1, ..., conv3 or conv5, fc1, fc2.
    """

    def __init__(self, input_shape: Shape, classes: int, layout: PlayerLayout) -> None:
        super().__init__()
        self.layout = layout
        self.has_dropout = any(dropout for _, _, dropout in layout.convolutions)
        width = input_shape[0]
        self.convolutions = tuple(f"conv{index + 1}" for index in range(len(layout.convolutions)))
        for name, (out, _, _) in zip(self.convolutions, layout.convolutions, strict=True):
            self.add_module(name, nn.Conv2d(width, out, layout.kernel, padding=layout.padding))
            width = out
        self.fc1 = nn.Linear(width, layout.hidden)
        self.fc2 = nn.Linear(layout.hidden, classes)
        self.block_names = (*self.convolutions, "fc1", "fc2")
        initialise_kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        for name, (_, pooled, dropout) in zip(self.convolutions, self.layout.convolutions, strict=True):
            x = self.get_submodule(name)(x)
            if pooled:
                x = F.max_pool2d(x, 2)
            x = x.relu()
            if dropout:
                x = F.dropout(x, dropout, self.training)
        x = x.mean((-2, -1))
        x = self.fc2(self.fc1(x).relu())
        return x


class Mlp(nn.Module):
    """Fully connected layers with ReLU (and dropout) between them; pictures are flattened first.

    Blocks: fc1, fc2, ...; without hidden layers the network is multinomial logistic regression.
    """

    any_batch = True  # inputs may have any leading dimensions, such as (silos, batch)

    def __init__(self, input_shape: Shape, classes: int, hidden: tuple[int, ...], dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.has_dropout = dropout, dropout > 0
        self.input_dimensions = len(input_shape)
        features = 1
        for side in input_shape:
            features *= side
        widths = (features, *hidden, classes)
        self.layers = self.block_names = tuple(f"fc{index}" for index in range(1, len(widths)))
        for name, inputs, outputs in zip(self.layers, widths[:-1], widths[1:], strict=True):
            self.add_module(name, nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(-self.input_dimensions)
        for name in self.layers[:-1]:
            x = self.get_submodule(name)(x).relu()
            if self.dropout:
                x = F.dropout(x, self.dropout, self.training)
        x = self.get_submodule(self.layers[-1])(x)
        return x


def initialise_kaiming(module: nn.Module) -> None:
    """PLayer-FL's start: Kaiming-normal weights (fan-in, gain of ReLU), zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


# ---- Residual networks -------------------------------------------------------------------------------------


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
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x)).relu()
        x = (self.bn2(self.conv2(x)) + shortcut).relu()
        return x


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2016, Figure 5); the 3x3 one has the stride.

    So torchvision has it (ResNet v1.5; in the paper the first one has it). The last widens fourfold.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, volume: bool = False) -> None:
        super().__init__()
        outputs, conv, norm = self.expansion * width, convolution(volume), batch_norm(volume)
        self.conv1 = conv(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = conv(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

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


# ---- Settings ----------------------------------------------------------------------------------------------


MOST_LAYERS, MOST_UNITS = 8, 10_000  # of an mlp: a silo builds what a server's settings say


@dataclass(frozen=True)
class MlpSettings:
    """Widths of the hidden layers, input to output, and the dropout behind each of them."""

    hidden: str = field(default="64", metadata={"help": "widths of the hidden layers, e.g. '128,64'; '' for none"})
    dropout: float = field(
        default=0.0, metadata={"help": "probability that a hidden unit is dropped", "minimum": 0, "below": 1}
    )

    def __post_init__(self) -> None:
        self.widths()

    def widths(self) -> tuple[int, ...]:
        """``hidden`` as integers; ValueError where one is not a positive whole number, or there are too many."""
        parts = [part.strip() for part in self.hidden.split(",") if part.strip()]
        widths = [part.isdecimal() and len(part) <= 5 and 0 < int(part) <= MOST_UNITS for part in parts]
        if not all(widths) or len(parts) > MOST_LAYERS:
            limits = f"at most {MOST_LAYERS}, of at most {MOST_UNITS} each"
            raise ValueError(f"mlp.hidden must be widths such as '128,64', not {self.hidden[:80]!r}: {limits}")
        return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class PlayerCnnSettings:
    """Which of PLayer-FL's picture networks: by the shape, or the one of a given data set."""

    layout: str = field(
        default="auto",
        metadata={
            "help": "auto: isic from 64 pixels on, else fmnist for grey and cifar for colour pictures",
            "choices": ("auto", *PLAYER_LAYOUTS),
        },
    )


# ---- Registry ----------------------------------------------------------------------------------------------

Make = Callable[[Shape, int, Any], nn.Module]
FLATTENED = ("table", "signal", "picture", "volume")
EVERY = (*FLATTENED, "text", "several")
AUTO = {"table": "mlp", "signal": "mlp"}  # what "auto" means, but for pictures and volumes


@dataclass(frozen=True)
class ModelSpec:
    """One architecture: what it is, where it comes from, what it takes and how it is made.

    ``kinds`` are those of the inputs it takes (models/shapes.py); ``smallest`` the least side of a picture.
    ``settings`` is the dataclass of its own settings, if it has any, which ``make(input_shape, classes, settings)``
    receives.
    """

    title: str
    source: str
    takes: str
    make: Make
    kinds: tuple[str, ...] = ("picture",)
    smallest: int = 1
    settings: type | None = None
    per_pixel: bool = False  # outputs for every pixel of the picture
    published: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): names in published files, and ours


def _conv_net(channels: tuple[int, ...], kernel: int, padding: int, hidden: tuple[int, ...]) -> Make:
    return lambda shape, classes, _: ConvNet(
        shape, classes, channels=channels, kernel=kernel, padding=padding, hidden=hidden
    )


def _player_cnn(shape: Shape, classes: int, settings: PlayerCnnSettings) -> nn.Module:
    layout = settings.layout
    if layout == "auto":
        layout = "isic" if min(shape[1:]) >= 64 else "fmnist" if shape[0] == 1 else "cifar"
    return PlayerNet(shape, classes, PLAYER_LAYOUTS[layout])


def _player_heart(shape: Shape, classes: int, _: None) -> nn.Module:
    network = Mlp(shape, classes, hidden=(50, 20, 20))
    initialise_kaiming(network)
    return network


RESNET_PUBLISHED = ((r"^(conv1|bn1)\.", r"stem.\1."),)  # torchvision's names, and ours

# The smallest picture of a network with an unpadded 5x5 convolution and a 2x2 pooling twice is 16x16:
# 16 -> 12 -> 6 -> 2 -> 1 leaves one pixel, 15 -> 11 -> 5 -> 1 -> 0 none.
MODELS: dict[str, ModelSpec] = {
    "apple-cnn": ModelSpec(
        "two 5x5 convolutions (20, 50), FC 500",
        "APPLE (Luo and Wu, IJCAI 2022), the authors' code",
        "pictures (c, h, w) of at least 16x16; the paper's are 28x28",
        _conv_net((20, 50), kernel=5, padding=0, hidden=(500,)),
        smallest=16,
    ),
    "fedala-cnn": ModelSpec(
        "two 5x5 convolutions (32, 64), FC 512",
        "FedALA (Zhang et al., AAAI 2023), four-layer CNN",
        "pictures (c, h, w) of at least 16x16; the paper's are 28x28, 32x32 and 64x64",
        _conv_net((32, 64), kernel=5, padding=0, hidden=(512,)),
        smallest=16,
    ),
    "diversifed-cnn": ModelSpec(
        "LeNet: two 5x5 convolutions (6, 16), FC 120, FC 84",
        "DiversiFed (arXiv 2407.15464), CIFAR-10 and PathMNIST",
        "pictures (c, h, w) of at least 16x16; the paper's are 32x32",
        _conv_net((6, 16), kernel=5, padding=0, hidden=(120, 84)),
        smallest=16,
    ),
    "fedapm-cnn": ModelSpec(
        "two padded 3x3 convolutions (16, 32), FC 128",
        "FedAPM (KDD 2025), CIFAR-10",
        "pictures (c, h, w) of at least 4x4; the paper's are 32x32",
        _conv_net((16, 32), kernel=3, padding=1, hidden=(128,)),
        smallest=4,
    ),
    "player-cnn": ModelSpec(
        "three or five padded convolutions, global average pooling, two FC",
        "PLayer-FL (MLSys 2026), networks for FMNIST and EMNIST, CIFAR, and ISIC",
        "pictures (c, h, w) of at least 8x8; the paper's are 1x28x28, 3x32x32 and 3x200x200",
        _player_cnn,
        smallest=8,
        settings=PlayerCnnSettings,
    ),
    "player-heart": ModelSpec(
        "FC 50, 20, 20",
        "PLayer-FL (MLSys 2026), network for Heart",
        "tables (d,); the paper's has 10 columns",
        _player_heart,
        kinds=("table",),
    ),
    "mlp": ModelSpec(
        "fully connected layers",
        "DiversiFed (arXiv 2407.15464), FMNIST: one hidden layer of 64",
        "tables (d,), and pictures (c, h, w) and volumes (c, d, h, w), which are flattened",
        lambda shape, classes, own: Mlp(shape, classes, own.widths(), own.dropout),
        kinds=FLATTENED,
        settings=MlpSettings,
    ),
    "linear": ModelSpec(
        "multinomial logistic regression: one fully connected layer",
        "as everywhere; `mlp` without hidden layers",
        "tables (d,), and pictures (c, h, w), which are flattened",
        lambda shape, classes, _: Mlp(shape, classes, ()),
        kinds=FLATTENED,
    ),
    "small-cnn": ModelSpec(
        "two padded 3x3 convolutions (32, 64), FC 128",
        "ours, for pictures too small for the papers' networks",
        "pictures (c, h, w) of at least 4x4, volumes (c, d, h, w) of at least 4x4x4",
        _conv_net((32, 64), kernel=3, padding=1, hidden=(128,)),
        smallest=4,
        kinds=("picture", "volume"),
    ),
    "resnet8": ModelSpec(
        "residual network, three stages of one block",
        "Fling's ResNet-8; DiversiFed (arXiv 2407.15464), CIFAR-100, gives no details of its own",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8; the paper's are 32x32",
        lambda shape, classes, own: ResNet(shape, classes, (1, 1, 1), own.stem),
        smallest=8,
        settings=StemSettings,
        kinds=("picture", "volume"),
        published=RESNET_PUBLISHED,
    ),
    "resnet18": ModelSpec(
        "residual network, four stages of two blocks",
        "He et al. (CVPR 2016) as in torchvision; FedALA (Tiny-ImageNet), FedAPM (CIFAR-100)",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8; the papers' are 32x32 and 64x64",
        lambda shape, classes, own: ResNet(shape, classes, (2, 2, 2, 2), own.stem),
        smallest=8,
        settings=StemSettings,
        kinds=("picture", "volume"),
        published=RESNET_PUBLISHED,
    ),
    "resnet50": ModelSpec(
        "residual network, four stages of 3, 4, 6 and 3 bottlenecks",
        "He et al. (CVPR 2016) as in torchvision",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8; the paper's are 224x224",
        lambda shape, classes, own: ResNet(shape, classes, (3, 4, 6, 3), own.stem, Bottleneck),
        smallest=8,
        settings=StemSettings,
        kinds=("picture", "volume"),
        published=RESNET_PUBLISHED,
    ),
    "densenet121": ModelSpec(
        "densely connected network, four stages of 6, 12, 24 and 16 layers",
        "Huang et al. (CVPR 2017) as in torchvision",
        "pictures (c, h, w) of at least 8x8; the paper's are 224x224",
        lambda shape, classes, own: DenseNet(shape, classes, own.stem),
        smallest=8,
        settings=StemSettings,
        published=DENSENET_PUBLISHED,
    ),
    "vit-s": ModelSpec(
        "small vision transformer: width 384, 12 blocks, 6 heads",
        "Dosovitskiy et al. (ICLR 2021), Touvron et al. (ICML 2021), as in torchvision",
        "pictures (c, h, w) of at least 2x2 whose sides vit-s.patch divides; the papers' are 224x224",
        VisionTransformer,
        smallest=2,
        settings=VitSettings,
        published=VIT_PUBLISHED,
    ),
    "unet": ModelSpec(
        "U-Net with group normalisation, for outlines",
        "Ronneberger et al. (MICCAI 2015)",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8",
        Unet,
        smallest=8,
        settings=UnetSettings,
        kinds=("picture", "volume"),
        per_pixel=True,
    ),
}


def model_settings() -> dict[str, type]:
    """The settings dataclass of each architecture that has settings of its own."""
    return {name: spec.settings for name, spec in MODELS.items() if spec.settings is not None}


def spec_of(name: str) -> ModelSpec:
    """The architecture of that name, which may be a network of one's own (models/own.py)."""
    if not is_own(name):
        return MODELS[name]

    def make(shape: Shape, outputs: int, settings: OwnSettings) -> nn.Module:
        return own_network(name, shape, outputs, settings)

    return ModelSpec("a network of one's own", name, "what it can", make, kinds=EVERY, settings=OwnSettings)


def resolve(name: str, input_shape: Shape, *, per_pixel: bool = False) -> str:
    """The architecture that ``name`` means for this input shape; only "auto" depends on the shape.

    "auto" is ``unet`` where every pixel has an answer; else what AUTO says, and ``mlp`` for pictures under 4 pixels,
    ``small-cnn`` up to 16 (the shortest side counts), ``fedala-cnn`` for 28x28 and 32x32, ``resnet18`` from 64 on,
    otherwise ``player-cnn``.

    Raises ValueError where no architecture has that name, or for "auto" where the shape is none of an input.
    """
    names = ("auto", *MODELS)
    if name not in names and not is_own(name):
        raise ValueError(f"unknown model {name!r}; there are: {', '.join(names)}; or package.module:factory")
    if name != "auto":
        return name
    kind = kind_of(input_shape)
    if per_pixel:
        return "unet"
    if kind in AUTO:
        return AUTO[kind]
    shorter = min(input_shape[1:])
    if shorter <= 16:
        return "mlp" if shorter < 4 else "small-cnn"
    if len(input_shape) == 4:
        return "small-cnn" if shorter <= 32 else "resnet18"
    if input_shape[1:] in ((28, 28), (32, 32)):
        return "fedala-cnn"
    return "resnet18" if shorter >= 64 else "player-cnn"


def our_name(model: str, published: str) -> str:
    """What a tensor is called here that a published file of this architecture (torchvision's, timm's) calls so."""
    return renamed(published, spec_of(model).published)


def build(name: str, input_shape: Shape, classes: int, settings: Any = None) -> nn.Module:
    """A freshly initialised network.

    ``input_shape`` is as models/shapes.py has it, (channels, height, width) or (columns,) for example, without the
    batch; ``settings`` is an instance of the architecture's own dataclass, e.g. ``MlpSettings("128,64")`` for ``mlp``;
    None: its defaults.

    ``classes`` is the number of outputs. Raises ValueError, in one line, for an unknown name, or a shape that the
    architecture cannot take.
    """
    name = resolve(name, input_shape)
    spec, kind = spec_of(name), kind_of(input_shape)
    too_small = kind in ("picture", "volume") and min(input_shape[1:]) < spec.smallest
    if kind not in spec.kinds or too_small:
        raise ValueError(f"model {name!r} cannot take inputs of shape {input_shape}: it takes {spec.takes}")
    own = spec.settings() if settings is None and spec.settings is not None else settings
    return spec.make(input_shape, classes, own)


class Values(nn.Module):
    """Numbers that a head holds as a layer block of their own: set by its method, not trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.values


def with_head(network: nn.Module, make: Callable[[nn.Linear], nn.Module] | None) -> nn.Module:
    """The network with another head: ``make(last layer)`` is what turns its features (b, K) into logits (b, C).

    Without ``make``, as it is. The head names its layer blocks in ``block_names``; they stand behind the body's, as
    ``fc2.policy``. ``has_dropout`` says that it draws random numbers in training. The network's own weights are those
    it has without the head. ValueError where its last layer is not linear.
    """
    if make is None:
        return network
    *body, last = block_names(network)
    layer = network.get_submodule(last)
    if type(layer) is not nn.Linear or layer.bias is None:
        raise ValueError(f"this method needs a linear last layer with a bias, which '{last}' is not")
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
