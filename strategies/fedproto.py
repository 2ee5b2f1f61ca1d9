"""FedProto: silos share the mean features of their classes, and no model.

Tan et al., AAAI 2022, arXiv 2105.00243. z = φ_i(x) in R^K are the features, the input of the last layer block. Every
silo has a model of its own and trains it on

    CE(h_i(z), y) + λ (1/K) ||z - C̄_y||²                     mean over the batch; no pull for a y that has no C̄_y
    C_i^j    mean of z over the silo's samples of class j     (its prototypes)
    C̄^j <- sum_i n_ij C_i^j / sum_i n_ij                      over the silos that came and have class j

and predicts the class of the nearest prototype, argmin_j ||z - C̄^j||, among its own classes.

Sent: C (K + 1) down and up, a prototype and its share (down: whether there is one) per class; nothing down in round 1.
The shares reveal which classes a silo has. Kept: server C̄; silo its whole model, its own prototypes. An absent silo
keeps its model; a class that no silo of a round has keeps its prototype. Evaluated: the silo's model with the received
prototypes. Before a silo has any prototype it predicts by its head, as always with ``predict = "head"``. A class that
only one silo has is predicted by that silo's own prototype.

||z - c||² = ||z||² - (2 c z - ||c||²): the nearest prototype is the largest output of a last layer with weights 2 c and
biases -||c||², so that model is a plain network, and its probabilities are the softmax of -||z - c||². A class that is
left out has bias -10⁹. Special cases: λ = 0 with ``predict = "head"`` is Local bit for bit.

Paper and code: both public codes weight all silos that have a class equally (``weighting = "uniform"``; the silo then
sends 1 for its share). The official code computes the prototypes' features during training, in the last local epoch
(the default), PFLlib in all epochs; ``features = "trained"`` computes them with the trained model. The paper's
regulariser is a distance of prototypes, the codes' is of each sample's features, as here. PFLlib predicts among all
classes (``classes = "all"``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.features import all_features
from models.training import feature_gradient
from strategies.base.aggregation.bounded import replacement
from strategies.base.client import SiloClient
from strategies.base.info import MethodInfo
from strategies.base.prototypes import (
    PROTOTYPES,
    average,
    check_table,
    class_sums,
    make_table,
    means_of,
    members,
    read_table,
    table_size,
)
from strategies.base.settings import RULES, setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, Payload
from strategies.base.transport.replies import Update
from strategies.base.typed_state import Array, ClientState, ServerState

NEVER = -1e9  # the output of a class that is left out


@dataclass(frozen=True)
class ProtoSettings:
    """Settings of FedProto."""

    lambda_: float = setting(1.0, "weight of the distance to the prototypes", symbol="λ", minimum=0)
    weighting: str = setting(
        "samples", "of the silos in a class's mean, by their samples of it", choices=("samples", "uniform")
    )
    features: str = setting(
        "last-epoch",
        "what prototypes are the mean of: features during training, or of the trained model",
        choices=("last-epoch", "all-epochs", "trained"),
    )
    predict: str = setting("prototypes", "nearest prototype, or the head", choices=("prototypes", "head"))
    classes: str = setting("own", "among which the nearest is searched", choices=("own", "all"))


class ProtoClientState(ClientState):
    model = Array()  # the model (Σ,) that the silo trains
    prototypes = Array(PROTOTYPES)  # its own (C (K + 1),): see strategies/base/prototypes.py


class ProtoServerState(ServerState):
    prototypes = Array(PROTOTYPES)  # C̄ (C (K + 1),); None in round 1


class FedProtoClient(SiloClient):
    state_type = ProtoClientState
    state: ProtoClientState
    settings: ProtoSettings

    def receive(self) -> Tensor:
        classes, features = self.model.layout.classes, self.model.layout.features
        present = members(self.silo.train.y, classes).sum(0) > 0
        self.own_classes = present.float()
        nothing = torch.zeros(classes * (features + 1), device=self.model.device)
        self.received = self.models[PROTOTYPES].vector if PROTOTYPES in self.models else nothing
        self.targets, self.known = read_table(self.received, classes)
        self.sums, self.counts = torch.zeros_like(self.targets), torch.zeros_like(self.known)
        return self.predictor()

    def local_update(self) -> list[Tensor]:
        s = self.settings
        self.model.load(self.weights())
        self.epoch_ended = False
        self.train(until=self.at_the_end_of_an_epoch)
        self.state.model = self.model.vector.clone()
        if s.features == "trained" or not self.common.local_epochs:
            z = all_features(self.model, self.silo.train)
            self.sums, self.counts = class_sums(z, self.silo.train.y, len(self.known))
        means = means_of(self.sums, self.counts)
        shares = self.counts / self.counts.sum()
        table = self.state.prototypes = make_table(means, shares if s.weighting == "samples" else self.own_classes)
        return [table]

    def personal(self) -> Tensor:
        return self.predictor()

    def personalise(self) -> Tensor:
        """Train a newcomer's own model near the prototypes as they were received."""
        self.local_update()
        return self.personal()

    def weights(self) -> Tensor:
        """Return the model that the silo trains (Σ,)."""
        return self.silo.initial("") if self.state.model is None else self.state.model

    def at_the_end_of_an_epoch(self) -> bool:
        self.epoch_ended = True
        return False

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if self.epoch_ended and self.settings.features == "last-epoch":
            self.sums, self.counts = torch.zeros_like(self.sums), torch.zeros_like(self.counts)
        self.epoch_ended = False
        return feature_gradient(self.model, x, y, self.loss_near_prototypes)

    def loss_near_prototypes(self, logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
        sums, counts = class_sums(z.detach(), y, len(self.known))
        self.sums, self.counts = self.sums + sums, self.counts + counts
        loss = self.loss(logits, y)
        if not self.settings.lambda_ or PROTOTYPES not in self.models:
            return loss
        pull = (z - self.targets[y]).square() * self.known[y][:, None]
        return loss + self.settings.lambda_ * pull.mean()

    def predictor(self) -> Tensor:
        """Return the silo's model with a last layer that finds the nearest prototype."""
        vector, classes = self.weights(), len(self.known)
        table = self.state.prototypes
        own, own_marks = read_table(0 * self.received if table is None else table, classes)
        centres = torch.where(self.known[:, None] > 0, self.targets, own)
        chosen = (self.known + own_marks) > 0
        if self.settings.classes == "own":
            chosen &= self.own_classes > 0
        if self.settings.predict == "head" or not bool(chosen.any()):
            return vector
        weight, bias = self.model.layout.linear_head()
        vector = vector.clone()
        vector[weight.start : weight.stop] = (2 * centres * chosen[:, None]).flatten()
        vector[bias.start : bias.stop] = torch.where(chosen, -centres.square().sum(1), NEVER)
        return vector


class FedProto(PersonalizedStrategy):
    info = MethodInfo(
        name="fedproto",
        title="Prototypes of classes instead of models",
        paper="Tan et al., AAAI 2022, arXiv 2105.00243",
        spelling="FedProto",
        sends=("C (K + 1)", "C (K + 1)"),
        uploads=(PROTOTYPES,),
        not_dp="what is sent are means of features without noise",
        whole=False,
        per_class=True,
        own_model="kept",
        reports="received",
        newcomer="own",
        late="starts",
        needs_classes=True,
        robust=RULES,
        not_lossy="what is sent are prototypes, no steps",
        buffers="local",
    )
    client = FedProtoClient
    state_type = ProtoServerState
    state: ProtoServerState
    Settings = ProtoSettings
    settings: ProtoSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        table_size(self.layout)  # refuses a network without a linear head before anything is trained

    def upload_size(self, name: str, silo: str = "") -> int:
        return table_size(self.layout) if name == PROTOTYPES else super().upload_size(name, silo)

    def payload(self, silo: str) -> Payload:
        table = self.state.prototypes
        return Payload() if table is None else Payload({PROTOTYPES: Model(table, round=self.round - 1)})

    def check(self, update: Update) -> None:
        check_table(update.vector, self.layout.classes)

    def aggregate(self, updates: Sequence[Update]) -> None:
        by_samples = self.settings.weighting == "samples"
        weights = [float(u.samples) if by_samples else 1.0 for u in updates]
        tables = [u.vector for u in updates]
        before = self.state.prototypes
        self.state.prototypes = average(tables, weights, self.layout.classes, before, replacement(self.common))
