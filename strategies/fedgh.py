"""FedGH: one head for all silos, which the server trains on their classes' mean features; bodies never leave.

Yi, Wang, Liu, Shi and Yu, ACM MM 2023. A model is w = (φ, h): the body φ is the silo's own, h is shared.

    silo     E epochs of SGD on f_i(φ, h), from its own φ and the received h;
             c_ik = mean of φ(x) over its class k, in evaluation mode
    server   h <- passes of SGD on CE(h(c_ik), k), over all pairs (c_ik, k) of the round in batches

Each class of each silo is one pair: a mean of one sample counts as one of 500. The head that the silo trained stays.

Sent: Σ_s (the head) down; C (K + 1) up, a mean and a mark for each class that the silo has. These reveal which. Classes
of fewer samples than ``min-count`` are withheld, and of fewer patients than the policy's ``min-cell``. Kept: server h;
silo φ. An absent silo keeps φ; its classes are not among the pairs. A newcomer trains a body below the received head.
Running statistics stay in the silo. Evaluated: the received head on the silo's own body. Special case: with a rate of 0
on the server every round starts from the initial head.

The paper's code was not read: PFLlib makes one pass in batches of 10, and its server's head is the first silo's head
object, which that silo's training moves; HtFLlib's is a copy, as here. The default rate here is (unverified).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.features import all_features, class_sums, means_of
from models.layout import Layout
from models.training import batches, generator
from strategies.base.info import METHOD, No
from strategies.base.partial import PartialClient, PartialStrategy, Split
from strategies.base.settings import setting
from strategies.base.transport.kinds import CLASS_MEANS, class_shares
from strategies.base.transport.payload import Update
from strategies.fedproto import (
    PROTOTYPES,
    check_table,
    check_table_fits,
    make_table,
    read_table,
    table_size,
)


@dataclass(frozen=True)
class GhSettings:
    """Settings of FedGH."""

    server_learning_rate: float = setting(0.1, "the server's learning rate", minimum=0)
    server_passes: int = setting(1, "the server's passes over the pairs", minimum=0)
    server_batch_size: int = setting(10, "pairs in a batch of the server's", minimum=1)
    min_count: int = setting(1, "fewest samples of a class that are told of", minimum=1)


class FedGHClient(PartialClient):
    settings: GhSettings

    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        head = layout.blocks[-1].slice
        return (head,), layout.outside([head])

    def local_update(self) -> list[Tensor]:
        self.train()
        z, y = all_features(self.model, self.silo.train), self.silo.train.y
        sums, counts = class_sums(z, y, self.layout.classes)
        marks = (class_shares(self.silo, counts, self.settings.min_count) > 0).float()
        return [make_table(means_of(sums, counts), marks)]


class FedGH(PartialStrategy):
    info = METHOD(
        name="fedgh",
        title="A head that the server trains on mean features",
        paper="Yi et al., ACM MM 2023",
        spelling="FedGH",
        sends=("Σ_s", "C (K + 1)"),
        uploads={PROTOTYPES: CLASS_MEANS},
        dp=No("what is sent are means of features without noise"),
        trainer=True,
        own_model="kept",
        reports="received",
        newcomer="layers",
        late="starts",
        needs_classes=True,
        lossy=No("what is sent are prototypes, no steps"),
        sums=No("the server needs each silo's mean of each class"),
        buffers="local",
        block_rates=True,
    )
    client = FedGHClient
    Settings = GhSettings
    search = (("server-learning-rate", 0.01, 1.0),)
    settings: GhSettings

    check_fit = check_table_fits

    def sizes(self, silo: str) -> dict[str, int]:
        return {PROTOTYPES: table_size(self.layout)}

    def check(self, update: Update) -> None:
        check_table(update.vector, self.layout.classes)

    def centre(self, name: str, update: Update) -> Tensor | None:
        return None

    def aggregate(self, updates: Sequence[Update]) -> None:
        tables = [read_table(u.vector, self.layout.classes) for u in updates]
        held = [marks > 0 for _, marks in tables]
        means = torch.cat(
            [rows[classes_of] for (rows, _), classes_of in zip(tables, held, strict=True)]
        )
        labels = torch.cat([classes_of.nonzero().squeeze(1) for classes_of in held])
        head, s = self.state.model.clone(), self.settings
        if not len(labels):
            return
        rng = generator(self.common.seed, "server", self.round)
        for index in batches(
            len(labels), s.server_batch_size, s.server_passes, rng, device=labels.device
        ):
            start = head.detach().requires_grad_()
            weight, bias = start.tensor_split([len(start) - self.layout.classes])
            logits = F.linear(means[index], weight.view(self.layout.classes, -1), bias)
            (grad,) = torch.autograd.grad(F.cross_entropy(logits, labels[index]), start)
            head = head - s.server_learning_rate * grad
        self.state.model = head
