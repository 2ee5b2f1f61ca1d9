"""Batched computations for the vectorized engine: gradients, optimiser steps and metrics of many silos at once.

* Gradients (same part of the network, same sample shape, same loss) by ``torch.func.vmap``. Short batches are padded
  with samples that the loss ignores. The trained parameters may differ: the gradient covers every parameter that any
  silo trains, and each silo receives its part. Losses on features may differ, too: the outputs are computed jointly,
  and each loss from its silo's part of them.
* Steps on rows of the (silos x Σ) matrices, as many as fit in the cache; the silos' moments are rows of matrices, too.
* Metrics: the outputs jointly; for classifiers the metrics jointly, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from models.flat import FlatModel
from models.metrics import IGNORED
from models.optimizers import Optimizer
from models.tasks import Task
from models.training import Loss, OnFeatures, Samples, own_gradient, predict

# Measured on a CPU (benchmarks/README.md). A joint computation has an overhead of a few gradients' time. Its arithmetic
# is slower than sequential computation, where each network stays in the cache from step to step.
LARGEST_BATCH = 600_000  # parameters times samples
LARGEST_STEP = 100_000  # parameters of all silos that step at once


class Request(NamedTuple):
    """Request for a batch's gradient by the network in this row. Requests of one ``kind`` can be joined."""

    silo: int
    row: int
    networks: Networks
    x: Tensor
    y: Tensor
    loss: Loss | OnFeatures
    network: nn.Module | None
    kind: Hashable

    def by_itself(self) -> Tensor:
        return own_gradient(self.networks.models[self.row], self.x, self.y, self.loss, self.network)


class Step(NamedTuple):
    """Request for an optimiser's step on a part of a row."""

    silo: int
    row: int
    networks: Networks
    optimizer: Optimizer
    part: slice
    kind: Hashable

    def by_itself(self) -> None:
        networks, part = self.networks, self.part
        self.optimizer.joined = None
        self.optimizer.own_step(networks.vectors[self.row, part], networks.gradients[self.row, part])


class Evaluation(NamedTuple):
    """Request for the metrics of the network in this row."""

    silo: int
    row: int
    networks: Networks
    task: Task
    samples: Samples
    kind: Hashable

    def by_itself(self) -> dict[str, float]:
        return self.task.own_evaluate(self.networks.models[self.row], self.samples)


