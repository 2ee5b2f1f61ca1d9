"""MOON: a contrastive term pulls a silo's features to the received model's, and away from its own last model's.

Li, He and Song, CVPR 2021, arXiv 2103.16257. FedAvg with another local loss. z are the features of the model that is
trained, z_g those of the received model, z_p those of the model that the silo trained last:

    loss   CE + μ mean over the batch of -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) )

The received and the last model are frozen, and compute in evaluation mode with running statistics of their own. Before
a silo's first training there is no last model, and no term. (With the received model in its place the term is log 2,
and its gradient exactly 0.) A record whose features are all 0 has no direction, and cosine 0.

Sent: Σ down, Σ up. Kept: server w; silo its last model. An absent silo keeps it.
Special cases: μ = 0 is FedAvg bit for bit, and so is a silo's first round for any μ.

Paper and code: in the paper z is the output of a projection head of two layers between body and classifier. It is part
of the predictor, and so of the network: here z is what the last layer takes, as in PFLlib, and a network with such
layers is the paper's. The paper tunes μ: 5 on CIFAR-10, 1 on CIFAR-100. The authors keep one last model, as here, or
more. PFLlib computes all three in training mode, and starts with the common initial model as the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.features import compute_frozen
from models.training import taught_gradient
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OWN_LOSS
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy


@dataclass(frozen=True)
class MoonSettings:
    """Settings of MOON."""

    mu: float = setting(1.0, "weight of the contrastive term", symbol="μ", minimum=0)
    temperature: float = setting(0.5, "temperature of the cosines", symbol="T", minimum=1e-3)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each pair of rows (b,); 0, without a gradient, where one is all zeros."""
    lengths = a.square().sum(1) * b.square().sum(1)
    apart = lengths > 0
    return torch.where(apart, (a * b).sum(1) / torch.where(apart, lengths, 1.0).sqrt(), 0.0)


class MoonClient(SiloClient):
    settings: MoonSettings

    def local_update(self) -> list[Tensor]:
        last = self.state.personal
        unflatten = self.layout.unflatten
        self.contrasts = []
        if last is not None and self.settings.mu:
            buffers = self.state.personal_buffers
            buffers = self.received_buffers if buffers is None else buffers
            self.contrasts = [
                unflatten(self.received, self.received_buffers),
                unflatten(last, buffers),
            ]
        return super().local_update()

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.contrasts:
            return super().gradient(x, y)
        z = [compute_frozen(self.model, tensors, x)[0].flatten(1) for tensors in self.contrasts]
        return taught_gradient(self.model, x, y, torch.cat(z, 1), self.contrastive_loss)

    def contrastive_loss(self, outputs: Tensor, z: Tensor, others: Tensor, y: Tensor) -> Tensor:
        z = z.flatten(1)
        s = self.settings
        near, far = (cosine(z, other) for other in others.chunk(2, 1))
        # -log of the near one's share of two
        return self.loss(outputs, y) + s.mu * F.softplus((far - near) / s.temperature).mean()


class Moon(PersonalizedStrategy):
    info = ONE_MODEL(
        name="moon",
        title="Model-contrastive federated learning",
        paper="Li, He and Song, CVPR 2021, arXiv 2103.16257",
        spelling="MOON",
        keeps=("its last model",),
        plain_loss=False,
        trainer=OWN_LOSS,
    )
    client = MoonClient
    Settings = MoonSettings
    search = (("mu", 0.1, 10.0),)
