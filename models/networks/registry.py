"""The networks the papers use, built by name from an input shape and a number of classes.

``build("fedala-cnn", (1, 28, 28), 10)`` returns an ``nn.Module`` that maps a batch of inputs, here float32 (batch,
channels, height, width), to logits (batch, classes). models/shapes.py describes batches of other inputs: tables,
signals, volumes, texts and several of these. Weights come from torch's global generator.

Every network has ``block_names``, its layer blocks from input to output. Each names a child module. Every parameter
and buffer belongs to exactly one block, and ``parameters()`` is in block order. Layer-wise methods (FedPer, FedALA's p,
PLayer-FL's cut) count these blocks, as the papers count layers: a weight and its bias are one block, and so is a
residual stage (FedALA, Table 5).

Choices where the papers are not complete:

* APPLE, FedALA, DiversiFed and FedAPM state their CNN for one picture size. Here the size of the first fully connected
  layer follows from the input shape, so that any picture that is large enough can be used.
* FedAPM's paper has a ReLU after the last layer too. Its code has none, and neither has this network, because logits
  must be able to be negative.
* DiversiFed lists "three fully connected layers with 400, 120 and 84 units": LeNet-5's 400-120-84-classes,
  where 400 is the flattened feature map.
* DiversiFed gives no details of its ResNet-8. This one is that of Fling, the same group's library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

from torch import nn

from models.networks.blocks import StemSettings, initialise_kaiming
from models.networks.cnn import PLAYER_LAYOUTS, ConvNet, PlayerCnnSettings, PlayerNet
from models.networks.custom import CustomSettings, check_network, custom_network, is_custom
from models.networks.densenet import PUBLISHED as DENSENET_PUBLISHED
from models.networks.densenet import DenseNet
from models.networks.fusion import Fusion, ImageTextSettings, SignalsSettings, is_signal
from models.networks.mlp import Mlp, MlpSettings
from models.networks.resnet import RESNET_PUBLISHED, Bottleneck, ResNet
from models.networks.text import (
    FastText,
    FastTextSettings,
    PlayerTransformer,
    PlayerTransformerSettings,
)
from models.networks.trees import TREES, Trees, TreesSettings
from models.networks.unet import Unet, UnetSettings
from models.networks.vit import PUBLISHED as VIT_PUBLISHED
from models.networks.vit import VisionTransformer, VitSettings
from models.shapes import Shape, inputs_of, kind_of
from partitions.common.errors import UserError
from partitions.common.own_code import NETWORKS, plugins

Make = Callable[[Shape, int, Any], nn.Module]
FLATTENED = ("table", "signal", "picture", "volume")
EVERY = (*FLATTENED, "text", "several")
# "auto" for these kinds of inputs
AUTO = {"table": "mlp", "text": "fasttext", "signal": "fedapm-signals"}


@dataclass(frozen=True)
class ModelSpec:
    """One architecture: title, source, inputs in words, and the function that makes it.

    * ``kinds``: the kinds of inputs that it takes (models/shapes.py); ``smallest``: the smallest side of a picture.
    * ``settings``: the dataclass of its own settings, if any, for ``make(input_shape, classes, settings)``.
    """

    title: str
    source: str
    takes: str
    make: Make
    kinds: tuple[str, ...] = ("picture",)
    smallest: int = 1
    settings: type | None = None
    per_pixel: bool = False  # outputs for every pixel of the picture
    # (pattern, replacement): names in published files, and ours
    published: tuple[tuple[str, str], ...] = ()


# Of residual networks
RESIDUAL = partial(
    ModelSpec,
    smallest=8,
    settings=StemSettings,
    kinds=("picture", "volume"),
    published=RESNET_PUBLISHED,
)


def _conv_net(
    channels: tuple[int, ...], kernel: int, padding: int, hidden: tuple[int, ...]
) -> Make:
    return lambda shape, classes, _: ConvNet(
        shape, classes, channels=channels, kernel=kernel, padding=padding, hidden=hidden
    )


def _player_cnn(shape: Shape, classes: int, settings: PlayerCnnSettings) -> nn.Module:
    layout = settings.layout
    if layout == "auto":
        layout = "isic" if min(shape[1:]) >= 64 else "fmnist" if shape[0] == 1 else "cifar"
    return PlayerNet(shape, classes, PLAYER_LAYOUTS[layout])


def _kaiming(make: Make) -> Make:
    """Return ``make`` with PLayer-FL's initial weights."""

    def initialised(shape: Shape, classes: int, settings: Any) -> nn.Module:
        network = make(shape, classes, settings)
        initialise_kaiming(network)
        return network

    return initialised


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
        _kaiming(lambda shape, classes, _: Mlp(shape, classes, hidden=(50, 20, 20))),
        kinds=("table",),
    ),
    "player-transformer": ModelSpec(
        "one transformer block without normalisation, [CLS], FC",
        "PLayer-FL (MLSys 2026), network for Sent-140 and MIMIC-III",
        "texts of tokens (t,), the first of which is read; the papers' have 119 and 512",
        _kaiming(PlayerTransformer),
        kinds=("text",),
        settings=PlayerTransformerSettings,
    ),
    "fasttext": ModelSpec(
        "mean of the words' embeddings, FC 32",
        "FedALA (Zhang et al., AAAI 2023), network for AG News; Joulin et al. (EACL 2017)",
        "texts of tokens (t,); the paper's have 200",
        FastText,
        kinds=("text",),
        settings=FastTextSettings,
    ),
    "fedapm-signals": ModelSpec(
        "for each input convolutions and a GRU; fused attention, FC 64",
        "FedAPM (KDD 2025), networks for KU-HAR and Crema-D",
        "signals (c, t), and several inputs of any kind; the paper's are two of (3, 128), and (80, t) with (1280, t)",
        Fusion,
        kinds=("signal", "several"),
        settings=SignalsSettings,
    ),
    "fedapm-image-text": ModelSpec(
        "for each input a projection, convolutions or a GRU; fused attention, FC 64",
        "FedAPM (KDD 2025), network for CrisisMMD",
        "texts, and several inputs of any kind; the paper's are (1280,) with (512, t)",
        Fusion,
        kinds=("text", "several"),
        settings=ImageTextSettings,
    ),
    "mlp": ModelSpec(
        "fully connected layers",
        "DiversiFed (arXiv 2407.15464), FMNIST: one hidden layer of 64",
        "tables (d,), and signals (c, t), pictures (c, h, w) and volumes (c, d, h, w), which are flattened",
        lambda shape, classes, s: Mlp(shape, classes, s.widths(), s.dropout),
        kinds=FLATTENED,
        settings=MlpSettings,
    ),
    "linear": ModelSpec(
        "multinomial logistic regression: one fully connected layer",
        "as everywhere; `mlp` without hidden layers",
        "tables (d,), and signals, pictures and volumes, which are flattened",
        lambda shape, classes, _: Mlp(shape, classes, ()),
        kinds=FLATTENED,
    ),
    TREES: ModelSpec(
        "boosted trees, which XGBoost trains: with fedxgb, local and pooled only",
        "Chen and Guestrin (KDD 2016)",
        "tables (d,)",
        Trees,
        kinds=("table",),
        settings=TreesSettings,
    ),
    "small-cnn": ModelSpec(
        "two padded 3x3 convolutions (32, 64), FC 128",
        "ours, for pictures too small for the papers' networks",
        "pictures (c, h, w) of at least 4x4, volumes (c, d, h, w) of at least 4x4x4",
        _conv_net((32, 64), kernel=3, padding=1, hidden=(128,)),
        smallest=4,
        kinds=("picture", "volume"),
    ),
    "resnet8": RESIDUAL(
        "residual network, three stages of one block",
        "Fling's ResNet-8; DiversiFed (arXiv 2407.15464), CIFAR-100, gives no details of its own",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8; the paper's are 32x32",
        lambda shape, classes, s: ResNet(shape, classes, (1, 1, 1), s.stem),
    ),
    "resnet18": RESIDUAL(
        "residual network, four stages of two blocks",
        "He et al. (CVPR 2016) as in torchvision; FedALA (Tiny-ImageNet), FedAPM (CIFAR-100)",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8; the papers' are 32x32 and 64x64",
        lambda shape, classes, s: ResNet(shape, classes, (2, 2, 2, 2), s.stem),
    ),
    "resnet50": RESIDUAL(
        "residual network, four stages of 3, 4, 6 and 3 bottlenecks",
        "He et al. (CVPR 2016) as in torchvision",
        "pictures (c, h, w) of at least 8x8, volumes (c, d, h, w) of at least 8x8x8; the paper's are 224x224",
        lambda shape, classes, s: ResNet(shape, classes, (3, 4, 6, 3), s.stem, Bottleneck),
    ),
    "densenet121": ModelSpec(
        "densely connected network, four stages of 6, 12, 24 and 16 layers",
        "Huang et al. (CVPR 2017) as in torchvision",
        "pictures (c, h, w) of at least 8x8; the paper's are 224x224",
        lambda shape, classes, s: DenseNet(shape, classes, s.stem),
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

BUILT_IN = ("auto", *MODELS)  # names that a policy treats as silofl's own


@cache
def add_plugins() -> None:
    """Add other packages' networks: entry points of the group ``silofl.networks``, each a ModelSpec.

    Raises UserError for another object, or a name that exists already.
    """
    for name, package, plugin in plugins(NETWORKS):
        if name in MODELS or name == "auto" or not isinstance(plugin, ModelSpec):
            what = (
                "is no ModelSpec"
                if not isinstance(plugin, ModelSpec)
                else "has the name of a network of silofl"
            )
            raise UserError(
                f"{name} of {package} ({NETWORKS}) {what}; update {package}, or uninstall it"
            )
        MODELS[name] = plugin


def model_settings() -> dict[str, type]:
    """Return the settings dataclass of each architecture that has its own settings."""
    add_plugins()
    return {name: spec.settings for name, spec in MODELS.items() if spec.settings is not None}


def spec_of(name: str) -> ModelSpec:
    """Return the architecture of that name, which may be a user's own network (models/networks/custom.py)."""
    add_plugins()
    if not is_custom(name):
        return MODELS[name]

    return ModelSpec(
        "a network of one's own",
        name,
        "what it can",
        partial(custom_network, name),
        kinds=EVERY,
        settings=CustomSettings,
    )


def resolve(name: str, input_shape: Shape, *, per_pixel: bool = False) -> str:
    """Return the architecture for ``name`` and this input shape; only "auto" depends on the shape.

    "auto" is:

    * ``unet`` for outputs per pixel;
    * for a table, a text or a signal the entry of ``AUTO``;
    * for several inputs ``fedapm-signals`` where one is a signal (of at most 128 channels), else ``fedapm-image-text``;
    * for pictures and volumes, by the shortest side: ``mlp`` under 4 pixels, ``small-cnn`` up to 16, ``fedala-cnn`` for
      28x28 and 32x32, ``resnet18`` from 64, otherwise ``player-cnn``.

    Raises UserError for an unknown name, or for "auto" where the shape is not that of an input.
    """
    add_plugins()
    names = ("auto", *MODELS)
    if name not in names and not is_custom(name):
        raise UserError(
            f"unknown model {name!r}; there are: {', '.join(names)}; or package.module:factory"
        )
    if name != "auto":
        return name
    kind = kind_of(input_shape)
    if per_pixel:
        return "unet"
    if kind in AUTO:
        return AUTO[kind]
    if kind == "several":
        has_signal = any(is_signal(shape) for shape in inputs_of(input_shape).values())
        return "fedapm-signals" if has_signal else "fedapm-image-text"
    shorter = min(input_shape[1:])
    if shorter <= 16:
        return "mlp" if shorter < 4 else "small-cnn"
    if len(input_shape) == 4:
        return "small-cnn" if shorter <= 32 else "resnet18"
    if input_shape[1:] in ((28, 28), (32, 32)):
        return "fedala-cnn"
    return "resnet18" if shorter >= 64 else "player-cnn"


def build(name: str, input_shape: Shape, classes: int, settings: Any = None) -> nn.Module:
    """Build a freshly initialised network.

    * ``input_shape``: as in models/shapes.py, without the batch, for example (channels, height, width) or (columns,).
    * ``classes``: the number of outputs.
    * ``settings``: an instance of the architecture's own dataclass, e.g. ``MlpSettings("128,64")`` for ``mlp``; None:
      its defaults.

    Raises UserError, in one line, for an unknown name, or a shape that the architecture cannot take.
    """
    name = resolve(name, input_shape)
    spec, kind = spec_of(name), kind_of(input_shape)
    too_small = kind in ("picture", "volume") and min(input_shape[1:]) < spec.smallest
    if kind not in spec.kinds or too_small:
        raise UserError(
            f"model {name!r} cannot take inputs of shape {input_shape}: it takes {spec.takes}"
        )
    options = spec.settings() if settings is None and spec.settings is not None else settings
    if name not in BUILT_IN and not is_custom(name):
        _check_plugin(name, input_shape, classes, options)
    return spec.make(input_shape, classes, options)


@lru_cache(maxsize=8)
def _check_plugin(name: str, shape: Shape, classes: int, settings: Any) -> None:
    """Raise UserError where methods cannot use another package's network."""
    spec = MODELS[name]
    check_network(
        name, shape, classes, spec.per_pixel, lambda: spec.make(shape, classes, settings)
    )
