"""Small instances of the networks of MONAI, torchvision and timm, as factories of a network of one's own."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchvision_here import import_models, timm_or_skip

Shape = tuple[int, ...]


class Library:
    """Networks of a library, which is imported when the first one is made: it takes seconds."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        with warnings.catch_warnings():  # of its own imports
            warnings.simplefilter("ignore")
            return getattr(self.of(), name)


nets = Library(lambda: importlib.import_module("monai.networks.nets"))
vision = Library(import_models)
timm = Library(timm_or_skip)


def unet(shape: Shape, outputs: int) -> Any:
    return nets.UNet(2, shape[0], outputs, channels=(4, 8), strides=(2,))


def dynunet(shape: Shape, outputs: int, deep: bool = False) -> Any:
    kernels, strides = [3] * 4, [1, 2, 2, 2]
    more: Any = {"filters": [4, 4, 8, 8], "deep_supervision": deep, "deep_supr_num": 2}
    return nets.DynUNet(2, shape[0], outputs, kernels, strides, strides[1:], **more)


def deep_dynunet(shape: Shape, outputs: int) -> Any:
    return dynunet(shape, outputs, deep=True)


def segresnet(shape: Shape, outputs: int) -> Any:
    more: Any = {"out_channels": outputs, "init_filters": 4, "blocks_down": (1, 1, 1)}
    return nets.SegResNetDS(2, in_channels=shape[0], dsdepth=2, **more)


def unetr(shape: Shape, outputs: int) -> Any:
    more: Any = {"feature_size": 4, "hidden_size": 12, "mlp_dim": 16, "num_heads": 2}
    return nets.UNETR(shape[0], outputs, shape[1:], spatial_dims=2, **more)


def swin_unetr(shape: Shape, outputs: int) -> Any:
    ones = (1, 1, 1, 1)
    more: Any = {"feature_size": 12, "depths": ones, "num_heads": ones, "spatial_dims": 2}
    return nets.SwinUNETR(shape[0], outputs, **more)


def unet_plus(shape: Shape, outputs: int) -> Any:
    return nets.BasicUNetPlusPlus(2, shape[0], outputs, features=(4, 4, 4, 8, 8, 4))


def monai_vit(shape: Shape, outputs: int) -> Any:
    more: Any = {"hidden_size": 12, "mlp_dim": 16, "num_layers": 1, "num_heads": 2}
    more |= {"classification": True, "num_classes": outputs, "spatial_dims": 2}
    return nets.ViT(shape[0], shape[1:], 8, **more)


class LibraryAnswers(nn.Module):
    """A ViT's answers, without its hidden states."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, x: Tensor) -> Tensor:
        answers: Tensor = self.vit(x)[0]
        return answers


def vit_answers(shape: Shape, outputs: int) -> nn.Module:
    return LibraryAnswers(monai_vit(shape, outputs))


def vit_b_16(shape: Shape, outputs: int) -> Any:
    return vision.VisionTransformer(shape[1], 8, 1, 2, 8, 16, num_classes=outputs)


def convnext(shape: Shape, outputs: int) -> Any:
    CNBlockConfig = vision.convnext.CNBlockConfig
    blocks = [CNBlockConfig(4, 8, 1), CNBlockConfig(8, None, 1)]
    return vision.ConvNeXt(blocks, num_classes=outputs)


def efficientnet(shape: Shape, outputs: int) -> Any:
    kinds = vision.efficientnet
    blocks = [kinds.FusedMBConvConfig(1, 3, 1, 8, 8, 1), kinds.MBConvConfig(4, 3, 2, 8, 8, 1)]
    return vision.EfficientNet(blocks, 0.2, num_classes=outputs, last_channel=8)


class Auxiliary(nn.Module):
    """As torchvision's FCN: a dictionary of two answers, in evaluation, too."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(4, outputs, 1)
        self.aux = nn.Conv2d(4, outputs, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x).relu()
        return {"out": self.head(features), "aux": self.aux(features)}


class OwnVit(nn.Module):
    """timm's names: free parameters on the module itself."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(shape[0], 8, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + shape[1] * shape[2] // 64, 8))
        self.blocks = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
        logits: Tensor = self.head(self.blocks(tokens + self.pos_embed)[:, 0])
        return logits


def timm_vit(shape: Shape, outputs: int) -> Any:
    return timm.create_model("test_vit", num_classes=outputs, img_size=shape[1])


def timm_resnet(_: Shape, outputs: int) -> Any:
    return timm.create_model("test_resnet", num_classes=outputs)


def timm_convnext(_: Shape, outputs: int) -> Any:
    return timm.create_model("test_convnext", num_classes=outputs)


def auxiliary(shape: Shape, outputs: int) -> nn.Module:
    return Auxiliary(shape, outputs)


def own_vit(shape: Shape, outputs: int) -> nn.Module:
    return OwnVit(shape, outputs)


class TwoAnswers(nn.Module):
    """As torchvision's GoogLeNet: a tuple in training."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 4))
        self.aux, self.fc = nn.Linear(4, outputs), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Any:
        features = self.body(x).relu()
        return (self.fc(features), self.aux(features)) if self.training else self.fc(features)


def two_answers(shape: Shape, outputs: int) -> nn.Module:
    return TwoAnswers(shape, outputs)


def wrapped(shape: Shape, outputs: int) -> nn.Module:
    layers = [nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, outputs)))
