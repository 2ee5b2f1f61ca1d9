"""Conversion of a hospital's pictures or table to a silo data file (`silofl import`).

Sources:

* a folder with one csv of columns ``file, label`` (and ``split``, ``patient``), or that csv itself; files are pictures,
  DICOM or NIfTI
* a folder with one folder of pictures per class, or ``train``, ``val`` and ``test`` folders with these; below the
  classes there may be a folder per patient
* a folder of DICOM files from a hospital's export, with a csv of labels by study or patient (``dicom_series.py``)
* a csv table: the column ``label``, or the named one, is the label, all others are numbers; or one is a text
  (``notes.py``), beside the columns of numbers that are named

The task follows from the labels, or is set by ``task``:

* several columns of 0, 1 or -1 (unknown): findings; of other numbers: measurements
* one column of numbers that are not whole: a measurement
* a column of times and one of events (1, or 0 for censored): survival
* a column ``mask`` with the file of a picture of classes for each picture: outlines

Labels that are whole numbers do not change. Others are numbered in the order of ``labels``, or else in alphabetical
order. The latter agrees between hospitals only if each has every class; otherwise name the classes.

Without a ``split`` column 20 % of the samples are for testing and 20 % of the rest for validation, drawn by seed. Where
a column, a folder or DICOM files identify patients, all samples of a patient are in one part. A given split that
violates this is refused. The data file then has patients' numbers, counted from 0 in the order of the samples, and no
identifier (``patients.py``).

All pictures are probed first, and then read one by one into the file, so that memory does not grow with their number.
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
from partitions.importing.division import (
    FEWEST_DIVIDED,
    assign_splits,
    check_class_names,
    label_notes,
    number_patients,
    patient_notes,
    rare_notes,
)
from partitions.importing.files import Faults
from partitions.importing.images import SampleSource, has_binary_masks, kind_of, read_mask
from partitions.importing.notes import Take, copies, new_inputs, read_inputs
from partitions.importing.options import DEFAULTS, ImportOptions
from partitions.importing.streams import (
    count_notes,
    describe,
    draft_pictures,
    new_pictures,
    probe_all,
    read_pictures,
    rows_of,
)
from partitions.importing.targets import find_import_task, read_answers
from partitions.inputs import describe_inputs
from partitions.labels import ONE_CLASS, Fault, describe_labels
from partitions.npz import write_npz
from partitions.patients import check_names
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.pipeline import check_fills, fit, future_notes, gaps_of, transform
from partitions.recipes.recipe import Recipe, with_fills
from partitions.schema import few, tidy
from partitions.silo_file import (
    make_schema,
    read_silo_file,
    write_silo_file,
    written_labels,
    written_schema,
)
from partitions.splits import Array, SiloData, Split, inputs_of
from partitions.tokens import parse_vocabulary


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    * ``label_names``: of classes that had to be numbered, of findings, or of measurements.
    * ``notes``: what was left out, and what the hospital must check.
    * ``recipe``: that of a table, as used; ``pictures``: that of pictures.
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
        """Return the samples, read from the file."""
        return read_silo_file(self.file)

    def __str__(self) -> str:
        """Describe the samples per split, and the number of each named class."""
        return self.description + "".join(
            f"\n{i} = {name}" for i, name in enumerate(self.label_names)
        )


def import_source(
    source: str | Path, out: str | Path, options: ImportOptions = DEFAULTS
) -> Imported:
    """Read pictures, scans or a table, and write them as a silo data file; one picture at a time is in memory.

    Pictures become uint8, those of more than 8 bits float32 in 0..1; if one is in colour, all are.

    Raises DataError, naming file and line, for anything that cannot be read; then nothing is written.
    """
    source, out = Path(source), Path(out)
    check_paths(source, out, options.overwrite)
    options = replace(with_recipe(options), faults=Faults(options.faults.skip))
    with reading(source):
        found = find_rows(source, options)
        found, options = with_binary_masks(found, options)
        few_or_unlabelled = (
            not found.labelled or len(np.unique(number_patients(found.rows))) < FEWEST_DIVIDED
        )
        few_or_unlabelled = few_or_unlabelled or bool(options.recipe and not found.columns)
        if few_or_unlabelled and (options.recipe or options.pictures):
            return import_whole(out, found, options)
        made = collect(source, found, options)
    notes = (*made.notes, *copies(made.samples, made.places), *options.faults.notes)
    write_collected(out, made, options)
    return Imported(
        out,
        summary(made.data),
        made.label_names,
        made.feature_names,
        notes,
        made.recipe,
        made.pictures,
    )


def with_binary_masks(found: Found, options: ImportOptions) -> tuple[Found, ImportOptions]:
    """Return samples and options for masks of 0 and 255 alone. Raises DataError where the recipe says otherwise."""
    masks = [row for row in found.rows if row.mask or row.masks]
    if (
        not masks
        or options.reading.binary_masks
        or not has_binary_masks(masks, options.reading)
    ):
        return found, options
    if options.pictures:
        raise DataError(
            f"{masks[0].where}: its mask, as all others, has 0 and 255 alone, and 255 does not count by the recipe; if "
            "it is what was drawn, write binary-masks = true under [pictures]"
        )
    note = "masks have 0 and 255 alone: 255 is class 1, what was drawn (binary-masks in the recipe)"
    return replace(found, notes=(*found.notes, note)), replace(options, binary_masks=True)


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Context that adds the source to errors of reading. Raises DataError."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{source} cannot be read ({error})") from error
    except Fault as fault:
        raise DataError(f"{source}: {fault.detail}; {fault.fix}") from None


def import_whole(out: Path, found: Found, options: ImportOptions) -> Imported:
    """Write new samples as one part (``x``) for prediction, because they lack labels or are too few to be divided."""
    recipe, pictures = options.recipe, options.pictures
    samples, vocabulary, streams = found.rows, 0, dict[str, Iterator[Array]]()
    if recipe:
        x, vocabulary, notes = new_inputs(found.rows, found.table, recipe)
        arrays = {f"x_{name}" if name else "x": own for name, own in inputs_of(x).items()}
    else:
        assert pictures
        source, notes = new_pictures(found.rows, pictures, options.faults)
        x, samples, notes = source.like, source.samples, (*notes, *options.faults.notes)
        first = x.dtype != np.uint8  # channels first
        arrays = {"x": np.moveaxis(x, -1, 1) if first else x}
        streams["x"] = (np.moveaxis(picture, -1, 0) if first else picture for picture in source)
    names: tuple[str, ...] = ()
    used, labelled = recipe or pictures, found.columns if recipe else found.labelled
    assert used
    if labelled:
        made = read_answers(
            samples, found.columns, used.classes, used.task, options.reading, used.outputs
        )
        names = made.names
        arrays |= written_labels("", made.y, used.task)
        if used.task == "segmentation":
            streams["y"] = (read_mask(sample, options.reading) for sample in samples)
    if any(sample.patient for sample in samples):
        arrays["patient"] = number_patients(samples)
    if vocabulary:
        arrays["vocabulary"] = np.array(vocabulary)
    features = recipe.features if recipe else ()
    schema = make_schema(features, tuple(map(tidy, used.classes)))
    write_npz(
        out, arrays | written_schema(schema) | {"recipe": np.array(used.as_json)}, streams
    )
    why = "too few to be divided" if labelled else "without labels"
    text = f"{len(x)} samples, {why}, in one part: {describe_inputs(x)}"
    columns = tuple(feature.name for feature in features)
    return Imported(
        out, text, names, columns, (*found.notes, *notes), recipe, pictures, divided=False
    )


def read_rows(source: Path, options: ImportOptions, rows: Sequence[int]) -> SiloData:
    """Read some rows of a table by the options' recipe, and divide them. Raises DataError."""
    options = with_recipe(options)
    with reading(source):
        found = find_rows(source, options)
        if not found.columns or found.table is None:
            raise DataError(f"{source} has no labels")
        some = replace(
            found,
            rows=[found.rows[i] for i in rows],
            table=found.table.iloc[list(rows)].reset_index(drop=True),
        )
        return collect(source, some, options).data


