"""Sums of clipped gradients: each unit's gradient is clipped to norm C before it is added.

A unit is a record, or a patient, whose gradient is the mean of their records' gradients. For a network of supported
layers, units are processed in chunks; patients in a chunk have equally many records. One backward pass to the layers'
outputs gives all norms, and from them the weighted sum (``layers.py``). For all other networks, and for patients with
more records than a chunk, units are processed one by one, with a backward pass each.

**Chunks have one shape.** Libraries compute a product of few rows otherwise than one of many, and weights that cancel
make of its last bits whatever a server likes. So the rows of a chunk depend on a unit's number of records and on the
run's settings alone: the last chunk is padded with copies of its first unit, which count for nothing.

**What a unit adds depends on the unit and the model alone**, and has norm C at most. So:

* A unit whose norm is not finite leaves before anything is weighted: 0 times an infinite input would be nan, in
  everybody's sum. A unit that raises an error adds nothing.
* A trial decides whether a network can be processed in chunks. It uses random records and weights, because a decision
  made with the silo's records or the server's weights would change what the other records add. A layer that is called
  twice, a weight that two layers share, a parameter that the loss uses, and mixed records fail the trial. So does a
  chunk in which a unit's numbers are not the same, bit for bit, at every place. These are processed one by one, where
  each gradient is of one unit alone.
* Each sum must be finite and at most the number of units times C long. Otherwise the units are added again one by one,
  each under the same condition, or left out.

The chunk size keeps the layers' inputs and the gradients of their outputs about as large as the activations of a plain
step, and the padding small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any

import torch
import torch.nn.functional as F
from flwr.common import log
from torch import Tensor, nn

from models.features import seen_features
from models.flat import FlatModel
from models.privacy.chunks import (
    by_size,
    chunk_size,
    evaluated,
    in_chunk,
    padded,
    power_of_two,
    random_like,
    random_weights,
    with_others,
)
from models.privacy.layers import ParameterGradients, Rows, in_float32, is_trained
from models.privacy.records import (
    MEANS,
    average_loss,
    check_buffers,
    check_unmixed,
    code_of,
    each_loss,
    seen_layers,
)
from models.training import Loss, OnFeatures, own_gradient, rows, seed_torch
from partitions.common.memory import is_out_of_memory


@dataclass(frozen=True)
class Drawn:
    """Records, and what their gradients are of; ``network``: one around the model's, or None."""

    x: Any
    y: Tensor
    loss: Loss | OnFeatures
    network: nn.Module | None

    def take(self, index: Tensor) -> Drawn:
        """Return these of the records."""
        return replace(self, x=rows(self.x, index), y=self.y[index])


# Records of the trial, and the relative error that rounding explains
TRIED, TOLERANCE = 3, 1e-3
ROUNDED = 1 + 1e-3  # how much longer rounding may make a sum


