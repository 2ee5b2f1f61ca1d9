"""FedXgbBagging: boosted trees of all silos in one ensemble.

Flower's FedXgbBagging (no paper of its own); Chen and Guestrin, KDD 2016, arXiv 1603.02754 for the trees. In each round

    silo     boosts ``local-epochs`` trees for each output on the received ensemble F, with its own samples: t_i
    server   F <- F + sum_i a_i t_i: all silos' trees are appended, a_i = n_i / n

Flower has a_i = 1 (``average = "sum"``): the ensemble's step is then the sum of the silos' steps, and N silos that are
alike have N times the learning rate. A boosted random forest divides by the number of trees, which is a_i = 1 / N
(``average = "silos"``).

Sent: Σ down, the silo's new trees up: columns, thresholds and leaves. A leaf is a sum over the samples that reach it,
at least as many as a batch must have. Its threshold is rounded. More: models/networks/boosting.py.
Kept: server F; silo nothing. An absent silo adds no trees.

Evaluated: F as *received*; *personal* is F, the trees that the silo sent, and ``epochs`` more of its own, which
never leave. A newcomer boosts trees of its own on F. Special cases: one silo is XGBoost bit for bit, with the
parameters in that file, and Local with ``model = trees``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models.networks.boosting import MOST_DELTA
from models.networks.trees import check_nodes, count_used, nodes_of, split
from partitions.common.adding import added
from strategies.base.client import SiloClient
from strategies.base.info import METHOD, No
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.trainer.loop import Boosting
from strategies.base.transport.kinds import TREES
from strategies.base.transport.payload import Update


@dataclass(frozen=True)
class XgbSettings:
    """Settings of FedXgbBagging."""

    average: str = setting(
        "samples",
        "what a silo's trees count: their samples' share, 1 / N, or 1 as in Flower",
        choices=("samples", "silos", "sum"),
    )
    epochs: int = setting(
        5, "trees of the own model beyond those that are sent", minimum=0, kind="epochs"
    )


class FedXgbClient(Boosting, SiloClient):
    settings: XgbSettings

    def local_update(self) -> list[Tensor]:
        nodes = nodes_of(self.layout, self.model.vector)
        start = count_used(nodes)
        self.train()
        return [nodes[start : start + self.common.local_epochs].flatten().clone()]

    def personal(self) -> Tensor:
        self.train(epochs=self.settings.epochs)
        return self.model.vector


class FedXgb(PersonalizedStrategy):
    info = METHOD(
        name="fedxgb",
        title="Boosted trees of all silos in one ensemble",
        paper="Flower's FedXgbBagging; Chen and Guestrin, KDD 2016, arXiv 1603.02754",
        spelling="FedXgbBagging",
        sends=("Σ", "its new trees"),
        uploads={"trees": TREES},
        own_model="kept",
        note="it is what all receive, the trees that it sent, and `fedxgb.epochs` more trees",
        newcomer="copy",
        late="starts",
        listed=True,
        trees="only",
        dp=No("XGBoost's splits and leaves are computed without noise"),
        sums=No("the server appends each silo's trees, and adds nothing up"),
        lossy=No("a tree's columns and thresholds are exact"),
        trainer=No("its trees are XGBoost's"),
        block_rates=No("its ensemble is one block"),
    )
    client = FedXgbClient
    Settings = XgbSettings
    settings: XgbSettings

    def sizes(self, silo: str) -> dict[str, int]:
        tree = self.layout.size // self.layout.parameters[0].shape[0]
        return {"trees": self.common.local_epochs * tree}

    def check(self, update: Update) -> None:
        rate = self.common.decay(self.common.learning_rate, self.round)
        check_nodes(self.layout, update.vector, rate * MOST_DELTA * (1 + 1e-6))

    def weights(self, updates: Sequence[Update]) -> list[float]:
        weights = super().weights(updates)
        total = added(weights)
        return [1.0 if self.settings.average == "sum" else weight / total for weight in weights]

    def aggregate(self, updates: Sequence[Update]) -> None:
        ensemble = self.state.model.clone()
        nodes = nodes_of(self.layout, ensemble)
        place = count_used(nodes)
        for update, weight in zip(updates, self.weights(updates), strict=True):
            trees = nodes[place : place + self.common.local_epochs]
            trees.copy_(nodes_of(self.layout, update.vector))
            split(trees)[2].mul_(weight)
            place += len(trees)
        self.state.model = ensemble
