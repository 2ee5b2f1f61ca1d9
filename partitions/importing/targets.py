"""Labels of an import: their task, and their form in a data file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partitions.array_names import SEVERAL_LABELS
from partitions.common.errors import DataError
from partitions.common.names import Names, plain_text, unknown_name
from partitions.importing.options import Take
from partitions.importing.readers.dicom import IDENTITY
from partitions.importing.readers.reader import Samples, pseudonym
from partitions.importing.streams import open_masks
from partitions.importing.table_labels import Label, label_columns, line_labels, split_of
from partitions.importing.tables import read_lines
from partitions.labels import (
    MOST_CLASSES,
    ONE_CLASS,
    VOID,
    Fault,
    check_masks,
    join_survival,
    presence,
    read_count,
    read_labels,
    short_numbers,
)
from partitions.recipes.cells import is_number
from partitions.recipes.people import check_identifiers, patient_column
from partitions.recipes.pictures import AnyRecipe
from partitions.recipes.pipeline import shorten_cell
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array

LONGEST_LABEL = 200  # characters; a longer text is a note, not the name of a class


def find_import_task(
    samples: Samples, task: str, classes: Sequence[str], survival: bool
) -> str:
    """Return the task; "auto" is decided by the number of labels and their values."""
    if task != "auto":
        return task
    if survival or samples[0].masks:
        return "survival" if survival else "segmentation"
    if len(samples[0].labels) > 1:
        values = {
            plain_label(text) for text in {text for sample in samples for text in sample.labels}
        }
        return "multilabel" if values <= {"0", "1", "-1"} else "regression"
    texts = {sample.labels[0] for sample in samples}
    measured = all(map(is_number, texts)) and any(
        float(text) != int(float(text)) for text in texts
    )
    return "regression" if measured and not classes else "multiclass"


@dataclass(frozen=True)
class Answers:
    """Labels ``y`` in the form of a data file (masks unread), and which classes each sample has (``labels.presence``).

    ``names``: of classes that had to be numbered, of findings or of measurements; ``outputs``: their number;
    ``binary``: masks have 0 and 255 alone.
    """

    y: Any
    names: Names
    outputs: int
    present: Array | None
    binary: bool = False


def read_answers(
    samples: Samples,
    columns: Sequence[str],
    classes: Sequence[str],
    task: str,
    reading: ReadOptions,
    recipe: AnyRecipe | None,
) -> Answers:
    """Return the labels of samples. ``recipe``: that by which they are read, if there is one."""
    known = recipe.outputs if recipe else 0
    wanted = {"segmentation": 0, "survival": 2, "multiclass": 1, "ordinal": 1}.get(
        task, len(columns)
    )
    if len(samples[0].labels) != wanted or bool(samples[0].masks) != (task == "segmentation"):
        needs = {"segmentation": "a column mask", "survival": "columns of time and event"}.get(
            task, "one label column"
        )
        raise DataError(f"task = {task} needs {needs}")
    if task == "segmentation":
        answers = read_masks(samples, classes, reading, known)
        if recipe and answers.binary and not reading.binary_masks:
            raise DataError(
                f"{samples[0].where}: its mask, as all others, has 0 and 255 alone, and 255 does not count by the "
                "recipe; if it is what was drawn, write binary-masks = true under [pictures]"
            )
        return answers
    if task in ONE_CLASS:
        y, names = number_labels(samples, classes, known)
        outputs = len(names) or known or read_count(task, {}, {"all": y})
        return Answers(y, names, outputs, presence(task, y, outputs))
    for sample in samples:
        for column, text in zip(columns, sample.labels, strict=True):
            if not is_number(text):
                raise DataError(
                    f"{sample.where}: {column} is {text!r}, no number; fill or drop such rows"
                )
    values = np.array([[float(text) for text in sample.labels] for sample in samples])
    names = Names() if task == "survival" else tuple(columns)
    try:
        if names:
            y = read_labels(task, "the label", values, values)
        else:
            y = join_survival({"time": values[:, 0], "event": values[:, 1]})["y"]
    except Fault as fault:
        raise DataError(f"{', '.join(columns)}: {fault.detail}; {fault.fix}") from None
    outputs = len(names) or 1
    return Answers(y, names, outputs, presence(task, y, outputs))


def add_unlabelled(answers: Answers, unlabelled: Names, task: str) -> Answers:
    """Return the answers with labels that no sample is labelled with. Raises DataError where the task has none."""
    if not unlabelled:
        return answers
    names, more = answers.names, tuple(n for n in unlabelled if n not in answers.names)
    if task not in SEVERAL_LABELS or not names:
        raise DataError(
            f"--unlabelled {','.join(unlabelled)}: it is of findings and of outlines, and all others need names "
            "(--label, --labels)"
        )
    y, present = answers.y, answers.present
    for name in set(unlabelled) & {*names}:
        if task == "multilabel" or (
            present is not None and present[:, names.index(name)].any()
        ):
            raise DataError(f"--unlabelled {name}: samples are labelled with it")
    if task == "multilabel":
        y = np.hstack([y, np.full((len(y), len(more)), -1, y.dtype)])
    outputs = len(names) + len(more)
    return Answers(y, (*names, *more), outputs, present)


def read_masks(
    samples: Samples, classes: Sequence[str], reading: ReadOptions, known: int
) -> Answers:
    """Return masks as labels. Raises DataError for values that leave numbers out, unless all classes are named."""
    masks, seen, binary = open_masks(samples, reading)
    names = tuple(classes) or (
        ("background", *(name.removesuffix("?") for name in reading.outlines))
    )
    names = names if len(names) > 1 else ()
    outputs = max(int(np.flatnonzero(seen[:, :VOID].any(0)).max(initial=1)) + 1, known)
    if names and len(names) < outputs:
        raise DataError(
            f"masks have classes 0 to {outputs - 1}, and --labels names {len(names)}: name each"
        )
    if not names and not known:
        try:
            check_masks(np.any(seen, axis=0))
        except Fault as fault:
            how = "name every class of the federation, in order, with --labels background,A,B"
            raise DataError(f"the source {fault.detail}: {how}") from None
    outputs = max(outputs, len(names))
    return Answers(masks, names, outputs, presence("segmentation", seen, outputs), binary)


def plain_label(text: str) -> str:
    """Return a whole number as 1 for 1.0 and 01; any other label as it is."""
    if not is_number(text) or not float(text).is_integer():
        return text
    return str(int(text) if text.lstrip("+-").isdigit() else int(float(text)))


def number_labels(
    samples: Samples, labels: Sequence[str], known: int = 0
) -> tuple[Array, Names]:
    """Return labels as int64 (n,), and the classes' names if they had to be numbered. ``known``: their number.

    ``labels``: those that --labels names. Raises DataError where a sample has another one, and for numbers or texts
    that cannot be all classes.
    """
    texts = [sample.labels[0] for sample in samples]
    first = dict[str, str]()  # each label's first place
    for text, sample in zip(texts, samples, strict=True):
        first.setdefault(text, sample.where)
    for text, where in first.items():
        if len(text) > LONGEST_LABEL:
            raise DataError(
                f"{where}: the label is a text of {len(text)} characters; name it with --label"
            )
    plain = {text: plain_label(text) for text in first}
    names = tuple(labels)
    if labels:
        if len(set(labels)) != len(labels):
            raise DataError("labels names a class twice")
        for text, where in first.items():
            if text not in names and plain[text] not in names:
                raise unknown_name(f"label in {where}:", text, names)
    elif all(text.isascii() and text.isdigit() for text in plain.values()):
        numbers = _class_numbers(first, plain, known, len(samples))
        return np.array([numbers[text] for text in texts], np.int64), ()
    else:
        check_spellings(first)
        names = tuple(sorted({*plain.values()}))
        if len(names) == 1:
            raise numbering_error(len(samples), shorten_cell(names[0]))
    number = {text: names.index(text if text in names else plain[text]) for text in first}
    return np.array([number[text] for text in texts], np.int64), names


def _class_numbers(
    first: Mapping[str, str], plain: Mapping[str, str], known: int, count: int
) -> dict[str, int]:
    """Return labels that are class numbers as such. Raises DataError where they cannot be all classes from 0."""
    number = {text: int(label) for text, label in plain.items()}
    for text, where in first.items():
        if number[text] >= (known or MOST_CLASSES):
            raise DataError(f"{where}: the label is {text}; labels are class numbers 0, 1, ...")
    numbers = sorted(set(number.values()))
    if not known and (len(numbers) == 1 or numbers[-1] >= len(numbers)):
        raise numbering_error(count, short_numbers(numbers))
    return number


def check_spellings(first: Mapping[str, str]) -> None:
    """Raise DataError for two spellings of one label, or for a mark among labels that are words."""
    spelled: dict[str, str] = {}
    words = any(any(map(str.isalnum, label)) for label in first)
    mend = "write them alike, or make them one in the recipe with `label-values`"
    for label, where in first.items():
        other = spelled.setdefault(plain_text(label), label)
        if plain_label(other) != plain_label(label):
            raise DataError(
                f"{where}: the label is {label!r}, elsewhere {other!r}: case and blanks count; {mend}"
            )
        if words and not any(map(str.isalnum, label)):
            raise DataError(
                f"{where}: the label is {label!r}; fill it or drop the row, or name all classes with --labels"
            )


def numbering_error(count: int, labels: str) -> DataError:
    """Return the error for labels that cannot be all classes: only one, or numbers with gaps."""
    return DataError(
        f"the {count} labels are {labels}: not all classes from 0 on, two at least, are here; "
        "name every class of the federation, in order, with --labels A,B"
    )


# Names of the columns by which a csv may be joined, in lower case without punctuation.
KEYS = {
    **dict.fromkeys(("study", "studyuid", "studyinstanceuid"), "study"),
    **dict.fromkeys(("accession", "accessionnumber"), "accession"),
    **dict.fromkeys(("patient", "patientid"), "patient"),
}
Answer = tuple[Names, str, str]  # labels, split, patient


@dataclass(frozen=True)
class Joined:
    """A csv's answer for each study, None without one; ``by``: the column of the join; notes on the rest."""

    answers: list[Answer | None]
    columns: Names
    notes: list[str]
    by: str
    patient: str


