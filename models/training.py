"""Local training on vectors: samples on the device, seeded batches, gradients, optimisers, evaluation.

The optimisers are our own few lines because their state must be explicit arrays and because ``torch.optim``
imports ``torch._dynamo`` on its first step, which costs every freshly started silo process about two seconds; tests
hold them equal to ``torch.optim``.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.flat import FlatModel, Together
from models.shapes import batch_type

Loss = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")

VOLUME_VALUES = 2**21  # of the volumes that are evaluated at once
TIME_STEPS = 2**15  # of the texts and signals that are evaluated at once
BYTE_MEAN = BYTE_STD = 127.5  # of pictures of bytes: (x / 255 - 0.5) / 0.5


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A random generator of its own for every (seed, silo, round, purpose), the same in every process."""
    text = "/".join(str(part) for part in (seed, *purpose))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def seed_dropout(rng: torch.Generator) -> None:
    """Set torch's global generators, which dropout draws from, to where ``rng`` started.

    As ``torch.manual_seed``, which takes a millisecond where there is no GPU.
    """
    torch.default_generator.manual_seed(rng.initial_seed())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(rng.initial_seed())


class Samples:
    """One split of a silo's data on its device, ready for batches.

    ``x`` is uint8 or float32, pictures (n, h, w, c), volumes (n, d, h, w, c), signals (n, t, c) or tables (n, columns),
    or int32, tokens (n, t); of several inputs an array (n,) with a field for each. ``y`` what the task has
    (models/tasks.py): int64 (n,) of classes, float32 (n, k) of numbers, uint8 (n, [d,] h, w) of masks, which become
    int64 per batch. Pictures of bytes become (x / 255 - 0.5) / 0.5 per batch (APPLE's normalisation), which keeps them
    at a quarter of the memory; float values are taken as they are, or standardised with ``mean`` and ``std`` (columns
    of all tables,), and labels with those in ``labels``. Of several inputs one that is all zeros is missing, and stays
    all zeros.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        device: torch.device | str = "cpu",
        mean: Tensor | None = None,
        std: Tensor | None = None,
        labels: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.y = _tensor(y.astype(_kept_as(y), copy=False), device)
        if labels[0] is not None and labels[1] is not None:
            self.y = (self.y - labels[0].to(device)) / labels[1].to(device)
        scale = None if mean is None or std is None else (mean.to(device), std.to(device))
        if not x.dtype.names:
            self.x: Tensor | tuple[Tensor, ...] = _tensor(x, device)
            if scale is not None:
                self.x = (self.x - scale[0]) / scale[1]
            return
        inputs, done = [_tensor(x[name], device) for name in x.dtype.names], 0
        self.missing = [_missing(part) for part in inputs]  # of each input (n,), or None where no sample lacks it
        for i, (part, missing) in enumerate(zip(inputs, self.missing, strict=True)):
            if scale is not None and part.dim() == 2 and part.is_floating_point():
                own, done = slice(done, done + part.shape[1]), done + part.shape[1]
                inputs[i] = (part - scale[0][own]) / scale[1][own]
                if missing is not None:
                    inputs[i][missing] = 0.0
        self.x = batch_type(x.dtype.names)(*inputs)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def at_once(self) -> int:
        """How many samples an evaluation takes at once: few where what networks make of them is large."""
        inputs = (self.x,) if isinstance(self.x, Tensor) else self.x
        return min(_at_once(part) for part in inputs)

    def take(self, index: Tensor | slice) -> tuple[Any, Tensor]:
        """A batch: x float32 (b, c, [d,] h, w) or (b, c, t) in channels-last memory, (b, columns), or int32 (b, t);
        of several inputs a named tuple of these; y (b, ...).

        ``index`` is on the device.
        """
        if isinstance(self.x, Tensor):
            return _as_networks_take(_rows(self.x, index)), self.labels(index)
        parts = [_as_networks_take(_rows(part, index)) for part in self.x]
        for stored, part, missing in zip(self.x, parts, self.missing, strict=True):
            if missing is not None and stored.dtype == torch.uint8:  # the others are zeros as they are
                part[missing[index]] = 0.0
        return type(self.x)(*parts), self.labels(index)

    def labels(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Labels as losses take them."""
        y = self.y[index]
        return y.long() if y.dtype == torch.uint8 else y


def _tensor(values: np.ndarray, device: torch.device | str) -> Tensor:
    with warnings.catch_warnings():  # memory-mapped arrays are read-only; nothing here writes to them
        warnings.filterwarnings("ignore", message=".*not writable.*")
        # Through a flat view: an axis of length 1 may carry any stride, and grey pictures would lose channels-last.
        return torch.from_numpy(np.ascontiguousarray(values)).flatten().view(values.shape).to(device)


def _missing(part: Tensor) -> Tensor | None:
    """Which samples (n,) of an input are all zeros; None where none is."""
    found = (part == 0).flatten(1).all(1)
    return found if bool(found.any()) else None


