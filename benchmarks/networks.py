"""Networks with batch normalisation for FedBN in docs/results.md: ``model = "benchmarks.networks:..."``.

The page's other networks for tables have none, and published networks with it are too large for hundreds of runs.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.shapes import Shape


class TableNorm(nn.Module):
    """Batch normalisation of the columns, then one linear layer: (batch, columns) -> (batch, outputs)."""

    block_names = ("norm", "linear")

    def __init__(self, columns: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(columns), nn.Linear(columns, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        return logits


class PictureNorm(nn.Module):
    """Two padded 3x3 convolutions (16, 32), each with batch normalisation, ReLU and 2x2 pooling, then FC 64."""

    block_names = ("conv1", "conv2", "fc1", "fc2")

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = shape
        for name, inputs, out in (("conv1", channels, 16), ("conv2", 16, 32)):
            layers = (
                nn.Conv2d(inputs, out, 3, padding=1),
                nn.BatchNorm2d(out),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.add_module(name, nn.Sequential(*layers))
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.fc2 = nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("conv2")(self.get_submodule("conv1")(x)).flatten(1)
        logits: Tensor = self.fc2(self.fc1(x).relu())
        return logits


def table(shape: Shape, outputs: int) -> nn.Module:
    """Return the network for a table's columns."""
    return TableNorm(int(shape[0]), outputs)


def picture(shape: Shape, outputs: int) -> nn.Module:
    """Return the network for pictures (channels, height, width)."""
    return PictureNorm(tuple(shape), outputs)
