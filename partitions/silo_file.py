"""One silo's data file: an ``.npz`` that is checked completely before training.

It holds arrays under one of three sets of names:

* ``x_train, y_train[, x_val, y_val], x_test, y_test``
* MedMNIST's own: ``train_images, train_labels[, val_images, val_labels], test_images, test_labels``
* ``x, y``: split into 64 % train, 16 % val and 20 % test, by the samples' values (``site_split.py``)

Optional arrays:

* ``cohort`` (text): a name for the people in the data, which new versions of the file keep
* ``task`` (text), ``classes`` (a whole number; otherwise the largest label + 1)
* ``label_names`` (text, one per class or output), ``feature_names`` (text, one per column of a table)
* ``unlabelled``: names among them of findings or outlines that this hospital's samples are not labelled with
* ``feature_units`` (text, one per column, "" where not stated)
* ``feature_ranges`` (columns, 2): smallest and largest allowed value of each column, NaN where not stated
* ``patient_train`` and so on, or ``patient`` beside ``x, y``: whole numbers (n,), equal for samples of one patient
  (``patients.py``); likewise ``subgroup``: texts (n,), and ``gaps``: booleans (n, columns)
  (``partitions/inputs.py``)
* ``vocabulary``: the number of tokens; texts are tokens

Several inputs of a sample have an array each: ``x_image_train``, ``x_notes_train`` and so on, or ``x_image``,
``x_notes`` beside ``y``. A missing input of a sample is all zeros.

``inputs.py`` defines inputs: pictures, for example, are uint8 (n, h, w) or (n, h, w, c), or float32 (n, c, h, w).
Volumes have a depth before their height, and always channels: an array of four dimensions holds pictures. But under
MedMNIST's names uint8 (n, d, h, w) holds grey volumes, as in its 3D sets, where it would be pictures of more than 4
channels. ``labels.py`` defines labels by task: classes, for example, are 0, 1, 2, ... float64 is read as float32.
Anything else is refused. An ``x_val`` without samples means that there is no validation part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from partitions.array_names import (
    array_name,
    check_ranges,
    make_schema,
    read_cohort,
    read_features,
    read_names,
    read_stored_recipe,
    read_unlabelled,
    sort_names,
    written_schema,
)
from partitions.common.errors import DataError
from partitions.common.names import words_in
from partitions.copies import sample_notes
from partitions.inputs import (
    check_same_form,
    count_columns,
    describe_inputs,
    is_input_name,
    read_gaps,
    read_inputs,
    vocabulary_size,
)
from partitions.labels import (
    ONE_CLASS,
    Fault,
    describe_labels,
    find_task,
    join_survival,
    read_count,
    read_labels,
    stated_task,
)
from partitions.npz import write_npz
from partitions.own.index import arrays_at
from partitions.patients import (
    describe_patients,
    describe_subgroups,
    read_patients,
    read_subgroups,
)
from partitions.schema import Schema, difference, find_moved
from partitions.schemes.pool import hold_out
from partitions.site_split import TEST_SHARE, describe_division, divide_parts, select_rows
from partitions.splits import (
    SPLITS,
    Array,
    Arrays,
    Dataset,
    SiloData,
    Split,
    dtype_of,
    inputs_of,
    join_splits,
    load_splits,
)
from partitions.stored import one_by_one, together


@dataclass(frozen=True)
class Check:
    """The result of one check: whether it passed, what was found, and how to mend a fault."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Contents:
    """A file's samples in the stored form, per split (train, val, test, or all), and its task and classes."""

    splits: dict[str, Split]
    classes: int
    task: str
    vocabulary: int
    schema: Schema
    recipe: str
    cohort: str = ""
    # Per split, of a table: which values are filled
    gaps: Arrays = field(default_factory=dict)

    def divide(self) -> SiloData:
        """Return the parts of the file, or parts drawn by its samples' values. Raises DataError for too few samples."""
        train, val, test = (
            self.splits[part] if rows is None else select_rows(self.splits[part], rows)
            for part, rows in divide_parts(self.splits).values()
        )
        about = self.classes, self.task, self.vocabulary, self.schema, self.recipe, self.cohort
        return SiloData(train, val, test, *about)


def check_silo_file(path: str | Path, agreed: Schema | None = None) -> list[Check]:
    """Check everything in a silo data file, in order, up to the first fault; at the end are its division, and notes.

    ``agreed``: the federation's schema, against which the file is checked.
    """
    checks, contents = examine(Path(path))
    if contents is not None and agreed is not None:
        checks.append(check_agreed(contents, agreed))
    if contents is not None:
        try:
            data = contents.divide()
            checks.append(Check("split", True, describe_division(contents.splits, data)))
            checks += [Check("note", True, note) for note in sample_notes(data)]
        except ValueError as error:
            checks.append(
                Check("split", False, str(error), "give samples for training and for testing")
            )
    return checks


