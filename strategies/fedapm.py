"""FedAPM: partial model personalisation by the alternating direction method of multipliers.

Zhu et al., KDD 2025, arXiv 2506.04672. min_{u,V} sum_i α_i f_i(v_i, u), split with local copies u_i = u:

    L_i = α_i f_i(v_i, u_i) + <π_i, u_i - u> + (ρ/2) ||u_i - u||²                                   (eq. 4)

    server   u^{t+1} = (1/m) sum_i z_i^t over all m silos, absent ones with their last z_i             (eq. 8)
    silo     v_i: steps on α_i ∇_v f_i(v, u_i^t) + σ (v - v_i^t)                                     (eq. 15)
             u_i: steps on α_i ∇_u f_i(v_i^{t+1}, u_i) + π_i^t + ρ (u_i - u^{t+1}), until the squared norm of that
                  gradient is at most ε_i, or for a number of epochs                                  (eq. 11)
             π_i^{t+1} = π_i^t + ρ (u_i^{t+1} - u^{t+1})                                             (eq. 12)
             z_i^{t+1} = u_i^{t+1} + π_i^{t+1} / ρ                                                   (eq. 13)

α_i = 1/m or n_i/n is part of the gradient: a learning rate of 0.1 over 20 silos is an effective 0.005. So a search
draws rates times m; at .5 m it diverges on `azpro`. The u-step starts from u^{t+1}. The published text lacks its
formulas; these are recovered from its proofs and its code, which agree.

With secure sums a silo sends u^{t+1} + z_i^{t+1} - z_i, with z_i its last vector that the server counted. The server
adds |S|/m times the mean of these steps to u^{t+1}: eq. 8, for an absent silo's z_i has no step.

Sent: Σ_s down, Σ_s up. Kept: server all z_i; silo v_i and u_i (its model), π_i, ε_i. Invariant after every aggregation
with all present: sum_i [ρ (u_i - u) + π_i] = 0. A silo first chosen late has u_i = z_i = the initial model until then.
Special cases: ρ = σ = 0, all present, equal n_i, learning rate times m: FedAlt; nothing shared and σ = 0: Local with
learning rate α_i η.

Paper and code: the v-step starts from the silo's own u_i^t (paper, Gauss-Seidel) or from u^{t+1} (code;
``v-start = "server"``, with which the FedAlt case above holds); the code has no ε, but a fixed number of epochs
(``accuracy = 0``, the default); its σ is 0.01 and ρ 0.01, its μ = 0.01 is weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from models.flat import gather, scatter
from strategies.base.info import OWN_LAYERS, No, NoisedEpochs, Sums
from strategies.base.partial import PartialClient, PartialSettings, PartialStrategy
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Array, Arrays, ClientState, Item, ServerState
from strategies.base.trainer.loop import full_gradient
from strategies.base.transport.kinds import SHARED_AT
from strategies.base.transport.payload import Payload, Update, silos_of


@dataclass(frozen=True)
class ApmSettings(PartialSettings):
    """Settings of FedAPM; defaults of the paper's experiments."""

    rho: float = setting(0.01, "penalty", symbol="ρ", minimum=0, kind="decay")
    sigma: float = setting(
        0.01, "weight of the proximal term on the personal part", symbol="σ", minimum=0
    )
    alpha: str = setting(
        "uniform", "weight of a silo: 1/m or n_i/n", symbol="α", choices=("uniform", "samples")
    )
    v_start: str = setting(
        "own", "shared part during the personal step", choices=("own", "server")
    )
    accuracy: float = setting(
        0.0,
        "squared gradient norm that ends the shared step, 0: local-epochs",
        symbol="ε",
        minimum=0,
    )
    shrink: float = setting(0.95, "factor on ε per round", symbol="ν", above=0, maximum=1)


class ApmClientState(ClientState):
    dual = Array()  # π_i (Σ_s,); None: 0
    z = Array()  # with secure sums: the last z_i (Σ_s,) that the server counted; None: the initial model's
    # The accuracy that the local problem is solved to
    epsilon = Item[float | None](lambda: None)


class ApmServerState(ServerState):
    z = Arrays("z.")  # each silo's last vector (Σ_s,)