class Clipping:
    """Clipped sums of one model's gradients."""

    def __init__(
        self, model: FlatModel, clip_norm: float, together: bool = True, batch: int = 64
    ) -> None:
        check_unmixed(model.module)
        self.model, self.clip_norm = model, clip_norm
        self.together = together  # False: one by one, for every network
        # Padding costs less than another chunk where a record is one position of each layer
        layers = (m for m in model.module.modules() if [*m.parameters(recurse=False)])
        flat = all(type(m) is nn.Linear for m in layers)
        self.batch = 2 * batch if flat else batch // 2
        # Results of the trial, by trained parameters and kind of loss
        self.tried: dict[tuple[Any, ...], bool] = {}
        self.alike: dict[tuple[Any, ...], bool] = {}  # also by the records of a unit
        self.clipped: Tensor | int = 0  # number of units whose gradients were clipped,
        self.units = 0  # of this number

    @in_float32()
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
        nothing = torch.zeros_like(self.model.gradient), self.model.gradient.new_zeros(())
        if not len(y):
            return nothing
        drawn = Drawn(x, y, loss, network)
        units = (
            [torch.arange(len(y), device=y.device).unsqueeze(1)]
            if groups is None
            else by_size(groups)
        )
        sized = [(same, self._units_of_chunk(drawn, same.shape[1])) for same in units]
        sums = self._sum_chunks(drawn, sized)
        if sums is None:
            log(
                WARNING,
                "a sum of clipped gradients is too long or not finite: its units are added one by one",
            )
            alone = (
                self._sum_chunks(drawn, [(unit, many)])
                for same, many in sized
                for unit in torch.split(same, 1)
            )
            for unit in alone:
                if unit is not None:
                    nothing[0].add_(unit[0]), nothing[1].add_(unit[1])
            sums = nothing
        return sums

    def _sum_chunks(
        self, drawn: Drawn, sized: Sequence[tuple[Tensor, int]]
    ) -> tuple[Tensor, Tensor] | None:
        """Return :meth:`total` of units (n, k) of equal size, in chunks of so many units; None if it fails.

        0 units of a chunk: one by one.
        """
        total = torch.zeros_like(self.model.gradient)
        value = self.model.gradient.new_zeros(())
        try:
            for same, many in sized:
                for part in torch.split(same, many or 1):
                    if not many:
                        value += self._single(drawn.take(part[0]))
                        self._add(total)
                        continue
                    index = padded(part, many).flatten()
                    index = padded(index, in_chunk(many, part.shape[1]))
                    value += self._chunk(drawn.take(index), total, part.shape, many)[0]
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
        most_length = sum(len(same) for same, _ in sized) * self.clip_norm * ROUNDED
        return (total, value) if bool(length(total) <= most_length) else None

    def _factors(self, norms: Tensor) -> Tensor:
        """Return the factor of each unit, 0 for one that leaves."""
        factors = torch.where(
            norms.isfinite(), (self.clip_norm / (norms + 1e-6)).clamp(max=1.0), 0.0
        )
        self.clipped = self.clipped + (factors < 1).sum()
        self.units = self.units + norms.numel()
        return factors

    def _single(self, drawn: Drawn) -> Tensor:
        """Fill the model's gradient with that of the mean of these records' losses; return that mean."""
        loss = average_loss(drawn.loss)
        return own_gradient(self.model, drawn.x, drawn.y, loss, drawn.network)

    def _add(self, total: Tensor) -> Tensor:
        """Add the model's gradient, clipped, to ``total``; return its norm before clipping."""
        norm = length(self.model.gradient)
        factor = self._factors(norm)
        if bool(factor > 0):
            total.addcmul_(self.model.gradient, factor)
        return norm

    def _chunk(
        self, drawn: Drawn, total: Tensor, shape: tuple[int, ...], many: int
    ) -> tuple[Tensor, Tensor]:
        """Add the clipped gradients of the first of a chunk's ``many`` units to ``total``.

        ``shape``: the number of these units, and of the consecutive records of each. Returns the sum of their losses,
        and their norms before clipping.
        """
        count, k = shape
        value, parts = self._parts(drawn, shape, many)
        with torch.no_grad():
            lengths: dict[int, Tensor] = {}
            for part in parts:  # the norms of a parameter's parts are added: a layer may be called more than once
                at = id(part.parameter)
                norm = part.square(k).to(total.dtype).sqrt()
                lengths[at] = lengths[at] + norm if at in lengths else norm
            squares = (norm.square() for norm in lengths.values())
            norms = sum(squares, start=total.new_zeros(many)).sqrt()[:count]
            factors = F.pad(self._factors(norms), (0, many - count)).repeat_interleave(k)
            kept = factors > 0
            every = bool(
                kept[: count * k].all()
            )  # then copies of the first unit are finite, too
            views = {
                id(p): e
                for p, e in zip(
                    self.model.parameters, self.model.layout.parameters, strict=True
                )
            }
            for part in parts:
                gradient = (part if every else part.only(kept)).weighted_sum(factors)
                entry = views[id(part.parameter)]
                place = total[entry.start : entry.stop].view(entry.shape)
                if isinstance(gradient, Rows):
                    place.index_add_(0, *gradient)
                else:
                    place.add_(gradient.view(entry.shape))
        return value, norms

    def _parts(
        self, drawn: Drawn, shape: tuple[int, ...], many: int
    ) -> tuple[Tensor, list[ParameterGradients]]:
        """Return the sum of the losses of the first units of ``shape``, and the gradients of each layer of ``many``."""
        (count, k), used = shape, slice(0, many * shape[1])
        y, loss = drawn.y, drawn.loss
        module = drawn.network or self.model.module
        with seen_layers(module) as seen, seen_features(self.model) as features:
            logits = module(drawn.x)
        first = count * k
        if loss in MEANS:
            value = loss(logits, y) * (len(y) / k)
            reported = (
                value if first == len(y) else loss(logits[:first].detach(), y[:first]) * count
            )
        else:
            z = features[-1] if isinstance(loss, OnFeatures) else None
            each = each_loss(loss, logits, z, y) / k
            value, reported = each.sum(), each[:first].sum()
        gradients = torch.autograd.grad(
            value, [output for _, _, _, output in seen], allow_unused=True
        )
        with torch.no_grad():
            layers = (
                parts(m, a[used], d[used])
                for (parts, m, a, _), d in zip(seen, gradients, strict=True)
                if d is not None
            )
            return reported.detach(), [part for parts in layers for part in parts]

    def _units_of_chunk(self, drawn: Drawn, k: int) -> int:
        """Return how many units of k records a chunk has, a power of two whatever was drawn; 0: one by one."""
        most = chunk_size(drawn.x, self.batch) // k
        if not most or not self.together:
            return 0
        many = power_of_two(most)
        trained = tuple(is_trained(p) for p in self.model.parameters)
        key = (trained, type(drawn.loss), code_of(drawn.loss), drawn.network is None)
        if key not in self.tried:
            self.tried[key] = self._passes(self._trial, drawn, TRIED)
        if self.tried[key] and many > 1 and (*key, k) not in self.alike:
            alike = partial(self._are_places_alike, k, many)
            self.alike[(*key, k)] = self._passes(alike, drawn, in_chunk(many, k))
        return many if self.tried[key] and self.alike.get((*key, k), True) else 0

    def _passes(self, trial: Callable[..., bool], drawn: Drawn, count: int) -> bool:
        """Return whether a trial with this number of random records, and random weights, succeeds."""
        with random_weights(self.model) as rng:
            x, y = (random_like(v, rng, count) for v in (drawn.x, drawn.y))
            before = {
                name: buffer.clone() for name, buffer in self.model.module.named_buffers()
            }
            reason: object = "together, they are not each record's own"
            counted = self.clipped, self.units
            try:
                passed = trial(replace(drawn, x=x, y=y), rng)
            except Exception as error:  # of a network of the user's own: any
                passed, reason = False, error
            if not passed:
                log(INFO, "this network's gradients go one by one: %s", reason)
            self.clipped, self.units = counted
            check_buffers(self.model.module, before)
        return passed

    def _trial(self, drawn: Drawn, rng: torch.Generator) -> bool:
        """Return whether gradients of these records are each record's own, and equal those of single backward passes.

        The first is tested as in training, the second without dropout.
        """
        module, x = drawn.network or self.model.module, drawn.x
        parts = [
            self._first(replace(drawn, x=with_others(x, others)))
            for others in (x, random_like(x, rng, TRIED))
        ]
        if not all(
            torch.allclose(a, b, rtol=TOLERANCE, atol=1e-6) for a, b in zip(*parts, strict=True)
        ):
            return False
        with evaluated(module):
            together = torch.zeros_like(self.model.gradient)
            single = torch.zeros_like(self.model.gradient)
            norms = self._chunk(drawn, together, (TRIED, 1), TRIED)[1]
            lengths = []
            for record in torch.split(torch.arange(TRIED, device=drawn.y.device), 1):
                self._single(drawn.take(record))
                lengths.append(self._add(single))
        alone = torch.stack(lengths)
        close = torch.allclose(
            norms, alone, rtol=TOLERANCE, atol=TOLERANCE * float(alone.max())
        )
        return close and bool(length(together - single) <= TOLERANCE * length(single) + 1e-7)

    def _are_places_alike(self, k: int, many: int, drawn: Drawn, _: torch.Generator) -> bool:
        """Return whether a unit's numbers are the same, bit for bit, at each place and the next one of a chunk.

        So they are at all places. On a GPU norms may differ by rounding: it adds rows of a table in any order.
        """
        module, numbers = drawn.network or self.model.module, []
        with evaluated(module):  # without dropout
            for by in (0, k):
                index = torch.arange(many * k, device=drawn.y.device).roll(by)
                index = padded(index, len(drawn.y))
                parts = self._parts(drawn.take(index), (many, k), many)[1]
                numbers.append(
                    [v.roll(-1 if by else 0, 0) for p in parts for v in p.of_units(k)]
                )
        alike = torch.equal if drawn.y.device.type == "cpu" else torch.allclose
        return all(map(alike, *numbers))

    def _first(self, drawn: Drawn) -> list[Tensor]:
        """Return the first record's numbers in all parts, with the same dropout at each call."""
        seed_torch(torch.Generator().manual_seed(0))
        return [
            v[0]
            for part in self._parts(drawn, (TRIED, 1), TRIED)[1]
            for v in (part.d, getattr(part, "a", part.d))
        ]


def length(vector: Tensor) -> Tensor:
    """Return the Euclidean norm, to float32's accuracy.

    On a CPU, ``Tensor.norm`` is 0.1 % too small with 20 million numbers, and the gradient would be clipped too little.
    """
    return vector.square().sum().sqrt()
