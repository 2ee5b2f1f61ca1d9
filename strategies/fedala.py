"""FedALA: adaptive local aggregation, element-wise weights learned in the silo.

Zhang et al., AAAI 2023, arXiv 2212.01197. A silo starts the round from a mix of its old local model Θ_i and the
received global model Θ:

    Θ̂_i = Θ_i + (Θ - Θ_i) ⊙ [1; W_i]                                   (eq. 4)
    W_i <- clip(W_i - η ∇_Θ̂ L ⊙ (Θ - Θ_i), 0, 1)  per mini-batch       (eqs. 5-7)

The lower layers are copied from Θ; the p highest layers are mixed. W_i starts at 1 and is learned on s% of the training
split, drawn anew each round: the first time until the loss settles, in every later round for one epoch. Ordinary local
training of all layers from Θ̂_i follows; server: the sample-weighted mean (algorithm 1).

Sent: Σ down, Σ up. Kept: server Θ; silo Θ_i, W_i, and whether its first stage is done. W never leaves the silo.
First round of a silo: it has no old local model, so it starts from Θ and ALA is off (the paper's t = 1). An absent
silo does nothing (paper; the reference code mixes there too). Evaluated after ALA, before local training.
Special cases: p = 0 is FedAvg bit for bit; η = 0 is FedAvg up to rounding (Θ_i + (Θ - Θ_i) is not exactly Θ).

Paper and code: the paper's p counts layers, the code's tensors; the paper samples s% at random, the code takes one
contiguous window; "until it converges" is the code's rule: the last batch's losses of the last ``window`` epochs have
a population standard deviation under ``threshold``. This measures W, and not the batches, only if the last batch has
the same samples each time. So the code does not shuffle; here the batches of a round are drawn once and are the same
in all its epochs. ``max-epochs`` bounds that stage; paper and code have no bound.

ALA as a module (the paper's table 4): ``ala = true`` puts the same mixing, with the settings of ``fedala``, before the
local training of any method whose silos start from a received model. A method with two models mixes its copy of the
global one; a partial method mixes the p highest of the layers it receives. FedAvg with it is FedALA bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.features import features
from models.flat import gather, scatter, write
from models.training import generator, loss_gradient, seed_torch
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, OWN_START, No
from strategies.base.settings import setting
from strategies.base.silo import shuffle_batches
from strategies.base.state import Array, ClientState, Item
from strategies.base.strategy import PersonalizedStrategy

Take = Callable[[Tensor], tuple[Tensor, Tensor]]  # index of samples -> batch (x, y)


@dataclass(frozen=True)
class Ala:
    """Settings of adaptive local aggregation."""

    eta: float = setting(1.0, "learning rate of the aggregation weights", symbol="η", minimum=0)
    sample_percent: float = setting(
        80.0, "share of the training part used to learn them", symbol="s", above=0, maximum=100
    )
    layers: int = setting(
        1, "how many of the highest layers are mixed element-wise", symbol="p", minimum=0
    )
    threshold: float = setting(
        0.1, "first stage: standard deviation under which the loss has settled", minimum=0
    )
    window: int = setting(10, "first stage: epochs over which it is taken", minimum=2)
    max_epochs: int = setting(
        100, "first stage: upper limit of epochs", minimum=1, kind="mixing-epochs"
    )


class AlaClientState(ClientState):
    weights = Array()  # W_i, of the layers that are mixed
    settled = Item(bool)  # whether the first stage is done
    # ALA as a module: the silo's copy of the global model (Σ,) after its training
    local = Array()


class AlaClient(SiloClient):
    """ALA between receiving and local training; precedes a method's own silo half among the base classes."""

    state_type = AlaClientState
    state: AlaClientState
    ala: Ala

    def receive(self) -> Tensor:
        received = super().receive()
        old = self.state.personal if self.state.local is None else self.state.local
        return received if old is None else self.adapt(received, old)

    def adapt(self, received: Tensor, old: Tensor) -> Tensor:
        """Return Θ̂ (Σ,) from the received model Θ and the old local model Θ_i, and learn W."""
        blocks = self.received_blocks()
        parts = self.layout.parts(blocks[max(0, len(blocks) - self.ala.layers) :])
        theta, local = gather(received, parts), gather(old, parts)
        difference = theta - local
        if not bool(difference.any()):  # nothing to learn, and the first stage is still to come
            return received.clone()
        kept = self.state.weights
        weights = torch.ones_like(difference) if kept is None else kept.clone()
        self.model.load(scatter(received, parts, local + difference * weights))
        self.model.freeze(*self.layout.outside(parts))
        losses: list[float] = []
        try:
            with self.model.kept_buffers():
                network, take = self._network(parts)
                while len(losses) < self._epochs(losses):
                    losses.append(
                        self._epoch(
                            network, take, parts, weights, local, difference, len(losses)
                        )
                    )
        finally:  # the silos of a process share the network
            self.model.freeze()
        self.state.weights = weights
        self.state.settled = True
        return self.model.vector.clone()

    def _epochs(self, losses: list[float]) -> int:
        """Return this round's number of epochs over the sample: one, or in the first stage until the loss settles."""
        if self.state.settled:
            return 1
        window = self.ala.window
        if (
            len(losses) > window
            and torch.tensor(losses[-window:]).std(correction=0) < self.ala.threshold
        ):
            return len(losses)
        return self.ala.max_epochs

    def _sample_size(self) -> int:
        return max(1, int(len(self.silo.train) * self.ala.sample_percent / 100))

    def _network(self, parts: tuple[slice, ...]) -> tuple[nn.Module, Take]:
        """Return the part of the network that ALA runs, and a function that returns a batch of the s% sample.

        If only the last layer is mixed and nothing below it is random, a sample's features below it are the same in
        every pass: they are computed once per round.
        """
        model, train = self.model, self.silo.train
        rng = generator(self.common.seed, self.silo.name, self.round, "ala-sample")
        sample = torch.randperm(len(train), generator=rng)[: self._sample_size()].to(
            train.index_device
        )
        last = model.head
        if parts != (last,) or last.start == 0 or model.has_dropout or model.has_batch_norm:
            return model.module, lambda index: train.take(sample[index])
        x, y = features(model, train, sample), train.labels(sample)
        return model.last_block, lambda index: (x[index.to(x.device)], y[index.to(x.device)])

    def _epoch(
        self,
        network: nn.Module,
        take: Take,
        parts: tuple[slice, ...],
        weights: Tensor,
        local: Tensor,
        difference: Tensor,
        epoch: int,
    ) -> float:
        """Make one pass over the sample; change ``weights`` and the mixed model; return the last batch's loss."""
        model, of = self.model, (self.common.seed, self.silo.name, self.round)
        seed_torch(generator(*of, "ala-dropout", epoch))
        # The same batches in every epoch: see the module's docstring
        rng = generator(*of, "ala-batches")
        loss = torch.zeros(())
        for index in shuffle_batches(self.silo, self.common, self._sample_size(), rng):
            loss = loss_gradient(model, *take(index), self.loss, network)
            grad = gather(model.gradient, parts)
            weights.addcmul_(grad, difference, value=-self.ala.eta).clamp_(0, 1)
            write(model.vector, parts, torch.addcmul(local, difference, weights))
        return float(loss)


