"""``silofl predict``: the predictions of an exported model for new samples, as rows.

The model card has the scaling of inputs, the temperature that divides outputs, and the conformal threshold of sets or
intervals. One function, :func:`answers_of`, applies them all: for local files, over HTTP, and for pictures.
"""

from __future__ import annotations

import sys
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from client.export import read_model
from client.exporting.calibration import INTERVALS, SETS, bounds_of, in_words
from client.exporting.calibration import TASKS as PROBABILITIES
from client.exporting.model_card import Card, Scale
from client.faults import as_user_error
from client.prediction.new_samples import NewSamples, answers_csv, named_columns, read_asked
from models.flat import FlatModel
from models.samples import BYTE_MEAN, BYTE_STD, Samples, most_at_once
from models.tasks.patches import Window
from models.training import predict as logits_of
from partitions.common.errors import DataError, UserError
from partitions.common.files import check_replaced
from partitions.importing.readers.volumes.volume import check_writable, write_masks
from partitions.importing.source import reading
from partitions.inputs import order_of, reorder_columns
from partitions.labels import ONE_CLASS
from partitions.npz import write_npz
from partitions.schema import Schema, difference, few, find_moved
from partitions.splits import Array, dtype_of, input_shape


@dataclass(frozen=True)
class ModelAnswers:
    """A model's answers: column names, a row (columns,) of values per sample, and outlines, each ([d,] h, w).

    A value is a number, or a text: the name of a class.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[list[float | str], ...] = ()
    outlines: Sequence[Array] = ()


def predict_file(
    model: Path,
    data: Path,
    masks: Path | None = None,
    recipe: Path | None = None,
    as_gaps: bool = False,
    key: str = "",
    network: str = "",
) -> str:
    """Return an exported model's predictions for each sample as CSV.

    ``masks``: where to write outlines, uint8 (n, [d,] h, w): an .npz file, or a folder for volumes
    (``outlines.write_outlines``). ``data``: a data file, whose test part or, without one, all of ``x`` is used; or a
    csv or pictures, read by the ``recipe`` or the card's. ``network``: a network of one's own that may run.

    Columns for classes: ``index,label,p_0,...`` with the likeliest class and softmax probabilities, by class names if
    there are any; for other tasks those of ``Task.answers``. With a conformal threshold in the card, ``set_0,...``
    follow, 1 for a class in the set; for measurements the ends of an interval. ``index`` counts from 0; rows of a csv
    have their patient in its place, and pictures their ``key``.
    Raises UserError if model and data cannot be read or do not fit each other.
    """
    card, net = read_model(model, network)
    task = card.answering
    if masks is not None and not task.per_pixel:
        raise UserError(f"{model} draws no outlines: it is for {task.name}")
    samples = read_asked(data, card, recipe, as_gaps, key)
    if masks is not None and masks.suffix == ".npz":
        check_replaced(masks, "masks file", are_masks)
    elif masks is not None:
        check_folder(masks, samples)
    parts, names = list[ModelAnswers](), list[str]()

    def outlines() -> Iterator[Array]:
        for part in answers_of(card, net, samples, str(data), str(model)):
            parts.append(replace(part, outlines=()))
            yield from part.outlines

    with as_user_error():
        if masks is None:
            deque(outlines(), maxlen=0)
        elif masks.suffix == ".npz":
            empty = np.broadcast_to(np.uint8(0), samples.x.shape[:-1])
            write_npz(masks, {"masks": empty}, {"masks": outlines()})
        else:
            names = write_outlines(masks, samples, outlines(), classes_of(card))
    answers = together(parts)
    if names:
        rows = tuple([*row, name] for row, name in zip(answers.rows, names, strict=True))
        answers = replace(answers, columns=(*answers.columns, "mask"), rows=rows)
    return answers_csv(samples, answers.columns, answers.rows)


def are_masks(file: IO[bytes]) -> bool:
    """Return whether a file is one that ``--masks FILE.npz`` has written."""
    return zipfile.is_zipfile(file) and zipfile.ZipFile(file).namelist() == ["masks.npy"]


def classes_of(card: Card) -> Sequence[str]:
    """Return the names of a card's classes, ``class 0`` and so on where it has none."""
    return card.schema_parsed.labels or [f"class {i}" for i in range(card.classes)]


def answer_samples(
    card: Card, net: FlatModel, samples: NewSamples, data: str, model: str
) -> ModelAnswers:
    """Return the model's answers for all samples, without outlines; as :func:`answers_of`."""
    return together(
        [replace(part, outlines=()) for part in answers_of(card, net, samples, data, model)]
    )


def together(parts: Sequence[ModelAnswers]) -> ModelAnswers:
    """Return the answers of all batches as one."""
    return (
        ModelAnswers(parts[0].columns, tuple(row for part in parts for row in part.rows))
        if parts
        else ModelAnswers()
    )


