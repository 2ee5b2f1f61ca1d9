"""FedBABU: federated training of the body only, below a fixed random head; then every silo fine-tunes.

Oh, Kim and Yun, ICLR 2022, arXiv 2106.06042. A model is w = (u, h): u the body, h the head, drawn once and the same
everywhere.

    silo     u_i: E epochs of SGD on f_i(u, h), from the received u; h is never trained
    server   u <- sum_{i in S} n_i u_i / sum_{i in S} n_i
    personal (u, h) fine-tuned on f_i for ``epochs``: the whole model, the head alone, or the body alone

The paper fine-tunes once, after the last round. Here each round's received model is fine-tuned, without effect on the
federated training: round t shows the result of a run of t - 1 rounds.

Sent: Σ_s down, Σ_s up. Kept: server u; silo h and its fine-tuned model, from which no training starts (except for its
running statistics, with ``buffers = "local"``). Absent silos are left out of the mean and keep that model.
Special cases: nothing personal (``layers = 0``) is FedAvg bit for bit, with FedAvg-FT's fine-tuning; 0 epochs leave
the averaged body with the initial head.

Paper and code: the official code averages without weights (``average = "silos"``), and sets the head's learning rate
to 0, which is the same if weight decay and momentum are 0. It fine-tunes 5 epochs with η = 0.001, which is the η of
its last rounds; ours is the round's. PFLlib fine-tunes the silo's last local body, not the average.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.flat import gather, scatter
from strategies.base.info import OWN_LAYERS
from strategies.base.partial import PartialClient, PartialSettings, PartialStrategy
from strategies.base.settings import Averaging, setting
from strategies.base.state import Array, ClientState
from strategies.base.transport.kinds import SHARED_AT


@dataclass(frozen=True)
class BabuSettings(Averaging, PartialSettings):
    """Settings of FedBABU; ``personal`` selects the blocks of the head."""

    epochs: int = setting(5, "epochs of fine-tuning", symbol="τ_f", minimum=0, kind="epochs")
    tune: str = setting("all", "what is fine-tuned", choices=("all", "head", "body"))


class BabuClientState(ClientState):
    head = Array()  # h, the initial head of all silos
    local = Array()  # with ``ala``: the last model (Σ,) trained in the federation


class FedBABUClient(PartialClient):
    state_type = BabuClientState
    state: BabuClientState
    settings: BabuSettings

    def receive(self) -> Tensor:
        """Return the received body below the initial head of all silos, not below this silo's fine-tuned head."""
        self.shared, self.private = self.parts()
        head = self.state.head
        if head is None:
            head = self.state.head = gather(self.silo.initial(""), self.private)
        model = scatter(self.model.vector, self.shared, self.shared_model)
        return scatter(model, self.private, head)

    def local_update(self) -> list[Tensor]:
        self._received = self.model.vector.clone(), self.model.buffers.clone()
        if self.shared:
            self.train(parts=self.shared)
        if self.common.ala:  # its own model is the one that was trained in the federation, not the fine-tuned one
            self.state.local = self.model.vector.clone()
        return [gather(self.model.vector, self.shared)]

    def personal(self) -> Tensor:
        self.model.load(*self._received)
        tuned = {"all": None, "head": self.private, "body": self.shared}[self.settings.tune]
        if tuned != ():
            self.train(parts=tuned, epochs=self.settings.epochs, optimizer_key="fine-tuning")
        return self.model.vector


class FedBABU(PartialStrategy):
    info = OWN_LAYERS(
        name="fedbabu",
        title="Body averaged below a fixed head, then fine-tuning",
        paper="Oh et al., ICLR 2022, arXiv 2106.06042",
        spelling="FedBABU",
        uploads={"shared": SHARED_AT},
        own_model="kept",
        note="its head starts from one that the seed makes, its body from what the server sent",
    )
    client = FedBABUClient
    Settings = BabuSettings
