"""A user's own network: ``model = "package.module:factory"``.

``factory(input_shape, outputs)`` returns an ``nn.Module`` that maps float32 (batch, *input_shape) to (batch, outputs),
or to (batch, outputs, h, w) for outputs per pixel. models/shapes.py describes batches of texts and of several inputs.
Its weights must come from torch's global generator. The properties that methods rely on are checked before the first
use, once per process. Layer blocks are its ``block_names``, or else its children.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from models.flat import FlatModel
from models.shapes import Shape, example
from partitions.common.errors import UserError

Factory = Callable[[Shape, int], Any]
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class CustomSettings:
    """Requirements of the task."""

    per_pixel: bool = False


def is_custom(name: str) -> bool:
    """Return whether this names a user's own network. Raises UserError for a name with a colon in another form."""
    if ":" in name and not NAME.fullmatch(name):
        raise UserError(f"model = {name[:80]!r}: package.module:factory is needed here, or the name of a network")
    return ":" in name


def custom_network(name: str, shape: Shape, outputs: int, settings: CustomSettings) -> nn.Module:
    """Return the network, freshly initialised. Raises UserError, one line, where it cannot be made or used."""
    drops = _check(name, shape, outputs, settings.per_pixel)
    network = _made(name, shape, outputs)
    if drops:
        network.has_dropout = True  # type: ignore[assignment]
    return network


def factory_of(name: str) -> Factory:
    """Return the function of this name. The module must define it: one that it only imports is refused."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        hint = "; in a simulation PYTHONPATH says where it is" if isinstance(error, ImportError) else ""
        raise UserError(f"model = {name!r}: {module} cannot be imported: {_line(error)}{hint}") from None
    if not callable(found) or getattr(found, "__module__", None) != module:
        raise UserError(f"model = {name!r}: {module} defines no function {function}(input_shape, outputs)")
    return found  # type: ignore[no-any-return]


def _made(name: str, shape: Shape, outputs: int) -> nn.Module:
    try:
        network = factory_of(name)(shape, outputs)
    except ValueError as error:
        raise error if str(error).startswith("model = ") else _fault(name, shape, _line(error)) from None
    except Exception as error:
        raise _fault(name, shape, _line(error)) from None
    if not isinstance(network, nn.Module):
        raise _fault(name, shape, f"it gives {type(network).__name__}, not an nn.Module")
    if not hasattr(network, "block_names"):
        children = [child for child, module in network.named_children() if any(True for _ in module.parameters())]
        network.block_names = tuple(children)  # type: ignore[assignment]
        if alone := [parameter for parameter, _ in network.named_parameters() if "." not in parameter]:
            raise _fault(name, shape, f"its parameter {alone[0]} is in no child module: give it one, or block_names")
    return network


@lru_cache(maxsize=8)
def _check(name: str, shape: Shape, outputs: int, per_pixel: bool) -> bool:
    """Raise UserError where methods cannot use the network; return whether it draws random numbers in training."""
    with torch.random.fork_rng(devices=[]):
        factory_of(name)  # first, because the import may draw numbers, too
        torch.manual_seed(0)
        network = _made(name, shape, outputs)
        torch.manual_seed(0)
        again = _made(name, shape, outputs)
        if faults := [*_in_numbers(network, again)]:
            raise _fault(name, shape, faults[0])
        try:
            flat = FlatModel(network)
        except (ValueError, IndexError, AttributeError) as error:
            raise _fault(name, shape, f"its layer blocks cannot be used: {_line(error)}") from None
        x = example(shape, 2)
        wanted = (2, outputs, *(shape[1:] if per_pixel else ()))
        try:
            trained = [_seen(network.train(), x, seed) for seed in (1, 2)]
            seen = [_seen(network.eval(), x, seed) for seed in (1, 2)]
            flat.vector.add_(0.1)
            moved = _seen(network, x, 1)
        except Exception as error:
            raise _fault(name, shape, f"it takes no inputs of this shape: {_line(error)}") from None
    for found in (*trained, *seen):
        if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise _fault(name, shape, f"of two inputs it makes {given}, where outputs of shape {wanted} are wanted")
    if not torch.equal(*seen):
        raise _fault(name, shape, "in evaluation it says two things of the same input: it must not draw numbers there")
    if torch.equal(moved, seen[0]):
        raise _fault(name, shape, "its outputs stay the same whatever its parameters are")
    return not torch.equal(*trained)


def _in_numbers(network: nn.Module, again: nn.Module) -> list[str]:
    """Return the faults of two networks that were made under the same seed."""
    parameters = dict(network.named_parameters())
    if not parameters:
        return ["it has no parameters"]
    faults = []
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            faults.append(f"its parameter {name} is {parameter.dtype}, not float32")
        elif not parameter.requires_grad:
            faults.append(f"its parameter {name} is frozen, which is the setting trainable's to say")
    if any(p is q for p, q in zip(network.parameters(), again.parameters(), strict=False)):
        faults.append("it gives the same module twice: it has to make a new one")
    one, other = network.state_dict(), again.state_dict()
    if one.keys() != other.keys() or not all(torch.equal(tensor, other[key]) for key, tensor in one.items()):
        faults.append("made twice under one seed it differs: its weights may come from torch's generator alone")
    return faults


@torch.no_grad()
def _seen(network: nn.Module, x: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    found = network(x)
    return found.clone() if isinstance(found, Tensor) else found


def _fault(name: str, shape: Shape, what: str) -> UserError:
    return UserError(f"model = {name!r} for inputs of shape {shape}: {what}")


def _line(error: Exception) -> str:
    """Return an error's type and text in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
