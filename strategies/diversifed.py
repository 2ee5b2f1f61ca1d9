"""DiversiFed: diverse models that attract and repel each other at the same time.

Wu et al., "The Diversity Bonus", arXiv 2407.15464. min sum_i L_ce(w_i) + λ L_d(w_i), with plain distances
d_ij = ||w_i - w_j|| / τ:

    L_d(w_i) = 1/(N-1) sum_{j≠i} log( exp(d_ij) / sum_{k≠i} exp(d_ik) )     (no minus before the log)
    server   z_i = w_i - a ∇L_d(w_i), the others held fixed; in closed form
             z_i = (1 - a sum_j ξ_ij) w_i + a sum_j ξ_ij w_j,
             ξ_ij = (1/(N-1) - softmax_j(d_i.)) / (τ² ||w_i - w_j|| / τ)
    silo     min L_ce(w) + (λ/2a) ||w - z_i||², several epochs of Adam; in its first round L_ce alone

ξ_ij > 0 attracts, if j is nearer than the soft average. Sent, kept: see strategies/fedamp.py. Absent silos:
distances over the participants only, with N their number. No public code. The paper leaves the start of local training
open: here it is the silo's own w_i (the proximal-point reading); with ``start = "received"`` it is z_i.
Special cases: λ = 0 is Local; two silos, or equidistant models, give z_i = w_i; the rows of the coefficients sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.base.info import OWN_MIXTURE
from strategies.base.settings import setting
from strategies.fedamp import MixingSettings, MixingStrategy, model_distances


@dataclass(frozen=True)
class DiversifedSettings(MixingSettings):
    """Settings of DiversiFed; a of the paper, τ tuned there in {0.5, ..., 1.1}.

    The paper's λ is 2: `azpro` has R² .44 with it, and .46 with .02 (20 rounds).
    """

    lambda_: float = setting(
        0.02, "weight of the diversity term", symbol="λ", minimum=0, kind="decay"
    )
    start: str = setting("own", "where local training starts", choices=("received", "own"))
    tau: float = setting(1.0, "temperature of the distances", symbol="τ", above=0)


class DiversiFed(MixingStrategy):
    info = OWN_MIXTURE(
        name="diversifed",
        title="Diversity bonus",
        paper="Wu et al. 2024, arXiv 2407.15464",
        spelling="DiversiFed",
    )
    Settings = DiversifedSettings
    search = (("lambda", 0.002, 0.2),)
    settings: DiversifedSettings
    advice = ("a smaller diversifed.tau would make them differ",) * 2

    def coefficients(self, models: Tensor) -> Tensor:
        n, s = len(models), self.settings
        if n < 3:
            return torch.eye(n, device=models.device)
        distance = model_distances(models).sqrt() / s.tau
        others = ~torch.eye(n, dtype=torch.bool, device=models.device)
        softmax = distance.masked_fill(~others, -torch.inf).softmax(1)
        apart = others & (distance > 0)  # identical models neither attract nor repel
        force = torch.where(
            apart, (1 / (n - 1) - softmax) / (s.tau**2 * distance.clamp(min=1e-12)), 0.0
        )
        return torch.eye(n, device=models.device) + s.step * (force - torch.diag(force.sum(1)))