class Networks:
    """Copies of one network. Their vectors and gradients are the rows of two matrices (silos, Σ)."""

    def __init__(self, shared: FlatModel, count: int) -> None:
        self.vectors = shared.vector.new_zeros(count, shared.layout.size)
        self.gradients = torch.zeros_like(self.vectors)
        rows = zip(self.vectors, self.gradients, strict=True)
        self.models = [FlatModel(copy.deepcopy(shared.module), shared.device, row) for row in rows]
        self.entries, self.last_name = shared.layout.parameters, shared.head_name
        self.whole, self.last = JointForm(shared.module, self.last_name), JointForm(shared.last_block)
        on_cpu = shared.device.type == "cpu"
        self.largest: float = LARGEST_BATCH if on_cpu else math.inf
        self.largest_step: float = LARGEST_STEP if on_cpu else math.inf

    def incompatibility(self, row: int, x: Any, y: Tensor, network: nn.Module | None) -> str:
        """Return why this batch cannot be joined with others; empty if it can."""
        model = self.models[row]
        if not isinstance(x, Tensor):
            return "samples of several inputs are not joined"
        if network not in (None, model.module, model.last_block):
            return "a method runs a part of the network that only it knows"
        size = model.head.stop - model.head.start if network is model.last_block else model.layout.size
        if size * len(y) > self.largest:
            return f"on a CPU, batches of over {self.largest // size:.0f} samples are not faster together"
        return ""

    def kind(self, row: int, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> Hashable:
        """Return a key that is equal for requests that can be joined."""
        form = id(self), network is self.models[row].last_block, x.shape[1:], x.dtype
        if isinstance(loss, OnFeatures):  # each silo's own loss, of its own part of the outputs
            return *form, OnFeatures, None
        return *form, loss, None if ignores_padding(loss) else len(y)

    def chosen(self, requests: Sequence[Request | Evaluation]) -> Any:
        """Return the index of the requests' rows: a slice for contiguous rows, else a tensor."""
        rows = [request.row for request in requests]
        neighbours = rows == list(range(rows[0], rows[-1] + 1))
        return slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows)

    def values(self, vectors: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Return the parameters (silos, ...) by name without ``prefix``, as views of these vectors (silos, Σ)."""
        return {
            entry.name.removeprefix(prefix): vectors[:, entry.start : entry.stop].view(len(vectors), *entry.shape)
            for entry in self.entries
            if entry.name.startswith(prefix)
        }

    def gradient(self, requests: Sequence[Request]) -> list[Tensor]:
        """Compute the gradients of requests of one kind, and return their losses."""
        first, chosen = requests[0], self.chosen(requests)
        only_last = first.network is self.models[first.row].last_block
        outputs, prefix = (self.last, f"{self.last_name}.") if only_last else (self.whole, "")
        values = self.values(self.vectors[chosen], prefix)
        # Parameters that any silo trains, and the rows of silos that do not train them.
        trained, frozen = [], []
        for i, entry in enumerate(self.entries):
            if entry.name.startswith(prefix):
                asked = [self.models[request.row].parameters[i].requires_grad for request in requests]
                if any(asked):
                    trained.append((entry, values[entry.name.removeprefix(prefix)].requires_grad_()))
                    frozen += [(entry, r.row) for r, wanted in zip(requests, asked, strict=True) if not wanted]
        x = pad_sequence([request.x for request in requests], batch_first=True)
        y = pad_sequence([request.y for request in requests], batch_first=True, padding_value=IGNORED)
        logits, features = outputs(values, x)
        if isinstance(first.loss, OnFeatures):
            losses = torch.stack(
                [
                    request.loss.of(logits[i, : len(request.y)], features[i, : len(request.y)], request.y)
                    for i, request in enumerate(requests)
                    if isinstance(request.loss, OnFeatures)
                ]
            )
        else:
            losses = joint_losses(first.loss, logits, y)
        # The rows are independent, so a row of the sum's gradient is the gradient of the row's own loss.
        grads = torch.autograd.grad(losses.sum(), [value for _, value in trained])
        if len(trained) < len(self.entries):
            self.gradients[chosen] = 0.0
        for (entry, _), grad in zip(trained, grads, strict=True):
            self.gradients[chosen, entry.start : entry.stop] = grad.flatten(1)
        for entry, row in frozen:
            self.gradients[row, entry.start : entry.stop] = 0.0
        return list(losses.detach().unbind())

    def step(self, requests: Sequence[Step]) -> None:
        """Execute the steps of optimisers of one form on the same part of contiguous rows.

        Their states become rows of a joint optimiser's state, as long as the same optimisers step together.
        """
        optimizers, first = [request.optimizer for request in requests], requests[0]
        n = len(requests)
        rows = slice(first.row, first.row + n)
        known = first.optimizer.joined
        joint = known[0] if known else None
        if joint is None or [o.joined for o in optimizers] != [(joint, i, n) for i in range(n)]:
            joint = first.optimizer.empty_copy()
            for name, value in first.optimizer.state.items():
                joint.state[name] = torch.stack([o.state[name] for o in optimizers]) if value.dim() else value
            for optimizer in optimizers:
                optimizer.joined = None
        joint.own_step(self.vectors[rows, first.part], self.gradients[rows, first.part])
        for i, optimizer in enumerate(optimizers):
            if optimizer.joined is None:
                optimizer.joined = joint, i, n
                optimizer.state = {name: value[i] if value.dim() else value for name, value in joint.state.items()}
            elif "steps" in joint.state:
                optimizer.state["steps"] = joint.state["steps"]

    @torch.no_grad()
    def evaluate(self, requests: Sequence[Evaluation]) -> list[dict[str, float]]:
        """Return the metrics of requests of one kind, whose inputs have one shape."""
        lengths = [len(request.samples) for request in requests]
        at_once = requests[0].samples.at_once
        if max(lengths) > at_once or max(lengths) * self.vectors.shape[1] > self.largest:
            outputs = [predict(self.models[request.row], request.samples) for request in requests]
        else:
            x = pad_sequence([request.samples.take(slice(None))[0] for request in requests], batch_first=True)
            self.whole.network.eval()
            padded, _ = self.whole(self.values(self.vectors[self.chosen(requests)]), x)
            self.whole.network.train()
            outputs = [of_one[:length] for of_one, length in zip(padded, lengths, strict=True)]
        labels, task = [request.samples.labels() for request in requests], requests[0].task
        if all(request.task == task for request in requests):
            return task.measure_all(outputs, labels)
        return [request.task.measure(o, y) for request, o, y in zip(requests, outputs, labels, strict=True)]


class JointLinear(nn.Linear):
    """Linear layers of many silos: x (silos, b, inputs), weight (silos, outputs, inputs), bias (silos, outputs)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class JointForm:
    """Joint forward pass of many copies of a network: outputs (silos, b, C) and features (silos, b, K).

    The parameters are passed by name, each (silos, ...); the features are the input of ``head``. The forward pass uses
    vmap. A network that accepts any leading dimensions uses batched linear layers instead: half the time for few silos.
    """

    def __init__(self, network: nn.Module, head: str = "") -> None:
        self.network, self.head = network, head
        self.run = vmap(self._run)
        if type(network) is nn.Linear or getattr(network, "any_batch", False):
            self.network = copy.deepcopy(network)
            for layer in self.network.modules():
                if type(layer) is nn.Linear:
                    layer.__class__ = JointLinear
            self.run = self._run

    def __call__(self, values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.run(values, x)
        return found

    def _run(self, values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        hook = self.network.get_submodule(self.head).register_forward_pre_hook(lambda _, given: found.append(given[0]))
        try:
            return functional_call(self.network, values, (x,)), found[-1]
        finally:
            hook.remove()


def joint_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of each silo (silos,) from outputs (silos, b, C) and labels (silos, b)."""
    if loss is F.cross_entropy:  # the same result as vmap in half the time for few silos
        each = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORED)
        return each.view(y.shape).sum(1) / (y != IGNORED).sum(1)
    losses: Tensor = vmap(loss)(outputs, y)
    return losses


@lru_cache(maxsize=256)
def ignores_padding(loss: Loss) -> bool:
    """Return whether a sample with the ignored label leaves this loss unchanged."""
    logits, y = torch.tensor([[0.5, -1.0], [2.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1, IGNORED])
    try:
        return torch.equal(loss(logits, y), loss(logits[:2], y[:2]))
    except Exception:
        return False
