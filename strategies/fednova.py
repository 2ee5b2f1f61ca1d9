"""FedNova: silos' steps are normalised by how many local steps made them, so that a silo with more does not pull more.

Wang, Liu, Liang, Joshi and Poor, NeurIPS 2020, arXiv 2007.07481. A silo takes t_i steps from w to w_i. Server:

    d_i = (w_i - w) / a_i,   w <- w + t_eff sum_i p_i d_i,   p_i = n_i / n,   t_eff = sum_i p_i a_i

a_i is the sum of the weights that the t_i gradients have in w_i. With momentum r, v <- r v + g, and w <- w - η v, the
last has 1, the one before 1 + r, and so on: a_i = (t_i - r (1 - r^t_i)/(1 - r)) / (1 - r). With a proximal term μ the
last has 1, the one before 1 - η μ, and so on: a_i = (1 - (1 - η μ)^t_i) / (η μ), and t_eff = sum_i p_i t_i.

Sent: Σ down; w_i and the number t_i up. Kept: server w; silo nothing. An absent silo is left out of the sums. The
server rejects more steps than the silo's samples make. In t_eff a silo counts with the steps of as many samples as it
counts with in p_i (``weight-cap``), or one silo's number could make the others' step any length.
BatchNorm statistics are the plain weighted mean: w + t_eff d may lie beyond all w_i.

Special cases: with equal t_i and μ = 0 it is FedAvg up to rounding, with momentum, too. With t_i proportional to n_i
and no momentum it is N sum p_i² times the step to the unweighted mean. With equal t_i and μ > 0 it is t/a times
FedProx's step. Refused, as there is no a_i for them: Adam; a rate that changes within a round; μ together with
momentum (the authors' code adds the proximal gradient to the momentum and then mixes both a_i). The paper resets
momentum in each round. If it is kept (``optimizer-state = "keep"``), what earlier rounds left of it moves w_i and is
not counted in a_i.

Flower's baseline divides by t_eff once more, which cancels it. Not here: the authors' optional momentum on the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partitions.common.adding import added
from partitions.common.errors import UserError
from strategies.base.client import SiloClient, proximal
from strategies.base.info import ONE_MODEL, OWN_RATE, No
from strategies.base.settings import setting
from strategies.base.settings.training import patches_of
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import STEPS
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class NovaSettings:
    """Settings of FedNova; its code's runs with a proximal term have μ = 0.005."""

    mu: float = setting(0.0, "weight of the proximal term", symbol="μ", minimum=0, kind="decay")


def gradients_in(steps: int, momentum: float, shrink: float) -> float:
    """Return a_i from t_i, r and η μ, of which one is 0."""
    if shrink:
        return (1 - (1 - shrink) ** steps) / shrink
    if momentum == 1:
        return steps * (steps + 1) / 2
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class FedNovaClient(SiloClient):
    settings: NovaSettings

    def local_update(self) -> list[Tensor]:
        pull = proximal(self.shared_model, self.settings.mu)
        steps = 0

        def correct(w: Tensor, g: Tensor) -> None:
            nonlocal steps
            steps += 1
            if pull is not None:
                pull(w, g)

        self.train(correction=correct)
        self.replies["steps"] = steps
        return [self.model.vector.clone()]


class FedNova(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fednova",
        title="Normalised averaging of unequally many local steps",
        paper="Wang et al., NeurIPS 2020, arXiv 2007.07481",
        spelling="FedNova",
        sends_numbers={"steps": STEPS},
        ala=False,
        local_steps=False,
        sums=No("the server divides each silo's step by its own number of local steps"),
        block_rates=OWN_RATE,
    )
    client = FedNovaClient
    Settings = NovaSettings
    settings: NovaSettings

    def check_fit(self) -> None:
        c = self.common
        if c.optimizer != "sgd" or c.warmup_batches or (c.momentum and self.settings.mu):
            raise UserError(
                "fednova: the weights of the gradients in a silo's step are known for optimizer = sgd alone, with "
                "warmup-batches = 0, and with momentum = 0 if there is fednova.mu"
            )

    def most_steps(self, samples: int) -> int:
        c, patches = self.common, patches_of(self.common)
        epochs = c.local_epochs * (patches.passes if patches else 1)
        return epochs * max(math.ceil(samples / c.batch_size), 1)

    def check(self, update: Update) -> None:
        self.number(update, "steps", self.most_steps(self.silos[update.silo].n_train))

    def aggregate(self, updates: Sequence[Update]) -> None:
        c = self.common
        w = self.state.model
        weights = self.weights(updates)
        shrink = self.settings.mu * c.decay(c.learning_rate, self.round)
        steps = [self.number(u, "steps") for u in updates]
        moves = [
            (u.vector - w) / gradients_in(t, c.momentum, shrink) if t else torch.zeros_like(w)
            for u, t in zip(updates, steps, strict=True)
        ]
        counted = [
            min(t, self.most_steps(u.samples)) for u, t in zip(updates, steps, strict=True)
        ]
        lengths = counted if shrink else [gradients_in(t, c.momentum, 0.0) for t in counted]
        effective = added(p * a for p, a in zip(weights, lengths, strict=True)) / added(weights)
        self.state.model = w + effective * self.mean(moves, weights)