def check_agreed(contents: Contents, agreed: Schema) -> Check:
    """Check whether a file fits the federation's schema, by name."""
    schema = contents.schema
    name = "federation's schema"
    if reason := difference(
        schema, agreed, "the federation has", required=True, subset=contents.task in ONE_CLASS
    ):
        detail, _, fix = reason.rpartition(": ")
        return Check(name, False, f"has {detail}", fix)
    what = " and ".join(find_moved(schema, agreed))
    how = f"{what} in another order: each run maps them by name" if what else "the file fits"
    return Check(name, True, f"{how}; SHA-256 {agreed.digest}")


def read_silo_file(path: str | Path, task: str = "auto") -> SiloData:
    """Read one silo's data, divided by the file's parts or by its samples' values, never by a run's seed.

    Pictures are (n, h, w, c), volumes (n, d, h, w, c), labels as in ``labels.py``. ``task`` is used where the file does
    not state one. Samples of a large file stay there (``stored.py``). Raises DataError with the first fault of the
    file.
    """
    data = map_silo_file(path, task)
    train, val, test = load_splits(*data.splits)
    return replace(data, train=train, val=val, test=test)


def map_silo_file(path: str | Path, task: str = "auto") -> SiloData:
    """Read one silo's data as :func:`read_silo_file` does, but leave samples on disk, whatever their size."""
    contents = read_contents(Path(path), task)
    try:
        return contents.divide()
    except ValueError as error:
        raise DataError(f"{path}: {error}; give samples for training and for testing") from None


def read_dataset_file(path: str | Path, *, seed: int = 42, task: str = "auto") -> Dataset:
    """Read a silo data file as a whole data set, for partitioning over silos.

    Its validation samples become training samples. A file of ``x, y`` is split 80 / 20 by seed, by patient where it has
    patients. Arrays are read-only.

    Raises DataError with the first fault of the file.
    """
    path = Path(path)
    contents = read_contents(path, task)
    splits = contents.splits
    if whole := splits.get("all"):
        _, held = hold_out(np.unique(whole.units), TEST_SHARE, np.random.default_rng(seed))
        in_test = np.isin(whole.units, held)
        splits = {
            part: select_rows(whole, np.flatnonzero(rows))
            for part, rows in (("train", ~in_test), ("test", in_test))
        }
    train = join_splits([splits[part] for part in ("train", "val") if part in splits])
    train, test = load_splits(train, splits["test"])
    for array in (train.x, train.y, test.x, test.y):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return Dataset(
        path.stem,
        train,
        test,
        contents.classes,
        task=contents.task,
        vocabulary=contents.vocabulary,
        schema=contents.schema,
        recipe=contents.recipe,
    )


def write_silo_file(path: str | Path, data: SiloData, gaps: Arrays | None = None) -> None:
    """Write one silo's data with its schema, atomically and uncompressed; the same data give the same bytes.

    ``val`` is always written, also without samples, so that reading returns what was written. Samples on disk are
    copied in batches. ``gaps``: per split, which values of a table were missing, bool (n, columns).
    """
    arrays: dict[str, Array] = {f"gaps_{name}": flags for name, flags in (gaps or {}).items()}
    samples: dict[str, Iterator[Array]] = {}
    for name, split in zip(SPLITS, data.splits, strict=True):
        more, on_disk = written_part(f"_{name}", split, data.task)
        arrays |= more
        samples |= on_disk
    stated = {
        "vocabulary": data.vocabulary,
        "cohort": data.cohort,
        "task": data.task if data.task != "multiclass" else "",
        "classes": data.classes if data.task in (*ONE_CLASS, "segmentation") else 0,
        "recipe": data.recipe,
    }
    arrays |= {key: np.array(value) for key, value in stated.items() if value}
    write_npz(Path(path), arrays | written_schema(data.schema), samples)


def written_part(
    end: str, split: Split, task: str
) -> tuple[dict[str, Array], dict[str, Iterator[Array]]]:
    """Return a file's arrays of one part, whose names end so, and the samples of those that are not in memory.

    The latter are to be written one by one; their arrays have shape and type only. Labels may be None.
    """
    arrays: dict[str, Array] = {}
    samples: dict[str, Iterator[Array]] = {}
    for name, x in inputs_of(split.x).items():
        key = f"x_{name}{end}" if name else f"x{end}"
        channels_first = x.ndim > 2 and x.dtype != np.uint8
        if not isinstance(x, np.ndarray):
            each = one_by_one(x)
            samples[key] = (
                (np.moveaxis(sample, -1, 0) for sample in each) if channels_first else each
            )
            x = np.broadcast_to(np.zeros((), x.dtype), x.shape)
        arrays[key] = np.moveaxis(x, -1, 1) if channels_first else x
    y = split.y
    if task == "survival" and y is not None:
        arrays |= {f"time{end}": y[:, 0], f"event{end}": y[:, 1].astype(np.uint8)}
    elif isinstance(y, np.ndarray):
        arrays[f"y{end}"] = y.astype(np.int8) if task == "multilabel" else y
    elif y is not None:
        samples[f"y{end}"] = one_by_one(y)
        arrays[f"y{end}"] = np.broadcast_to(np.zeros((), y.dtype), y.shape)
    groups = {"patient": split.patient, "subgroup": split.subgroup}
    return arrays | {
        f"{k}{end}": name for k, name in groups.items() if name is not None
    }, samples


