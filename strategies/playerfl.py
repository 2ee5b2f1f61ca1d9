"""PLayer-FL and PLayer-FL-Random: the depth of federation, chosen by a pruning-style sensitivity.

Elhussein and Gürsoy, MLSys 2026, arXiv 2502.08829. Layers 1..l* are averaged, the rest stay in the silo. The cut l* is
one for all silos, decided once, at run time. After round 1, which is ordinary local training of the whole model from a
common start, each silo computes on its locally trained Θ

    s_l = (1/n'_l) sum_{p in layer l} (θ_p ∂L/∂θ_p)²,  no biases;    F_l = s_1 + ... + s_l

and sends these L numbers with its model. For a table of embeddings, as in the code, only the means of θ and of ∂L/∂θ
over the rows of all tokens in the batches are used. So n'_l is its width and not the vocabulary's size. The server
computes their median over silos and

    l* = the smallest l with s_{l+1} / s_l > t,   t = 2

or federates everything if there is none (``without-cut = "all-but-last"``: all but the last layer). This rule finds the
published cuts: on heart disease in 10 of 10 seeds, on Fashion-MNIST in 2 of 2. The slides show F, and can be read as
comparing F, averaged over silos (``ratio = "cumulative"``, ``combine = "mean"``). In that reading, the rule finds
the cuts in 5 of 10 seeds and 1 of 2. The gradient of one batch is noisy, so it is averaged over ``batches`` random
batches (the code uses one). ``cut`` > 0 fixes l*, as the code's configuration does. The slides compute the sensitivity
"after just 1 epoch"; here it is after round 1. So with local-epochs > 1 the model fits its silo better: gradients are
smaller, first in the last layers, and the cut may differ. PLayer-FL-Random draws its cut from {1..L} without L and
without PLayer-FL's, decided or fixed.

Server: sample-weighted mean of the shared layers. Sent: Σ down and Σ + L numbers up in round 1, then Σ_s and Σ_s. Kept:
server u, l*; silo its own layers. The methods assume that all silos are present; a silo that is absent in round 1 only
lacks its vote. With secure sums, which need combine = "mean", the L numbers travel in the sum, with equal weights.
Special cases: l* = L is FedAvg, l* = 0 Local, l* = L - 1 FedPer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from models.features import rows_looked_up
from models.flat import gather
from models.layout import Layout
from models.training import generator
from partitions.common.errors import DataError
from strategies.base.info import OTHER_LAYERS, OWN_LAYERS, No, Sums
from strategies.base.partial import PartialClient, PartialStrategy, Split, split_parts
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Item, ServerState
from strategies.base.transport.kinds import Measured
from strategies.base.transport.payload import Payload, Update


@dataclass(frozen=True)
class PLayerSettings:
    """Settings of PLayer-FL."""

    threshold: float = setting(
        2.0, "ratio of adjacent sensitivities above which the cut is made", symbol="t", above=0
    )
    ratio: str = setting(
        "layer", "which sensitivities are compared", choices=("layer", "cumulative")
    )
    combine: str = setting("median", "over silos", choices=("median", "mean"))
    batches: int = setting(
        8, "random batches of the sensitivity's gradient", minimum=1, kind="steps"
    )
    without_cut: str = setting(
        "all", "where no ratio is above t", choices=("all", "all-but-last")
    )
    cut: int = setting(0, "fixed cut, 0: decide at run time", symbol="l*", minimum=0)


class PLayerClient(PartialClient):
    settings: PLayerSettings

    @staticmethod
    def split(
        layout: Layout, settings: PLayerSettings, _: int, numbers: Mapping[str, Any], /
    ) -> Split:
        cut = cast(int, numbers["cut"])
        return split_parts(
            layout, [b.name for b in layout.blocks[len(layout.blocks) if cut < 0 else cut :]]
        )

    def local_update(self) -> list[Tensor]:
        vectors = super().local_update()
        sensitivity = self.sensitivity() if cast(int, self.numbers["cut"]) < 0 else []
        if self.common.secure_aggregation:
            return [*vectors, torch.tensor(sensitivity, device=self.model.device)]
        if sensitivity:
            self.replies["sensitivity"] = sensitivity
        return vectors

    def sensitivity(self) -> list[float]:
        """Return s_l of every layer block, from input to output, at the current model."""
        rng = generator(self.common.seed, self.silo.name, self.round, "sensitivity")
        trained = self.model.vector
        gradient = torch.zeros_like(self.model.gradient)
        train = self.silo.train
        count = self.settings.batches
        size = min(self.common.batch_size, len(train))
        with rows_looked_up(self.model) as rows, self.model.kept_buffers():
            for index in torch.randint(len(train), (count, size), generator=rng).to(
                train.index_device
            ):
                self.gradient(*train.take(index))
                gradient.add_(self.model.gradient, alpha=1 / count)
        squares: dict[str, list[Tensor]] = {block.name: [] for block in self.layout.blocks}
        for e in self.layout.parameters:
            if e.name.endswith("bias"):
                continue
            w, g = (vector[e.start : e.stop] for vector in (trained, gradient))
            if rows.get(e.name):
                tokens = torch.cat(rows[e.name])
                share = tokens.bincount(minlength=e.shape[0]) / len(tokens)
                w, g = (share @ values.view(e.shape) for values in (w, g))
            block = next(b for b in self.layout.blocks if b.start <= e.start < b.stop)
            squares[block.name].append((w * g).square())
        return [float(torch.cat(values).mean()) for values in squares.values()]


def choose_cut(sensitivities: Sequence[Sequence[float]], settings: PLayerSettings) -> int:
    """Return l* from the silos' sensitivities s_l, one row per silo."""
    table = torch.tensor(sensitivities, dtype=torch.float64)
    layers = table.quantile(0.5, dim=0) if settings.combine == "median" else table.mean(0)
    values = layers.cumsum(0) if settings.ratio == "cumulative" else layers
    for cut, (lower, upper) in enumerate(
        zip(values[:-1].tolist(), values[1:].tolist(), strict=True), start=1
    ):
        if upper > settings.threshold * lower:
            return cut
    return len(layers) - (settings.without_cut == "all-but-last")


