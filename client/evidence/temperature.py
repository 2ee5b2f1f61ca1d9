"""Temperature scaling of an exported model: one number, fitted on the hospital's own validation samples.

Outputs (logits) are divided by T, which changes probabilities but not their order (Guo et al., ICML 2017, section 4.2;
Platt scaling without its intercept). T minimises the loss on the validation part of a data file. It is stored in the
model card, beside the model, in the hospital.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from client.model_card import T_RANGE
from models.flat import FlatModel
from models.samples import BYTE_MEAN, BYTE_STD, Samples
from models.shapes import read_shape
from models.tasks import binary_loss
from models.training import predict
from partitions.common.errors import DataError, UserError
from partitions.reorder import reorder_data
from partitions.schema import parse_schema
from partitions.silo_file import read_silo_file
from partitions.splits import SiloData, Split, dtype_of

TASKS = ("multiclass", "ordinal", "multilabel")  # tasks whose outputs become probabilities
FEWEST = 30  # validation samples
STEPS = 100


def temperature_for(card: Mapping[str, Any], net: FlatModel, file: Path) -> dict[str, Any]:
    """Return T, the validation samples and the loss before and after, for a model's card.

    Raises UserError if the task has no probabilities, the file does not fit, or it has too few validation samples.
    """
    if card["task"] not in TASKS:
        raise UserError(f"--temperature: {card['task']} has no probabilities to scale; it is for {', '.join(TASKS)}")
    data = fitting(card, file, "--temperature")
    if len(data.val) < FEWEST:
        raise UserError(
            f"--temperature: {file} has {len(data.val)} validation samples, at least {FEWEST} are needed; give it "
            "x_val and y_val"
        )
    outputs, labels = outputs_and_labels(card, net, data.val)
    temperature = fitted(card["task"], outputs, labels)
    losses = [float(loss_of(card["task"], outputs / t, labels)) for t in (1.0, temperature)]
    about = {"T": temperature, "samples": len(data.val), "loss_before": losses[0], "loss_after": losses[1]}
    return {**about, "as_trained": is_as_trained(card, data)}


def is_as_trained(card: Mapping[str, Any], data: SiloData) -> bool:
    """Return whether a file's parts have the sizes of the run's parts: a simulation draws its own parts."""
    return bool({"train": len(data.train), "val": len(data.val), "test": len(data.test)} == card["samples"])


def fitting(card: Mapping[str, Any], file: Path, option: str) -> SiloData:
    """Return a file's data with columns and labels in the model's order. Raises UserError, naming ``option``."""
    try:
        data = reorder_data(read_silo_file(file, card["task"]), parse_schema(card["schema"]))
    except DataError as error:
        raise UserError(f"{option}: {error}") from None
    if data.input_shape != read_shape(card["input"]["shape"]) or dtype_of(data.val.x) != card["input"]["dtype"]:
        raise UserError(
            f"{option}: {file} holds {dtype_of(data.val.x)} samples of shape {data.input_shape}; the model takes "
            f"{card['input']['dtype']} of shape {read_shape(card['input']['shape'])}"
        )
    if data.task != card["task"] or data.classes > card["classes"]:
        raise UserError(f"{option}: {file} is for {data.task} with {data.classes} outputs, the model for another")
    return data


def outputs_and_labels(card: Mapping[str, Any], net: FlatModel, split: Split) -> tuple[Tensor, Tensor]:
    """Return the model's outputs (n, C) in double precision, and the labels."""
    scale = card["normalisation"]
    bytes_ = scale is not None and scale["mean"] == BYTE_MEAN and scale["std"] == BYTE_STD
    mean, std = (None, None) if scale is None or bytes_ else (torch.tensor(scale["mean"]), torch.tensor(scale["std"]))
    samples = Samples(split.x, split.y, "cpu", mean, std)
    return predict(net, samples).double(), samples.labels()


def loss_of(task: str, outputs: Tensor, labels: Tensor) -> Tensor:
    return binary_loss(outputs, labels.double()) if task == "multilabel" else F.cross_entropy(outputs, labels)


def fitted(task: str, outputs: Tensor, labels: Tensor) -> float:
    """Return the T in ``T_RANGE`` that minimises the loss, by bisection of its derivative: it is convex in 1 / T."""
    low, high = 1 / T_RANGE[1], 1 / T_RANGE[0]
    for _ in range(STEPS):
        middle = math.sqrt(low * high) if high / low > 2 else (low + high) / 2
        factor = torch.tensor(middle, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(loss_of(task, outputs * factor, labels), factor)
        if not bool(torch.isfinite(slope)):
            raise UserError("--temperature: the model's outputs are not finite")
        low, high = (low, middle) if float(slope) > 0 else (middle, high)
    return float(np.clip(2 / (low + high), *T_RANGE))
