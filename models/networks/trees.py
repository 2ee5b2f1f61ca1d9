"""Boosted trees of a table as a network: each tree is a row of numbers of one size, so that an ensemble is one vector.

A tree of depth D has 2^D - 1 splits and 2^D leaves: ``columns | thresholds | leaves``. At split k a sample goes to
split 2k + 1 if its value is below the threshold, as in XGBoost, else to 2k + 2. Column -1 sends all to the left, so a
shallower tree has such splits below. A tree without splits and with zeros as leaves is an empty place.

The outputs are the sums of the leaves: a tree for each output, with two classes one tree, whose sum is the logit of
class 1 beside 0. Columns are whole numbers, which float32 holds exactly. Only boosting trains it
(models/networks/boosting.py); the network itself needs no XGBoost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.layout import Layout
from models.shapes import Shape
from models.tasks import Task
from partitions.common.errors import DataError, UserError
from partitions.common.settings import find_changed, setting

TREES = "trees"  # the network's name, and its layer block's
# Settings of local training and of messages that mean nothing to trees
NETWORKS_OWN = (
    *("local-steps", "sampler", "trainer", "precision", "accumulate", "optimizer"),
    *("optimizer-state", "momentum", "weight-decay", "amsgrad", "clip-gradient"),
    *("warmup-batches", "loss", "class-weights", "label-smoothing", "trainable", "lora-rank"),
    *("init-weights", "augment", "wire-dtype", "wire-feedback", "wire-sparse", "block-rates"),
)


@dataclass(frozen=True)
class TreesSettings:
    """Settings of boosted trees; those of XGBoost have its names."""

    capacity: int = setting(
        1000, "most trees in an ensemble, for each output; empty places travel too", minimum=1
    )
    depth: int = setting(3, "most splits above a leaf", symbol="D", minimum=1, maximum=8)
    lambda_: float = setting(1.0, "L2 weight of a leaf's value", symbol="λ", minimum=0)
    min_child_weight: float = setting(
        1.0,
        "least sum of second derivatives in a leaf; so many as keep a batch's fewest samples in it, if that is more",
        minimum=0,
    )
    resolution: int = setting(
        32,
        "thresholds are multiples of 1 / so much of a column's standard deviation, or of its unit: a power of two",
        minimum=1,
        maximum=1024,
    )

    def __post_init__(self) -> None:
        if self.resolution & (self.resolution - 1):
            raise UserError(
                f"trees.resolution = {self.resolution}: a power of two, such as 32, is needed here"
            )

    def check(self, run: Any, method: Any, own_epochs: int) -> None:
        """Raise UserError where a run's network, method and settings do not go together.

        ``run``: the run's settings; ``method``: its MethodInfo; ``own_epochs``: trees that a silo makes for itself.
        """
        boosts, only = run.model == TREES, method.training.trees == "only"
        if boosts != only and method.training.trees != "also":
            takes = f"set model = {TREES}" if only else "fedxgb, local and pooled boost trees"
            raise UserError(f"model = {run.model}: not for {method.name}; {takes}")
        if not boosts:
            return
        for key, value in find_changed(run, NETWORKS_OWN):
            raise UserError(
                f"{key} = {value}: it means nothing to model = {TREES}; leave it out"
            )
        needed = run.rounds * run.local_epochs * (run.silos if only else 1)
        needed += max(own_epochs, run.hold_out_epochs if run.held_out else 0)
        if needed > self.capacity:
            raise UserError(
                f"trees.capacity = {self.capacity}: rounds = {run.rounds} may make {needed} trees for each output; "
                f"set trees.capacity = {needed}"
            )


class Trees(nn.Module):
    """The ensemble ``trees.nodes``, of shape (capacity, trees of an iteration, 3 * 2^D - 2)."""

    block_names = (TREES,)

    def __init__(self, shape: Shape, outputs: int, settings: TreesSettings) -> None:
        super().__init__()
        self.settings = settings
        (self.tree_columns,) = shape
        self.outputs = outputs
        splits = 2**settings.depth - 1
        nodes = torch.zeros(settings.capacity, outputs if outputs > 2 else 1, 3 * splits + 1)
        nodes[..., :splits] = -1
        self.trees = nn.Module()
        self.trees.nodes = nn.Parameter(nodes)

    @property
    def nodes(self) -> Tensor:
        nodes: Tensor = self.trees.nodes  # type: ignore[assignment]
        return nodes

    def leaves(self, x: Tensor) -> Tensor:
        """Return the leaf of each sample of ``x`` (n, columns) in each tree, (n, iterations, trees of an iteration)."""
        # An exported file keeps its empty places: which are empty is no constant of a traced network
        tracing: bool = torch.jit.is_tracing()  # type: ignore[no-untyped-call]
        nodes = self.nodes if tracing else self.nodes[: count_used(self.nodes)]
        iterations, groups, width = nodes.shape
        columns, thresholds, leaves = (part.flatten() for part in split(nodes))
        # Numbers that a file or a message may hold must not point outside of a sample
        columns = columns.nan_to_num(-1).clamp(-1, self.tree_columns - 1).int()
        thresholds = thresholds.masked_fill(columns < 0, torch.nan)  # all go to the left
        columns, values = columns.clamp(min=0), x.flatten()
        # index_select by 32 bits takes a third of the time of indexing
        tree = torch.arange(iterations * groups, dtype=torch.int32, device=x.device)
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)[:, None]
        splits = width // 3
        place = torch.zeros_like(rows)
        for _ in range(self.settings.depth):
            at = (tree * splits + place).flatten()
            column = columns.index_select(0, at).view(x.shape[0], len(tree))
            value = values.index_select(0, (rows * self.tree_columns + column).flatten())
            right = value >= thresholds.index_select(0, at)
            place = 2 * place + 1 + right.view_as(column)
        at = (tree * (splits + 1) + place - splits).flatten()
        return leaves.index_select(0, at).view(x.shape[0], iterations, groups)

    def forward(self, x: Tensor) -> Tensor:
        total = self.leaves(x).sum(1)
        return torch.cat([torch.zeros_like(total), total], 1) if self.outputs == 2 else total


def split(nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns, thresholds and leaves of trees (..., 3 * 2^D - 2), as views."""
    splits = nodes.shape[-1] // 3
    return nodes[..., :splits], nodes[..., splits : 2 * splits], nodes[..., 2 * splits :]


