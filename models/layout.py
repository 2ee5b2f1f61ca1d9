"""The layout of a flat vector: the place of every tensor, and the layer blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from partitions.common.errors import UserError


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
    """Layout of a model: parameters and buffers by name, and the layer blocks from input to output."""

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    blocks: tuple[Block, ...]
    norms: tuple[str, ...] = ()  # the batch normalisation layers, those inside blocks included

    @property
    def size(self) -> int:
        """Number of trainable scalars, the unit Σ of the communication costs."""
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def buffer_size(self) -> int:
        return self.buffers[-1].stop if self.buffers else 0

    def parts(self, names: Iterable[str]) -> tuple[slice, ...]:
        """Return the named blocks' parts of the vector, neighbours joined. Raises UserError for an unknown block."""
        wanted = set(names)
        unknown = wanted - {b.name for b in self.blocks}
        if unknown:
            raise UserError(
                f"there is no layer block {', '.join(sorted(unknown))}; "
                f"there are: {', '.join(b.name for b in self.blocks)}"
            )
        return _joined(b.slice for b in self.blocks if b.name in wanted)

    def outside(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """Return the parameters outside of all these parts, neighbours joined. A part may split a block."""
        inside = tuple(parts)
        free = (e for e in self.parameters if not any(p.start <= e.start < p.stop for p in inside))
        return _joined(slice(e.start, e.stop) for e in free)

    def buffer_parts(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """Return the buffers of the blocks that begin inside these parts of the vector, neighbours joined.

        A buffer outside all blocks (of a BatchNorm layer without weights) is included only with all blocks.
        """
        if not self.buffers:
            return ()
        inside = tuple(parts)
        names = [b.name for b in self.blocks if any(p.start <= b.start < p.stop for p in inside)]
        everything = len(names) == len(self.blocks)
        return _joined(
            slice(e.start, e.stop)
            for e in self.buffers
            if everything or any(e.name.startswith(f"{name}.") for name in names)
        )

    def norm_parts(self, norm: bool = True) -> tuple[slice, ...]:
        """Return the batch normalisation layers' parts of the vector, or (``norm=False``) all other parts."""
        return _joined(
            slice(e.start, e.stop) for e in self.parameters if (e.name.rpartition(".")[0] in self.norms) == norm
        )

    def norm_buffers(self) -> tuple[slice, ...]:
        """Return the parts of the buffers that hold the batch normalisation layers' statistics."""
        return _joined(slice(e.start, e.stop) for e in self.buffers if e.name.rpartition(".")[0] in self.norms)

    def linear_head(self) -> tuple[Entry, Entry]:
        """Return weight (C, K) and bias (C,) of the last layer block.

        Raises UserError unless the block is one linear layer with a bias, on K features.
        """
        block = self.blocks[-1]
        inside = [e for e in self.parameters if e.start >= block.start]
        if [e.name for e in inside] != [f"{block.name}.weight", f"{block.name}.bias"] or len(inside[0].shape) != 2:
            raise UserError(f"this method needs a linear last layer with a bias, which '{block.name}' is not")
        return inside[0], inside[1]

    @property
    def classes(self) -> int:
        """C of :meth:`linear_head`. Raises UserError where there is none."""
        return self.linear_head()[0].shape[0]

    @property
    def features(self) -> int:
        """K of :meth:`linear_head`. Raises UserError where there is none."""
        return self.linear_head()[0].shape[1]

    def unflatten(self, vector: Tensor, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """Return views by name, as a ``state_dict`` without the integer buffers."""
        tensors = {e.name: vector[e.start : e.stop].view(e.shape) for e in self.parameters}
        if buffers is not None:
            tensors |= {e.name: buffers[e.start : e.stop].view(e.shape) for e in self.buffers}
        return tensors


def _joined(parts: Iterable[slice]) -> tuple[slice, ...]:
    """Merge neighbouring parts, given in ascending order."""
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
    """Return the names of the layer blocks, from input to output.

    They are ``module.block_names``; without that attribute, every module with trained parameters of its own.
    """
    named = getattr(module, "block_names", None)
    owners = (n.rpartition(".")[0] for n, p in module.named_parameters() if p.requires_grad)
    return list(named or dict.fromkeys(owners))


def frozen_modules(module: nn.Module) -> frozenset[str]:
    """Return the names of the modules whose own parameters are all frozen.

    A module without parameters counts by those of its parent.
    """
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
        raise UserError(f"layer blocks {names} do not cover the parameters in order")
    return tuple(blocks)
