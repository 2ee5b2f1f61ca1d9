"""Sums of clipped gradients: each unit's gradient is clipped to norm C before it is added.

A unit is a record, or a patient, whose gradient is the mean of their records' gradients. For a network of supported
layers, units are processed in chunks; patients in a chunk have equally many records. One backward pass to the layers'
outputs gives all norms, and from them the weighted sum (``layers.py``). For all other networks, and for patients with
more records than a chunk, units are processed one by one, with a backward pass each.

**What a unit adds depends on the unit and the model alone**, and has norm C at most. So:

* A unit whose norm is not finite leaves before anything is weighted: 0 times an infinite input would be nan, in
  everybody's sum. A unit that raises an error adds nothing.
* A trial decides whether a network can be processed in chunks. It uses random records and weights, because a decision
  made with the silo's records or the server's weights would change what the other records add. A layer that is called
  twice, a weight that two layers share, a parameter that the loss uses, and mixed records fail the trial. These are
  processed one by one, where each gradient is of one record alone.
* Each sum must be finite and at most the number of units times C long. Otherwise the units are added again one by one,
  each under the same condition, or left out.

The chunk size keeps the layers' inputs and the gradients of their outputs about as large as the activations of a plain
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.common import log
from torch import Tensor, nn

from models.features import seen_features
from models.flat import FlatModel
from models.privacy.layers import ParameterGradients, Rows, is_trained
from models.privacy.records import (
    MEANS,
    average_loss,
    check_buffers,
    check_network,
    each_loss,
    seen_layers,
)
from models.training import Loss, OnFeatures, own_gradient, rows, seed_torch
from partitions.common.memory import is_out_of_memory

# Records of the trial, and the relative error that rounding explains
TRIED, TOLERANCE = 3, 1e-3
ROUNDED = 1 + 1e-3  # how much longer rounding may make a sum
CHUNK = 2**17  # input values in a chunk,
FEWEST, MOST = 16, 256  # within these limits of its records


class Clipping:
    """Clipped sums of one model's gradients."""

    def __init__(self, model: FlatModel, clip_norm: float, together: bool = True) -> None:
        check_network(model.module)
        self.model, self.clip_norm = model, clip_norm
        self.together = together  # False: one by one, for every network
        # Results of the trial, by trained parameters and kind of loss
        self.tried: dict[tuple[Any, ...], bool] = {}
        self.clipped: Tensor | int = 0  # number of units whose gradients were clipped,
        self.units = 0  # of this number

    def total(
        self,
        x: Any,
        y: Tensor,
        loss: Loss | OnFeatures,
        network: nn.Module | None,
        groups: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum (Σ,) over units of their clipped gradients, and the sum of their losses.

        ``groups``: the rows of each patient; None: a unit is a record. No error depends on the records.
        """
        if not len(y):
            return torch.zeros_like(self.model.gradient), self.model.gradient.new_zeros(())
        units = (
            [torch.arange(len(y), device=y.device).unsqueeze(1)]
            if groups is None
            else by_size(groups)
        )
        most = (
            chunk_size(x) if self.together and self._may_go_together(x, y, loss, network) else 0
        )
        found = self._sum_chunks(x, y, loss, network, units, most)
        if found is None:
            log(
                WARNING,
                "a sum of clipped gradients is too long or not finite: its units are added one by one",
            )
            alone = (
                self._sum_chunks(x, y, loss, network, [one], most)
                for same in units
                for one in torch.split(same, 1)
            )
            nothing = torch.zeros_like(self.model.gradient), self.model.gradient.new_zeros(())
            for one in alone:
                if one is not None:
                    nothing[0].add_(one[0]), nothing[1].add_(one[1])
            found = nothing
        return found

    def _sum_chunks(
        self,
        x: Any,
        y: Tensor,
        loss: Loss | OnFeatures,
        network: nn.Module | None,
        units: Sequence[Tensor],
        most: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Return :meth:`total` of units (n, k) of equal size, in chunks of ``most`` records; None if it fails."""
        total = torch.zeros_like(self.model.gradient)
        value = self.model.gradient.new_zeros(())
        try:
            for same in units:
                if (k := same.shape[1]) > most:
                    for index in same:
                        value += self._single(x, y, index, loss, network)
                        self._add(total)
                else:
                    for part in torch.split(same.flatten(), most // k * k):
                        value += self._chunk(rows(x, part), y[part], loss, network, total, k)[0]
        except Exception as error:  # of a record: an error reply would disclose it
            if is_out_of_memory(error):
                raise
            log(
                WARNING,
                "a batch of private gradients failed with %s: %s",
                type(error).__name__,
                error,
            )
            return None
        # The one condition of all ways; a comparison with nan is false.
        most_length = sum(map(len, units)) * self.clip_norm * ROUNDED
        return (total, value) if bool(length(total) <= most_length) else None

    def _factors(self, norms: Tensor) -> Tensor:
        """Return the factor of each unit, 0 for one that leaves."""
        factors = torch.where(
            norms.isfinite(), (self.clip_norm / (norms + 1e-6)).clamp(max=1.0), 0.0
        )
        self.clipped = self.clipped + (factors < 1).sum()
        self.units = self.units + norms.numel()
        return factors

    def _single(
        self,
        x: Any,
        y: Tensor,
        index: Tensor,
        loss: Loss | OnFeatures,
        network: nn.Module | None,
    ) -> Tensor:
        """Fill the model's gradient with that of the mean of these records' losses; return that mean."""
        return own_gradient(self.model, rows(x, index), y[index], average_loss(loss), network)

    def _add(self, total: Tensor) -> Tensor:
        """Add the model's gradient, clipped, to ``total``; return its norm before clipping."""
        norm = length(self.model.gradient)
        factor = self._factors(norm)
        if bool(factor > 0):
            total.addcmul_(self.model.gradient, factor)
        return norm

    def _chunk(
        self,
        x: Any,
        y: Tensor,
        loss: Loss | OnFeatures,
        network: nn.Module | None,
        total: Tensor,
        k: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Add the clipped gradients of a chunk's units, of k consecutive records each, to ``total``.

        Returns the sum of the units' losses, and their norms (b,) before clipping.
        """
        value, parts = self._parts(x, y, loss, network, k)
        with torch.no_grad():
            lengths: dict[int, Tensor] = {}
            for part in parts:  # the norms of a parameter's parts are added: a layer may be called more than once
                at = id(part.parameter)
                found = part.square(k).to(total.dtype).sqrt()
                lengths[at] = lengths[at] + found if at in lengths else found
            squares = (found.square() for found in lengths.values())
            norms = sum(squares, start=total.new_zeros(len(y) // k)).sqrt()
            factors = self._factors(norms).repeat_interleave(k)
            kept = (factors > 0).nonzero().squeeze(1)
            views = {
                id(p): e
                for p, e in zip(
                    self.model.parameters, self.model.layout.parameters, strict=True
                )
            }
            for part in parts:
                own = part if len(kept) == len(factors) else part.only(kept)
                gradient = own.weighted_sum(factors[kept])
                entry = views[id(part.parameter)]
                place = total[entry.start : entry.stop].view(entry.shape)
                if isinstance(gradient, Rows):
                    place.index_add_(0, *gradient)
                else:
                    place.add_(gradient.view(entry.shape))
        return value, norms

    def _parts(
        self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None, k: int
    ) -> tuple[Tensor, list[ParameterGradients]]:
        """Return the sum of the losses of units of k records, and the gradients of each layer's parameters."""
        with (
            seen_layers(network or self.model.module) as seen,
            seen_features(self.model) as features,
        ):
            logits = (network or self.model.module)(x)
        if loss in MEANS:
            value = loss(logits, y) * (len(y) / k)
        else:
            value = (
                each_loss(
                    loss, logits, features[-1] if isinstance(loss, OnFeatures) else None, y
                ).sum()
                / k
            )
        found = torch.autograd.grad(
            value, [output for _, _, _, output in seen], allow_unused=True
        )
        with torch.no_grad():
            used = (
                (parts, m, a, d)
                for (parts, m, a, _), d in zip(seen, found, strict=True)
                if d is not None
            )
            return value.detach(), [part for parts, m, a, d in used for part in parts(m, a, d)]

    def _may_go_together(
        self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None
    ) -> bool:
        trained = tuple(is_trained(p) for p in self.model.parameters)
        key = (trained, type(loss), code_of(loss), network is None)
        if key not in self.tried:
            with random_weights(self.model) as rng:
                x, y = (random_like(v, rng) for v in (x, y))
                before = {
                    name: buffer.clone() for name, buffer in self.model.module.named_buffers()
                }
                try:
                    self.tried[key] = self._trial(x, y, loss, network, rng)
                except Exception as error:  # of a network of the user's own: any
                    log(INFO, "this network's gradients go one by one: %s", error)
                    self.tried[key] = False
                else:
                    if not self.tried[key]:
                        log(
                            INFO,
                            "this network's gradients go one by one: together, they are not each record's own",
                        )
                check_buffers(self.model.module, before)
        return self.tried[key]

    def _trial(
        self,
        x: Any,
        y: Tensor,
        loss: Loss | OnFeatures,
        network: nn.Module | None,
        rng: torch.Generator,
    ) -> bool:
        """Return whether gradients of these records are each record's own, and equal those of single backward passes.

        The first is tested as in training, the second without dropout.
        """
        module = network or self.model.module
        count = (self.clipped, self.units)
        index = torch.arange(TRIED, device=y.device)
        training = [m for m in module.modules() if m.training]
        parts = [
            self._first(with_others(x, others), y, loss, network)
            for others in (x, random_like(x, rng))
        ]
        if not all(
            torch.allclose(a, b, rtol=TOLERANCE, atol=1e-6) for a, b in zip(*parts, strict=True)
        ):
            return False
        module.eval()
        try:
            together = torch.zeros_like(self.model.gradient)
            single = torch.zeros_like(self.model.gradient)
            norms = self._chunk(x, y, loss, network, together)[1]
            lengths = []
            for one in torch.split(index, 1):
                self._single(x, y, one, loss, network)
                lengths.append(self._add(single))
        finally:
            for m in training:
                m.training = True
            self.clipped, self.units = count
        alone = torch.stack(lengths)
        close = torch.allclose(
            norms, alone, rtol=TOLERANCE, atol=TOLERANCE * float(alone.max())
        )
        return close and bool(length(together - single) <= TOLERANCE * length(single) + 1e-7)

    def _first(
        self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None
    ) -> list[Tensor]:
        """Return the first record's numbers in all parts, with the same dropout at each call."""
        seed_torch(torch.Generator().manual_seed(0))
        return [
            v[0]
            for part in self._parts(x, y, loss, network, 1)[1]
            for v in (part.d, getattr(part, "a", part.d))
        ]


@contextmanager
def random_weights(model: FlatModel) -> Iterator[torch.Generator]:
    """Context in which the model has random weights and its first buffers; yields the generator, always the same."""
    rng = torch.Generator().manual_seed(0)
    kept = model.vector.clone()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), model.kept_buffers():
        for entry, parameter in zip(model.layout.parameters, model.parameters, strict=True):
            values = torch.randn(entry.shape, generator=rng).to(parameter.device)
            width = parameter[0].numel() if parameter.dim() > 1 else 1
            parameter.data.copy_(values / width**0.5 if width > 1 else 1 + values / 2)
        model.reset_buffers()
        try:
            yield rng
        finally:
            model.load(kept)


def random_like(batch: Any, rng: torch.Generator) -> Any:
    """Return :data:`TRIED` random records like those of a batch: normal numbers, or 0 and 1 where it has integers."""
    if not isinstance(batch, Tensor):
        return type(batch)(*(random_like(part, rng) for part in batch))
    shape = (TRIED, *batch.shape[1:])
    if batch.is_floating_point():
        return torch.randn(shape, generator=rng).to(batch)
    found = torch.randint(0, 2, shape, generator=rng)
    found.view(TRIED, -1)[:, 0] = 1  # no text is empty
    return found.to(batch)


def with_others(x: Any, others: Any) -> Any:
    """Return the first record of ``x`` and all but the first of ``others``."""
    if isinstance(x, Tensor):
        return torch.cat([x[:1], others[1:]])
    return type(x)(*(with_others(*pair) for pair in zip(x, others, strict=True)))


def code_of(loss: Loss | OnFeatures) -> object:
    """The code of a loss, the same for one that is defined anew at each step; else its type."""
    function = loss.of if isinstance(loss, OnFeatures) else loss
    return getattr(function, "__code__", type(function))


def by_size(units: Sequence[Tensor]) -> list[Tensor]:
    """Return the records of the units of each size, (units, size), in ascending order of size."""
    sizes: dict[int, list[Tensor]] = {}
    for index in units:
        sizes.setdefault(len(index), []).append(index)
    return [torch.stack(same) for _, same in sorted(sizes.items())]


def length(vector: Tensor) -> Tensor:
    """Return the Euclidean norm, to float32's accuracy.

    On a CPU, ``Tensor.norm`` is 0.1 % too small with 20 million numbers, and the gradient would be clipped too little.
    """
    return vector.square().sum().sqrt()


def chunk_size(x: Any) -> int:
    """Return the number of records of this batch in a chunk."""
    inputs = (x,) if isinstance(x, Tensor) else x
    return min(max(CHUNK // max(sum(part[0].numel() for part in inputs), 1), FEWEST), MOST)