def names_what(column: str) -> str:
    """Return ``study``, ``accession`` or ``patient`` for a column's name, or "" for another column."""
    return KEYS.get("".join(c for c in column.lower() if c.isalnum()), "")


def join_key(header: Sequence[str]) -> str:
    """Return the column by which a csv can be joined to studies, or ""."""
    return next((name for kind in IDENTITY for name in header if names_what(name) == kind), "")


def join_labels(
    table: Path, studies: Sequence[Mapping[str, str]], label: Label, take: Take
) -> Joined:
    """Join a csv of labels to studies' identities. Raises DataError where its columns or lines do not allow it."""
    lines = read_lines(table, take)
    header = lines.header
    column = join_key(header)
    if not column:
        raise DataError(
            f"{table} has no column study, accession or patient by which its labels belong to DICOM files"
        )
    kind = names_what(column)
    columns = label_columns(table, header, label, ("label",))
    if named := list(filter(names_what, columns)):
        raise DataError(f"{table}: column {named[0]} names studies or patients; it is no label")
    patients = next((name for name in header if names_what(name) == "patient"), "")
    if take.patient or not patients:
        patients = patient_column(lines, take.patient, columns)
    for name in (column, patients):
        check_identifiers(lines, name)
    known: dict[str, tuple[str, Answer]] = {}
    for line in lines:
        where, row = line
        key = pseudonym(row[column])
        if not key:
            raise DataError(f"{where} has no {column}")
        whose = row[patients] if patients else ""
        answer = line_labels(line, columns, take.decimal), split_of(line), whose
        if key in known and known[key][1] != answer:
            raise DataError(
                f"{where} says something else of the same {kind} than {known[key][0]}"
            )
        known[key] = where, answer
    keys = [study[kind] for study in studies]
    answers = [known[key][1] if key in known else None for key in keys]
    if not any(answers):
        raise DataError(
            f"{table}: its column {column} names none of the {len(studies)} studies"
        )
    used = {*keys} & known.keys()
    notes = []
    if without := answers.count(None):
        notes.append(f"{without} of {len(studies)} studies are not in {table}: left out")
    if len(used) < len(known):
        notes.append(
            f"{len(known) - len(used)} of {len(known)} in column {column} of {table} have no DICOM files here"
        )
    return Joined(answers, columns, notes, by=kind, patient=patients)
