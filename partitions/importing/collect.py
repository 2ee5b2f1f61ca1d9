"""The samples of a source: their labels are read, their inputs probed, and all are divided; then they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from partitions.array_names import SPLITS, make_schema
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
from partitions.importing.images import Samples, SampleSource, kind_of, read_mask
from partitions.importing.notes import read_inputs
from partitions.importing.options import ImportOptions
from partitions.importing.streams import (
    count_notes,
    describe,
    draft_pictures,
    probe_all,
    read_pictures,
    rows_of,
)
from partitions.importing.table.source import Found
from partitions.importing.targets import find_import_task, read_answers
from partitions.labels import ONE_CLASS
from partitions.patients import check_names
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.pipeline import check_fills, fit, future_notes, gaps_of, transform
from partitions.recipes.recipe import Recipe, with_fills
from partitions.schema import few, tidy
from partitions.silo_file import write_silo_file
from partitions.splits import Array, Arrays, SiloData, Split
from partitions.tokens import parse_vocabulary

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Collected:
    """The divided samples of a source; pictures and masks have shape and type only, until they are written."""

    samples: list[SampleSource]
    data: SiloData
    places: Array  # the split of each sample, text (n,)
    label_names: Names
    feature_names: Names
    notes: Names
    recipe: Recipe | None = None
    pictures: PictureRecipe | None = None
    gaps: Array | None = None  # of a table: which values are filled, bool (n, columns)

    @property
    def in_files(self) -> bool:
        """Return whether the inputs are pictures or scans, each in its own file."""
        return bool(self.samples[0].file)

    def order(self) -> Arrays:
        """Return the samples' indices in the source, per split."""
        return {split: np.flatnonzero(self.places == split) for split in SPLITS}

    def gaps_by_part(self) -> Arrays:
        """Return which values are filled, per split; empty where none is."""
        if self.gaps is None or not self.gaps.any():
            return {}
        return {split: self.gaps[chosen] for split, chosen in self.order().items()}


def collect(source: Path, found: Found, options: ImportOptions) -> Collected:
    """Read the samples' labels, probe their inputs, and divide them."""
    take, samples, notes = options.take, found.rows, found.notes
    recipe, pictures = found.recipe, options.pictures
    check_options(source, samples, options)
    task = find_import_task(samples, options.task, options.labels, options.survival is not None)
    if samples[0].file:
        samples, infos = probe_all(samples, options.reading, options.faults)
        check_lost(found.rows, samples, task)
        notes = (*notes, *count_notes(infos))
    known = recipe.outputs if recipe else pictures.outputs if pictures else 0
    answers = read_answers(samples, found.columns, options.labels, task, options.reading, known)
    y, names, outputs = answers.y, answers.names, answers.outputs
    patients = number_patients(samples)
    if names and task in ONE_CLASS and not options.labels:
        check_class_names(names, y, patients)
    places = assign_splits(samples, patients, answers.present, options.seed)
    notes += tuple(patient_notes(samples, take.patient))
    notes += tuple(label_notes(task, answers, patients, places))
    named = any(sample.patient for sample in samples)
    check_places(source, places, f", of {len(np.unique(patients))} patients" * named)
    vocabulary, gaps = 0, None
    roles: dict[str, Any] = {"task": task, "outputs": outputs}
    if recipe is None or found.table is None:
        x = describe(samples, infos, pictures)
        classes = tuple(names if task in (*ONE_CLASS, "segmentation") else options.labels)
        roles |= {"classes": classes, **roles_of(found), "seed": options.seed}
        pictures = pictures or draft_pictures(infos, x.shape[1:], str(x.dtype), options.reading)
        pictures = pictures.model_copy(update=roles)
    else:
        notes += tuple(future_notes(found.table, recipe))
        notes += tuple(rare_notes(found.table, recipe, patients))
        # Of a shared schema; this file's own names are in its recipe
        names = recipe.classes or names
        roles["classes"] = names if task in ONE_CLASS else recipe.classes
        recipe = recipe.model_copy(update=roles)
        recipe, gaps = fit_recipe(found.table, recipe, places == "train")
        x, vocabulary, others = read_inputs(samples, transform(found.table, recipe), take)
        notes += tuple(others)
        clear(found.table)
    if task == "segmentation" and y.shape != x.shape[:-1]:
        raise DataError(f"masks are {y.shape[1:]}, their pictures {x.shape[1:-1]}")
    groups = subgroups_of(samples) if options.subgroup else None
    features = recipe.features if recipe else ()
    used = recipe or pictures
    schema = make_schema(features, tuple(map(tidy, names)))
    text = used.as_json if used else ""
    parts = parts_of(x, y, patients if named else None, groups, places)
    data = SiloData(*parts, outputs, task, vocabulary, schema, text, options.cohort)
    return Collected(samples, data, places, names, schema.names, notes, recipe, pictures, gaps)