def read_contents(path: Path, task: str = "auto") -> Contents:
    """Read and check a file. Raises DataError, one line, with its first fault."""
    checks, contents = examine(path, task)
    if contents is None:
        bad = next(check for check in checks if not check.ok)
        raise DataError(" ".join(f"{path}: {bad.detail}; {bad.fix}".split()))
    return contents


CHECKED = words_in("file names samples inputs labels patients cohort subgroups schema")


def examine(path: Path, wanted: str = "auto") -> tuple[list[Check], Contents | None]:
    """Run all checks; the contents are None if one failed. ``wanted``: the task, where the file states none."""
    details, failed = list[Any](), list[Check]()
    try:
        for detail in check_contents(path, wanted):
            details.append(detail)
        contents = details.pop()
    except Fault as fault:
        contents = None
        failed = [Check(CHECKED[len(details)], False, fault.detail, fault.fix)]
    passed = [
        Check(name, True, text) for name, text in zip(CHECKED, details, strict=False) if text
    ]
    return passed + failed, contents


def check_contents(path: Path, wanted: str) -> Iterator[str | Contents]:
    """Yield what each of :data:`CHECKED` is, "" for none, and then the contents. Raises Fault."""
    stored = arrays_at(path)
    size = f", {path.stat().st_size / 1e6:.1f} MB" if path.exists() else ""
    yield f"{len(stored)} arrays{size}"
    arrays = join_survival(stored)
    named = sort_names(arrays)
    vocabulary = vocabulary_size(arrays)
    yield ", ".join(stored)
    check_samples(named)
    raw = {split: y for (kind, split), y in named.items() if kind == "y"}
    yield ", ".join(f"{k} {len(y)}" for k, y in raw.items())
    xs = {split: read_x(split, named, arrays, vocabulary) for split in raw}
    check_same_form(xs)
    first = next(iter(xs.values()))
    features = read_features(arrays, count_columns(first))
    check_ranges(features, xs)
    gaps = read_gaps(arrays, xs)
    columns = f" ({', '.join(f.name for f in features)})" if features else ""
    yield describe_inputs(first) + columns
    task = stated_task(arrays, wanted)
    if task == "auto":
        task = find_task(raw, xs, survival=arrays.keys() != stored.keys())
    names = {part: array_name(part, "y", arrays) for part in raw}
    ys = {part: read_labels(task, names[part], y, xs[part]) for part, y in raw.items()}
    classes = read_count(task, arrays, ys)
    labels = read_names(arrays, "label_names", classes)
    labels = labels if task != "survival" else ()  # a time has none
    yield describe_labels(task, ys, classes)
    patients = read_patients(arrays, ys)
    yield describe_patients(patients)
    cohort = read_cohort(arrays)
    yield cohort
    groups = read_subgroups(arrays, ys)
    yield describe_subgroups(groups)
    recipe = read_stored_recipe(arrays, features)
    lacking = read_unlabelled(arrays, task, labels, ys)
    schema = make_schema(features, labels, dtype_of(first), recipe, lacking)
    yield str(schema)
    splits = {k: Split(x, ys[k], patients.get(k), groups.get(k)) for k, x in xs.items()}
    yield Contents(splits, classes, task, vocabulary, schema, recipe, cohort, gaps)


def read_x(
    split: str, named: Mapping[tuple[str, str], Array], arrays: Arrays, vocabulary: int
) -> Array:
    """Read and check the inputs of a split; several become one structured array."""
    inputs: dict[str, Array] = {}
    for (kind, part), x in named.items():
        if part == split and kind != "y":
            name = array_name(split, kind, arrays)
            input_name = kind.partition(":")[2]
            if input_name and not is_input_name(input_name):
                raise Fault(
                    f"has an input {input_name!r}",
                    "an input's name is in small letters, as `image` in x_image_train",
                )
            inputs[input_name] = read_inputs(name, x, vocabulary)
    return together(inputs) if "" not in inputs else inputs[""]


def check_samples(named: Mapping[tuple[str, str], Array]) -> None:
    """Raise Fault unless a split has as many inputs as labels, and is not empty (val may be)."""
    for (kind, split), x in named.items():
        if kind == "y":
            continue
        y = named["y", split]
        if x.ndim == 0 or y.ndim == 0:
            raise Fault(
                f"{split} has a single number where an array is wanted",
                "save arrays of n samples",
            )
        if len(x) != len(y):
            raise Fault(
                f"{split} has {len(x)} inputs but {len(y)} labels",
                "save one label for each input",
            )
        if len(y) < (3 if split == "all" else 1) and split != "val":
            few = (
                f"only {len(y)} samples, too few to split"
                if split == "all"
                else f"no samples in {split}"
            )
            raise Fault(f"has {few}", "give samples for training and for testing")
