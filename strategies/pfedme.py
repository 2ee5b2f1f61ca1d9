"""pFedMe: Moreau envelopes; the personal model is a proximal point of the silo's copy of the global one.

Dinh et al., NeurIPS 2020, arXiv 2006.08848. min_w sum_i F_i(w), F_i(w) = min_θ f_i(θ) + (λ/2) ||θ - w||². In the silo,
with w_i = θ = the received w, for each mini-batch:

    θ   <- θ - η_p (∇f_i(θ; batch) + λ (θ - w_i) + μ θ)      K times on the same batch
    w_i <- w_i - η λ (w_i - θ)
    server   w <- (1 - β) w + β · the sample-weighted mean of the w_i

η is the run's learning-rate, and lr-decay falls on η_p too; the steps are plain gradient steps, without the run's
optimiser, momentum and weight decay. θ continues from its last value within a round. Personal: θ. Sent: Σ down, Σ up.
Kept: server w; silo nothing. An absent silo is left out of the mean (the official code trains all and averages some).
The authors' code has λ 15, η 0.005 and η_p 0.1. θ is stable for η_p (λ + the loss's curvature) < 2, and w for η λ < 2:
hence η_p 0.05 here (`azpro`, 20 rounds: R² .48 and .51), and λ 1 to 15 with η up to 0.05 in a search.
Special cases: β = 0 keeps w; λ = 0 makes θ local SGD from w and keeps w; η λ = 1 sets w_i = θ after each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, OWN_RATE
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class PFedMeSettings:
    """Settings of pFedMe; defaults of its official code, but for η_p."""

    lambda_: float = setting(15.0, "weight of the proximal term", symbol="λ", minimum=0)
    inner_steps: int = setting(
        5, "gradient steps on θ per mini-batch", symbol="K", minimum=1, kind="steps"
    )
    personal_learning_rate: float = setting(
        0.05, "learning rate of θ", symbol="η_p", above=0, kind="learning-rate"
    )
    mu: float = setting(0.001, "L2 weight on θ", symbol="μ", minimum=0, kind="decay")
    beta: float = setting(1.0, "the server's step towards the mean", symbol="β", minimum=0)

    @property
    def gradients_per_batch(self) -> int:
        return self.inner_steps


class PFedMeClient(SiloClient):
    settings: PFedMeSettings

    def local_update(self) -> list[Tensor]:
        s, theta = self.settings, self.model.vector
        w, steps = theta.clone(), 0

        def follow() -> None:
            nonlocal steps
            steps += 1
            if steps % s.inner_steps == 0:
                w.sub_(w - theta, alpha=self.learning_rate() * s.lambda_)

        self.approach(w, follow)
        return [w]

    def approach(self, w: Tensor, after: Callable[[], object] | None = None) -> None:
        """Make K steps of θ, which is in the model, on each batch."""
        s = self.settings

        def pull(theta: Tensor, g: Tensor) -> None:
            g.add_(theta - w, alpha=s.lambda_).add_(theta, alpha=s.mu)

        rate = self.learning_rate(s.personal_learning_rate)
        self.train(correction=pull, after=after, rate=rate, repeats=s.inner_steps)

    def personalise(self) -> Tensor:
        """Train θ around w, which is fixed."""
        self.approach(self.received)
        return self.model.vector


class PFedMe(PersonalizedStrategy):
    info = OWN_COPY(
        name="pfedme",
        title="Moreau envelopes",
        paper="Dinh et al., NeurIPS 2020, arXiv 2006.08848",
        spelling="pFedMe",
        own_model="kept",
        block_rates=OWN_RATE,
    )
    client = PFedMeClient
    Settings = PFedMeSettings
    search = (("learning-rate", 0.005, 0.05), ("lambda", 1.0, 15.0))
    settings: PFedMeSettings

    def aggregate(self, updates: Sequence[Update]) -> None:
        self.step_towards(self.average(updates), self.settings.beta)
