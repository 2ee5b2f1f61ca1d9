"""Ditto: FedAvg, plus a personal model per silo with a proximal term towards FedAvg's.

Li et al., ICML 2021, arXiv 2012.04221. w by FedAvg; each silo's v_i solves min f_i(v) + (λ/2) ||v - w^t||²:

    v <- v - η (∇f_i(v) + λ (v - w^t)),   centre: the received model of this round, for the whole round

Both trainings use the same batches (as in the official code), and v does not affect w, which is FedAvg's bit for bit.
Sent: Σ down, Σ up. Kept: server w; silo v_i. v_i starts from the common initial model; an absent silo keeps its v_i.
Special cases: λ = 0 is Local for v bit for bit (with ``personal-epochs`` = local-epochs).

The official code alternates the two per mini-batch, PFLlib trains v first; with the centre fixed at w^t all orders
give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strategies.base.client import SiloClient, proximal
from strategies.base.info import OWN_COPY
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy


@dataclass(frozen=True)
class DittoSettings:
    """Settings of Ditto; defaults as in FedALA's and PLayer-FL's experiments."""

    lambda_: float = setting(0.1, "weight of the proximal term", symbol="λ", minimum=0)
    personal_epochs: int = setting(
        0, "epochs on the personal model, 0: local-epochs", symbol="s", minimum=0, kind="epochs"
    )


class DittoClient(SiloClient):
    settings: DittoSettings

    def personal(self) -> Tensor:
        centre = self.shared_model
        s = self.settings
        buffers = self.state.personal_buffers
        self.model.load(self.previous(), self.received_buffers if buffers is None else buffers)
        epochs = s.personal_epochs or None
        self.train(
            correction=proximal(centre, s.lambda_), epochs=epochs, optimizer_key="personal"
        )
        return self.model.vector

    def personalise(self) -> Tensor:
        """Train v from w, with the proximal term."""
        self.train(
            correction=proximal(self.received, self.settings.lambda_), optimizer_key="personal"
        )
        return self.model.vector


class Ditto(PersonalizedStrategy):
    info = OWN_COPY(
        name="ditto",
        title="Global model and a personal one near it",
        paper="Li et al., ICML 2021, arXiv 2012.04221",
        spelling="Ditto",
        own_model="kept",
    )
    client = DittoClient
    Settings = DittoSettings
    search = (("lambda", 0.01, 1.0),)
