"""FedSelect: each silo makes single weights its own, those that moved most, and shares the rest.

Tamirisa et al., CVPR 2024, arXiv 2404.02478. m_i marks a silo's personal weights, none at first. In a round it receives
w, takes it over where m_i is 0, and then

    silo     ``passes`` times: one epoch that moves the personal weights alone, one that moves the others alone
             in every ``every``-th round, but not in the first: of each tensor named weight, the share p of its weights
             that are still shared and moved most since the last time joins m_i, unless its personal share is above a
    server   each number of w <- the mean over the silos that share it; one that no silo shares stays

The message of the round in which m_i grows, and the next one that arrives, go by the m_i of before. Biases stay shared.
The silo sends its weights, with w in the places of its own, and m_i.

Sent: Σ down; Σ and Σ/8 (bits) up. Kept: server w; silo its model, m_i, and its model of the last growth, from the first
round on. An absent silo keeps them. A weight that a single silo shares is in w as that silo trained it. A newcomer
trains a copy of w. Evaluated: the model that the silo trained. Running statistics stay in the silo.
Special cases: while m_i is empty for all, FedAvg without weights (``average``), whose silos train ``passes`` epochs;
the other passes then move nothing. p = 1 and a = 1 leave biases to share.

Paper and code: the code's options of 4 rounds and L = 3 let m_i grow in the last round alone. It sends zeros in the
places of personal weights, and where all have made a weight their own, w becomes 0. p = 25 % overshoots a = 80 %: the
share is 82.2 %. Here p times the weights that are still shared is rounded down, and of equal changes some are taken so
that the number is met; the code takes all that reach the last one's, so more than p. The optimiser starts anew in each
pass, and there is no weight decay: it would move what is held fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layout import Layout
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, No
from strategies.base.settings import Averaging, setting
from strategies.base.state import Array, ClientState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import CRITICAL, MODEL
from strategies.base.transport.payload import Update
from strategies.fedcac import check_bits, pack_bits, unpack_bits


@dataclass(frozen=True)
class SelectSettings(Averaging):
    """Settings of FedSelect."""

    average: str = setting(
        "silos",
        "what silos count in the mean: as their samples, or alike",
        choices=("samples", "silos"),
    )
    passes: int = setting(
        15, "times that both parts are trained in a round", minimum=0, kind="epochs"
    )
    every: int = setting(
        3, "rounds between two growths of the personal part", symbol="L", minimum=1
    )
    share: float = setting(
        0.25,
        "share of the shared weights that become personal",
        symbol="p",
        minimum=0,
        maximum=1,
    )
    limit: float = setting(
        0.8, "personal share of a tensor above which it stays", symbol="a", minimum=0, maximum=1
    )


def grow_mask(
    layout: Layout, mask: Tensor, change: Tensor, share: float, limit: float
) -> Tensor:
    """Return the next m_i (Σ,), boolean, from the present one and the changes since the last growth."""
    result = mask.clone()
    for entry in layout.parameters:
        part = slice(entry.start, entry.stop)
        free = int((~mask[part]).sum())
        count = int(share * free + 1e-9)  # 0.29 of 100 is 29
        if entry.name.rpartition(".")[2] == "weight" and 1 - free / len(mask[part]) <= limit:
            moved = change[part].abs().masked_fill(mask[part], -1.0)
            result[part.start + moved.topk(count).indices] = True
    return result


class SelectClientState(ClientState):
    personal_mask = Array("personal-mask")  # m_i, packed
    received_mask = Array("received-mask")  # that by which the next message is taken over
    snapshot = Array()  # the model (Σ,) of the last growth


class FedSelectClient(SiloClient):
    state_type = SelectClientState
    state: SelectClientState
    settings: SelectSettings

    def receive(self) -> Tensor:
        w, mask = super().receive(), self.state.received_mask
        return w if mask is None else torch.where(unpack_bits(mask, len(w)), self.previous(), w)

    def local_update(self) -> list[Tensor]:
        model, s, state = self.model, self.settings, self.state
        packed = state.personal_mask
        mask = torch.zeros_like(model.vector) > 0
        if packed is not None:
            mask = unpack_bits(packed, len(mask))
        for i in range(s.passes):
            self.move(mask, f"personal-{i}")
            self.move(~mask, f"shared-{i}")
        if state.snapshot is None:
            state.snapshot = self.received
        state.received_mask = state.personal_mask = pack_bits(mask)
        if self.round > 1 and (self.round - 1) % s.every == 0:
            state.personal_mask = pack_bits(
                grow_mask(model.layout, mask, model.vector - state.snapshot, s.share, s.limit)
            )
            state.snapshot = model.vector.clone()
        return [torch.where(mask, super().receive(), model.vector), state.received_mask]

    def move(self, movable: Tensor, purpose: str) -> None:
        """Train one epoch, in which only these weights move."""
        epochs = min(self.common.local_epochs, 1)
        share = movable.float()
        self.train(correction=lambda w, g: g.mul_(share), epochs=epochs, purpose=purpose)
        self.state.arrays = {
            k: v for k, v in self.state.arrays.items() if not k.startswith("optimizer.")
        }


class FedSelect(PersonalizedStrategy):
    info = OWN_COPY(
        name="fedselect",
        title="Single weights become personal",
        paper="Tamirisa et al., CVPR 2024, arXiv 2404.02478",
        spelling="FedSelect",
        sends=("Σ", "Σ + Σ/8"),
        uploads={"model": MODEL, "critical": CRITICAL},
        own_model="layers",
        note="before its personal part first grows, the own model is what is sent",
        lossy=No("which weights are averaged changes from silo to silo"),
        sums=No("each weight is averaged over other silos, down to a single one"),
        buffers="local",
        dp=No("which weights it shares depends on how far its records moved them"),
        robust=(),
        ala=False,
    )
    client = FedSelectClient
    Settings = SelectSettings
    settings: SelectSettings

    def check_fit(self) -> None:
        if self.common.weight_decay:
            raise UserError(
                f"weight-decay = {self.common.weight_decay:g}: fedselect holds single weights fixed, which it would "
                "move; set weight-decay = 0"
            )

    def sizes(self, silo: str) -> dict[str, int]:
        return {"critical": -(-self.layout.size // 8)}

    check = check_bits

    def aggregate(self, updates: Sequence[Update]) -> None:
        w = self.state.model
        total, count = torch.zeros_like(w), torch.zeros_like(w)
        for update, weight in zip(updates, self.weights(updates), strict=True):
            shared = (~unpack_bits(update.vectors["critical"], len(w))).to(w) * weight
            total += shared * update.vectors["model"]
            count += shared
        self.state.model = torch.where(count > 0, total / count.clamp(min=1), w)
