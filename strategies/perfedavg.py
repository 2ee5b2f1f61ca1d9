"""Per-FedAvg: a start from which one local gradient step does well (MAML), first-order and Hessian-free.

Fallah et al., NeurIPS 2020, arXiv 2002.07948. min (1/N) sum_i f_i(w - a ∇f_i(w)). Per local step, with independent
batches D, D', D'':

    w~ = w - a g(w; D)
    FO   w <- w - b g(w~; D')
    HF   w <- w - b [ g' - a (g(w + δ g'; D'') - g(w - δ g'; D'')) / (2 δ) ],   g' = g(w~; D')

b is the run's learning-rate; local-epochs count passes of D' over the silo's data. Server: the unweighted mean (the
paper's objective; ``weighting = "samples"`` weighs by n_i). Personal: the received model after one step with a on one
batch. Sent: Σ down, Σ up. Kept: server w; silo nothing. An absent silo is left out of the mean.
Special cases: a = 0 makes both FedAvg with learning rate b (plain SGD), because D' comes in FedAvg's order; on a
quadratic loss HF is exact for any δ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from models.training import MeanLoss
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, OWN_RATE, OWN_STEPS, NoisedEpochs, Sums
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class PerFedAvgSettings:
    """Settings of Per-FedAvg."""

    step: float = setting(
        0.01, "step of the adaptation", symbol="a", minimum=0, kind="learning-rate"
    )
    variant: str = setting("fo", "first-order, or Hessian-free", choices=("fo", "hf"))
    delta: float = setting(0.001, "width of the finite difference", symbol="δ", above=0)
    weighting: str = setting("uniform", "of the server's mean", choices=("uniform", "samples"))


class PerFedAvgClient(SiloClient):
    settings: PerFedAvgSettings

    def noised_passes(self) -> tuple[int, ...]:
        s = self.settings
        epochs = self.common.local_epochs
        if s.variant == "hf" and s.step:
            raise UserError(
                "dp = true: per-fedavg.variant = hf divides noise by a small number: take fo"
            )
        return (epochs, epochs) if s.step else (epochs,)

    def local_update(self) -> list[Tensor]:
        s = self.settings
        model = self.model
        optimizer = self.optimizer()
        w = model.vector.clone()
        support = self.endless("support")
        hessian = self.endless("hessian")
        losses = MeanLoss()
        for x, y in self.batches():
            model.load(w)
            if s.step:
                self.gradient(*next(support))
                model.vector.sub_(model.gradient, alpha=s.step)
            losses.add(self.gradient(x, y))
            grad = model.gradient.clone()
            if s.variant == "hf" and s.step:
                grad -= s.step * self.hessian_product(w, grad, *next(hessian))
            optimizer.step(w, grad)
        self.tell_loss(losses)
        self.keep_optimizer(optimizer)
        return [w]

    def endless(self, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, in an order of their own."""
        return self.batches(1_000_000_000, purpose)

    def hessian_product(self, w: Tensor, direction: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return ∇²f(w) times ``direction`` by central differences, of gradients that are not shortened."""
        delta, passes = self.settings.delta, self.model.passes
        self.model.passes = replace(passes, clip=0.0)
        self.model.load(w + delta * direction)
        self.gradient(x, y)
        ahead = self.model.gradient.clone()
        self.model.load(w - delta * direction)
        self.gradient(x, y)
        self.model.passes = passes
        return (ahead - self.model.gradient) / (2 * delta)

    def personal(self) -> Tensor:
        self.model.load(self.received, self.received_buffers)
        if self.settings.step and self.common.local_epochs:
            self.gradient(*next(self.endless("adaptation")))
            self.model.vector.sub_(self.model.gradient, alpha=self.settings.step)
        return self.model.vector

    def personalise(self) -> Tensor:
        """Train with step size a over all batches, in place of one step on one batch."""
        for x, y in self.batches():
            self.gradient(x, y)
            self.model.vector.sub_(self.model.gradient, alpha=self.settings.step)
        return self.model.vector


class PerFedAvg(PersonalizedStrategy):
    info = OWN_COPY(
        name="per-fedavg",
        title="Model-agnostic meta-learning",
        paper="Fallah et al., NeurIPS 2020, arXiv 2002.07948",
        spelling="Per-FedAvg",
        dp_epochs=(NoisedEpochs(), NoisedEpochs(where="per-fedavg.step")),
        own_model="kept",
        sums=Sums("weighting"),
        note="the own model is one step from what the server sent",
        trainer=OWN_STEPS,
        block_rates=OWN_RATE,
    )
    client = PerFedAvgClient
    Settings = PerFedAvgSettings
    search = (("step", 0.001, 0.1),)
    settings: PerFedAvgSettings

    def aggregate(self, updates: Sequence[Update]) -> None:
        self.state.model = self.average(updates, equal=self.settings.weighting == "uniform")
