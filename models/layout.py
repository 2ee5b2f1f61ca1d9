"""The layout of a flat vector: the place of every tensor, and the layer blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
    # The tensors of two blocks: both blocks' names, then the tensor's name in the first block, which holds it.
    ties: tuple[tuple[str, str, str], ...] = ()
    columns: int = 0  # of a table, whose numbers trees hold (models/networks/trees.py)

    @property
    def size(self) -> int:
        """Number of trainable scalars, the unit Σ of the communication costs."""
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def buffer_size(self) -> int:
        return self.buffers[-1].stop if self.buffers else 0

    def parts(self, names: Iterable[str]) -> tuple[slice, ...]:
        """Return the named blocks' parts of the vector, neighbours joined.

        Raises UserError for an unknown block, and for a block that has a tensor in common with one of the others.
        """
        wanted = set(names)
        unknown = wanted - {b.name for b in self.blocks}
        if unknown:
            raise UserError(
                f"there is no layer block {', '.join(sorted(unknown))}; "
                f"there are: {', '.join(b.name for b in self.blocks)}"
            )
        for holder, other, tensor in (
            self.ties if wanted and len(wanted) < len(self.blocks) else ()
        ):
            if (holder in wanted) != (other in wanted):
                raise UserError(
                    f"this method treats some layer blocks apart, and {holder} and {other} have {tensor} in common: "
                    "choose a method that averages the whole model, or give each block a tensor of its own"
                )
        return _merge_parts(b.slice for b in self.blocks if b.name in wanted)

    def outside(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """Return the parameters outside of all these parts, neighbours joined. A part may split a block."""
        inside = tuple(parts)
        free = (
            e for e in self.parameters if not any(p.start <= e.start < p.stop for p in inside)
        )
        return _merge_parts(slice(e.start, e.stop) for e in free)

    def names_in(self, parts: Iterable[slice]) -> list[str]:
        """Return the names of the blocks that begin inside these parts of the vector, input to output."""
        inside = tuple(parts)
        return [b.name for b in self.blocks if any(p.start <= b.start < p.stop for p in inside)]

    def buffer_parts(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """Return the buffers of the blocks that begin inside these parts of the vector, neighbours joined.

        A buffer outside all blocks (of a BatchNorm layer without weights) is included only with all blocks.
        """
        if not self.buffers:
            return ()
        names = self.names_in(parts)
        everything = len(names) == len(self.blocks)
        return _merge_parts(
            slice(e.start, e.stop)
            for e in self.buffers
            if everything or any(is_in(e.name, name) for name in names)
        )

    def norm_parts(self, norm: bool = True) -> tuple[slice, ...]:
        """Return the batch normalisation layers' parts of the vector, or (``norm=False``) all other parts."""
        return _merge_parts(
            slice(e.start, e.stop)
            for e in self.parameters
            if (e.name.rpartition(".")[0] in self.norms) == norm
        )

    def norm_buffers(self) -> tuple[slice, ...]:
        """Return the parts of the buffers that hold the batch normalisation layers' statistics."""
        return _merge_parts(
            slice(e.start, e.stop)
            for e in self.buffers
            if e.name.rpartition(".")[0] in self.norms
        )

    def linear_head(self) -> tuple[Entry, Entry]:
        """Return weight (C, K) and bias (C,) of the last layer block.

        Raises UserError unless the block is one linear layer with a bias, on K features.
        """
        block = self.blocks[-1]
        for holder, other, tensor in self.ties:
            if other not in {b.name for b in self.blocks}:
                raise UserError(
                    f"this method needs a last layer of its own, and {other} has {tensor} of {holder}"
                )
        inside = [e for e in self.parameters if e.start >= block.start]
        if [e.name for e in inside] != [f"{block.name}.weight", f"{block.name}.bias"] or len(
            inside[0].shape
        ) != 2:
            raise UserError(
                f"this method needs a linear last layer with a bias, which '{block.name}' is not"
            )
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


def size_of(parts: Iterable[slice]) -> int:
    """Return the number of scalars in these parts."""
    return sum(int(part.stop - part.start) for part in parts)


def _merge_parts(parts: Iterable[slice]) -> tuple[slice, ...]:
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


