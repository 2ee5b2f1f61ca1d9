"""``silofl drift``: whether new patients differ from those that a model was trained on.

`FILE.safetensors.summary.json` beside a model has counts: how many training samples lie in each tenth of an input,
and how many test samples, which the model has not seen, in each tenth of its answers and of its errors. It stays with
the hospital. New patients are counted in the same tenths. Pearson's chi-squared test (scipy) compares each pair of
counts, and a normal approximation the expected number of cases with the observed one (calibration in the large). The
rate of false alarms of all tests together is bounded (Benjamini and Hochberg 1995, scipy). One sample of each patient
counts. Large samples show small differences, so the population stability index is there too: below 0.1 is usual,
above 0.25 large (Siddiqi, Credit Risk Scorecards, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from scipy.stats import chi2_contingency, false_discovery_control, norm

from client.export import read_model
from client.exporting.model_card import Card
from client.prediction.new_samples import NewSamples, needs_recipe, read_asked
from client.prediction.predict import answer_samples
from models.flat import FlatModel
from partitions.common.errors import DataError, UserError
from partitions.common.files import file_sum, write_atomically
from partitions.common.parsed import Frozen, parse_values
from partitions.inputs import reorder_data
from partitions.silo_file import read_silo_file
from partitions.splits import Array, Split, inputs_of, is_table

TENTHS = np.arange(0.1, 1.0, 0.1)
FEWEST = 100  # samples of the summary; a tenth has ten patients or more
LEVEL = 0.05  # share of false alarms
EXPECTED = 5.0  # the least expected count of a cell, which the approximation needs
CASES = "cases"
CLASSES = ("multiclass", "ordinal", "multilabel")


class Counts(Frozen):
    """Numbers of samples below, between and from the edges on."""

    edges: list[float]
    counts: list[Annotated[int, Field(ge=0)]]

    @classmethod
    def of(cls, values: Array) -> Counts:
        """Return the counts of the reference, whose edges are its tenths, or lie between its few values."""
        distinct = np.unique(values)
        few = (distinct[1:] + distinct[:-1]) / 2
        edges = few if len(few) < len(TENTHS) else np.unique(np.quantile(values, TENTHS))
        return cls(edges=edges.tolist(), counts=count(edges, values))


class TrainingSummary(Frozen):
    """The content of the file: SHA-256 of model and data, and the counts by what is counted."""

    kind: Literal["silofl summary 1"] = "silofl summary 1"
    model: str
    data: str
    samples: int
    counts: dict[str, Counts]


@dataclass(frozen=True)
class Difference:
    """One comparison. ``p``: adjusted for all of them; ``stability``: the index, None for calibration."""

    what: str
    p: float
    stability: float | None
    says: str = ""


def summary_file(model: Path) -> Path:
    """Return the summary's file beside a model."""
    return model.with_name(f"{model.name}.summary.json")


def write_training_summary(model: Path, data: Path) -> TrainingSummary:
    """Count a data file's samples, and write the summary. Raises UserError: too few, or another model's data."""
    card, net = read_model(model)
    parts = _parts(data, card)
    train, test = (parts[name] for name in ("train", "test"))
    if min(len(train), len(test)) < FEWEST:
        raise UserError(
            f"{data} has {len(train)} training and {len(test)} test samples of different patients; {FEWEST} of each "
            "are needed"
        )
    values = inputs(train.x, card) | outcomes(card, net, test, data, model)
    counts = {what: Counts.of(of) for what, of in values.items() if of.ndim == 1}
    summary = TrainingSummary(
        model=file_sum(model), data=file_sum(data), samples=len(train), counts=counts
    )
    write_atomically(summary_file(model), summary.model_dump_json(indent=1) + "\n", mode=0o600)
    return summary


def measure_drift(model: Path, data: Path) -> dict[str, Any]:
    """Compare new samples with the summary of a model: its differences, worst first, and what drifted.

    Labels are compared where an .npz file has them. Raises UserError, one line.
    """
    card, net = read_model(model)
    file, again = summary_file(model), f"silofl drift {model} --summary OURS.npz"
    if not file.is_file():
        raise UserError(f"{model} has no summary beside it: {again}")
    summary = parse_values(TrainingSummary, file.read_bytes(), file, again)
    if summary.model != file_sum(model):
        raise UserError(f"{file} is of another model: {again}")
    if needs_recipe(data) or not _has_labels(data):
        new = read_asked(data, card)
        values = inputs(np.asarray(new.x), card) | predictions(card, net, new, data, model)
    else:
        each = [
            inputs(part.x, card) | outcomes(card, net, part, data, model)
            for part in _parts(data, card).values()
        ]
        values = {what: np.concatenate([of[what] for of in each]) for what in each[0]}
    differences = [
        compare_counts(what, counts, values[what])
        for what, counts in summary.counts.items()
        if what in values
    ]
    differences += calibration(values) if CASES in values else []
    tested = [each for each in differences if not math.isnan(each.p)]
    if tested:
        ps = false_discovery_control([each.p for each in tested])
        tested = [replace(each, p=float(p)) for each, p in zip(tested, ps, strict=True)]
    tested.sort(key=lambda each: (each.p, -(each.stability or 0.0)))
    return {
        "model": summary.model,
        "training_data": summary.data,
        "samples": {"training": summary.samples, "new": len(next(iter(values.values())))},
        "level": LEVEL,
        "tests": [asdict(each) for each in tested],
        "not_tested": [each.what for each in differences if math.isnan(each.p)],
        "drifted": [each.what for each in tested if each.p < LEVEL],
    }


