"""Features: the inputs of a network's last layer block, their statistics, and the embedding rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from models.flat import FlatModel
from models.layout import Layout
from models.samples import Samples, halved_once
from partitions.common.errors import UserError

SHRINK = 1e-4  # of a covariance towards a multiple of I, and of class shares towards equal ones
GOLDEN = (math.sqrt(5) - 1) / 2
STEPS = 24  # of a search by golden sections


@contextmanager
def seen_features(model: FlatModel) -> Iterator[list[Tensor]]:
    """Context that yields a list, to which every forward pass appends its features."""
    found: list[Tensor] = []
    hook = model.last_block.register_forward_pre_hook(
        lambda _, inputs: found.append(inputs[0].float())
    )
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def rows_looked_up(model: FlatModel) -> Iterator[dict[str, list[Tensor]]]:
    """Context that yields a list per trained embedding, by its weight's name.

    Every forward pass appends the rows that the embedding looks up, one for each position of a batch.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in model.embeddings}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, rows=found[name]: rows.append(given[0].flatten())
        )
        for name, layer in model.embeddings.items()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def features_at(model: FlatModel, vector: Tensor, x: Tensor) -> Tensor:
    """Return the features (b, K) of a batch under the parameters ``vector``; running statistics do not change."""
    named = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    with seen_features(model) as found:
        functional_call(model.module, {**named, **model.layout.unflatten(vector)}, (x,))
    return found[-1]


@torch.no_grad()
def compute_frozen(
    model: FlatModel, tensors: Mapping[str, Tensor], x: Any
) -> tuple[Tensor, Tensor]:
    """Return features and outputs of a batch under these tensors (``Layout.unflatten``), in evaluation mode."""
    model.module.eval()
    try:
        with seen_features(model) as found:
            outputs = functional_call(model.module, dict(tensors), (x,))
    finally:
        model.module.train()
    return found[-1], outputs


@torch.no_grad()
def features(model: FlatModel, samples: Samples, index: Tensor) -> Tensor:
    """Return the last layer block's inputs for these samples, one row each. Only for networks without randomness."""

    def found(size: int) -> Tensor:
        with seen_features(model) as found:
            for x, _ in samples.batches(torch.split(index, size)):
                model.module(x)
        return torch.cat(found)

    return halved_once(samples.at_once, found)


def all_features(model: FlatModel, samples: Samples) -> Tensor:
    """Return the features (n, K) of a split, in evaluation mode."""
    model.module.eval()
    found = features(model, samples, torch.arange(len(samples), device=samples.index_device))
    model.module.train()
    return found


# ---- Statistics of features ----------------------------------------------------------------------------------------


def members(y: Tensor, classes: int) -> Tensor:
    """Return (n, C): 1 if a sample is of the class. (``one_hot`` would copy the labels from the device.)"""
    return (y[:, None] == torch.arange(classes, device=y.device)).float()


def class_sums(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return per class the sum of the features (C, K) and the number of samples (C,)."""
    mask = members(y, classes)
    return mask.to(z).T @ z, mask.sum(0)


def means_of(sums: Tensor, counts: Tensor) -> Tensor:
    """Return mean features (C, K); 0 for a class without samples."""
    return sums / counts.clamp_min(1)[:, None]


@dataclass(frozen=True)
class Gaussians:
    """Means of the classes μ (C, K) and the covariance S (K, K) of all, float64."""

    means: Tensor
    covariance: Tensor

    def packed(self) -> Tensor:
        """Return the means and the lower triangle, (CK + K (K + 1)/2,)."""
        size = len(self.covariance)
        rows, columns = torch.tril_indices(size, size, device=self.covariance.device)
        return torch.cat([self.means.flatten(), self.covariance[rows, columns]]).float()

    def is_positive(self) -> bool:
        """Return whether S has no negative eigenvalue, up to rounding."""
        values = torch.linalg.eigvalsh(self.covariance)
        return bool(values[0] >= -1e-6 * values[-1])

    def mixed(self, own: Gaussians, betas: Sequence[float]) -> Gaussians:
        return Gaussians(
            torch.lerp(self.means, own.means, betas[0]),
            torch.lerp(self.covariance, own.covariance, betas[1]),
        )


def read_gaussians(vector: Tensor, layout: Layout) -> Gaussians:
    """Return what :meth:`Gaussians.packed` wrote."""
    classes, features = layout.classes, layout.features
    means, lower = vector.double().tensor_split([classes * features])
    covariance = lower.new_zeros(features, features)
    rows, columns = torch.tril_indices(features, features, device=lower.device)
    covariance[rows, columns] = lower
    covariance[columns, rows] = lower
    return Gaussians(means.view(classes, features), covariance)


def packed_size(layout: Layout) -> int:
    """Return CK + K (K + 1)/2."""
    features = layout.features
    return layout.classes * features + features * (features + 1) // 2


def estimates(z: Tensor, y: Tensor, shared: Tensor, ridge: float) -> Gaussians:
    """Return μ_l and S_l of features (n, K), float64. ``shared``: μ_g (C, K)."""
    sums, counts = class_sums(z, y, len(shared))
    means = torch.where(counts[:, None] > 0, means_of(sums, counts), shared)
    apart = z - means[y]
    covariance = apart.T @ apart / max(len(z) - 1, 1)
    return Gaussians(means, covariance + ridge * z.new_ones(z.shape[1]).diag())


def discriminant(of: Gaussians, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (C, K) and b (C,) of h. ``shares``: π_i (C,). Raises UserError where S is no covariance."""
    s, k = of.covariance, len(of.covariance)
    shrunk = (1 - SHRINK) * s + SHRINK * s.trace() / k * s.new_ones(k).diag()
    root, fault = torch.linalg.cholesky_ex(shrunk)
    if fault:
        raise UserError(
            "the covariance of the features has no inverse; start from another seed"
        )
    weight = torch.cholesky_solve(of.means.T, root).T
    return weight, shares.log() - (of.means * weight).sum(1) / 2


def halves(y: Tensor, classes: int) -> Tensor:
    """Return bool (n,): every second sample of each class, in their order."""
    mask = members(y, classes)
    return (mask.cumsum(0) * mask).sum(1) % 2 == 0


def least(value: Callable[[float], float]) -> float:
    """Return the argmin over [0, 1] by golden sections."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, b) if value(a) <= value(b) else (a, high)
    return min((low, high, (low + high) / 2), key=value)
