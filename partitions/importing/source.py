"""A hospital's pictures or table made into a silo data file (`silofl import`).

Sources:

* a folder with one csv of columns ``file, label`` (and ``split``, ``patient``), or that csv itself; files are pictures,
  DICOM or NIfTI
* a folder with one folder of pictures per class; or ``train``, ``val`` and ``test`` folders of such; below the classes
  there may be a folder per patient
* a folder of DICOM files as a hospital exports them, with a csv of labels by study or patient (``dicom_series.py``)
* a csv table: the column ``label``, or the one named, is the label, all others are numbers; or one is a text
  (``notes.py``), with the numbers that are named beside it

Several label columns of 0, 1 or -1 (not known) are findings, of other numbers measurements; one column of numbers that
are not whole is a measurement, too. A column of times and one of events (1, or 0 for censored) are survival, and a
csv's column ``mask`` names a picture of classes for each picture: outlines. ``task`` says it where this does not.

Labels that are whole numbers stay as they are. Others are numbered in the order of ``labels``, or else in
alphabetical order, on which hospitals agree only if each has every class: where they may not, name them.

Without a ``split`` column 20 % of the samples are for testing and 20 % of the rest for validation, drawn by
seed. Where a column or a folder tells patients apart, or DICOM files say whose they are, all samples of a patient go
to one side: no patient is in both training and test. A split that is given and does otherwise is refused. The
data file then has patients' numbers, counted from 0 in the order of the samples, and no identifier (``patients.py``).

Pictures are looked at first, all of them, and then read one by one into the file: memory does not grow with them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.array_names import SPLITS
from partitions.common.errors import DataError
from partitions.importing.csv_source import Found
from partitions.importing.discovery import find_rows
from partitions.importing.division import assign_splits, label_notes, number_patients, patient_notes, rare_notes
from partitions.importing.images import SampleSource, kind_of, read_mask
from partitions.importing.new_rows import new_inputs, new_pictures
from partitions.importing.notes import Take, copies, read_inputs
from partitions.importing.options import DEFAULTS, ImportOptions
from partitions.importing.streams import count_notes, describe, draft_pictures, probe_all, read_pictures, rows_of
from partitions.importing.targets import find_import_task, read_answers
from partitions.inputs import describe_inputs
from partitions.labels import ONE_CLASS, Fault, describe_labels
from partitions.npz import write_npz
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.pipeline import check_fills, fit, gaps_of, transform
from partitions.recipes.recipe import Recipe, with_fills
from partitions.schema import tidy
from partitions.silo_file import make_schema, read_silo_file, write_silo_file, written_labels, written_schema
from partitions.splits import Array, SiloData, Split, inputs_of
from partitions.subgroups import check_names
from partitions.tokens import parse_vocabulary

FEWEST_DIVIDED = 3  # patients; of fewer there is none for a part


@dataclass(frozen=True)
class Imported:
    """Result of an import. ``label_names``: of classes that had to be numbered, of findings, of measurements;
    ``notes``: what was left out, and what the hospital must look at; ``recipe``: of a table, as it was used, or of
    ``pictures``.
    """

    file: Path
    description: str
    label_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    pictures: PictureRecipe | None = None
    divided: bool = True

    @property
    def data(self) -> SiloData:
        """The samples, read from the file."""
        return read_silo_file(self.file)

    def __str__(self) -> str:
        """Samples per split, what they are, and the number of each named class."""
        return self.description + "".join(f"\n{i} = {name}" for i, name in enumerate(self.label_names))


def import_source(source: str | Path, out: str | Path, options: ImportOptions = DEFAULTS) -> Imported:
    """Read pictures, scans or a table, and write them as a silo data file; one picture at a time is in memory.

    Pictures become uint8, those of more than 8 bits float32 in 0..1; if any is in colour all are.

    Raises DataError, naming file and line, for anything that cannot be read; nothing is written then.
    """
    source, out = Path(source), Path(out)
    check_paths(source, out, options.overwrite)
    options = with_recipe(options)
    with reading(source):
        found = find_rows(source, options)
        few_or_unlabelled = not found.labelled or len(np.unique(number_patients(found.rows))) < FEWEST_DIVIDED
        if options.recipe and (not found.columns or few_or_unlabelled):
            return import_whole(out, found, options.recipe, options)
        if options.pictures and few_or_unlabelled:
            return import_pictures(out, found, options.pictures, options)
        made = collect(source, found, options)
    notes = (*made.notes, *copies(made.samples, made.places))
    write_collected(out, made, options)
    return Imported(out, summary(made.data), made.label_names, made.feature_names, notes, made.recipe, made.pictures)


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Context that names the source in every fault. Raises DataError."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{source} cannot be read ({error})") from error
    except Fault as fault:
        raise DataError(f"{source}: {fault.detail}; {fault.fix}") from None


def import_whole(out: Path, found: Found, recipe: Recipe, options: ImportOptions) -> Imported:
    """Write new rows as one part (``x``): to predict, because they have no labels or are too few to be divided."""
    x, vocabulary, notes = new_inputs(found, recipe)
    arrays = {f"x_{name}" if name else "x": own for name, own in inputs_of(x).items()}
    names: tuple[str, ...] = ()
    if found.columns:
        y, names, _ = read_answers(
            found.rows, found.columns, recipe.classes, recipe.task, options.reading, recipe.outputs
        )
        arrays |= written_labels("", y, recipe.task)
    if any(row.patient for row in found.rows):
        arrays["patient"] = number_patients(found.rows)
    if vocabulary:
        arrays["vocabulary"] = np.array(vocabulary)
    schema = make_schema(recipe.features, tuple(map(tidy, recipe.classes)))
    write_npz(out, arrays | written_schema(schema) | {"recipe": np.array(recipe.json)})
    why = "too few to be divided" if found.columns else "without labels"
    text = f"{len(x)} samples, {why}, in one part: {describe_inputs(x)}"
    columns = tuple(f.name for f in recipe.features)
    return Imported(out, text, names, columns, (*found.notes, *notes), recipe, divided=False)


def import_pictures(out: Path, found: Found, recipe: PictureRecipe, options: ImportOptions) -> Imported:
    """Write new pictures as one part (``x``): to predict, because they have no labels or are too few to be divided."""
    pictures, infos = new_pictures(found, recipe)
    like, samples = pictures.like, pictures.samples
    arrays, streams = {"x": like}, {"x": iter(pictures)}
    if like.dtype != np.uint8:
        arrays["x"] = np.moveaxis(like, -1, 1)
        streams["x"] = (np.moveaxis(picture, -1, 0) for picture in pictures)
    names: tuple[str, ...] = ()
    if found.labelled:
        y, names, _ = read_answers(samples, found.columns, recipe.classes, recipe.task, options.reading, recipe.outputs)
        arrays |= written_labels("", y, recipe.task)
        if recipe.task == "segmentation":
            streams["y"] = (read_mask(sample, options.reading) for sample in samples)
    if any(sample.patient for sample in samples):
        arrays["patient"] = number_patients(samples)
    schema = make_schema((), tuple(map(tidy, recipe.classes)))
    write_npz(out, arrays | written_schema(schema) | {"recipe": np.array(recipe.json)}, streams)
    why = "too few to be divided" if found.labelled else "without labels"
    text = f"{len(like)} samples, {why}, in one part: {describe_inputs(like)}"
    return Imported(out, text, names, (), (*found.notes, *infos), None, recipe, False)


def read_rows(source: Path, options: ImportOptions, rows: Sequence[int]) -> SiloData:
    """Some rows of a table, read as the options' recipe says, and divided. Raises DataError."""
    options = with_recipe(options)
    with reading(source):
        found = find_rows(source, options)
        if not found.columns or found.table is None:
            raise DataError(f"{source} has no labels")
        some = replace(found, rows=[found.rows[i] for i in rows], table=found.table[list(rows)])
        return collect(source, some, options).data


