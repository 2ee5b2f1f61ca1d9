"""What differential privacy needs of a network: each record's inputs, gradients and loss, apart from all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import WARNING
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from flwr.common import log
from torch import Tensor, nn

from models.features import features
from models.flat import FlatModel
from models.privacy.layers import Parts, gradient_parts, is_trained
from models.samples import Samples
from models.tasks.regression import square_loss
from models.tasks.segmentation import segmentation_loss
from models.training import Loss, OnFeatures
from partitions.common.errors import UserError
from partitions.common.memory import is_out_of_memory

T = TypeVar("T")
# Losses that are means of the records' losses
MEANS = (F.cross_entropy, square_loss, segmentation_loss)
MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def check_unmixed(module: nn.Module) -> None:
    """Raise UserError where a network mixes records."""
    for name, layer in module.named_modules():
        if isinstance(layer, MIXING) and (layer.training or not layer.track_running_stats):
            raise UserError(
                f"dp = true: not with this network: its {type(layer).__name__} ({name}) mixes records; take one "
                "without, such as small-cnn, player-cnn, fedala-cnn or vit-s, for outlines unet (GroupNorm)"
            )


def check_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raise UserError where a training step changed a buffer: it would carry records to others' gradients."""
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise UserError(
                f"dp = true: not with this network: its buffer {name} changes in training, so it mixes records; take a "
                "network without running statistics"
            )


@contextmanager
def seen_layers(module: nn.Module) -> Iterator[list[tuple[Parts, nn.Module, Tensor, Tensor]]]:
    """Context that records each call of a layer with trained parameters, with its inputs and its outputs."""
    seen: list[tuple[Parts, nn.Module, Tensor, Tensor]] = []

    def note(layer: Parts) -> Callable[[nn.Module, Any, Any], None]:
        return lambda m, inputs, output: seen.append((layer, m, inputs[0].detach(), output))

    hooks = []
    for m in module.modules():
        layer = gradient_parts(m)
        if layer is not None and any(is_trained(p) for p in parameters_of(m)):
            hooks.append(m.register_forward_hook(note(layer)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def parameters_of(module: Any) -> Iterator[Tensor]:
    """Yield a layer's own parameters, and those of its parametrisations (LoRA)."""
    yield from module.parameters(recurse=False)
    if hasattr(module, "parametrizations"):
        yield from module.parametrizations.parameters()


def each_loss(
    loss: Loss | OnFeatures, logits: Tensor, features: Tensor | None, y: Tensor
) -> Tensor:
    """Return the loss (b,) of each record by itself."""
    if len(y) == 1 and not isinstance(loss, OnFeatures):
        return loss(logits, y).reshape(1)
    of = loss.of if isinstance(loss, OnFeatures) else None
    parts_of_all = (logits, y) if of is None or features is None else (logits, features, y)
    single = of or loss

    def alone(*parts: Tensor) -> Tensor:
        return single(*(part.unsqueeze(0) for part in parts))  # type: ignore[operator]

    try:
        losses: Tensor = torch.vmap(alone)(*parts_of_all)
    except RuntimeError:  # a loss whose control flow depends on values, which vmap cannot do
        losses = torch.stack(
            [alone(*(part[i] for part in parts_of_all)) for i in range(len(y))]
        )
    return losses


def average_loss(loss: Loss | OnFeatures) -> Loss | OnFeatures:
    """Return the loss that is the mean over records of each one's loss by itself."""
    if loss in MEANS:
        return loss
    if isinstance(loss, OnFeatures):
        return OnFeatures(
            lambda logits, features, y: each_loss(loss, logits, features, y).mean()
        )
    return lambda logits, y: each_loss(loss, logits, None, y).mean()


def code_of(loss: Loss | OnFeatures) -> object:
    """The code of a loss, the same for one that is defined anew at each step; else its type."""
    function = loss.of if isinstance(loss, OnFeatures) else loss
    return getattr(function, "__code__", type(function))


def features_of_each(
    model: FlatModel, samples: Samples, longest: float
) -> tuple[Tensor, Tensor]:
    """Return features (n, K) shortened to this norm, and whether a record has any (n,), 0 or 1, both float64.

    Each record goes through the network alone. One that fails, or whose features are not finite, has none: zeros.
    """
    none = torch.full((1, model.layout.features), math.nan, device=samples.device)
    model.module.eval()
    each = torch.split(torch.arange(len(samples), device=samples.index_device), 1)
    rows = [
        quietly(model, none, features, model, samples, record).flatten(1) for record in each
    ]
    model.module.train()
    z = torch.cat(rows).double()
    norms = z.norm(dim=1)
    shorter = (longest / norms).clamp(max=1.0)
    return (z * shorter[:, None]).nan_to_num(0.0, 0.0, 0.0), norms.isfinite().double()


def quietly(privacy: object | None, otherwise: T, work: Callable[..., T], *arguments: Any) -> T:
    """Return ``work(*arguments)``; with privacy ``otherwise`` if it fails, as an error would reveal the records."""
    if privacy is None:
        return work(*arguments)
    try:
        return work(*arguments)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log(
            WARNING,
            "%s failed, which stays here: %s: %s",
            work.__name__,
            type(error).__name__,
            error,
        )
        return otherwise
