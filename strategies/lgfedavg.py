"""LG-FedAvg: every silo has its own lower layers, the representation; the layers above are averaged.

Liang et al. 2020, arXiv 2001.01523. A model is w = (v, u): v the lower (local) layers, u the higher (global) ones.

    silo     (v_i, u_i): E epochs of joint SGD on f_i, from its own v_i and the received u
    server   u <- sum_{i in S} n_i u_i / sum_{i in S} n_i

Sent: Σ_s down, Σ_s up, with Σ_s the size of u. Kept: server u; silo v_i. An absent silo keeps its v_i.
Evaluated: the averaged u above the silo's own v_i, before local training.
Special cases: FedSim with input personalisation bit for bit; all layers global is FedAvg, none is Local.

The official code does not start from random layers. It reads a model that FedAvg trained (for some 400 rounds on
MNIST, 1200 on CIFAR-10), copies it to every silo, and trains for 200 more rounds. ``pretrain`` rounds of FedAvg do that
here: Σ down and up. Then a silo gets the whole averaged model until its reply has arrived; from then on v_i is its own.
A silo that is offline then gets it on its return. Running statistics below u continue from the silo's own. The code
averages without weights (``average = "silos"``), and reports every silo's best round by test accuracy, which is not
comparable with any score here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING

from flwr.common import log
from torch import Tensor

from models.flat import gather, scatter
from models.layout import Layout, size_of
from strategies.base.info import OTHER_LAYERS, OWN_LAYERS
from strategies.base.partial import PartialClient, PartialStrategy, Split, split_parts
from strategies.base.settings import Averaging, setting
from strategies.base.state import GLOBAL, Item, ServerState
from strategies.base.transport.payload import Payload, Update, silos_of


@dataclass(frozen=True)
class LgSettings(Averaging):
    """Settings of LG-FedAvg; default of its official CNN runs."""

    layers: int = setting(
        2, "how many of the highest blocks are averaged, the rest stay", minimum=0
    )
    pretrain: int = setting(0, "rounds of FedAvg at the start", minimum=0)


class LgServerState(ServerState):
    adapted = Item[list[str]](list, "own")  # silos whose lower layers are their own


class LGFedAvgClient(PartialClient):
    settings: LgSettings

    @staticmethod
    def split(layout: Layout, settings: LgSettings, server_round: int, *_: object) -> Split:
        count = (
            0
            if server_round <= settings.pretrain
            else max(len(layout.blocks) - settings.layers, 0)
        )
        return split_parts(layout, [b.name for b in layout.blocks[:count]])

    def receive(self) -> Tensor:
        received = self.shared_model
        if len(received) < self.layout.size:
            return super().receive()
        self.shared, self.private = self.parts()
        return received


class LGFedAvg(PartialStrategy):
    info = OWN_LAYERS(
        name="lg-fedavg",
        title="Personal lower layers",
        paper="Liang et al. 2020, arXiv 2001.01523",
        spelling="LG-FedAvg",
        note="with `lg-fedavg.pretrain` the first rounds send the whole model",
        reports="received",
        lossy=OTHER_LAYERS,
    )
    client = LGFedAvgClient
    state_type = LgServerState
    state: LgServerState
    Settings = LgSettings
    settings: LgSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        if self.settings.layers >= len(self.layout.blocks):
            log(
                WARNING,
                "lg-fedavg.layers = %d: the network has %d, nothing is personal and this is FedAvg",
                self.settings.layers,
                len(self.layout.blocks),
            )
        self.state.model = initial("")  # whole: a silo that comes later starts from its v
        self.state.adapted = []

    def sizes(self, silo: str) -> dict[str, int]:
        return {"shared": size_of(self.shared_parts())}

    def begin_round(self) -> None:
        self._shared = gather(self.state.model, self.shared_parts())

    def payload(self, silo: str) -> Payload:
        whole = self.settings.pretrain and silo not in self.state.adapted
        vector = self.state.model if whole else self._shared
        return self.pack({GLOBAL: vector})

    def centre(self, name: str, update: Update) -> Tensor | None:
        return self._shared if name == "shared" else super().centre(name, update)

    def aggregate(self, updates: Sequence[Update]) -> None:
        state, pretrain = self.state, self.settings.pretrain
        state.model = scatter(state.model, self.shared_parts(), self.average(updates))
        if self.round > pretrain > 0:
            state.adapted = sorted({*state.adapted, *silos_of(updates)})
        if self.round == pretrain and state.buffers is not None:
            shared = self.client.split(
                self.layout, self.settings, self.round + 1, state.numbers
            )[0]
            above = self.layout.buffer_parts(shared)
            state.buffers = gather(state.buffers, above) if above else None
