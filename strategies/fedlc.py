"""FedLC: a silo's rare classes need a larger margin in its loss.

Zhang et al., ICML 2022, arXiv 2209.00189. FedAvg with another local loss, from the logits z and the number n_ic of the
silo's own training samples of class c:

    loss   CE(z_c - τ n_ic^(-1/4), y)

The prediction is by z alone. A class that the silo lacks has an infinite margin: it is out of the loss, its logit gets
no gradient, and its row of the last layer moves by weight decay at most. With ``label-smoothing`` the classes that the
silo has share what is taken from y.

Sent: Σ down, Σ up. Kept: server w; silo nothing. An absent silo is left out of the mean.
Special cases: τ = 0 is FedAvg bit for bit; equal counts are FedAvg up to rounding, as one constant is subtracted.

Paper and code: the paper's sum is over the classes other than y (unverified). It would have no lower bound, and no
cross-entropy at τ = 0; public codes use the cross-entropy. Its τ is (unverified), codes use 0.1 to 1. PFLlib takes the
counts of all silos together, which the server then learns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.features import members
from models.training import loss_gradient
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OWN_LOSS, No
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy


@dataclass(frozen=True)
class LcSettings:
    """Settings of FedLC."""

    tau: float = setting(0.5, "size of the margins", symbol="τ", minimum=0, maximum=100)


class FedLCClient(SiloClient):
    settings: LcSettings

    def local_update(self) -> list[Tensor]:
        counts = members(self.silo.train.y, self.layout.classes).sum(0)
        self.margins = self.settings.tau * counts.pow(-0.25)
        self.present = counts > 0
        return super().local_update()

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.settings.tau:
            return super().gradient(x, y)
        return loss_gradient(self.model, x, y, self.calibrated)

    def calibrated(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of logits (b, C) minus the margins."""
        calibrated, present = logits - self.margins, self.present
        if not self.common.label_smoothing or bool(present.all()):
            return self.loss(calibrated, y)
        weights = self.model.passes.weights
        loss = self.loss_over(weights if weights is None else weights[present])
        return loss(calibrated[:, present], (present.cumsum(0) - 1)[y])


class FedLC(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedlc",
        title="Logits calibrated by a silo's own class counts",
        paper="Zhang et al., ICML 2022, arXiv 2209.00189",
        spelling="FedLC",
        needs_classes=True,
        dp=No("its loss shifts logits by counts of classes, which have no noise"),
        trainer=OWN_LOSS,
    )
    client = FedLCClient
    Settings = LcSettings
