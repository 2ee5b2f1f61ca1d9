"""FedCP: a policy network splits each sample's features between a personal and a global head.

Zhang et al., KDD 2023, arXiv 2307.01217. h = φ(x) in R^K are the features; two heads on them, and a gate between:

    r, s = softmax of the pairs of ReLU(LN(A (h * v))) in R^{2 x K},  r + s = 1;    v: the silo's context, of length 1
    logits = P (r * h) + G (s * h)
    loss   = CE + λ MMD(h, φᵗ(x))            φᵗ: the received body, held fixed; MMD: squared, with the kernel
                                             sum_a exp(-d² / 2a), a in (10, 15, 20, 50), means over the batch's pairs

Trained: φ, the personal head P, the policy (A, LN); the global head G is fixed. In training the softmax has Gumbel
noise (τ = 1). Afterwards the silo sends φ, the policy and (P + G) / 2 in G's place; server: the sample-weighted mean of
all three. v is the sum of the rows of P when the round's model arrives; in a silo's first round it is random.

Sent: Σ + 2K² + 6K down and up: body, G, policy. Kept: server these; silo P, v. P and G start as the same layer. An
absent silo keeps P, and gets body, G and policy when it comes back. Evaluated: the received parts with the silo's own
P, without Gumbel noise; the official code has noise in evaluation too, which makes predictions random. The default λ is
the official MNIST script's; it is strong, and slows the first rounds. It is one network, whose blocks ``own`` (P),
``shared`` (G), ``policy`` and ``context`` replace the last layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.features import features_at
from models.flat import gather, scatter
from models.layout import Layout
from models.metrics import mmd
from models.networks.blocks import Values
from models.training import feature_gradient, generator
from strategies.base.info import OWN_PARTS, No
from strategies.base.partial import (
    PartialClient,
    PartialStrategy,
    Split,
    head_blocks,
    head_parts,
    split_parts,
)
from strategies.base.settings import setting
from strategies.base.transport.kinds import SHARED


@dataclass(frozen=True)
class CpSettings:
    """Settings of FedCP."""

    lambda_: float = setting(
        5.0, "weight of the distance to the received body", symbol="λ", minimum=0
    )


class PolicyHead(nn.Module):
    """Head with the outputs P (r * h) + G (s * h)."""

    block_names = ("own", "shared", "policy", "context")
    has_dropout = True  # Gumbel noise

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        features = layer.in_features
        self.own, self.shared = layer, copy.deepcopy(layer)
        self.policy = nn.Sequential(
            nn.Linear(features, 2 * features), nn.LayerNorm(2 * features)
        )
        self.context = Values(features)

    def masks(self, h: Tensor) -> Tensor:
        """Return r and s of each sample (b, 2, K)."""
        scores: Tensor = (
            self.policy(h * F.normalize(self.context(), dim=0)).relu().unflatten(1, (2, -1))
        )
        return (scores + gumbel(scores) if self.training else scores).softmax(1)

    def forward(self, h: Tensor) -> Tensor:
        r, s = self.masks(h).unbind(1)
        logits: Tensor = self.own(r * h) + self.shared(s * h)
        return logits


def gumbel(like: Tensor) -> Tensor:
    """Return Gumbel noise of this shape, from torch's global generator."""
    return -torch.empty_like(like).exponential_().clamp_min(1e-30).log()


class ContextClient(PartialClient):
    """A silo that keeps a head of its own, and a context in what it receives."""

    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        return split_parts(layout, head_blocks(layout, "own", "context"))

    def newcomer_parts(self) -> Sequence[slice]:
        return head_parts(self.layout, "own")


class FedCPClient(ContextClient):
    settings: CpSettings

    def place_own(self, vector: Tensor) -> Tensor:
        """Return the vector (Σ,) with this silo's context: drawn in the first round, then from its own head."""
        layout = self.layout
        (context,) = head_parts(layout, "context")
        features = context.stop - context.start
        if self.state.personal is None:
            rng = generator(self.common.seed, self.silo.name, "context")
            vector[context] = torch.rand(features, generator=rng).to(vector.device)
        else:
            (head,) = head_parts(layout, "own")
            classes = (head.stop - head.start) // (features + 1)
            vector[context] = vector[head][: classes * features].view(classes, features).sum(0)
        return vector

    def newcomer(self) -> Tensor:
        """Return the received model with P = G, as in round 1."""
        personal, shared = (head_parts(self.layout, name) for name in ("own", "shared"))
        return scatter(self.received, personal, gather(self.received, shared))

    def newcomer_parts(self) -> Sequence[slice]:
        self.start = self.received
        return super().newcomer_parts()

    def local_update(self) -> list[Tensor]:
        layout, vector = self.layout, self.model.vector
        self.start = vector.clone()
        self.train(parts=layout.outside(head_parts(layout, "shared", "context")))
        sent = vector.clone()
        personal, shared = (head_parts(layout, name)[0] for name in ("own", "shared"))
        sent[shared] = (vector[personal] + vector[shared]) / 2
        return [gather(sent, self.shared)]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.settings.lambda_
        if not weight:
            return super().gradient(x, y)
        fixed = features_at(self.model, self.start, x)
        return feature_gradient(
            self.model, x, y, lambda logits, h, y: self.loss(logits, y) + weight * mmd(h, fixed)
        )


class FedCP(PartialStrategy):
    info = OWN_PARTS(
        name="fedcp",
        title="Features split between two heads by a policy",
        paper="Zhang et al., KDD 2023, arXiv 2307.01217",
        spelling="FedCP",
        sends=("Σ + 2K² + 6K", "Σ + 2K² + 6K"),
        uploads={"shared": SHARED},
        dp=No("its policy's context and its loss mix the records of a batch"),
        lossy=No("the head that is sent is half the silo's own, no step from what it received"),
    )
    client = FedCPClient
    head = PolicyHead
    Settings = CpSettings
    search = (("lambda", 0.5, 50.0),)
