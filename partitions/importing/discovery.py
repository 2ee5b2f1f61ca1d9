"""Discovery of samples: csv lists, folders of classes, folders of DICOM studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from partitions.common.errors import DataError
from partitions.importing.dicom_series import (
    find_studies,
    has_outlines,
    holds_dicom,
    series_below,
)
from partitions.importing.files import (
    check_inside,
    files_below,
    is_hidden,
    kind_of_other,
    list_kinds,
    passed_over,
    placed_files,
)
from partitions.importing.options import ImportOptions
from partitions.importing.readers.dicom_file import is_dicom
from partitions.importing.readers.formats import ENDINGS
from partitions.importing.readers.reader import SampleSource, hash_text, pseudonym
from partitions.importing.readers.registry import SCANS, is_sample, kind_of, paths_of
from partitions.importing.readers.volumes import volume
from partitions.importing.table_labels import SPLIT_NAMES
from partitions.importing.table_source import Listing, read_csv
from partitions.importing.tables import read_lines
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.reading import ReadOptions

LISTED_OUT = (
    "names a file outside its folder: name the csv, not the folder, if the list is yours"
)


def find_rows(source: Path, options: ImportOptions) -> Listing:
    """Return all samples of a source."""
    if options.pictures:
        return find_others(source, options.pictures, options)
    take, outlines, classes = options.take, options.reading.outlines, options.labels
    if source.is_file():
        if (kind := kind_of(source)) != "picture":
            what = "signal" if kind == "signal" else "scan"
            raise DataError(
                f"{source} is one {what}; name the folder that it lies in, or a csv with a column file"
            )
        if options.labels_from:
            raise DataError("--labels-from goes with a folder of DICOM files")
        return slice_volumes(read_csv(source, options), options)
    table, scans = folder_csv(source, options), holds_dicom(source)
    if isinstance(table, Listing):
        return table
    label = options.survival or options.label
    if outlines and (table or label or take.patient or not scans):
        raise DataError(
            f"{source}: --outlines are the labels of a folder of DICOM files; leave out a csv and its columns"
        )
    if table or scans:
        return find_studies(source, table, classes, options, labelled=not outlines)
    rows = list(folder_rows(source, take.patient))
    if not rows:
        raise DataError(f"{source} has no csv file and no folders of pictures, one per class")
    if any(map(is_unnamed, rows)):
        if not classes:
            what = "NIfTI files" if any(map(is_nifti_row, rows)) else "signals"
            raise DataError(
                f"{source} holds {what} and no csv: name them and their labels in a csv with columns file, label "
                "or, where its folders are the classes, these folders with --labels A,B"
            )
        check_folders(source, {row.labels[0] for row in rows}, classes)
    return found_in_folders(rows, source, options)


def check_folders(source: Path, folders: Iterable[str], classes: Sequence[str]) -> None:
    """Raise DataError for folders that are none of the classes."""
    if strange := {*folders} - {*classes}:
        raise DataError(f"{source} has {len(strange)} folders besides {', '.join(classes)}")


def find_others(
    source: Path, recipe: PictureRecipe, options: ImportOptions, *, labelled: bool = True
) -> Listing:
    """Return the samples for a recipe of pictures, with labels as in the recipe, or without labels.

    ``labelled``: False reads no labels even where there are some, and no csv in a folder.
    """
    if source.is_file():
        if source.suffix.lower() in ENDINGS:
            return slice_volumes(read_csv(source, options), options)
        where = "the file" if kind_of(source) != "picture" else str(source)
        rows = [SampleSource(where, file=source)]
        return slice_volumes(Listing(rows, labelled=False), options)
    table = folder_csv(source, options) if labelled else None
    if isinstance(table, Listing):
        return table
    if recipe.reading.outlines and not (labelled and has_outlines(source)):
        labelled, table = False, None
    folders = {folder.name for _, folder in class_folders(source)}
    by_folder = labelled and not table and recipe.labels_by == "folder"
    of_classes = by_folder and bool(folders) and folders <= {*recipe.classes}
    if holds_dicom(source):
        outlined = labelled and bool(recipe.reading.outlines)
        changed = {"outlines": recipe.reading.outlines * outlined}
        pictures = {"pictures": recipe.pictures.model_copy(update=changed)}
        plain = replace(options, pictures=recipe.model_copy(update=pictures))
        labelled = bool(table) or of_classes
        listing = find_studies(
            source, table, recipe.classes * of_classes, plain, labelled=labelled
        )
        return replace(listing, labelled=listing.labelled and (labelled or outlined))
    if of_classes:
        rows = list(folder_rows(source, options.take.patient))
        return found_in_folders(rows, source, options)
    files = filter(is_sample, files_below(source))
    loose = (path for path in files if not path.name.startswith("."))
    rows = numbered_inside([SampleSource(str(path), file=path) for path in loose], source)
    tables = csv_files(source)
    if not rows:
        instead = (
            f"; name its csv itself ({tables[0].name})"
            if tables
            else " and no csv that lists some"
        )
        raise DataError(f"{source} has no pictures{instead}")
    taken = [*tables, *(path for row in rows for path in paths_of(row))]
    notes = passed_over(source, taken, named=False)
    return slice_volumes(Listing(rows, labelled=False, notes=notes), options)


def csv_files(folder: Path) -> list[Path]:
    """Return the csv files in a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv")


