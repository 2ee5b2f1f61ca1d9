"""SCAFFOLD: control variates remove the client drift from each local step.

Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1. min_x (1/N) sum_i f_i(x), with equal weights.
In the silo, from y = x, for each mini-batch, with c and c_i from the beginning of the round:

    y    <- y - η (g_i(y) + c - c_i)
    c_i⁺  = ∇f_i(x) over all training samples                                                        (option I)
    c_i⁺  = c_i - c + (x - y) / (K η) after K steps                                                   (option II)
    server   x <- x + (η_g / |S|) sum_{i in S} (y_i - x),   c <- c + (1/N) sum_{i in S} (c_i⁺ - c_i)

Option II, the default as in the paper's experiments, is the mean of the K gradients g_i(y), and is computed as such.
With momentum or Adam, which the paper does not use, the quotient would not be a gradient. Weight decay is part of g.

Sent: 2 Σ down (x, c), 2 Σ up (y_i, c_i⁺ - c_i). Option II's difference is (x - y_i) / (K η) - c, which the server can
compute by itself: ``up = "model"`` sends Σ and the number K, the same up to rounding, for plain SGD only. Kept: server
x, c; silo c_i, which starts at 0 and is committed once the server has counted it.
Invariant with all present: c = mean of the c_i. An absent silo keeps its c_i, and c still has its share of it; both
sums are over the received replies. A late joiner's c_i is 0, and c is multiplied by N / (N + 1): still their mean.
Option I costs one more pass over the data.

Special cases: round 1 is FedAvg with equal weights (c = c_i = 0). One full-batch step a round: c is the mean gradient,
and the silos' mean moves along it. Codes differ: PFLlib divides by the silos drawn, not received; Flower's baseline
starts c_i at the received parameters, by mistake; FedDyn's authors weight c by n_i, which the paper does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import LOCAL_SUMS, ONE_MODEL, OWN_RATE, NoisedEpochs, Sums
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Array, ClientState, RequiredArray, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.trainer.loop import full_gradient
from strategies.base.transport.kinds import CONTROL, MODEL, STEPS
from strategies.base.transport.payload import Payload, Update, silos_of


@dataclass(frozen=True)
class ScaffoldSettings:
    """Settings of SCAFFOLD."""

    option: str = setting(
        "II",
        "new control variate: the gradient at the received model, or the steps' mean",
        choices=("I", "II"),
    )
    server_learning_rate: float = setting(1.0, "the server's step", symbol="η_g", above=0)
    up: str = setting(
        "both",
        "what a silo sends: model and control variate, or the model",
        choices=("both", "model"),
    )

    @property
    def uploads(self) -> tuple[str, ...]:
        return ("model", "control") if self.up == "both" else ("model",)


class ScaffoldClientState(ClientState):
    control = Array()  # c_i (Σ,); None before the silo's first counted round: 0


class ScaffoldServerState(ServerState):
    control = RequiredArray()  # c (Σ,)


class ScaffoldClient(SiloClient):
    state_type = ScaffoldClientState
    state: ScaffoldClientState
    settings: ScaffoldSettings

    def noised_passes(self) -> tuple[int, ...]:
        return (*super().noised_passes(), *([1] if self.settings.option == "I" else []))

    def local_update(self) -> list[Tensor]:
        decay = self.common.l2
        total = torch.zeros_like(self.model.vector)
        steps = 0
        control = total.clone() if self.state.control is None else self.state.control
        drift = self.models["control"].vector - control
        at_received = None
        if self.settings.option == "I":
            at_received = full_gradient(self, "control").add_(self.model.vector, alpha=decay)

        def correct(y: Tensor, g: Tensor) -> None:
            nonlocal steps
            total.add_(g).add_(y, alpha=decay)
            steps += 1
            g.add_(drift)

        self.train(correction=correct)
        new = at_received if at_received is not None else total / steps if steps else control
        self.propose_step("control", control=(control, new))
        if self.settings.up == "model":
            self.replies["steps"] = steps
            return [self.model.vector.clone()]
        return [self.model.vector.clone(), new - control]


class Scaffold(PersonalizedStrategy):
    info = ONE_MODEL(
        name="scaffold",
        title="Stochastic controlled averaging",
        paper="Karimireddy et al., ICML 2020, arXiv 1910.06378",
        spelling="SCAFFOLD",
        sends=("2 Σ", "2 Σ"),
        uploads={"model": MODEL, "control": CONTROL},
        sums=Sums(
            "silos",
            at={"up": ("both",)},
            otherwise="the server computes each silo's control variate from its model",
        ),
        dp_epochs=(NoisedEpochs(), NoisedEpochs(1, where="scaffold.option", equals="I")),
        sends_numbers={"steps": STEPS},
        late="grows",
        lossy=LOCAL_SUMS,
        block_rates=OWN_RATE,
    )
    client = ScaffoldClient
    Settings = ScaffoldSettings
    search = (("server-learning-rate", 0.1, 1.5),)
    state_type = ScaffoldServerState
    state: ScaffoldServerState
    settings: ScaffoldSettings

    def check_fit(self) -> None:
        c = self.common
        plain = (c.optimizer, c.momentum, c.warmup_batches, c.wire_dtype) == (
            "sgd",
            0,
            0,
            "float32",
        ) and not c.ala
        if self.settings.up == "model" and (not plain or self.settings.option == "I"):
            raise UserError(
                "scaffold.up = model: the server can tell the control variates of plain SGD only: it needs "
                "optimizer = sgd, momentum = 0, warmup-batches = 0, wire-dtype = float32, ala = false and "
                "scaffold.option = II"
            )

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        self.state.control = torch.zeros_like(self.state.model)

    def welcome(self, silo: str, *, trains: bool) -> None:
        if not trains:
            return
        n = len(self.silos)
        self.state.control = self.state.control * ((n - 1) / n)

    def payload(self, silo: str) -> Payload:
        return self.pack({GLOBAL: self.state.model, "control": self.state.control})

    def check(self, update: Update) -> None:
        if self.settings.up == "model":
            self.number(update, "steps")

    def aggregate(self, updates: Sequence[Update]) -> None:
        changes = [
            u.vectors["control"] if "control" in u.vectors else self.change(u) for u in updates
        ]
        self.step_towards(self.average(updates, equal=True), self.settings.server_learning_rate)
        share = len(silos_of(updates)) / len(self.silos)
        self.state.control = self.state.control + share * self.mean(changes)

    def change(self, update: Update) -> Tensor:
        """Return c_i⁺ - c_i of a silo that sent only its model and K."""
        x = self.state.model
        c = self.state.control
        steps = self.number(update, "steps")
        rate = self.common.decay(self.common.learning_rate, self.round)
        return (x - update.vector) / (steps * rate) - c if steps else torch.zeros_like(c)
