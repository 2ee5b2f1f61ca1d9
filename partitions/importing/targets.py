"""Labels of an import: their task, and their form in a data file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import unknown_name
from partitions.importing.images import SampleSource
from partitions.importing.streams import probe_masks
from partitions.importing.tables import LONGEST_SHOWN
from partitions.labels import MOST_CLASSES, ONE_CLASS, Fault, join_survival, read_count, read_labels, short_numbers
from partitions.recipes.cells import is_number
from partitions.recipes.reading import ReadOptions
from partitions.schema import tidy
from partitions.splits import Array

LONGEST_LABEL = 200  # characters; a longer text is a note, not the name of a class


def find_import_task(samples: Sequence[SampleSource], task: str, classes: Sequence[str], survival: bool) -> str:
    """Return the task; "auto" is decided by the number of labels and their values."""
    if task != "auto":
        return task
    if survival or samples[0].mask or samples[0].masks:
        return "survival" if survival else "segmentation"
    if len(samples[0].labels) > 1:
        return (
            "multilabel" if {text for sample in samples for text in sample.labels} <= {"0", "1", "-1"} else "regression"
        )
    texts = {sample.labels[0] for sample in samples}
    measured = all(map(is_number, texts)) and any(float(text) != int(float(text)) for text in texts)
    return "regression" if measured and not classes else "multiclass"


def read_answers(
    samples: Sequence[SampleSource],
    columns: Sequence[str],
    classes: Sequence[str],
    task: str,
    reading: ReadOptions,
    known: int = 0,
) -> tuple[Array, tuple[str, ...], int]:
    """Return the labels in the form of a data file (``labels.py``; masks blank), their names, and their number.

    Names are of classes that had to be numbered, of findings or of measurements. ``known``: the number of classes in a
    recipe.
    """
    wanted = {"segmentation": 0, "survival": 2, "multiclass": 1, "ordinal": 1}.get(task, len(samples[0].labels))
    if len(samples[0].labels) != wanted or bool(samples[0].mask or samples[0].masks) != (task == "segmentation"):
        needs = {"segmentation": "a column mask", "survival": "columns of time and event"}.get(task, "one label column")
        raise DataError(f"task = {task} needs {needs}")
    if task == "segmentation":
        y, _, outputs = probe_masks(samples, reading)
        names = tuple(classes) or (("background", *(own.removesuffix("?") for own in reading.outlines)))
        names = names if len(names) > 1 else ()
        if names and len(names) < outputs:
            raise DataError(f"masks have classes 0 to {outputs - 1}, and --labels names {len(names)}: name each")
        return y, names, max(outputs, len(names))
    if task in ONE_CLASS:
        y, names = number_labels(samples, classes, known)
        return y, names, len(names) or known or read_count(task, {}, {"all": y})
    for sample in samples:
        for column, text in zip(columns, sample.labels, strict=True):
            if not is_number(text):
                raise DataError(f"{sample.where}: {column} is {text!r}, no number; fill or drop such rows")
    values = np.array([[float(text) for text in sample.labels] for sample in samples])
    try:
        if task == "survival":
            return join_survival({"time": values[:, 0], "event": values[:, 1]})["y"], (), 1
        y = read_labels(task, "the label", values, values)
    except Fault as fault:
        raise DataError(f"{', '.join(columns)}: {fault.detail}; {fault.fix}") from None
    return y, tuple(columns), len(columns)


def number_labels(
    samples: Sequence[SampleSource], labels: Sequence[str], known: int = 0
) -> tuple[Array, tuple[str, ...]]:
    """Return labels as int64 (n,), and the classes' names if they had to be numbered. ``known``: their number."""
    for sample in samples:
        if len(sample.labels[0]) > LONGEST_LABEL:
            raise DataError(
                f"{sample.where}: the label is a text of {len(sample.labels[0])} characters; name it with --label"
            )
    found = sorted({sample.labels[0] for sample in samples})
    if labels:
        names = _declared_names(samples, labels)
    elif all(text.isascii() and text.isdigit() for text in found):
        return _class_numbers(samples, known), ()
    else:
        names = _found_names(samples, found)
    number = {name: i for i, name in enumerate(names)}
    return np.array([number[sample.labels[0]] for sample in samples], np.int64), names


def _declared_names(samples: Sequence[SampleSource], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the classes that --labels names. Raises DataError where a sample has another one."""
    if len(set(labels)) != len(labels):
        raise DataError("labels names a class twice")
    for sample in samples:
        if sample.labels[0] not in labels:
            raise unknown_name(f"label in {sample.where}:", sample.labels[0], labels)
    return tuple(labels)


def _class_numbers(samples: Sequence[SampleSource], known: int) -> Array:
    """Return labels that are class numbers, int64 (n,). Raises DataError where they cannot be all classes from 0."""
    for sample in samples:
        if int(sample.labels[0]) >= (known or MOST_CLASSES):
            raise DataError(f"{sample.where}: the label is {sample.labels[0]}; labels are class numbers 0, 1, ...")
    numbers = sorted({int(sample.labels[0]) for sample in samples})
    if not known and (len(numbers) == 1 or numbers[-1] >= len(numbers)):
        raise unnumbered(samples, short_numbers(numbers))
    return np.array([int(sample.labels[0]) for sample in samples], np.int64)


def _found_names(samples: Sequence[SampleSource], found: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of labels that are texts, in order. Raises DataError for one class, or for two spellings."""
    check_spellings(samples)
    if len(found) == 1:
        raise unnumbered(
            samples, found[0] if len(found[0]) <= LONGEST_SHOWN else f"a text of {len(found[0])} characters"
        )
    return tuple(found)


def check_spellings(samples: Sequence[SampleSource]) -> None:
    """Raise DataError for two spellings of one label, or for a mark among labels that are words."""
    first: dict[str, str] = {}
    words = any(any(map(str.isalnum, sample.labels[0])) for sample in samples)
    mend = "write them alike, or make them one in the recipe with `label-values`"
    for sample in samples:
        label = sample.labels[0]
        if first.setdefault(tidy(label).casefold(), label) != label:
            other = first[tidy(label).casefold()]
            raise DataError(
                f"{sample.where}: the label is {label!r}, elsewhere {other!r}: case and blanks count; {mend}"
            )
        if words and not any(map(str.isalnum, label)):
            raise DataError(
                f"{sample.where}: the label is {label!r}; fill it or drop the row, or name all classes with --labels"
            )


def unnumbered(samples: Sequence[SampleSource], found: str) -> DataError:
    """Return the error for labels that cannot be all classes: only one, or numbers with gaps."""
    return DataError(
        f"the {len(samples)} labels are {found}: not all classes from 0 on, two at least, are here; "
        "name every class of the federation, in order, with --labels A,B"
    )
