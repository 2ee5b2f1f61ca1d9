"""Samples from a csv: a list of pictures where it has a column ``file``, else a table, by its recipe or a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partitions.common.errors import DataError, Problems
from partitions.common.names import Names
from partitions.importing.options import ImportOptions, Take
from partitions.importing.readers.reader import SampleSource, hash_text, pseudonym
from partitions.importing.readers.wfdb import with_ending
from partitions.importing.row_kinds import check_row_kinds
from partitions.importing.table_draft import draft_recipe
from partitions.importing.table_labels import (
    Label,
    label_columns,
    line_labels,
    list_columns,
    split_of,
)
from partitions.importing.tables import UTF8, read_lines
from partitions.patients import parse_column, subgroup_name
from partitions.recipes.lines import Line, Lines, cells_in
from partitions.recipes.people import (
    check_identifiers,
    divided_patients,
    patient_column,
    unknown_column,
)
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.pipeline import check_gaps, check_misfits, convert_columns
from partitions.recipes.recipe import Recipe
from partitions.recipes.values import unknown_notes
from partitions.schema import few


@dataclass(frozen=True)
class Listing:
    """Samples of a source, the label columns, and notes; for a table also its recipe and converted cells.

    * ``table``: the used columns, from ``recipes.pipeline.convert_columns``.
    * ``by``: how labels were found (``recipes.pictures.LABELS_BY``).
    * ``patient``: the column of patients; ``labelled``: whether there are labels.
    """

    rows: list[SampleSource]
    columns: Names = ()
    notes: Names = ()
    recipe: Recipe | None = None
    table: Any = None
    by: str = "file"
    patient: str = ""
    labelled: bool = True


def read_csv(path: Path, options: ImportOptions) -> Listing:
    """Read the samples of a csv."""
    if options.recipe:
        lines, notes = lines_by(path, options.recipe)
        listing = rows_by_recipe(lines, options.recipe, options.as_gaps)
        listing = replace(listing, notes=(*notes, *listing.notes))
    else:
        lines = read_lines(path, options.take)
        listing = csv_samples(lines, options)
    return with_subgroups(lines, listing, options) if options.subgroup else listing


def with_subgroups(lines: Lines, listing: Listing, options: ImportOptions) -> Listing:
    """Add their subgroups to samples, each from its line. Raises DataError, or UserError for a wrong column."""
    column, limits = parse_column(options.subgroup)
    if column not in lines.columns:
        raise unknown_column(lines.path, column, lines.header)
    form = listing.recipe.file if listing.recipe else replace(options.take, gaps=())
    names = {}
    for cell, where in cells_in(lines, column, form.gaps).items():
        plain = cell.replace(",", ".") if form.decimal == "," and limits else cell
        names[cell] = subgroup_name(plain, column, limits, where)
    rows = [
        replace(sample, subgroup=names.get(cell, ""))
        for sample, cell in zip(listing.rows, lines.columns[column], strict=True)
    ]
    return replace(listing, rows=rows)


def csv_samples(lines: Lines, options: ImportOptions) -> Listing:
    """Return the samples of a csv without a recipe of a table: a list of pictures, or a table by its draft."""
    if options.pictures:
        return read_others(lines, options.pictures, options)
    if "file" in lines.columns:
        return read_list(lines, options.survival or options.label, options)
    recipe, notes, problems = draft_recipe(lines, options)
    problems.refuse(lines.path)
    if not recipe.used and not recipe.text.column:
        left = [f"{column.origin} is {column.why}" for column in recipe.columns if column.why]
        why = "; ".join(left[:3]) + "; ..." * (len(left) > 3)
        raise DataError(
            f"{lines.path} has no column that can be an input ({why}); name others, or --text"
        )
    listing = table_rows(lines, recipe, recipe.label, options.as_gaps)
    return replace(listing, notes=notes)  # what becomes `other` is in the draft's own comments


def labels_there(lines: Lines, wanted: Sequence[str]) -> Names:
    """Return the label columns, which are all there, or none. Raises DataError for some of them."""
    there = tuple(name for name in wanted if name in lines.columns)
    if there and len(there) < len(wanted):
        lacking = few([name for name in wanted if name not in there])
        raise DataError(f"{lines.path} has the label {there[0]}, but not {lacking}")
    return there


def read_others(lines: Lines, recipe: PictureRecipe, options: ImportOptions) -> Listing:
    """Read a list of pictures for a recipe; a list without any of its label columns gives samples without labels."""
    header = lines.header
    if "file" not in header:
        listed = list_columns(header)
        raise DataError(
            f"{lines.path} has no column file; the recipe is of pictures: there are {listed}"
        )
    there = labels_there(lines, recipe.label or ("mask",) * (recipe.task == "segmentation"))
    patient = next((name for name in (recipe.patient, "patient") if name in header), None)
    changed = replace(options, take=replace(options.take, patient=patient))
    return read_list(lines, recipe.label, changed, labelled=bool(there))


def read_list(
    lines: Lines, label: Label, options: ImportOptions, *, labelled: bool = True
) -> Listing:
    """Read the samples of a list of pictures; ``options.problems`` takes what is wrong in its columns and lines."""
    path, header, take, problems = lines.path, lines.header, options.take, options.problems
    known = len(problems.errors)
    masks = labelled and "mask" in header and not label
    columns, patient = Names(), ""
    with problems.collect():
        usual = () if masks else ("label",)
        columns = label_columns(path, header, label, usual) if labelled else ()
    used = (*columns, *take.columns)
    with problems.collect():
        patient = patient_column(lines, take.patient, used)
        check_identifiers(lines, patient)
    roles = [name for name in ("file", "mask", "split", patient, *columns) if name in header]
    rows, lacking = list[SampleSource](), Problems()
    for line in lines.only(roles):
        with lacking.collect():
            rows.append(listed_sample(path, line, columns, patient, masks, take))
    if lacking.errors:
        more = len(lacking.errors) - 1
        problems.add(f"{lacking.errors[0]}" + f"; {more} lines more are like it" * bool(more))
    return Listing(
        rows,
        columns,
        divided_patients(lines, patient, used),
        patient=patient,
        labelled=labelled and len(problems.errors) == known,
    )


def listed_sample(
    path: Path, line: Line, columns: Names, patient: str, masks: bool, take: Take
) -> SampleSource:
    """Return the sample of a line. Raises DataError where it names no file, label or mask."""
    where, row = line
    if not row["file"] or (masks and not row["mask"]):
        raise DataError(f"{where} names no {'mask' if row['file'] else 'file'}")
    drawn = (with_ending(path.parent / row["mask"]),) if masks else ()
    key = row.get(patient, "")
    common = line_labels(line, columns, take.decimal), split_of(line), pseudonym(key)
    file = with_ending(path.parent / row["file"])
    return SampleSource(
        where, *common, file=file, masks=drawn, spelling=hash_text(key), key=key
    )


def lines_by(path: Path, recipe: Recipe) -> tuple[Lines, Names]:
    """Return the lines of a table by a recipe's format, and notes."""
    lines = read_lines(path, recipe.file, or_utf8=True)
    utf8 = lines.encoding == UTF8 and not recipe.file.encoding.lower().startswith("utf")
    return lines, (
        f"{path} is UTF-8, where the recipe has {recipe.file.encoding}: it is read as UTF-8",
    ) * utf8