class FedAPMClient(PartialClient):
    state_type = ApmClientState
    state: ApmClientState
    settings: ApmSettings

    def local_update(self) -> list[Tensor]:
        s = self.settings
        state = self.state
        u = self.shared_model
        start = gather(self.model.vector, self.shared)
        dual = torch.zeros_like(u) if state.dual is None else state.dual
        last_u = gather(self.previous(), self.shared)
        self._personal_step(last_u if s.v_start == "own" else start)
        self.model.load(scatter(self.model.vector, self.shared, start))
        self._shared_step(u, dual)
        own_u = gather(self.model.vector, self.shared)
        state.dual = dual = dual + s.rho * (own_u - u)
        z = own_u + dual / s.rho if s.rho else own_u
        if not self.common.secure_aggregation:
            return [z]
        before = state.z
        if before is None:
            before = gather(self.silo.initial(""), self.shared)
        self.propose_step("shared", z=(before, z))
        return [u + (z - before)]

    def noised_passes(self) -> tuple[int, ...]:
        epochs = self.common.local_epochs
        return (epochs, epochs, *((1,) * epochs if self.settings.accuracy else ()))

    def personalise(self) -> Tensor:
        """Train v by eq. 15, with u as received."""
        self._personal_step(gather(self.model.vector, self.shared))
        return self.model.vector

    def _scale(self) -> float:
        return cast(float, self.numbers["alpha"])

    def _personal_step(self, shared: Tensor) -> None:
        """Make the steps of eq. 15, with the shared part fixed at ``shared``."""
        if not self.private:
            return
        self.model.load(scatter(self.model.vector, self.shared, shared))
        centre = self.model.vector.clone()
        alpha = self._scale()
        sigma = self.settings.sigma

        def correct(w: Tensor, g: Tensor) -> None:
            g.mul_(alpha)
            for part in self.private:
                g[part].add_(w[part] - centre[part], alpha=sigma)

        self.train(
            parts=self.private,
            correction=correct,
            purpose="personal" if self.shared else "train",
            optimizer_key="personal",
        )

    def _shared_step(self, u: Tensor, dual: Tensor) -> None:
        """Make the steps of eq. 11, from the current model."""
        if not self.shared:
            return
        centre = scatter(self.model.vector, self.shared, u)
        pull = scatter(torch.zeros_like(centre), self.shared, dual)
        alpha = self._scale()
        rho = self.settings.rho

        def correct(w: Tensor, g: Tensor) -> None:
            g.mul_(alpha).add_(pull)
            for part in self.shared:
                g[part].add_(w[part] - centre[part], alpha=rho)

        target = self._target()
        until = (lambda: self._squared_norm(correct) <= target) if target else None
        self.train(parts=self.shared, correction=correct, until=until, optimizer_key="shared")

    def _target(self) -> float:
        """Return ε_i of this round; it shrinks with every round that the silo takes part in."""
        if not self.settings.accuracy:
            return 0.0
        target = self.settings.accuracy if self.state.epsilon is None else self.state.epsilon
        self.state.epsilon = target * self.settings.shrink
        return target

    def _squared_norm(self, correct: Callable[[Tensor, Tensor], object]) -> float:
        """Return ||∇_u L_i||² over all of the silo's training samples."""
        total = full_gradient(self, "norm")
        correct(self.model.vector, total)
        return float(gather(total, self.shared).square().sum())


class FedAPM(PartialStrategy):
    info = OWN_LAYERS(
        name="fedapm",
        title="ADMM with partial model personalisation",
        paper="Zhu et al., KDD 2025, arXiv 2506.04672",
        spelling="FedAPM",
        dp_epochs=(
            NoisedEpochs(),
            NoisedEpochs(),
            NoisedEpochs(each=True, where="fedapm.accuracy"),
        ),
        uploads={"shared": SHARED_AT},
        own_model="kept",
        sends_duals=True,
        lossy=No("the server keeps each silo's last vector, not a sum of steps"),
        sums=Sums(
            "silos",
            at={"alpha": ("uniform",)},
            otherwise="each silo gets a number of its own that scales its gradients",
        ),
    )
    client = FedAPMClient
    Settings = ApmSettings
    search = (("learning-rate", 0.01, 0.2), ("rho", 0.001, 0.03))
    rate_times_silos = True
    state_type = ApmServerState
    state: ApmServerState
    settings: ApmSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        for name in () if self.common.secure_aggregation else self.silos:
            self.state.z[name] = self.state.model

    def welcome(self, silo: str, *, trains: bool) -> None:
        self.state.z[silo] = self.state.model

    def payload(self, silo: str) -> Payload:
        total = sum(self.plan.samples.values())
        alpha = (
            self.plan.samples[silo] / total
            if self.settings.alpha == "samples"
            else 1 / len(self.silos)
        )
        return self.pack({GLOBAL: self.state.model}, alpha=alpha)

    def aggregate(self, updates: Sequence[Update]) -> None:
        if self.common.secure_aggregation:
            u, share = self.state.model, len(silos_of(updates)) / len(self.silos)
            self.state.model = u + share * (updates[0].vector - u)
            return
        for update in updates:
            self.state.z[update.silo] = update.vector
        self.state.model = self.mean(self.state.z[name] for name in self.silos)
