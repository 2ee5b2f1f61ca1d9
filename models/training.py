"""Local training on vectors: generators, seeded batches, gradients, evaluation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from models.features import seen_features
from models.flat import FlatModel
from models.graphs import graph_of
from models.samples import Samples, halved_once

Loss = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")


class MeanLoss:
    """Running mean of the losses of a training; nothing is read from the device before the end."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.steps = 0

    def add(self, loss: Tensor) -> None:
        self.total, self.steps = self.total + loss, self.steps + 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a separate random generator for every (seed, silo, round, purpose), the same in every process."""
    text = "/".join(str(part) for part in (seed, *purpose))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def seed_torch(rng: torch.Generator) -> None:
    """Set torch's global generators, which initial weights and dropout draw from, to the initial seed of ``rng``.

    Replaces ``torch.manual_seed``, which without a GPU stores a stack trace at each call and takes a millisecond.
    """
    torch.default_generator.manual_seed(rng.initial_seed())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(rng.initial_seed())


def count_batches(n: int, size: int, least: int = 1) -> int:
    """Return how many batches an epoch of :func:`batches` has."""
    count, last = -(-n // size), n % size or size
    return count - (count > 1 and last < least)


def batches(
    n: int,
    size: int,
    epochs: int,
    rng: torch.Generator,
    *,
    least: int = 1,
    device: torch.device | str = "cpu",
    weights: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield index tensors of shuffled mini-batches: every sample once per epoch, the last batch may be smaller.

    With ``weights`` (n,) as many samples are drawn, with replacement, as torch's WeightedRandomSampler does.

    They are copied to ``device`` once per epoch. A last batch of fewer than ``least`` samples joins the one before it.
    """
    for _ in range(epochs):
        if weights is None:
            order = torch.randperm(n, generator=rng)
        else:
            order = torch.multinomial(weights, n, replacement=True, generator=rng)
        parts = list(torch.split(order.to(device), size))
        if len(parts) > 1 and len(parts[-1]) < least:
            parts[-2:] = [torch.cat(parts[-2:])]
        yield from parts


def loss_gradient(
    model: FlatModel,
    x: Any,
    y: Tensor,
    loss: Loss | OnFeatures,
    network: nn.Module | None = None,
) -> Tensor:
    """Fill ``model.gradient`` with the gradient of the mean loss of one batch; return the loss (scalar tensor).

    ``network``: the upper part of the model to run, where ``x`` holds features of the layers below it.
    """
    if model.private is not None:
        return model.private.gradient(x, y, loss, network)
    return own_gradient(model, x, y, loss, network)


def own_gradient(
    model: FlatModel,
    x: Any,
    y: Tensor,
    loss: Loss | OnFeatures,
    network: nn.Module | None = None,
) -> Tensor:
    """Compute :func:`loss_gradient` without privacy."""
    if network is None and (
        graph := graph_of(model, x, y, loss, partial(_gradient, model, loss))
    ):
        return graph.replay(x, y)
    buffers = (model.buffers.clone(), model.integers.clone()) if model.scale.used else ()
    while True:
        value = _gradient(model, loss, x, y, network)
        if not model.scale.must_repeat(model.gradient):
            return value
        model.load(model.vector, *buffers)


def _gradient(
    model: FlatModel,
    loss: Loss | OnFeatures,
    x: Any,
    y: Tensor,
    network: nn.Module | None = None,
) -> Tensor:
    """Write a batch's gradient, clipped where the run says so; return the mean loss."""
    with model.one_gradient():
        least = 2 if model.has_batch_norm else 1
        add = partial(_add_gradients, model, loss, network, y, least)
        if (group := model.passes.group) is None:
            value = add(x, y)
        else:
            value = group.gradient(model, parts_of(x, y, group.size, least), add)
        if model.scale.factor != 1:
            model.gradient.div_(model.scale.factor)
        if model.passes.clip:
            clip_norm(model.gradient, model.passes.clip)
    return value


def _add_gradients(
    model: FlatModel,
    loss: Loss | OnFeatures,
    network: nn.Module | None,
    batch: Tensor,
    least: int,
    x: Any,
    y: Tensor,
) -> Tensor:
    """Add the gradient of each part of samples, times the loss scale; return their part of the mean loss.

    ``batch``: the labels of the whole batch, of which they are all or some.
    """
    total: Tensor | float = 0.0
    for own_x, own_y in parts_of(x, y, model.passes.parts, least):
        if isinstance(loss, OnFeatures):
            with seen_features(model) as seen:
                logits = (network or model.module)(own_x)
            value = loss.of(logits, seen[-1], own_y)
        else:
            value = loss((network or model.module)(own_x), own_y)
        if len(own_y) < len(batch):
            value = value * share_of(own_y, batch, model.passes.weights)
        total = total + value.detach()
        if model.scale.used:
            value = value * model.scale.factor
        value.backward()  # type: ignore[no-untyped-call]
    return total  # type: ignore[return-value]


