"""A folder of DICOM files as samples: one series per study, its middle slice, labels by study or patient from a csv.

Files are known by what is in them, wherever they lie below the folder, and called by their number in the list of all
files in the order of their paths (``find FOLDER -xtype f | LC_ALL=C sort | sed -n 17p`` is file 17): paths hold names.
A csv is joined by the first of these columns that it has: ``study`` (or StudyInstanceUID), ``accession``
(AccessionNumber), ``patient`` (PatientID). Without a csv the folders of the first level are the classes, but only where
the classes are named: elsewhere folders are called as patients are.

Of each study the series with most files is taken, or, of those whose description matches a pattern, that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.importing.dicom import IDENTITY, Header, read_header
from partitions.importing.images import SampleSource, is_dicom
from partitions.importing.notes import ALL_COLUMNS, Take
from partitions.importing.scans import ReadOptions, parts_of, pseudonym
from partitions.importing.tables import SPLIT_NAMES, Label, label_columns, labels_of, read_lines, split_of
from partitions.patients import patient_column

# What hospitals call the columns that a csv may be joined by, in lower case without marks.
KEYS = {
    "study": "study",
    "studyuid": "study",
    "studyinstanceuid": "study",
    "accession": "accession",
    "accessionnumber": "accession",
    "patient": "patient",
    "patientid": "patient",
}

Answer = tuple[tuple[str, ...], str, str]  # labels, split, patient


@dataclass(slots=True)
class Study:
    """One study: pseudonyms of what a csv may call it, and the slices of each series that is wanted.

    A slice is (mm along the normal, number in its series, file, frames), which is their order.
    """

    identity: dict[str, str]
    folder: tuple[str, str]  # split and class, where folders are these
    series: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """Samples of a folder, the csv's label columns, and what the hospital must know of what was left out."""

    rows: list[SampleSource]
    columns: tuple[str, ...]
    notes: tuple[str, ...]


def names_what(column: str) -> str:
    """``study``, ``accession`` or ``patient``, or "" for a column that names none of them."""
    return KEYS.get("".join(c for c in column.lower() if c.isalnum()), "")


def join_key(header: Sequence[str]) -> str:
    """The column by which a csv can be joined to studies, or ""."""
    return next((column for kind in IDENTITY for column in header if names_what(column) == kind), "")


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, in the order of their paths as bytes."""
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return (Path(path) for path in sorted(paths, key=os.fsencode) if os.path.isfile(path))


def holds_dicom(folder: Path) -> bool:
    """Return whether any file below a folder is DICOM."""
    return any(map(is_dicom, files_below(folder)))


def find_studies(
    source: Path,
    table: Path | None,
    label: Label,
    classes: Sequence[str],
    reading: ReadOptions,
    take: Take = ALL_COLUMNS,
) -> Found:
    """The samples of a folder of DICOM files.

    ``table``: the csv with their labels; without one ``classes`` are names of folders. ``take``: how the csv is
    written, and its column of patients. Raises DataError, one line, where they cannot be told; identifiers and names
    of files and folders are in none.
    """
    if table is None:
        check_without_csv(source, classes, take)
    files = list(files_below(source))
    studies, others, strange = _group(source, files, () if table else classes, reading)
    notes = [f"{others} of {len(files)} files hold no DICOM picture: passed over"] * bool(others)
    if strange:
        raise DataError(f"{source} has DICOM files outside its folders {', '.join(classes)}: {strange} other folders")
    kept = [study for study in studies if study.series]
    if not kept:
        raise DataError(f"{source}: no study has a series like {reading.series!r}")
    if len(kept) < len(studies):
        notes.append(
            f"{len(studies) - len(kept)} of {len(studies)} studies have no series like {reading.series!r}: left out"
        )
    studies = kept
    if table is None:
        labels: list[Answer] = [((study.folder[1],), study.folder[0], "") for study in studies]
        columns: tuple[str, ...] = ("label",)
    else:
        joined, columns, unmatched = _join(table, studies, label, take)
        labels = [found for found in joined if found is not None]
        studies = [study for study, found in zip(studies, joined, strict=True) if found is not None]
        notes += unmatched
    rows = []
    for study, (answers, split, patient) in zip(studies, labels, strict=True):
        name = pseudonym(patient) or study.identity["patient"]
        rows += [
            SampleSource(place_of(source, number, len(files)), answers, split, name, files[number], part=frame)
            for number, frame in _slices(study, reading.slices)
        ]
    several = sum(len(_all_slices(study)) > 1 for study in studies)
    if several and reading.slices == 1:
        notes.append(f"{several} of {len(studies)} studies have several slices: the middle one is taken (--slices)")
    return Found(rows, columns, tuple(notes))


def check_without_csv(source: Path, classes: Sequence[str], take: Take) -> None:
    """Raise DataError for options that need a csv of labels, or where nothing names the labels."""
    if take.patient:
        raise DataError("--patient names a column of a csv; without one DICOM files say themselves whose they are")
    if not classes:
        raise DataError(
            f"{source} holds DICOM files and no csv: name their labels by study or patient with --labels-from FILE.csv "
            "or, where its folders are the classes, these folders with --labels A,B"
        )


def place_of(source: Path, number: int, total: int) -> str:
    """Return a file's name for messages; ``number`` counts from 0."""
    return f"{source}, file {number + 1} of {total}"


