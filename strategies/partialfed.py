"""PartialFed-Fix: a silo loads some layers of the global model and keeps its own in the others.

Sun, Huo, Yang and Bai, NeurIPS 2021. A round differs from FedAvg's only in the start of local training:

    silo     w_i <- received w in the loaded layers, its own last w_i in the others; E epochs of SGD on f_i; sends w_i
    server   w <- sum_{i in S} n_i w_i / sum_{i in S} n_i, of all layers

The layers that are not loaded are fixed for all silos and rounds: the highest blocks (the paper's bottom-up loading),
the lowest (top-down), a list, or batch normalisation with its statistics (``personal = "norm"``). Unlike in FedPer,
LG-FedAvg and FedBN, the whole model is sent: the server also has an average of the personal layers. A silo that takes
part for the first time loads it, because it has none of its own.

Sent: Σ down, Σ up. Kept: server w; silo w_i. An absent silo keeps its w_i and is left out of the mean. Special cases:
every layer loaded is FedAvg bit for bit, none is Local; with all silos present the silos' models are FedSim's with the
same personal layers bit for bit.

Not built: PartialFed-Adaptive, in which a silo learns its binary choice per layer by Gumbel-softmax, f_m = 8
mini-batches for the weights and f_s = 2 for the choice in turn, temperature 5 times 0.965 per step. No code is public,
and the available text leaves three points open: the data on which the choice between two changing models is trained,
whether it is drawn or used as it is at the start of a round, and the count of the temperature's steps. The text does
not specify the evaluated snapshot either: here it is the trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.flat import gather, scatter, write
from models.layout import Layout
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, OWN_START
from strategies.base.partial import (
    PartialClient,
    PartialSettings,
    Split,
    norm_parts,
    personal_blocks,
    split_parts,
)
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy


@dataclass(frozen=True)
class PartialFedSettings(PartialSettings):
    """Settings of PartialFed-Fix."""

    personal: str = setting(
        "output",
        "what is not loaded: output, input, norm, all, none, or block names with commas",
        symbol="v",
    )


class PartialFedClient(PartialClient):
    settings: PartialFedSettings

    @staticmethod
    def split(layout: Layout, settings: PartialFedSettings, *_: object) -> Split:
        """Return the loaded parts of the vector and the others; raise UserError if the model does not have them."""
        if settings.personal == "norm":
            return norm_parts(layout, "partialfed.personal = norm")
        return split_parts(layout, personal_blocks(layout, settings))

    def shared_buffers(self) -> tuple[slice, ...]:
        return SiloClient.shared_buffers(self)  # all are sent, as all layers are

    def receive(self) -> Tensor:
        self.shared, self.private = self.parts()
        received = self.shared_model
        if self.state.personal is None:
            return received
        if self.shares_buffers and self.state.personal_buffers is not None:
            layout, norm = self.layout, self.settings.personal == "norm"
            parts = layout.norm_buffers() if norm else layout.buffer_parts(self.private)
            write(self.model.buffers, parts, gather(self.state.personal_buffers, parts))
        return scatter(received, self.private, gather(self.state.personal, self.private))

    def local_update(self) -> list[Tensor]:
        self.train()
        return [self.model.vector.clone()]


class PartialFed(PersonalizedStrategy):
    info = OWN_COPY(
        name="partialfed",
        title="Partial loading of the global model, fixed",
        paper="Sun et al., NeurIPS 2021",
        spelling="PartialFed",
        newcomer="layers",
        lossy=OWN_START,
    )
    client = PartialFedClient
    Settings = PartialFedSettings

    def check_fit(self) -> None:
        self.client.split(self.layout, self.settings, self.round, self.state.numbers)