def with_recipe(options: ImportOptions) -> ImportOptions:
    """The options as their recipe has them, if there is one."""
    if own := options.pictures:
        take = Take(patient=own.patient or None)
        made = replace(options, label=None, labels=own.classes, task=own.task, seed=own.seed, take=take)
        return replace(made, survival=(own.label[0], own.label[1]) if own.task == "survival" else None)
    recipe = options.recipe
    if recipe is None:
        return options
    take = Take(patient=recipe.patient or None)
    if recipe.text:
        take = replace(take, text=recipe.text, vocabulary=recipe.vocabulary, length=recipe.length)
    return replace(options, labels=recipe.classes, task=recipe.task, seed=recipe.seed, take=take)


def check_paths(source: Path, out: Path, overwrite: bool) -> None:
    """Raise DataError where the source is missing, or the file to write is there already."""
    if out.suffix != ".npz":
        raise DataError(f"{out} does not end in .npz")
    if out.exists() and not overwrite:
        raise DataError(
            f"{out} is there already, and with it who is for testing; name another file, or say --overwrite"
        )
    if not source.exists():
        raise DataError(f"there is no {source}; name a folder of pictures or a csv file")


@dataclass(frozen=True)
class Collected:
    """The samples of a source, divided; pictures and masks have shape and type only, until they are written."""

    samples: list[SampleSource]
    data: SiloData
    places: Array  # the split of each sample, text (n,)
    label_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    notes: tuple[str, ...]
    recipe: Recipe | None = None
    pictures: PictureRecipe | None = None
    gaps: Array | None = None  # of a table: which values are filled, bool (n, columns)

    @property
    def in_files(self) -> bool:
        """Return whether the inputs are pictures or scans, each in a file of its own."""
        return bool(self.samples[0].file)

    def order(self) -> dict[str, Array]:
        """The samples' places in the source, per split."""
        return {split: np.flatnonzero(self.places == split) for split in SPLITS}

    def gaps_by_part(self) -> dict[str, Array]:
        """Which values are filled, per split; empty where none is."""
        if self.gaps is None or not self.gaps.any():
            return {}
        return {split: self.gaps[chosen] for split, chosen in self.order().items()}


