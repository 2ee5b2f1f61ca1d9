"""A hospital's pictures or table made into a silo data file (`silofl import`).

Sources:

* a folder with one csv of columns ``file, label`` (and ``split``, ``patient``), or that csv itself
* a folder with one folder of pictures per class; or ``train``, ``val`` and ``test`` folders of such
* a csv table: the column ``label`` (or the one named, or the last) is the label, all others are numbers

Several label columns of 0, 1 or -1 (not known) are findings, of other numbers measurements; one column of numbers that
are not whole is a measurement, too. A column of times and one of events (1, or 0 for censored) are survival, and a
csv's column ``mask`` names a picture of classes for each picture: outlines. ``task`` says it where this does not.

Labels that are whole numbers stay as they are. Others are numbered in the order of ``labels``, or else in
alphabetical order, on which hospitals agree only if each has every class: where they may not, name them.

Without a ``split`` column 20 % of the samples are for testing and 20 % of the rest for validation, drawn by
seed. With a ``patient`` column all samples of a patient go to one side, so that nobody is tested on who was
trained on.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from partitions.labels import MOST_CLASSES, ONE_CLASS, Fault, describe_labels, join_survival, read_count, read_labels
from partitions.names import unknown_name
from partitions.pool import hold_out
from partitions.silo_file import describe_inputs, write_silo_file
from partitions.splits import Array, SiloData, Split

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".pgm", ".ppm")
SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
TEST_SHARE, VAL_SHARE = 0.2, 0.2  # of all; of the rest
VAL_SHARE_GIVEN = 0.15  # of the training samples, where train and test are given but val is not


@dataclass(frozen=True)
class Row:
    """One sample before it is read: where it was found, and what is said of it."""

    where: str  # for messages: "table.csv, line 7"
    labels: tuple[str, ...]  # or none, where there is a mask
    split: str  # "" = not given
    patient: str  # "" = not given
    file: Path | None = None
    mask: Path | None = None
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Imported:
    """What an import made. ``label_names``: of classes that had to be numbered, of findings, of measurements."""

    data: SiloData
    label_names: tuple[str, ...]
    feature_names: tuple[str, ...]

    def __str__(self) -> str:
        """Samples per split, what they are, and the number of each named class."""
        d = self.data
        lines = [f"train {len(d.train)}, val {len(d.val)}, test {len(d.test)} samples: {describe_inputs(d.train.x)}"]
        what = (
            f"{d.classes} classes"
            if d.task == "multiclass"
            else describe_labels(d.task, {"train": d.train.y}, d.classes)
        )
        lines.append(what + "".join(f"\n{i} = {name}" for i, name in enumerate(self.label_names)))
        return "\n".join(lines)


def import_source(
    source: str | Path,
    out: str | Path,
    *,
    size: int | None = None,
    label: str | None = None,
    labels: Sequence[str] = (),
    seed: int = 42,
    survival: tuple[str, str] | None = None,
    task: str = "auto",
) -> Imported:
    """Read pictures or a table, and write them as a silo data file.

    ``size``: pictures are resized to size x size (None: as they are, all alike); ``label``: the label column of
    a csv, or several, joined by commas; ``survival``: the columns of time and event in their place; ``labels``: names
    of all classes, in order. Pictures become uint8, 16-bit grey ones float32 in 0..1; if any is in colour all are.

    Raises ValueError, naming file and line, for anything that cannot be read; nothing is written then.
    """
    source, out = Path(source), Path(out)
    if out.suffix != ".npz":
        raise ValueError(f"{out} does not end in .npz")
    if size is not None and size < 1:
        raise ValueError(f"size is {size}; it must be 1 or more")
    if not source.exists():
        raise ValueError(f"there is no {source}; name a folder of pictures or a csv file")
    try:
        rows, feature_names, columns = find_rows(source, survival or label)
        task = find_import_task(rows, task, labels, survival is not None)
        y, names = read_answers(rows, columns, labels, task, size)
        split_of = assign_splits(rows, seed)
        x = read_pictures(rows, size) if rows[0].file else np.array([row.values for row in rows], np.float32)
        if task == "segmentation" and y.shape != x.shape[:3]:
            raise ValueError(f"masks are {y.shape[1:]}, their pictures {x.shape[1:3]}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{source} cannot be read ({error})") from error
    parts = [Split(x[split_of == split], y[split_of == split]) for split in ("train", "val", "test")]
    for part, split in ((parts[0], "training"), (parts[2], "test")):
        if not len(part):
            raise ValueError(f"{source} gives no {split} samples; it has {len(rows)} samples in all")
    data = SiloData(parts[0], parts[1], parts[2], outputs_of(task, y, names), task)
    write_silo_file(out, data, label_names=names, feature_names=feature_names)
    return Imported(data, names, feature_names)


# Where samples are found, and what is said of them


Found = tuple[list[Row], tuple[str, ...], tuple[str, ...]]
Label = str | tuple[str, str] | None  # a column, or several joined by commas; time and event; None: the usual one


def find_rows(source: Path, label: Label) -> Found:
    """All samples of a source, the names of a table's features (none for pictures), and the label columns."""
    if source.is_file():
        if source.suffix.lower() == ".dcm":
            raise ValueError(f"{source} is DICOM, which is not read yet; export its pictures as PNG")
        return read_csv(source, label)
    if any(path.suffix.lower() == ".dcm" for path in source.rglob("*")):
        raise ValueError(f"{source} holds DICOM files, which are not read yet; export their pictures as PNG")
    tables = sorted(path for path in source.iterdir() if path.suffix.lower() == ".csv")
    if len(tables) > 1:
        raise ValueError(f"{source} has several csv files ({tables[0].name}, {tables[1].name}); name the one to use")
    if tables:
        return read_csv(tables[0], label)
    rows = list(folder_rows(source))
    if not rows:
        raise ValueError(f"{source} has no csv file and no folders of pictures, one per class")
    return rows, (), ()


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
            if path.suffix.lower() in PICTURES and not path.name.startswith("."):
                yield Row(str(path), (folder.name,), split, "", file=path)


