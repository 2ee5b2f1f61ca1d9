"""IFCA: several models; each silo trains the one that fits its data best.

Ghosh, Chung, Yin and Ramchandran, NeurIPS 2020, arXiv 2006.04088, with averaged models. In each round

    silo     j_i = argmin_j f_i(θ_j), on its training data, in evaluation mode (of equal ones the first);
             trains from θ_{j_i}, and sends its model and j_i
    server   θ_j <- sum_{i: j_i = j} n_i w_i / sum_{i: j_i = j} n_i

Sent: k Σ down; Σ and j_i up. Kept: server the k models; silo nothing. An absent silo has no part in its model, and
chooses when it evaluates, as a newcomer does. A model that no silo chose stays. So does one that a single silo chose,
with k > 1: it would show that silo's own model to all (``least``); the paper does not ask for two. The server learns
which silos resemble each other. BatchNorm statistics are the mean over all silos, unless ``buffers = "local"``.

Evaluated: θ_{j_i}. Special cases: k = 1 is FedAvg bit for bit. With equal initial models all silos choose the first for
ever, so the initial models differ: the first is FedAvg's.

Paper and code: the official code averages without weights on MNIST and CIFAR-10 (``average = "silos"``), with them on
FEMNIST. It draws initial models anew until each is chosen by a share of the silos; here they are those of the seed.
Its MNIST code chooses by test loss. Not here: the form that averages gradients (the divisor is all participants,
(unverified)), and a common body with a head per cluster (details (unverified)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.training import by_batch
from strategies.base.client import SiloClient
from strategies.base.info import EACH_MODEL, METHOD, No
from strategies.base.settings import Averaging, setting
from strategies.base.state import GLOBAL
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import Measured
from strategies.base.transport.payload import Payload, Update


@dataclass(frozen=True)
class IfcaSettings(Averaging):
    """Settings of IFCA."""

    clusters: int = setting(2, "number of models", symbol="k", minimum=1, maximum=64)
    least: int = setting(
        2, "with several models, fewest silos that one is averaged of", minimum=2
    )


def cluster_names(count: int) -> list[str]:
    return [GLOBAL, *(f"cluster-{j}" for j in range(1, count))]


class IFCAClient(SiloClient):
    settings: IfcaSettings

    def receive(self) -> Tensor:
        return self.choose_model(
            self.models[name].vector for name in cluster_names(self.settings.clusters)
        )

    def first_model(self) -> Tensor:
        names = cluster_names(self.settings.clusters)
        return self.choose_model(self.silo.initial("" if n == GLOBAL else n) for n in names)

    def choose_model(self, models: Iterable[Tensor]) -> Tensor:
        """Return the model with the lowest training loss, and note its number."""
        held = list(models)
        self.cluster = 0
        if len(held) > 1:
            losses = torch.stack([self.training_loss(vector) for vector in held])
            of_each = losses.nan_to_num(torch.inf).tolist()
            self.cluster = of_each.index(min(of_each))
        return held[self.cluster]

    def local_update(self) -> list[Tensor]:
        self.replies["cluster"] = self.cluster
        return super().local_update()

    def training_loss(self, vector: Tensor) -> Tensor:
        """Return the sum of the batches' losses, by their samples."""
        self.model.load(vector)
        parts = by_batch(
            self.model, self.silo.train, 512, lambda outputs, y: self.loss(outputs, y) * len(y)
        )
        return torch.stack(parts).sum()


class IFCA(PersonalizedStrategy):
    info = METHOD(
        name="ifca",
        title="Iterative clustering: a model for each group of silos",
        paper="Ghosh et al., NeurIPS 2020, arXiv 2006.04088",
        spelling="IFCA",
        sends=("k Σ", "Σ"),
        sends_numbers={"cluster": Measured("which of the models it trains", integer=True)},
        step=3.0,  # to another group's model
        reports="received",
        newcomer="model",
        trainer=True,
        late="starts",
        lossy=EACH_MODEL,
        buffers="shared",
        sums=No("each model is averaged over the silos that chose it, down to two"),
        dp=No("which model it trains depends on its records without noise"),
        block_rates=True,
    )
    client = IFCAClient
    Settings = IfcaSettings
    settings: IfcaSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        for name in cluster_names(self.settings.clusters)[1:]:
            self.state.arrays[name] = initial(name)

    def payload(self, silo: str) -> Payload:
        names = cluster_names(self.settings.clusters)
        return self.pack({name: self.state.arrays[name] for name in names})

    def check(self, update: Update) -> None:
        self.number(update, "cluster", self.settings.clusters - 1)

    def centre(self, name: str, update: Update) -> Tensor | None:
        if name != "model":
            return super().centre(name, update)
        chosen = cluster_names(self.settings.clusters)[self.number(update, "cluster")]
        return self.sent[update.silo][chosen].vector

    def aggregate(self, updates: Sequence[Update]) -> None:
        names = cluster_names(self.settings.clusters)
        least = self.settings.least if len(names) > 1 else 1
        for j, name in enumerate(names):
            chosen = [u for u in updates if u.numbers["cluster"] == j]
            if len(chosen) >= least:
                self.state.arrays[name] = self.average(chosen)
