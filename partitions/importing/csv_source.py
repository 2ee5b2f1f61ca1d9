"""Samples from a csv: a list of pictures where it has a column ``file``, else a table, by its recipe or a draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from partitions.common.errors import DataError, Problems
from partitions.common.names import unknown_name
from partitions.importing.images import SampleSource
from partitions.importing.notes import Take
from partitions.importing.options import ImportOptions
from partitions.importing.scans import hashed, pseudonym
from partitions.importing.signals.recording import with_ending
from partitions.importing.tables import (
    FALLBACK,
    LONGEST_SHOWN,
    UTF8,
    Label,
    feature_columns,
    label_columns,
    labels_of,
    list_columns,
    read_lines,
    split_of,
)
from partitions.patients import (
    MOST_TRIED,
    check_identifiers,
    divided_patients,
    left_out,
    name_of,
    names_people,
    parse_column,
    patient_column,
)
from partitions.recipes.cells import GAPS, is_number
from partitions.recipes.draft import (
    MOST_NUMBERS,
    Asked,
    Evidence,
    draft_columns,
    drafted,
    evidence_of,
    find_gaps,
    share_of_numbers,
    signs_of,
)
from partitions.recipes.lines import Lines, cells_in
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.pipeline import check_gaps, check_misfits, convert
from partitions.recipes.recipe import NO_TEXT, OPEN, FileFormat, Recipe, TextInput
from partitions.recipes.shared import Mapped, parse_shared, recipe_for
from partitions.schema import Schema, few

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Found:
    """Samples of a source, the label columns, and notes; for a table also its recipe and converted cells.

    * ``table``: the used columns, from ``recipes.pipeline.convert``.
    * ``by``: how labels were found (``recipes.pictures.LABELS_BY``).
    * ``patient``: the column of patients; ``labelled``: whether there are labels.
    """

    rows: list[SampleSource]
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    table: DataFrame | None = None
    by: str = "file"
    patient: str = ""
    labelled: bool = True


def read_csv(path: Path, options: ImportOptions) -> Found:
    """Read the samples of a csv."""
    if options.recipe:
        lines, notes = lines_by(path, options.recipe)
        found = rows_by_recipe(lines, options.recipe, options.as_gaps)
    else:
        lines = read_lines(
            path, options.take.separator, options.take.encoding, options.take.gaps
        )
        notes = ()
        found = rows_of(lines, options)
    found = replace(found, notes=(*notes, *found.notes))
    return with_subgroups(lines, found, options) if options.subgroup else found


def with_subgroups(lines: Lines, found: Found, options: ImportOptions) -> Found:
    """Add their subgroups to samples, each from its line. Raises DataError, or UserError for a wrong column."""
    column, limits = parse_column(options.subgroup)
    if column not in lines.columns:
        raise unknown_name(f"column of {lines.path}", column, lines.header)
    gaps, decimal = (
        (found.recipe.file.gaps, found.recipe.file.decimal)
        if found.recipe
        else ((), options.take.decimal)
    )
    names = {}
    for cell, where in cells_in(lines, column, gaps).items():
        names[cell] = name_of(
            cell.replace(",", ".") if decimal == "," and limits else cell, column, limits, where
        )
    groups = [names.get(cell, "") for cell in lines.columns[column]]
    return replace(
        found,
        rows=[
            replace(own, subgroup=name) for own, name in zip(found.rows, groups, strict=True)
        ],
    )


def rows_of(lines: Lines, options: ImportOptions) -> Found:
    """Return the samples of a csv without a recipe of a table: a list of pictures, or a table by its draft."""
    if options.pictures:
        return read_others(lines, options.pictures, options)
    if "file" in lines.columns:
        return read_list(lines, options.survival or options.label, options.take)
    recipe, notes, problems = draft_recipe(lines, options)
    problems.refuse(lines.path)
    if not recipe.used and not recipe.text.column:
        left = [f"{own.origin} is {own.why}" for own in recipe.columns if own.why]
        why = "; ".join(left[:3]) + "; ..." * (len(left) > 3)
        raise DataError(
            f"{lines.path} has no column that can be an input ({why}); name others, or --text"
        )
    found = table_rows(lines, recipe, recipe.label, options.as_gaps)
    return replace(found, notes=notes)  # what becomes `other` is in the draft's own comments


def labels_there(lines: Lines, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the label columns, which are all there, or none. Raises DataError for some of them."""
    there = tuple(name for name in wanted if name in lines.columns)
    if there and len(there) < len(wanted):
        lacking = few([name for name in wanted if name not in there])
        raise DataError(f"{lines.path} has the label {there[0]}, but not {lacking}")
    return there


