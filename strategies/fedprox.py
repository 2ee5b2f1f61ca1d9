"""FedProx and FedProx-FT: FedAvg with a proximal term towards the received model in local training.

Li et al., MLSys 2020, arXiv 1812.06127. Silo: min_w f_i(w) + (μ/2) ||w - w^t||², with the received model w^t as the
centre for the whole round; each step's gradient is g + μ (w - w^t). Server: the sample-weighted mean of FedAvg.
FedProx-FT also fine-tunes the received model, as FedAvg-FT does (without the proximal term).

Sent: Σ down, Σ up. Kept: server w; silo nothing. An absent silo is left out of the mean.
Special cases: μ = 0 is FedAvg bit for bit; one local step is FedAvg for any μ. Stable for η μ < 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strategies.base.client import SiloClient, proximal
from strategies.base.info import ONE_MODEL, OWN_COPY
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.fedavg import FineTuning, FineTuningClient


@dataclass(frozen=True)
class Prox:
    """Settings of FedProx."""

    mu: float = setting(
        0.001, "weight of the proximal term", symbol="μ", minimum=0, kind="decay"
    )


class FedProxClient(SiloClient):
    settings: Prox

    def local_update(self) -> list[Tensor]:
        self.train(correction=proximal(self.shared_model, self.settings.mu))
        return [self.model.vector.clone()]


class FedProx(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedprox",
        title="Federated averaging with a proximal term",
        paper="Li et al., MLSys 2020, arXiv 1812.06127",
        spelling="FedProx",
    )
    client = FedProxClient
    Settings = Prox
    search = (("mu", 0.0001, 0.01),)


@dataclass(frozen=True)
class ProxFineTuning(FineTuning, Prox):
    """Settings of FedProx-FT."""


class FedProxFTClient(FineTuningClient, FedProxClient):
    settings: ProxFineTuning


class FedProxFT(FedProx):
    info = OWN_COPY(
        name="fedprox-ft",
        title="FedProx with local fine-tuning",
        paper="as in Luo and Wu, IJCAI 2022, arXiv 2110.08394",
        spelling="FedProx-FT",
        own_model="kept",
        note="with `fedprox-ft.mu=0` the own model is what is sent",
    )
    client = FedProxFTClient
    Settings = ProxFineTuning