def read_csv(path: Path, label: Label) -> Found:
    """Read a csv: a list of pictures if it has a column ``file``, else a table. Comma, semicolon or tab."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    if not lines:
        raise ValueError(f"{path} is empty")
    header = lines[0][1]
    if all(is_number(cell) for cell in header):
        header = [f"column{i}" for i in range(1, len(header) + 1)]
    elif any(cell.lower() in ("", "?", "nan", "na") for cell in header):
        raise ValueError(f"{path}: a column has no name in the first line; write a header that names each")
    else:
        lines = lines[1:]
    if not lines:
        raise ValueError(f"{path} has a header but no rows")
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{path} has two columns named {twice[0]!r}")
    pictures = "file" in header
    masks = pictures and "mask" in header and not label
    if isinstance(label, str):  # a column's own name may have commas
        columns = (label,) if label in header else tuple(filter(None, map(str.strip, label.split(","))))
    else:
        columns = label or (() if masks else ("label" if pictures or "label" in header else header[-1],))
    for column in columns:
        if column not in header:
            raise unknown_name(f"column of {path}", column, header)
    features = [name for name in header if name not in (*columns, "split", "patient")]
    if not features:
        raise ValueError(f"{path} has no column besides the label; is it separated by commas?")
    rows = []
    for number, cells in lines:
        where = f"{path}, line {number}"
        if len(cells) != len(header):
            raise ValueError(f"{where} has {len(cells)} cells, the header {len(header)}")
        row = dict(zip(header, cells, strict=True))
        if missing := [column for column in columns if not row[column]]:
            raise ValueError(f"{where} has no {missing[0] if len(columns) > 1 else 'label'}")
        split = row.get("split", "")
        if split and split.lower() not in SPLIT_NAMES:
            raise ValueError(f"{where}: split is {split!r}; it must be train, val or test")
        labels = tuple(row[column] for column in columns)
        common = (where, labels, SPLIT_NAMES.get(split.lower(), ""), row.get("patient", ""))
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
    return rows, () if pictures else tuple(features), columns


def is_number(text: str) -> bool:
    """Whether the text is a finite number that float32 can hold, as other programs write it: not 1_000, as Python."""
    return bool(NUMBER.fullmatch(text)) and abs(float(text)) <= float(np.finfo(np.float32).max)


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
    rows: Sequence[Row], columns: Sequence[str], classes: Sequence[str], task: str, size: int | None
) -> tuple[Array, tuple[str, ...]]:
    """The labels as a data file keeps them (``labels.py``), and the names of classes that had to be numbered, of
    findings, or of measurements.
    """
    wanted = {"segmentation": 0, "survival": 2, "multiclass": 1, "ordinal": 1}.get(task, len(rows[0].labels))
    if len(rows[0].labels) != wanted or bool(rows[0].mask) != (task == "segmentation"):
        needs = {"segmentation": "a column mask", "survival": "columns of time and event"}.get(task, "one label column")
        raise ValueError(f"task = {task} needs {needs}")
    if task == "segmentation":
        return read_masks(rows, size), ()
    if task in ONE_CLASS:
        return number_labels(rows, classes)
    for row in rows:
        for column, text in zip(columns, row.labels, strict=True):
            if not is_number(text):
                raise ValueError(f"{row.where}: {column} is {text!r}, no number; fill or drop such rows")
    values = np.array([[float(text) for text in row.labels] for row in rows])
    try:
        if task == "survival":
            return join_survival({"time": values[:, 0], "event": values[:, 1]})["y"], ()
        y = read_labels(task, "the label", values, values)
    except Fault as fault:
        raise ValueError(f"{', '.join(columns)}: {fault.detail}; {fault.fix}") from None
    return y, tuple(columns)


def outputs_of(task: str, y: Array, names: Sequence[str]) -> int:
    """The number of classes; of findings, of measurements; 1 of survival."""
    return len(names) if names else read_count(task, {}, {"all": y})


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


def read_pictures(rows: Sequence[Row], size: int | None) -> Array:
    """Read all pictures, uint8 or float32 (n, h, w, c) with c = 1, or 3 if any is in colour."""
    pictures: list[Array] = []
    for row in tqdm(rows, desc="pictures", unit=""):
        assert row.file is not None
        picture = read_picture(row.file, row.where, size)
        if pictures and picture.shape[:2] != pictures[0].shape[:2]:
            (h, w), (h0, w0) = picture.shape[:2], pictures[0].shape[:2]
            raise ValueError(f"{row.where}: {row.file.name} is {w} x {h}, those before it {w0} x {h0}; use --size")
        if pictures and picture.dtype != pictures[0].dtype:
            raise ValueError(f"{row.where}: {row.file.name} mixes 8-bit and 16-bit pictures; convert them alike")
        pictures.append(picture)
    channels = max(picture.shape[2] for picture in pictures)
    return np.stack([np.broadcast_to(picture, (*picture.shape[:2], channels)) for picture in pictures])


def read_picture(path: Path, where: str, size: int | None) -> Array:
    """Read one picture: uint8 (h, w, 1 or 3), or float32 (h, w, 1) in 0..1 if it is 16-bit grey."""
    try:
        with Image.open(path) as opened:
            picture: Image.Image = ImageOps.exif_transpose(opened)
            deep = picture.mode.startswith("I;16")
            if picture.mode in ("I", "F"):
                raise ValueError(f"its pixels are 32-bit ({picture.mode}); convert it to 8 or 16 bit")
            if deep:
                picture = Image.fromarray(np.asarray(picture).astype(np.float32) / 65535)
            else:
                picture = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
            if size:
                picture = picture.resize((size, size), Image.Resampling.BILINEAR)
            array = np.asarray(picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{where}: {path.name} cannot be read ({reason})") from error
    return array[..., np.newaxis] if array.ndim == 2 else array


def read_masks(rows: Sequence[Row], size: int | None) -> Array:
    """Read all masks, uint8 (n, h, w): a grey (or palette) picture whose values are the classes, 0 the background."""
    masks = []
    for row in rows:
        assert row.file is not None and row.mask is not None
        try:
            with Image.open(row.mask) as opened:
                mask: Image.Image = ImageOps.exif_transpose(opened)
                if mask.mode not in ("1", "L", "P"):
                    raise ValueError(f"its pixels are {mask.mode}; save classes 0, 1, 2, ... as 8-bit grey")
                if size:
                    mask = mask.resize((size, size), Image.Resampling.NEAREST)
                masks.append(np.asarray(mask).astype(np.uint8))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
            raise ValueError(f"{row.where}: {row.mask.name} cannot be read ({reason})") from error
        if masks[-1].shape != masks[0].shape:
            raise ValueError(f"{row.where}: {row.mask.name} has another size than those before it; use --size")
    return np.stack(masks)
