"""FedAS: a silo aligns the received body with its own last one, and counts in the mean as its gradients are large.

Yang, Huang and Ye, CVPR 2024. FedPer (strategies/fedsim.py) and two steps more. φ is the body, v_i the silo's head:

    silo     1  P_k = the mean of φ_i(x) over its class k, with the body φ_i that it trained last
             2  ``align-epochs`` on the received φ alone: sum over the classes k of the batch of MSE(φ(x), P_k), the
                mean over the class's samples and the features; with ``align-learning-rate``
             3  E epochs of joint SGD on f_i, from this φ and its own v_i
             4  s_i = sum over batches of ||gradient of the batch's mean loss||², of all parameters, in evaluation mode
    server   φ <- sum_i s_i φ_i / sum_i s_i

A silo's first round has no steps 1 and 2, as there is no own body yet. With 0 as the sum of s_i, n_i stand for them,
and with ``weights = "samples"`` always. A silo states its s_i itself: one counts as ``weight-cap`` times the median at
most.

Sent: Σ_s down; Σ_s and s_i up. Kept: server φ; silo its whole last model. An absent silo keeps it, and has no part in
the mean. Evaluated: the model that the silo trained. A newcomer trains a head, without alignment.
Special cases: ``align-epochs = 0`` with ``weights = "samples"`` is FedPer bit for bit. One silo is not Local, as
alignment narrows its classes.

Paper and code: one epoch of alignment with a rate of 0.01 is its code's, by plain SGD on batches of 16; here size of
batches, optimiser, momentum, weight decay and the decay of the rate are the run's. The official code hands all silos
one model, so that the second aligns a body that is aligned with the first; PFLlib copies it. s_i grows with the number
of batches and with how badly the model fits; the abstract wants silos that are trained little to count less. That this
is the paper's direction is (unverified).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models.features import all_features, class_sums, means_of, members
from models.flat import gather
from models.optimizers import Optimizer
from models.training import feature_gradient, loss_gradient
from strategies.base.info import OWN_LAYERS, OWN_LOSS, No
from strategies.base.partial import PartialClient, PartialSettings, PartialStrategy
from strategies.base.settings import setting
from strategies.base.transport.kinds import SHARED_AT, Measured
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class AsSettings(PartialSettings):
    """Settings of FedAS; epochs and rate of alignment are its code's."""

    align_epochs: int = setting(1, "epochs of alignment", minimum=0, kind="epochs")
    align_learning_rate: float = setting(
        0.01, "learning rate of alignment", above=0, kind="learning-rate"
    )
    weights: str = setting(
        "gradients", "what silos count as in the mean", choices=("gradients", "samples")
    )


class FedASClient(PartialClient):
    settings: AsSettings
    prototypes: Tensor | None = None  # P (C, K), while a body is aligned with them

    def local_update(self) -> list[Tensor]:
        if self.state.personal is not None and self.settings.align_epochs and self.shared:
            self.prototypes = self.own_prototypes(self.state.personal)
            self.train(
                parts=self.shared,
                epochs=self.settings.align_epochs,
                purpose="align",
                optimizer_key="align",
            )
            self.prototypes = None
        self.train()
        if self.settings.weights == "gradients":
            self.replies["energy"] = self.energy()
        return [gather(self.model.vector, self.shared)]

    def own_prototypes(self, last: Tensor) -> Tensor:
        """Return P (C, K), of the model that this silo trained last."""
        model = self.model
        model.load(last, self.state.personal_buffers)
        z, y = all_features(model, self.silo.train), self.silo.train.y
        model.load(self.received, self.received_buffers)
        return means_of(*class_sums(z, y, model.layout.classes))

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if self.prototypes is None:
            return super().gradient(x, y)
        return feature_gradient(self.model, x, y, self.distance)

    def distance(self, logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the batch's classes of the mean squared distance to their prototypes."""
        assert self.prototypes is not None
        mask = members(y, len(self.prototypes))
        apart = (z.flatten(1) - self.prototypes[y]).square().mean(1)
        return (mask.T @ apart / mask.sum(0).clamp(min=1)).sum()

    def optimizer(self, key: str = "") -> Optimizer:
        result = super().optimizer(key)
        if key.startswith("align"):
            result.lr = self.learning_rate(self.settings.align_learning_rate)
        return result

    def energy(self) -> float:
        """Return s_i."""
        model, total = self.model, self.model.vector.new_zeros(())
        model.module.eval()
        try:
            for x, y in self.batches(1, "energy", as_they_are=True):
                loss_gradient(model, x, y, self.loss)
                total = total + model.gradient.square().sum()
        finally:
            model.module.train()
        return float(total)


class FedAS(PartialStrategy):
    info = OWN_LAYERS(
        name="fedas",
        title="Aligned bodies, weighted by the size of gradients",
        paper="Yang, Huang and Ye, CVPR 2024",
        spelling="FedAS",
        uploads={"shared": SHARED_AT},
        sends_numbers={"energy": Measured("the sum of its squared gradients")},
        needs_classes=True,
        ala=False,
        plain_loss=False,
        sums=No("the server weighs silos by the size of their gradients, which each states"),
        dp=No("its alignment and its weight depend on features and gradients without noise"),
        trainer=OWN_LOSS,
    )
    client = FedASClient
    Settings = AsSettings
    search = (("align-learning-rate", 0.001, 0.1),)
    settings: AsSettings

    def check(self, update: Update) -> None:
        if self.settings.weights == "gradients":
            self.number(update, "energy")

    def weights(self, updates: Sequence[Update]) -> list[float]:
        if self.settings.weights == "samples":
            return super().weights(updates)
        energy = [self.number(u, "energy") for u in updates]
        if not sum(energy):
            return super().weights(updates)
        cap = self.common.weight_cap
        most = cap * statistics.median_low([e for e in energy if e > 0])
        return [min(e, most) for e in energy] if cap else energy
