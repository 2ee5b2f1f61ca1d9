"""FedAMP and HeurFedAMP: attentive message passing, in which similar silos attract each other.

Huang et al., AAAI 2021, arXiv 2007.03797. min sum_i f_i(w_i) + λ sum_{i<j} A(||w_i - w_j||²), A(x) = 1 - exp(-x/σ):

    FedAMP       u_i = (1 - a sum_{j≠i} A'(d_ij²)) w_i + a sum_{j≠i} A'(d_ij²) w_j,   A'(x) = exp(-x/σ) / σ
    HeurFedAMP   u_i = ξ w_i + (1 - ξ) sum_{j≠i} softmax_j(σ cos(w_i, w_j)) w_j
    silo         min f_i(w) + (λ/2a) ||w - u_i||², started from u_i

Sent, kept, absent silos: see strategies/base/mixing.py. Special cases: λ = 0 and ``start = "own"`` is Local; models far
apart (all A' = 0) give u_i = w_i; HeurFedAMP with ξ = 1 too; ξ = 1/N and σ = 0 is the plain average. For real networks
d² is far above σ and FedAMP becomes Local with a proximal term: the paper's σ suits small distances. HeurFedAMP's σ of
0.1 makes nearly equal weights, so that it becomes FedAvg with a proximal term. The log reports both.

u_i is a convex combination only if a sum_j A' <= 1. With the step of 1000 that experiments use, models near each
other violate that: w_i gets a weight of minus thousands, and training diverges. ``convex`` divides such a row by
a sum_j A'; without it the formula is used unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.base.info import EACH_MODEL, OWN_MIXTURE
from strategies.base.mixing import MixingSettings, MixingStrategy, squared_distances
from strategies.base.settings import setting


@dataclass(frozen=True)
class AmpSettings(MixingSettings):
    """Settings of FedAMP; defaults as in FedALA's experiments."""

    sigma: float = setting(0.1, "width of the attention", symbol="σ", above=0)
    step: float = setting(1000.0, "the server's step", symbol="a", above=0, kind="decay-divisor")
    convex: bool = setting(True, "a silo's step is shortened to where its own weight would be negative")


class FedAMP(MixingStrategy):
    info = OWN_MIXTURE(
        name="fedamp",
        title="Attentive message passing",
        paper="Huang et al., AAAI 2021, arXiv 2007.03797",
        spelling="FedAMP",
        not_lossy=EACH_MODEL,
    )
    Settings = AmpSettings
    settings: AmpSettings
    advice = (
        "a fedamp.sigma near the square of that distance would make them differ",
        "a fedamp.sigma below the square of that distance would make them differ",
    )

    def coefficients(self, models: Tensor) -> Tensor:
        s = self.settings
        pull = s.step * torch.exp(-squared_distances(models) / s.sigma) / s.sigma
        pull.fill_diagonal_(0)
        if s.convex:
            pull /= pull.sum(1, keepdim=True).clamp(min=1)
        return pull + torch.diag(1 - pull.sum(1))


@dataclass(frozen=True)
class HeurSettings(MixingSettings):
    """Settings of HeurFedAMP."""

    sigma: float = setting(0.1, "sharpness of the attention", symbol="σ", minimum=0)
    self_weight: float = setting(0.1, "a silo's attention to its own model", symbol="ξ", minimum=0, maximum=1)


class HeurFedAMP(MixingStrategy):
    info = OWN_MIXTURE(
        name="heurfedamp",
        title="Attentive message passing by cosine similarity",
        paper="Huang et al., AAAI 2021, arXiv 2007.03797",
        spelling="HeurFedAMP",
        not_lossy=EACH_MODEL,
    )
    Settings = HeurSettings
    settings: HeurSettings
    advice = (
        "a heurfedamp.self-weight below 1 would let the others in",
        "a greater heurfedamp.sigma would make them differ",
    )

    def coefficients(self, models: Tensor) -> Tensor:
        s = self.settings
        if len(models) == 1:
            return torch.ones(1, 1, device=models.device)
        unit = torch.nn.functional.normalize(models, dim=1)
        scores = (s.sigma * unit @ unit.T).fill_diagonal_(-torch.inf)
        return (1 - s.self_weight) * scores.softmax(1) + s.self_weight * torch.eye(len(models), device=models.device)
