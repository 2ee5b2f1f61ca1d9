"""GPFL: category embeddings guide the shared features, a conditional valve makes a global and a personal view of them.

Zhang et al., ICCV 2023, arXiv 2308.10279. z = φ(x) in R^K are the features, e_1..e_C in R^K the category embeddings
(GCE), p_ic the share of class c among the silo's training samples; the conditional valve (CoV) is

    CoV(z, t) = ReLU(z * (1 + γ(t)) + β(t)),   γ(t) = LN(ReLU(A t)),   β(t) = LN'(ReLU(A' t))
    g = (1/C) sum_c e_c                                     global context
    p_i = sum_c p_ic e_c                                    personal context
    loss = CE(h_i(CoV(z, p_i)), y)
         + CE([cos(CoV(z, g), e_c)]_c, y)                   no temperature
         + λ ||CoV(z, g) - ē_y||_F                          one norm for the whole batch, not squared; ē: as received

All parts take each step together, with L2 weight μ on GCE and CoV alone; g and p_i are constants of a round. Server:
the sample-weighted mean of φ, GCE and CoV. The silo predicts h_i(CoV(z, p_i)).

Sent: Σ_s + CK + 2K² + 6K down and up: body, GCE, CoV. Kept: server these; silo its head h_i. An absent silo keeps h_i.
The embeddings reveal which classes a silo has: absent ones hardly move. Evaluated: the received parts with the silo's
own head. Defaults: the authors' for the four-layer CNN (the flags of PFLlib are λ = 1, μ = 0). It is one network,
whose blocks ``own`` (h_i), ``embeddings``, ``valve`` and ``context`` (p_i) replace the last layer. The norm has 10⁻¹²
under its root, so that its gradient at 0 is finite.

Paper and code: the code computes g and p_i from the silo's own embeddings after its last training, and in its first
round they are 0 (``contexts = "own"``). Here they are computed from the received embeddings. Special case: with CoV the
identity, which it is for LN weights and biases 0 and z >= 0, and without the two further losses, this is FedPer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from models.features import members
from models.flat import gather
from models.networks.blocks import Values
from models.training import feature_gradient
from strategies.base.info import OWN_PARTS, No
from strategies.base.partial import PartialStrategy, head_parts
from strategies.base.settings import setting
from strategies.base.transport.kinds import SHARED_SOME
from strategies.fedcp import ContextClient


@dataclass(frozen=True)
class GpflSettings:
    """Settings of GPFL."""

    lambda_: float = setting(
        0.01, "weight of the distance to the received embeddings", symbol="λ", minimum=0
    )
    mu: float = setting(
        0.1, "L2 weight on the embeddings and the valve", symbol="μ", minimum=0, kind="decay"
    )
    contexts: str = setting(
        "received",
        "which embeddings make the contexts: those that arrive or the own",
        choices=("received", "own"),
    )


class Valve(nn.Module):
    """The conditional valve CoV."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(features, features), nn.Linear(features, features)
        self.scale_norm, self.shift_norm = nn.LayerNorm(features), nn.LayerNorm(features)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        scale = self.scale_norm(self.scale(t).relu())
        result: Tensor = (z * (1 + scale) + self.shift_norm(self.shift(t).relu())).relu()
        return result


class ConditionalHead(nn.Module):
    """Head with the outputs h(CoV(z, p))."""

    block_names = ("own", "embeddings", "valve", "context")

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.own, self.embeddings = layer, nn.Embedding(layer.out_features, layer.in_features)
        self.valve, self.context = Valve(layer.in_features), Values(layer.in_features)

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.own(self.valve(z, self.context()))
        return logits


class GPFLClient(ContextClient):
    settings: GpflSettings

    def place_own(self, vector: Tensor) -> Tensor:
        """Return the vector (Σ,) with this silo's context, and store the embeddings that it is computed from."""
        layout = self.layout
        (place,) = head_parts(layout, "embeddings")
        (context,) = head_parts(layout, "context")
        features = context.stop - context.start
        self.targets = vector[place].view(-1, features).clone()
        embeddings = self.targets
        if self.settings.contexts == "own":
            previous = self.state.personal
            embeddings = (
                0 * embeddings if previous is None else previous[place].view(-1, features)
            )
        self.general = embeddings.mean(0)
        vector[context] = members(self.silo.train.y, len(embeddings)).mean(0) @ embeddings
        return vector

    def local_update(self) -> list[Tensor]:
        layout, mu = self.layout, self.settings.mu
        decayed = head_parts(layout, "embeddings", "valve")

        def decay(w: Tensor, g: Tensor) -> None:
            for part in decayed:
                g[part].add_(w[part], alpha=mu)

        trained = layout.outside(head_parts(layout, "context"))
        self.train(parts=trained, correction=decay if mu else None)
        return [gather(self.model.vector, self.shared)]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        return feature_gradient(self.model, x, y, self.guided_loss)

    def guided_loss(self, logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(logits, y) + self.guidance(z, y)

    def guidance(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the losses on the global view of the features."""
        head, weight = self.model.last_block, self.settings.lambda_
        assert isinstance(head, ConditionalHead)
        view = head.valve(z, self.general)
        cosines = F.normalize(view) @ F.normalize(head.embeddings.weight).T
        distance: Tensor = ((view - self.targets[y]).square().sum() + 1e-12).sqrt()
        return F.cross_entropy(cosines, y) + weight * distance


class GPFL(PartialStrategy):
    info = OWN_PARTS(
        name="gpfl",
        title="Global embeddings and a conditional valve",
        paper="Zhang et al., ICCV 2023, arXiv 2308.10279",
        spelling="GPFL",
        sends=("Σ_s + CK + 2K² + 6K", "Σ_s + CK + 2K² + 6K"),
        dp=No(
            "its guidance, which enters every gradient, is made of class shares without noise"
        ),
        uploads={"shared": SHARED_SOME},
        needs_classes=True,
        lossy=True,
    )
    client = GPFLClient
    head = ConditionalHead
    Settings = GpflSettings
    search = (("lambda", 0.001, 0.1),)
