"""Samples from a folder of DICOM files: per study the middle slice of one series, with labels from a csv.

Files are recognised by their content, anywhere below the folder. Messages name a file by its number (``files.py``).
A csv is joined by the first of these columns that it has: ``study`` (or StudyInstanceUID), ``accession``
(AccessionNumber), ``patient`` (PatientID). Without a csv the folders of the first level are the classes, but only where
the user names the classes, because folders often have patients' names.

For each study, the series with the most files is used, of those whose description matches a pattern, if one is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.importing.csv_source import Found
from partitions.importing.dicom import IDENTITY, Header, read_header
from partitions.importing.dicom_file import is_dicom
from partitions.importing.files import (
    Faults,
    check_links,
    files_below,
    is_hidden,
    kind_of_other,
    link_notes,
    list_kinds,
    place_of,
)
from partitions.importing.images import DICOM, SampleSource
from partitions.importing.notes import ALL_COLUMNS, Take
from partitions.importing.scans import hashed, parts_of, pseudonym, redacted_errors
from partitions.importing.tables import (
    SPLIT_NAMES,
    Label,
    label_columns,
    labels_of,
    read_lines,
    split_of,
)
from partitions.importing.volumes.outlines import referenced_series
from partitions.patients import check_identifiers, patient_column
from partitions.recipes.reading import ReadOptions

# Names of the columns by which a csv may be joined, in lower case without punctuation.
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
    """One study: pseudonyms of its identifiers, and the slices of each requested series.

    A slice is (mm along the normal, number in its series, file, frames); slices are sorted by this tuple.
    """

    identity: dict[str, str]
    folder: tuple[str, str]  # split and class, where folders stand for these
    series: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    """A csv's answer for each study, None without one; ``by``: the column of the join; notes on the rest."""

    answers: list[Answer | None]
    columns: tuple[str, ...]
    notes: list[str]
    by: str
    patient: str


def names_what(column: str) -> str:
    """Return ``study``, ``accession`` or ``patient`` for a column's name, or "" for another column."""
    return KEYS.get("".join(c for c in column.lower() if c.isalnum()), "")


def join_key(header: Sequence[str]) -> str:
    """Return the column by which a csv can be joined to studies, or ""."""
    return next(
        (column for kind in IDENTITY for column in header if names_what(column) == kind), ""
    )


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
    faults: Faults | None = None,
    *,
    labelled: bool = True,
) -> Found:
    """Return the samples of a folder of DICOM files.

    ``table``: the csv with their labels; without one, and with ``labelled``, ``classes`` are names of folders.
    ``take``: how the csv is written, and its column of patients. Raises DataError, one line, without identifiers or
    names of files and folders, where studies or labels cannot be determined.
    """
    if table is None and labelled:
        check_without_csv(source, classes, take)
    files = list(files_below(source))
    check_links(
        source,
        ((place_of(source, number, len(files)), path) for number, path in enumerate(files)),
    )
    faults = faults or Faults()
    studies, rest, strange = _group(
        source, files, classes if labelled and not table else (), reading, faults
    )
    outlines = find_outlines(source, files, list(rest), reading, faults)
    faults.check(len(files))
    used = {number for own in outlines.values() for number in own}
    notes = other_notes(
        source,
        files,
        {n: kind for n, kind in rest.items() if n not in used and files[n] != table},
    )
    check_studies(source, studies, classes, strange)
    studies, left_out = with_series(source, studies, reading, outlines)
    notes += left_out
    by, patients, columns = "folder", "", tuple[str, ...]()
    labels: list[Answer] = [
        ((study.folder[1],) if labelled else (), study.folder[0], "") for study in studies
    ]
    if table:
        joined = _join(table, studies, label, take)
        columns, by, patients = joined.columns, joined.by, joined.patient
        labels = [found for found in joined.answers if found is not None]
        studies = [
            study
            for study, found in zip(studies, joined.answers, strict=True)
            if found is not None
        ]
        notes += joined.notes
    rows = []
    for study, (answers, split, patient) in zip(studies, labels, strict=True):
        name, spelling = pseudonym(patient) or study.identity["patient"], hashed(patient)
        for number, frame in _slices(study, reading.slices):
            where = place_of(source, number, len(files))
            made = SampleSource(
                where, answers, split, name, files[number], spelling=spelling, part=frame
            )
            rows.append(whole_series(made, study, files, outlines) if reading.volume else made)
    several = sum(len(_all_slices(study)) > 1 for study in studies)
    if several and reading.slices == 1 and not reading.volume:
        notes.append(
            f"{several} of {len(studies)} studies have several slices: the middle one is taken (--slices)"
        )
    by = "outlines" if outlines and reading.volume else by
    return Found(rows, columns, tuple(notes), by=by, patient=patients)


