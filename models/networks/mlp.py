"""Fully connected networks (multilayer perceptrons) and their settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from models.shapes import Shape
from partitions.common.errors import UserError
from partitions.common.settings import setting


class Mlp(nn.Module):
    """Fully connected layers with ReLU (and dropout) between them; pictures are flattened first.

    Blocks: fc1, fc2, ...; without hidden layers the network is multinomial logistic regression.
    """

    def __init__(
        self, input_shape: Shape, classes: int, hidden: tuple[int, ...], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.has_dropout = dropout > 0
        self.input_dimensions = len(input_shape)
        features = 1
        for side in input_shape:
            features *= side
        widths = (features, *hidden, classes)
        self.layers = tuple(f"fc{index}" for index in range(1, len(widths)))
        self.block_names = self.layers
        for name, inputs, outputs in zip(self.layers, widths[:-1], widths[1:], strict=True):
            self.add_module(name, nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(-self.input_dimensions)
        for name in self.layers[:-1]:
            x = self.get_submodule(name)(x)
            x = x.relu()
            if self.dropout:
                x = F.dropout(x, self.dropout, self.training)
        x = self.get_submodule(self.layers[-1])(x)
        return x


# Limits, because a silo builds the network from a server's settings
MOST_LAYERS = 8
MOST_UNITS = 10_000


@dataclass(frozen=True)
class MlpSettings:
    """Widths of the hidden layers, input to output, and the dropout after each of them."""

    hidden: str = setting("64", "widths of the hidden layers, e.g. '128,64'; '' for none")
    dropout: float = setting(
        0.0, "probability that a hidden unit is dropped", minimum=0, below=1
    )

    def __post_init__(self) -> None:
        self.widths()

    def widths(self) -> tuple[int, ...]:
        """Return ``hidden`` as integers. Raises UserError for too many, or for one that is not in the allowed range."""
        parts = [part.strip() for part in self.hidden.split(",") if part.strip()]
        widths = [
            part.isdecimal() and len(part) <= 5 and 0 < int(part) <= MOST_UNITS
            for part in parts
        ]
        if not all(widths) or len(parts) > MOST_LAYERS:
            limits = f"at most {MOST_LAYERS}, of at most {MOST_UNITS} each"
            raise UserError(
                f"mlp.hidden must be widths such as '128,64', not {self.hidden[:80]!r}: {limits}"
            )
        return tuple(int(part) for part in parts)