def count(edges: Any, values: Array) -> list[int]:
    """Return how many values lie in each interval."""
    places = np.searchsorted(np.asarray(edges), values, side="right")
    return [int(n) for n in np.bincount(places, minlength=len(edges) + 1)]


def compare_counts(what: str, before: Counts, values: Array) -> Difference:
    """Return the difference of new values from the summary's; its p is NaN where there are too few."""
    table = np.array([before.counts, count(before.edges, values)], float)
    old, new = (table + 0.5) / (table + 0.5).sum(1, keepdims=True)
    stability = float(((new - old) * np.log(new / old)).sum())
    while table.shape[1] > 1:  # a cell that expects too little joins its smaller neighbour
        expected = (table.sum(1, keepdims=True) * table.sum(0) / table.sum()).min(0)
        if expected.min() >= EXPECTED:
            p = chi2_contingency(table, correction=False).pvalue
            return Difference(what, float(p), stability)
        at = int(expected.argmin())
        beside = [i for i in (at - 1, at + 1) if 0 <= i < table.shape[1]]
        to = min(beside, key=lambda i: expected[i])
        table[:, to] += table[:, at]
        table = np.delete(table, at, 1)
    return Difference(what, math.nan, stability)


def calibration(values: Mapping[str, Array]) -> list[Difference]:
    """Return, for each class, how far the number of cases is from the sum of the model's probabilities."""
    differences = []
    for k, cases in enumerate(values[CASES].T):
        known = cases >= 0
        p, observed = values[f"prediction p_{k}"][known], cases[known].sum()
        z = abs(observed - p.sum()) / math.sqrt(max((p * (1 - p)).sum(), 1e-12))
        says = f"{p.sum():.1f} expected, {observed:.0f} observed"
        differences.append(
            Difference(f"calibration of class {k}", 2 * float(norm.sf(z)), None, says)
        )
    return differences


def inputs(x: Any, card: Card) -> dict[str, Array]:
    """Return the inputs' values (n,): a table's columns, the tokens of a text, else mean and deviation of a sample."""
    names, values = card.schema_parsed.names, dict[str, Array]()
    for name, array in inputs_of(x).items():
        prefix = f"input {name} " if name else "input "
        if is_table(array):
            columns = names if len(names) == array.shape[1] else range(array.shape[1])
            values |= {f"{prefix}{column}": array[:, i] for i, column in enumerate(columns)}
        elif array.dtype == np.int32:
            values[f"{prefix}tokens"] = (array != 0).sum(1)
        else:
            flat = array.reshape(len(array), -1)
            values |= {f"{prefix}mean": flat.mean(1), f"{prefix}deviation": flat.std(1)}
    return values


def predictions(
    card: Card, net: FlatModel, samples: NewSamples, data: Path, model: Path
) -> dict[str, Array]:
    """Return the model's numbers (n,) by name, without labels, sets and intervals."""
    answers = answer_samples(card, net, samples, str(data), str(model))
    return {
        f"prediction {name}": np.array([row[i] for row in answers.rows], float)
        for i, name in enumerate(answers.columns)
        if not name.startswith(("label", "set_", "low_", "high_"))
    }


def outcomes(
    card: Card, net: FlatModel, part: Split, data: Path, model: Path
) -> dict[str, Array]:
    """Return predictions, labels and errors; of classes also cases (n, C): 1, 0, or -1 for a missing label."""
    samples = NewSamples(part.x, 0, card.schema_parsed, [str(i) for i in range(len(part))])
    values = predictions(card, net, samples, data, model)
    y = np.asarray(part.y).reshape(len(part), -1)
    if card.task in CLASSES:
        y = (y == np.arange(card.classes)).astype(int) if y.shape[1] == 1 < card.classes else y
        values[CASES] = y
    elif card.task != "regression":
        return values
    for k, predicted in enumerate([*values.values()][: y.shape[1]]):
        known = y[:, k] >= 0 if card.task in CLASSES else slice(None)
        values[f"label {k}"] = y[known, k]
        values[f"error {k}"] = np.abs(y[known, k] - predicted[known])
    return values


def _parts(data: Path, card: Card) -> dict[str, Split]:
    """Return the parts of a data file in the model's order, with one sample of each patient. Raises UserError."""
    try:
        read = reorder_data(read_silo_file(data, card.task), card.schema_parsed)
    except DataError as error:
        raise UserError(str(error)) from None
    parts = {}
    for name, part in (("train", read.train), ("val", read.val), ("test", read.test)):
        rows = np.sort(np.unique(part.units, return_index=True)[1])
        if len(rows):
            parts[name] = Split(part.x[rows], part.y[rows])
    return parts


def _has_labels(data: Path) -> bool:
    try:
        with np.load(data, allow_pickle=False) as arrays:
            return any(name.startswith("y") or name.endswith("labels") for name in arrays.files)
    except (OSError, ValueError):
        return True  # read_silo_file says what is wrong
