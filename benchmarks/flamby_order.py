"""What the order of batches makes of two of FLamby's cells, by a loop that trains without silofl.

    SILOFL_DATA=DIR python -m benchmarks.flamby_order      Local and FedAdagrad on Fed-TCGA-BRCA, five seeds: a minute

The loop has FLamby's network, loss, settings and order of batches, which is torch's loader's under the seed; then other
orders, from the same initial weights. For Local, seed 42 has FLamby's published digits in all six regions.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import table
from benchmarks.flamby import BRCA, SEEDS
from models.tasks.survival import Survival
from partitions.datasets.registry import load_dataset

OTHERS = (100, 200)  # added to the seed, once the initial weights are drawn


class Region:
    """A region's batches without end, in torch's order, and its test part."""

    def __init__(self, train: TensorDataset, test: tuple[Tensor, Tensor]) -> None:
        self.loader = DataLoader(train, batch_size=BRCA.settings["batch-size"], shuffle=True)
        self.size, self.test = len(train), test
        self.batches = iter(self.loader)  # before the seed is set, as FLamby's

    def next(self) -> list[Tensor]:
        """Return the next batch, of a new epoch where one has ended."""
        batch: list[Tensor] | None = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch

    def score(self, network: nn.Module) -> float:
        with torch.no_grad():
            return Survival().measure(network(self.test[0]), self.test[1])["c_index"]


def regions() -> list[Region]:
    """Return the six regions, with y (n, 2) of time and event."""
    data = load_dataset("tcga-brca")
    assert data.groups is not None
    parts = [(torch.tensor(part.x), torch.tensor(part.y)) for part in (data.train, data.test)]
    first, result = len(parts[0][0]), []
    for rows in data.groups.values():
        train, test = rows[rows < first], rows[rows >= first] - first
        x, y = parts[1]
        result.append(
            Region(TensorDataset(*(of[train] for of in parts[0])), (x[test], y[test]))
        )
    return result


def step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    """Take a step on FLamby's loss: Cox's divided by the samples, ties in an arbitrary order."""
    x, y = batch
    order = torch.argsort(y[:, 0], descending=True, stable=True)
    s = network(x)[order, 0]
    s = s - s.max()
    optimizer.zero_grad()
    (-(s - s.exp().cumsum(0).log()) * y[order, 1]).mean().backward()
    optimizer.step()


def local(order: int, network: nn.Module) -> list[float]:
    """Return each region's C-index of its own network: 30 epochs of Adam."""
    result = []
    for region in regions():
        model = copy.deepcopy(network)
        torch.manual_seed(order)
        settings = BRCA.cells["local"].settings
        optimizer = torch.optim.Adam(model.parameters(), lr=settings["learning-rate"])
        for _ in range(settings["local-epochs"]):
            for batch in region.loader:
                step(model, optimizer, batch)
        result.append(region.score(model))
    return result


@torch.no_grad()
def fedadagrad(order: int, network: nn.Module) -> list[float]:
    """Return each region's C-index of the shared network: 5 rounds of 100 steps of SGD."""
    settings = BRCA.cells["fedadagrad"].settings
    beta, tau, rate = (
        settings[f"fedadagrad.{name}"] for name in ("beta-1", "tau", "server-learning-rate")
    )
    every = regions()
    samples = sum(region.size for region in every)
    torch.manual_seed(order)
    x = nn.utils.parameters_to_vector(network.parameters())
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(BRCA.settings["rounds"]):
        mean = torch.zeros_like(x)
        for region in every:
            model = copy.deepcopy(network)
            optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning-rate"])
            with torch.enable_grad():
                for _ in range(100):
                    step(model, optimizer, region.next())
            change = nn.utils.parameters_to_vector(model.parameters()) - x
            mean += change * region.size / samples
        m, v = beta * m + (1 - beta) * mean, v + mean**2
        x = x + rate * m / (v.sqrt() + tau)
        nn.utils.vector_to_parameters(x, network.parameters())
    return [region.score(network) for region in every]


def row(name: str, train: Callable[[int, nn.Module], list[float]], other: int) -> list[str]:
    """Return a row of the table: the mean over regions, and each region, over seeds."""
    scores = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        scores.append(train(seed + other, nn.Linear(BRCA.columns, 1)))
    means = [statistics.fmean(values) for values in scores]
    return [
        name,
        f"seed + {other}" if other else "FLamby's",
        f"{statistics.fmean(means):.3f} ({statistics.stdev(means):.3f})",
        " ".join(f"{value:.4f}" for value in scores[0]),
        " ".join(f"{value:.3f}" for value in np.mean(scores, axis=0)),
    ]


def main() -> int:
    torch.set_num_threads(1)
    rows = [
        row(train.__name__, train, other)
        for train in (local, fedadagrad)
        for other in (0, *OTHERS)
    ]
    print(table(rows, ["method", "order", "C-index", "regions, seed 42", "regions, mean"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