def _at_once(part: Tensor) -> int:
    if part.dim() == 5:
        return max(1, VOLUME_VALUES // math.prod(part.shape[1:]))
    in_time = part.dim() == 3 or not (part.is_floating_point() or part.dtype == torch.uint8)
    return min(512, max(1, TIME_STEPS // part.shape[1])) if in_time else 512


def _rows(part: Tensor, index: Tensor | slice) -> Tensor:
    """Samples of one input; index_select takes a tenth of the time of indexing, which looks at every value."""
    return part[index] if isinstance(index, slice) else part.index_select(0, index)


def _as_networks_take(x: Tensor) -> Tensor:
    """A batch of one input: bytes scaled, channels before places."""
    if x.dtype == torch.uint8:
        x = x.float().sub_(BYTE_MEAN).div_(BYTE_STD)
    return x.movedim(-1, 1) if x.dim() > 2 else x


def _kept_as(y: np.ndarray) -> type:
    """The number format of labels: numbers, masks, or classes."""
    return np.float32 if y.dtype.kind == "f" else np.uint8 if y.ndim > 1 else np.int64


def batches(
    n: int,
    size: int,
    epochs: int,
    rng: torch.Generator,
    *,
    merge_single: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Index tensors of shuffled mini-batches, every sample once per epoch, the last batch of an epoch smaller.

    They go to ``device`` once per epoch. ``merge_single`` joins a last batch of one sample to the batch before it
    (BatchNorm cannot train on one sample).
    """
    for _ in range(epochs):
        parts = list(torch.split(torch.randperm(n, generator=rng).to(device), size))
        if merge_single and len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        yield from parts


def loss_gradient(
    model: FlatModel, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None = None
) -> Tensor:
    """Fill ``model.gradient`` with the gradient of the mean loss of one batch; returns the loss (scalar tensor).

    ``network`` is the part of the model that is left to run, where ``x`` are features of the layers below it.
    """
    if model.together is not None:
        return model.together.gradient(x, y, loss, network)
    return own_gradient(model, x, y, loss, network)


def own_gradient(
    model: FlatModel, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None = None
) -> Tensor:
    """:func:`loss_gradient` of this model by itself."""
    with model.one_gradient():
        if isinstance(loss, OnFeatures):
            with seen_features(model) as found:
                logits = (network or model.module)(x)
            value = loss.of(logits, found[-1], y)
        else:
            value = loss((network or model.module)(x), y)
        value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


@dataclass(frozen=True)
class OnFeatures:
    """A loss ``of(logits, features, labels)``; features (b, K) are what the last layer block gets."""

    of: Callable[[Tensor, Tensor, Tensor], Tensor]


def feature_gradient(
    model: FlatModel, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor, Tensor], Tensor], *, alone: bool = False
) -> Tensor:
    """:func:`loss_gradient` of a loss of logits, features and labels, which may be another one in every silo.

    ``alone``: also where silos train together; for a loss that uses the model's parameters by itself.
    """
    # Of a network of its own, as it were: it cannot be joined with other silos'.
    return loss_gradient(model, x, y, OnFeatures(loss), nn.Sequential(model.module) if alone else None)


@contextmanager
def seen_features(model: FlatModel) -> Iterator[list[Tensor]]:
    """In which the features of every forward pass are added to the list that this yields."""
    found: list[Tensor] = []
    hook = model.last_block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def rows_looked_up(model: FlatModel) -> Iterator[dict[str, list[Tensor]]]:
    """In which the rows that every trained embedding looks up, one for each position of a batch, are added to the list
    under its weight's name.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in model.embeddings}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, rows=found[name]: rows.append(given[0].flatten()))
        for name, layer in model.embeddings.items()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def features_at(model: FlatModel, vector: Tensor, x: Tensor) -> Tensor:
    """The features (b, K) of a batch, by the network with these parameters; running statistics stay as they are."""
    named = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    with seen_features(model) as found:
        functional_call(model.module, {**named, **model.layout.unflatten(vector)}, (x,))
    return found[-1]


@torch.no_grad()
def features(model: FlatModel, samples: Samples, index: Tensor) -> Tensor:
    """What the last layer block gets for these samples, one row each. Only for networks without randomness."""
    with seen_features(model) as found:
        for part in torch.split(index, samples.at_once):
            model.module(samples.take(part)[0])
    return torch.cat(found)


def all_features(model: FlatModel, samples: Samples) -> Tensor:
    """The features (n, K) of a split, in evaluation mode."""
    model.module.eval()
    found = features(model, samples, torch.arange(len(samples), device=samples.y.device))
    model.module.train()
    return found


@torch.no_grad()
def by_batch(model: FlatModel, samples: Samples, batch_size: int, of: Callable[[Tensor, Tensor], T]) -> list[T]:
    """What ``of`` makes of the outputs and the labels of each batch of a split, in evaluation mode."""
    size = min(batch_size, samples.at_once)
    parts = (samples.take(slice(i, i + size)) for i in range(0, len(samples), size))
    model.module.eval()
    found = [of(model.module(x), y) for x, y in parts]
    model.module.train()
    return found


def predict(model: FlatModel, samples: Samples, batch_size: int = 512) -> Tensor:
    """Logits (n, classes) of a split, in evaluation mode."""
    parts = by_batch(model, samples, batch_size, lambda outputs, _: outputs)
    return torch.cat(parts) if parts else model.vector.new_empty(0, 1)


def clip_norm(gradient: Tensor, largest: float) -> None:
    """Shorten a gradient to this norm where it is longer; nothing is read from its device."""
    gradient.mul_((largest / gradient.norm().clamp(min=1e-12)).clamp(max=1.0))


class Optimizer(ABC):
    """Steps of a model's vector, element by element.

    So rows of several models, which have taken as many steps, can be one ``vector``.
    """

    only_where_gradient = False  # whether a number without a gradient stays as it is

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.state: dict[str, Tensor] = {}
        self.together: Together | None = None  # of the model whose parts it steps, where silos train together
        self.joined: tuple[Optimizer, int, int] | None = None  # of whose state this one's is a row: which, of how many

    def step(self, vector: Tensor, gradient: Tensor) -> None:
        if self.together is None:
            self.own_step(vector, gradient)
        else:
            self.together.step(self, vector, gradient)

    @abstractmethod
    def own_step(self, vector: Tensor, gradient: Tensor) -> None:
        """One step, in place."""

    @abstractmethod
    def form(self) -> tuple[float, ...]:
        """Equal for optimisers that do the same in their next step."""

    @abstractmethod
    def alike(self) -> Optimizer:
        """Another one of this form, without state."""


class Sgd(Optimizer):
    """v <- m v + (g + wd w); w <- w - lr v, as ``torch.optim.SGD`` without dampening."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(lr)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.only_where_gradient = not momentum and not weight_decay

    def form(self) -> tuple[float, ...]:
        return self.lr, self.momentum, self.weight_decay, len(self.state)

    def alike(self) -> Sgd:
        return Sgd(self.lr, self.momentum, self.weight_decay)

    @torch.no_grad()
    def own_step(self, vector: Tensor, gradient: Tensor) -> None:
        if self.weight_decay:
            gradient = gradient.add(vector, alpha=self.weight_decay)
        if self.momentum:
            velocity = self.state.get("momentum")
            if velocity is None:
                velocity = self.state["momentum"] = gradient.clone()
            else:
                velocity.mul_(self.momentum).add_(gradient)
            gradient = velocity
        vector.add_(gradient, alpha=-self.lr)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1) with L2 weight decay in the gradient; ``amsgrad`` keeps the largest v."""

    def __init__(
        self,
        lr: float,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(lr)
        self.weight_decay, self.amsgrad, self.betas, self.eps = weight_decay, amsgrad, betas, eps

    def form(self) -> tuple[float, ...]:
        steps = float(self.state["steps"]) if self.state else 0.0
        return self.lr, self.weight_decay, self.amsgrad, *self.betas, self.eps, steps, len(self.state)

    def alike(self) -> Adam:
        return Adam(self.lr, self.weight_decay, self.amsgrad, self.betas, self.eps)

    @torch.no_grad()
    def own_step(self, vector: Tensor, gradient: Tensor) -> None:
        if not self.state:
            self.state = {"steps": torch.zeros(()), "m": torch.zeros_like(vector), "v": torch.zeros_like(vector)}
            if self.amsgrad:
                self.state["v_max"] = torch.zeros_like(vector)
        if self.weight_decay:
            gradient = gradient.add(vector, alpha=self.weight_decay)
        beta1, beta2 = self.betas
        # Reading a count that is kept on a GPU would make every step wait for it.
        self.state["steps"] = self.state["steps"].cpu() + 1
        steps = self.state["steps"].item()
        m = self.state["m"].lerp_(gradient, 1 - beta1)
        v = self.state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.amsgrad:
            v = torch.maximum(self.state["v_max"], v, out=self.state["v_max"])
        denominator = v.sqrt().div_((1 - beta2**steps) ** 0.5).add_(self.eps)
        vector.addcdiv_(m, denominator, value=-self.lr / (1 - beta1**steps))


def make_optimizer(
    name: str, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, amsgrad: bool = False
) -> Optimizer:
    """The optimiser of that name (``sgd`` or ``adam``) without state."""
    if name == "sgd":
        return Sgd(lr, momentum, weight_decay)
    if name == "adam":
        return Adam(lr, weight_decay, amsgrad)
    raise ValueError(f"unknown optimizer '{name}': sgd, adam")