def random_cut(layers: int, taken: int, seed: int) -> int:
    """Return PLayer-FL-Random's cut: uniform over {1..L} without PLayer-FL's cut and L; ``taken`` if none is left."""
    left = [cut for cut in range(1, layers) if cut != taken]
    if not left:
        return taken
    drawn = torch.randint(len(left), (1,), generator=generator(seed, "random-cut"))
    return left[int(drawn)]


class PLayerServerState(ServerState):
    cut = Item(int)  # how many of the lowest blocks are shared; -1: not decided yet


class PLayerFL(PartialStrategy):
    state_type = PLayerServerState
    state: PLayerServerState
    info = OWN_LAYERS(
        name="player-fl",
        title="Principled layer-wise federation",
        paper="Elhussein and Gürsoy, MLSys 2026, arXiv 2502.08829",
        spelling="PLayer-FL",
        dp=No("sensitivities leave, which are computed on records without noise"),
        sends_numbers={"sensitivity": Measured("one sensitivity per layer", several=True)},
        note="round 1 sends the whole model",
        lossy=OTHER_LAYERS,
        sums=Sums(
            at={"combine": ("mean",)},
            otherwise="a median needs each silo's sensitivities",
            also={"sensitivity": "silos"},
        ),
        whole_samples="its sensitivity is measured on them",
    )
    client = PLayerClient
    Settings = PLayerSettings
    search = (("threshold", 0.2, 20.0),)
    settings: PLayerSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        fixed = min(self.settings.cut, len(self.layout.blocks))
        self.state.cut = self.cut_for(fixed) if fixed else -1
        self.state.model = gather(initial(""), self.shared_parts())

    def payload(self, silo: str) -> Payload:
        return self.pack({GLOBAL: self.state.model}, cut=self.state.cut)

    def sizes(self, silo: str) -> dict[str, int]:
        size = len(self.layout.blocks) * (self.state.cut < 0)
        return {**super().sizes(silo), "sensitivity": size}

    def check(self, update: Update) -> None:
        if self.state.cut >= 0 or self.common.secure_aggregation:
            return
        values = self.number(update, "sensitivity")
        if not isinstance(values, list) or len(values) != len(self.layout.blocks):
            raise DataError(f"'sensitivity' is {values!r:.80}, not a number for each layer")

    def aggregate(self, updates: Sequence[Update]) -> None:
        mean = self.average(updates)
        if self.state.cut < 0:
            table = (
                [u.vectors["sensitivity"].tolist() for u in updates]
                if self.common.secure_aggregation
                else [self.number(u, "sensitivity") for u in updates]
            )
            self.state.cut = self.cut_for(self.decide(table))
            mean = gather(mean, self.shared_parts())
            buffers = self.state.buffers
            shared = self.shared_buffers()
            self.state.buffers = (
                gather(buffers, shared) if buffers is not None and shared else None
            )
        self.state.model = mean

    def decide(self, sensitivities: Sequence[Sequence[float]]) -> int:
        return choose_cut(sensitivities, self.settings)

    def cut_for(self, principled: int) -> int:
        """Return the cut to use, given the cut ``principled`` from the sensitivities or the setting ``cut``."""
        return principled


class PLayerFLRandom(PLayerFL):
    info = replace(
        PLayerFL.info,
        name="player-fl-random",
        title="PLayer-FL with a random cut",
        spelling="PLayer-FL random",
    )

    def cut_for(self, principled: int) -> int:
        return random_cut(len(self.layout.blocks), principled, self.common.seed)
