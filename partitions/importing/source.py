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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.array_names import SPLITS
from partitions.common.errors import DataError
from partitions.importing.discovery import find_rows
from partitions.importing.division import assign_splits, number_patients, patient_notes
from partitions.importing.images import SampleSource, kind_of, read_mask
from partitions.importing.notes import copies, read_table
from partitions.importing.options import DEFAULTS, ImportOptions
from partitions.importing.streams import count_notes, describe, probe_all, read_pictures, rows_of
from partitions.importing.targets import find_import_task, read_answers
from partitions.inputs import describe_inputs
from partitions.labels import Fault, describe_labels
from partitions.schema import Feature, tidy
from partitions.silo_file import make_schema, read_silo_file, write_silo_file
from partitions.splits import Array, SiloData, Split


@dataclass(frozen=True)
class Imported:
    """Result of an import. ``label_names``: of classes that had to be numbered, of findings, of measurements;
    ``notes``: what was left out, and what the hospital must look at.
    """

    file: Path
    description: str
    label_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    notes: tuple[str, ...] = ()

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
    try:
        made = collect(source, options)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{source} cannot be read ({error})") from error
    except Fault as fault:
        raise DataError(f"{source}: {fault.detail}; {fault.fix}") from None
    notes = (*made.notes, *copies(made.samples, made.places))
    write_collected(out, made, options)
    return Imported(out, summary(made.data), made.label_names, made.feature_names, notes)


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

    @property
    def in_files(self) -> bool:
        """Return whether the inputs are pictures or scans, each in a file of its own."""
        return bool(self.samples[0].file)

    def order(self) -> dict[str, Array]:
        """The samples' places in the source, per split."""
        return {split: np.flatnonzero(self.places == split) for split in SPLITS}


def collect(source: Path, options: ImportOptions) -> Collected:
    """Find the samples, read their labels, look at their inputs, and divide them."""
    take, reading = options.take, options.reading
    samples, feature_names, columns, notes = find_rows(source, options)
    check_options(source, samples, options)
    task = find_import_task(samples, options.task, options.labels, options.survival is not None)
    vocabulary = 0
    if samples[0].file:
        infos = probe_all(samples, reading)
        samples = [
            replace(sample, patient=sample.patient or info.patient) for sample, info in zip(samples, infos, strict=True)
        ]
        x, notes = describe(samples, infos), (*notes, *count_notes(infos))
    else:
        x, vocabulary, found = read_table(samples, take)
        notes = (*notes, *found)
    y, names, outputs = read_answers(samples, columns, options.labels, task, reading)
    if task == "segmentation" and y.shape != x.shape[:3]:
        raise DataError(f"masks are {y.shape[1:]}, their pictures {x.shape[1:3]}")
    patients = number_patients(samples)
    places = assign_splits(samples, patients, options.seed)
    notes = (*notes, *patient_notes(samples, take.patient))
    named = any(sample.patient for sample in samples)
    if empty := next((split for split in ("train", "test") if split not in places), None):
        of = f", of {len(np.unique(patients))} patients" if named else ""
        what = {"train": "training"}.get(empty, empty)
        raise DataError(f"{source} gives no {what} samples; it has {len(samples)} samples in all{of}")
    schema = make_schema(tuple(Feature(tidy(name)) for name in feature_names), tuple(map(tidy, names)))
    train, val, test = (
        Split(rows_of(x, chosen), rows_of(y, chosen), patients[chosen] if named else None)
        for chosen in (np.flatnonzero(places == split) for split in SPLITS)
    )
    data = replace(SiloData(train, val, test, outputs, task, vocabulary), schema=schema)
    return Collected(samples, data, places, names, feature_names, notes)


def check_options(source: Path, samples: list[SampleSource], options: ImportOptions) -> None:
    """Raise DataError for options that are not for such samples."""
    of_scans = options.window or options.slices > 1 or options.series
    if of_scans and all(sample.file is None or kind_of(sample.file) == "picture" for sample in samples):
        raise DataError(f"{source} has no scans; --window, --slices and --series are of DICOM and NIfTI")
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
        write_silo_file(out, made.data, streams=streams)


def summary(data: SiloData) -> str:
    """Samples per split, and what they are."""
    counts = f"train {len(data.train)}, val {len(data.val)}, test {len(data.test)} samples"
    if data.task == "multiclass":
        what = f"{data.classes} classes"
    else:
        what = describe_labels(data.task, {"train": data.train.y}, data.classes)
    return f"{counts}: {describe_inputs(data.train.x)}\n{what}"