def answers_of(
    card: Card, net: FlatModel, samples: NewSamples, data: str, model: str
) -> Iterator[ModelAnswers]:
    """Yield the model's answers batch by batch, so that memory does not grow with pictures and scans.

    ``data`` and ``model``: their names in messages. Raises UserError if the samples do not fit the model, and DataError
    if a picture cannot be read.
    """
    x, schema = samples.x, samples.schema
    shape, dtype = card.shape, card.input.dtype
    here, kind = input_shape(x, samples.vocabulary), dtype_of(x)
    window = Window(shape[1:]) if card.input.patch else None
    whole = window is not None and len(here) == len(shape) and here[0] == shape[0]
    # None: a shared model accepts each silo's own type
    if (here != shape and not whole) or dtype not in (None, kind):
        raise UserError(
            f"{data} holds {kind} samples of shape {here}; {model} takes {dtype or 'samples'} of shape {shape}"
        )
    order = check_schema(schema, card, data)
    scale = card.normalisation
    if dtype is None and kind == "uint8":
        scale = Scale(mean=BYTE_MEAN, std=BYTE_STD)
    mean, std = (torch.tensor(scale.mean), torch.tensor(scale.std)) if scale else (None, None)
    for batch in batches_of(samples, data):
        part = reorder_columns(batch, order)
        # Scaled below, as in the card
        part = part.astype(np.float32) if part.dtype == np.uint8 else part
        labels = np.zeros(len(part), np.int64)
        outputs = logits_of(net, Samples(part, labels, "cpu", mean, std, window=window))
        if not bool(outputs.isfinite().all()):
            raise UserError(
                f"{model} answers with no number for a sample of {data}: it is damaged, or did not learn"
            )
        names, rows = rows_of(card, outputs)
        drawn = (
            [*outputs.argmax(1).numpy().astype(np.uint8)] if card.answering.per_pixel else []
        )
        yield ModelAnswers(names, tuple(rows), drawn)


def batches_of(samples: NewSamples, data: str) -> Iterator[Array]:
    """Yield the samples in batches; pictures and scans are read on demand. Raises DataError."""
    x = samples.x
    at_once = most_at_once(x)
    with reading(Path(data)):
        yield from (x[i : i + at_once] for i in range(0, len(x), at_once))


def rows_of(card: Card, outputs: Tensor) -> tuple[tuple[str, ...], list[list[float | str]]]:
    """Return the column names, and a model's outputs (n, C) as answers by its card; used for every kind of answer."""
    labels = card.schema_parsed.labels
    outputs = outputs / card.divisor
    columns, values = card.answering.answers(outputs)
    more, ends = bounds_of(card, outputs)
    names = tuple(named_columns([*columns, *more], labels))
    classes = labels if names[: len(columns)] != tuple(columns) else ()
    at = columns.index("label") if classes and "label" in columns else -1
    rows: list[list[float | str]] = [
        [*numbers, *(ends[i] if ends else ())] for i, numbers in enumerate(values)
    ]
    for row in rows if at >= 0 else ():
        row[at] = classes[int(row[at])]
    return names, rows


def uncertainty(card: Card) -> list[str]:
    """Return lines on the reliability of a model's answers by its card, including what the card lacks."""
    task, columns = card.task, []
    if task in PROBABILITIES and not card.temperature:
        columns.append(
            "the model card has no temperature, so the probabilities are not calibrated: export --temperature"
        )
    if known := card.conformal:
        columns.append(in_words(known))
    elif task in (*SETS, *INTERVALS):
        what = "sets of classes" if task in SETS else "intervals"
        columns.append(
            f"the model card has no conformal threshold, so there are no {what}: export --conformal"
        )
    else:
        columns.append(f"there are no sets or intervals for {task}")
    return columns


def check_schema(schema: Schema, card: Card, data: str) -> list[int]:
    """Return each model column's place in the data file, by name; empty if the order is the same.

    A line on standard error reports a mapping, or that names cannot be compared. Raises UserError if they do not fit.
    """
    agreed = card.schema_parsed
    of_one_label = card.task in (*ONE_CLASS, "segmentation")
    if reason := difference(
        schema,
        agreed,
        "the model has",
        subset=of_one_label,
        mend="rename them in the data file",
    ):
        raise UserError(f"{data} has {reason}")
    if agreed.names and not schema.names:
        print(
            f"note: {data} names no columns: they are taken to be {few(agreed.names, 8)}",
            file=sys.stderr,
        )
    if what := find_moved(schema, agreed):
        print(
            f"note: {data} has its {' and '.join(what)} in another order: mapped by name",
            file=sys.stderr,
        )
    return order_of(schema.names, agreed.names)


# Outlines of volumes


def check_folder(folder: Path, samples: NewSamples) -> None:
    """Raise UserError if outlines cannot be written to this folder, before anything is predicted."""
    if samples.reading is None or samples.reading.volume is None:
        raise UserError(
            f"--masks {folder}: a folder is for volumes, which scans give; name a file that ends in .npz"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"--masks {folder} is there already, and not an empty folder: name another one"
        )
    with as_user_error():
        check_writable(sample.files for sample in samples.x.samples)


def write_outlines(
    folder: Path, inputs: NewSamples, outlines: Iterable[Array], classes: Sequence[str]
) -> list[str]:
    """Write the outlines, each (d, h, w), as 0001.nii.gz, for a series also 0001.dcm; return the NIfTI files.

    ``classes``: names of the classes 0, 1, .... Raises UserError, one line, also where a volume cannot be read.
    """
    assert inputs.reading is not None
    samples, names = inputs.x.samples, list[str]()
    try:
        for sample, mask in zip(samples, outlines, strict=True):
            to = folder / f"{len(names) + 1:04}"
            names.append(
                write_masks(to, mask, sample.files, classes, sample.where, inputs.reading)[
                    0
                ].name
            )
    except DataError as error:
        done = f"; {len(names)} of {len(samples)} outlines are in {folder}" if names else ""
        raise UserError(f"{error}{done}") from None
    return names