def collect(source: Path, found: Found, options: ImportOptions) -> Collected:
    """Read the samples' labels, look at their inputs, and divide them."""
    take = options.take
    samples, notes, recipe, pictures = found.rows, found.notes, found.recipe, options.pictures
    check_options(source, samples, options)
    task = find_import_task(samples, options.task, options.labels, options.survival is not None)
    if samples[0].file:
        infos = probe_all(samples, options.reading)
        samples = [
            replace(sample, patient=sample.patient or info.patient) for sample, info in zip(samples, infos, strict=True)
        ]
        notes = (*notes, *count_notes(infos))
    known = recipe.outputs if recipe else pictures.outputs if pictures else 0
    y, names, outputs = read_answers(samples, found.columns, options.labels, task, options.reading, known)
    patients = number_patients(samples)
    places = assign_splits(samples, patients, options.seed)
    notes = (*notes, *patient_notes(samples, take.patient), *label_notes(task, y, names, patients))
    named = any(sample.patient for sample in samples)
    check_places(source, places, f", of {len(np.unique(patients))} patients" if named else "")
    vocabulary, gaps = 0, None
    if recipe is None or found.table is None:
        x = describe(samples, infos, pictures)
        classes = tuple(names if task in (*ONE_CLASS, "segmentation") else options.labels)
        pictures = replace(
            pictures or draft_pictures(infos, x, options),
            label=found.columns,
            labels_by=found.by,
            patient=found.patient,
            task=task,
            classes=classes,
            outputs=outputs,
            seed=options.seed,
        )
    else:
        notes = (*notes, *rare_notes(found.table, recipe, patients))
        names = recipe.classes or names  # of a shared schema; what this file calls them is in its recipe
        classes = names if task in ONE_CLASS else recipe.classes
        recipe = filled(replace(recipe, task=task, classes=classes, outputs=outputs), found.table[places == "train"])
        x, vocabulary, more = read_inputs(samples, transform(found.table, recipe), take)
        notes, gaps = (*notes, *more), gaps_of(found.table, recipe)
    if task == "segmentation" and y.shape != x.shape[:-1]:
        raise DataError(f"masks are {y.shape[1:]}, their pictures {x.shape[1:-1]}")
    check_names(sample.subgroup for sample in samples)
    groups = np.array([sample.subgroup for sample in samples]) if options.subgroup else None
    features, used = recipe.features if recipe else (), recipe or pictures
    schema, text = make_schema(features, tuple(map(tidy, names))), used.json if used else ""
    parts = parts_of(x, y, patients if named else None, groups, places)
    data = SiloData(*parts, outputs, task, vocabulary, schema, text, options.cohort)
    return Collected(samples, data, places, names, tuple(f.name for f in features), notes, recipe, pictures, gaps)