def _ties(
    module: nn.Module,
    blocks: Iterable[Block],
    entries: Iterable[Entry],
    first_names: Mapping[str, str],
) -> tuple[tuple[str, str, str], ...]:
    """Return :attr:`Layout.ties`; a block without a tensor of its own counts only where it is the last one."""
    names = block_names(module)

    def block(tensor: str) -> str:
        return max((b for b in names if is_in(tensor, b)), key=len, default="")

    named = {b.name for b in blocks} | set(names[-1:])
    held = {e.name for e in entries}
    ties = (
        (block(first), block(other), first)
        for other, first in first_names.items()
        if first in held
    )
    return tuple(
        (holder, other, tensor)
        for holder, other, tensor in ties
        if holder != other and other in named
    )


def is_in(tensor: str, block: str) -> bool:
    """Return whether a tensor, by its name, is this one or in the module of this name ("": the network itself)."""
    return f"{tensor}.".startswith(f"{block}.") or tensor.rpartition(".")[0] == block


def block_names(module: nn.Module) -> list[str]:
    """Return the names of the layer blocks, from input to output.

    They are ``module.block_names``; without that attribute, every module with trained parameters of its own. A block is
    a module, or a parameter of the network's own. ``module.aside``: modules behind the last block that belong to it.
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
    frozen = set()
    for name, inner in module.named_modules():
        around = module.get_submodule(name.rpartition(".")[0])
        parameters = list(inner.parameters(recurse=False)) or list(around.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            frozen.add(name)
    return frozenset(frozen)


def _blocks(module: nn.Module, parameters: tuple[Entry, ...]) -> tuple[Block, ...]:
    names = block_names(module)
    aside = getattr(module, "aside", ())
    blocks = []
    for name in names:
        parts = (name, *aside) if name == names[-1] else (name,)
        inside = [e for e in parameters if any(is_in(e.name, block) for block in parts)]
        if inside:
            blocks.append(Block(name, inside[0].start, inside[-1].stop))
    stops = [0, *(b.stop for b in blocks)]
    if [b.start for b in blocks] != stops[:-1] or stops[-1] != (
        parameters[-1].stop if parameters else 0
    ):
        raise UserError(f"layer blocks {names} do not cover the parameters in order")
    return tuple(blocks)


# ---- The tensors of a module: all their names, and what no vector holds ----


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, with all their names: a tensor of several names, several times."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def other_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor that has several, by each of its other names."""
    first: dict[int, str] = {}
    firsts = {
        name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(module)
    }
    return {name: of for name, of in firsts.items() if name != of}


def check_tensors(module: nn.Module) -> None:
    """Raise UserError, one line, where a module keeps more than dense parameters and buffers of its own."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            where = f"its module {name}" if name else "it"
            raise UserError(
                f"{where} has get_extra_state, which no model's file holds: register buffers instead"
            )
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, tensor in named:
            if is_lazy(tensor):
                raise UserError(
                    f"its {kind} {name} has no shape yet: give its layer all sizes, as nn.Linear has them"
                )
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise UserError(
                    f"its {kind} {name} is no dense tensor with values: make it one"
                )
            if tensor.is_complex() or (
                tensor.is_floating_point() and tensor.dtype != torch.float32
            ):
                raise UserError(f"its {kind} {name} is {tensor.dtype}, not float32")
    _check_memory(module)


def _check_memory(module: nn.Module) -> None:
    """Raise UserError where two tensors overlap: in the model's vectors each has a place of its own.

    One tensor may have two names.
    """
    kept = {id(tensor): (name, tensor) for name, tensor in named_tensors(module)}
    parameters = {id(parameter) for parameter in module.parameters()}
    if both := [name for name, buffer in module.named_buffers() if id(buffer) in parameters]:
        raise UserError(f"its buffer {both[0]} is a parameter, too: let it be one of the two")
    end, before = 0, ""
    for start, name, tensor in sorted(
        (t.data_ptr(), name, t) for name, t in kept.values() if t.numel()
    ):
        if start < end:
            raise UserError(
                f"its tensors {before} and {name} share memory: make them one tensor with two names, or a copy"
            )
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        end, before = start + (last + 1) * tensor.element_size(), name


def join_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Return the parameters as one vector, of which they become views, one after the other: none is held twice."""
    vector = parameters[0].detach().new_empty(sum(p.numel() for p in parameters))
    places = torch.split(vector, [p.numel() for p in parameters])
    for parameter, place in zip(parameters, places, strict=True):
        parameter.data = place.view_as(parameter).copy_(parameter.detach())
    return vector