def with_recipe(options: ImportOptions) -> ImportOptions:
    """Return the options with those of their recipe, if there is one."""
    own = options.recipe or options.pictures
    if own is None:
        return options
    take = Take(patient=own.patient or None)
    if isinstance(own, Recipe) and (text := own.text).column:
        take = replace(take, text=text.column, vocabulary=text.vocabulary, length=text.length)
    made = replace(options, labels=own.classes, task=own.task, seed=own.seed, take=take)
    if isinstance(own, Recipe):
        return made
    return replace(
        made,
        label=None,
        survival=(own.label[0], own.label[1]) if own.task == "survival" else None,
    )


def check_paths(source: Path, out: Path, overwrite: bool) -> None:
    """Raise DataError where the source is missing, or the output file exists already."""
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
    """The divided samples of a source; pictures and masks have shape and type only, until they are written."""

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
        """Return whether the inputs are pictures or scans, each in its own file."""
        return bool(self.samples[0].file)

    def order(self) -> dict[str, Array]:
        """Return the samples' indices in the source, per split."""
        return {split: np.flatnonzero(self.places == split) for split in SPLITS}

    def gaps_by_part(self) -> dict[str, Array]:
        """Return which values are filled, per split; empty where none is."""
        if self.gaps is None or not self.gaps.any():
            return {}
        return {split: self.gaps[chosen] for split, chosen in self.order().items()}


