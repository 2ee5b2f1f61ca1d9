"""A model as one vector.

All trainable parameters of a module live in one contiguous float32 tensor; every ``nn.Parameter`` is a view into
it and every ``.grad`` a view into one gradient vector. Aggregation, distances, mixing, proximal terms and
element-wise weights are then one or two vector operations, and methods handle no dictionaries of tensors.
Floating-point buffers (BatchNorm statistics) are a second vector. Integer buffers are a third one, of bytes: the
silo's own, and never averaged. Frozen parameters and BatchNorm layers (models/trainable.py) stay in the module, and so
do buffers that are not persistent: they are no state. A tensor may have several names. ``check_tensors`` refuses what
no vector can hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from models.layout import (
    Layout,
    _blocks,
    _entries,
    _ties,
    check_tensors,
    frozen_modules,
    join_parameters,
    named_tensors,
    other_names,
)
from models.lora import merge_lora
from models.precision.autocast import LossScale, compute_in
from partitions.common.errors import UserError
from partitions.common.memory import clear_pages, return_memory

ALIGNED = 8  # bytes: the place of an integer buffer among the others


class PrivateGradient(Protocol):
    """Backend that clips gradients and adds noise (strategies/base/privacy.py)."""

    def gradient(self, x: Any, y: Tensor, loss: Any, network: nn.Module | None) -> Tensor: ...
    def by_chunk(self, of: Any, *batch: Any) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Passes:
    """How networks compute: a batch's gradient in parts, one after the other, shortened to ``clip`` (0: not)."""

    parts: int = 1
    clip: float = 0.0
    precision: str = "float32"  # or bf16, fp16 (models/precision/autocast.py)
    # Of the classes (C,), by whose sum over a batch its loss is divided
    weights: Tensor | None = field(default=None, compare=False)
    # The silo's processes that divide a batch (models/parallel), if there are several
    group: Any = None


