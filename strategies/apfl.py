"""APFL: each silo learns how much of a private model to mix into the global one.

Deng et al. 2020, arXiv 2003.13461. The silo keeps a private v_i in addition to its copy w_i of the global model. The
mixed model is v̄ = α v + (1 - α) w. Per mini-batch:

    w_i <- w_i - η ∇f_i(w_i)
    v_i <- v_i - η α ∇f_i(v̄)                                     (∇_v f_i(v̄) = α ∇f_i(v̄))
    α_i <- clip(α_i - η <v_i - w_i, ∇f_i(v̄)>, 0, 1)              at the first step of a round, at every one, or never

Server: the sample-weighted mean of the w_i. Sent: Σ down, Σ up. Kept: server w; silo v_i, α_i. v_i starts from the
common initial model; an absent silo keeps both. Personal: v̄. Without dropout, w is the same as in FedAvg. Special
cases: α = 0 fixed makes v̄ FedAvg's locally trained model; α = 1 fixed makes it Local's.

``mix = "logits"`` mixes the outputs of the two networks, as other implementations do; for a linear model this is the
same. The silo then keeps w_i too, and the personal model cannot be stored as one network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.optimizers import Optimizer
from models.privacy.records import quietly
from models.training import MeanLoss, Network, loss_gradient
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, OWN_RATE
from strategies.base.privacy import private_gradients
from strategies.base.settings import setting
from strategies.base.state import Array, ClientState, Item
from strategies.base.strategy import PersonalizedStrategy

TWO_NETWORKS = "it is two networks with apfl.mix = logits"


@dataclass(frozen=True)
class ApflSettings:
    """Settings of APFL."""

    alpha: float = setting(
        0.5, "share of the private model at the start", symbol="α", minimum=0, maximum=1
    )
    adapt: str = setting("round", "when α is learned", choices=("round", "batch", "never"))
    mix: str = setting("parameters", "what is mixed", choices=("parameters", "logits"))


class ApflClientState(ClientState):
    private = Array()  # v_i (Σ,)
    alpha = Item[float | None](lambda: None)
    shared = Array()  # w_i (Σ,), with mix = "logits"
    shared_buffers = Array("shared.buffers")


class ApflClient(SiloClient):
    state_type = ApflClientState
    state: ApflClientState
    settings: ApflSettings
    needed_to_predict = ("shared", "shared.buffers", "alpha")
    frozen = False  # whether w is not trained

    @property
    def no_file(self) -> str:  # type: ignore[override]
        return TWO_NETWORKS if self.settings.mix == "logits" else ""

    @property
    def needs_one_answer(self) -> bool:
        return self.settings.mix == "logits"

    def local_update(self) -> list[Tensor]:
        model, state = self.model, self.state
        w = model.vector.clone()
        v = (self.first() if state.private is None else state.private).clone()
        alpha = float(self.settings.alpha if state.alpha is None else state.alpha)
        # Running statistics (empty without BatchNorm): w's are sent, those of the mixed model stay in the silo.
        w_buffers = model.buffers.clone()
        v_buffers = w_buffers if state.personal_buffers is None else state.personal_buffers
        v_step, losses = self.optimizer("private"), MeanLoss()

        def step_of_v(now: Tensor, g: Tensor) -> None:
            nonlocal alpha, w_buffers, v_buffers
            if self.batch is None:
                raise UserError(
                    "apfl needs the batch of each step: give task.network the tensors of task.loader"
                )
            w.copy_(now)
            gradient = g.clone()
            w_buffers = w_buffers if self.frozen else model.buffers.clone()
            if len(self.batch[1]):  # a Poisson sample may be empty
                mixed = v, w, alpha, v_buffers
                alpha = quietly(
                    self.privacy, alpha, self.own_step, mixed, self.batch, v_step, losses
                )
                v_buffers = model.buffers.clone()
            model.load(w, w_buffers)
            g.copy_(gradient)

        def keep_w() -> None:
            model.load(w)

        self.train(
            correction=step_of_v, after=keep_w if self.frozen else None, optimizer_key="shared"
        )
        w.copy_(model.vector)
        self.keep_optimizer(v_step, "private")
        self.tell_loss(losses)
        state.private, state.alpha = v, alpha
        if self.settings.mix == "logits":  # its personal model is both networks
            state.shared, state.shared_buffers = w, w_buffers
        self._ends = w, v, alpha, v_buffers
        model.load(w, w_buffers)
        return [w]

    def own_step(
        self,
        mixed: tuple[Tensor, Tensor, float, Tensor],
        batch: tuple[Tensor, Tensor],
        optimizer: Optimizer,
        losses: MeanLoss,
    ) -> float:
        """Change v by one step, without noise, as it stays here; return the next α. ``mixed``: v, w, α, v's buffers."""
        v, w, alpha, _ = mixed
        with private_gradients(self.privacy, False):
            losses.add(self.mixed_gradient(*mixed, *batch))
        share = alpha
        if self.settings.adapt == "batch" or (
            self.settings.adapt == "round" and losses.steps == 1
        ):
            alpha -= self.learning_rate() * self.alpha_gradient(v, w, batch[1], alpha)
            alpha = min(max(alpha, 0.0), 1.0)
        optimizer.step(v, self.model.gradient.mul_(share))
        return alpha

    def mixed_gradient(
        self, v: Tensor, w: Tensor, alpha: float, buffers: Tensor, x: Tensor, y: Tensor
    ) -> Tensor:
        """Write ∇f_i at v̄ to the gradient (for logits: of f_i with respect to the mixed model's v, over α)."""
        model = self.model
        if self.settings.mix == "parameters":
            model.load(torch.lerp(w, v, alpha), buffers)
            return self.gradient(x, y)
        with torch.no_grad():  # the model still holds w
            fixed: Tensor = model.module(x)
        model.load(v, buffers)
        parts: list[Tensor] = []

        def mix_logits(x: Tensor) -> Tensor:
            """Return the mixed logits; their gradient with respect to v has a factor α, which local_update applies."""
            logits: Tensor = model.module(x)
            done = sum(map(len, parts)) % len(fixed)  # a batch may come in parts, and again
            parts.append(logits.detach())
            other = fixed[done : done + len(logits)]
            return logits + (alpha - 1) * logits.detach() + (1 - alpha) * other

        loss = loss_gradient(model, x, y, self.loss, mix_logits)  # type: ignore[arg-type]
        self._logits = torch.cat(parts)[-len(fixed) :], fixed
        return loss

    def alpha_gradient(self, v: Tensor, w: Tensor, y: Tensor, alpha: float) -> float:
        """Return ∂f_i/∂α: <v - w, ∇f_i(v̄)>, or for logits the same through the outputs."""
        if self.settings.mix == "parameters":
            return float((v - w) @ self.model.gradient)
        private, fixed = self._logits
        mixed = torch.lerp(fixed, private, alpha).requires_grad_()
        (grad,) = torch.autograd.grad(self.loss(mixed, y), mixed)
        return float((grad * (private - fixed)).sum())

    def personal(self) -> Tensor:
        w, v, alpha, buffers = self._ends
        mixed = v if self.settings.mix == "logits" else torch.lerp(w, v, alpha)
        self.model.load(mixed, buffers)
        return mixed

    def personalise(self) -> Tensor:
        """Train v, which starts at w, and α; w is fixed."""
        self.state.private, self.frozen = self.received, True
        self.local_update()
        return self.personal()

    def predicting(self) -> Network:
        return self.model if self.state.shared is None else Mixture(self)


class Mixture(nn.Module):
    """Network with the outputs α v(x) + (1 - α) w(x); the silo's model holds v and its running statistics."""

    def __init__(self, client: ApflClient) -> None:
        super().__init__()
        self.network, self.vector = client.model.module, client.model.vector
        self.model, self.state = client.model, client.state
        self.own = self.vector.clone(), self.model.buffers.clone()

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert self.state.shared is not None and self.state.alpha is not None
        self.model.load(self.state.shared, self.state.shared_buffers)
        shared = self.network(x)
        self.model.load(*self.own)
        return torch.lerp(shared, self.network(x), self.state.alpha)


class APFL(PersonalizedStrategy):
    info = OWN_COPY(
        name="apfl",
        title="Adaptive mixture of a private and the global model",
        paper="Deng et al. 2020, arXiv 2003.13461",
        spelling="APFL",
        own_model="kept",
        block_rates=OWN_RATE,
    )
    client = ApflClient
    Settings = ApflSettings
