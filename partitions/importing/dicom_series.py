"""Samples from a folder of DICOM files: per study the middle slice of one series, with labels from a csv.

Files are recognised by their content, anywhere below the folder. Messages name a file by its number (``files.py``).
A csv is joined by the first of these columns that it has: ``study`` (or StudyInstanceUID), ``accession``
(AccessionNumber), ``patient`` (PatientID). Without a csv the folders of the first level are the classes, but only where
the user names the classes, because folders often have patients' names.

For each study, the series with the most files is used, of those whose description matches a pattern, if one is given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.files import (
    Faults,
    check_inside,
    files_below,
    is_hidden,
    kind_of_other,
    link_notes,
    list_kinds,
    placed_files,
)
from partitions.importing.options import ImportOptions
from partitions.importing.readers import dicom
from partitions.importing.readers.dicom import Header, read_header
from partitions.importing.readers.dicom_file import is_dicom
from partitions.importing.readers.reader import (
    SampleSource,
    hash_text,
    pseudonym,
    redacted_errors,
    slices_taken,
)
from partitions.importing.readers.volumes.series import referenced_series
from partitions.importing.table_labels import SPLIT_NAMES
from partitions.importing.table_source import Listing
from partitions.importing.targets import Answer, Joined, join_labels
from partitions.recipes.reading import ReadOptions

Placed = Sequence[tuple[str, Path]]  # files, each with its name for messages


@dataclass(slots=True)
class Study:
    """One study: pseudonyms of its identifiers, and the slices of each requested series.

    A slice is (mm along the normal, number in its series, file, frames); slices are sorted by this tuple.
    """

    identity: Mapping[str, str]
    folder: tuple[str, str]  # split and class, where folders stand for these
    series: dict[str, list[tuple[float, int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @property
    def longest(self) -> str:
        """The series with the most files; in a tie the first."""
        return max(self.series, key=lambda series: len(self.series[series]))

    @property
    def slices(self) -> list[tuple[int, int | None]]:
        """File and frame of all slices of the longest series.

        If the series is one file, its frames are the slices. Otherwise each file is a slice, with its middle frame
        (None).
        """
        slices = sorted(self.series[self.longest])
        _, _, file, frames = slices[0]
        if len(slices) == 1 and frames > 1:
            return [(file, frame) for frame in range(frames)]
        return [(file, None) for _, _, file, _ in slices]


def holds_dicom(folder: Path) -> bool:
    """Return whether any file below a folder is DICOM."""
    return any(map(is_dicom, files_below(folder)))


def find_studies(
    source: Path,
    table: Path | None,
    classes: Sequence[str],
    options: ImportOptions,
    *,
    labelled: bool,
) -> Listing:
    """Return the samples of a folder of DICOM files.

    ``table``: the csv with their labels; without one, and with ``labelled``, ``classes`` are names of folders. Raises
    DataError, one line, without identifiers or names of files and folders, where studies or labels cannot be
    determined.
    """
    reading, faults, problems = options.reading, options.faults, options.problems
    known = len(problems.errors)
    named = classes if labelled and not table else ()
    if labelled and not table and options.take.patient:
        problems.add(
            "--patient names a column of a csv; without one DICOM files say themselves whose they are"
        )
    elif labelled and not table and not classes:
        problems.add(
            f"{source} holds DICOM files and no csv: name their labels by study or patient with --labels-from FILE.csv "
            "or, where its folders are the classes, these folders with --labels A,B"
        )
    placed = placed_files(source)
    check_inside(source, placed)
    files = [path for _, path in placed]
    studies, others = _group(source, placed, named, reading, faults)
    outlines = find_outlines(placed, others, options) if reading.outlines else {}
    with problems.collect():
        faults.check(len(files))
    kinds = Counter(kind for number, kind in others.items() if files[number] != table)
    passed = f"{kinds.total()} of {len(files)} files hold no DICOM picture: passed over"
    notes = [f"{passed} ({list_kinds(kinds)})"] * bool(kinds) + [*link_notes(source)]
    studies = with_series(source, studies, reading, outlines, notes)
    joined = answers_of(studies, table, labelled, options)
    notes += joined.notes
    used = [(s, answer) for s, answer in zip(studies, joined.answers, strict=True) if answer]
    rows = [row for pair in used for row in _samples(*pair, placed, outlines, reading)]
    if several := sum(len(study.slices) > 1 for study, _ in used):
        note = f"{several} of {len(used)} studies have several slices: the middle one is taken (--slices)"
        notes += [note] * (reading.slices == 1 and not reading.volume)
    by = "outlines" if outlines and reading.volume else joined.by
    complete = len(problems.errors) == known
    return Listing(
        rows, joined.columns, tuple(notes), by=by, patient=joined.patient, labelled=complete
    )


def answers_of(
    studies: Sequence[Study], table: Path | None, labelled: bool, options: ImportOptions
) -> Joined:
    """Return the label of each study: from the csv, or else its folder's name."""
    if table:
        identities = [study.identity for study in studies]
        with options.problems.collect():
            label = options.survival or options.label
            return join_labels(table, identities, label, options.take)
    answers: list[Answer | None] = [
        ((name,) * labelled, split, "") for split, name in (study.folder for study in studies)
    ]
    return Joined(answers, (), [], by="folder", patient="")