def read_others(lines: Lines, recipe: PictureRecipe, options: ImportOptions) -> Found:
    """Read a list of pictures for a recipe; a list without any of its label columns gives samples without labels."""
    header = lines.header
    if "file" not in header:
        listed = list_columns(header)
        raise DataError(
            f"{lines.path} has no column file; the recipe is of pictures: there are {listed}"
        )
    there = labels_there(
        lines, recipe.label or (("mask",) if recipe.task == "segmentation" else ())
    )
    patient = (
        recipe.patient
        if recipe.patient in header
        else "patient"
        if "patient" in header
        else None
    )
    return read_list(
        lines, recipe.label, replace(options.take, patient=patient), labelled=bool(there)
    )


def read_list(lines: Lines, label: Label, take: Take, *, labelled: bool = True) -> Found:
    """Read the samples of a list of pictures."""
    path, header = lines.path, lines.header
    masks = labelled and "mask" in header and not label
    columns = (
        label_columns(path, header, label, () if masks else ("label",)) if labelled else ()
    )
    used = (*columns, *take.columns)
    patient = patient_column(lines, take.patient, used)
    check_identifiers(lines, patient)
    rows = []
    for line in lines.only(
        [name for name in ("file", "mask", "split", patient, *columns) if name in header]
    ):
        where, row = line
        if not row["file"] or (masks and not row["mask"]):
            raise DataError(f"{where} names no {'mask' if row['file'] else 'file'}")
        mask = path.parent / row["mask"] if masks else None
        key = row.get(patient, "")
        common = labels_of(line, columns, take.decimal), split_of(line), pseudonym(key)
        file = with_ending(path.parent / row["file"])
        rows.append(
            SampleSource(where, *common, file=file, mask=mask, spelling=hashed(key), key=key)
        )
    return Found(
        rows,
        columns,
        divided_patients(lines, patient, used),
        patient=patient,
        labelled=labelled,
    )


def lines_by(path: Path, recipe: Recipe) -> tuple[Lines, tuple[str, ...]]:
    """Return the lines of a table by a recipe's format, and notes."""
    lines = read_lines(
        path, recipe.file.separator, recipe.file.encoding, recipe.file.gaps, or_utf8=True
    )
    utf8 = lines.encoding == UTF8 and not recipe.file.encoding.lower().startswith("utf")
    return lines, (
        f"{path} is UTF-8, where the recipe has {recipe.file.encoding}: it is read as UTF-8",
    ) * utf8


def rows_by_recipe(
    lines: Lines, recipe: Recipe, as_gaps: bool, *, labelled: bool = True
) -> Found:
    """Return the samples of a table by a recipe; without any of its label columns they have no labels.

    ``labelled``: False reads no labels, even where there are label columns. Raises DataError for columns that only the
    recipe or only the csv has.
    """
    if len(lines.header) == 1 and len(recipe.columns) > 1:
        raise DataError(
            f"{lines.path} has one column by the recipe's separator {recipe.file.separator!r}: save it so, or change "
            "it there"
        )
    check_columns(str(lines.path), lines.header, recipe)
    there = labels_there(lines, recipe.label)
    check_identifiers(lines, recipe.patient)
    found = table_rows(lines, recipe, there if labelled else (), as_gaps)
    return replace(
        found, notes=(*found.notes, *divided_patients(lines, recipe.patient, recipe.label))
    )


def check_columns(where: str, header: Sequence[str], recipe: Recipe) -> None:
    """Raise DataError for columns that the recipe does not have, or that it uses and the csv ``where`` lacks."""
    roles = (*recipe.label, *filter(None, (recipe.patient, recipe.split, recipe.text.column)))
    known = {column.origin for column in recipe.columns}
    dates = {column.origin for column in recipe.columns if column.format}
    taken = [own.origin for own in recipe.used] + [
        own.since for own in recipe.used if own.since in dates
    ]
    missing = [
        name
        for name in dict.fromkeys((*taken, recipe.text.column, recipe.patient))
        if name and name not in header
    ]
    if strange := [name for name in header if name not in known and name not in roles]:
        instead = f" and lacks {few(missing)}" if missing else ""
        raise DataError(
            f"{where} has columns that the recipe does not have: {few(strange)}{instead}; rename or remove them"
        )
    if missing:
        raise DataError(
            f"{where} has no column {few(missing)}, which the recipe takes; there are: {list_columns(header)}"
        )


