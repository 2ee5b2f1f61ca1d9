"""A hospital's pictures or table made into a silo data file (`silofl import`).

Sources:

* a folder with one csv of columns ``file, label`` (and ``split``, ``patient``), or that csv itself; files are pictures,
  DICOM or NIfTI
* a folder with one folder of pictures per class; or ``train``, ``val`` and ``test`` folders of such
* a folder of DICOM files as a hospital exports them, with a csv of labels by study or patient (``studies.py``)
* a csv table: the column ``label`` (or the one named, or the last) is the label, all others are numbers

Several label columns of 0, 1 or -1 (not known) are findings, of other numbers measurements; one column of numbers that
are not whole is a measurement, too. A column of times and one of events (1, or 0 for censored) are survival, and a
csv's column ``mask`` names a picture of classes for each picture: outlines. ``task`` says it where this does not.

Labels that are whole numbers stay as they are. Others are numbered in the order of ``labels``, or else in
alphabetical order, on which hospitals agree only if each has every class: where they may not, name them.

Without a ``split`` column 20 % of the samples are for testing and 20 % of the rest for validation, drawn by
seed. With a ``patient`` column, or else of DICOM files that say whose they are, all samples of a patient go to one
side, so that nobody is tested on who was trained on; a split that is given and does otherwise is refused.

Pictures are looked at first, all of them, and then read one by one into the file: memory does not grow with them.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from partitions.inputs import describe_inputs
from partitions.labels import MOST_CLASSES, ONE_CLASS, Fault, describe_labels, join_survival, read_count, read_labels
from partitions.names import unknown_name
from partitions.pictures import (
    NIFTI,
    PICTURES,
    Form,
    Row,
    Wish,
    is_dicom,
    kind_of,
    look,
    name_of,
    pseudonym,
    read,
    read_mask,
)
from partitions.pool import hold_out
from partitions.silo_file import read_silo_file, write_silo_file
from partitions.splits import Array, SiloData, Split
from partitions.tables import SPLIT_NAMES, Label, is_number, label_columns, labels_of, read_lines, split_of

TEST_SHARE, VAL_SHARE = 0.2, 0.2  # of all; of the rest
VAL_SHARE_GIVEN = 0.15  # of the training samples, where train and test are given but val is not


@dataclass(frozen=True)
class Imported:
    """What an import made. ``label_names``: of classes that had to be numbered, of findings, of measurements;
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


def import_source(
    source: str | Path,
    out: str | Path,
    *,
    size: int | None = None,
    label: str | None = None,
    labels: Sequence[str] = (),
    labels_from: str | Path | None = None,
    seed: int = 42,
    survival: tuple[str, str] | None = None,
    task: str = "auto",
    window: tuple[float, float] | None = None,
    spacing: float | None = None,
    slices: int = 1,
    series: str = "",
) -> Imported:
    """Read pictures, scans or a table, and write them as a silo data file; one picture at a time is in memory.

    ``size``: pictures are resized to size x size (None: as they are, all alike); ``label``: the label column of
    a csv, or several, joined by commas; ``survival``: the columns of time and event in their place; ``labels``: names
    of all classes, in order; ``labels_from``: a csv of labels by study or patient. Pictures become uint8, those of more
    than 8 bits float32 in 0..1; if any is in colour all are. ``window``, ``spacing``, ``slices``, ``series``: of scans
    (``pictures.Wish``).

    Raises ValueError, naming file and line, for anything that cannot be read; nothing is written then.
    """
    source, out, wish = Path(source), Path(out), Wish(size, window, spacing, slices, series)
    if out.suffix != ".npz":
        raise ValueError(f"{out} does not end in .npz")
    if not source.exists():
        raise ValueError(f"there is no {source}; name a folder of pictures or a csv file")
    try:
        table = Path(labels_from) if labels_from else None
        rows, feature_names, columns, notes = find_rows(source, survival or label, table, labels, wish)
        if (window or slices > 1 or series) and all(row.file is None or kind_of(row.file) == "picture" for row in rows):
            raise ValueError(f"{source} has no scans; --window, --slices and --series are of DICOM and NIfTI")
        task = find_import_task(rows, task, labels, survival is not None)
        forms = look_at(rows, wish) if rows[0].file else []
        if forms:
            rows = [replace(row, patient=row.patient or form.patient) for row, form in zip(rows, forms, strict=True)]
            x, notes = describe(rows, forms), (*notes, *count_notes(forms))
        else:
            x = np.array([row.values for row in rows], np.float32)
        y, names, outputs = read_answers(rows, columns, labels, task, wish)
        if task == "segmentation" and y.shape != x.shape[:3]:
            raise ValueError(f"masks are {y.shape[1:]}, their pictures {x.shape[1:3]}")
        places = assign_splits(rows, seed)
        order = {split: np.flatnonzero(places == split) for split in ("train", "val", "test")}
        parts = [Split(rows_of(x, chosen), rows_of(y, chosen)) for chosen in order.values()]
        data = SiloData(parts[0], parts[1], parts[2], outputs, task)
        for part, split in ((data.train, "training"), (data.test, "test")):
            if not len(part):
                patients = len({row.patient for row in rows if row.patient})
                of = f", of {patients} patients" if patients else ""
                raise ValueError(f"{source} gives no {split} samples; it has {len(rows)} samples in all{of}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{source} cannot be read ({error})") from error
    streams: dict[str, Iterator[Array]] = {}
    with tqdm(total=len(rows), desc="pictures", unit="", disable=not forms) as progress:
        for split, chosen in order.items() if forms else ():
            streams[f"x_{split}"] = read_pictures([rows[i] for i in chosen], wish, x, progress)
            if task == "segmentation":
                streams[f"y_{split}"] = (read_mask(rows[i], wish) for i in chosen)
        write_silo_file(out, data, label_names=names, feature_names=feature_names, streams=streams)
    return Imported(out, say(data), names, feature_names, notes)


