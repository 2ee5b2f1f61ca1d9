"""Networks with batch normalisation for FedBN in docs/results.md: ``model = "benchmarks.networks:..."``.

The page's other networks for tables have none, and published networks with it are too large for hundreds of runs.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from models.shapes import Shape


class TableNorm(nn.Sequential):
    """Batch normalisation of the columns, then one linear layer: (batch, columns) -> (batch, outputs)."""

    block_names = ("norm", "linear")

    def __init__(self, columns: int, outputs: int) -> None:
        layers = OrderedDict(norm=nn.BatchNorm1d(columns), linear=nn.Linear(columns, outputs))
        super().__init__(layers)


class PictureNorm(nn.Sequential):
    """Two padded 3x3 convolutions (16, 32), each with batch normalisation, ReLU and 2x2 pooling, then FC 64."""

    block_names = ("conv1", "conv2", "fc1", "fc2")

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        channels, height, width = shape
        layers = OrderedDict[str, nn.Module](
            conv1=convolution(channels, 16),
            conv2=convolution(16, 32),
            flatten=nn.Flatten(),
            fc1=nn.Linear(32 * (height // 4) * (width // 4), 64),
            relu=nn.ReLU(),
            fc2=nn.Linear(64, outputs),
        )
        super().__init__(layers)


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def table(shape: Shape, outputs: int) -> nn.Module:
    """Return the network for a table's columns."""
    return TableNorm(int(shape[0]), outputs)


def picture(shape: Shape, outputs: int) -> nn.Module:
    """Return the network for pictures (channels, height, width)."""
    return PictureNorm(tuple(shape), outputs)