def rows_by_recipe(
    lines: Lines, recipe: Recipe, as_gaps: bool, *, labelled: bool = True
) -> Listing:
    """Return the samples of a table by a recipe; without any of its label columns they have no labels.

    ``labelled``: False reads no labels, even where there are label columns. Raises DataError for columns that only the
    recipe or only the csv has.
    """
    if len(lines.header) == 1 and len(recipe.columns) > 1:
        raise DataError(
            f"{lines.path} has one column by the recipe's separator {recipe.file.separator!r}: save it so, or change "
            "it there"
        )
    check_recipe_columns(str(lines.path), lines.header, recipe)
    there = labels_there(lines, recipe.label)
    check_identifiers(lines, recipe.patient)
    kinds = check_row_kinds(lines, recipe.patient)
    listing = table_rows(lines, recipe, there if labelled else (), as_gaps)
    odd = unknown_notes(listing.table, lines, recipe)
    divided = divided_patients(lines, recipe.patient, recipe.label)
    return replace(listing, notes=(*listing.notes, *odd, *divided, *kinds))


def check_recipe_columns(where: str, header: Sequence[str], recipe: Recipe) -> None:
    """Raise DataError for columns that the recipe does not have, or that it uses and the csv ``where`` lacks."""
    roles = (*recipe.label, *filter(None, (recipe.patient, recipe.split, recipe.text.column)))
    known = {column.origin for column in recipe.columns}.union(roles)
    dates = {column.origin for column in recipe.columns if column.format}
    taken = [column.origin for column in recipe.used]
    taken += [column.since for column in recipe.used if column.since in dates]
    taken += filter(None, (recipe.text.column, recipe.patient))
    missing = [name for name in dict.fromkeys(taken) if name not in header]
    if strange := [name for name in header if name not in known]:
        instead = f" and lacks {few(missing)}" if missing else ""
        raise DataError(
            f"{where} has columns that the recipe does not have: {few(strange)}{instead}; rename or remove them"
        )
    if missing:
        raise DataError(
            f"{where} has no column {few(missing)}, which the recipe takes; there are: {list_columns(header)}"
        )


def table_rows(lines: Lines, recipe: Recipe, columns: Names, as_gaps: bool) -> Listing:
    """Convert a table's lines to samples."""
    table, misfits = convert_columns(lines, recipe)
    notes = check_misfits(misfits, as_gaps)
    check_gaps(table, lines, recipe)
    empty = [""] * len(lines)
    keys, texts = (
        lines.columns.get(name, empty) for name in (recipe.patient, recipe.text.column)
    )
    whose = {key: (pseudonym(key), hash_text(key)) for key in dict.fromkeys(keys)}
    # Labels and split of each combination of cells
    known: dict[Names, tuple[Names, str]] = {}
    names, rows = (*columns, "split"), list[SampleSource]()
    # How labels that are numbers are read
    numbers = {
        c.origin: c for c in recipe.columns if c.origin in columns and c.kind == "number"
    }
    cells = zip(*(lines.columns.get(name, empty) for name in names), strict=True)
    for i, (combination, key, text) in enumerate(zip(cells, keys, texts, strict=True)):
        where, (patient, spelling) = lines.where(i), whose[key]
        if combination not in known:
            line = where, dict(zip(names, combination, strict=True))
            labels = line_labels(line, columns, recipe.file.decimal, numbers)
            known[combination] = (
                tuple(recipe.label_values.get(label, label) for label in labels),
                split_of(line),
            )
        roles = where, *known[combination], patient
        rows.append(SampleSource(*roles, text=text, spelling=spelling, key=key))
    return Listing(rows, columns, notes, recipe, table, labelled=bool(columns))