def blank(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Shape and type of pictures or masks that are not in memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def rows_of(array: Array, chosen: Array) -> Array:
    """These rows; of pictures and masks, which are blank, as many blank ones."""
    return array[chosen] if array.ndim <= 2 else np.broadcast_to(array[:1], (len(chosen), *array.shape[1:]))


def say(data: SiloData) -> str:
    """Samples per split, and what they are."""
    counts = f"train {len(data.train)}, val {len(data.val)}, test {len(data.test)} samples"
    if data.task == "multiclass":
        what = f"{data.classes} classes"
    else:
        what = describe_labels(data.task, {"train": data.train.y}, data.classes)
    return f"{counts}: {describe_inputs(data.train.x)}\n{what}"


# Where samples are found, and what is said of them


Found = tuple[list[Row], tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # as find_rows says


def find_rows(source: Path, label: Label, table: Path | None, classes: Sequence[str], wish: Wish) -> Found:
    """All samples of a source, the names of a table's features (none for pictures), the label columns, and notes."""
    if source.is_file():
        if is_dicom(source) or source.name.lower().endswith(NIFTI):
            raise ValueError(f"{source} is one scan; name the folder that it lies in, or a csv with a column file")
        if table:
            raise ValueError("--labels-from goes with a folder of DICOM files")
        return sliced(read_csv(source, label), wish)
    tables = sorted(path for path in source.iterdir() if path.suffix.lower() == ".csv")
    if not table and len(tables) > 1:
        raise ValueError(f"{source} has several csv files ({tables[0].name}, {tables[1].name}); name the one to use")
    if not table and tables and not is_joined(tables[0], source):
        return sliced(read_csv(tables[0], label), wish)
    table = table or next(iter(tables), None)
    from partitions.studies import find_studies, holds_dicom

    if table or holds_dicom(source):
        studies = find_studies(source, table, label, classes, wish)
        return studies.rows, (), studies.columns, studies.notes
    rows = list(folder_rows(source))
    if not rows:
        raise ValueError(f"{source} has no csv file and no folders of pictures, one per class")
    if any(is_nifti(row) for row in rows):
        if not classes:
            raise ValueError(
                f"{source} holds NIfTI files and no csv: name them and their labels in a csv with columns file, label "
                "or, where its folders are the classes, these folders with --labels A,B"
            )
        if strange := {row.labels[0] for row in rows} - set(classes):
            raise ValueError(f"{source} has {len(strange)} folders besides {', '.join(classes)}")
        rows = numbered(rows, source)
    return sliced((rows, (), (), ()), wish)


def is_joined(table: Path, source: Path) -> bool:
    """Whether a folder's csv is of DICOM files there that it does not name one by one."""
    from partitions.studies import holds_dicom

    return holds_dicom(source) and "file" not in read_lines(table)[0]


def numbered(rows: list[Row], source: Path) -> list[Row]:
    """The rows with volumes called by their place among all files of the source, as DICOM files are."""
    from partitions.studies import files_below, place_of

    files = list(files_below(source))
    place = {path: place_of(source, number, len(files)) for number, path in enumerate(files)}
    return [replace(row, where=place[row.file]) if row.file and is_nifti(row) else row for row in rows]


def is_nifti(row: Row) -> bool:
    """Whether a row's picture is a volume of NIfTI."""
    return row.file is not None and row.file.name.lower().endswith(NIFTI)


def sliced(found: Found, wish: Wish) -> Found:
    """The rows with one for each slice of a NIfTI volume that is wanted."""
    rows, features, columns, notes = found
    if not any(map(is_nifti, rows)):
        return found
    from partitions import nifti

    made = []
    for row in tqdm(rows, desc="headers", unit=""):
        if row.file and is_nifti(row):
            made += [replace(row, part=part) for part in nifti.parts(row.file, row.where, wish)]
        else:
            made.append(row)
    return made, features, columns, notes


def folder_rows(source: Path) -> Iterator[Row]:
    """Pictures in one folder per class, possibly below train, val and test folders."""
    folders = sorted(path for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))
    if folders and all(folder.name.lower() in SPLIT_NAMES for folder in folders):
        classes = [
            (SPLIT_NAMES[folder.name.lower()], path)
            for folder in folders
            for path in sorted(folder.iterdir())
            if path.is_dir() and not path.name.startswith(".")
        ]
    else:
        classes = [("", folder) for folder in folders]
    for split, folder in classes:
        for path in sorted(folder.iterdir()):
            if path.name.lower().endswith((*PICTURES, *NIFTI)) and not path.name.startswith("."):
                yield Row(str(path), (folder.name,), split, "", file=path)


def read_csv(path: Path, label: Label) -> Found:
    """Read a csv: a list of pictures if it has a column ``file``, else a table. Comma, semicolon or tab."""
    header, lines = read_lines(path)
    pictures = "file" in header
    masks = pictures and "mask" in header and not label
    usual = () if masks else ("label" if pictures or "label" in header else header[-1],)
    columns = label_columns(path, header, label, usual)
    features = [name for name in header if name not in (*columns, "split", "patient")]
    if not features:
        raise ValueError(f"{path} has no column besides the label; is it separated by commas?")
    rows = []
    for line in lines:
        where, row = line
        common = (where, labels_of(line, columns), split_of(line), pseudonym(row.get("patient", "")))
        if pictures:
            if not row["file"] or (masks and not row["mask"]):
                raise ValueError(f"{where} names no {'mask' if row['file'] else 'file'}")
            mask = path.parent / row["mask"] if masks else None
            rows.append(Row(*common, file=path.parent / row["file"], mask=mask))
            continue
        for name in features:
            if not is_number(row[name]):
                raise ValueError(f"{where}: {name} is {row[name]!r}, no number; fill or drop such rows")
        rows.append(Row(*common, values=tuple(float(row[name]) for name in features)))
    return rows, () if pictures else tuple(features), columns, ()


def find_import_task(rows: Sequence[Row], task: str, classes: Sequence[str], survival: bool) -> str:
    """What there is to learn, where ``task`` is "auto": by how many labels there are, and what."""
    if task != "auto":
        return task
    if survival or rows[0].mask:
        return "survival" if survival else "segmentation"
    if len(rows[0].labels) > 1:
        return "multilabel" if {text for row in rows for text in row.labels} <= {"0", "1", "-1"} else "regression"
    texts = {row.labels[0] for row in rows}
    measured = all(map(is_number, texts)) and any(float(text) != int(float(text)) for text in texts)
    return "regression" if measured and not classes else "multiclass"


def read_answers(
    rows: Sequence[Row], columns: Sequence[str], classes: Sequence[str], task: str, wish: Wish
) -> tuple[Array, tuple[str, ...], int]:
    """The labels as a data file keeps them (``labels.py``; masks blank), the names of classes that had to be numbered,
    of findings or of measurements, and how many there are of them.
    """
    wanted = {"segmentation": 0, "survival": 2, "multiclass": 1, "ordinal": 1}.get(task, len(rows[0].labels))
    if len(rows[0].labels) != wanted or bool(rows[0].mask) != (task == "segmentation"):
        needs = {"segmentation": "a column mask", "survival": "columns of time and event"}.get(task, "one label column")
        raise ValueError(f"task = {task} needs {needs}")
    if task == "segmentation":
        return look_at_masks(rows, wish)
    if task in ONE_CLASS:
        y, names = number_labels(rows, classes)
        return y, names, len(names) or read_count(task, {}, {"all": y})
    for row in rows:
        for column, text in zip(columns, row.labels, strict=True):
            if not is_number(text):
                raise ValueError(f"{row.where}: {column} is {text!r}, no number; fill or drop such rows")
    values = np.array([[float(text) for text in row.labels] for row in rows])
    try:
        if task == "survival":
            return join_survival({"time": values[:, 0], "event": values[:, 1]})["y"], (), 1
        y = read_labels(task, "the label", values, values)
    except Fault as fault:
        raise ValueError(f"{', '.join(columns)}: {fault.detail}; {fault.fix}") from None
    return y, tuple(columns), len(columns)


def number_labels(rows: Sequence[Row], labels: Sequence[str]) -> tuple[Array, tuple[str, ...]]:
    """Labels as int64 (n,), and the names of the classes if they had to be numbered."""
    found = sorted({row.labels[0] for row in rows})
    if labels:
        if len(set(labels)) != len(labels):
            raise ValueError("labels names a class twice")
        for row in rows:
            if row.labels[0] not in labels:
                raise unknown_name(f"label in {row.where}:", row.labels[0], labels)
        names = tuple(labels)
    elif all(text.isascii() and text.isdigit() for text in found):
        for row in rows:
            if int(row.labels[0]) >= MOST_CLASSES:
                raise ValueError(f"{row.where}: the label is {row.labels[0]}; labels are class numbers 0, 1, ...")
        return np.array([int(row.labels[0]) for row in rows], np.int64), ()
    else:
        names = tuple(found)
    number = {name: i for i, name in enumerate(names)}
    return np.array([number[row.labels[0]] for row in rows], np.int64), names


def assign_splits(rows: Sequence[Row], seed: int) -> Array:
    """The split of each sample, text (n,): as given, or drawn by seed, patient by patient."""
    given = np.array([row.split for row in rows])
    if given.any() and not given.all():
        row = rows[int(np.flatnonzero(given == "")[0])]
        raise ValueError(f"{row.where} has no split, others have; name one for every sample, or for none")
    # Samples without a patient are patients of their own.
    patient = [row.patient or f"\0{i}" for i, row in enumerate(rows)]
    number = {name: i for i, name in enumerate(dict.fromkeys(patient))}
    patients = np.array([number[name] for name in patient])
    if twice := len({*zip(patients.tolist(), given.tolist(), strict=True)}) - len(number):
        raise ValueError(f"{twice} patients are in more than one split; put all of a patient's samples into one")
    rng = np.random.default_rng(seed)
    splits = given.astype("<U5") if given.any() else np.full(len(rows), "train", "<U5")
    if not given.any():
        _, held = hold_out(np.unique(patients), TEST_SHARE, rng)
        splits[np.isin(patients, held)] = "test"
    if "val" not in splits:
        share = VAL_SHARE_GIVEN if given.any() else VAL_SHARE
        _, held = hold_out(np.unique(patients[splits == "train"]), share, rng)
        splits[np.isin(patients, held) & (splits == "train")] = "val"
    return splits


# Pictures


def look_at(rows: Sequence[Row], wish: Wish) -> list[Form]:
    """What each picture will be like, by its header."""
    return [look(row, wish) for row in tqdm(rows, desc="looking", unit="")]


def describe(rows: Sequence[Row], forms: Sequence[Form]) -> Array:
    """Blank pictures, uint8 or float32 (n, h, w, c), c = 1, or 3 if any is in colour."""
    first, plain = forms[0], None  # the first one that is no scan, whose depth is what its maker chose
    for row, form in zip(rows, forms, strict=True):
        assert row.file is not None
        what = f"{row.where}: {name_of(row.file)}"
        if (form.height, form.width) != (first.height, first.width):
            sizes = f"{form.width} x {form.height}, those before it {first.width} x {first.height}"
            raise ValueError(f"{what} is {sizes}; use --size")
        if kind_of(row.file) == "picture":
            plain = plain or form
            if form.deep != plain.deep:
                raise ValueError(f"{what} mixes 8-bit and 16-bit pictures; convert them alike")
    deep, channels = any(form.deep for form in forms), max(form.channels for form in forms)
    return blank((len(rows), first.height, first.width, channels), np.float32 if deep else np.uint8)


def count_notes(forms: Sequence[Form]) -> list[str]:
    """What the hospital must know, with how many pictures it is about."""
    return [
        f"{count} of {len(forms)} pictures {note}" for note, count in Counter(n for f in forms for n in f.notes).items()
    ]


def read_pictures(rows: Sequence[Row], wish: Wish, like: Array, progress: tqdm[NoReturn]) -> Iterator[Array]:
    """One picture after the other, in the shape and type of ``like``."""
    for row in rows:
        picture = read(row, wish)
        if like.dtype == np.float32 and picture.dtype == np.uint8:
            picture = picture.astype(np.float32) / 255
        yield np.broadcast_to(picture, like.shape[1:])
        progress.update()


def look_at_masks(rows: Sequence[Row], wish: Wish) -> tuple[Array, tuple[str, ...], int]:
    """Blank masks uint8 (n, h, w), no names, and the number of classes: each is read here, and again to be written."""
    first, seen = None, np.zeros(256, bool)
    for row in tqdm(rows, desc="masks", unit=""):
        assert row.mask is not None
        mask = read_mask(row, wish)
        first = mask if first is None else first
        if mask.shape != first.shape:
            raise ValueError(f"{row.where}: {name_of(row.mask)} has another size than those before it; use --size")
        seen[np.unique(mask)] = True
    assert first is not None
    y = blank((len(rows), *first.shape), np.uint8)
    return y, (), read_count("segmentation", {}, {"all": np.flatnonzero(seen)})
