"""``silofl predict``: what an exported model says of new samples, as rows.

The model card says how inputs are scaled, by which temperature outputs are divided, and which conformal threshold makes
a set of classes or an interval. One function, :func:`answer`, does all of it: for files here, over HTTP, for pictures.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.evidence.conformal import INTERVALS, SETS, bounds_of, in_words, task_in
from client.evidence.temperature import TASKS as PROBABILITIES
from client.export import read_model
from client.prediction.outlines import check_folder, write_outlines
from client.tables.new_samples import Asked, answers_csv, named_columns, read_asked
from models.flat import FlatModel
from models.samples import BYTE_MEAN, BYTE_STD, Samples
from models.shapes import read_shape
from models.training import predict as logits_of
from partitions.common.errors import DataError, UserError
from partitions.importing.source import reading
from partitions.importing.streams import blank
from partitions.labels import ONE_CLASS
from partitions.npz import write_npz
from partitions.reorder import reorder_columns
from partitions.schema import Schema, difference, few, moved, order_of, parse_schema
from partitions.splits import Array, dtype_of, input_shape

BATCH = 512
MOST_VALUES = 1 << 22  # of pictures and volumes at once; a U-Net's outputs are several times that


@dataclass(frozen=True)
class Answers:
    """What a model says: names of columns, a row (columns,) of values for each sample, and outlines, each ([d,] h, w).

    A value is a number, or a text: the name of a class.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[list[float | str], ...] = ()
    outlines: Sequence[Array] = ()


def predict_file(
    model: Path, data: Path, masks: Path | None = None, recipe: Path | None = None, as_gaps: bool = False, key: str = ""
) -> str:
    """What an exported model says of each sample as CSV; ``masks``: where to write outlines, uint8 (n, [d,] h, w), an
    .npz file, or for volumes a folder (``outlines.write_outlines``).

    Of classes ``index,label,p_0,...`` with softmax probabilities and the likeliest class, by their names where they
    have some; of other tasks what ``Task.answers`` says. ``set_0,...`` follow where the card has a conformal threshold:
    1 for a class in the set; of measurements the ends of an interval. ``data``: a data file, whose test part or, where
    it has none, all of ``x`` counts, or a csv or pictures, which go through the ``recipe``, or else the card's. Labels
    are not needed. In the place of ``index``, which counts from 0, a csv's rows have their patient, and pictures their
    ``key``. Raises UserError where model and data cannot be read or do not fit each other.
    """
    card, net = read_model(model)
    task = task_in(card)
    if masks is not None and not task.per_pixel:
        raise UserError(f"{model} draws no outlines: it is for {task.name}")
    asked = read_asked(data, card, recipe, as_gaps, key)
    if masks is not None and masks.suffix != ".npz":
        check_folder(masks, asked)
    parts: list[Answers] = []

    def outlines() -> Iterator[Array]:
        for part in answers_of(card, net, asked, str(data), str(model)):
            parts.append(replace(part, outlines=()))
            yield from part.outlines

    names: list[str] = []
    labels = parse_schema(card.get("schema", {})).labels
    try:
        if masks is None:
            deque(outlines(), maxlen=0)
        elif masks.suffix == ".npz":
            write_npz(masks, {"masks": blank(asked.x.shape[:-1], np.uint8)}, {"masks": outlines()})
        else:
            classes = labels or [f"class {i}" for i in range(card["classes"])]
            names = write_outlines(masks, asked, outlines(), classes)
    except DataError as error:
        raise UserError(str(error)) from None
    found = together(parts)
    if not names:
        return answers_csv(asked, found.columns, found.rows)
    rows = [[*row, name] for row, name in zip(found.rows, names, strict=True)]
    return answers_csv(asked, (*found.columns, "mask"), rows)


def answer(card: Mapping[str, Any], net: FlatModel, asked: Asked, data: str, model: str) -> Answers:
    """What the model says of all samples, without outlines; as :func:`answers_of`."""
    return together([replace(part, outlines=()) for part in answers_of(card, net, asked, data, model)])


def together(parts: Sequence[Answers]) -> Answers:
    """The answers of all batches."""
    return Answers(parts[0].columns, tuple(row for part in parts for row in part.rows)) if parts else Answers()


