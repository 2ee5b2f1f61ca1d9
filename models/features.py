"""Features: the inputs of a network's last layer block, their class means, and the embedding rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from models.flat import FlatModel
from models.samples import Samples, halved_once


@contextmanager
def seen_features(model: FlatModel) -> Iterator[list[Tensor]]:
    """Context that yields a list, to which every forward pass appends its features."""
    seen: list[Tensor] = []
    hook = model.last_block.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].float())
    )
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def rows_looked_up(model: FlatModel) -> Iterator[dict[str, list[Tensor]]]:
    """Context that yields a list per trained embedding, by its weight's name.

    Every forward pass appends the rows that the embedding looks up, one for each position of a batch.
    """
    rows_of: dict[str, list[Tensor]] = {name: [] for name in model.embeddings}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, inputs, rows=rows_of[name]: rows.append(inputs[0].flatten())
        )
        for name, layer in model.embeddings.items()
    ]
    try:
        yield rows_of
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def features_at(model: FlatModel, vector: Tensor, x: Tensor) -> Tensor:
    """Return the features (b, K) of a batch under the parameters ``vector``; running statistics do not change."""
    named = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    with seen_features(model) as seen:
        functional_call(model.module, {**named, **model.layout.unflatten(vector)}, (x,))
    return seen[-1]


@torch.no_grad()
def compute_frozen(
    model: FlatModel, tensors: Mapping[str, Tensor], x: Any
) -> tuple[Tensor, Tensor]:
    """Return features and outputs of a batch under these tensors (``Layout.unflatten``), in evaluation mode."""

    def of(x: Any) -> tuple[Tensor, Tensor]:
        with seen_features(model) as seen:
            outputs = functional_call(model.module, dict(tensors), (x,))
        return seen[-1], outputs

    model.module.eval()
    try:
        return of(x) if model.private is None else model.private.by_chunk(of, x)
    finally:
        model.module.train()


@torch.no_grad()
def features(model: FlatModel, samples: Samples, index: Tensor) -> Tensor:
    """Return the last layer block's inputs for these samples, one row each. Only for networks without randomness."""

    def read_features(size: int) -> Tensor:
        with seen_features(model) as seen:
            for x, _ in samples.batches(torch.split(index, size)):
                model.module(x)
        return torch.cat(seen)

    return halved_once(samples.at_once, read_features)


def all_features(model: FlatModel, samples: Samples) -> Tensor:
    """Return the features (n, K) of a split, in evaluation mode."""
    model.module.eval()
    z = features(model, samples, torch.arange(len(samples), device=samples.index_device))
    model.module.train()
    return z


# ---- Sums of classes -----------------------------------------------------------------------------------------------


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