def other_notes(source: Path, files: Sequence[Path], others: Mapping[int, str]) -> list[str]:
    """Return the notes on files without a DICOM picture, by what they are, and on links."""
    kinds = Counter(others.values())
    note = f"{len(others)} of {len(files)} files hold no DICOM picture: passed over ({list_kinds(kinds)})"
    return [*[note] * bool(others), *link_notes(source)]


def check_studies(
    source: Path, studies: Sequence[Study], classes: Sequence[str], strange: int
) -> None:
    """Raise DataError where there are no studies, or some in folders that are not classes."""
    if strange:
        raise DataError(
            f"{source} has DICOM files outside its folders {', '.join(classes)}: {strange} other folders"
        )
    if not studies:
        raise DataError(f"{source}: none of its files holds a DICOM picture")


def with_series(
    source: Path,
    studies: list[Study],
    reading: ReadOptions,
    outlines: Mapping[str, Sequence[int]],
) -> tuple[list[Study], list[str]]:
    """Return the studies with a requested series, and a note on the others. Raises DataError where none has one.

    ``outlines``: the series with outlines, to which the request is limited where outlines are read.
    """
    requested = f"like {reading.series!r}"
    if reading.outlines:
        requested += " with a SEG or RTSTRUCT object" if reading.series else ""
        requested = requested if reading.series else "with a SEG or RTSTRUCT object"
        for study in studies:
            study.series = {key: own for key, own in study.series.items() if key in outlines}
    kept = [study for study in studies if study.series]
    if not kept:
        raise DataError(f"{source}: no study has a series {requested}")
    if len(kept) == len(studies):
        return kept, []
    return kept, [
        f"{len(studies) - len(kept)} of {len(studies)} studies have no series {requested}: left out"
    ]


def find_outlines(
    source: Path,
    files: Sequence[Path],
    numbers: Sequence[int],
    reading: ReadOptions,
    faults: Faults,
) -> dict[str, list[int]]:
    """Return which of these files outline a series, by its pseudonym; none where outlines are not requested."""
    found: dict[str, list[int]] = {}
    for number in numbers if reading.outlines else ():
        if is_dicom(files[number]):
            where = place_of(source, number, len(files))
            with faults.collect(), redacted_errors(where, "DICOM"):
                for series in referenced_series(files[number]):
                    found.setdefault(series, []).append(number)
    return found


def has_outlines(folder: Path) -> bool:
    """Return whether a file below a folder outlines a series."""
    with redacted_errors(str(folder), "DICOM"):
        return any(is_dicom(path) and referenced_series(path) for path in files_below(folder))


def series_below(folder: Path, where: str, reading: ReadOptions) -> tuple[Path, ...]:
    """Return the files of the only series in a folder. Raises DataError where there is none, or several."""
    files = list(files_below(folder))
    check_links(folder, ((where, path) for path in files))
    faults = Faults(None)
    studies, _, _ = _group(folder, files, (), reading, faults, quiet=True)
    faults.check(len(files))
    series = [own for study in studies for own in study.series.values()]
    if len(series) != 1:
        raise DataError(
            f"{where}: its folder has {len(series)} series; one is a volume, chosen by --series"
        )
    return tuple(files[number] for _, _, number, _ in series[0])


def check_without_csv(source: Path, classes: Sequence[str], take: Take) -> None:
    """Raise DataError for options that need a csv of labels, or where neither a csv nor classes give labels."""
    if take.patient:
        raise DataError(
            "--patient names a column of a csv; without one DICOM files say themselves whose they are"
        )
    if not classes:
        raise DataError(
            f"{source} holds DICOM files and no csv: name their labels by study or patient with --labels-from FILE.csv "
            "or, where its folders are the classes, these folders with --labels A,B"
        )


def _group(
    source: Path,
    files: list[Path],
    classes: Sequence[str],
    reading: ReadOptions,
    faults: Faults,
    *,
    quiet: bool = False,
) -> tuple[list[Study], dict[int, str], int]:
    """Return the studies, what the files without a picture are, and the number of folders that are not in ``classes``.

    Studies are in the order of their first files; only folders with pictures are counted, where ``classes`` are given.
    """
    studies: dict[str, Study] = {}
    strange: set[str] = set()
    others: dict[int, str] = {}
    for number, path in enumerate(tqdm(files, desc="headers", unit="", disable=quiet)):
        where = place_of(source, number, len(files))
        header: Header | str = ""
        with faults.collect():
            header = header_of(source, path, where)
        if isinstance(header, str):
            others |= {number: header} if header else {}
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
            study.series.setdefault(header.identity["series"], []).append(
                (place, header.number, number, header.frames)
            )
    return list(studies.values()), others, len(strange)


