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


def answers_of(output: Any, axes: int) -> tuple[Any, ...]:
    """Return the answers, each with this number of axes."""
    if isinstance(output, Tensor):
        return output.unbind(1) if output.dim() == axes + 1 else (output,)
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, list | tuple) else (output,)


def gives_several(output: Any, wanted: tuple[int, ...]) -> bool:
    """Return whether these are several answers of a batch, the first of the shape ``wanted``."""
    answers = answers_of(output, len(wanted))
    return (
        not (isinstance(output, Tensor) and len(answers) == 1)
        and all(
            isinstance(answer, Tensor) and answer.dim() == len(wanted) for answer in answers
        )
        and all(answer.shape[:2] == wanted[:2] for answer in answers)
        and tuple(answers[0].shape) == wanted
    )


def put_in_order(network: nn.Module, axes: int) -> None:
    """Let a network give a tuple of answers in training, and one answer in evaluation."""

    def in_order(module: nn.Module, _: Any, output: Any) -> Any:
        if module.training:
            return tuple(answer.float() for answer in answers_of(output, axes))
        return (
            output["out"].float() if isinstance(output, Mapping) and "out" in output else output
        )

    network.register_forward_hook(in_order)
    network.gives_several = True  # type: ignore[assignment]


def join_answers(output: Any) -> Tensor:
    """Return one or several answers as one tensor."""
    return torch.cat([answer.flatten(1) for answer in answers_of(output, 0)], 1)


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
        total: Tensor = sum(
            SHARE**i * self.loss(answer, resize_masks(y, answer))
            for i, answer in enumerate(answers)
        )
        return total


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
