"""Calibration of an exported model on the hospital's own samples: temperature, and sets or intervals.

**Temperature**, on validation samples. Outputs (logits) are divided by T, which changes probabilities but not their
order (Guo et al., ICML 2017, section 4.2; Platt scaling without its intercept). T minimises the loss on the validation
part of a data file. It is stored in the model card, beside the model, in the hospital.

**Sets of classes and intervals** by split conformal prediction, on test samples. The score of a class is 1 - p
(``models/evidence/values.py``); a set holds the classes within the threshold. Of measurements the score is
|y - prediction| each, and the interval is the prediction ± its quantile (Lei et al., JASA 2018, algorithm 2). For new
patients from the same population, each contains the truth with probability ``coverage`` or more, on average over
calibration samples. There is no guarantee for another hospital's patients, for each group of patients, or for all
measurements at once.

Samples of one patient are not exchangeable with those of others. So one sample of each patient counts, drawn by a fixed
seed (Dunn, Wasserman and Ramdas, JASA 2023, section 3.3). Training and validation samples do not count, since the model
was fitted and selected on them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from client.exporting.model_card import COVERAGE, T_RANGE, Card, Conformal, Temperature
from client.faults import as_user_error
from models.evidence.values import quantile, true_scores
from models.flat import FlatModel
from models.samples import BYTE_MEAN, BYTE_STD, Samples
from models.tasks import binary_loss, probabilities
from models.training import predict
from partitions.common.errors import UserError
from partitions.inputs import reorder_data
from partitions.silo_file import read_silo_file
from partitions.site_split import select_rows
from partitions.splits import SiloData, Split, dtype_of

TASKS = ("multiclass", "ordinal", "multilabel")  # tasks whose outputs become probabilities
FEWEST = 30  # validation samples
STEPS = 100


def temperature_for(card: Card, net: FlatModel, file: Path) -> Temperature:
    """Return T, the validation samples and the loss before and after, for a model's card.

    Raises UserError if the task has no probabilities, the file does not fit, or it has too few validation samples.
    """
    if card.task not in TASKS:
        raise UserError(
            f"--temperature: {card.task} has no probabilities to scale; it is for {', '.join(TASKS)}"
        )
    data = fitting_data(card, file, "--temperature")
    if len(data.val) < FEWEST:
        raise UserError(
            f"--temperature: {file} has {len(data.val)} validation samples, at least {FEWEST} are needed; give it "
            "x_val and y_val"
        )
    outputs, labels = outputs_and_labels(card, net, data.val)
    temperature = fit_temperature(card.task, outputs, labels)
    losses = [float(loss_of(card.task, outputs / t, labels)) for t in (1.0, temperature)]
    return Temperature(
        T=temperature,
        samples=len(data.val),
        loss_before=losses[0],
        loss_after=losses[1],
        as_trained=is_as_trained(card, data),
    )


def is_as_trained(card: Card, data: SiloData) -> bool:
    """Return whether a file's parts have the sizes of the run's parts: a simulation draws its own parts."""
    return {
        "train": len(data.train),
        "val": len(data.val),
        "test": len(data.test),
    } == card.samples


def fitting_data(card: Card, file: Path, option: str) -> SiloData:
    """Return a file's data with columns and labels in the model's order. Raises UserError, naming ``option``."""
    with as_user_error(f"{option}: "):
        data = reorder_data(read_silo_file(file, card.task), card.schema_parsed)
    if data.input_shape != card.shape or dtype_of(data.val.x) != card.input.dtype:
        raise UserError(
            f"{option}: {file} holds {dtype_of(data.val.x)} samples of shape {data.input_shape}; the model takes "
            f"{card.input.dtype} of shape {card.shape}"
        )
    if data.task != card.task or data.classes > card.classes:
        raise UserError(
            f"{option}: {file} is for {data.task} with {data.classes} outputs, the model for another"
        )
    return data


def outputs_and_labels(card: Card, net: FlatModel, split: Split) -> tuple[Tensor, Tensor]:
    """Return the model's outputs (n, C) in double precision, and the labels."""
    scale = card.normalisation
    bytes_ = scale is not None and scale.mean == BYTE_MEAN and scale.std == BYTE_STD
    mean, std = (
        (None, None)
        if scale is None or bytes_
        else (torch.tensor(scale.mean), torch.tensor(scale.std))
    )
    samples = Samples(split.x, split.y, "cpu", mean, std)
    return predict(net, samples).double(), samples.labels()


