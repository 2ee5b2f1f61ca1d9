"""A model as one vector.

All trainable parameters of a module live in one contiguous float32 tensor; every ``nn.Parameter`` is a view into
it and every ``.grad`` a view into one gradient vector. Aggregation, distances, mixing, proximal terms and
element-wise weights are then one or two vector operations, and methods handle no dictionaries of tensors.
Floating-point buffers (BatchNorm statistics) are a second vector. Integer buffers and frozen parameters
(models/trainable.py) stay in the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.layout import Layout, _blocks, _entries, frozen_modules
from models.lora import merged
from partitions.common.errors import UserError


class PrivateGradient(Protocol):
    """Backend that clips gradients and adds noise (strategies/base/privacy/training.py)."""

    def gradient(self, x: Any, y: Tensor, loss: Any, network: nn.Module | None) -> Tensor: ...


class FlatModel:
    """A module whose parameters are views into ``vector`` and whose gradients are views into ``gradient``.

    ``vector`` and ``gradient`` have shape (Σ,), ``buffers`` (number of floating-point buffer scalars,); all three
    are float32 and stay the same storage for the life of the object: load with :meth:`load`, never rebind.
    """

    private: PrivateGradient | None = None  # set while gradients must be private

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device=device, dtype=torch.float32)
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        frozen = frozen_modules(module)
        kept = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        buffers = [(n, b) for n, b in kept if n.rpartition(".")[0] not in frozen]
        entries = _entries(parameters)
        self.parameters = [p for _, p in parameters]
        batch_norms = [n for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        norms = tuple(n for n in batch_norms if n not in frozen)
        self.layout = Layout(entries, _entries(buffers), _blocks(module, entries), norms)
        self.vector = torch.cat([p.detach().reshape(-1) for _, p in parameters])
        self.gradient = torch.zeros_like(self.vector)
        self.buffers = torch.cat([b.reshape(-1) for _, b in buffers] or [self.vector.new_empty(0)])
        for entry, (_, parameter) in zip(entries, parameters, strict=True):
            parameter.data = self.vector[entry.start : entry.stop].view(entry.shape)
            parameter.grad = self.gradient[entry.start : entry.stop].view(entry.shape)
        for entry in self.layout.buffers:
            owner, _, leaf = entry.name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = self.buffers[entry.start : entry.stop].view(entry.shape)
        self._initial_buffers = self.buffers.clone()
        # The head maps features to logits: the last block, or a method's own head of several blocks.
        self.head_name: str = getattr(module, "head_name", self.layout.blocks[-1].name)
        self.last_block = module.get_submodule(self.head_name)
        inside = [b for b in self.layout.blocks if f"{b.name}.".startswith(f"{self.head_name}.")]
        self.head = slice(inside[0].start, inside[-1].stop)
        self._watch_embeddings()
        # Dropout is a module, or a call in the forward pass of a network, which then sets ``has_dropout``.
        self.has_dropout = getattr(module, "has_dropout", False) or any(
            isinstance(m, nn.modules.dropout._DropoutNd) for m in module.modules()
        )
        self.has_batch_norm = bool(norms)
        self.is_whole = len(parameters) == len(list(module.parameters()))  # nothing is frozen

    def _watch_embeddings(self) -> None:
        """Record which rows of the embeddings get a gradient, so that a step updates these rows only."""
        self.embeddings = {  # of words; without the embeddings of classes in a method's own head
            f"{name}.weight": layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, nn.Embedding)
            and layer.weight.requires_grad
            and not name.startswith(f"{self.head_name}.")
        }
        for name, layer in self.embeddings.items():
            # A sparse gradient adds only the rows that a batch looked up, in place; a dense one has the table's size.
            # On a GPU the dense one is cheap, and sums each row in a fixed order.
            layer.sparse = self.vector.device.type == "cpu" and not layer.scale_grad_by_freq
            layer.weight.register_hook(partial(self._note_rows, name))  # type: ignore[no-untyped-call]
        tables = [slice(e.start, e.stop) for e in self.layout.parameters if e.name in self.embeddings]
        starts, stops = [0, *(t.stop for t in tables)], [*(t.start for t in tables), self.layout.size]
        self._others = [slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b]  # all but embeddings
        # Rows of embeddings with a gradient (None: any may have one); the gradient's version after ``one_gradient``.
        self._rows: dict[str, list[Tensor]] | None = None
        self._known = -1

    @property
    def device(self) -> torch.device:
        return self.vector.device

    def load(self, vector: Tensor, buffers: Tensor | None = None) -> None:
        """Copy a vector of shape (Σ,), and buffers where given, into the model. Raises UserError on a wrong length."""
        if vector.shape != self.vector.shape:
            raise UserError(f"a model of {self.layout.size} parameters cannot take {vector.numel()}")
        if vector is not self.vector:
            self.vector.copy_(vector)
        if buffers is not None and buffers.numel():
            self.buffers.copy_(buffers)

    def _note_rows(self, name: str, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            self._rows = None
        elif self._rows is not None:
            self._rows[name].append(gradient._indices()[0])

    def rows_with_gradient(self) -> dict[str, Tensor] | None:
        """Return the rows of each embedding with a gradient from the last :meth:`one_gradient`; all others are zeros.

        None where there is no embedding, or where the gradient was written to since, so that any row may have one.
        """
        if not self.embeddings or self._rows is None or self.gradient._version != self._known:
            return None
        return {name: torch.unique(torch.cat(rows)) for name, rows in self._rows.items() if rows}

    @contextmanager
    def one_gradient(self) -> Iterator[None]:
        """Context in which ``backward`` fills ``gradient``; on entry, only the nonzero elements are reset."""
        rows = self.rows_with_gradient()
        if rows is None:
            self.gradient.zero_()
        else:
            for part in self._others:
                self.gradient[part].zero_()
            for name, index in rows.items():
                self.embeddings[name].weight.grad.index_fill_(0, index, 0.0)  # type: ignore[union-attr]
        self._rows = {name: [] for name in self.embeddings}
        yield
        self._known = self.gradient._version

    @torch.no_grad()
    def step(self, move: Callable[[Tensor, Tensor], object]) -> None:
        """Call ``move(vector, gradient)`` on all parts with a gradient; of an embedding, on the rows looked up only.

        ``move`` must work element by element, and leave an element with a zero gradient as it is.
        """
        rows = self.rows_with_gradient()
        if rows is None:
            move(self.vector, self.gradient)
            return
        for part in self._others:
            move(self.vector[part], self.gradient[part])
        for name, index in rows.items():
            weight, gradient = self.embeddings[name].weight, self.embeddings[name].weight.grad
            moved = weight[index]
            move(moved, gradient[index])  # type: ignore[index]
            weight.index_copy_(0, index, moved)

    def reset_buffers(self) -> None:
        """Set the buffers to their values at construction."""
        self.buffers.copy_(self._initial_buffers)

    def freeze(self, *parts: slice) -> None:
        """Leave the parameters inside these parts out of the backward pass; without parts, train all again."""
        for entry, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            parameter.requires_grad_(not (parts and any(p.start <= entry.start < p.stop for p in parts)))

    def state_dict(self, vector: Tensor | None = None, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """Return an ordinary ``state_dict`` (contiguous copies on the CPU) of this model, or of the given vectors.

        It includes frozen parameters; LoRA's changes (models/lora.py) are merged into the weights.
        """
        named = self.layout.unflatten(
            self.vector if vector is None else vector, self.buffers if buffers is None else buffers
        )
        whole: Mapping[str, Tensor] = self.module.state_dict()
        found = {name: named.get(name, tensor).detach().cpu().clone() for name, tensor in whole.items()}
        return merged(self.module, found)


def is_finite(vector: Tensor) -> bool:
    """Return whether every element is a finite number.

    The sum is checked first, in a tenth of the time: it is not finite where an element is not. Large finite elements
    can overflow it too, so each element is checked where the sum is not finite.
    """
    return math.isfinite(vector.sum().item()) or bool(torch.isfinite(vector).all())


def gather(vector: Tensor, parts: Iterable[slice]) -> Tensor:
    """Return the parts of a vector, concatenated, as a new vector."""
    return torch.cat([vector[part] for part in parts] or [vector.new_empty(0)])


def write(vector: Tensor, parts: Iterable[slice], values: Tensor) -> None:
    """Set the parts of ``vector`` to ``values``, in the order of :func:`gather`."""
    start = 0
    for part in parts:
        size = part.stop - part.start
        vector[part] = values[start : start + size]
        start += size


def scatter(vector: Tensor, parts: Iterable[slice], values: Tensor) -> Tensor:
    """Return a copy of ``vector`` whose parts hold ``values``."""
    result = vector.clone()
    write(result, parts, values)
    return result