def parts_of(
    x: Array, y: Array, patients: Array | None, groups: Array | None, places: Array
) -> tuple[Split, Split, Split]:
    """The samples of the training, the validation and the test part."""
    train, val, test = (
        Split(rows_of(x, chosen), rows_of(y, chosen), of(patients, chosen), of(groups, chosen))
        for chosen in (np.flatnonzero(places == split) for split in SPLITS)
    )
    return train, val, test


def filled(recipe: Recipe, training: Array) -> Recipe:
    """A table's recipe with the values that fill its gaps, from the training part. Raises DataError where none can."""
    check_fills(training, recipe)
    return with_fills(recipe, fit(training, recipe))


def check_places(source: Path, places: Array, people: str) -> None:
    """Raise DataError where no sample is for training, or none for testing."""
    if empty := next((split for split in ("train", "test") if split not in places), None):
        what = {"train": "training"}.get(empty, empty)
        raise DataError(f"{source} gives no {what} samples; it has {len(places)} samples in all{people}")


def of(values: Array | None, rows: Array) -> Array | None:
    """Return these rows of what is known of the samples."""
    return None if values is None else values[rows]


def check_options(source: Path, samples: list[SampleSource], options: ImportOptions) -> None:
    """Raise DataError for options that are not for such samples."""
    of_scans = options.window or options.slices > 1 or options.series
    if of_scans and all(sample.file is None or kind_of(sample.file) == "picture" for sample in samples):
        raise DataError(f"{source} has no scans; --window, --slices and --series are of DICOM and NIfTI")
    if options.subgroup and not any(sample.subgroup for sample in samples):
        raise DataError(f"{source}: --subgroup names a column of a csv that lists samples; none has a value there")
    if options.take.text:
        parse_vocabulary(options.take.vocabulary)  # before anything is read of the labels
    if (options.take.text or options.take.columns) and samples[0].file:
        raise DataError(f"{source} has pictures; --text and --columns are of a table")


def write_collected(out: Path, made: Collected, options: ImportOptions) -> None:
    """Write the samples, pictures and masks one by one."""
    samples, streams = made.samples, dict[str, Iterator[Array]]()
    like, reading = made.data.train.x, options.reading
    with tqdm(total=len(samples), desc="pictures", unit="", disable=not made.in_files) as progress:
        for split, chosen in made.order().items() if made.in_files else ():
            streams[f"x_{split}"] = read_pictures([samples[i] for i in chosen], reading, like, progress)
            if made.data.task == "segmentation":
                streams[f"y_{split}"] = (read_mask(samples[i], reading) for i in chosen)
        write_silo_file(out, made.data, streams=streams, gaps=made.gaps_by_part())


def summary(data: SiloData) -> str:
    """Samples per split, and what they are."""
    counts = f"train {len(data.train)}, val {len(data.val)}, test {len(data.test)} samples"
    if data.task == "multiclass":
        what = f"{data.classes} classes"
    else:
        what = describe_labels(data.task, {"train": data.train.y}, data.classes)
    return f"{counts}: {describe_inputs(data.train.x)}\n{what}"