def collect(source: Path, found: Found, options: ImportOptions) -> Collected:
    """Read the samples' labels, probe their inputs, and divide them."""
    take = options.take
    samples, notes, recipe, pictures = found.rows, found.notes, found.recipe, options.pictures
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
    notes = (
        *notes,
        *patient_notes(samples, take.patient),
        *label_notes(task, answers, patients, places),
    )
    named = any(sample.patient for sample in samples)
    check_places(source, places, f", of {len(np.unique(patients))} patients" if named else "")
    vocabulary, gaps = 0, None
    if recipe is None or found.table is None:
        x = describe(samples, infos, pictures)
        classes = tuple(names if task in (*ONE_CLASS, "segmentation") else options.labels)
        roles = {
            "label": found.columns,
            "labels_by": found.by,
            "patient": found.patient,
            "seed": options.seed,
        }
        roles |= {"task": task, "classes": classes, "outputs": outputs}
        pictures = (pictures or draft_pictures(infos, x, options)).model_copy(update=roles)
    else:
        notes = (
            *notes,
            *future_notes(found.table, recipe),
            *rare_notes(found.table, recipe, patients),
        )
        # Of a shared schema; this file's own names are in its recipe
        names = recipe.classes or names
        classes = names if task in ONE_CLASS else recipe.classes
        recipe = recipe.model_copy(
            update={"task": task, "classes": classes, "outputs": outputs}
        )
        check_fills(found.table, recipe, places == "train")
        recipe = with_fills(recipe, fit(found.table, recipe, places == "train"))
        x, vocabulary, more = read_inputs(samples, transform(found.table, recipe), take)
        notes, gaps = (*notes, *more), gaps_of(found.table, recipe)
        for column in list(found.table):  # or its cells stay in memory beside the inputs
            del found.table[column]
    if task == "segmentation" and y.shape != x.shape[:-1]:
        raise DataError(f"masks are {y.shape[1:]}, their pictures {x.shape[1:-1]}")
    check_names(sample.subgroup for sample in samples)
    groups = np.array([sample.subgroup for sample in samples]) if options.subgroup else None
    features, used = recipe.features if recipe else (), recipe or pictures
    schema, text = make_schema(features, tuple(map(tidy, names))), used.as_json if used else ""
    parts = parts_of(x, y, patients if named else None, groups, places)
    data = SiloData(*parts, outputs, task, vocabulary, schema, text, options.cohort)
    return Collected(
        samples,
        data,
        places,
        names,
        tuple(f.name for f in features),
        notes,
        recipe,
        pictures,
        gaps,
    )


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
    samples, streams = made.samples, dict[str, Iterator[Array]]()
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


def check_lost(
    before: Sequence[SampleSource], after: Sequence[SampleSource], task: str
) -> None:
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


def summary(data: SiloData) -> str:
    """Describe the samples per split."""
    counts = f"train {len(data.train)}, val {len(data.val)}, test {len(data.test)} samples"
    if data.task == "multiclass":
        what = f"{data.classes} classes"
    else:
        what = describe_labels(data.task, {"train": data.train.y}, data.classes)
    return f"{counts}: {describe_inputs(data.train.x)}\n{what}"