def header_of(source: Path, path: Path, where: str) -> Header | str:
    """Return a file's header, or what it is without a picture. Raises DataError where it cannot be read."""
    if is_dicom(path):
        return read_header(path, where)
    if path.name.lower().endswith(DICOM) and not is_hidden(path, source):
        raise DataError(f"{where}: it is called like a DICOM file and is none")
    return kind_of_other(path, source, named=False)


def _folder(folders: tuple[str, ...]) -> tuple[str, str]:
    """Return split and class of a file below these folders."""
    if len(folders) > 1 and folders[0].lower() in SPLIT_NAMES:
        return SPLIT_NAMES[folders[0].lower()], folders[1]
    return "", folders[0] if folders else ""


def _matches(header: Header, pattern: str) -> bool:
    wanted = pattern.lower() if set(pattern) & set("*?") else f"*{pattern.lower()}*"
    return fnmatchcase(header.description.lower(), wanted)


def _slices(study: Study, count: int) -> list[tuple[int, int | None]]:
    """Return (file, frame) of the slices to use."""
    slices = _all_slices(study)
    return [slices[i] for i in parts_of(len(slices), count)]


def whole_series(
    made: SampleSource,
    study: Study,
    files: Sequence[Path],
    outlines: Mapping[str, Sequence[int]],
) -> SampleSource:
    """Return the sample of a study's whole series, with its outlines."""
    series = longest(study)
    own = tuple(files[number] for _, _, number, _ in study.series[series])
    return replace(
        made,
        part=None,
        files=own,
        masks=tuple(files[number] for number in outlines.get(series, ())),
    )


def longest(study: Study) -> str:
    """Return the series with the most files; in a tie the first."""
    return max(study.series, key=lambda series: len(study.series[series]))


def _all_slices(study: Study) -> list[tuple[int, int | None]]:
    """Return (file, frame) of all slices of the series with the most files; in a tie of the first.

    If the series is one file, its frames are the slices. Otherwise each file is a slice, with its middle frame (None).
    """
    series = sorted(study.series[longest(study)])
    if len(series) == 1:
        _, _, file, frames = series[0]
        return [(file, frame) for frame in range(frames)] if frames > 1 else [(file, None)]
    return [(file, None) for _, _, file, _ in series]


def _join(table: Path, studies: list[Study], label: Label, take: Take) -> Joined:
    """Join a csv of labels to studies. Raises DataError where its columns or lines do not allow it."""
    lines = read_lines(table, take.separator, take.encoding)
    header = lines.header
    column = join_key(header)
    if not column:
        raise DataError(
            f"{table} has no column study, accession or patient by which its labels belong to DICOM files"
        )
    kind = names_what(column)
    columns = label_columns(table, header, label, ("label",))
    if named := list(filter(names_what, columns)):
        raise DataError(f"{table}: column {named[0]} names studies or patients; it is no label")
    patients = (
        ""
        if take.patient
        else next((name for name in header if names_what(name) == "patient"), "")
    )
    patients = patients or patient_column(lines, take.patient, columns)
    for name in (column, patients):
        check_identifiers(lines, name)
    known: dict[str, tuple[str, Answer]] = {}
    for line in lines:
        where, row = line
        key = pseudonym(row[column])
        if not key:
            raise DataError(f"{where} has no {column}")
        answer = (
            labels_of(line, columns, take.decimal),
            split_of(line),
            row[patients] if patients else "",
        )
        if key in known and known[key][1] != answer:
            raise DataError(
                f"{where} says something else of the same {kind} than {known[key][0]}"
            )
        known[key] = where, answer
    found = [
        known[study.identity[kind]][1] if study.identity[kind] in known else None
        for study in studies
    ]
    if not any(found):
        raise DataError(
            f"{table}: its column {column} names none of the {len(studies)} studies"
        )
    used = {study.identity[kind] for study in studies} & known.keys()
    notes = []
    if without := found.count(None):
        notes.append(f"{without} of {len(studies)} studies are not in {table}: left out")
    if len(used) < len(known):
        notes.append(
            f"{len(known) - len(used)} of {len(known)} in column {column} of {table} have no DICOM files here"
        )
    return Joined(found, columns, notes, by=kind, patient=patients)