def table_rows(lines: Lines, recipe: Recipe, columns: tuple[str, ...], as_gaps: bool) -> Found:
    """Convert a table's lines to samples."""
    table, misfits = convert(lines, recipe)
    notes = check_misfits(misfits, as_gaps)
    check_gaps(table, lines, recipe)
    empty = [""] * len(lines)
    keys, texts = (
        lines.columns.get(name, empty) for name in (recipe.patient, recipe.text.column)
    )
    whose = {key: (pseudonym(key), hashed(key)) for key in dict.fromkeys(keys)}
    # Labels and split of each combination of cells
    known: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
    names, rows = (*columns, "split"), list[SampleSource]()
    cells = zip(*(lines.columns.get(name, empty) for name in names), strict=True)
    for i, (own, key, text) in enumerate(zip(cells, keys, texts, strict=True)):
        where = lines.where(i)
        if own not in known:
            line = where, dict(zip(names, own, strict=True))
            labels = labels_of(line, columns, recipe.file.decimal) if columns else ()
            known[own] = (
                tuple(recipe.label_values.get(label, label) for label in labels),
                split_of(line),
            )
        rows.append(
            SampleSource(
                where, *known[own], whose[key][0], text=text, spelling=whose[key][1], key=key
            )
        )
    return Found(rows, columns, notes, recipe, table)


def draft_recipe(
    lines: Lines, options: ImportOptions
) -> tuple[Recipe, tuple[str, ...], Problems]:
    """Return the first draft of a table's recipe, notes on columns that are left out, and problems, which stay open."""
    path, header, take = lines.path, lines.header, options.take
    if take.text and take.text not in header:
        raise unknown_name(f"column of {path}", take.text, header)
    problems = Problems()
    columns, patient = draft_roles(lines, options, problems)
    roles = tuple(name for name in columns if name != OPEN)
    features, notes = chosen_columns(lines, roles, "" if patient == OPEN else patient, take)
    if patient != OPEN:
        with problems.collected():
            check_identifiers(lines, patient)
        notes = (*notes, *divided_patients(lines, patient, (*roles, *take.columns)))
    gaps, asked = find_gaps(lines, features, take.asked), take.asked
    found, decimal = draft_columns(lines, features, gaps, asked, patient, problems)
    for column in found:
        if column.kind == "skip" and (name := column.origin) in take.columns:
            with problems.collected():
                raise DataError(
                    f"{path}: {name} is no number, date or category: {column.why}{long_text(lines, name)}"
                )
    with problems.collected():
        decimal = label_sign(lines, roles, gaps, asked, decimal)
    left = [
        name
        for name in header
        if name not in (*features, *columns, "split", take.text, patient)
    ]
    skipped = tuple(drafted(name, "skip") for name in left)
    recipe = Recipe(
        columns=(*found, *skipped),
        label=columns,
        task=options.task,
        classes=tuple(options.labels),
        patient=patient,
        split="split" if "split" in header else "",
        seed=options.seed,
        file=file_format(lines, decimal, gaps),
        text=TextInput(column=take.text, vocabulary=take.vocabulary, length=take.length)
        if take.text
        else NO_TEXT,
    )
    if lines.encoding == FALLBACK and not take.encoding:
        notes = (
            f"{path} is not UTF-8 and is read as {FALLBACK} (Windows){example(lines)}: --encoding",
            *notes,
        )
    return recipe, notes, problems


def file_format(lines: Lines, decimal: str, gaps: tuple[str, ...]) -> FileFormat:
    """Return how a csv is written."""
    encoding = lines.encoding.replace(UTF8, "utf-8")
    return FileFormat(encoding=encoding, separator=lines.separator, decimal=decimal, gaps=gaps)


def draft_roles(
    lines: Lines, options: ImportOptions, problems: Problems
) -> tuple[tuple[str, ...], str]:
    """Return the columns of labels and of patients; one not found is open, and ``problems`` gets the reason."""
    path = lines.path
    header = lines.header
    take = options.take
    label = options.survival or options.label
    columns: tuple[str, ...] = (OPEN,)
    patient = OPEN
    with problems.collected():
        if not label and "label" not in header:
            raise DataError(
                f"{path} has no column label; name the label's column with --label: {list_columns(header)}"
            )
        columns = label_columns(path, header, label, ("label",))
        if take.text in columns:
            raise DataError(
                f"{path}: {take.text} is the text and the label; name another column with --label"
            )
        for name in columns:
            with problems.collected():
                check_labelled(lines, name, name if len(columns) > 1 else "label")
    with problems.collected():
        patient = patient_column(lines, take.patient, (*columns, *take.columns))
    return columns, patient