def _samples(
    study: Study,
    answer: Answer,
    placed: Placed,
    outlines: Mapping[str, Sequence[int]],
    reading: ReadOptions,
) -> Iterator[SampleSource]:
    """Yield a sample of each slice of a study that is used, or of its whole series with its outlines."""
    labels, split, patient = answer
    name, spelling = pseudonym(patient) or study.identity["patient"], hash_text(patient)
    whole = tuple(placed[number][1] for _, _, number, _ in study.series[study.longest])
    masks = tuple(placed[number][1] for number in outlines.get(study.longest, ()))
    slices = study.slices
    for number, frame in (slices[i] for i in slices_taken(len(slices), reading.slices)):
        where, file = placed[number]
        sample = SampleSource(where, labels, split, name, file, spelling=spelling)
        if reading.volume:
            yield replace(sample, files=whole, masks=masks)
        else:
            yield replace(sample, part=frame)


def with_series(
    source: Path,
    studies: list[Study],
    reading: ReadOptions,
    outlines: Mapping[str, Sequence[int]],
    notes: list[str],
) -> list[Study]:
    """Return the studies with a requested series; notes get the others. Raises DataError where none has one.

    ``outlines``: the series with outlines, to which the request is limited where outlines are read.
    """
    if not studies:
        raise DataError(f"{source}: none of its files holds a DICOM picture")
    requested = f"like {reading.series!r}" if reading.series or not reading.outlines else ""
    if reading.outlines:
        requested = f"{requested} with a SEG or RTSTRUCT object".strip()
        for study in studies:
            study.series = {k: slices for k, slices in study.series.items() if k in outlines}
    kept = [study for study in studies if study.series]
    if not kept:
        raise DataError(f"{source}: no study has a series {requested}")
    if lost := len(studies) - len(kept):
        notes.append(f"{lost} of {len(studies)} studies have no series {requested}: left out")
    return kept


def find_outlines(
    placed: Placed, others: dict[int, str], options: ImportOptions
) -> dict[str, list[int]]:
    """Return which of the ``others`` outline a series, by its pseudonym; they are others no more."""
    outlines = defaultdict[str, list[int]](list)
    for number in list(others):
        where, file = placed[number]
        with options.faults.collect(), redacted_errors(where, "DICOM"):
            for series in referenced_series(file) if is_dicom(file) else ():
                outlines[series].append(number)
                others.pop(number, None)
    return outlines


def has_outlines(folder: Path) -> bool:
    """Return whether a file below a folder outlines a series."""
    with redacted_errors(str(folder), "DICOM"):
        return any(is_dicom(path) and referenced_series(path) for path in files_below(folder))


def series_below(folder: Path, where: str, reading: ReadOptions) -> tuple[Path, ...]:
    """Return the files of the only series in a folder. Raises DataError where there is none, or several."""
    placed = placed_files(folder)
    check_inside(folder, ((where, path) for _, path in placed))
    faults = Faults(None)
    studies, _ = _group(folder, placed, (), reading, faults, quiet=True)
    faults.check(len(placed))
    series = [slices for study in studies for slices in study.series.values()]
    if len(series) != 1:
        raise DataError(
            f"{where}: its folder has {len(series)} series; one is a volume, chosen by --series"
        )
    return tuple(placed[number][1] for _, _, number, _ in series[0])


def _group(
    source: Path,
    placed: Placed,
    classes: Sequence[str],
    reading: ReadOptions,
    faults: Faults,
    *,
    quiet: bool = False,
) -> tuple[list[Study], dict[int, str]]:
    """Return the studies, in the order of their first files, and what the files without a picture are.

    ``classes``: names of folders, beside which there is no other folder with pictures.
    """
    studies, strange, others = dict[str, Study](), set[str](), dict[int, str]()
    pattern = reading.series.lower()
    pattern = pattern if set(pattern) & set("*?") else f"*{pattern}*"
    looked_at = tqdm(placed, desc="headers", unit="", disable=quiet)
    for number, (where, path) in enumerate(looked_at):
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
        if fnmatchcase(header.description.lower(), pattern):
            place = float(header.number) if header.position is None else header.position
            study.series[header.identity["series"]].append(
                (place, header.number, number, header.frames)
            )
    if strange:
        raise DataError(
            f"{source} has DICOM files outside its folders {', '.join(classes)}: {len(strange)} other folders"
        )
    return list(studies.values()), others


def header_of(source: Path, path: Path, where: str) -> Header | str:
    """Return a file's header, or what it is without a picture. Raises DataError where it cannot be read."""
    if is_dicom(path):
        return read_header(path, where)
    if path.name.lower().endswith(dicom.ENDINGS) and not is_hidden(path, source):
        raise DataError(f"{where}: it is called like a DICOM file and is none")
    return kind_of_other(path, source, named=False)


def _folder(folders: Names) -> tuple[str, str]:
    """Return split and class of a file below these folders."""
    first, second = (*folders, "", "")[:2]
    split = SPLIT_NAMES.get(first.lower(), "") if second else ""
    return split, second if split else first
