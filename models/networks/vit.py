"""ViT-S, the small vision transformer (Dosovitskiy et al., ICLR 2021; its size: Touvron et al., ICML 2021, DeiT-S).

Width 384, 12 blocks, 6 heads. It computes the same function as torchvision's ``VisionTransformer`` of that size. It
starts about as DeiT (normal of 0.02, biases zero), because torchvision's head of zeros would give the body no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitions.common.errors import UserError
from partitions.common.settings import setting

WIDTH = 384
DEPTH = 12
HEADS = 6
HIDDEN = 1536
MOST_PATCHES = 4096  # of a picture: a silo builds the network from a server's settings; attention costs their square


@dataclass(frozen=True)
class VitSettings:
    """Patch size of the transformer."""

    patch: int = setting(
        16,
        "side of a patch in pixels; it has to divide the picture's sides",
        minimum=1,
        maximum=64,
    )


class Embed(nn.Module):
    """Embedding of a picture (b, c, h, w) as tokens (b, 1 + patches, WIDTH): a learned one, and one per patch."""

    def __init__(self, channels: int, patch: int, patches: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, WIDTH))
        self.proj = nn.Conv2d(channels, WIDTH, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.proj(x)
        patches = patches.flatten(2)
        patches = patches.transpose(1, 2)
        first = self.cls_token.expand(len(x), -1, -1)
        return torch.cat([first, patches], 1) + self.pos_embed

    def own_gradients(self, d: Tensor) -> dict[str, Tensor]:
        """Return each sample's gradients (b, ...) of ``cls_token`` and ``pos_embed``, from ``d``, those of the tokens.

        Used by models/privacy/layers.py.
        """
        return {"cls_token": d[:, :1], "pos_embed": d}


class Attention(nn.Module):
    """Self-attention of all tokens, with ``HEADS`` heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.proj(seen.transpose(1, 2).flatten(2))
        return projected


class TokenMlp(nn.Module):
    """Two fully connected layers, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return result


class TransformerBlock(nn.Module):
    """Attention, then the fully connected layers, each after a normalisation and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = TokenMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class VisionTransformer(nn.Module):
    """ViT-S. Blocks: embed, block0, ..., block11, norm, head."""

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, settings: VitSettings
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        patch = settings.patch
        if height % patch or width % patch:
            fitting = ", ".join(
                str(p) for p in range(64, 0, -1) if height % p == width % p == 0
            )
            raise UserError(
                f"vit-s.patch = {patch} does not divide pictures of {(height, width)}; these do: {fitting}"
            )
        patches = (height // patch) * (width // patch)
        if patches > MOST_PATCHES:
            raise UserError(
                f"vit-s.patch = {patch} cuts pictures of {(height, width)} into {patches} patches: {MOST_PATCHES} are "
                "the most, so take a larger one"
            )
        self.embed = Embed(channels, patch, patches)
        self.layers = tuple(f"block{index}" for index in range(DEPTH))
        for name in self.layers:
            self.add_module(name, TransformerBlock())
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, classes)
        self.block_names = ("embed", *self.layers, "norm", "head")
        for tensor in (self.embed.cls_token, self.embed.pos_embed):
            nn.init.normal_(tensor, std=0.02)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for name in self.layers:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


# The names in files of DeiT, DINO and timm, and in torchvision's; and ours.
PUBLISHED = (
    (r"^cls_token$|^class_token$", "embed.cls_token"),
    (r"^pos_embed$|^encoder\.pos_embedding$", "embed.pos_embed"),
    (r"^patch_embed\.proj\.|^conv_proj\.", "embed.proj."),
    (r"^blocks\.(\d+)\.|^encoder\.layers\.encoder_layer_(\d+)\.", r"block\1\2."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
)
