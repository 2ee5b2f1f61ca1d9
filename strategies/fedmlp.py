"""FedMLP: a hospital labels findings that it lacks by what its samples have in common with those of the others.

Sun et al., MICCAI 2024, arXiv 2406.18995; equations of the authors' code (szbonaldo/FedMLP). z = φ(x) in R^K are the
features, o the outputs, p = σ(o); U are the findings of which no training sample of the silo has a label. p_g is of the
received model, which is frozen and computes in evaluation mode.

    silo     mean of BCE(o, y) over known and added labels + λ mean of (p - p_g)² over U's other entries
             P_c0, P_c1  mean of z over its samples without, and with, finding c; no means of U
             d_c         of c in U: the share of its samples with p_c < L or p_c > U       (by the trained model, as P)
    server   w <- the sample-weighted mean of the w_i
             P_cv <- sum_i n_i P_icv / sum_i n_i over the silos that sent it;  d_c likewise over those that lack c
    labels   s_c = cos(z, P_c0) - cos(z, P_c1) by the received model, for c in U and samples that have no label of c;
             of the m samples with s_c >= 0 those of the floor(d_c τ0 m) largest s_c get 0,
             of the m samples with s_c < 0 those of the floor(d_c τ1 m) smallest s_c get 1

P and d are sent from the last round of the warm-up on. From the next round on each silo adds labels before it trains;
an added label stays.

Sent: Σ + 2L (K + 1) down (Σ during the warm-up) and up, L findings: means, marks, and the d_c; zeros during the
warm-up. The marks reveal which findings a silo has; means of fewer patients than the policy's ``min-cell`` are
withheld. Kept: server w, P, d; silo its added labels, until its samples change. An absent silo keeps its labels; a mean
that no silo of a round has stays. Special cases: where all label everything, and for other tasks than findings, the
model is FedAvg's, bit for bit; also with λ = τ0 = τ1 = 0.

The paper's text was not reachable, so these are (unverified): its figure has the teacher in the second stage, its code
in the first, and here it is in both; d_c is 1 in the code's run (``adapt = false``). The code averages the loss of the
warm-up over two augmentations of a picture; here it is of one. Weights of rare findings are commented out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models.features import all_features, class_sums, means_of
from models.training import taught_gradient
from partitions.common.errors import DataError
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OWN_LOSS, No
from strategies.base.settings import Common, setting
from strategies.base.state import GLOBAL, Array, ClientState, Item, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import FINDING_MEANS, MODEL, Measured, class_shares
from strategies.base.transport.payload import Payload, Update
from strategies.fedproto import (
    PROTOTYPES,
    average,
    check_table,
    check_table_fits,
    make_table,
    read_table,
    table_size,
)

LEARNED = "learned"


@dataclass(frozen=True)
class FedMlpSettings:
    """Settings of FedMLP; defaults of its official runs."""

    lambda_: float = setting(
        1.0, "weight of the received model as teacher", symbol="λ", minimum=0
    )
    warm_up: float = setting(
        0.1, "share of the rounds before labels are added", above=0, maximum=1
    )
    absent: float = setting(
        0.005,
        "share of samples like those without a finding that get 0",
        symbol="τ0",
        minimum=0,
        maximum=1,
    )
    present: float = setting(
        0.01,
        "share of samples like those with a finding that get 1",
        symbol="τ1",
        minimum=0,
        maximum=1,
    )
    adapt: bool = setting(True, "fewer labels of findings that the model is less sure of")
    low: float = setting(
        0.3, "a probability below it is a sure absence", symbol="L", minimum=0, maximum=0.5
    )
    high: float = setting(
        0.7, "a probability above it is a sure finding", symbol="U", minimum=0.5, maximum=1
    )

    def sends_means(self, common: Common, server_round: int) -> bool:
        """Return whether this is the last round of the warm-up, or a later one."""
        return server_round >= int(self.warm_up * common.rounds + 1e-9)


class LabelClientState(ClientState):
    labels = Array()  # that it added (n, L): 0, 1, or -1 for none


class LabelServerState(ServerState):
    # P (2L (K + 1),): rows c0, c1 as in strategies/fedproto.py; None in the warm-up
    prototypes = Array(PROTOTYPES)
    learned = Item[list[float]](list)  # d (L,)


def most_alike(alike: Tensor, index: Tensor, share: float) -> Tensor:
    """Return those of ``index`` (m,) with the floor(share m) largest values of ``alike`` (n,), in their order."""
    count = int(share * len(index) + 1e-9)
    return index[alike[index].argsort(descending=True, stable=True)[:count]]


class FedMLPClient(SiloClient):
    state_type = LabelClientState
    state: LabelClientState
    settings: FedMlpSettings

    def receive(self) -> Tensor:
        self.has_findings = self.silo.task.name == "multilabel"
        if self.has_findings:
            self.lacking = (self.silo.train.y < 0).all(0)
        self.lacks = self.has_findings and bool(self.lacking.any())
        return self.shared_model

    def local_update(self) -> list[Tensor]:
        silo = self.silo
        if self.lacks and PROTOTYPES in self.models:
            self.state.labels = labels = self.more_labels()
            y = silo.train.y
            labelled = silo.train.with_labels(torch.where(labels >= 0, labels.to(y), y))
            self.silo = replace(silo, train=labelled)
        try:
            self.train()
        finally:
            self.silo = silo
        return [self.model.vector.clone(), self.means()]

    @torch.no_grad()
    def means(self) -> Tensor:
        """Return the silo's table (2L (K + 1),) by its trained model, and set its d."""
        model, s = self.model, self.settings
        classes = model.layout.classes
        nothing = torch.zeros(2 * table_size(model.layout), device=model.device)
        if not s.sends_means(self.common, self.round):
            return nothing
        self.replies[LEARNED] = [-1.0] * classes
        if not self.has_findings:
            return nothing
        z = all_features(model, self.silo.train)
        p = torch.sigmoid(model.last_block(z))
        sure = ((p < s.low) | (p > s.high)).double().mean(0)
        self.replies[LEARNED] = torch.where(self.lacking, sure, -1.0).tolist()
        sums, counts = class_sums(z, self.silo.train.y, classes)
        marks = (class_shares(self.silo, counts) > 0).float()
        return make_table(means_of(sums, counts), marks)

    def more_labels(self) -> Tensor:
        """Return the labels that were added (n, L), and those of this round, by the received model."""
        s, y, labels = self.settings, self.silo.train.y, self.state.labels
        if labels is None or labels.shape != y.shape:
            labels = torch.full_like(y, -1, dtype=torch.int8)
        labels, learned = labels.clone(), cast(list[float], self.numbers[LEARNED])
        rows, marks = read_table(self.models[PROTOTYPES].vector, 2 * y.shape[1])
        z = F.normalize(all_features(self.model, self.silo.train), dim=1)
        near = z @ F.normalize(rows, dim=1).T
        more = near[:, 0::2] - near[:, 1::2]
        known = (marks.view(-1, 2) > 0).all(1) & self.lacking
        for c in known.nonzero().flatten().tolist():
            share = min(max(learned[c], 0.0), 1.0) if s.adapt else 1.0
            free, absent, alike = labels[:, c] < 0, more[:, c] >= 0, more[:, c]
            zeros = most_alike(alike, (free & absent).nonzero().flatten(), share * s.absent)
            ones = most_alike(-alike, (free & ~absent).nonzero().flatten(), share * s.present)
            labels[zeros, c], labels[ones, c] = 0, 1
        return labels

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.lacks or not self.settings.lambda_:
            return super().gradient(x, y)
        return taught_gradient(self.model, x, y, self.taught(x), self.taught_loss)

    def taught_loss(self, outputs: Tensor, z: Tensor, taught: Tensor, y: Tensor) -> Tensor:
        rest = (self.lacking & (y < 0)).float()
        apart = (torch.sigmoid(outputs) - torch.sigmoid(taught)).square() * rest
        taught_part = apart.sum() / rest.sum().clamp(min=1)
        return self.loss(outputs, y) + self.settings.lambda_ * taught_part


