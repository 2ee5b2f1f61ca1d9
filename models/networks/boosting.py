"""Boosting by XGBoost: what a training is with ``model = trees`` (models/networks/trees.py).

An epoch is an iteration of boosting, on all training samples: a tree for each output, fitted to the first and second
derivatives of the loss at the ensemble's present outputs. XGBoost gets these as its base margin, so it never reads
trees that came with a message. It boosts a new ensemble from there, and its trees are appended.

    leaf     -η G / (H + λ), the sums of the derivatives over its samples; -G / (H + λ) is cut to ±10
    rows     a leaf has at least as many samples as a batch must have, the policy's ``min-batch-size`` included: their
             second derivatives are at most 1 (squared error), 1/4 (two classes) or 1/2 (several), and H is at least
             so many times that
    columns  rounded down to multiples of 1 / ``trees.resolution``, so that no threshold is a patient's exact value

The start is 0, not the labels' mean. Nothing is drawn at random. One thread: the trees are the same on every machine.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.flat import FlatModel
from models.networks.trees import TREES, Trees, check_nodes, count_used, split
from models.samples import Samples
from partitions.common.errors import UserError

Array = npt.NDArray[np.float32]
MOST_DELTA = 10.0  # XGBoost's max_delta_step


def boost(model: FlatModel, train: Samples, epochs: int, rate: float, least: int) -> None:
    """Append ``epochs`` iterations to the ensemble in ``model``, with at least ``least`` samples in a leaf.

    Raises UserError where that cannot be done, and DataError for an ensemble that no boosting makes.
    """
    module = model.module
    assert isinstance(module, Trees)
    check_nodes(model.layout, model.vector)
    start, nodes = count_used(module.nodes), module.nodes.data
    if start + epochs > len(nodes):
        raise UserError(
            f"the ensemble has {start} of trees.capacity = {len(nodes)} trees, and no room for {epochs}"
        )
    if not epochs:
        return
    x, y, margin = _data(module, train)
    if not np.isfinite(margin).all():
        raise UserError("the sums of the received trees' leaves are not finite")
    try:
        import xgboost
    except ModuleNotFoundError:
        raise UserError(
            f"model = {TREES} needs the package xgboost: pip install 'silofl[trees]'"
        ) from None
    data = xgboost.DMatrix(x, label=y, base_margin=margin, nthread=1)
    booster = xgboost.train(options(module, rate, least), data, epochs)
    trees = trees_of(booster, nodes[start : start + epochs])
    nodes[start : start + epochs] = trees.to(nodes.device)


def _data(module: Trees, train: Samples) -> tuple[Array, Array, Array]:
    """Return the training samples, their labels, and the ensemble's sums, in float32 and tree by tree as XGBoost's."""
    step, columns = module.settings.resolution, []
    for x, y in train.batches(train.in_order()):
        with torch.no_grad():
            # Before the first tree there is 0
            leaves = module.leaves(x).cpu().numpy()
        leaves = np.pad(leaves, ((0, 0), (1, 0), (0, 0)))
        sums = np.add.accumulate(leaves, axis=1)[:, -1]
        columns.append(((x * step).floor().div(step).cpu().numpy(), y.cpu().numpy(), sums))
    rows, labels, margin = map(np.concatenate, zip(*columns, strict=True))
    return rows, labels, margin


def options(module: Trees, rate: float, least: int) -> dict[str, Any]:
    """Return XGBoost's parameters."""
    settings, outputs = module.settings, module.outputs
    # With the largest second derivative of a sample
    objective, curvature = {1: ("reg:squarederror", 1.0), 2: ("binary:logistic", 0.25)}.get(
        outputs, ("multi:softprob", 0.5)
    )
    return {
        "objective": objective,
        **({"num_class": outputs} if outputs > 2 else {}),
        "base_score": 0.0 if outputs == 1 else 0.5,
        "eta": rate,
        "max_depth": settings.depth,
        "lambda": settings.lambda_,
        "min_child_weight": max(settings.min_child_weight, least * curvature),
        "max_delta_step": MOST_DELTA,
        "tree_method": "hist",
        "nthread": 1,
        "verbosity": 0,
    }


def trees_of(booster: Any, like: Tensor) -> Tensor:
    """Return a booster's trees as rows of an ensemble, in the shape of ``like``."""
    model = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    trees = torch.zeros(like.shape)
    for row, tree in zip(trees.view(-1, trees.shape[-1]), model["trees"], strict=True):
        columns, thresholds, leaves = split(row)
        columns.fill_(-1)
        _fill(tree, 0, 0, columns, thresholds, leaves)
    return trees


def _fill(tree: Any, node: int, place: int, *parts: Tensor) -> None:
    """Write a node of XGBoost's tree, and all below it, at a place of the full tree."""
    columns, thresholds, leaves = parts
    left, value = tree["left_children"][node], tree["split_conditions"][node]
    if left < 0:
        while place < len(columns):  # all go to the left below it
            place = 2 * place + 1
        leaves[place - len(columns)] = value
        return
    columns[place], thresholds[place] = tree["split_indices"][node], value
    _fill(tree, left, 2 * place + 1, *parts)
    _fill(tree, tree["right_children"][node], 2 * place + 2, *parts)