def nodes_of(layout: Layout, vector: Tensor) -> Tensor:
    """Return the trees of an ensemble's vector, or of a part of one, as a view (iterations, trees of one, numbers)."""
    return vector.view(-1, *layout.parameters[0].shape[1:])


def count_used(nodes: Tensor) -> int:
    """Return the number of iterations up to the last tree that is no empty place."""
    columns, _, leaves = split(nodes)
    used = ((columns >= 0).any(-1) | (leaves != 0).any(-1)).any(-1).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def check_nodes(layout: Layout, vector: Tensor, largest: float = float("inf")) -> None:
    """Raise DataError for trees that no boosting makes: a column that a table has not, numbers that are not finite.

    ``largest``: the largest leaf.
    """
    columns, thresholds, leaves = split(nodes_of(layout, vector))
    known = (columns == columns.round()) & (columns >= -1) & (columns < layout.columns)
    if not bool(known.all()):
        raise DataError(f"a tree splits a column that is none of the {layout.columns}")
    if not bool(thresholds.isfinite().all() and leaves.isfinite().all()):
        raise DataError("a tree has a threshold or a leaf that is no finite number")
    if bool((leaves.abs() > largest).any()):
        raise DataError(
            f"a tree has a leaf of {float(leaves.abs().max()):.3g}, more than {largest:.3g}"
        )


def check_task(model: str, task: Task, outputs: int) -> None:
    """Raise UserError if the model is trees, and the task's loss is not boosted."""
    fits = task.single_label or (task.name, outputs) == ("regression", 1)
    if model == TREES and not fits:
        raise UserError(
            f"model = {TREES} is for classes and for one measurement, not for {task.name} with {outputs} outputs"
        )
