"""FedRDN: each training sample is normalised by the statistics of a silo drawn at random, each test sample by its own.

Yan, Fu, Li, Xie, Ma, Yang and Zhu, CVPR 2025, arXiv 2306.09363. FedAvg, and a first layer that normalises: μ_k and
σ_k are mean and standard deviation, by channel or column, over the silo k's training samples.

    training     x' = (x - μ_j) / σ_j,   j drawn uniformly from all silos, anew for each sample and epoch
    prediction   x' = (x - μ_i) / σ_i,   with the silo's own

Sent: Σ_s down and up, and 2C numbers up, 2CK down in each round. Only the network is averaged; μ_i and σ_i are a
layer block of the silo's own model, ``input``, so that a file of it predicts alone. Kept: server the network, and every
silo's pair; silo μ_i, σ_i. The pairs travel without names and sorted: each hospital sees all of them, but not whose
they are. In round 1 no silo has others' pairs. An absent silo's pair stays; a newcomer has its own, and does not train.
Evaluated: the averaged network below the silo's own layer. Special cases: one silo, or equal pairs, are FedAvg of
inputs that each silo standardised, bit for bit.

Not in the paper: a channel of one value has σ = 1. A pair farther from the own one than ``reach`` (|μ_j - μ_i| in σ_i,
σ_j / σ_i and its inverse) is left out: inputs of other units, or a server's invention, are no augmentation. The pairs
are sent in every round, not once, so that a silo that joins late changes nothing else. The paper draws j per image (its
text was not available, (unverified)); a third party's code draws one per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.augmentation import Augmentation
from models.layout import Layout, size_of
from models.networks.blocks import Around
from models.samples import Samples
from models.shapes import Shape
from models.training import generator
from partitions.common.errors import DataError
from strategies.base.info import OWN_LAYERS, No
from strategies.base.partial import PartialClient, PartialStrategy, Split, split_parts
from strategies.base.settings import setting
from strategies.base.state import Arrays, ServerState
from strategies.base.transport.kinds import COLUMN_SUMS, SHARED
from strategies.base.transport.payload import Model, Payload, Update

INPUTS = "inputs"


@dataclass(frozen=True)
class RdnSettings:
    """Settings of FedRDN."""

    reach: float = setting(
        100.0,
        "how far another silo's statistics may be from the own ones",
        minimum=1,
        maximum=1000,
    )


def normalise(x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Return (x - μ) / σ for x (b, C, ...) and statistics (C,) or (b, C)."""
    places = [1] * (x.dim() - 2)
    mean, spread = (part.reshape(*part.shape, *places) for part in (mean, spread))
    return (x - mean) / spread


class Statistics(nn.Module):
    """The silo's own μ and σ (C,), not trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(channels))
        self.spread = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.mean, self.spread)


class Normalising(Around):
    """A network below the silo's own normalisation. In training its batches are normalised already."""

    input: Statistics

    def __init__(self, make: Callable[[], nn.Module], shape: Shape) -> None:
        super().__init__([make()], "input")
        self.input = Statistics(shape[0])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.networks[0](x if self.training else self.input(x))
        return outputs


@dataclass(frozen=True)
class RandomStatistics:
    """In the place of ``augment``: after it, each sample is normalised by one of the ``pairs`` (K, 2, C)."""

    pairs: Tensor
    before: Augmentation | None

    def change_batches(
        self, batches: Iterable[tuple[Any, Tensor]], n: int, rng: torch.Generator
    ) -> Iterator[tuple[Any, Tensor]]:
        draws = generator(rng.initial_seed(), INPUTS)
        drawn = torch.randint(len(self.pairs), (n,), generator=draws).to(self.pairs.device)
        if self.before is not None:
            batches = self.before.change_batches(batches, n, rng)
        done = 0
        for x, y in batches:
            mean, spread = self.pairs[drawn[done : done + len(y)]].unbind(1)
            done += len(y)
            yield normalise(x, mean, spread), y