def loss_of(task: str, outputs: Tensor, labels: Tensor) -> Tensor:
    return (
        binary_loss(outputs, labels.double())
        if task == "multilabel"
        else F.cross_entropy(outputs, labels)
    )


def fit_temperature(task: str, outputs: Tensor, labels: Tensor) -> float:
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


# Sets of classes and intervals


SETS, INTERVALS = ("multiclass", "ordinal"), ("regression",)
SLACK = 1e-6  # of a probability: the rounding difference of single precision between batches


def conformal_for(card: Card, net: FlatModel, file: Path, coverage: float) -> Conformal:
    """Return the threshold of sets, or the half widths of intervals, for a model's card.

    Raises UserError if the task has neither, if the file does not fit, or if it has too few test samples.
    """
    if card.task not in (*SETS, *INTERVALS):
        raise UserError(
            f"--conformal: {card.task} has no sets or intervals; it is for {', '.join(SETS + INTERVALS)}"
        )
    if not COVERAGE[0] <= coverage <= COVERAGE[1]:
        raise UserError(
            f"--coverage {coverage:g}: from {COVERAGE[0]} to {COVERAGE[1]}, for example 0.9"
        )
    data = fitting_data(card, file, "--conformal")
    test, patients = one_per_patient(data.test)
    least = math.ceil(coverage / (1 - coverage) - 1e-9)
    if len(test) < least:
        raise UserError(
            f"--conformal: {file} has {len(test)} test {'patients' if patients else 'samples'}, at least {least} are "
            f"needed for a coverage of {coverage:g}"
        )
    outputs, labels = outputs_and_labels(card, net, test)
    outputs = outputs / card.divisor
    sets: dict[str, Any]
    if card.task in SETS:
        scores = true_scores(probabilities(outputs), labels.cpu().numpy())
        sets = {"threshold": quantile(scores, 1 - coverage, 1.0)}
    else:
        predicted = np.array(card.answering.answers(outputs)[1])
        errors = np.abs(predicted - np.asarray(test.y, np.float64))
        sets = {"half_widths": [quantile(column, 1 - coverage) for column in errors.T]}
    as_trained = is_as_trained(card, data)
    return Conformal(
        coverage=coverage, records=len(test), patients=patients, as_trained=as_trained, **sets
    )


def one_per_patient(split: Split) -> tuple[Split, bool]:
    """Return one sample of each patient, and whether the samples name patients; every sample if they do not."""
    if split.patient is None:
        return split, False
    order = np.random.default_rng(0).permutation(len(split))
    first: npt.NDArray[np.int64] = np.unique(split.patient[order], return_index=True)[1]
    return select_rows(split, np.sort(order[first])), True


def bounds_of(card: Card, outputs: Tensor) -> tuple[list[str], list[list[float]]]:
    """Return column names and a row per sample from scaled outputs (n, C): 1 for a class in the set, or both ends."""
    known = card.conformal
    if not known:
        return [], []
    if known.threshold is not None:
        inside = 1 - probabilities(outputs) <= known.threshold + SLACK
        return [f"set_{c}" for c in range(inside.shape[1])], inside.astype(int).tolist()
    half = np.array(known.half_widths)
    predicted = np.array(card.answering.answers(outputs)[1])
    names = [f"{end}_{k}" for k in range(len(half)) for end in ("low", "high")]
    return names, np.stack([predicted - half, predicted + half], axis=2).reshape(
        len(predicted), -1
    ).tolist()


def in_words(known: Conformal) -> str:
    """Return a sentence with the guarantee of a card's threshold or widths, and the number of records behind it."""
    what = (
        "each set holds the true class"
        if known.threshold is not None
        else "each interval holds the measurement"
    )
    whose = "patients, one record of each" if known.patients else "records"
    return f"{what} of {known.coverage:.0%} of new patients like these, as computed on {known.records} test {whose}"


def calibrate_card(
    card: Card,
    net: FlatModel,
    temperature: Path | None,
    conformal: Path | None,
    coverage: float,
) -> Card:
    """Return the card with what the two data files give; the sets are computed from the calibrated probabilities."""
    if temperature is not None:
        card = card.model_copy(update={"temperature": temperature_for(card, net, temperature)})
    if conformal is not None:
        sets = conformal_for(card, net, conformal, coverage)
        card = card.model_copy(update={"conformal": sets})
    return card
