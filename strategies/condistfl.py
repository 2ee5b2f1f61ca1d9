"""ConDistFL: what the received model says of organs that a hospital does not outline is distilled into the trained one.

Wang et al., MICCAI Workshops 2023, arXiv 2308.04070, and 2412.18833; equations of the authors' code (NVIDIA FLARE,
research/condist-fl). F are the classes that this hospital outlines, U those that it does not
(``unlabelled``), p the softmax of z/T, and q(c) = p(c) / (1 - sum_{f in F} p(f) + 10⁻⁵) for c in {0} and U. With q_g of
the received model w, which is frozen and computes in evaluation mode:

    loss     L(z', y) + λ_t (1 - mean over c of 2 sum q q_g m / (sum (q + q_g) m + 10⁻⁵))
    z'       z of F, and for the background log(e^z(0) + sum_{u in U} e^z(u)): what is not outlined here is part of it
    m        1 for a pixel that is in no class of F, by the outline and by the largest output of w; else 0
    λ_t      from ``first`` to ``last`` in equal steps over the run's rounds

L is the run's loss: cross-entropy, and Dice of F. Without U it is all of the loss.

Sent: Σ down, Σ up. Kept: server w; silo nothing. An absent silo is left out of the mean. Special case: where all
hospitals outline everything, FedAvg bit for bit. Without the second term the outputs of U may share the background as
they like, which the term fixes.

Paper and code: the sums of Dice are over a sample here, over the batch in the code, so that a record's gradient is its
own. The code joins an organ and its tumour in U to one group; here each class is one. Its L counts the background in
Dice. Pixels of 255 are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.training import taught_gradient
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OWN_LOSS
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy

LEAST = 1e-5


@dataclass(frozen=True)
class ConDistSettings:
    """Settings of ConDistFL; defaults of its official runs."""

    temperature: float = setting(2.0, "temperature of both softmaxes", symbol="T", minimum=1e-3)
    first: float = setting(
        0.01, "weight of the distillation in that round", symbol="λ", minimum=0
    )
    last: float = setting(
        1.0, "weight of the distillation in that round", symbol="λ", minimum=0
    )


def joined_background(outputs: Tensor, background: Sequence[int]) -> Tensor:
    """Return outputs (b, C, ...) whose class 0 is all of the background: z'."""
    return torch.cat([outputs[:, background].logsumexp(1, keepdim=True), outputs[:, 1:]], 1)


def distillation_loss(
    outputs: Tensor, taught: Tensor, y: Tensor, background: Sequence[int], temperature: float
) -> Tensor:
    """Return 1 - the mean Dice of q and q_g over classes and samples; outputs (b, C, ...), y (b, ...)."""

    def conditional(outputs: Tensor) -> Tensor:
        p = torch.softmax(outputs / temperature, 1)[:, background]
        return p / (p.sum(1, keepdim=True) + LEAST)

    classes = torch.tensor(background, device=y.device)
    mask = (torch.isin(taught.argmax(1), classes) & (y == 0)).unsqueeze(1)
    new, old = (conditional(of) * mask for of in (outputs, taught))
    across = tuple(range(2, outputs.dim()))
    both, total = (new * old).sum(across), (new + old).sum(across)
    return (1 - 2 * both / (total + LEAST)).mean()


class ConDistClient(SiloClient):
    settings: ConDistSettings

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        self.background = (0, *getattr(self.silo.task, "unlabelled", ()))
        if len(self.background) == 1:
            return super().gradient(x, y)
        return taught_gradient(self.model, x, y, self.taught(x).flatten(1), self.condist_loss)

    def condist_loss(self, outputs: Tensor, z: Tensor, taught: Tensor, y: Tensor) -> Tensor:
        s, last = self.settings, max(self.common.rounds - 1, 1)
        weight = s.first + (s.last - s.first) * (self.round - 1) / last
        distilled = distillation_loss(
            outputs, taught.view_as(outputs), y, self.background, s.temperature
        )
        return self.loss(joined_background(outputs, self.background), y) + weight * distilled


class ConDistFL(PersonalizedStrategy):
    info = ONE_MODEL(
        name="condistfl",
        title="Distillation of what a hospital does not outline",
        paper="Wang et al. 2023, arXiv 2308.04070",
        spelling="ConDistFL",
        plain_loss=False,
        trainer=OWN_LOSS,
    )
    client = ConDistClient
    Settings = ConDistSettings
