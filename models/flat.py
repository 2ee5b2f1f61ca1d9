"""A model as one vector.

All trainable parameters of a module live in one contiguous float32 tensor; every ``nn.Parameter`` is a view into
it and every ``.grad`` a view into one gradient vector. Aggregation, distances, mixing, proximal terms and
element-wise weights are then one or two vector operations, and a method never sees a dictionary of tensors.
Floating-point buffers (BatchNorm statistics) are a second vector; integer buffers, and what is frozen
(models/trainable.py), stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.lora import merged


@dataclass(frozen=True)
class Entry:
    """One tensor's place in a flat vector: ``vector[start:stop].view(shape)``."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """One layer block (for example ``conv1`` with its weight and bias): ``vector[start:stop]``."""

    name: str
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Layout:
    """Where everything lies: parameters and buffers by name, and the layer blocks from input to output."""

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    blocks: tuple[Block, ...]
    norms: tuple[str, ...] = ()  # the batch normalisation layers, wherever they stand: also inside of a block

    @property
    def size(self) -> int:
        """Number of trainable scalars, the unit Σ of the communication costs."""
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def buffer_size(self) -> int:
        return self.buffers[-1].stop if self.buffers else 0

    def parts(self, names: Iterable[str]) -> tuple[slice, ...]:
        """The parts of the vector that the named blocks take, neighbours joined. ValueError for an unknown block."""
        wanted = set(names)
        unknown = wanted - {b.name for b in self.blocks}
        if unknown:
            raise ValueError(
                f"there is no layer block {', '.join(sorted(unknown))}; "
                f"there are: {', '.join(b.name for b in self.blocks)}"
            )
        return _joined(b.slice for b in self.blocks if b.name in wanted)

    def outside(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """The blocks that begin outside of all these parts, neighbours joined."""
        inside = tuple(parts)
        return self.parts(b.name for b in self.blocks if not any(p.start <= b.start < p.stop for p in inside))

    def buffer_parts(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """The buffers of the blocks that begin inside these parts of the vector, neighbours joined.

        A buffer of no block (a BatchNorm layer's without weights) comes with all blocks only.
        """
        inside = tuple(parts)
        names = [b.name for b in self.blocks if any(p.start <= b.start < p.stop for p in inside)]
        everything = len(names) == len(self.blocks)
        return _joined(
            slice(e.start, e.stop)
            for e in self.buffers
            if everything or any(e.name.startswith(f"{name}.") for name in names)
        )

    def norm_parts(self, norm: bool = True) -> tuple[slice, ...]:
        """The parts of the vector that batch normalisation layers take, or (``norm=False``) all the others."""
        return _joined(
            slice(e.start, e.stop) for e in self.parameters if (e.name.rpartition(".")[0] in self.norms) == norm
        )

    def norm_buffers(self) -> tuple[slice, ...]:
        """The statistics of the batch normalisation layers."""
        return _joined(slice(e.start, e.stop) for e in self.buffers if e.name.rpartition(".")[0] in self.norms)

    def linear_head(self) -> tuple[Entry, Entry]:
        """Weight (C, K) and bias (C,) of the last layer block, where it is one linear layer on K features.

        ValueError where it is not.
        """
        block = self.blocks[-1]
        inside = [e for e in self.parameters if e.start >= block.start]
        if [e.name for e in inside] != [f"{block.name}.weight", f"{block.name}.bias"] or len(inside[0].shape) != 2:
            raise ValueError(f"this method needs a linear last layer with a bias, which '{block.name}' is not")
        return inside[0], inside[1]

    @property
    def classes(self) -> int:
        """C of :meth:`linear_head`. ValueError where there is none."""
        return self.linear_head()[0].shape[0]

    @property
    def features(self) -> int:
        """K of :meth:`linear_head`. ValueError where there is none."""
        return self.linear_head()[0].shape[1]

    def unflatten(self, vector: Tensor, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """Views by name, as a ``state_dict`` without the integer buffers."""
        tensors = {e.name: vector[e.start : e.stop].view(e.shape) for e in self.parameters}
        if buffers is not None:
            tensors |= {e.name: buffers[e.start : e.stop].view(e.shape) for e in self.buffers}
        return tensors


def _joined(parts: Iterable[slice]) -> tuple[slice, ...]:
    """The same parts, in ascending order, with neighbours made one."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return tuple(joined)


def _entries(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Entry, ...]:
    entries, start = [], 0
    for name, tensor in tensors:
        entries.append(Entry(name, tuple(tensor.shape), start, start + tensor.numel()))
        start += tensor.numel()
    return tuple(entries)


def block_names(module: nn.Module) -> list[str]:
    """Names of the layer blocks, input to output.

    Those of ``module.block_names``; without that attribute, every leaf module with parameters is one.
    """
    named = getattr(module, "block_names", None)
    owners = (n.rpartition(".")[0] for n, p in module.named_parameters() if p.requires_grad)
    return list(named or dict.fromkeys(owners))


def frozen_modules(module: nn.Module) -> frozenset[str]:
    """Names of the modules none of whose own parameters is trained; one without any goes with the module around it."""
    if all(parameter.requires_grad for parameter in module.parameters()):
        return frozenset()
    found = set()
    for name, inner in module.named_modules():
        around = module.get_submodule(name.rpartition(".")[0])
        parameters = list(inner.parameters(recurse=False)) or list(around.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            found.add(name)
    return frozenset(found)


def _blocks(module: nn.Module, parameters: tuple[Entry, ...]) -> tuple[Block, ...]:
    names = block_names(module)
    blocks = []
    for name in names:
        inside = [e for e in parameters if e.name.startswith(f"{name}.") or e.name.rpartition(".")[0] == name]
        if inside:
            blocks.append(Block(name, inside[0].start, inside[-1].stop))
    stops = [0, *(b.stop for b in blocks)]
    if [b.start for b in blocks] != stops[:-1] or stops[-1] != (parameters[-1].stop if parameters else 0):
        raise ValueError(f"layer blocks {names} do not cover the parameters in order")
    return tuple(blocks)


class Together(Protocol):
    """Computes what a model asks for with what others ask for at the same time (server/run/lockstep.py).

    Each as the function of that name would by itself: ``training.loss_gradient``, an optimiser's ``step``, a task's
    ``evaluate``.
    """

    def gradient(self, x: Any, y: Tensor, loss: Any, network: nn.Module | None) -> Tensor: ...

    def step(self, optimizer: Any, vector: Tensor, gradient: Tensor) -> None: ...

    def evaluate(self, task: Any, samples: Any) -> dict[str, float]: ...


class FlatModel:
    """A module whose parameters are views into ``vector`` and whose gradients are views into ``gradient``.

    ``vector`` and ``gradient`` have shape (Σ,), ``buffers`` (number of floating-point buffer scalars,); all three
    are float32 and stay the same storage for the life of the object: load with :meth:`load`, never rebind.
    ``storage``: a contiguous vector and gradient that exist already, such as rows of matrices over silos.
    """

    together: Together | None = None  # who computes for this model, where silos train together

    def __init__(
        self, module: nn.Module, device: torch.device | str = "cpu", storage: tuple[Tensor, Tensor] | None = None
    ) -> None:
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
        values = torch.cat([p.detach().reshape(-1) for _, p in parameters])
        if storage is None:
            self.vector, self.gradient = values, torch.zeros_like(values)
        else:
            self.vector, self.gradient = storage[0].copy_(values), storage[1].zero_()
        self.buffers = torch.cat([b.reshape(-1) for _, b in buffers] or [self.vector.new_empty(0)])
        for entry, (_, parameter) in zip(entries, parameters, strict=True):
            parameter.data = self.vector[entry.start : entry.stop].view(entry.shape)
            parameter.grad = self.gradient[entry.start : entry.stop].view(entry.shape)
        for entry in self.layout.buffers:
            owner, _, leaf = entry.name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = self.buffers[entry.start : entry.stop].view(entry.shape)
        self._initial_buffers = self.buffers.clone()
        # What turns features into logits: the last block, or a method's own head of several blocks.
        self.head_name: str = getattr(module, "head_name", self.layout.blocks[-1].name)
        self.last_block = module.get_submodule(self.head_name)
        inside = [b for b in self.layout.blocks if f"{b.name}.".startswith(f"{self.head_name}.")]
        self.head = slice(inside[0].start, inside[-1].stop)
        self.embeddings = {  # of words: a method's own head may have some, too, of classes
            f"{name}.weight": layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Embedding)
            and layer.weight.requires_grad
            and not name.startswith(f"{self.head_name}.")
        }
        for name, layer in self.embeddings.items():
            # Only the rows that a batch looked up are added to the gradient, in place; a dense one would be made as
            # large as the table first. A GPU does that in no time, and the sum of a row in one order.
            layer.sparse = self.vector.device.type == "cpu" and not layer.scale_grad_by_freq
            layer.weight.register_hook(partial(self._note_rows, name))  # type: ignore[no-untyped-call]
        tables = [slice(e.start, e.stop) for e in entries if e.name in self.embeddings]
        starts, stops = [0, *(t.stop for t in tables)], [*(t.start for t in tables), self.layout.size]
        self._others = [slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b]  # all but embeddings
        # Rows of embeddings with a gradient, None: any may have one; and when nobody had written to the gradient since.
        self._rows: dict[str, list[Tensor]] | None = None
        self._known = -1
        # As a module of its own, or inside a network's forward pass, which then says so.
        self.has_dropout = getattr(module, "has_dropout", False) or any(
            isinstance(m, nn.modules.dropout._DropoutNd) for m in module.modules()
        )
        self.has_batch_norm = bool(norms)
        self.is_whole = len(parameters) == len(list(module.parameters()))  # nothing is frozen

    @property
    def device(self) -> torch.device:
        return self.vector.device

    def load(self, vector: Tensor, buffers: Tensor | None = None) -> None:
        """Copy a vector of shape (Σ,), and buffers where given, into the model. Raises ValueError on a wrong length."""
        if vector.shape != self.vector.shape:
            raise ValueError(f"a model of {self.layout.size} parameters cannot take {vector.numel()}")
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
        """The rows of each embedding that the last :meth:`one_gradient` has reached, all others are zeros.

        None where there is no embedding, or that is not known: somebody has written to the gradient since.
        """
        if not self.embeddings or self._rows is None or self.gradient._version != self._known:
            return None
        return {name: torch.unique(torch.cat(rows)) for name, rows in self._rows.items() if rows}

    @contextmanager
    def one_gradient(self) -> Iterator[None]:
        """In which ``backward`` fills ``gradient``, which is zeros before: only what is not is set to it."""
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
        """``move(vector, gradient)`` of all that has a gradient; ``move`` leaves alone what has none, number by number.

        Of an embedding only the rows that a batch looked up are touched.
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
        """The buffers as the module was built with."""
        self.buffers.copy_(self._initial_buffers)

    def freeze(self, *parts: slice) -> None:
        """Leave the parameters inside these parts out of the backward pass; without any, all are trained again."""
        for entry, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            parameter.requires_grad_(not any(p.start <= entry.start < p.stop for p in parts))

    def state_dict(self, vector: Tensor | None = None, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """An ordinary ``state_dict`` (contiguous copies on the CPU) of this model, or of the given vectors.

        It is whole: with what is frozen, and what LoRA has learned (models/lora.py) merged.
        """
        named = self.layout.unflatten(
            self.vector if vector is None else vector, self.buffers if buffers is None else buffers
        )
        whole: Mapping[str, Tensor] = self.module.state_dict()
        found = {name: named.get(name, tensor).detach().cpu().clone() for name, tensor in whole.items()}
        return merged(self.module, found)


def is_finite(vector: Tensor) -> bool:
    """Whether every element is a finite number.

    A sum is not finite where an element is not, and is made in a tenth of the time; only where it is not, which large
    finite elements can cause too, is each looked at.
    """
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())


def gather(vector: Tensor, parts: Iterable[slice]) -> Tensor:
    """The parts of a vector, one behind the other, as a new vector."""
    return torch.cat([vector[part] for part in parts] or [vector.new_empty(0)])


def write(vector: Tensor, parts: Iterable[slice], values: Tensor) -> None:
    """Set the parts of ``vector`` to ``values``, as :func:`gather` laid them out."""
    start = 0
    for part in parts:
        size = part.stop - part.start
        vector[part] = values[start : start + size]
        start += size


def scatter(vector: Tensor, parts: Iterable[slice], values: Tensor) -> Tensor:
    """A copy of ``vector`` whose parts hold ``values``."""
    result = vector.clone()
    write(result, parts, values)
    return result
