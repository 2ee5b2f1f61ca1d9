"""FedProto: silos share the mean features of their classes, and no model.

Tan et al., AAAI 2022, arXiv 2105.00243. z = φ_i(x) in R^K are the features, the input of the last layer block. Every
silo has a model of its own and trains it on

    CE(h_i(z), y) + λ (1/K) ||z - C̄_y||²                     mean over the batch; no pull for a y that has no C̄_y
    C_i^j    mean of z over the silo's samples of class j     (its prototypes)
    C̄^j <- sum_i n_ij C_i^j / sum_i n_ij                      over the silos that came and have class j

and predicts the class of the nearest prototype, argmin_j ||z - C̄^j||, among its own classes.

With secure sums a silo sends n_ij C_i^j / n_i and n_ij / n_i (or C_i^j and 1), and the server divides the sums. It
could not tell a class of few silos before it has opened their sum. A count of silos per class would show, where one is
gone, whether that one has the class. So each silo must have all classes, and checks that itself: else it sends nothing.

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

Class prototypes: the mean features of each class, which silos send and the server averages.

A table (C, K + 1), sent as one vector, has a row per class: the K numbers of its prototype, and one more. In a silo's
table that is the class's share of the silo's samples (or just 1), in the server's it is 1; 0 marks a class without a
prototype, whose numbers are 0 too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.features import all_features, class_sums, means_of, members
from models.layout import Layout
from models.training import feature_gradient
from partitions.common.errors import DataError, UserError
from strategies.base.aggregation.bounded import replacement
from strategies.base.client import SiloClient
from strategies.base.info import OWN_PARTS, No, Sums
from strategies.base.settings import setting
from strategies.base.state import Array, ClientState, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import CLASS_MEANS, class_shares
from strategies.base.transport.payload import Payload, Update

PROTOTYPES = "prototypes"


def table_size(layout: Layout) -> int:
    """Return C (K + 1)."""
    return layout.classes * (layout.features + 1)


def make_table(prototypes: Tensor, marks: Tensor) -> Tensor:
    return torch.cat([prototypes * (marks > 0)[:, None], marks[:, None]], 1).flatten()


def read_table(table: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return prototypes (C, K) and marks (C,)."""
    rows = table.view(classes, -1)
    return rows[:, :-1], rows[:, -1]


def check_table_fits(strategy: PersonalizedStrategy) -> None:
    """Raise UserError for a network without a linear head."""
    table_size(strategy.layout)


def check_table(table: Tensor, classes: int) -> None:
    """Raise DataError if a silo's marks are not shares."""
    marks = read_table(table, classes)[1]
    if bool(((marks < 0) | (marks > 1)).any()):
        raise DataError("the shares of its classes are not between 0 and 1")


def check_all_classes(client: SiloClient, shares: Tensor) -> None:
    """Raise UserError for a silo in a secure sum that has no share of some class."""
    if not bool((shares > 0).all()):
        raise UserError(
            f"{client.silo.name}: {client.info.name} with secure-aggregation = true needs training samples of every "
            "class at each silo, of min-cell patients or more, so that no class's sum is of few silos; here are not all"
        )


