"""FedRoD: one body with two heads, a generic one trained on a balanced loss and a personal one on the residual.

Chen and Chao, ICLR 2022, arXiv 2107.00778. z = φ(x) are the features, G the generic head, P the silo's own. Per batch,
both from one forward pass, the features and G's outputs being those of before the step:

    φ, G   step on CE(G z + γ log n_i, y)           balanced softmax: n_ic the silo's training samples of class c
    P      step on CE([G z] + P [z], y)             [.] held fixed

Server: the sample-weighted mean of (φ, G), FedAvg's. The silo predicts with G z + P z, or by G alone
(``predict = "generic"``).

Sent: Σ down, Σ up. Kept: server φ, G; silo P. An absent silo keeps P. Evaluated: the received φ, G with the silo's own
P. Two linear heads on the same features are one with the sum of their weights: that model is a plain network. P starts
as a copy of the initial head (PFLlib; the first prediction is then twice the head's) or at 0. A class that a silo lacks
gets log 0 = -∞, which takes it out of the loss. The logarithms are of n_ic / max n_ic, which makes the same loss.

Special cases: equal counts, or γ = 0, are FedAvg bit for bit for φ, G; with P at 0 the first prediction is G's. The
run's optimiser steps P too. Not here: P made by a hypernetwork (Hyper-FedRoD), other balanced losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.features import members
from models.training import feature_gradient
from strategies.base.client import SiloClient
from strategies.base.info import OWN_PARTS, OWN_RATE, No
from strategies.base.settings import setting
from strategies.base.state import Array, ClientState
from strategies.base.strategy import PersonalizedStrategy


@dataclass(frozen=True)
class RodSettings:
    """Settings of FedRoD."""

    # Beyond 1 the rarest class outweighs all others: it may be one patient.
    gamma: float = setting(
        1.0,
        "exponent of the class counts in the balanced loss",
        symbol="γ",
        minimum=0,
        maximum=1,
    )
    start: str = setting(
        "copy",
        "the personal head starts as the generic one, or at 0",
        choices=("copy", "zeros"),
    )
    predict: str = setting(
        "personal",
        "both heads together, or the generic one alone",
        choices=("personal", "generic"),
    )


class RodClientState(ClientState):
    head = Array()  # the personal head


class FedRoDClient(SiloClient):
    state_type = RodClientState
    state: RodClientState
    settings: RodSettings

    def receive(self) -> Tensor:
        return self.predictor(self.shared_model)

    def first_model(self) -> Tensor:
        return self.predictor(self.silo.initial(""))

    def local_update(self) -> list[Tensor]:
        model, s = self.model, self.settings
        model.load(self.shared_model)
        head, own_step = self.head().clone(), self.optimizer("personal")
        counts = members(self.silo.train.y, model.layout.classes).sum(0)
        offset = (
            s.gamma * (counts / counts.max()).log() if s.gamma else torch.zeros_like(counts)
        )

        def loss(logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
            self.own_grad = self.head_gradient(head, logits.detach(), z.detach(), y)
            return self.loss(logits + offset, y)

        self.balanced = loss
        self.train(correction=lambda w, g: own_step.step(head, self.own_grad))
        self.keep_optimizer(own_step, "personal")
        self.state.head = head
        return [model.vector.clone()]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        return feature_gradient(self.model, x, y, self.balanced)

    def head_gradient(self, personal: Tensor, generic: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of CE(generic + P z, y) with respect to P."""
        weight = self.layout.linear_head()[0]
        head = personal.detach().requires_grad_()
        split = weight.stop - weight.start
        logits = generic + F.linear(z, head[:split].view(weight.shape), head[split:])
        (grad,) = torch.autograd.grad(self.loss(logits, y), head)
        return grad

    def head(self) -> Tensor:
        """Return P: weights row by row, biases."""
        kept = self.state.head
        if kept is not None:
            return kept
        initial = self.silo.initial("")[self.model.head]
        return initial if self.settings.start == "copy" else torch.zeros_like(initial)

    def predictor(self, vector: Tensor) -> Tensor:
        """Return (φ, G + P)."""
        if self.settings.predict == "generic":
            return vector
        vector = vector.clone()
        vector[self.model.head] += self.head()
        return vector

    def personal(self) -> Tensor:
        return self.predictor(self.model.vector)

    def newcomer(self) -> Tensor:
        """Return the model with the generic head alone, which the paper uses for unseen silos."""
        return self.shared_model

    def personalise(self) -> Tensor:
        """Train P, which starts at 0: its gradient equals the gradient with respect to G + P."""
        if self.settings.predict == "personal":
            self.balanced = lambda logits, z, y: self.loss(logits, y)
            self.train(parts=[self.model.head], purpose="personal")
        return self.model.vector


class FedRoD(PersonalizedStrategy):
    info = OWN_PARTS(
        name="fedrod",
        title="A generic and a personal head",
        paper="Chen and Chao, ICLR 2022, arXiv 2107.00778",
        spelling="FedRoD",
        dp=No(
            "its loss weighs classes by their counts, which are no sum over records with a bound"
        ),
        keeps=("its personal head",),
        needs_classes=True,
        lossy=True,
        block_rates=OWN_RATE,
    )
    client = FedRoDClient
    Settings = RodSettings