def subgroups_of(samples: Samples) -> Array:
    """Return each sample's subgroup, text (n,). Raises Fault for too many, or a name that cannot be."""
    check_names(sample.subgroup for sample in samples)
    return np.array([sample.subgroup for sample in samples])


def roles_of(found: Found) -> dict[str, Any]:
    """Return the columns of pictures' labels and patients, as their recipe has them."""
    return {"label": found.columns, "labels_by": found.by, "patient": found.patient}


def clear(table: DataFrame) -> None:
    """Remove a table's columns: their cells would stay in memory beside the inputs."""
    for column in list(table):
        del table[column]


def fit_recipe(table: DataFrame, recipe: Recipe, train: Array) -> tuple[Recipe, Array]:
    """Return the recipe with what the training part fills gaps with, and which values of the table are filled."""
    check_fills(table, recipe, train)
    recipe = with_fills(recipe, fit(table, recipe, train))
    return recipe, gaps_of(table, recipe)


def parts_of(
    x: Array, y: Array, patients: Array | None, groups: Array | None, places: Array
) -> tuple[Split, Split, Split]:
    """Return the samples of the training, the validation and the test part."""
    train, val, test = (
        Split(rows_of(x, chosen), rows_of(y, chosen), of(patients, chosen), of(groups, chosen))
        for chosen in (np.flatnonzero(places == split) for split in SPLITS)
    )
    return train, val, test


def check_places(source: Path, places: Array, people: str) -> None:
    """Raise DataError where no sample is for training, or none for testing."""
    if empty := next((split for split in ("train", "test") if split not in places), None):
        what = {"train": "training"}.get(empty, empty)
        raise DataError(
            f"{source} gives no {what} samples; it has {len(places)} samples in all{people}"
        )


def of(values: Array | None, rows: Array) -> Array | None:
    """Return these rows of an optional array of the samples."""
    return None if values is None else values[rows]


def check_options(source: Path, samples: list[SampleSource], options: ImportOptions) -> None:
    """Raise DataError for options that do not apply to these samples."""
    of_scans = options.window or options.slices > 1 or options.series
    if of_scans and all(
        sample.file is None or kind_of(sample.file) in ("picture", "signal")
        for sample in samples
    ):
        raise DataError(
            f"{source} has no scans; --window, --slices and --series are of DICOM and NIfTI"
        )
    of_signals = options.reading.channels or options.reading.rate or options.reading.seconds
    if of_signals and not all(own.file and kind_of(own.file) == "signal" for own in samples):
        raise DataError(
            f"{source} has samples that are no signals; --channels, --rate and --seconds are of WFDB, EDF and DICOM "
            "waveforms"
        )
    if options.faults.skip and not samples[0].file:
        raise DataError(f"{source} is a table; --skip-bad is of pictures and scans")
    if options.subgroup and not any(sample.subgroup for sample in samples):
        raise DataError(
            f"{source}: --subgroup names a column of a csv that lists samples; none has a value there"
        )
    if options.take.text:
        parse_vocabulary(options.take.vocabulary)  # checked before labels are read
    if (options.take.text or options.take.columns) and samples[0].file:
        raise DataError(f"{source} has pictures; --text and --columns are of a table")


def write_collected(out: Path, made: Collected, options: ImportOptions) -> None:
    """Write the samples, pictures and masks one by one."""
    samples = made.samples
    streams = dict[str, Iterator[Array]]()
    like = made.data.train.x
    reading = made.pictures.reading if made.pictures else options.reading
    faults = Faults()
    with tqdm(
        total=len(samples), desc="pictures", unit="", disable=not made.in_files
    ) as progress:
        for split, chosen in made.order().items() if made.in_files else ():
            streams[f"x_{split}"] = read_pictures(
                [samples[i] for i in chosen], reading, like, progress, faults
            )
            if split == SPLITS[-1]:  # the last one, and never empty
                streams[f"x_{split}"] = then_check(streams[f"x_{split}"], faults, len(samples))
            if made.data.task == "segmentation":
                streams[f"y_{split}"] = (read_mask(samples[i], reading) for i in chosen)
        write_silo_file(out, made.data, streams=streams, gaps=made.gaps_by_part())


def then_check(stream: Iterator[Array], faults: Faults, total: int) -> Iterator[Array]:
    """Yield from a stream. Raises DataError behind its end, before the file gets its name, where files were damaged."""
    yield from stream
    faults.check(total)


def check_lost(before: Samples, after: Samples, task: str) -> None:
    """Raise DataError where no file of a class can be read."""
    lost = (
        {own.labels for own in before} - {own.labels for own in after}
        if task in ONE_CLASS
        else ()
    )
    if lost:
        raise DataError(
            f"no file of class {few(sorted(labels[0] for labels in lost))} can be read: mend them"
        )