def _group(
    source: Path, files: list[Path], classes: Sequence[str], reading: ReadOptions
) -> tuple[list[Study], int, int]:
    """The studies, in the order of their first files; how many files hold no picture; and how many folders with
    pictures are none of ``classes``, where these are given.
    """
    studies: dict[str, Study] = {}
    strange: set[str] = set()
    others = 0
    for number, path in enumerate(tqdm(files, desc="headers", unit="")):
        where = place_of(source, number, len(files))
        header = read_header(path, where) if is_dicom(path) else None
        if header is None:
            others += 1
            continue
        folder = _folder(path.relative_to(source).parts[:-1]) if classes else ("", "")
        if classes and folder[1] not in classes:
            strange.add(folder[1])
            continue
        key = header.identity["study"] or f"file {number}"
        study = studies.setdefault(key, Study(dict(header.identity), folder))
        if study.folder != folder:
            raise DataError(f"{where} is of a study that lies in another class's folder, too")
        if study.identity["patient"] != header.identity["patient"]:
            raise DataError(f"{where} is of another patient than the rest of its study")
        if _matches(header, reading.series):
            place = header.position if header.position is not None else float(header.number)
            study.series.setdefault(header.identity["series"], []).append((place, header.number, number, header.frames))
    return list(studies.values()), others, len(strange)


def _folder(folders: tuple[str, ...]) -> tuple[str, str]:
    """Split and class of a file below these folders."""
    if len(folders) > 1 and folders[0].lower() in SPLIT_NAMES:
        return SPLIT_NAMES[folders[0].lower()], folders[1]
    return "", folders[0] if folders else ""


def _matches(header: Header, pattern: str) -> bool:
    wanted = pattern.lower() if set(pattern) & set("*?") else f"*{pattern.lower()}*"
    return fnmatchcase(header.description.lower(), wanted)


def _slices(study: Study, count: int) -> list[tuple[int, int | None]]:
    """(file, frame) of the slices to take."""
    slices = _all_slices(study)
    return [slices[i] for i in parts_of(len(slices), count)]


def _all_slices(study: Study) -> list[tuple[int, int | None]]:
    """(file, frame) of the series with most files, the first one where several have as many. Frames are slices where it
    is one file; of a series of files with frames the middle ones (None) are.
    """
    most = max(map(len, study.series.values()))
    series = sorted(next(files for files in study.series.values() if len(files) == most))
    if len(series) == 1:
        _, _, file, frames = series[0]
        return [(file, frame) for frame in range(frames)] if frames > 1 else [(file, None)]
    return [(file, None) for _, _, file, _ in series]


def _join(
    table: Path, studies: list[Study], label: Label, take: Take
) -> tuple[list[Answer | None], tuple[str, ...], list[str]]:
    """Return the csv's labels of each study, None where it has none; its label columns; and what found no partner."""
    header, lines = read_lines(table, take.separator)
    column = join_key(header)
    if not column:
        raise DataError(f"{table} has no column study, accession or patient by which its labels belong to DICOM files")
    kind = names_what(column)
    columns = label_columns(table, header, label, ("label",))
    if named := list(filter(names_what, columns)):
        raise DataError(f"{table}: column {named[0]} names studies or patients; it is no label")
    patients = "" if take.patient else next((name for name in header if names_what(name) == "patient"), "")
    patients = patients or patient_column(table, header, take.patient, columns)
    known: dict[str, tuple[str, Answer]] = {}
    for line in lines:
        where, row = line
        key = pseudonym(row[column])
        if not key:
            raise DataError(f"{where} has no {column}")
        answer = labels_of(line, columns, take.decimal), split_of(line), row[patients] if patients else ""
        if key in known and known[key][1] != answer:
            raise DataError(f"{where} says something else of the same {kind} than {known[key][0]}")
        known[key] = where, answer
    found = [known[study.identity[kind]][1] if study.identity[kind] in known else None for study in studies]
    if not any(found):
        raise DataError(f"{table}: its column {column} names none of the {len(studies)} studies")
    used = {study.identity[kind] for study in studies} & known.keys()
    notes = []
    if without := found.count(None):
        notes.append(f"{without} of {len(studies)} studies are not in {table}: left out")
    if len(used) < len(known):
        notes.append(f"{len(known) - len(used)} of {len(known)} in column {column} of {table} have no DICOM files here")
    return found, columns, notes