class FedALAClient(AlaClient):
    settings: Ala

    @property
    def ala(self) -> Ala:  # type: ignore[override]
        return self.settings


def with_ala(client: type[SiloClient], settings: Ala) -> type[SiloClient]:
    """Return a method's silo half with ALA before its local training."""

    class WithAlaState(AlaClientState, client.state_type):  # type: ignore[misc, name-defined]
        """The state of both."""

    class WithAla(AlaClient, client):  # type: ignore[misc, valid-type]
        state_type = WithAlaState
        state: WithAlaState
        ala = settings

        def local_update(self) -> list[Tensor]:
            vectors: list[Tensor] = super().local_update()
            # Its copy of the global one; a part's is in the personal model
            if [*self.info.uploads] == ["model"]:
                self.state.local = vectors[0]
            return vectors

    WithAla.__name__ = WithAla.__qualname__ = f"{client.__name__}WithAla"
    return WithAla


class FedALA(PersonalizedStrategy):
    info = OWN_COPY(
        name="fedala",
        title="Adaptive local aggregation",
        paper="Zhang et al., AAAI 2023, arXiv 2212.01197",
        spelling="FedALA",
        dp=No(
            "its mixing weights, which enter what is sent, are learned on records without noise"
        ),
        keeps=("its ALA weights",),
        reports="received",
        adds="ala",
        lossy=OWN_START,
        whole_samples="its mixing weights are learnt on them",
        ala=False,
    )
    client = FedALAClient
    Settings = Ala
    search = (("eta", 0.1, 10.0),)

    @classmethod
    def added_to(cls, client: type[SiloClient], settings: Any) -> type[SiloClient]:
        return with_ala(client, settings)
