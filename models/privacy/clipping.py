"""Sums of clipped gradients: each unit's gradient is clipped to norm C before it is added.

A unit is a record, or a patient, whose gradient is the mean of their records' gradients. For a network of supported
layers, units are processed in chunks; patients in a chunk have equally many records. One backward pass to the layers'
outputs gives all norms, and from them the weighted sum (``layers.py``). For all other networks, and for patients with
more records than a chunk, units are processed one by one, with a backward pass each.

The chunk size keeps the layers' inputs and the gradients of their outputs about as large as the activations of a plain
step. A trial decides whether a network can be processed in chunks: norms and sum of its first few records must equal
those of single backward passes. A layer that is called twice, a weight that two layers share, a parameter that the loss
uses, and mixed records fail the trial. These are processed one by one, where each gradient is of one record alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import INFO
from typing import Any

import torch
import torch.nn.functional as F
from flwr.common import log
from torch import Tensor, nn

from models.features import seen_features
from models.flat import FlatModel
from models.privacy.layers import Layer, Rows, is_trained, layer_of
from models.tasks.regression import square_loss
from models.tasks.segmentation import segmentation_loss
from models.training import Loss, OnFeatures, own_gradient
from partitions.common.errors import UserError

MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
TRIED, TOLERANCE = 3, 1e-3  # records of the trial, and the relative error that rounding explains
CHUNK = 2**17  # input values in a chunk,
FEWEST, MOST = 16, 256  # within these limits of its records
MEANS = (F.cross_entropy, square_loss, segmentation_loss)  # losses that are means of the records' losses


class Clipping:
    """Clipped sums of one model's gradients."""

    def __init__(self, model: FlatModel, clip_norm: float, together: bool = True) -> None:
        check_network(model.module)
        self.model, self.clip_norm = model, clip_norm
        self.together = together  # False: one by one, for every network
        self.tried: dict[tuple[Any, ...], bool] = {}  # results of the trial, by trained parameters and kind of loss
        self.clipped: Tensor | int = 0  # number of units whose gradients were clipped,
        self.units = 0  # of this number

    def total(
        self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None, groups: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum (Σ,) over units of their clipped gradients, and the sum of their losses.

        ``groups``: the rows of each patient; None: a unit is a record.
        """
        total, value = torch.zeros_like(self.model.gradient), self.model.gradient.new_zeros(())
        if not len(y):
            return total, value
        units = torch.split(torch.arange(len(y), device=y.device), 1) if groups is None else groups
        most = chunk_size(x) if self.together and self._may_go_together(x, y, loss, network) else 0
        for k, same in by_size(units):
            if k > most:
                for index in same:
                    value += self._single(x, y, index, loss, network)
                    self._add(total)
            else:
                for part in torch.split(torch.cat(same), most // k * k):
                    value += self._chunk(rows(x, part), y[part], loss, network, total, k)[0]
        return total, value

    def _factors(self, norms: Tensor) -> Tensor:
        factors = (self.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        factors = torch.where(norms.isfinite(), factors, 0.0)  # one record's overflow must not end a round
        self.clipped, self.units = self.clipped + (factors < 1).sum(), self.units + norms.numel()
        return factors

    def _single(self, x: Any, y: Tensor, index: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> Tensor:
        """Fill the model's gradient with that of the mean of these records' losses; return that mean."""
        return own_gradient(self.model, rows(x, index), y[index], averaged(loss), network)

    def _add(self, total: Tensor) -> Tensor:
        """Add the model's gradient, clipped, to ``total``; return its norm before clipping."""
        gradient = self.model.gradient
        norm = length(gradient)
        factor = self._factors(norm)  # 0 where a number is not finite; 0 times that is nan, so it is replaced first
        total.addcmul_(gradient.nan_to_num_(0.0, 0.0, 0.0), factor)
        return norm

    def _chunk(
        self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None, total: Tensor, k: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Add the clipped gradients of a chunk's units, of k consecutive records each, to ``total``.

        Returns the sum of the units' losses, and their norms (b,) before clipping.
        """
        module = network or self.model.module
        with seen_layers(module) as seen, seen_features(self.model) as features:
            logits = module(x)
        if loss in MEANS:
            value = loss(logits, y) * (len(y) / k)
        else:
            value = each_loss(loss, logits, features[-1] if isinstance(loss, OnFeatures) else None, y).sum() / k
        found = torch.autograd.grad(value, [output for _, _, _, output in seen], allow_unused=True)
        with torch.no_grad():
            used = [(layer, m, a, d) for (layer, m, a, _), d in zip(seen, found, strict=True) if d is not None]
            squares = (layer.square(m, a, d, k) for layer, m, a, d in used)
            norms = sum(squares, start=total.new_zeros(len(y) // k)).sqrt()
            factors = self._factors(norms).repeat_interleave(k)
            views = {id(p): e for p, e in zip(self.model.parameters, self.model.layout.parameters, strict=True)}
            for layer, m, a, d in used:
                weighted = torch.where(_along(factors, d) > 0, _along(factors, d) * d, 0.0)
                for parameter, gradient in layer.weighted(m, a, weighted):
                    entry = views[id(parameter)]
                    part = total[entry.start : entry.stop].view(entry.shape)
                    if isinstance(gradient, Rows):
                        part.index_add_(0, *gradient)
                    else:
                        part.add_(gradient.view(entry.shape))
        return value.detach(), norms

    def _may_go_together(self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> bool:
        trained = tuple(is_trained(p) for p in self.model.parameters)
        key = (trained, type(loss), code_of(loss), network is None)
        if key not in self.tried:
            try:
                self.tried[key] = self._trial(x, y, loss, network)
            except (RuntimeError, KeyError, AttributeError, IndexError, TypeError) as error:
                log(INFO, "this network's gradients go one by one: %s", error)
                self.tried[key] = False
            else:
                if not self.tried[key]:
                    log(INFO, "this network's gradients go one by one: together, they are not each record's own")
        return self.tried[key]

    def _trial(self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> bool:
        """Return whether the first records' clipped sum and norms equal those of single backward passes.

        The comparison is without dropout.
        """
        module, count = network or self.model.module, (self.clipped, self.units)
        index = torch.arange(min(TRIED, len(y)), device=y.device)
        training = [m for m in module.modules() if m.training]
        module.eval()
        try:
            together, single = torch.zeros_like(self.model.gradient), torch.zeros_like(self.model.gradient)
            norms = self._chunk(rows(x, index), y[index], loss, network, together)[1]
            lengths = []
            for one in torch.split(index, 1):
                self._single(x, y, one, loss, network)
                lengths.append(self._add(single))
        finally:
            for m in training:
                m.training = True
            self.clipped, self.units = count
        alone = torch.stack(lengths)
        close = torch.allclose(norms, alone, rtol=TOLERANCE, atol=TOLERANCE * float(alone.max()))
        return close and bool(length(together - single) <= TOLERANCE * length(single) + 1e-7)


def code_of(loss: Loss | OnFeatures) -> object:
    """The code of a loss, the same for one that is defined anew at each step; else its type."""
    function = loss.of if isinstance(loss, OnFeatures) else loss
    return getattr(function, "__code__", type(function))


def by_size(units: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (k, the units with k records), in ascending order of k."""
    sizes: dict[int, list[Tensor]] = {}
    for index in units:
        sizes.setdefault(len(index), []).append(index)
    yield from sorted(sizes.items())


def length(vector: Tensor) -> Tensor:
    """Return the Euclidean norm, to float32's accuracy.

    On a CPU, ``Tensor.norm`` is 0.1 % too small with 20 million numbers, and the gradient would be clipped too little.
    """
    return vector.square().sum().sqrt()


def chunk_size(x: Any) -> int:
    """Return the number of records of this batch in a chunk."""
    inputs = (x,) if isinstance(x, Tensor) else x
    return min(max(CHUNK // max(sum(part[0].numel() for part in inputs), 1), FEWEST), MOST)


def check_network(module: nn.Module) -> None:
    """Raise UserError where a network mixes records."""
    for name, layer in module.named_modules():
        if isinstance(layer, MIXING) and (layer.training or not layer.track_running_stats):
            raise UserError(
                f"dp = true: not with this network: its {type(layer).__name__} ({name}) mixes records; take one "
                "without, such as small-cnn, player-cnn, fedala-cnn or vit-s, for outlines unet (GroupNorm)"
            )


@contextmanager
def seen_layers(module: nn.Module) -> Iterator[list[tuple[Layer, nn.Module, Tensor, Tensor]]]:
    """Context that records each call of a layer with trained parameters, with its inputs and its outputs."""
    seen: list[tuple[Layer, nn.Module, Tensor, Tensor]] = []

    def note(layer: Layer) -> Callable[[nn.Module, Any, Any], None]:
        return lambda m, inputs, output: seen.append((layer, m, inputs[0].detach(), output))

    hooks = []
    for m in module.modules():
        layer = layer_of(m)
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


def each_loss(loss: Loss | OnFeatures, logits: Tensor, features: Tensor | None, y: Tensor) -> Tensor:
    """Return the loss (b,) of each record by itself."""
    if len(y) == 1 and not isinstance(loss, OnFeatures):
        return loss(logits, y).reshape(1)
    of = loss.of if isinstance(loss, OnFeatures) else None
    given = (logits, y) if of is None or features is None else (logits, features, y)
    one = of or loss

    def alone(*parts: Tensor) -> Tensor:
        return one(*(part.unsqueeze(0) for part in parts))  # type: ignore[operator]

    try:
        found: Tensor = torch.vmap(alone)(*given)
    except RuntimeError:  # a loss whose control flow depends on values, which vmap cannot do
        found = torch.stack([alone(*(part[i] for part in given)) for i in range(len(y))])
    return found


def averaged(loss: Loss | OnFeatures) -> Loss | OnFeatures:
    """Return the loss that is the mean over records of each one's loss by itself."""
    if loss in MEANS:
        return loss
    if isinstance(loss, OnFeatures):
        return OnFeatures(lambda logits, features, y: each_loss(loss, logits, features, y).mean())
    return lambda logits, y: each_loss(loss, logits, None, y).mean()


def rows(x: Any, index: Tensor) -> Any:
    """Return these records of a batch, which may have several inputs."""
    return x[index] if isinstance(x, Tensor) else type(x)(*(part[index] for part in x))


def _along(factors: Tensor, d: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (d.dim() - 1))
