"""FedAPM's networks for signals and for several inputs of a sample: an encoder for each, one attention over all.

| input | encoder |
|---|---|
| signal of at most 128 channels and at least 8 steps | three convolutions, each with ReLU, pooling, dropout; a GRU |
| other signals: features over time | a GRU |
| text | an embedding, a GRU |
| row of a table, or one vector of features | fully connected, ReLU, dropout |
| picture, volume | the two convolutions of ``fedapm-cnn``, then as a row of a table |

The states of all encoders, (b, steps, width) each, are concatenated in time. For each of ``heads`` they are weighted by
softmax(W2 tanh(W1 h)) over time and summed; two fully connected layers follow. Padding after an input's last step, and
all steps of a missing input, get no attention.

FedAPM (KDD 2025), appendix B.2, after FedMultimodal. Its paper and its code differ:

* CrisisMMD: the paper has width 64, 4 heads and one layer for the picture, the code 128, 6 and two
  (``fedapm-image-text.width=128 .heads=6 .projection=2``).
* In the code, convolutions read values that earlier ones computed in the padding. Here the padding is zeros for each of
  them, and so has no effect. A signal of fewer than 8 steps gets no attention there; here its first step does.
* GRUs have one layer, so that the code's dropout between layers has no effect; here there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.networks.blocks import convolution, is_volume, max_pool
from models.shapes import Shape, inputs_of, kind_of, real_steps
from partitions.common.errors import UserError
from partitions.common.settings import setting

MOST_CHANNELS = 128  # of a signal; more are features over time
FEWEST_STEPS = 8  # of a signal: three poolings leave one
SMALLEST_SIDE = 4
HIDDEN, LAST = 512, 64  # of the attention; of the layer before the last
NO_ATTENTION = -1e5
WIDEST = 1024  # a limit, because a silo builds the network from a server's settings


@dataclass(frozen=True)
class SignalsSettings:
    """Widths of the network for signals; the defaults are those of KU-HAR and Crema-D."""

    width: int = setting(
        128, "of the states that attention weighs", symbol="d_hid", minimum=1, maximum=WIDEST
    )
    heads: int = setting(
        6, "times that attention weighs", symbol="d_head", minimum=1, maximum=64
    )
    filters: int = setting(
        32, "channels of the first convolution of a signal", minimum=1, maximum=WIDEST
    )
    projection: int = setting(
        1, "fully connected layers that a vector goes through", minimum=1, maximum=8
    )
    dropout: float = setting(0.1, "probability that a unit is dropped", minimum=0, below=1)


@dataclass(frozen=True)
class ImageTextSettings(SignalsSettings):
    """Widths of the network for pictures and texts; the defaults are those of CrisisMMD in the paper."""

    width: int = field(
        default=64, metadata=SignalsSettings.__dataclass_fields__["width"].metadata
    )
    heads: int = field(
        default=4, metadata=SignalsSettings.__dataclass_fields__["heads"].metadata
    )


def is_signal(shape: Shape) -> bool:
    """Return whether an input of this shape is a signal, not features over time."""
    return kind_of(shape) == "signal" and shape[0] <= MOST_CHANNELS


class SignalConvolutions(nn.Module):
    """(b, channels, t) -> (b, 4 filters, t // 8): convolutions of 5 steps, ReLU, pooling, dropout."""

    def __init__(self, channels: int, filters: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, filters, 5, padding=2)
        self.conv2 = nn.Conv1d(filters, 2 * filters, 5, padding=2)
        self.conv3 = nn.Conv1d(2 * filters, 4 * filters, 5, padding=2)
        self.dropout = dropout

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        for layer in (self.conv1, self.conv2, self.conv3):
            real = halve_mask(real)
            x = F.dropout(F.max_pool1d(layer(x), 2).relu(), self.dropout, self.training)
            x = x * real.unsqueeze(1)  # the padding stays zeros
        return x, real


def halve_mask(real: Tensor) -> Tensor:
    """Return which steps are real after pooling by 2, (b, t) -> (b, t // 2); a first real step stays one."""
    left = real[:, 1::2].clone()
    left[:, 0] |= real[:, 0]
    return left


class Gru(nn.Module):
    """A gated recurrent unit (Cho et al., 2014) of one layer: (b, t, inputs) -> (b, t, width), as ``nn.GRU``.

    ``nn.GRU`` stores references to its parameters, and on a GPU copies them into one tensor, which a model as one flat
    vector does not allow.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * width, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * width, width))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * width))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * width))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights: list[Tensor] = [
            self.weight_ih_l0,
            self.weight_hh_l0,
            self.bias_ih_l0,
            self.bias_hh_l0,
        ]
        start = x.new_zeros(1, len(x), self.width)
        # Always train=True: without dropout the numbers are the same, and on a GPU a gradient needs it.
        states: Tensor = torch.gru(x, start, weights, True, 1, 0.0, True, False, True)[0]
        return states

    @torch.no_grad()
    def linear_maps(
        self, x: Tensor, d: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield the two linear maps, of the inputs and of the previous states (models/privacy/layers.py).

        Each is weight, bias, inputs (b, t, ...) and the gradient of its outputs (b, t, 3 width). The latter follows,
        back through time, from ``d`` (b, t, width), the gradient of the states. With h the previous state, i and s the
        maps' outputs, and gates as in ``nn.GRU``: r = sigmoid(i_r + s_r), z = sigmoid(i_z + s_z),
        n = tanh(i_n + r s_n), h' = n + z (h - n).
        """
        states = self(x)
        before = torch.cat([states.new_zeros(len(x), 1, self.width), states[:, :-1]], 1)
        of_x = F.linear(x, self.weight_ih_l0, self.bias_ih_l0).chunk(3, -1)
        of_h = F.linear(before, self.weight_hh_l0, self.bias_hh_l0).chunk(3, -1)
        r, z = ((a + b).sigmoid_() for a, b in zip(of_x[:2], of_h[:2], strict=True))
        n = (of_x[2] + r * of_h[2]).tanh_()
        to_n = (1 - z) * (1 - n * n)
        shares = torch.stack(
            [to_n * of_h[2] * r * (1 - r), (before - n) * z * (1 - z), to_n * r], 2
        )
        of_state, later = torch.empty_like(d), torch.zeros_like(d[:, 0])
        for t in range(d.shape[1] - 1, -1, -1):
            total = of_state[:, t].copy_(d[:, t]).add_(later)
            later = torch.addmm(
                total * z[:, t],
                (shares[:, t] * total.unsqueeze(1)).flatten(1),
                self.weight_hh_l0,
            )
        of_states = (shares * of_state.unsqueeze(2)).flatten(2)
        of_inputs = torch.cat([of_states[..., : 2 * self.width], to_n * of_state], -1)
        yield self.weight_ih_l0, self.bias_ih_l0, x, of_inputs
        yield self.weight_hh_l0, self.bias_hh_l0, before, of_states


class PictureConvolutions(nn.Module):
    """(b, c, [d,] h, w) -> (b, features): 3x3 convolutions to 16 and 32 channels, each with ReLU and pooling."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        make = convolution(is_volume(shape))
        self.conv1 = make(shape[0], 16, 3, padding=1)
        self.conv2 = make(16, 32, 3, padding=1)
        self.features = 32
        for side in shape[1:]:
            self.features *= side // 4

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.conv1, self.conv2):
            x = max_pool(layer(x), 2).relu()
        return x.flatten(1)


class Projection(nn.Sequential):
    """(b, features) -> (b, width): layers with ReLU and dropout; the last of several without them, as in the code."""

    def __init__(self, features: int, width: int, layers: int, dropout: float) -> None:
        parts: list[nn.Module] = []
        for _ in range(max(1, layers - 1)):
            parts += [
                nn.Linear(features, width),
                nn.ReLU(),
                *([nn.Dropout(dropout)] if dropout else []),
            ]
            features = width
        super().__init__(*parts, *([nn.Linear(width, width)] if layers > 1 else []))


class FusedAttention(nn.Module):
    """States (b, t, width), and which of them are real (b, t) -> (b, heads * width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, heads)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        behind = ~real.unsqueeze(1)
        scores = self.fc2(self.fc1(x).tanh()).mT
        weights = scores.masked_fill(behind, NO_ATTENTION).softmax(-1)
        # Without any real step the softmax is 1 / t everywhere; masked again, the sum is zero.
        fused: Tensor = weights.masked_fill(behind, 0.0) @ x
        return fused.flatten(1)


class Fusion(nn.Module):
    """FedAPM's network of encoders, attention and two fully connected layers.

    Blocks (C-APM's order): ``NAME_conv``, ``NAME_embedding`` or ``NAME_fc`` of each input; then its ``NAME_gru``, or a
    picture's ``NAME_fc``; then attention, fc1, fc2. A single input has no NAME: conv, gru, ...
    """

    def __init__(self, input_shape: Shape, classes: int, settings: SignalsSettings) -> None:
        super().__init__()
        s, width = settings, settings.width
        # Of each input: the prefix of its blocks' names, and its kind
        self.kinds: list[tuple[str, str]] = []
        second: dict[str, nn.Module] = {}
        for name, shape in inputs_of(input_shape).items():
            start, kind = f"{name}_" if name else "", kind_of(shape)
            self.kinds.append((start, kind))
            if kind == "table":
                self.add_module(
                    f"{start}fc", Projection(shape[0], width, s.projection, s.dropout)
                )
            elif kind == "text":
                self.add_module(
                    f"{start}embedding", nn.Embedding(shape[2], width, padding_idx=0)
                )
                second[f"{start}gru"] = Gru(width, width)
            elif kind == "signal":
                convolved = is_signal(shape) and shape[1] >= FEWEST_STEPS
                if convolved:
                    self.add_module(
                        f"{start}conv", SignalConvolutions(shape[0], s.filters, s.dropout)
                    )
                second[f"{start}gru"] = Gru(4 * s.filters if convolved else shape[0], width)
            else:
                if min(shape[1:]) < SMALLEST_SIDE:
                    raise UserError(
                        f"pictures of {shape[1:]} are too small: {SMALLEST_SIDE} pixels a side are needed"
                    )
                pictures = PictureConvolutions(shape)
                self.add_module(f"{start}conv", pictures)
                second[f"{start}fc"] = Projection(
                    pictures.features, width, s.projection, s.dropout
                )
        for name, module in second.items():
            self.add_module(name, module)
        self.attention = FusedAttention(width, s.heads)
        self.fc1 = nn.Linear(s.heads * width, LAST)
        self.fc2 = nn.Linear(LAST, classes)
        self.block_names = tuple(name for name, _ in self.named_children())
        self.dropout, self.has_dropout = s.dropout, s.dropout > 0

    def forward(self, x: Any) -> Tensor:
        inputs = (x,) if isinstance(x, Tensor) else x
        encoded = [
            self.encode_input(*kind, part)
            for kind, part in zip(self.kinds, inputs, strict=True)
        ]
        states, real = (torch.cat(parts, 1) for parts in zip(*encoded, strict=True))
        hidden = self.fc1(self.attention(states, real)).relu()
        hidden = F.dropout(hidden, self.dropout, self.training)
        logits: Tensor = self.fc2(hidden)
        return logits

    def encode_input(self, start: str, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states (b, t, width) of an input, and which of them are real, not padding (b, t)."""
        if kind in ("text", "signal"):
            real = real_steps(x)
            if kind == "text":
                x = self.get_submodule(f"{start}embedding")(x)
            else:
                if hasattr(self, f"{start}conv"):
                    x, real = self.get_submodule(f"{start}conv")(x, real)
                x = x.mT
            return self.get_submodule(f"{start}gru")(x), real
        real = (x != 0).flatten(1).any(1, keepdim=True)
        if kind != "table":
            x = self.get_submodule(f"{start}conv")(x)
        return self.get_submodule(f"{start}fc")(x).unsqueeze(1), real