class FedMLP(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedmlp",
        title="Labels of findings that a hospital lacks, by prototypes of the others",
        paper="Sun et al., MICCAI 2024, arXiv 2406.18995",
        spelling="FedMLP",
        sends=("Σ + 2L (K + 1)", "Σ + 2L (K + 1)"),
        uploads={"model": MODEL, PROTOTYPES: FINDING_MEANS},
        sends_numbers={
            LEARNED: Measured(
                "of how many samples its model is sure, for each finding that it lacks",
                low=-1.0,
                high=1.0,
                several=True,
            )
        },
        keeps=("the labels that it added to its samples",),
        plain_loss=False,
        trainer=OWN_LOSS,
        robust=(),
        dp=No("what is sent are means of features without noise"),
        lossy=No("beside the model, silos send means, no steps"),
        sums=No("the server needs to know which silos have, and which lack, a finding"),
    )
    client = FedMLPClient
    state_type = LabelServerState
    state: LabelServerState
    Settings = FedMlpSettings
    settings: FedMlpSettings

    check_fit = check_table_fits

    def sizes(self, silo: str) -> dict[str, int]:
        return {PROTOTYPES: 2 * table_size(self.layout)}

    def payload(self, silo: str) -> Payload:
        state = self.state
        if state.prototypes is None:
            return super().payload(silo)
        models = {GLOBAL: state.model, PROTOTYPES: state.prototypes}
        return self.pack(models, **{LEARNED: state.learned})

    def check(self, update: Update) -> None:
        check_table(update.vectors[PROTOTYPES], 2 * self.layout.classes)
        if self.settings.sends_means(self.common, self.round):
            learned = self.number(update, LEARNED)
            if not isinstance(learned, list) or len(learned) != self.layout.classes:
                raise DataError(f"'{LEARNED}' is not a number for each finding")

    def aggregate(self, updates: Sequence[Update]) -> None:
        super().aggregate(updates)
        if not self.settings.sends_means(self.common, self.round):
            return
        state, rows = self.state, 2 * self.layout.classes
        tables, samples = [u.vectors[PROTOTYPES] for u in updates], self.weights(updates)
        table = average(tables, samples, rows, state.prototypes)
        state.prototypes = table if table.any() else None  # none of another task
        silos = torch.tensor([u.numbers[LEARNED] for u in updates], dtype=torch.float64)
        learned = state.learned or [1.0] * self.layout.classes
        for c in range(self.layout.classes):
            held = [(d, n) for d, n in zip(silos[:, c, None], samples, strict=True) if d >= 0]
            if held:
                learned[c] = float(self.mean(*zip(*held, strict=True)))
        state.learned = learned