def only_csv(folder: Path) -> Path | None:
    """Return the csv in a folder, if there is one. Raises DataError where there are several."""
    if len(tables := csv_files(folder)) > 1:
        raise DataError(
            f"{folder} has several csv files ({tables[0].name}, {tables[1].name}); name the one to use"
        )
    return next(iter(tables), None)


def folder_csv(source: Path, options: ImportOptions) -> Listing | Path | None:
    """Return the samples that a folder's csv lists, or else the csv with labels of its DICOM files, if there is one."""
    table = options.labels_from or only_csv(source)
    if not table or options.labels_from or is_joined(table, source):
        return table
    return slice_volumes(within(read_csv(table, options), source, table), options)


def found_in_folders(rows: list[SampleSource], source: Path, options: ImportOptions) -> Listing:
    """Return the samples in folders of classes, and notes. Raises DataError for a folder with files and no picture."""
    named = not any(map(is_unnamed, rows))
    patient = options.take.patient or ""
    taken = [path for row in rows for path in paths_of(row)]
    for _, folder in class_folders(source):
        others = [path for path in files_below(folder) if not is_hidden(path, source)]
        if others and not any(path and path.is_relative_to(folder) for path in taken):
            kinds = list_kinds(
                Counter(kind_of_other(path, source, named=named) for path in others)
            )
            with options.faults.collect():
                which = f"{folder}: its" if named else f"{source}: a folder's"
                raise DataError(
                    f"{which} {len(others)} files are no pictures ({kinds}): convert them, or take it out"
                )
    options.faults.check(len(class_folders(source)))
    rows = numbered_inside(rows, source)
    notes = passed_over(source, taken, named=named and not patient)
    listing = Listing(rows, by="folder", patient=patient, notes=notes)
    return slice_volumes(listing, options)


def within(listing: Listing, source: Path, table: Path) -> Listing:
    """Return the samples of a folder's own csv ``table``, and a note on files that it does not list.

    Raises DataError for a file outside the folder, or a link to one.

    A list in an export must not reach other files of the hospital. A csv that the user names itself may.
    """
    listed = [(row.where, path) for row in listing.rows for path in paths_of(row)]
    check_inside(source, listed, LISTED_OUT)
    if not listed:
        return listing
    taken = [table]
    for _, path in listed:
        taken += [path, *(files_below(path) if path.is_dir() else ())]
    return replace(listing, notes=(*listing.notes, *passed_over(source, taken, named=False)))


def is_joined(table: Path, source: Path) -> bool:
    """Return whether a folder's csv has labels for DICOM files there without a column of files."""
    return holds_dicom(source) and "file" not in read_lines(table).columns


