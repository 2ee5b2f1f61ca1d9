"""FedADMM: the alternating direction method of multipliers, with local training in place of exact minimisation.

Gong, Li and Freris, ICDE 2022, arXiv 2204.03529. min sum_i f_i(w_i) so that w_i = θ, with a dual y_i in each silo:

    silo     w_i <- steps on ∇f_i(w) + y_i + ρ (w - θ)
             y_i <- y_i + ρ (w_i - θ)
             Δ_i  = the change of w_i + y_i/ρ since the silo's last counted round
    server   θ <- θ + (η / |S|) sum_{i in S} Δ_i

Sent: Σ down, Σ up (Δ_i). Kept: server θ; silo w_i, which starts at the common initial model, and y_i, at 0. The silo
commits both once the server has counted them (strategies/scaffold.py). An absent silo keeps both and has no
Δ_i.

Three methods have this name. η = 0 means |S|/N, with which θ is the mean of all silos' last w_i + y_i/ρ, including
absent ones: the default, for with η = 1 and few present θ moves N/|S| times as far as the mean. The paper and its
code have η = 1. This is the server's step of Zhou and Li (TPAMI 2023, arXiv 2204.10607); their inexact inner solver and
penalties per silo are not implemented. The method of Wang, Marella and Anderson (CDC 2022) is not implemented either.

Paper and code: the authors' code measures Δ_i from the received θ, not from the silo's own w_i, so that
Δ_i = 2 (w_i - θ) and η = 1/2 is plain averaging (``since = "received"``). It draws each silo's epochs from 1 to
E (``random-epochs``), and lowers η to 0.5 at round 60 (``later``, ``later-from``). Local steps start from θ (code) or
from the silo's w_i (``start = "own"``). The received model is θ in both cases.

Special cases: with all present and η = 1 it is FedDyn with α = ρ. η = 0 is FedAPM with nothing personal, ρ/N for its
ρ and N times the learning rate, with absent silos too. since = "received", η = 1/2: FedAvg's mean with equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.training import generator
from strategies.base.client import SiloClient
from strategies.base.info import LOCAL_SUMS, ONE_MODEL, Sums
from strategies.base.settings import setting
from strategies.base.state import Array, ClientState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import CHANGE
from strategies.base.transport.payload import Update, silos_of


@dataclass(frozen=True)
class AdmmSettings:
    """Settings of FedADMM; ρ of its official code."""

    rho: float = setting(0.01, "penalty", symbol="ρ", above=0, kind="decay")
    eta: float = setting(0.0, "the server's step, 0: |S|/N", symbol="η", minimum=0)
    later: float = setting(0.5, "the server's step from round later-from on", minimum=0)
    later_from: int = setting(0, "round from which later stands for η, 0: never", minimum=0)
    start: str = setting("received", "where local training starts", choices=("received", "own"))
    since: str = setting(
        "own", "what a silo's change is measured from", choices=("own", "received")
    )
    random_epochs: bool = setting(
        False, "a silo's epochs are drawn from 1 to local-epochs each round"
    )


class AdmmClientState(ClientState):
    primal = Array()  # w_i (Σ,) of the last counted round
    dual = Array()  # y_i (Σ,); None: 0


class FedADMMClient(SiloClient):
    state_type = AdmmClientState
    state: AdmmClientState
    settings: AdmmSettings

    def last(self) -> Tensor:
        """Return w_i of the last counted round; before the first the common initial model, for a late joiner θ."""
        return self.first() if self.state.primal is None else self.state.primal

    def local_update(self) -> list[Tensor]:
        s, theta, w = self.settings, self.shared_model, self.model.vector
        if s.start == "own":
            self.model.load(self.last())
        dual = torch.zeros_like(w) if self.state.dual is None else self.state.dual
        self.train(
            correction=lambda v, g: g.add_(v - theta, alpha=s.rho).add_(dual),
            epochs=self.epochs(),
        )
        new = dual + s.rho * (w - theta)
        before = self.last() if s.since == "own" else theta
        change = (w - before) + (new - dual) / s.rho
        self.propose_step("change", primal=(before, w.clone()), dual=(dual, new))
        return [change]

    def noised_passes(self) -> tuple[int, ...]:
        return (self.epochs(),)

    def epochs(self) -> int:
        most = self.common.local_epochs
        if not self.settings.random_epochs or most < 2:
            return most
        rng = generator(self.common.seed, self.silo.name, self.round, "epochs")
        return int(torch.randint(1, most + 1, (1,), generator=rng))


class FedADMM(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedadmm",
        title="Alternating direction method of multipliers",
        paper="Gong et al., ICDE 2022, arXiv 2204.03529",
        spelling="FedADMM",
        uploads={"change": CHANGE},
        sums=Sums("silos"),
        own_model="kept",
        note="what is sent is a step from the received model to the own one, plus older steps: nearly the own model",
        lossy=LOCAL_SUMS,
        local_steps=False,
    )
    client = FedADMMClient
    Settings = AdmmSettings
    search = (("rho", 0.001, 0.3),)
    settings: AdmmSettings

    def step(self) -> float:
        s = self.settings
        return s.later if 0 < s.later_from <= self.round else s.eta

    def aggregate(self, updates: Sequence[Update]) -> None:
        step = self.step() or len(silos_of(updates)) / len(self.silos)
        self.state.model = self.state.model + step * self.average(updates, equal=True)
