"""Sets of classes and intervals of an exported model: split conformal prediction, on the hospital's own test samples.

Classes: the score of a class is 1 - p (``models/evidence/conformal.py``); a set holds the classes within the threshold.
Measurements: the score is |y - prediction| per measurement, and the interval is the prediction ± its quantile (Lei et
al., JASA 2018, algorithm 2). For new patients from the same population, each contains the truth with probability
``coverage`` or more, on average over calibration samples. There is no guarantee for another hospital's patients, for
each group of patients, or for all measurements at once.

Samples of one patient are not exchangeable with those of others. So one sample of each patient counts, drawn by a fixed
seed (Dunn, Wasserman and Ramdas, JASA 2023, section 3.3). Training and validation samples do not count, since the model
was fitted and selected on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from client.evidence.temperature import fitting, is_as_trained, outputs_and_labels
from client.model_card import COVERAGE
from models.evidence.conformal import Array, threshold_of, true_scores
from models.flat import FlatModel
from models.tasks import Task, probabilities, task_of
from partitions.common.errors import UserError
from partitions.splits import Split

SETS, INTERVALS = ("multiclass", "ordinal"), ("regression",)
SLACK = 1e-6  # of a probability: the rounding difference of single precision between batches


def conformal_for(card: Mapping[str, Any], net: FlatModel, file: Path, coverage: float) -> dict[str, Any]:
    """Return the threshold of sets, or the half widths of intervals, for a model's card.

    Raises UserError if the task has neither, if the file does not fit, or if it has too few test samples.
    """
    if card["task"] not in (*SETS, *INTERVALS):
        raise UserError(
            f"--conformal: {card['task']} has no sets or intervals; it is for {', '.join(SETS + INTERVALS)}"
        )
    if not COVERAGE[0] <= coverage <= COVERAGE[1]:
        raise UserError(f"--coverage {coverage:g}: from {COVERAGE[0]} to {COVERAGE[1]}, for example 0.9")
    data = fitting(card, file, "--conformal")
    test, patients = one_per_patient(data.test)
    least = math.ceil(coverage / (1 - coverage) - 1e-9)
    if len(test) < least:
        raise UserError(
            f"--conformal: {file} has {len(test)} test {'patients' if patients else 'samples'}, at least {least} are "
            f"needed for a coverage of {coverage:g}"
        )
    outputs, labels = outputs_and_labels(card, net, test)
    outputs = outputs / card.get("temperature", {}).get("T", 1.0)
    about = {"coverage": coverage, "records": len(test), "patients": patients}
    about["as_trained"] = is_as_trained(card, data)
    if card["task"] in SETS:
        scores = true_scores(probabilities(outputs), labels.cpu().numpy())
        return {**about, "threshold": threshold_of(scores, 1 - coverage)}
    predicted = np.array(task_in(card).answers(outputs)[1])
    errors = np.abs(predicted - np.asarray(test.y, np.float64))
    return {**about, "half_widths": [quantile_of(column, 1 - coverage) for column in errors.T]}


def task_in(card: Mapping[str, Any]) -> Task:
    """Return the task of a card's model, with the scale of its labels."""
    labels = card.get("labels") or {"mean": (), "std": ()}
    return task_of(card.get("task", "multiclass"), labels["mean"], labels["std"])


def quantile_of(scores: Array, alpha: float) -> float:
    """Return the ceil((n + 1)(1 - alpha))-th smallest of n scores."""
    return float(np.sort(scores)[math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9) - 1])


def one_per_patient(split: Split) -> tuple[Split, bool]:
    """Return one sample of each patient, and whether the samples name patients; every sample if they do not."""
    if split.patient is None:
        return split, False
    order = np.random.default_rng(0).permutation(len(split))
    first: npt.NDArray[np.int64] = np.unique(split.patient[order], return_index=True)[1]
    rows = np.sort(order[first])
    return Split(split.x[rows], split.y[rows], split.patient[rows]), True


def bounds_of(card: Mapping[str, Any], outputs: Tensor) -> tuple[list[str], list[list[float]]]:
    """Return column names and a row per sample from scaled outputs (n, C): 1 for a class in the set, or both ends."""
    known = card.get("conformal")
    if not known:
        return [], []
    if "threshold" in known:
        inside = 1 - probabilities(outputs) <= known["threshold"] + SLACK
        return [f"set_{c}" for c in range(inside.shape[1])], inside.astype(int).tolist()
    half = np.array(known["half_widths"])
    predicted = np.array(task_in(card).answers(outputs)[1])
    names = [f"{end}_{k}" for k in range(len(half)) for end in ("low", "high")]
    return names, np.stack([predicted - half, predicted + half], axis=2).reshape(len(predicted), -1).tolist()


def in_words(known: Mapping[str, Any]) -> str:
    """Return a sentence with the guarantee of a card's threshold or widths, and the number of records behind it."""
    what = "each set holds the true class" if "threshold" in known else "each interval holds the measurement"
    whose = "patients, one record of each" if known["patients"] else "records"
    return (
        f"{what} of {known['coverage']:.0%} of new patients like these, as computed on {known['records']} test {whose}"
    )
