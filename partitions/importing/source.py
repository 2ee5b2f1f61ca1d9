"""Conversion of a hospital's pictures or table to a silo data file (`silofl import`).

Sources:

* a folder with one csv of columns ``file, label`` (and ``split``, ``patient``), or that csv itself; files are pictures,
  DICOM or NIfTI
* a folder with one folder of pictures per class, or ``train``, ``val`` and ``test`` folders with these; below the
  classes there may be a folder per patient
* a folder of DICOM files from a hospital's export, with a csv of labels by study or patient (``dicom_series.py``)
* a csv table: the column ``label``, or the named one, is the label, all others are numbers; or one is a text
  (``collect.py``), beside the columns of numbers that are named

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
from typing import Any

import numpy as np

from partitions.array_names import make_schema, written_schema
from partitions.common.errors import DataError, Problems
from partitions.common.names import Names
from partitions.copies import sample_notes
from partitions.importing.collect import collect, probed, read_table_inputs
from partitions.importing.discovery import find_rows
from partitions.importing.division import FEWEST_DIVIDED, number_patients
from partitions.importing.files import Faults
from partitions.importing.options import DEFAULTS, ImportOptions, Take
from partitions.importing.streams import new_pictures
from partitions.importing.table_source import Listing
from partitions.importing.targets import read_answers
from partitions.inputs import describe_inputs
from partitions.labels import Fault, describe_labels
from partitions.npz import write_npz
from partitions.recipes.pictures import AnyRecipe, PictureRecipe
from partitions.recipes.recipe import Recipe
from partitions.schema import tidy
from partitions.silo_file import map_silo_file, read_silo_file, write_silo_file, written_part
from partitions.splits import SiloData, Split


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    * ``label_names``: of classes that had to be numbered, of findings, or of measurements.
    * ``notes``: what was left out, and what the hospital must check.
    * ``used``: the recipe of the table or of the pictures.
    """

    file: Path
    description: str
    label_names: Names
    feature_names: Names
    notes: Names
    used: AnyRecipe
    divided: bool = True

    @property
    def data(self) -> SiloData:
        """Return the samples, read from the file."""
        return read_silo_file(self.file)

    @property
    def recipe(self) -> Recipe | None:
        """Return the recipe of a table."""
        return self.used if isinstance(self.used, Recipe) else None

    @property
    def pictures(self) -> PictureRecipe | None:
        """Return the recipe of pictures."""
        return self.used if isinstance(self.used, PictureRecipe) else None

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
    options = replace(
        with_recipe(options),
        faults=Faults(options.faults.skip),
        problems=Problems(options.problems.errors),
    )
    problems = options.problems
    if out.suffix != ".npz":
        problems.add(f"{out} does not end in .npz")
    if out.exists() and not options.overwrite:
        problems.add(
            f"{out} is there already, and with it who is for testing; name another file, or say --overwrite"
        )
    if not source.exists():
        problems.add(f"there is no {source}; name a folder of pictures or a csv file")
        problems.refuse(source)
    with reading(source):
        with problems.complete(source):
            listing = find_rows(source, options)
        if problems.errors and not listing.labelled:
            if not options.faults.skip:
                probed(listing, "", options)
            problems.refuse(source)
        recipe = options.recipe or options.pictures
        people = len(np.unique(number_patients(listing.rows)))
        if recipe and (not listing.labelled or people < FEWEST_DIVIDED):
            problems.refuse(source)
            if options.unlabelled:
                raise DataError(
                    f"{source}: --unlabelled is of samples to train on, and these are for prediction"
                )
            return import_whole(out, listing, options, recipe)
        collected = collect(source, listing, options)
    data = collected.data
    write_silo_file(out, data, collected.gaps)
    # Pictures are read as they are written: they are compared in the file
    copies = sample_notes(map_silo_file(out))
    notes = (*collected.notes, *copies, *options.faults.notes)
    return Imported(
        out, summary(data), collected.names, data.schema.names, notes, collected.used
    )


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Context that adds the source to errors of reading. Raises DataError."""
    try:
        yield
    except OSError as error:
        place, reason = error.filename or source, error.strerror or error
        raise DataError(f"{place} cannot be read ({reason})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{source} cannot be read ({error})") from error
    except Fault as fault:
        raise DataError(f"{source}: {fault.detail}; {fault.fix}") from None


def import_whole(
    out: Path, listing: Listing, options: ImportOptions, recipe: AnyRecipe
) -> Imported:
    """Write new samples as one part (``x``) for prediction, because they lack labels or are too few to be divided."""
    samples, vocabulary = listing.rows, 0
    x: Any
    if isinstance(recipe, Recipe):
        x, vocabulary, notes = read_table_inputs(samples, listing.table, recipe)
    else:
        x, notes = new_pictures(samples, recipe, options.faults)
        samples, notes = x.samples, (*notes, *options.faults.notes)
    y, names = None, Names()
    if listing.labelled:
        conversion = recipe.classes, recipe.task, options.reading, recipe
        answers = read_answers(samples, listing.columns, *conversion)
        y, names = answers.y, answers.names
    named = any(sample.patient for sample in samples)
    whole = Split(x, y, number_patients(samples) if named else None)
    arrays, streams = written_part("", whole, recipe.task)
    if vocabulary:
        arrays["vocabulary"] = np.array(vocabulary)
    schema = make_schema(recipe.features, tuple(map(tidy, recipe.classes)))
    arrays |= {**written_schema(schema), "recipe": np.array(recipe.as_json)}
    write_npz(out, arrays, streams)
    why = "too few to be divided" if listing.labelled else "without labels"
    text = f"{len(x)} samples, {why}, in one part: {describe_inputs(x)}"
    notes = (*listing.notes, *notes)
    return Imported(out, text, names, schema.names, notes, recipe, divided=False)


def read_rows(source: Path, options: ImportOptions, rows: Sequence[int]) -> SiloData:
    """Read some rows of a table by the options' recipe, and divide them. Raises DataError."""
    options = with_recipe(options)
    with reading(source):
        listing = find_rows(source, options)
        options.problems.refuse(source)
        if not listing.columns or listing.table is None:
            raise DataError(f"{source} has no labels")
        some = replace(
            listing,
            rows=[listing.rows[i] for i in rows],
            table=listing.table.iloc[list(rows)].reset_index(drop=True),
        )
        return collect(source, some, options).data


def with_recipe(options: ImportOptions) -> ImportOptions:
    """Return the options with those of their recipe, if there is one."""
    recipe = options.recipe or options.pictures
    if recipe is None:
        return options
    take = Take(patient=recipe.patient or None)
    replaced = replace(
        options, labels=recipe.classes, task=recipe.task, seed=recipe.seed, take=take
    )
    if isinstance(recipe, Recipe):
        return replaced
    survival = (recipe.label[0], recipe.label[1]) if recipe.task == "survival" else None
    return replace(replaced, label=recipe.label or None, survival=survival)


def summary(data: SiloData) -> str:
    """Describe the samples per split."""
    counts = f"train {len(data.train)}, val {len(data.val)}, test {len(data.test)} samples"
    what = f"{data.classes} classes"
    if data.task != "multiclass":
        what = describe_labels(data.task, {"train": data.train.y}, data.classes)
    return f"{counts}: {describe_inputs(data.train.x)}\n{what}"
