"""Kinds: what an array or a number that leaves a silo is, and all that follows from it.

``MethodInfo`` gives each array and each number of a method its kind. One without a kind does not leave
(``client/egress.py``). A kind has the words for the hospital, the rules of its policy that must allow it, and what
masks and noise do with it. It checks the values that are about to leave.

Means per class, and their counts: no class with fewer than the policy's ``min-cell`` patients. The counts are rounded
down to multiples of it, and are shares of what leaves, so that what is withheld is no remainder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from models.features import members
from partitions.common.errors import UserError
from strategies.base.settings import Value
from strategies.base.silo import Silo

COUNTS = "class counts"
MEMBER = "membership"
RECORDS = "records"
# The settings with which no block is personal: a silo then sends the whole model.
ALL_LAYERS_AT: Mapping[str, tuple[Value, ...]] = {"personal": ("none", ""), "layers": (0,)}


@dataclass(frozen=True)
class ReleaseKind:
    """What is trained: at a learning rate of 0 it holds nothing of the data."""

    words: str  # what the server sees
    # What it allows to infer in principle
    infers: tuple[str, ...] = (COUNTS, MEMBER, RECORDS)
    # Whether it may hold all layers of a model; a mapping: only with these values of the method's settings
    whole: bool | Mapping[str, tuple[Value, ...]] = False
    whole_from: float = (
        1.0  # the share of a model's size from which it counts as the whole model
    )
    step: bool = False  # a step, not a point to measure one from
    bounded: ClassVar[bool] = True  # whether it has a length to clip
    noised: ClassVar[bool] = True  # whether noised gradients make it with dp, or no data
    summed: ClassVar[bool] = True  # whether a sum over silos, under masks, can stand for it
    # What a changed patient moves, even where nothing is learned: nothing; all; the rows of the class; of the column
    moves: ClassVar[Literal["", "all", "class", "column"]] = ""
    # Rules of the policy that must allow it, with the words of a refusal; what `silofl approve` warns of
    rules: ClassVar[Mapping[str, str]] = {}
    danger: ClassVar[str] = ""

    def check(self, name: str, values: Any, client: Any) -> None:
        """Raise UserError for an array that a silo may not send. ``client``: its :class:`SiloClient`."""

    def withheld(self, silo: Silo) -> dict[str, list[str]]:
        """Return what stays at the silo, by rule, for its audit log."""
        return {}


@dataclass(frozen=True)
class Gradient(ReleaseKind):
    """What is computed of gradients, trained or not: control variates, which parameters moved, running statistics."""

    moves = "all"


@dataclass(frozen=True)
class Bits(Gradient):
    bounded = False


@dataclass(frozen=True)
class NewTrees(Gradient):
    bounded = noised = summed = False


def released_classes(silo: Silo) -> Tensor:
    """Return bool (C,): the classes with at least ``min-cell`` patients in the training part.

    Of findings (2L,): the patients without, and with, each of them.
    """
    y = silo.train.y
    of = members(y, silo.classes or silo.model.layout.classes) > 0
    if silo.min_cell <= 1:
        return torch.ones(of.shape[1], dtype=torch.bool, device=y.device)
    patients = [len(np.unique(silo.units[column])) for column in of.T.cpu().numpy()]
    return (torch.tensor(patients) >= silo.min_cell).to(y.device)


def class_shares(silo: Silo, counts: Tensor, least: int = 1) -> Tensor:
    """Return the share (C,) of each class that may leave, 0 for the others.

    ``counts`` (C,): samples; ``least``: the fewest of a class, by the run.
    """
    kept = counts * (counts >= least)
    if silo.min_cell <= 1:
        return kept / counts.sum()
    kept = (kept / silo.min_cell).floor() * silo.min_cell
    kept = kept * released_classes(silo)
    return kept / kept.sum().clamp(min=1)


@dataclass(frozen=True)
class ClassMeans(ReleaseKind):
    """Means per class, a row (C, ...) for each; one that is withheld has zeros.

    ``rows = "features"``: C rows of K numbers, then others; one that is withheld is as all silos received it.
    ``rows = "table"``: C rows of K + 1 numbers, then others.
    """

    rows: Literal["all", "features", "table"] = "all"
    noised = False
    moves: ClassVar[Literal["", "all", "class", "column"]] = "class"
    rules: ClassVar[Mapping[str, str]] = {"class_means": "which sends them"}
    danger = "sends means per class: class counts, and the mean record of a rare class"

    def of_classes(self, values: Tensor, client: Any) -> Tensor:
        """Return the rows of the classes (C, ...)."""
        layout = client.model.layout
        if self.rows != "all":
            width = layout.features + (self.rows == "table")
            values = values[: layout.classes * width]
        return values.view(layout.classes, -1)

    def check(self, name: str, values: Tensor, client: Any) -> None:
        if client.privacy is not None:  # what an exact count decides would reveal one patient
            return
        stays = ~released_classes(client.silo)
        sent = self.of_classes(values, client)[stays]
        if self.rows == "features":
            came = self.of_classes(client.models[name].vector, client)
            sent = sent - came[stays]
        if sent.any():
            raise UserError(
                f"{client.silo.name} refuses: its policy has min-cell = {client.silo.min_cell}, and '{name}' has means "
                "of classes with fewer patients"
            )

    def withheld(self, silo: Silo) -> dict[str, list[str]]:
        classes = (~released_classes(silo)).nonzero().flatten().tolist()
        return {"min-cell": [f"means of class {k}" for k in classes]} if classes else {}


@dataclass(frozen=True)
class FindingMeans(ClassMeans):
    """Means of those without, and with, each finding: rows (2L, ...). A record has all findings."""

    moves = "all"

    def of_classes(self, values: Tensor, client: Any) -> Tensor:
        return values.view(2 * client.model.layout.classes, -1)

    def check(self, name: str, values: Tensor, client: Any) -> None:
        if values.any():  # none of another task
            super().check(name, values, client)

    def withheld(self, silo: Silo) -> dict[str, list[str]]:
        if silo.task.name != "multilabel":
            return {}
        rows = (~released_classes(silo)).nonzero().flatten().tolist()
        words = [f"means with{'' if k % 2 else 'out'} finding {k // 2}" for k in rows]
        return {"min-cell": words} if words else {}


@dataclass(frozen=True)
class ColumnSums(ReleaseKind):
    """Mean and deviation of each column or channel (2 C,), as the hospital releases its sums."""

    bounded = noised = summed = False
    moves = "column"
    rules: ClassVar[Mapping[str, str]] = {
        "sums": "which sends mean and deviation of each column",
        "peers": "which hands these to other hospitals",
    }
    danger = (
        "sends mean and deviation of each column (sums), and hands them to the other hospitals without names (peers): "
        "differencing. Sums of two versions of your data tell who changed"
    )

    def check(self, name: str, values: Tensor, client: Any) -> None:
        if client.silo.moments and not torch.equal(values, client.silo.moments().flatten()):
            raise UserError(f"{client.silo.name} refuses: '{name}' is not what it released")


@dataclass(frozen=True)
class Plain(ReleaseKind):
    """A number, or one for each of several things, within its bounds; it tells how much was trained."""

    infers: tuple[str, ...] = ()
    low: float = 0.0
    high: float = math.inf
    integer: bool = False
    several: bool = False

    def allows(self, value: Any, high: float = math.inf) -> bool:
        """Return whether a number, or each of several, is finite, of this type and within the bounds."""
        numbers = value if self.several and isinstance(value, list) else [value]
        most = min(self.high, high, sys.float_info.max)
        of = int if self.integer else float
        return all(type(v) is of and self.low <= v <= most for v in numbers)

    def words_of_bounds(self, high: float = math.inf) -> str:
        kind = "whole number" if self.integer else "float"
        return f"{kind} from {self.low:g} to {min(self.high, high):g}"

    def check(self, name: str, values: Any, client: Any) -> None:
        if not self.allows(values):
            raise UserError(
                f"{client.silo.name} may not send '{name}' = {values!r:.80}: it is no {self.words_of_bounds()}"
            )


@dataclass(frozen=True)
class Measured(Plain):
    """A number that is computed from the data."""

    noised = False
    moves = "all"


@dataclass(frozen=True)
class Names(ReleaseKind):
    """Names of silos that it chose, with or without weights."""

    infers: tuple[str, ...] = ()
    moves = "all"


MODEL = ReleaseKind("the whole model", whole=True)
CHANGE = ReleaseKind("a change of the whole model", whole=True, step=True)
LAYERS = ReleaseKind("some layers of the model", whole=True)
SHARED = ReleaseKind("the shared layers", whole=True)
SHARED_AT = replace(SHARED, whole=ALL_LAYERS_AT)
SHARED_SOME = replace(SHARED, whole=False)
# Few projections determine an update of low rank, such as one of few patients
PROJECTION = ReleaseKind("the model, projected to d numbers", whole_from=0.01)
CONTROL = Gradient("a control variate: the mean gradient of a round", whole=True, step=True)
CRITICAL = Bits("which parameters moved most", (MEMBER,))
TREES = NewTrees(
    "new trees: columns, thresholds, and a sum over the patients of each leaf",
    whole=True,
    step=True,
)
CLASS_MEANS = ClassMeans("mean features of each class, and the classes' shares")
CLASS_PRODUCTS = ClassMeans("mean features of each class times its share", (COUNTS, MEMBER))
CLASS_GAUSSIANS = ClassMeans(
    "mean features of each class, and the covariance of the features", rows="features"
)
FINDING_MEANS = FindingMeans("mean features of those with, and without, each finding")
CLASS_MOMENTS = ClassMeans(
    "each class's share, and sums of its features and of their squares or products", step=True
)
POOLED_MOMENTS = ClassMeans(
    "each class's share and the sum of its features, and the products of all features",
    rows="table",
    step=True,
)
COLUMN_SUMS = ColumnSums("mean and deviation of each channel of its inputs", (MEMBER,))
# Of every method with BatchNorm, and with masks of those whose numbers travel in the sum
BUFFERS = Gradient("running statistics of batch normalisation", (MEMBER,))
NUMBERS = Gradient("numbers of at least 0", (MEMBER,))
STEPS = Plain("its number of steps", integer=True)
