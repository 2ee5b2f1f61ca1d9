"""Discovery of samples: csv lists, folders of classes, folders of DICOM studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from partitions.common.errors import DataError
from partitions.importing.dicom_file import is_dicom
from partitions.importing.dicom_series import (
    find_studies,
    has_outlines,
    holds_dicom,
    series_below,
)
from partitions.importing.files import (
    check_links,
    files_below,
    is_hidden,
    kind_of_other,
    list_kinds,
    outside,
    passed_over,
    place_of,
)
from partitions.importing.images import (
    NIFTI,
    SIGNALS,
    SampleSource,
    is_sample,
    kind_of,
    paths_of,
)
from partitions.importing.options import ImportOptions
from partitions.importing.scans import hash_text, pseudonym
from partitions.importing.table.source import Found, read_csv
from partitions.importing.tables import SPLIT_NAMES, Label, read_lines
from partitions.importing.volumes import volume
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.reading import ReadOptions


def find_rows(source: Path, options: ImportOptions) -> Found:
    """Return all samples of a source."""
    if options.pictures:
        return find_others(source, options.pictures, options)
    label: Label = options.survival or options.label
    table = Path(options.labels_from) if options.labels_from else None
    classes = options.labels
    reading = options.reading
    take = options.take
    whose = take, options.faults
    if source.is_file():
        if kind_of(source) != "picture":
            what = "signal" if kind_of(source) == "signal" else "scan"
            raise DataError(
                f"{source} is one {what}; name the folder that it lies in, or a csv with a column file"
            )
        if table:
            raise DataError("--labels-from goes with a folder of DICOM files")
        return slice_volumes(read_csv(source, options), options)
    own = None if table else only_csv(source)
    if own and not is_joined(own, source):
        return slice_volumes(within(read_csv(own, options), source, own), options)
    table = table or own
    if reading.outlines and (table or label or take.patient or not holds_dicom(source)):
        raise DataError(
            f"{source}: --outlines are the labels of a folder of DICOM files; leave out a csv and its columns"
        )
    if table or holds_dicom(source):
        return find_studies(
            source, table, label, classes, reading, *whose, labelled=not reading.outlines
        )
    rows = list(folder_rows(source, take.patient))
    if not rows:
        raise DataError(f"{source} has no csv file and no folders of pictures, one per class")
    if any(is_unnamed(row) for row in rows):
        if not classes:
            what = "NIfTI files" if any(is_nifti(row) for row in rows) else "signals"
            raise DataError(
                f"{source} holds {what} and no csv: name them and their labels in a csv with columns file, label "
                "or, where its folders are the classes, these folders with --labels A,B"
            )
        if strange := {row.labels[0] for row in rows} - set(classes):
            raise DataError(f"{source} has {len(strange)} folders besides {', '.join(classes)}")
    return slice_volumes(found_in_folders(rows, source, options), options)


def find_others(
    source: Path, recipe: PictureRecipe, options: ImportOptions, *, labelled: bool = True
) -> Found:
    """Return the samples for a recipe of pictures, with labels as in the recipe, or without labels.

    ``labelled``: False reads no labels even where there are some, and no csv in a folder.
    """
    unread = csv_files(source) if source.is_dir() and not labelled else []
    if labelled and recipe.reading.outlines:
        labelled = source.is_dir() and has_outlines(source)
    recipe = recipe if labelled else without_labels(recipe)
    reading, take = recipe.reading, options.take
    whose = take, options.faults
    if source.is_file():
        return slice_volumes(in_file(source, options), options)
    table = Path(options.labels_from) if options.labels_from else None
    own = None if table or unread else only_csv(source)
    if own and not is_joined(own, source):
        return slice_volumes(within(read_csv(own, options), source, own), options)
    table = (table or own) if labelled else None
    of_classes = (
        not table and recipe.labels_by == "folder" and has_classes(source, recipe.classes)
    )
    if holds_dicom(source):
        labelled = bool(table) or of_classes
        classes = recipe.classes if of_classes else ()
        found = find_studies(
            source, table, recipe.label or None, classes, reading, *whose, labelled=labelled
        )
        return replace(found, labelled=labelled or bool(reading.outlines))
    if of_classes:
        return slice_volumes(
            found_in_folders(list(folder_rows(source, take.patient)), source, options), options
        )
    rows = linked_inside(list(loose_rows(source)), source)
    if not rows:
        instead = (
            f"; name its csv itself ({unread[0].name})"
            if unread
            else " and no csv that lists some"
        )
        raise DataError(f"{source} has no pictures{instead}")
    notes = passed_over(
        source,
        [*csv_files(source), *(path for row in rows for path in paths_of(row))],
        named=False,
    )
    return slice_volumes(Found(rows, labelled=False, notes=notes), options)


def without_labels(recipe: PictureRecipe) -> PictureRecipe:
    """Return the recipe for pictures without labels."""
    made = recipe.pictures.model_copy(update={"outlines": ()})
    return recipe.model_copy(
        update={"label": (), "labels_by": "file", "task": "auto", "pictures": made}
    )


def in_file(source: Path, options: ImportOptions) -> Found:
    """Return the samples in a csv, or the one picture or scan in a file, without a label."""
    if source.suffix.lower() == ".csv":
        return read_csv(source, options)
    where = "the file" if kind_of(source) != "picture" else str(source)
    return Found([SampleSource(where, (), "", "", file=source)], labelled=False)


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


def found_in_folders(rows: list[SampleSource], source: Path, options: ImportOptions) -> Found:
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
    rows = linked_inside(number_samples(rows, source), source)
    return Found(
        rows,
        by="folder",
        patient=patient,
        notes=passed_over(source, taken, named=named and not patient),
    )


def linked_inside(rows: list[SampleSource], source: Path) -> list[SampleSource]:
    """Return the rows. Raises DataError where a file is a link out of the source."""
    check_links(source, ((row.where, path) for row in rows for path in paths_of(row)))
    return rows


def within(found: Found, source: Path, table: Path) -> Found:
    """Return the samples of a folder's own csv ``table``, and a note on files that it does not list.

    Raises DataError for a file outside the folder, or a link to one.

    A list in an export must not reach other files of the hospital. A csv that the user names itself may.
    """
    for where in outside(
        source, ((row.where, file) for row in found.rows for file in paths_of(row))
    ):
        raise DataError(
            f"{where} names a file outside its folder: name the csv, not the folder, if the list is yours"
        )
    listed = [path for row in found.rows for path in paths_of(row)]
    if not listed:
        return found
    folders = [path for path in listed if path.is_dir()]
    below = [path for folder in folders for path in files_below(folder)]
    notes = passed_over(source, [table, *listed, *below], named=False)
    return replace(found, notes=(*found.notes, *notes))


def has_classes(source: Path, classes: Sequence[str]) -> bool:
    """Return whether all folders in a folder, or those below train, val and test, are classes."""
    folders = class_folders(source)
    return bool(folders) and {folder.name for _, folder in folders} <= set(classes)


def loose_rows(source: Path) -> Iterator[SampleSource]:
    """Yield pictures and volumes anywhere below a folder, without labels."""
    files = list(files_below(source))
    for number, path in enumerate(files):
        if is_sample(path) and not path.name.startswith("."):
            made = SampleSource(str(path), (), "", "", file=path)
            where = place_of(source, number, len(files))
            yield replace(made, where=where) if is_unnamed(made) else made


def is_joined(table: Path, source: Path) -> bool:
    """Return whether a folder's csv has labels for DICOM files there without a column of files."""
    return holds_dicom(source) and "file" not in read_lines(table).columns


