"""FedAWA: the server learns the silos' weights in the mean from the directions of their steps.

Shi et al., CVPR 2025, arXiv 2503.15842. With w_i a silo's trained model, D_i = w_i - w its step and l = softmax(T) over
the round's silos:

    loss     L(T) = sum_i l_i (1 - cos(w_i, sum_j l_j w_j)) + sum_i l_i ||D_i - sum_j l_j D_j||
    server   T <- T - a step of Adam on L,   w <- γ sum_i l_i w_i

Adam is new in each round (rate 1e-3, β₁ = 0.5, β₂ = 0.999, one step). L needs only the inner products of the w_i and
those of the D_i, which are parameters. Running statistics are averaged with l, and not scaled by γ.

Sent: Σ down and up. Kept: server w and T_i - log n_i for each silo, 0 at first, so that l starts at n_i / n; silo
nothing. An absent silo keeps its number, and a late joiner starts at 0.

Paper and code: the code starts T at n_i / n, so that unequal silos begin nearly alike (``start = "shares"``), averages
with the l of before the step (``weights = "before"``), and keeps T by a silo's place in the round, which with
``participation`` below 1 is another silo's in the next. Here T goes by name. That the paper averages with the l of
after the step is (unverified).

Special cases: steps = 0 is FedAvg up to rounding, and so is round 1 with ``weights = "before"``. A new Adam's first
step moves each T_i by its rate, up or down: the ratio of two weights changes by at most e^0.002 in a round. With equal
w_i the gradient is 0. One silo: Local. Of two silos the second term is 2 l_1 l_2 ||D_1 - D_2||: the heavier one gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.base.info import EACH_MODEL, ONE_MODEL
from strategies.base.robust import gram_of
from strategies.base.settings import setting
from strategies.base.state import Items, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class AwaSettings:
    """Settings of FedAWA; defaults of its official runs."""

    server_learning_rate: float = setting(1e-3, "Adam's step on the weights", above=0)
    steps: int = setting(1, "Adam's steps in a round", minimum=0, kind="steps")
    gamma: float = setting(1.0, "scale of the mean model", symbol="γ", above=0)
    start: str = setting(
        "samples", "weights at first: by samples, or the code's", choices=("samples", "shares")
    )
    weights: str = setting(
        "after",
        "which weights the mean has: before or after the step",
        choices=("after", "before"),
    )


def alignment_loss(weights: Tensor, models: Tensor, steps: Tensor) -> Tensor:
    """Return L from l (S,) and the inner products (S, S) of the silos' models and of their steps."""
    mean = models @ weights
    cosines = mean / (models.diagonal() * (weights @ mean)).sqrt().clamp(min=1e-30)
    inner = steps @ weights
    squares = steps.diagonal() - 2 * inner + weights @ inner
    apart = squares > 1e-12 * steps.diagonal()  # else rounding, whose root has no gradient
    distances = torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0)
    return weights @ (1 - cosines + distances)


class AwaState(ServerState):
    learned = Items[float]("learned.")  # T_i without where it starts, by the silo's name


class FedAWA(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedawa",
        title="Weights of the mean learned from the silos' steps",
        paper="Shi et al., CVPR 2025, arXiv 2503.15842",
        spelling="FedAWA",
        robust=(),
        sums=EACH_MODEL,
    )
    Settings = AwaSettings
    search = (("server-learning-rate", 0.0001, 0.01),)
    settings: AwaSettings
    state_type = AwaState
    state: AwaState

    def logits(self, updates: Sequence[Update]) -> Tensor:
        """Return T (S,) of the silos of the round, in float64."""
        total = sum(self.plan.samples.values())
        by_share = self.settings.start == "shares"
        starts = (u.samples / total if by_share else math.log(u.samples) for u in updates)
        learned = (self.state.learned.get(u.silo, 0.0) for u in updates)
        return torch.tensor(
            list(map(sum, zip(starts, learned, strict=True))), dtype=torch.float64
        )

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return l."""
        values: list[float] = self.logits(updates).softmax(0).tolist()
        return values

    def aggregate(self, updates: Sequence[Update]) -> None:
        if self.settings.weights == "after":
            self.learn(updates)
        mean = self.average(updates)
        if self.settings.weights == "before":
            self.learn(updates)
        self.state.model = mean if self.settings.gamma == 1 else self.settings.gamma * mean

    def learn(self, updates: Sequence[Update]) -> None:
        """Move T by the round's steps of Adam."""
        vectors, nowhere = [u.vector for u in updates], [None] * len(updates)
        models, steps = (
            gram_of(vectors, nowhere),
            gram_of(vectors, [self.state.model] * len(updates)),
        )
        start = self.logits(updates)
        logits = start.clone().requires_grad_()
        adam = torch.optim.Adam(
            [logits], self.settings.server_learning_rate, betas=(0.5, 0.999)
        )
        for _ in range(self.settings.steps):
            loss = alignment_loss(logits.softmax(0), models, steps)
            logits.grad = torch.autograd.grad(loss, logits)[0]
            adam.step()
        for update, change in zip(updates, (logits.detach() - start).tolist(), strict=True):
            learned = self.state.learned
            learned[update.silo] = learned.get(update.silo, 0.0) + change
