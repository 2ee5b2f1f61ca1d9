"""Samples from a folder of DICOM files: per study the middle slice of one series, with labels from a csv.

Files are recognised by their content, anywhere below the folder. Messages name a file by its number (``files.py``).
A csv is joined by the first of these columns that it has: ``study`` (or StudyInstanceUID), ``accession``
(AccessionNumber), ``patient`` (PatientID). Without a csv the folders of the first level are the classes, but only where
the user names the classes, because folders often have patients' names.

For each study, the series with the most files is used, of those whose description matches a pattern, if one is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import compress
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.dicom import Header, read_header
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
from partitions.importing.scans import Paths, hash_text, parts_of, pseudonym, redacted_errors
from partitions.importing.table.source import Found
from partitions.importing.tables import SPLIT_NAMES, Label
from partitions.importing.targets import Answer, join_labels
from partitions.importing.volumes.outlines import referenced_series
from partitions.recipes.reading import ReadOptions


@dataclass(slots=True)
class Study:
    """One study: pseudonyms of its identifiers, and the slices of each requested series.

    A slice is (mm along the normal, number in its series, file, frames); slices are sorted by this tuple.
    """

    identity: dict[str, str]
    folder: tuple[str, str]  # split and class, where folders stand for these
    series: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)


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
    check_links(source, ((place_of(source, n, len(files)), own) for n, own in enumerate(files)))
    faults = faults or Faults()
    named = classes if labelled and not table else ()
    studies, rest, strange = _group(source, files, named, reading, faults)
    outlines = find_outlines(source, files, list(rest), reading, faults)
    faults.check(len(files))
    used = {number for own in outlines.values() for number in own}
    others = {n: kind for n, kind in rest.items() if n not in used and files[n] != table}
    check_studies(source, studies, classes, strange)
    studies, left_out = with_series(source, studies, reading, outlines)
    notes = [*other_notes(source, files, others), *left_out]
    by, patients, columns = "folder", "", Names()
    labels: list[Answer] = [
        ((study.folder[1],) if labelled else (), study.folder[0], "") for study in studies
    ]
    if table:
        joined = join_labels(table, [study.identity for study in studies], label, take)
        by, patients, columns = joined.by, joined.patient, joined.columns
        labels = [found for found in joined.answers if found is not None]
        studies = [*compress(studies, joined.answers)]
        notes += joined.notes
    rows = [
        whole_series(made, study, files, outlines) if reading.volume else made
        for study, answer in zip(studies, labels, strict=True)
        for made in _samples(source, files, study, answer, reading)
    ]
    if reading.slices == 1 and not reading.volume:
        notes += slice_notes(studies)
    by = "outlines" if outlines and reading.volume else by
    return Found(rows, columns, tuple(notes), by=by, patient=patients)


def slice_notes(studies: Sequence[Study]) -> list[str]:
    """Return a note on studies of which one slice of several is taken."""
    several = sum(len(_all_slices(study)) > 1 for study in studies)
    note = f"{several} of {len(studies)} studies have several slices: the middle one is taken (--slices)"
    return [note] * bool(several)


def _samples(
    source: Path, files: Paths, study: Study, answer: Answer, reading: ReadOptions
) -> Iterator[SampleSource]:
    """Yield a sample of each slice of a study that is used."""
    labels, split, patient = answer
    name = pseudonym(patient) or study.identity["patient"]
    for number, frame in _slices(study, reading.slices):
        where, own = place_of(source, number, len(files)), hash_text(patient)
        yield SampleSource(where, labels, split, name, files[number], spelling=own, part=frame)


def other_notes(source: Path, files: Paths, others: Mapping[int, str]) -> list[str]:
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
    source: Path, files: Paths, numbers: Sequence[int], reading: ReadOptions, faults: Faults
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


def _folder(folders: Names) -> tuple[str, str]:
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
    made: SampleSource, study: Study, files: Paths, outlines: Mapping[str, Sequence[int]]
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
