"""FedAvgM, FedAdagrad, FedAdam and FedYogi: the server takes the silos' mean step with an optimiser of its own.

FedAvgM: Hsu, Qi and Brown 2019, arXiv 1909.06335. The others: Reddi et al., ICLR 2021, arXiv 2003.00295, Algorithm 2.
Silos train as in FedAvg. With D = sum_i k_i w_i - w, the mean of the silos' steps, element by element:

    FedAvgM      u <- β u + D,   w <- w + η u                                  (``nesterov``: w <- w + η (D + β u))
    the others   m <- β₁ m + (1 - β₁) D,   w <- w + η m / (sqrt(v) + τ)
    FedAdagrad   v <- v + D²
    FedAdam      v <- β₂ v + (1 - β₂) D²
    FedYogi      v <- v - (1 - β₂) D² sign(v - D²)

Only parameters take this step. Running statistics are averaged: a step could make a variance negative.

Sent: Σ down, Σ up. Kept: server w and u, or w, m and v; silo nothing. An absent silo is left out of D. A late joiner
changes nothing of the server's state, which is per parameter.

Paper and code: the paper starts v at τ² or more and corrects no bias. Flower's code starts v at 0
(``start = "zero"``), and its FedAdam corrects bias by sqrt(1 - β₂^(t+1)) / (1 - β₁^(t+1)) in round t, counted from 1
(``correct-bias``). k_i = n_i/n, as in Flower; that Algorithm 2 weighs silos alike (``average = "silos"``) is
(unverified). Flower's baseline has the Nesterov form of FedAvgM, Flower itself and the paper do not. The default rates
are Flower's, whose FedAvgM has β = 0. Tune η together with the silos' learning rate.

With differential privacy v measures the noise as well: τ belongs above the noise of D.

Special cases: FedAvgM with β = 0 and η = 1 is FedAvg bit for bit. β₁ = 0, η = c τ and a large τ are w + c D with
``start = "zero"``, so that c = 1 is FedAvg. τ near 0 with β₁ = β₂ = 0 is η sign(D): with FedAdam in each round, with
FedYogi in round 1 alone, for later D² is taken from a larger v and not put in its place. In round 1, from v = 0, both
have the same v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.base.info import ONE_MODEL
from strategies.base.settings import Averaging, setting
from strategies.base.state import RequiredArray, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Update

PAPER = "Reddi et al., ICLR 2021, arXiv 2003.00295"


@dataclass(frozen=True)
class MomentumSettings(Averaging):
    """Settings of FedAvgM."""

    server_learning_rate: float = setting(1.0, "the server's step", symbol="η", above=0)
    momentum: float = setting(
        0.9, "share of the last step in the next", symbol="β", minimum=0, below=1
    )
    nesterov: bool = setting(False, "Nesterov's form, as in Flower's baseline")


@dataclass(frozen=True)
class AdagradSettings(Averaging):
    """Settings of FedAdagrad; defaults of Flower's code."""

    server_learning_rate: float = setting(0.1, "the server's step", symbol="η", above=0)
    beta_1: float = setting(
        0.0, "share of the last mean step in the next", symbol="β₁", minimum=0, below=1
    )
    tau: float = setting(
        1e-3, "added to the root of v: adaptivity is less with more", symbol="τ", above=0
    )
    start: str = setting("tau", "v before round 1: τ², or 0", choices=("tau", "zero"))


@dataclass(frozen=True)
class YogiSettings(AdagradSettings):
    """Settings of FedYogi; defaults of Flower's code."""

    server_learning_rate: float = setting(0.01, "the server's step", symbol="η", above=0)
    beta_1: float = setting(
        0.9, "share of the last mean step in the next", symbol="β₁", minimum=0, below=1
    )
    beta_2: float = setting(
        0.99, "share of the last v in the next", symbol="β₂", minimum=0, below=1
    )


@dataclass(frozen=True)
class AdamSettings(YogiSettings):
    """Settings of FedAdam; defaults of Flower's code."""

    server_learning_rate: float = setting(0.1, "the server's step", symbol="η", above=0)
    correct_bias: bool = setting(False, "correct the bias of m and v, as Flower's code does")


class MomentumState(ServerState):
    velocity = RequiredArray()  # u (Σ,)


class FedAvgM(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedavgm",
        title="Federated averaging with server momentum",
        paper="Hsu, Qi and Brown 2019, arXiv 1909.06335",
        spelling="FedAvgM",
    )
    Settings = MomentumSettings
    search = (("server-learning-rate", 0.05, 1.0),)
    settings: MomentumSettings
    state_type = MomentumState
    state: MomentumState

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        self.state.velocity = torch.zeros_like(self.state.model)

    def aggregate(self, updates: Sequence[Update]) -> None:
        s, w = self.settings, self.state.model
        mean = self.average(updates)
        step = self.state.velocity = s.momentum * self.state.velocity + (mean - w)
        if s.nesterov:
            step = mean - w + s.momentum * step
        plain = s.momentum == 0 and s.server_learning_rate == 1
        self.state.model = mean if plain else w + s.server_learning_rate * step


class AdaptiveState(ServerState):
    m = RequiredArray()  # (Σ,)
    v = RequiredArray()  # (Σ,)


class FedAdagrad(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedadagrad",
        title="Adagrad on the server",
        paper=PAPER,
        spelling="FedAdagrad",
        step=2.0,  # its first ones are long
    )
    Settings = AdagradSettings
    search = (("server-learning-rate", 0.01, 1.0),)
    settings: AdagradSettings
    state_type = AdaptiveState
    state: AdaptiveState

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        first = self.settings.tau**2 if self.settings.start == "tau" else 0.0
        self.state.m = torch.zeros_like(self.state.model)
        self.state.v = torch.full_like(self.state.model, first)

    def squares(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the next v from v and D²."""
        return v + squared

    def rate(self) -> float:
        return self.settings.server_learning_rate

    def aggregate(self, updates: Sequence[Update]) -> None:
        s, state = self.settings, self.state
        change = self.average(updates) - state.model
        state.m = s.beta_1 * state.m + (1 - s.beta_1) * change
        state.v = self.squares(state.v, change.square())
        state.model = state.model + self.rate() * state.m / (state.v.sqrt() + s.tau)


class FedYogi(FedAdagrad):
    info = ONE_MODEL(
        name="fedyogi", title="Yogi on the server", paper=PAPER, spelling="FedYogi"
    )
    Settings = YogiSettings
    search = (("server-learning-rate", 0.001, 0.1),)
    settings: YogiSettings

    def squares(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.settings.beta_2) * squared * (v - squared).sign()


class FedAdam(FedAdagrad):
    info = ONE_MODEL(
        name="fedadam", title="Adam on the server", paper=PAPER, spelling="FedAdam"
    )
    Settings = AdamSettings
    search = (("server-learning-rate", 0.01, 1.0),)
    settings: AdamSettings

    def squares(self, v: Tensor, squared: Tensor) -> Tensor:
        b = self.settings.beta_2
        return b * v + (1 - b) * squared

    def rate(self) -> float:
        s, t = self.settings, self.round + 1
        if not s.correct_bias:
            return s.server_learning_rate
        scale: float = (1 - s.beta_2**t) ** 0.5 / (1 - s.beta_1**t)
        return s.server_learning_rate * scale
