"""FedDBE (FedAvg + DBE): a personal bias absorbs a silo's feature shift; the rest is regularised to a common mean.

Zhang et al., NeurIPS 2023, arXiv 2311.14975. z = φ(x) in R^K are the features, h the last layer W z + b.

    silo     logits h(φ(x) + u_i)                                      u_i: the personalised bias memory (PRBM)
             CE + κ (1/K) sum_k ½ (z̄_k - z̄ᵍ_k)²                         mean regularisation (MR), per batch, with
             z̄ <- (1 - m) z̄ + m · batch mean of z                       0 at the start of every local training
    server   w <- the sample-weighted mean of the w_i;   z̄ᵍ <- that of the z̄_i, once

w and u_i take steps together; u_i takes plain gradient steps of the same learning rate, from 0, and is kept for ever.
Only the last batch's share of z̄ has a gradient. z̄ᵍ is computed in round 1, a warm-up without u and MR: the silos
train, send z̄ alone, and the models are discarded (``warm-up = "keep"``: they are sent and averaged as in FedAvg).

Sent: Σ + K down (Σ in round 1), Σ up (K in round 1). Kept: server w, z̄ᵍ; silo u_i. The server sees one mean feature
vector per silo, once. An absent silo keeps u_i; absent in round 1, it has no part in z̄ᵍ. Evaluated: w with the silo's
own u_i. As W (z + u) + b = W z + (b + W u), that is a plain network. Special cases: κ = 0 without ``bias`` is FedAvg
bit for bit (``warm-up = "keep"``). With m < 1, z̄ and z̄ᵍ are shrunk by 1 - (1 - m)^steps.

The defaults are the official script's for the four-layer CNN (the code's own are m = 0.1, κ = 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.training import feature_gradient, loss_gradient
from strategies.base.client import SiloClient
from strategies.base.info import OWN_PARTS, OWN_RATE, No
from strategies.base.settings import setting
from strategies.base.state import Array, ClientState, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import Gradient
from strategies.base.transport.payload import Model, Payload, Update

MEAN = "mean"


@dataclass(frozen=True)
class DbeSettings:
    """Settings of FedDBE."""

    kappa: float = setting(50.0, "weight of the mean regularisation", symbol="κ", minimum=0)
    momentum: float = setting(
        1.0,
        "share of a batch in the running mean of the features",
        symbol="m",
        above=0,
        maximum=1,
    )
    bias: bool = setting(True, "learn the personalised bias memory u")
    warm_up: str = setting(
        "discard", "what becomes of round 1's models", choices=("discard", "keep")
    )


class DbeClientState(ClientState):
    bias = Array()  # u (K,)


class DbeServerState(ServerState):
    mean = Array(MEAN)  # z̄ (K,); None in round 1


class FedDBEClient(SiloClient):
    state_type = DbeClientState
    state: DbeClientState
    settings: DbeSettings

    def receive(self) -> Tensor:
        self.warms_up = MEAN not in self.models
        u = self.state.bias
        self.u = torch.zeros(self.layout.features, device=self.model.device) if u is None else u
        return self.fold_bias(self.shared_model)

    def local_update(self) -> list[Tensor]:
        self.model.load(self.shared_model)
        self.mean = torch.zeros_like(self.u)
        self.train()
        sent = self.model.vector.clone()
        if not self.warms_up:
            if self.settings.bias:
                self.state.bias = self.u
            return [sent]
        return [
            self.mean if self.settings.warm_up == "discard" else torch.cat([sent, self.mean])
        ]

    def personal(self) -> Tensor:
        return self.fold_bias(self.model.vector)

    def personalise(self) -> Tensor:
        """Train u, which starts at 0; w is fixed."""
        model = self.model
        w = self.shared_model
        weight, bias = model.layout.linear_head()
        matrix = w[weight.start : weight.stop].view(weight.shape)
        for x, y in self.batches() if self.settings.bias else ():
            model.load(self.fold_bias(w))
            loss_gradient(model, x, y, self.loss)
            self.u = self.u - self.learning_rate() * (
                model.gradient[bias.start : bias.stop] @ matrix
            )
        model.load(self.fold_bias(w), self.received_buffers)
        return model.vector

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """∇w of the loss with u, and u's own step: of the network whose last bias is b' = b + W u,

        dW = dW' + db' uᵀ, db = db', du = Wᵀ db'.
        """
        model = self.model
        u = self.u
        if self.warms_up or not self.settings.bias:
            return feature_gradient(model, x, y, self.regularised_loss)
        weight, bias = model.layout.linear_head()
        w = model.vector[weight.start : weight.stop].view(weight.shape)
        b = model.vector[bias.start : bias.stop]
        plain = b.clone()
        b += w @ u
        loss = feature_gradient(model, x, y, self.regularised_loss)
        b.copy_(plain)
        grad = model.gradient[bias.start : bias.stop]
        self.u = u - self.learning_rate() * (grad @ w)
        model.gradient[weight.start : weight.stop] += torch.outer(grad, u).flatten()
        return loss

    def regularised_loss(self, logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
        m = self.settings.momentum
        kappa = self.settings.kappa
        mean = (1 - m) * self.mean + m * z.mean(0)
        self.mean = mean.detach()
        loss = self.loss(logits, y)
        if self.warms_up or not kappa:
            return loss
        return loss + kappa * (mean - self.models[MEAN].vector).square().mean() / 2

    def fold_bias(self, vector: Tensor) -> Tensor:
        """Return w with the last bias b + W u."""
        if not self.settings.bias:
            return vector
        weight, bias = self.layout.linear_head()
        result = vector.clone()
        result[bias.start : bias.stop] += (
            vector[weight.start : weight.stop].view(weight.shape) @ self.u
        )
        return result


class FedDBE(PersonalizedStrategy):
    info = OWN_PARTS(
        name="feddbe",
        title="Domain bias eliminator on FedAvg",
        paper="Zhang et al., NeurIPS 2023, arXiv 2311.14975",
        spelling="FedDBE",
        sends=("Σ + K", "Σ"),
        uploads={
            "model": Gradient(
                "the whole model; in round 1 mean features, of all classes", whole=True
            )
        },
        dp=No("in its first round silos send means of features without noise"),
        keeps=("its bias on the features",),
        note="of the own model only the bias on the features is missing, and round 1 sends the mean features",
        lossy=No("in its first round silos send means of features"),
        block_rates=OWN_RATE,
    )
    client = FedDBEClient
    state_type = DbeServerState
    state: DbeServerState
    Settings = DbeSettings
    search = (("kappa", 5.0, 500.0),)
    settings: DbeSettings

    def sizes(self, silo: str) -> dict[str, int]:
        size, first = self.layout.size, self.state.mean is None
        kept = not first or self.settings.warm_up == "keep"
        return {"model": self.layout.features * first + size * kept}

    def most_sizes(self, silo: str) -> dict[str, int]:
        return {"model": max(self.layout.size, self.sizes(silo)["model"])}

    def payload(self, silo: str) -> Payload:
        models = super().payload(silo).models
        mean = self.state.mean
        return Payload(models if mean is None else {**models, MEAN: Model(mean, round=1)})

    def aggregate(self, updates: Sequence[Update]) -> None:
        mean = self.average(updates)
        if self.state.mean is not None:
            self.state.model = mean
            return
        if self.settings.warm_up == "keep":
            self.state.model = mean[: self.layout.size].clone()
            mean = mean[self.layout.size :].clone()
        self.state.mean = mean
