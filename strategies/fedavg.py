"""FedAvg and FedAvg-FT.

FedAvg: McMahan et al., AISTATS 2017. min_w sum_i k_i f_i(w), k_i = n_i / n.

    server   w <- sum_{i in S} n_i w_i / sum_{i in S} n_i
    silo     w_i <- E epochs of SGD on f_i, starting from w

FedAvg-FT (APPLE's paper, table 1): the federated training is the same. In addition each silo fine-tunes the received
model for ``epochs`` as its personal model, which is never sent.

Sent: Σ down, Σ up. Kept: server w; silo nothing. An absent silo is left out of the mean.
Special cases: FedAvg's *personal* snapshot (w_i) is APPLE's "FedAvg-local". FedAvg-FT with 0 epochs is FedAvg's
*received* model; with E epochs it is FedAvg-local, because the batches come in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OWN_COPY
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy


class FedAvg(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedavg",
        title="Federated averaging",
        paper="McMahan et al., AISTATS 2017, arXiv 1602.05629",
        spelling="FedAvg",
        baseline="FedAvg's shared model",
    )


@dataclass(frozen=True)
class FineTuning:
    """Settings of the -ft methods."""

    epochs: int = setting(
        1, "epochs of fine-tuning of the received model", minimum=0, kind="epochs"
    )


class FineTuningClient(SiloClient):
    """Mixin that adds a fine-tuned copy of the received model to a method, as the silo's personal model."""

    settings: FineTuning

    def personal(self) -> Tensor:
        self.model.load(self.received, self.received_buffers)
        self.train(epochs=self.settings.epochs, optimizer_key="fine-tuning")
        return self.model.vector


class FedAvgFT(FedAvg):
    info = OWN_COPY(
        name="fedavg-ft",
        title="FedAvg with local fine-tuning",
        paper="Wang et al. 2019, as in Luo and Wu, IJCAI 2022, arXiv 2110.08394",
        spelling="FedAvg-FT",
        note="the own model is what is sent where `fedavg-ft.epochs` is `local-epochs`, as both are by default",
    )
    client = FineTuningClient
    Settings = FineTuning
