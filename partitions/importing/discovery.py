"""Discovery of samples: csv lists, folders of classes, folders of DICOM studies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import unknown_name
from partitions.importing import nifti
from partitions.importing.dicom_series import files_below, find_studies, holds_dicom, place_of
from partitions.importing.images import NIFTI, PICTURES, SampleSource, is_dicom
from partitions.importing.notes import Take
from partitions.importing.options import ImportOptions
from partitions.importing.scans import ReadOptions, pseudonym
from partitions.importing.tables import (
    SPLIT_NAMES,
    Label,
    feature_columns,
    label_columns,
    labels_of,
    list_columns,
    numbers_of,
    read_lines,
    split_of,
)
from partitions.patients import names_patients, patient_column

Found = tuple[list[SampleSource], tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # as find_rows says


def find_rows(source: Path, options: ImportOptions) -> Found:
    """All samples of a source, the names of a table's features (none for pictures), the label columns, and notes."""
    label: Label = options.survival or options.label
    table = Path(options.labels_from) if options.labels_from else None
    classes, reading, take = options.labels, options.reading, options.take
    if source.is_file():
        if is_dicom(source) or source.name.lower().endswith(NIFTI):
            raise DataError(f"{source} is one scan; name the folder that it lies in, or a csv with a column file")
        if table:
            raise DataError("--labels-from goes with a folder of DICOM files")
        return sliced(read_csv(source, label, take), reading)
    tables = sorted(path for path in source.iterdir() if path.suffix.lower() == ".csv")
    if not table and len(tables) > 1:
        raise DataError(f"{source} has several csv files ({tables[0].name}, {tables[1].name}); name the one to use")
    if not table and tables and not is_joined(tables[0], source):
        return sliced(read_csv(tables[0], label, take), reading)
    table = table or next(iter(tables), None)
    if table or holds_dicom(source):
        studies = find_studies(source, table, label, classes, reading, take)
        return studies.rows, (), studies.columns, studies.notes
    rows = list(folder_rows(source, take.patient))
    if not rows:
        raise DataError(f"{source} has no csv file and no folders of pictures, one per class")
    if any(is_nifti(row) for row in rows):
        if not classes:
            raise DataError(
                f"{source} holds NIfTI files and no csv: name them and their labels in a csv with columns file, label "
                "or, where its folders are the classes, these folders with --labels A,B"
            )
        if strange := {row.labels[0] for row in rows} - set(classes):
            raise DataError(f"{source} has {len(strange)} folders besides {', '.join(classes)}")
    rows = numbered(rows, source)
    return sliced((rows, (), (), ()), reading)


def is_joined(table: Path, source: Path) -> bool:
    """Return whether a folder's csv is of DICOM files there that it does not name one by one."""
    return holds_dicom(source) and "file" not in read_lines(table)[0]


def numbered(rows: list[SampleSource], source: Path) -> list[SampleSource]:
    """The rows with volumes, and what lies in a patient's folder, called by their place among all files of the source,
    as DICOM files are.
    """
    if not any(is_nifti(row) or row.patient for row in rows):
        return rows
    files = list(files_below(source))
    place = {path: place_of(source, number, len(files)) for number, path in enumerate(files)}
    return [replace(row, where=place[row.file]) if row.file and (row.patient or is_nifti(row)) else row for row in rows]


def is_nifti(row: SampleSource) -> bool:
    """Return whether a row's picture is a volume of NIfTI."""
    return row.file is not None and row.file.name.lower().endswith(NIFTI)


def sliced(found: Found, reading: ReadOptions) -> Found:
    """The rows with one for each slice of a NIfTI volume that is wanted."""
    rows, features, columns, notes = found
    if not any(map(is_nifti, rows)):
        return found
    made = []
    for row in tqdm(rows, desc="headers", unit=""):
        if row.file and is_nifti(row):
            made += [replace(row, part=part) for part in nifti.parts(row.file, row.where, reading)]
        else:
            made.append(row)
    return made, features, columns, notes


def folder_rows(source: Path, patient: str | None) -> Iterator[SampleSource]:
    """Pictures in one folder per class, possibly below train, val and test folders.

    ``patient``: "folder" where folders below the classes are patients, None where they are not; "" refuses such.
    """
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
        for path in sorted(folder.rglob("*")):
            below = path.relative_to(folder).parts
            if not path.name.lower().endswith((*PICTURES, *NIFTI)) or any(name.startswith(".") for name in below):
                continue
            if len(below) > 1 and patient != "folder" and patient is not None:
                raise DataError(
                    f"{source} has pictures in folders below its classes: --patient folder takes each of these for a "
                    "patient, --no-patient for nothing"
                )
            owner = pseudonym(below[0]) if len(below) > 1 and patient else ""
            yield SampleSource(str(path), (folder.name,), split, owner, file=path)


def read_csv(path: Path, label: Label, take: Take) -> Found:
    """Read a csv: a list of pictures if it has a column ``file``, else a table. Comma, semicolon or tab."""
    header, lines = read_lines(path, take.separator)
    pictures = "file" in header
    masks = pictures and "mask" in header and not label
    others = ["split", "patient"]
    if take.text:
        if take.text not in header:
            raise unknown_name(f"column of {path}", take.text, header)
        others.append(take.text)
    if not (pictures or label or "label" in header):
        raise DataError(f"{path} has no column label; name the label's column with --label: {list_columns(header)}")
    columns = label_columns(path, header, label, () if masks else ("label",))
    if take.text in columns:
        raise DataError(f"{path}: {take.text} is the text and the label; name another column with --label")
    patient = patient_column(path, header, take.patient, (*columns, *take.columns))
    likely = [name for name in header if names_patients(name) and name not in (*columns, *take.columns, take.text)]
    others += [name for name in (patient, *likely) if name and name not in others]
    features = feature_columns(path, header, (*columns, *others), take.columns)
    notes: tuple[str, ...] = ()
    if left := [name for name in likely if name not in (patient, "patient")]:
        notes = (f"left out: {', '.join(left)}, as it looks like a patient's identifier",) * (not pictures)
    if take.text and not take.columns:
        if features:
            more = f"left out are {', '.join(features)}; --columns {','.join(features)} takes them beside the text"
            notes = (*notes, more)
        features = []
    elif not features:
        raise DataError(f"{path} has no column besides the label; what separates its columns? (--separator)")
    rows = []
    for line in lines:
        where, row = line
        common = (where, labels_of(line, columns, take.decimal), split_of(line), pseudonym(row.get(patient, "")))
        if pictures:
            if not row["file"] or (masks and not row["mask"]):
                raise DataError(f"{where} names no {'mask' if row['file'] else 'file'}")
            mask = path.parent / row["mask"] if masks else None
            rows.append(SampleSource(*common, file=path.parent / row["file"], mask=mask))
        else:
            rows.append(
                SampleSource(*common, values=numbers_of(line, features, take.decimal), text=row.get(take.text, ""))
            )
    return rows, () if pictures else tuple(features), columns, notes