def check_labelled(lines: Lines, column: str, what: str) -> None:
    """Raise DataError where lines have no label in a column, with the first one's place."""
    cells = lines.columns[column]
    missing = [cell for cell in cells.texts if cell.casefold() in GAPS]
    if count := cells.count_in(missing):
        others = f" (lines without one: {count})" if count > 1 else ""
        mend = "fill it, or delete the line (a total below the table?)"
        raise DataError(f"{lines.where(cells.first_of(missing))} has no {what}; {mend}{others}")


def shared_recipe(path: Path, schema: Schema, mapped: Mapped, options: ImportOptions) -> Recipe:
    """Return the recipe that makes the columns of a federation's schema from a hospital's csv.

    Raises DataError, one line.
    """
    take, shared = options.take, parse_shared(schema)
    lines = read_lines(path, take.separator, take.encoding, take.gaps)
    header = lines.header
    likely = shared.patient if shared.patient in header and take.patient == "" else take.patient
    patient = patient_column(lines, likely, (*mapped.columns.values(), *shared.label))
    gaps = find_gaps(lines, [name for name in header if name != patient], take.asked)
    made = recipe_for(path, header, lines, shared, schema.labels, mapped, take.asked, gaps)
    taken = {own.name: own.origin for own in made.used if own.name not in mapped.columns}
    if asked_for := [
        name
        for name, own in taken.items()
        if names_people(own, set(lines.columns[own].head(MOST_TRIED)))
    ]:
        raise DataError(
            f"{path}: the schema asks for {few(asked_for, 20)}, and your column of that name may name people; if that "
            f"is meant, say --map {asked_for[0]}={taken[asked_for[0]]}"
        )
    roles = (*made.label, *filter(None, (patient, "split" if "split" in header else "")))
    own = {
        "columns": tuple(
            c for c in made.columns if c.kind != "skip" or c.format or c.source not in roles
        ),
        "patient": patient,
        "split": "split" if "split" in header else "",
        "seed": options.seed,
        "file": file_format(lines, label_sign(lines, made.label, gaps, take.asked, "."), gaps),
    }
    return made.model_copy(update=own)


def chosen_columns(
    lines: Lines, labels: Sequence[str], patient: str, take: Take
) -> tuple[list[str], tuple[str, ...]]:
    """Return the columns that a draft examines, and notes on those that are left out without examination."""
    path, header = lines.path, lines.header
    likely = left_out(
        lines,
        (n for n in header if n not in (*labels, *take.columns, take.text, patient, "split")),
    )
    others = [*labels, "split", "patient", *filter(None, (take.text, patient)), *likely]
    features = feature_columns(path, header, dict.fromkeys(others), take.columns)
    notes: tuple[str, ...] = ()
    for why in dict.fromkeys(likely.values()):
        left = [name for name in likely if likely[name] == why and name != "patient"]
        takes = " (--columns takes what is named)" if "patient" not in why else ""
        notes += (f"left out: {', '.join(left)}, as {why}{takes}",) if left else ()
    if take.text and not take.columns:
        if features:
            more = f"left out are {', '.join(features)}; --columns {','.join(features)} takes them beside the text"
            notes = (*notes, more)
        return [], notes
    if not features:
        raise DataError(
            f"{path} has no column besides the label; what separates its columns? (--separator)"
        )
    return features, notes


def long_text(lines: Lines, name: str) -> str:
    """Return the place of a column's first long text, and the option that reads it; the text itself is not shown."""
    cells = cells_in(lines, name, ())
    first = next((cell for cell in cells if len(cell) > LONGEST_SHOWN), None)
    return (
        f"; {cells[first]}: {name} is a text of {len(first)} characters; --text {name} takes it"
        if first
        else ""
    )


def label_sign(
    lines: Lines, columns: Sequence[str], gaps: Collection[str], asked: Asked, decimal: str
) -> str:
    """Return the decimal sign of the labels: as requested, as their cells show, or else that of the columns."""
    for name in columns:
        cells = cells_in(lines, name, gaps)
        own = evidence_of(cells)
        if (
            share_of_numbers(cells) > MOST_NUMBERS
            and (own.decimal or own.unclear)
            and not all(map(is_number, cells))
        ):
            return signs_of(name, own, Evidence(), asked).decimal
    return asked.decimal or (decimal if decimal != "," else ".")


def example(lines: Lines) -> str:
    """Return the first column name, or place of a cell, with a letter beyond ASCII, as an example of the encoding."""
    if found := next((name for name in lines.header if not name.isascii()), ""):
        return f", where it reads {found!r}"
    first = [
        (cells.first_of(own), name)
        for name, cells in lines.columns.items()
        if (own := [c for c in cells.texts if not c.isascii()])
    ]
    if not first:
        return ""
    line, name = min(first, key=lambda own: own[0])
    return f", first in {lines.where(line).rpartition(', ')[2]}, {name}"
