"""A silo's network after a trainer: it had the network itself, and may have left it otherwise.

Its values stay. Parameters, gradients and buffers become views of the model's vectors again; hooks, and whatever else
was put into a module, are gone. A trainer that replaced a parameter, or its size, is refused: its values have no place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.flat import FlatModel

# What a module is made of: parameters, buffers, children and hooks
PARTS = tuple(key for key, part in vars(nn.Module()).items() if isinstance(part, dict))
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter


class Held:
    """The parts of a network's modules before a trainer."""

    def __init__(self, module: nn.Module) -> None:
        owners: list[tuple[Any, tuple[str, ...]]] = [
            *((owner, (*PARTS, "__class__")) for owner in module.modules()),
            *((owner, HOOKS) for owner in module.parameters()),
        ]
        self.parts = [
            (owner, key, part, dict(part) if isinstance(part, dict) else None)
            for owner, keys in owners
            for key in keys
            for part in [getattr(owner, key)]
        ]
        self.forwards = [
            (vars(owner), vars(owner).get("forward")) for owner in module.modules()
        ]

    def restore(self) -> None:
        for owner, key, part, content in self.parts:
            if content is not None:
                part.clear()
                part.update(content)
            if getattr(owner, key) is not part:
                setattr(owner, key, part)
        for attributes, forward in self.forwards:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


@torch.no_grad()
def take_back(model: FlatModel, held: Held) -> list[str]:
    """Make a network the model's again; return the names of tensors whose values cannot be kept."""
    module, parameters = model.module, dict(model.module.named_parameters())
    tensors: dict[str, Tensor] = {**parameters, **dict(module.named_buffers())}
    held.restore()
    model.freeze()  # nothing: each parameter has its gradient again
    views = model.layout.unflatten(model.vector, model.buffers)
    views |= model.integers_of(model.integers)
    known = {*map(id, model.parameters)}
    lost = [name for name in views if name in parameters and id(tensors[name]) not in known]
    for name, view in views.items():
        now = tensors.get(name)
        if now is None or now.shape != view.shape or now.is_meta:
            lost.append(name)
        elif now.data_ptr() != view.data_ptr():
            view.copy_(now)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in views:
            tensor.data = views[name]
        elif tensor.is_meta:
            lost.append(name)
    if not lost:
        module.to(model.device)
    gather_gradients(model)
    module.train()
    return lost


@torch.no_grad()
def gather_gradients(model: FlatModel) -> None:
    """Let ``gradient`` hold the gradients again that a training loop has moved; a frozen parameter has none."""
    for entry, parameter in zip(model.layout.parameters, model.parameters, strict=True):
        view = model.gradient[entry.start : entry.stop].view(entry.shape)
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            view.zero_()
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = view if parameter.requires_grad else None