def number_samples(rows: list[SampleSource], source: Path) -> list[SampleSource]:
    """Name volumes, and files in a patient's folder, by their number among all files of the source.

    This is done as for DICOM files: names may contain patients' names.
    """
    if not any(is_unnamed(row) or row.patient for row in rows):
        return rows
    files = list(files_below(source))
    place = {path: place_of(source, number, len(files)) for number, path in enumerate(files)}
    return [
        replace(row, where=place[row.file])
        if row.file and (row.patient or is_unnamed(row))
        else row
        for row in rows
    ]


def is_unnamed(row: SampleSource) -> bool:
    """Return whether a row's file is a NIfTI volume or a signal, whose name may be a patient's."""
    return row.file is not None and row.file.name.lower().endswith((*NIFTI, *SIGNALS))


def is_nifti(row: SampleSource) -> bool:
    """Return whether a row's picture is a NIfTI volume."""
    return row.file is not None and row.file.name.lower().endswith(NIFTI)


def slice_volumes(found: Found, options: ImportOptions) -> Found:
    """Return the rows with one for each requested slice of a NIfTI volume, or with whole volumes if requested."""
    reading, faults = options.reading, options.faults
    if reading.volume:
        volumes = faults.good(found.rows, lambda row: whole(row, reading), "volumes")
        return replace(found, rows=[row for _, row in volumes])
    if not any(map(is_nifti, found.rows)):
        return found
    made = faults.good(found.rows, lambda row: slices_of(row, reading), "headers")
    several = sum(deep for _, (_, deep) in made)
    notes = [f"{several} volumes have several slices: the middle one is taken (--slices)"]
    notes = notes * (several > 0 and reading.slices == 1)
    return replace(
        found, rows=[row for _, (rows, _) in made for row in rows], notes=(*found.notes, *notes)
    )


def slices_of(row: SampleSource, reading: ReadOptions) -> tuple[list[SampleSource], bool]:
    """Return a row for each requested slice of a NIfTI volume, and whether there are more slices."""
    if not is_nifti(row) or row.file is None:
        return [row], False
    numbers, depth = volume.parts(row.file, row.where, reading)
    return [replace(row, part=part) for part in numbers], depth > len(numbers)


def whole(row: SampleSource, reading: ReadOptions) -> SampleSource:
    """Return a row with the files of its whole volume. Raises DataError where it is not a volume."""
    if row.files or row.file is None:
        return row
    if row.file.is_dir():
        files = series_below(row.file, row.where, reading)
    elif is_nifti(row) or is_dicom(row.file):
        files = (row.file,)
    else:
        raise DataError(
            f"{row.where}: its file is no volume; --volume takes NIfTI, and folders of one DICOM series"
        )
    return replace(
        row, file=files[0], files=files, mask=None, masks=(row.mask,) if row.mask else ()
    )


def class_folders(source: Path) -> list[tuple[str, Path]]:
    """Return folders that may be classes, each with its split, "" without folders train, val and test."""
    folders = folders_in(source)
    if folders and all(folder.name.lower() in SPLIT_NAMES for folder in folders):
        return [
            (SPLIT_NAMES[folder.name.lower()], path)
            for folder in folders
            for path in folders_in(folder)
        ]
    return [("", folder) for folder in folders]


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


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
