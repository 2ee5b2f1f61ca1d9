"""What a network gives in training: one answer, or several (deep supervision), of which the first one counts most.

Several are a list or a tuple, a dictionary as torchvision has it (``out``, ``aux``), or one tensor in which they are
stacked behind the batch, as in MONAI's DynUNet. In evaluation a network gives one answer, or a dictionary with ``out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.flat import FlatModel

SHARE = 0.5  # of the weight of the answer before, as MONAI's DeepSupervisionLoss and torchvision's training have it


def answers_of(found: Any, axes: int) -> tuple[Any, ...]:
    """Return the answers, each with this number of axes."""
    if isinstance(found, Tensor):
        return found.unbind(1) if found.dim() == axes + 1 else (found,)
    if isinstance(found, Mapping):
        return tuple(found.values())
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def gives_several(found: Any, wanted: tuple[int, ...]) -> bool:
    """Return whether these are several answers of a batch, the first of the shape ``wanted``."""
    answers = answers_of(found, len(wanted))
    return (
        not (isinstance(found, Tensor) and len(answers) == 1)
        and all(isinstance(own, Tensor) and own.dim() == len(wanted) for own in answers)
        and all(own.shape[:2] == wanted[:2] for own in answers)
        and tuple(answers[0].shape) == wanted
    )


def put_in_order(network: nn.Module, axes: int) -> None:
    """Let a network give a tuple of answers in training, and one answer in evaluation."""

    def in_order(module: nn.Module, _: Any, found: Any) -> Any:
        if module.training:
            return tuple(own.float() for own in answers_of(found, axes))
        return found["out"].float() if isinstance(found, Mapping) and "out" in found else found

    network.register_forward_hook(in_order)
    network.gives_several = True  # type: ignore[assignment]


def join_answers(found: Any) -> Tensor:
    """Return one or several answers as one tensor."""
    return torch.cat([own.flatten(1) for own in answers_of(found, 0)], 1)


def has_several(network: nn.Module) -> bool:
    """Return whether a network, or one inside a method's own, gives several answers in training."""
    return any(getattr(module, "gives_several", False) for module in network.modules())


class LossOfSeveral:
    """The sum of a loss over all answers, each with half the weight of the one before; masks in the answer's size."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, answers: Any, y: Tensor) -> Tensor:
        if isinstance(answers, Tensor):  # in evaluation
            answers = (answers,)
        found: Tensor = sum(
            SHARE**i * self.loss(own, resize_masks(y, own)) for i, own in enumerate(answers)
        )
        return found


def resize_masks(y: Tensor, answer: Tensor) -> Tensor:
    """Return masks (b, [d,] h, w) in the size of an answer (b, C, [d,] h, w); other labels as they are."""
    size = answer.shape[2:]
    if y.dim() < 3 or y.shape[1:] == size:
        return y
    return F.interpolate(y[:, None].float(), list(size), mode="nearest-exact")[:, 0].to(y.dtype)


def only_in_training(model: FlatModel, x: Any) -> tuple[str, ...]:
    """Return the last layer blocks, which have no part in an answer in evaluation: heads of the further answers."""
    with model.one_gradient(), torch.enable_grad():
        answer = model.module.eval()(x)
        (answer * torch.rand_like(answer)).sum().backward()
    blocks = model.layout.blocks
    used = [i for i, block in enumerate(blocks) if bool(model.gradient[block.slice].any())]
    return tuple(block.name for block in blocks[max(used, default=-1) + 1 :])