def statistics(samples: Samples) -> Tensor:
    """Return μ and σ of each channel (2, C), summed in float64."""
    sums, count = [], 0
    for x, _ in samples.batches(samples.in_order()):
        values = x.double().transpose(0, 1).flatten(1)
        sums.append(torch.stack([values.sum(1), values.square().sum(1)]))
        count += values.shape[1]
    mean, square = torch.stack(sums).sum(0) / count
    variance = square - mean.square()
    changes = variance > 1e-12 * square
    return torch.stack([mean, torch.where(changes, variance, 1.0).sqrt()]).float()


class FedRDNClient(PartialClient):
    settings: RdnSettings

    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        return split_parts(layout, ["input"])

    def place_own(self, vector: Tensor) -> Tensor:
        released = self.silo.moments
        if self.state.personal is None or released:
            pair = released() if released else statistics(self.silo.train)
            vector[self.private[0]] = pair.flatten()
        return vector

    def near(self, sent: Tensor, pair: Tensor) -> Tensor:
        """Return bool (K,): which pairs are within ``reach`` of the own one."""
        apart, ratio = (sent[:, 0] - pair[0]).abs() / pair[1], sent[:, 1] / pair[1]
        reach = self.settings.reach
        fits = (apart <= reach) & (ratio <= reach) & (ratio >= 1 / reach)
        return fits.flatten(1).all(1)

    def local_update(self) -> list[Tensor]:
        vector = self.model.vector
        pair = vector[self.private[0]].clone().view(2, -1)
        pairs = pair[None]
        if INPUTS in self.models:
            sent = self.models[INPUTS].vector.view(-1, *pair.shape)
            near = sent[self.near(sent, pair)]
            pairs = near if len(near) else pairs
        augment: Any = RandomStatistics(pairs, self.silo.augment)
        self.silo = replace(self.silo, augment=augment)
        self.train(parts=self.shared)
        return [vector[self.shared[0]].clone(), pair.flatten()]

    def newcomer_parts(self) -> Sequence[slice]:
        return ()


class RdnServerState(ServerState):
    inputs = Arrays("inputs.")  # the pairs (2 C,), by the silo's name


class FedRDN(PartialStrategy):
    info = OWN_LAYERS(
        name="fedrdn",
        title="Training samples normalised by the statistics of random silos",
        paper="Yan et al., CVPR 2025, arXiv 2306.09363",
        spelling="FedRDN",
        sends=("Σ_s + 2CK", "Σ_s + 2C"),
        uploads={"shared": SHARED, INPUTS: COLUMN_SUMS},
        own_model="sent",
        note="every silo gets the statistics of its inputs, without names",
        reports="received",
        late="grows",
        inputs=("table", "picture", "volume"),
        not_inputs="padding and missing parts are zeros, which normalised inputs are not",
        sums=No("every silo needs each silo's statistics of inputs"),
        lossy=No("statistics of inputs are no steps"),
        ala=False,
        dp=No("mean and deviation of the inputs leave, without noise"),
    )
    client = FedRDNClient
    head = Normalising
    state_type = RdnServerState
    state: RdnServerState
    Settings = RdnSettings

    def begin_round(self) -> None:
        # Sorted by their numbers, so that the order names no silo
        rows = sorted(vector.tolist() for vector in self.state.inputs.values())
        pairs = torch.tensor(rows).flatten().to(self.state.model)
        self.pairs = {INPUTS: Model(pairs, round=self.round - 1)} if rows else {}

    def payload(self, silo: str) -> Payload:
        return Payload({**super().payload(silo).models, **self.pairs})

    def sizes(self, silo: str) -> dict[str, int]:
        return {**super().sizes(silo), INPUTS: size_of(self.layout.parts(["input"]))}

    def check(self, update: Update) -> None:
        _, spread = update.vectors[INPUTS].chunk(2)
        if not bool((spread > 0).all()):
            raise DataError("'inputs' holds deviations that are not above 0")

    def aggregate(self, updates: Sequence[Update]) -> None:
        super().aggregate(updates)
        self.state.inputs.update({u.silo: u.vectors[INPUTS].clone() for u in updates})