def average(
    tables: Sequence[Tensor],
    weights: Sequence[float],
    classes: int,
    before: Tensor | None,
    rule: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """Return the server's table: per class the mean over the silos that have it, weighted by mark times weight.

    ``rule`` may replace that mean. A class that no silo has keeps its prototype of ``before``.
    """
    total = 0.0 * read_table(tables[0], classes)[0]
    mass = 0.0 * read_table(tables[0], classes)[1]
    for table, weight in zip(tables, weights, strict=True):
        prototypes, marks = read_table(table, classes)
        total += prototypes * (marks * weight)[:, None]
        mass += marks * weight
    known = mass > 0
    prototypes = total / torch.where(known, mass, 1.0)[:, None]
    for k in range(classes) if rule is not None else ():
        held = [
            rows[k]
            for rows, marks in (read_table(table, classes) for table in tables)
            if marks[k] > 0
        ]
        if rule is not None and held:
            prototypes[k] = rule(held)
    mean = make_table(prototypes, known.float())
    if before is None:
        return mean
    return torch.where(
        known[:, None], mean.view(classes, -1), before.view(classes, -1)
    ).flatten()


def divide_table(table: Tensor, classes: int) -> Tensor:
    """Return the server's table from a mean of prototypes times marks, and of marks (secure sums)."""
    products, marks = read_table(table, classes)
    return make_table(products / marks.clamp(min=LEAST)[:, None], (marks >= LEAST).float())


# A class's least part of a secure sum; below it is the sum's error
LEAST = 1e-6
NEVER = -1e9  # the output of a class that is left out


@dataclass(frozen=True)
class ProtoSettings:
    """Settings of FedProto."""

    lambda_: float = setting(
        1.0, "weight of the distance to the prototypes", symbol="λ", minimum=0
    )
    weighting: str = setting(
        "samples",
        "of the silos in a class's mean, by their samples of it",
        choices=("samples", "uniform"),
    )
    features: str = setting(
        "last-epoch",
        "what prototypes are the mean of: features during training, or of the trained model",
        choices=("last-epoch", "all-epochs", "trained"),
    )
    predict: str = setting(
        "prototypes", "nearest prototype, or the head", choices=("prototypes", "head")
    )
    classes: str = setting("own", "among which the nearest is searched", choices=("own", "all"))


class ProtoClientState(ClientState):
    model = Array()  # the model (Σ,) that the silo trains
    prototypes = Array(PROTOTYPES)  # its own (C (K + 1),): see strategies/fedproto.py


class ProtoServerState(ServerState):
    prototypes = Array(PROTOTYPES)  # C̄ (C (K + 1),); None in round 1


class FedProtoClient(SiloClient):
    state_type = ProtoClientState
    state: ProtoClientState
    settings: ProtoSettings

    def receive(self) -> Tensor:
        classes, features = self.layout.classes, self.layout.features
        self.own_classes = (members(self.silo.train.y, classes).sum(0) > 0).float()
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
        self.state.prototypes = make_table(means, self.counts / self.counts.sum())
        shares = class_shares(self.silo, self.counts)
        marks = shares if s.weighting == "samples" else (shares > 0).float()
        if not self.common.secure_aggregation:
            return [make_table(means, marks)]
        check_all_classes(self, shares)
        return [make_table(means * marks[:, None], marks)]

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
        own_prototypes, own_marks = read_table(
            0 * self.received if table is None else table, classes
        )
        centres = torch.where(self.known[:, None] > 0, self.targets, own_prototypes)
        chosen = (self.known + own_marks) > 0
        if self.settings.classes == "own":
            chosen &= self.own_classes > 0
        if self.settings.predict == "head" or not bool(chosen.any()):
            return vector
        weight, bias = self.layout.linear_head()
        vector = vector.clone()
        vector[weight.start : weight.stop] = (2 * centres * chosen[:, None]).flatten()
        vector[bias.start : bias.stop] = torch.where(chosen, -centres.square().sum(1), NEVER)
        return vector


class FedProto(PersonalizedStrategy):
    info = OWN_PARTS(
        name="fedproto",
        title="Prototypes of classes instead of models",
        paper="Tan et al., AAAI 2022, arXiv 2105.00243",
        spelling="FedProto",
        sends=("C (K + 1)", "C (K + 1)"),
        uploads={PROTOTYPES: CLASS_MEANS},
        dp=No("what is sent are means of features without noise"),
        own_model="kept",
        newcomer="own",
        needs_classes=True,
        lossy=No("what is sent are prototypes, no steps"),
        sums=Sums("weighting"),
        buffers="local",
    )
    client = FedProtoClient
    state_type = ProtoServerState
    state: ProtoServerState
    Settings = ProtoSettings
    search = (("lambda", 0.1, 10.0),)
    settings: ProtoSettings

    check_fit = check_table_fits

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        """Begin without prototypes."""

    def sizes(self, silo: str) -> dict[str, int]:
        return {PROTOTYPES: table_size(self.layout)}

    def payload(self, silo: str) -> Payload:
        table = self.state.prototypes
        return self.pack({} if table is None else {PROTOTYPES: table})

    def check(self, update: Update) -> None:
        if not self.common.secure_aggregation:
            check_table(update.vector, self.layout.classes)

    def aggregate(self, updates: Sequence[Update]) -> None:
        if self.common.secure_aggregation:
            self.state.prototypes = divide_table(updates[0].vector, self.layout.classes)
            return
        by_samples = self.settings.weighting == "samples"
        weights = [float(u.samples) if by_samples else 1.0 for u in updates]
        tables = [u.vector for u in updates]
        before = self.state.prototypes
        self.state.prototypes = average(
            tables, weights, self.layout.classes, before, replacement(self.common)
        )
