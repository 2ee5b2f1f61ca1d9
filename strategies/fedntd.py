"""FedNTD: what the received model says of the classes that are not true is distilled into the trained one.

Lee et al., NeurIPS 2022, arXiv 2106.03097. FedAvg with another local loss, from the logits z and those of the received
model z_g, which is frozen and computes in evaluation mode:

    loss   CE(z, y) + β T² KL(q_g || q),   q, q_g: the softmax of z/T and z_g/T over all classes but y

The mean is over the batch. The gradient of the second term is β T (q_c - q_gc) for a class c that is not true, and 0
for y. Two classes leave one, so that the term is 0: refused, FedAvg is the same.

Sent: Σ down, Σ up. Kept: server w; silo nothing. An absent silo is left out of the mean.
Special cases: β = 0 is FedAvg bit for bit. At the received model the term has no gradient, so one local step is FedAvg
up to rounding for any β (without dropout and BatchNorm, whose modes differ).

Defaults are the official runs'. PFLlib's β is 0 by default, which is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.features import members
from models.training import taught_gradient
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OWN_LOSS
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.fedproto import NEVER


@dataclass(frozen=True)
class NtdSettings:
    """Settings of FedNTD."""

    beta: float = setting(1.0, "weight of the distillation", symbol="β", minimum=0)
    temperature: float = setting(1.0, "temperature of both softmaxes", symbol="T", minimum=1e-3)


class FedNTDClient(SiloClient):
    settings: NtdSettings

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.settings.beta:
            return super().gradient(x, y)
        return taught_gradient(self.model, x, y, self.taught(x), self.distillation_loss)

    def distillation_loss(self, logits: Tensor, z: Tensor, taught: Tensor, y: Tensor) -> Tensor:
        s, true = self.settings, members(y, logits.shape[1]) > 0
        new, old = (
            (of / s.temperature).masked_fill(true, NEVER).log_softmax(1)
            for of in (logits, taught)
        )
        divergence = (old.exp() * (old - new)).sum(1).mean()
        return self.loss(logits, y) + s.beta * s.temperature**2 * divergence


class FedNTD(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedntd",
        title="Distillation of the classes that are not true",
        paper="Lee et al., NeurIPS 2022, arXiv 2106.03097",
        spelling="FedNTD",
        needs_classes=True,
        plain_loss=False,
        trainer=OWN_LOSS,
    )
    client = FedNTDClient
    Settings = NtdSettings
    search = (("beta", 0.1, 10.0),)

    def check_fit(self) -> None:
        if self.layout.classes < 3:
            raise UserError(
                "strategy = fedntd: with two classes only one is not true, and its term is 0: take fedavg"
            )
