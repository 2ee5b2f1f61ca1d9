"""FedDyn: a dynamic regulariser, with which the silos' optima and the server's coincide in the limit.

Acar et al., ICLR 2021, arXiv 2111.04263, Algorithm 1. min_θ (1/N) sum_i f_i(θ), with equal weights:

    silo     θ_i = argmin_θ f_i(θ) - <g_i, θ> + (α/2) ||θ - θ^t||², by local training from θ^t
             g_i <- g_i - α (θ_i - θ^t)                                   (= ∇f_i(θ_i) at an exact θ_i)
    server   h <- h - (α/N) sum_{i in S} (θ_i - θ^t),   θ^{t+1} = (1/|S|) sum_{i in S} θ_i - h/α

``weights = "samples"``, the authors' code: α_i = α n/(N n_i) in the silo, which weighs f_i by n_i; h then is the mean
of the (N n_i/n) g_i. The code also clips the gradient, regulariser included, at norm 10 (``clip``), and keeps
-g_i/α in place of g_i. Of the models that the code scores, the next start θ^{t+1} is the received one here. The paper
plots the mean of all silos' last θ_i, which is no silo's model and is not computed.

Sent: Σ down, Σ up. Kept: server θ, h; silo g_i, which starts at 0 and is committed once the server has counted it
(strategies/scaffold.py). Invariant with all present: h = mean of the g_i. An absent silo keeps its g_i and its
share of h; the mean of the θ_i is over the received replies. A late joiner's g_i is 0, and h is multiplied by
N / (N + 1), with ``weights = "samples"`` by n / (n + n_i): still the mean of the g_i. Personal: θ_i.

Special cases: the step of round 1 is 1 + |S|/N times the step to the mean of the θ_i. With all silos present it is
ADMM: FedAPM with nothing personal, ρ = α/N and N times the learning rate, and FedADMM with ρ = α and η = 1. PFLlib's
term is a norm that is not squared, by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from models.training import clip_norm
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import LOCAL_SUMS, ONE_MODEL, Sums
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Array, ClientState, RequiredArray, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload, Update, silos_of


@dataclass(frozen=True)
class DynSettings:
    """Settings of FedDyn; α of its official CIFAR-10 runs."""

    alpha: float = setting(0.01, "weight of the regulariser", symbol="α", above=0, kind="decay")
    weights: str = setting(
        "uniform", "how silos' losses are weighted", choices=("uniform", "samples")
    )
    clip: float = setting(0.0, "largest norm of a step's gradient, 0: any", minimum=0)


class DynClientState(ClientState):
    dual = Array()  # g_i (Σ,); None: 0


class DynServerState(ServerState):
    h = RequiredArray()  # (Σ,)


class FedDynClient(SiloClient):
    state_type = DynClientState
    state: DynClientState
    settings: DynSettings

    def local_update(self) -> list[Tensor]:
        centre = self.shared_model
        clip = self.settings.clip
        alpha = self.settings.alpha * cast(float, self.numbers["scale"])
        share = self.learning_rate() * alpha
        most = self.silo.max_decay
        # The server's message changes α; the policy checks settings before the run
        if not 0 <= share <= most:
            raise UserError(
                f"{self.silo.name}: max-decay = {most:g}, and learning rate x proximal weight = {share:g}"
            )
        dual = torch.zeros_like(centre) if self.state.dual is None else self.state.dual

        def correct(w: Tensor, g: Tensor) -> None:
            g.add_(w - centre, alpha=alpha).sub_(dual)
            if clip:
                clip_norm(g, clip)

        self.train(correction=correct)
        new = dual - alpha * (self.model.vector - centre)
        self.propose_step("model", dual=(dual, new))
        return [self.model.vector.clone()]


class FedDyn(PersonalizedStrategy):
    info = ONE_MODEL(
        name="feddyn",
        title="Dynamic regularisation",
        paper="Acar et al., ICLR 2021, arXiv 2111.04263",
        spelling="FedDyn",
        late="grows",
        sums=Sums(
            "silos",
            at={"weights": ("uniform",)},
            otherwise="each silo gets a number of its own that scales its step",
        ),
        lossy=LOCAL_SUMS,
    )
    client = FedDynClient
    Settings = DynSettings
    search = (("alpha", 0.001, 0.1),)
    state_type = DynServerState
    state: DynServerState
    settings: DynSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        self.state.h = torch.zeros_like(self.state.model)

    def welcome(self, silo: str, *, trains: bool) -> None:
        if not trains:
            return
        n = len(self.silos)
        total = sum(self.plan.samples.values())
        samples = self.settings.weights == "samples"
        self.state.h = self.state.h * (
            1 - self.plan.samples[silo] / total if samples else (n - 1) / n
        )

    def payload(self, silo: str) -> Payload:
        scale = 1.0
        if self.settings.weights == "samples":
            mean = sum(self.plan.samples.values()) / len(self.plan.samples)
            scale = mean / self.plan.samples[silo]
        return self.pack({GLOBAL: self.state.model}, scale=scale)

    def aggregate(self, updates: Sequence[Update]) -> None:
        theta = self.state.model
        alpha = self.settings.alpha
        mean = self.average(updates, equal=True)
        h = self.state.h - alpha * len(silos_of(updates)) / len(self.silos) * (mean - theta)
        self.state.model, self.state.h = mean - h / alpha, h