def answers_of(card: Mapping[str, Any], net: FlatModel, asked: Asked, data: str, model: str) -> Iterator[Answers]:
    """What the model says, one batch after the other: memory does not grow with pictures and scans.

    ``data`` and ``model``: their names in messages. Raises UserError where the samples do not fit the model, and
    DataError where a picture cannot be read.
    """
    x, own = asked.x, asked.schema
    shape, dtype = read_shape(card["input"]["shape"]), card["input"]["dtype"]
    here, kind = input_shape(x, asked.vocabulary), dtype_of(x)
    if here != shape or dtype not in (None, kind):  # None: a shared model takes what each silo has
        raise UserError(
            f"{data} holds {kind} samples of shape {here}; {model} takes {dtype or 'samples'} of shape {shape}"
        )
    order = check_schema(own, card, data)
    scale = card["normalisation"]
    if dtype is None and kind == "uint8":
        scale = {"mean": BYTE_MEAN, "std": BYTE_STD}
    mean, std = (torch.tensor(scale["mean"]), torch.tensor(scale["std"])) if scale else (None, None)
    for batch in batches_of(asked, data):
        part = reorder_columns(batch, order)
        part = part.astype(np.float32) if part.dtype == np.uint8 else part  # the card says how they are scaled
        outputs = logits_of(net, Samples(part, np.zeros(len(part), np.int64), "cpu", mean, std))
        names, rows = rows_of(card, outputs)
        drawn = [*outputs.argmax(1).numpy().astype(np.uint8)] if task_in(card).per_pixel else []
        yield Answers(names, tuple(rows), drawn)


def batches_of(asked: Asked, data: str) -> Iterator[Array]:
    """The samples, some at a time; pictures and scans are read as they are wanted. Raises DataError."""
    x = asked.x
    at_once = BATCH if x.ndim < 4 else max(1, min(BATCH, MOST_VALUES // math.prod(x.shape[1:])))
    if asked.pictures is None:
        yield from (x[i : i + at_once] for i in range(0, len(x), at_once))
        return
    with reading(Path(data)):
        source = iter(asked.pictures)
        while batch := list(islice(source, at_once)):
            yield np.stack(batch).astype(x.dtype, copy=False)


def rows_of(card: Mapping[str, Any], outputs: Tensor) -> tuple[tuple[str, ...], list[list[float | str]]]:
    """The columns' names, and what a model's outputs (n, C) mean by its card: the only place that says so."""
    labels = parse_schema(card.get("schema", {})).labels
    outputs = outputs / card.get("temperature", {}).get("T", 1.0)
    columns, values = task_in(card).answers(outputs)
    more, ends = bounds_of(card, outputs)
    names = tuple(named_columns([*columns, *more], labels))
    classes = labels if names[: len(columns)] != tuple(columns) else ()
    at = columns.index("label") if classes and "label" in columns else -1
    rows: list[list[float | str]] = [[*own, *(ends[i] if ends else ())] for i, own in enumerate(values)]
    for row in rows if at >= 0 else ():
        row[at] = classes[int(row[at])]
    return names, rows


def uncertainty(card: Mapping[str, Any]) -> list[str]:
    """How far a model's answers can be trusted by its card, a line each; what is missing is named too."""
    task, found = card.get("task", "multiclass"), []
    if task in PROBABILITIES and "temperature" not in card:
        found.append("the model card has no temperature, so the probabilities are not calibrated: export --temperature")
    if known := card.get("conformal"):
        found.append(in_words(known))
    elif task in (*SETS, *INTERVALS):
        what = "sets of classes" if task in SETS else "intervals"
        found.append(f"the model card has no conformal threshold, so there are no {what}: export --conformal")
    else:
        found.append(f"there are no sets or intervals for {task}")
    return found


def check_schema(own: Schema, card: Mapping[str, Any], data: str) -> list[int]:
    """For each column that a model takes its place in the data file, by name; empty where the order is the same.

    A line on standard error says what is mapped, or cannot be compared. Raises UserError where the names do not fit.
    """
    agreed = parse_schema(card.get("schema", {}))
    one = card.get("task", "multiclass") in (*ONE_CLASS, "segmentation")
    if reason := difference(own, agreed, "the model has", subset=one, mend="rename them in the data file"):
        raise UserError(f"{data} has {reason}")
    if agreed.names and not own.names:
        print(f"note: {data} names no columns: they are taken to be {few(agreed.names, 8)}", file=sys.stderr)
    if what := moved(own, agreed):
        print(f"note: {data} has its {' and '.join(what)} in another order: mapped by name", file=sys.stderr)
    return order_of(own.names, agreed.names)
