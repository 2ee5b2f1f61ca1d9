"""Partial model personalisation: some layer blocks are shared, the rest never leaves the silo.

The base of FedPer, FedSim, FedRep, FedAlt, FedAPM and PLayer-FL. A model is w = (u, v): u the shared blocks, v the
personal ones. Any set of blocks can be personal: the highest (output personalisation), the lowest (input), or a list
of block names (split). Only u travels, a vector of shape (Σ_s,), with the BatchNorm statistics of its blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from models.flat import gather, scatter, write
from models.layout import Layout
from partitions.common.errors import UserError
from partitions.common.names import split_names
from strategies.base.client import SiloClient
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy

# The shared and the personal parts of a model's vector
Split = tuple[tuple[slice, ...], tuple[slice, ...]]


@dataclass(frozen=True)
class PartialSettings:
    """Settings of the personal layer blocks."""

    personal: str = setting(
        "output",
        "personal blocks: output, input, all, none, or block names with commas",
        symbol="v",
    )
    layers: int = setting(1, "how many blocks output and input mean", minimum=0)


def personal_blocks(layout: Layout, settings: PartialSettings) -> list[str]:
    """Return the names of the personal blocks.

    Raises UserError for a block that the model does not have, and where output or input are all blocks.
    """
    names = [b.name for b in layout.blocks]
    count = min(settings.layers, len(names))
    chosen = {
        "output": names[len(names) - count :],
        "input": names[:count],
        "all": names,
        "none": [],
    }
    wanted = chosen.get(settings.personal)
    if wanted is None:
        wanted = split_names(settings.personal)
    if settings.personal in ("output", "input") and wanted == names:
        raise UserError(
            f"personal = {settings.personal}, layers = {settings.layers}: this network has the layer blocks "
            f"{', '.join(names)} alone, so nothing would be shared; take fewer layers, a network with more, "
            "such as model = mlp, or strategy = local"
        )
    if not set(wanted) <= set(names):
        raise UserError(
            f"personal = '{settings.personal}': output, input, all, none or layer blocks of the model are wanted "
            f"here, which are {', '.join(names)}"
        )
    return wanted


def head_blocks(layout: Layout, *names: str) -> list[str]:
    """Return the layer blocks of a method's own head with these names: ``fc2.own`` for ``own``."""
    return [
        b.name for b in layout.blocks if b.name.rpartition(".")[2] in names and "." in b.name
    ]


def head_parts(layout: Layout, *names: str) -> tuple[slice, ...]:
    """Return the parts of the vector with these blocks of a method's own head."""
    return layout.parts(head_blocks(layout, *names))


def split_parts(layout: Layout, personal: Sequence[str]) -> Split:
    """Return the shared and the personal parts of the vector."""
    return layout.parts(b.name for b in layout.blocks if b.name not in personal), layout.parts(
        personal
    )


def norm_parts(layout: Layout, wanted_by: str) -> Split:
    """Return the parts outside batch normalisation, and those of it; raise UserError if the network has none."""
    if not layout.norms:
        raise UserError(
            f"{wanted_by} keeps batch normalisation in the silo, and this network has none (its blocks: "
            f"{', '.join(b.name for b in layout.blocks)}): choose one that has, such as model = resnet8"
        )
    return layout.norm_parts(False), layout.norm_parts()


class PartialClient(SiloClient):
    """Silo half that trains both parts jointly, in the same steps (FedSim). Kept: v, in the personal model."""

    settings: Any  # has the fields of PartialSettings

    @staticmethod
    def split(
        layout: Layout, settings: Any, server_round: int, numbers: Mapping[str, Any], /
    ) -> Split:
        """Return the shared and the personal parts of the vector in this round, for both halves.

        ``numbers``: the numbers of the server's state; in a silo, those in its message.
        """
        return split_parts(layout, personal_blocks(layout, settings))

    def parts(self) -> Split:
        return self.split(self.layout, self.settings, self.round, self.numbers)

    def shared_buffers(self) -> tuple[slice, ...]:
        return self.layout.buffer_parts(self.parts()[0])

    def received_blocks(self) -> list[str]:
        return self.layout.names_in(self.shared)

    def receive(self) -> Tensor:
        self.shared, self.private = self.parts()
        return self.place_own(scatter(self.previous(), self.shared, self.shared_model))

    def first_model(self) -> Tensor:
        # A copy, so that what the received model set stays
        return copy.copy(self).place_own(self.silo.initial("").clone())

    def place_own(self, vector: Tensor) -> Tensor:
        """Write what this silo computes of its own into a new vector (Σ,), and return it."""
        return vector

    def personalise(self) -> Tensor:
        """Train the personal parts; shared parts and their running statistics do not change."""
        if parts := self.newcomer_parts():
            self.train(parts=parts, purpose="personal", optimizer_key="personal")
        if self.shares_buffers:
            write(
                self.model.buffers,
                self.shared_buffers(),
                gather(self.received_buffers, self.shared_buffers()),
            )
        return self.model.vector

    def newcomer_parts(self) -> Sequence[slice]:
        """Return the parts that a newcomer trains."""
        return self.private

    def local_update(self) -> list[Tensor]:
        self.train()
        return [gather(self.model.vector, self.shared)]


class PartialStrategy(PersonalizedStrategy):
    """Server half: the sample-weighted mean of the shared part."""

    client: ClassVar[type[PartialClient]] = PartialClient
    Settings: ClassVar[type[Any]] = PartialSettings

    def shared_parts(self) -> tuple[slice, ...]:
        return self.client.split(self.layout, self.settings, self.round, self.state.numbers)[0]

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        self.state.model = gather(initial(""), self.shared_parts())

    def shared_buffers(self) -> tuple[slice, ...]:
        return self.layout.buffer_parts(self.shared_parts())

    def sizes(self, silo: str) -> Mapping[str, int]:
        return {"shared": len(self.state.model)}
