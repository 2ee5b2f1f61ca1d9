"""lp-proj: personal models that agree in a few random directions only; d numbers are sent.

Lin, Han, Li and Zhang, NeurIPS 2022. min_w sum_i min_θ f_i(θ) + λ R(P θ, w), with a reference w of d numbers and a
fixed random projection P (d, Σ). With e = w_i - P θ_i, in the silo, from the received w_i = w:

    θ_i <- θ_i - η (∇f_i(θ_i; batch) - λ Pᵀ s(e))     K times, a batch each
    w_i <- w_i - η_w λ s(e)                           after every K batches, and after the last of a round
    server   w <- (1 - β) w + (β/|S|) sum_{i in S} w_i

s(e) = ∇R: of ||e||_p, sign(e) (|e| / ||e||_p)^(p-1), for p = 1 sign(e); ``distance = "squared"`` is the paper's square
regulariser, R = ||e||²/2, s(e) = e. P has Gaussian rows of length 1, or orthogonal ones; every silo draws it from the
run's seed, because P is larger than a model. θ uses the run's optimiser and learning-rate, and η_w falls with lr-decay.

Sent: d numbers down, d up. Kept: server w, which starts at 0; silo θ_i, which continues from round to round. An absent
silo keeps its θ_i and is left out of the mean. BatchNorm statistics stay in the silo, as its model does.
Special cases: λ = 0 is Local bit for bit. P = 1, squared: pFedMe whose θ is not reset to w.

Paper and code: the code fixes 5 K batches a round, here local-epochs does (every silo uses all its data); its defaults
are λ 15, d 10, K 20, η = η_w = 0.1. With p = 1 each number pulls θ by λ η whatever the distance: λ 15 moves it by
1.5 at every step, so λ is 0.03 here (`azpro`, 20 rounds: R² .31 and .43). For 1 < p the code omits ||e||_p in the step
of θ, but not in the step of w (``distance = "unscaled"``: in both). It clips ∇f_i at norm 60 (``clip``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.training import clip_norm, generator
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, No, Sums
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import PROJECTION
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class ProjSettings:
    """Settings of lp-proj; defaults of its official code, but for λ."""

    lambda_: float = setting(
        0.03, "weight of the distance to the reference", symbol="λ", minimum=0
    )
    dimension: int = setting(10, "numbers that travel", symbol="d", minimum=1)
    distance: str = setting(
        "norm",
        "p-norm, its p-th power over p, or half the square",
        choices=("norm", "unscaled", "squared"),
    )
    p: float = setting(1.0, "which norm", symbol="p", minimum=1)
    projection: str = setting("gaussian", "rows of P", choices=("gaussian", "orthogonal"))
    inner_steps: int = setting(
        20, "batches per step of the reference", symbol="K", minimum=1, kind="steps"
    )
    reference_learning_rate: float = setting(
        0.1, "learning rate of the reference", symbol="η_w", above=0, kind="learning-rate"
    )
    beta: float = setting(1.0, "the server's step towards the mean", symbol="β", minimum=0)
    clip: float = setting(0.0, "largest norm of the loss's gradient, 0: any", minimum=0)


@lru_cache(maxsize=2)
def projection(seed: int, kind: str, rows: int, size: int, device: torch.device) -> Tensor:
    """Return P (d, Σ), the same in every silo of a run; rows have length 1."""
    random = torch.randn(rows, size, generator=generator(seed, "projection"))
    if kind == "orthogonal":  # Gram-Schmidt; QR leaves the signs open
        q, r = torch.linalg.qr(random.T)
        random = (q * r.diagonal().sign()).T
    return torch.nn.functional.normalize(random, dim=1).to(device)


class LpProjClient(SiloClient):
    settings: ProjSettings

    def receive(self) -> Tensor:
        return self.previous()

    def received_blocks(self) -> list[str]:
        return []

    def local_update(self) -> list[Tensor]:
        s, w, theta = self.settings, self.shared_model, self.model.vector
        matrix = projection(
            self.common.seed, s.projection, s.dimension, len(theta), theta.device
        )
        step = self.learning_rate(s.reference_learning_rate) * s.lambda_
        steps = 0

        def correct(theta: Tensor, g: Tensor) -> None:
            nonlocal w, steps
            if steps and steps % s.inner_steps == 0:
                w = w - step * self.grad(w - matrix @ theta)
            steps += 1
            if s.clip:
                clip_norm(g, s.clip)
            g.addmv_(matrix.T, self.grad(w - matrix @ theta), alpha=-s.lambda_)

        self.train(correction=correct if s.lambda_ else None)
        return [w - step * self.grad(w - matrix @ theta) if steps else w.clone()]

    def personalise(self) -> Tensor:
        """Train θ, with w as received."""
        s, w, theta = self.settings, self.shared_model, self.model.vector
        matrix = projection(
            self.common.seed, s.projection, s.dimension, len(theta), theta.device
        )
        pull = (
            (lambda v, g: g.addmv_(matrix.T, self.grad(w - matrix @ v), alpha=-s.lambda_))
            if s.lambda_
            else None
        )
        self.train(correction=pull)
        return theta

    def grad(self, e: Tensor) -> Tensor:
        """Return ∇R at e."""
        s = self.settings
        if s.distance == "squared":
            return e
        length = e.abs()
        if s.distance == "norm":
            length = length / torch.linalg.vector_norm(e, s.p).clamp(min=1e-12)
        return e.sign() * length ** (s.p - 1)


class LpProj(PersonalizedStrategy):
    info = OWN_COPY(
        name="lp-proj",
        title="Agreement in a low-dimensional random projection",
        paper="Lin et al., NeurIPS 2022",
        spelling="lp-proj",
        sends=("d", "d"),
        uploads={"projection": PROJECTION},
        own_model="kept",
        newcomer="own",
        sums=Sums("silos"),
        lossy=No("what is sent is a projection, no step"),
        buffers="local",
        ala=False,
    )
    client = LpProjClient
    Settings = ProjSettings
    search = (("lambda", 0.001, 1.0),)
    settings: ProjSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        if self.settings.dimension > self.layout.size:
            raise UserError(
                f"lp-proj.dimension = {self.settings.dimension}: the model has {self.layout.size} parameters only"
            )
        self.state.model = torch.zeros(self.settings.dimension)

    def sizes(self, silo: str) -> dict[str, int]:
        return {"projection": self.settings.dimension}

    def aggregate(self, updates: Sequence[Update]) -> None:
        self.step_towards(self.average(updates, equal=True), self.settings.beta)
