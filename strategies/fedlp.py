"""FedLP: FedAvg in which each silo sends only a few layers, drawn anew every round.

Zhu et al., ICC 2023, the homogeneous scheme. A silo receives and trains the whole w; each layer of its w_i goes up with
probability p, and the server averages every layer over the silos that sent it:

    w_l <- sum_{i in S_l} w_{i,l} / |S_l|,   S_l the silos of the round that sent layer l;  w_l unchanged if none did

Silo and server each draw the layers from the run's seed, the silo's name and the round, so the draw is not sent.
``unit = "layer"`` (paper) are the model's layer blocks; "tensor" (code) draws weight and bias separately.
``weights = "samples"`` weights by n_i, which paper and code do not.

Sent: Σ down, up p Σ on average. BatchNorm statistics travel whole. Kept: server w; silo nothing. An absent silo is in
no S_l. Special cases: p = 1 with weights = "samples" is FedAvg bit for bit; p = 0 keeps w. The heterogeneous scheme,
whose silos train their first layers only, is not implemented. (The code's flag for p is called drop rate, but is the
share kept.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.flat import gather
from models.layout import Block, Entry, Layout
from models.training import generator
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OTHER_LAYERS, Sums
from strategies.base.settings import KRUM, RULES, Common, setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import LAYERS
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class LpSettings:
    """Settings of FedLP; p of its authors' best runs."""

    keep: float = setting(
        0.7, "probability that a layer is sent", symbol="p", minimum=0, maximum=1
    )
    unit: str = setting("layer", "what is sent or not as a whole", choices=("layer", "tensor"))
    weights: str = setting("uniform", "how silos are weighted", choices=("uniform", "samples"))


def parts_to_send(
    layout: Layout, settings: LpSettings, common: Common, silo: str, server_round: int
) -> list[slice]:
    """Return the parts of the vector that this silo sends in this round."""
    units: Sequence[Block | Entry] = (
        layout.blocks if settings.unit == "layer" else layout.parameters
    )
    rng = generator(common.seed, silo, server_round, "layers")
    kept = torch.rand(len(units), generator=rng) < settings.keep
    return [
        slice(u.start, u.stop)
        for u, is_kept in zip(units, kept.tolist(), strict=True)
        if is_kept
    ]


class FedLPClient(SiloClient):
    settings: LpSettings

    def local_update(self) -> list[Tensor]:
        self.train()
        parts = parts_to_send(
            self.layout, self.settings, self.common, self.silo.name, self.round
        )
        return [gather(self.model.vector, parts)]


class FedLP(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedlp",
        title="Layers sent at random",
        paper="Zhu et al., ICC 2023",
        spelling="FedLP",
        sends=("Σ", "p Σ"),
        uploads={"layers": LAYERS},
        own_model="layers",
        note="over the rounds every layer is sent",
        robust=tuple(rule for rule in RULES if rule not in KRUM),
        lossy=OTHER_LAYERS,
        sums=Sums(
            "weights",
            at={"keep": (1.0,)},
            otherwise="below, each layer is of other silos, down to a single one where some are gone",
        ),
    )
    client = FedLPClient
    Settings = LpSettings
    settings: LpSettings

    def sent_parts(self, silo: str) -> list[slice]:
        return parts_to_send(self.layout, self.settings, self.common, silo, self.round)

    def most_sizes(self, silo: str) -> dict[str, int]:
        return {}

    def aggregate(self, updates: Sequence[Update]) -> None:
        weights = {
            u.silo: u.samples if self.settings.weights == "samples" else 1 for u in updates
        }
        # (start, stop) -> silo -> its parameters
        layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        for update in updates:
            parts = self.sent_parts(update.silo)
            pieces = torch.split(
                update.vectors["layers"], [part.stop - part.start for part in parts]
            )
            for part, piece in zip(parts, pieces, strict=True):
                layers.setdefault((part.start, part.stop), {})[update.silo] = piece
        w = self.state.model.clone()
        for (start, stop), pieces_of in layers.items():
            w[start:stop] = self.mean(pieces_of.values(), [weights[silo] for silo in pieces_of])
        self.state.model = w