def parts_of(x: Any, y: Tensor, parts: int, least: int) -> list[tuple[Any, Tensor]]:
    """Return a batch in this number of parts of nearly equal size, or in fewer, of at least ``least`` samples each."""
    if (parts := min(parts, len(y) // least)) <= 1:
        return [(x, y)]
    indices = torch.tensor_split(torch.arange(len(y), device=y.device), parts)
    return [(rows(x, index), y[index]) for index in indices]


def share_of(part: Tensor, y: Tensor, weights: Tensor | None) -> Tensor | float:
    """Return what the mean loss of a part counts as in that of the batch: its share of the samples, or of weights."""
    return len(part) / len(y) if weights is None else weights[part].sum() / weights[y].sum()


def rows(x: Any, index: Tensor) -> Any:
    """Return these records of a batch, which may have several inputs."""
    if isinstance(x, Tensor):
        return x[index]
    return type(x)(*(part[index] for part in x))


@dataclass(frozen=True)
class OnFeatures:
    """A loss ``of(logits, features, labels)``; features (b, K) are the inputs of the last layer block."""

    of: Callable[[Tensor, Tensor, Tensor], Tensor]


def feature_gradient(
    model: FlatModel, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute :func:`loss_gradient` of a loss of logits, features and labels, which may differ between silos."""
    return loss_gradient(model, x, y, OnFeatures(loss))


class Beside(tuple[Tensor, ...]):
    """A batch's inputs, and before them fixed numbers (b, n) of each record."""

    def __new__(cls, *parts: Tensor) -> Beside:
        return super().__new__(cls, parts)


class TaughtNetwork(nn.Module):
    """A network with outputs (b, ...), which are flattened, beside the fixed numbers of each record."""

    def __init__(self, module: nn.Module, several: type[Any] | None) -> None:
        super().__init__()
        self.module, self.several = module, several  # the type of several inputs

    def forward(self, x: Beside) -> Tensor:
        fixed, *inputs = x
        outputs = self.module(self.several(*inputs) if self.several else inputs[0])
        self.shape = outputs.shape[1:]
        return torch.cat([outputs.flatten(1), fixed], 1)


def taught_gradient(
    model: FlatModel,
    x: Any,
    y: Tensor,
    taught: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute :func:`loss_gradient` of a loss of outputs, features, ``taught`` and labels.

    ``taught`` (b, n) are fixed numbers of each record, such as another network's outputs. They go through the network's
    inputs and outputs, so that a private gradient is of each record with its own.
    """
    single = isinstance(x, Tensor)
    network = TaughtNetwork(model.module, None if single else type(x))

    def of(both: Tensor, features: Tensor, y: Tensor) -> Tensor:
        outputs, fixed = both.tensor_split([both.shape[1] - taught.shape[1]], 1)
        return loss(outputs.reshape(-1, *network.shape), features, fixed, y)

    inputs = (x,) if single else x
    return loss_gradient(model, Beside(taught, *inputs), y, OnFeatures(of), network)


class Network(Protocol):
    """A source of outputs: a model, or several models whose outputs are mixed."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def vector(self) -> Tensor: ...


@torch.no_grad()
def by_batch(
    model: Network, samples: Samples, batch_size: int, of: Callable[[Tensor, Tensor], T]
) -> list[T]:
    """Apply ``of`` to the outputs and the labels of each batch of a split, in evaluation mode.

    If memory runs out, all is done once more, in batches of half the size.
    """
    model.module.eval()

    def read_batches(size: int) -> list[T]:
        parts = samples.batches(samples.in_order(size))
        window = samples.window
        return [
            of(model.module(x) if window is None else window(model.module, x), y)
            for x, y in parts
        ]

    try:
        return halved_once(min(batch_size, samples.at_once), read_batches)
    finally:
        model.module.train()


def predict(model: Network, samples: Samples, batch_size: int = 512) -> Tensor:
    """Return the logits (n, classes) of a split, in evaluation mode."""
    parts = by_batch(model, samples, batch_size, lambda outputs, _: outputs)
    return torch.cat(parts) if parts else model.vector.new_empty(0, 1)


def clip_norm(gradient: Tensor, largest: float) -> None:
    """Clip a gradient to the norm ``largest``, in place; nothing is read from its device."""
    gradient.mul_((largest / gradient.norm().clamp(min=1e-12)).clamp(max=1.0))


def threads_for(threads: int) -> int:
    """Return the run's number of threads, on which sums depend; with 0 OMP_NUM_THREADS, or else all cores.

    Silos that share a machine set OMP_NUM_THREADS to their share of the cores: twelve silos with all cores each would
    mostly wait for one another.
    """
    return threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or os.cpu_count() or 1


def use_threads(threads: int, tf32: str = "auto", *, deterministic: bool = False) -> None:
    """Set this process's number of threads to :func:`threads_for` this setting, and how exact a GPU computes.

    ``tf32``: products of matrices, and convolutions, in TF32: ``on``, ``off``, or ``auto``: torch's default, which is
    convolutions alone.
    """
    torch.set_num_threads(threads_for(threads))
    torch.backends.cuda.matmul.allow_tf32 = tf32 == "on"
    torch.backends.cudnn.allow_tf32 = tf32 != "off"
    torch.backends.cudnn.deterministic = deterministic
    if deterministic != torch.are_deterministic_algorithms_enabled():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)