def numbered_inside(rows: list[SampleSource], source: Path) -> list[SampleSource]:
    """Name volumes, and files in a patient's folder, by their number among all files of the source.

    This is done as for DICOM files: names may contain patients' names. Raises DataError where a file is a link out of
    the source.
    """
    if any(is_unnamed(row) or row.patient for row in rows):
        place = {path: where for where, path in placed_files(source)}
        rows = [
            replace(row, where=place[row.path]) if row.patient or is_unnamed(row) else row
            for row in rows
        ]
    check_inside(source, ((row.where, path) for row in rows for path in paths_of(row)))
    return rows


def is_unnamed(row: SampleSource) -> bool:
    """Return whether a row's file is a NIfTI volume or a signal, whose name may be a patient's."""
    return row.path.name.lower().endswith(SCANS)


def is_nifti_row(row: SampleSource) -> bool:
    """Return whether a row's picture is a NIfTI volume."""
    return row.file is not None and kind_of(row.file) == "nifti"


def slice_volumes(listing: Listing, options: ImportOptions) -> Listing:
    """Return the rows with one for each requested slice of a NIfTI volume, or with whole volumes if requested."""
    reading, faults = options.reading, options.faults
    if reading.volume:
        volumes = faults.good(listing.rows, lambda row: whole_volume(row, reading), "volumes")
        return replace(listing, rows=[row for _, row in volumes])
    if not any(map(is_nifti_row, listing.rows)):
        return listing

    def parts(row: SampleSource) -> tuple[list[int | None], int]:
        if not is_nifti_row(row):
            return [row.part], 1
        return volume.volume_parts(row.path, row.where, reading)

    divided = faults.good(listing.rows, parts, "headers")
    rows = [replace(row, part=part) for row, (numbers, _) in divided for part in numbers]
    several = sum(depth > len(numbers) for _, (numbers, depth) in divided)
    notes = listing.notes
    if several and reading.slices == 1:
        notes += (f"{several} volumes have several slices: the middle one is taken (--slices)",)
    return replace(listing, rows=rows, notes=notes)


def whole_volume(row: SampleSource, reading: ReadOptions) -> SampleSource:
    """Return a row with the files of its whole volume. Raises DataError where it is not a volume."""
    if row.file is None:
        return row
    if row.file.is_dir():
        files = series_below(row.file, row.where, reading)
    elif is_nifti_row(row) or is_dicom(row.file):
        files = (row.file,)
    else:
        raise DataError(
            f"{row.where}: its file is no volume; --volume takes NIfTI, and folders of one DICOM series"
        )
    return replace(row, file=files[0], files=files)


def class_folders(source: Path) -> list[tuple[str, Path]]:
    """Return folders that may be classes, each with its split, "" without folders train, val and test."""

    def below(folder: Path) -> list[Path]:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))

    splits = {folder: SPLIT_NAMES.get(folder.name.lower(), "") for folder in below(source)}
    if not all(splits.values()):
        return [("", folder) for folder in splits]
    return [(split, path) for folder, split in splits.items() for path in below(folder)]


def folder_rows(source: Path, patient: str | None) -> Iterator[SampleSource]:
    """Yield pictures in one folder per class, possibly below train, val and test folders.

    ``patient``: "folder" where folders below the classes are patients, None where they are not; "" refuses them.
    """
    for split, folder in class_folders(source):
        for path in sorted(files_below(folder)):
            if is_hidden(path, folder) or not is_sample(path):
                continue
            below = path.relative_to(folder).parts
            if len(below) > 1 and patient != "folder" and patient is not None:
                raise DataError(
                    f"{source} has pictures in folders below its classes: --patient folder takes each of these for a "
                    "patient, --no-patient for nothing"
                )
            owner = below[0] if len(below) > 1 and patient else ""
            yield SampleSource(
                str(path),
                (folder.name,),
                split,
                pseudonym(owner),
                path,
                spelling=hash_text(owner),
            )