class FlatModel:
    """A module whose parameters are views into ``vector`` and whose gradients are views into ``gradient``.

    ``vector`` and ``gradient`` have shape (Σ,), ``buffers`` (number of floating-point buffer scalars,), in float32;
    ``integers`` has the bytes of the integer buffers. All stay the same storage for the life of the object: load with
    :meth:`load`, never rebind.
    """

    private: PrivateGradient | None = None  # set while gradients must be private
    passes = Passes()
    scale = LossScale("float32")

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        check_tensors(module)
        # By a tensor's other names; ``to`` makes buffers anew
        self._first_names = other_names(module)
        self.module = module.to(device=device)
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        batch_norms = [
            n
            for n, m in module.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]
        # Other frozen modules may change their buffers
        frozen = frozen_modules(module).intersection(batch_norms)
        buffers, integers = _state_buffers(module, frozen, self._first_names)
        entries = _entries(parameters)
        self.parameters = [p for _, p in parameters]
        norms = tuple(n for n in batch_norms if n not in frozen)
        blocks = _blocks(module, entries)
        statistics = _entries(buffers)
        ties = _ties(module, blocks, (*entries, *statistics), self._first_names)
        columns = getattr(module, "tree_columns", 0)
        self.layout = Layout(entries, statistics, blocks, norms, ties, columns)
        self.vector = join_parameters(self.parameters)
        self.gradient = torch.zeros_like(self.vector)
        self.buffers = torch.cat(
            [b.reshape(-1) for _, b in buffers] or [self.vector.new_empty(0)]
        )
        self.integers, self._integer_views = _as_bytes(integers, self.vector.device)
        self._make_views(buffers, integers)
        self._initial_buffers = self.buffers.clone()
        self._initial_integers = self.integers.clone()
        self._places = self._tensor_places()
        # The head maps features to logits: the last block, or a method's own head of several blocks.
        self.head_name: str = getattr(module, "head_name", self.layout.blocks[-1].name)
        self.last_block = module.get_submodule(self.head_name)
        inside = [
            b for b in self.layout.blocks if f"{b.name}.".startswith(f"{self.head_name}.")
        ]
        self.head = slice(inside[0].start, inside[-1].stop)
        self._watch_embeddings()
        # Dropout is a module, or a call in the forward pass of a network, which then sets ``has_dropout``.
        self.has_dropout = getattr(module, "has_dropout", False) or any(
            isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in module.modules()
        )
        self.has_batch_norm = bool(norms)
        self.graphs: dict[Any, Any] = {}  # of gradients, on a GPU (models/graphs.py)
        self.is_whole = len(parameters) == len(list(module.parameters()))  # nothing is frozen

    def _make_views(
        self, buffers: Sequence[tuple[str, Tensor]], integers: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Make gradients and buffers of the module views into this model's vectors."""
        for entry, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            parameter.grad = self.gradient[entry.start : entry.stop].view(entry.shape)
        for entry, (_, buffer) in zip(self.layout.buffers, buffers, strict=True):
            buffer.data = self.buffers[entry.start : entry.stop].view(entry.shape)
        for name, buffer in (*buffers, *integers):
            others = (other for other, first in self._first_names.items() if first == name)
            for known in (name, *others):
                owner, _, leaf = known.rpartition(".")
                self.module.get_submodule(owner)._buffers[leaf] = buffer

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
            # A weak reference: a network that is no longer used is gone at once, and need not be searched for
            note = partial(_note_rows, ref(self), name)
            layer.weight.register_hook(note)  # type: ignore[no-untyped-call]
        tables = [
            slice(e.start, e.stop) for e in self.layout.parameters if e.name in self.embeddings
        ]
        starts = [0, *(t.stop for t in tables)]
        stops = [*(t.start for t in tables), self.layout.size]
        # All but embeddings
        self._others = [slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b]
        # Rows of embeddings with a gradient (None: any may have one); the gradient's version after ``one_gradient``.
        self._rows: dict[str, list[Tensor]] | None = None
        self._known = -1

    @property
    def device(self) -> torch.device:
        return self.vector.device

    def compute(self, passes: Passes) -> None:
        """Compute like this from now on."""
        self.passes = passes
        self.scale = LossScale(passes.precision)
        for module in (self.module, self.last_block):
            compute_in(module, passes.precision, self.device)

    def load(
        self, vector: Tensor, buffers: Tensor | None = None, integers: Tensor | None = None
    ) -> None:
        """Copy a vector of shape (Σ,), and buffers where given, into the model. Raises UserError on a wrong length."""
        if vector.shape != self.vector.shape:
            raise UserError(
                f"a model of {self.layout.size} parameters cannot take {vector.numel()}"
            )
        if vector is not self.vector:
            self.vector.copy_(vector)
        if buffers is not None and buffers.numel():
            self.buffers.copy_(buffers)
        if integers is not None and integers.numel():
            self.integers.copy_(integers)

    def _tensor_places(self) -> dict[str, int]:
        """Return the address of each tensor of the state, by all its names."""
        passing = self.module.state_dict(keep_vars=True).keys()
        return {
            name: tensor.data_ptr()
            for name, tensor in named_tensors(self.module)
            if name in passing
        }

    def find_replaced(self) -> list[str]:
        """Return the names of the tensors that are no views of this model any more, or are new: forward set them."""
        now = self._tensor_places()
        return [
            name for name in {**self._places, **now} if self._places.get(name) != now.get(name)
        ]

    @contextmanager
    def kept_buffers(self) -> Iterator[None]:
        """Context after which all buffers are as before: a measurement must not change the running statistics."""
        buffers, integers = self.buffers.clone(), self.integers.clone()
        try:
            yield
        finally:
            self.buffers.copy_(buffers)
            self.integers.copy_(integers)

    def rows_with_gradient(self) -> dict[str, Tensor] | None:
        """Return the rows of each embedding with a gradient from the last :meth:`one_gradient`; all others are zeros.

        None where there is no embedding, or where the gradient was written to since, so that any row may have one.
        """
        if not self.embeddings or self._rows is None or self.gradient._version != self._known:
            return None
        return {
            name: torch.unique(torch.cat(rows)) for name, rows in self._rows.items() if rows
        }

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
        if self.passes.group is not None:
            self._rows = None  # the other processes' rows
        self._known = self.gradient._version

    def release_training(self) -> None:
        """Give back what a training took on the CPU: what its passes left, and the gradient, which becomes zeros."""
        if self.device.type == "cpu":
            clear_pages(self.gradient.data_ptr(), self.gradient.nbytes)
            return_memory()

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
            weight = self.embeddings[name].weight
            gradient = self.embeddings[name].weight.grad
            moved = weight[index]
            move(moved, gradient[index])  # type: ignore[index]
            weight.index_copy_(0, index, moved)

    def reset_buffers(self) -> None:
        """Set the buffers to their values at construction."""
        self.buffers.copy_(self._initial_buffers)
        self.integers.copy_(self._initial_integers)

    def integers_of(self, integers: Tensor) -> dict[str, Tensor]:
        """Return the integer buffers as views of these bytes, by name."""
        return {
            n: integers[start:stop].view(t).view(shape)
            for n, start, stop, t, shape in self._integer_views
        }

    def freeze(self, *parts: slice) -> None:
        """Leave the parameters inside these parts out of the backward pass; without parts, train all again."""
        for entry, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            parameter.requires_grad_(
                not (parts and any(p.start <= entry.start < p.stop for p in parts))
            )

    def state_dict(
        self,
        vector: Tensor | None = None,
        buffers: Tensor | None = None,
        integers: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return an ordinary ``state_dict`` (contiguous copies on the CPU) of this model, or of the given vectors.

        It includes frozen parameters, and each tensor under all its names; LoRA's changes (models/lora.py) are merged
        into the weights.
        """
        named = self.layout.unflatten(
            self.vector if vector is None else vector,
            self.buffers if buffers is None else buffers,
        )
        named |= self.integers_of(self.integers if integers is None else integers)
        whole: Mapping[str, Tensor] = self.module.state_dict()
        tensors = {
            name: named.get(self._first_names.get(name, name), tensor).detach().cpu().clone()
            for name, tensor in whole.items()
        }
        return merge_lora(self.module, tensors)


def _note_rows(of: ref[FlatModel], name: str, gradient: Tensor) -> None:
    """Note the rows of an embedding that a backward pass has a gradient of."""
    if (model := of()) is None or model._rows is None:
        return
    if gradient.is_sparse:
        model._rows[name].append(gradient._indices()[0])
    else:
        model._rows = None


def _state_buffers(
    module: nn.Module, frozen: Collection[str], first_names: Mapping[str, str]
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Return the floating-point buffers and the others, by their first names, that training may change."""
    lasting = {first_names.get(name, name) for name in module.state_dict()}
    buffers = [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if name in lasting and name not in first_names and name.rpartition(".")[0] not in frozen
    ]
    return [(n, b) for n, b in buffers if b.is_floating_point()], [
        (n, b) for n, b in buffers if not b.is_floating_point()
    ]


def _as_bytes(
    named: Sequence[tuple[str, Tensor]], device: torch.device
) -> tuple[Tensor, list[tuple[str, int, int, torch.dtype, torch.Size]]]:
    """Move these tensors into one vector of bytes; return it with their names, places, types and shapes."""
    starts = [0, *accumulate(-(-buffer.nbytes // ALIGNED) * ALIGNED for _, buffer in named)]
    content = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    views = [
        (n, s, s + b.nbytes, b.dtype, b.shape)
        for (n, b), s in zip(named, starts[:-1], strict=True)
    ]
    for (_, buffer), (_, start, stop, dtype, shape) in zip(named, views, strict=True):
        buffer.data = content[start:stop].view(dtype).view(shape).copy_(buffer)
    return content, views


def apart(vector: Tensor, others: Sequence[Tensor], live: Tensor) -> Tensor:
    """Return a vector that keeps its values while ``live`` is trained: an equal one of ``others``, or a copy."""
    for other in others:
        is_view = other is live or other._base is not None
        if not is_view and other.shape == vector.shape and torch.equal(other, vector):
            return other
    return vector.clone()


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
