"""The samples of a source: their labels are read, their inputs probed, and all are divided.

Texts become tokens, alone or beside a table's numbers. Messages contain no text and no word of one, because it may name
a patient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from partitions.array_names import make_schema
from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.division import (
    assign_splits,
    check_class_names,
    label_notes,
    number_patients,
    patient_notes,
    rare_notes,
)
from partitions.importing.files import Faults
from partitions.importing.options import ImportOptions
from partitions.importing.readers.reader import ImageInfo, Samples
from partitions.importing.readers.registry import kind_of
from partitions.importing.streams import (
    check_expected,
    common_form,
    count_notes,
    draft_pictures,
    open_pictures,
    probe_all,
)
from partitions.importing.table_source import Listing
from partitions.importing.targets import Answers, add_unlabelled, find_import_task, read_answers
from partitions.labels import ONE_CLASS
from partitions.patients import check_names
from partitions.recipes.pictures import AnyRecipe
from partitions.recipes.pipeline import fit_fills, gaps_of, transform
from partitions.recipes.recipe import Recipe
from partitions.recipes.values import table_notes
from partitions.schema import few, tidy
from partitions.site_split import select_rows
from partitions.splits import SPLITS, Array, Arrays, Shape, SiloData, Split
from partitions.stored import together
from partitions.tokens import Hashed, encode, parse_vocabulary

Form = tuple[Shape, str]  # shape and type of all pictures
Labelled = tuple[
    Answers, Array, Array
]  # with the number of each sample's patient, and its part
TABLE, TEXT = "columns", "text"  # names of the two inputs of a sample
BINARY = (
    "masks have 0 and 255 alone: 255 is class 1, what was drawn (binary-masks in the recipe)"
)


@dataclass(frozen=True)
class Collected:
    """The divided samples of a source; pictures and masks are read when they are written.

    ``names``: of the labels; ``gaps``: per split of a table, which values are filled; empty where none is.
    """

    data: SiloData
    names: Names
    notes: Names
    used: AnyRecipe
    gaps: Arrays


def collect(source: Path, listing: Listing, options: ImportOptions) -> Collected:
    """Read the samples' labels, probe their inputs, and divide them.

    Raises DataError with all problems of the source, before any scan or mask is decoded.
    """
    classes = tuple(options.labels)
    task = find_import_task(listing.rows, options.task, classes, options.survival is not None)
    listing, infos, form, labelled = read_headers(source, listing, task, options)
    samples, (answers, patients, places) = listing.rows, labelled
    binary = answers.binary and not options.reading.binary_masks
    notes = [*listing.notes, *[BINARY] * binary, *count_notes(infos)]
    notes += patient_notes(samples, options.take.patient)
    notes += label_notes(task, answers, patients, places)
    named = any(sample.patient for sample in samples)
    order = {split: np.flatnonzero(places == split) for split in SPLITS}
    # Of a shared schema; this file's own names are in its recipe
    names = (listing.recipe and classes) or answers.names
    shown = names if task in (*ONE_CLASS, "segmentation") else classes
    roles = {"task": task, "outputs": answers.outputs, "classes": shown}
    x: Any
    used: AnyRecipe
    vocabulary, gaps = 0, dict[str, Array]()
    if listing.recipe is None:
        reading = replace(options.reading, binary_masks=answers.binary)
        recipe = options.pictures or draft_pictures(infos, *form, reading)
        roles |= {"label": listing.columns, "labels_by": listing.by, "seed": options.seed}
        used = pictures = recipe.model_copy(update={**roles, "patient": listing.patient})
        x = open_pictures(samples, pictures, Faults())
    else:
        table = listing.table
        used = fit_fills(table, listing.recipe.model_copy(update=roles), places == "train")
        x, vocabulary, more = read_table_inputs(samples, table, used)
        notes += (*table_notes(table, used), *rare_notes(table, used, patients), *more)
        if (filled := gaps_of(table, used)).any():
            gaps = {split: filled[rows] for split, rows in order.items()}
        for column in list(table):  # its cells would stay in memory beside the inputs
            del table[column]
    answers = add_unlabelled(replace(answers, names=names), options.unlabelled, task)
    if task == "segmentation" and answers.y.shape != x.shape[:-1]:
        raise DataError(f"masks are {answers.y.shape[1:]}, their pictures {x.shape[1:-1]}")
    groups = np.array([sample.subgroup for sample in samples]) if options.subgroup else None
    check_names(sample.subgroup for sample in samples)
    whole = Split(x, answers.y, patients if named else None, groups)
    train, val, test = (select_rows(whole, rows) for rows in order.values())
    labels, lacking = (tuple(map(tidy, each)) for each in (answers.names, options.unlabelled))
    schema = make_schema(used.features, labels, unlabelled=lacking)
    about = answers.outputs, task, vocabulary, schema, used.as_json, options.cohort
    data = SiloData(train, val, test, *about)
    return Collected(data, answers.names, tuple(notes), used, gaps)


def read_headers(
    source: Path, listing: Listing, task: str, options: ImportOptions
) -> tuple[Listing, Sequence[ImageInfo], Form, Labelled]:
    """Return the samples that can be read, image infos, the form of all pictures, and labels.

    Raises DataError with all problems, before any scan or mask is decoded.
    """
    problems, labelled = options.problems, None
    for fault in option_faults(source, listing, options):
        problems.add(fault)
    if listing.recipe and listing.recipe.text.column:
        with problems.collect():  # checked before labels are read
            parse_vocabulary(listing.recipe.text.vocabulary)
    if task != "segmentation":
        with problems.collect():
            labelled = label_samples(source, listing, task, options)
    if options.faults.skip:  # files are decoded to be left out
        problems.refuse(source)
    listing, infos, form = probed(listing, task, options)
    problems.refuse(source)
    if labelled is None or infos:  # headers name patients
        labelled = label_samples(source, listing, task, options)
    return listing, infos, form, labelled


def probed(
    listing: Listing, task: str, options: ImportOptions
) -> tuple[Listing, Sequence[ImageInfo], Form]:
    """Return the samples that can be read, their image infos, and the form of all; of a table nothing is probed.

    ``options.problems`` takes files that cannot be read, or that are unlike the others, and a class without a file.
    """
    rows, infos, form = listing.rows, list[ImageInfo](), (Shape(), "")
    if rows and rows[0].file:
        with options.problems.collect():
            samples, infos = probe_all(rows, options.reading, options.faults)
            lost = {row.labels for row in rows} - {row.labels for row in samples}
            if lost and task in ONE_CLASS:
                classes = few(sorted(labels[0] for labels in lost))
                raise DataError(f"no file of class {classes} can be read: mend them")
            listing = replace(listing, rows=samples)
            if options.pictures:
                check_expected(samples, infos, options.pictures)
            else:
                form = common_form(samples, infos)
    return listing, infos, form


def label_samples(
    source: Path, listing: Listing, task: str, options: ImportOptions
) -> Labelled:
    """Return labels, the number of each sample's patient, and the part of each sample.

    Raises DataError where none is for training, or none for testing, and where names of classes may be people's.
    """
    samples, classes = listing.rows, options.labels
    recipe = listing.recipe or options.pictures
    answers = read_answers(samples, listing.columns, classes, task, options.reading, recipe)
    patients = number_patients(samples)
    if answers.names and task in ONE_CLASS and not classes:
        check_class_names(answers.names, answers.y, patients)
    places = assign_splits(samples, patients, answers.present, options.seed)
    named = any(sample.patient for sample in samples)
    people = f", of {len(np.unique(patients))} patients" * named
    for split, what in (("train", "training"), ("test", "test")):
        if split not in places:
            raise DataError(
                f"{source} gives no {what} samples; it has {len(places)} samples in all{people}"
            )
    return answers, patients, places


def option_faults(source: Path, listing: Listing, options: ImportOptions) -> Iterator[str]:
    """Yield what does not apply to these samples."""
    samples = listing.rows
    kinds = {kind_of(sample.file) if sample.file else "row" for sample in samples}
    of_scans = options.window or options.slices > 1 or options.series
    if of_scans and kinds <= {"row", "picture", "signal"}:
        yield f"{source} has no scans; --window, --slices and --series are of DICOM and NIfTI"
    of_signals = options.reading.channels or options.reading.rate or options.reading.seconds
    if of_signals and kinds != {"signal"}:
        yield (
            f"{source} has samples that are no signals; --channels, --rate and --seconds are of WFDB, EDF and DICOM "
            "waveforms"
        )
    if options.faults.skip and not samples[0].file:
        yield f"{source} is a table; --skip-bad is of pictures and scans"
    if options.subgroup and not any(sample.subgroup for sample in samples):
        yield (
            f"{source}: --subgroup names a column of a csv that lists samples; none has a value there"
        )
    if (options.take.text or options.take.columns) and samples[0].file:
        yield f"{source} has pictures; --text and --columns are of a table"


def read_table_inputs(rows: Samples, table: Any, recipe: Recipe) -> tuple[Any, int, Names]:
    """Return the inputs of a table's rows by a recipe, the size of the vocabulary (0 without texts), and notes.

    ``table``: from ``recipes.pipeline.convert_columns``. Raises DataError for gaps without a value, and for a row
    without a word where the text is the only input.
    """
    unfit = [c.name for c in recipe.used if c.fill != "refuse" and c.fill_value is None]
    if unfit:
        raise DataError(
            f"the recipe has no fill-value for {few(unfit)}: import the rows for training with it first, and take the "
            "recipe that is written then (rows of fewer than three patients are not divided)"
        )
    values, text = transform(table, recipe), recipe.text
    if not text.column:
        return values, 0, ()
    vocabulary, note = parse_vocabulary(text.vocabulary)
    tokens = encode([row.text for row in rows], vocabulary, text.length)
    number = vocabulary.number if isinstance(vocabulary, Hashed) else {}
    sharing = sum(count for count in Counter(number.values()).values() if count > 1)
    counts = {
        f"{len(rows)} texts are cut at {text.length} tokens (--length)": tokens.cut,
        f"{tokens.words} words are not in the vocabulary": tokens.unknown,
        f"{len(number)} different words share a number with another one": sharing,
    }
    notes = [note, *(f"{count} of {what}" for what, count in counts.items() if count)]
    missing = (tokens.x == 0).all(axis=1) | np.array([not row.text for row in rows])
    tokens.x[missing] = 0
    alone = not values.shape[1]
    if missing.any() and alone:
        where = rows[int(missing.argmax())].where
        raise DataError(f"{where}: {text.column} has no word; fill or drop such rows")
    if missing.any():
        notes.append(
            f"{missing.sum()} of {len(rows)} samples have no text: it counts as missing"
        )
    x = tokens.x if alone else together({TABLE: values, TEXT: tokens.x})
    return x, vocabulary.size, tuple(notes)
