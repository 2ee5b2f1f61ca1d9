"""The first draft of a table's recipe, and the recipe that makes a federation's columns from a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError, Problems
from partitions.common.names import Names, unknown_name
from partitions.importing.options import ImportOptions, Take
from partitions.importing.row_kinds import check_row_kinds
from partitions.importing.table_labels import label_columns, list_columns
from partitions.importing.tables import FALLBACK, UTF8, read_lines
from partitions.recipes.cells import GAPS, is_number
from partitions.recipes.draft import FEWEST, draft_column, draft_columns, find_gaps
from partitions.recipes.lines import Cells, Lines, cells_in
from partitions.recipes.people import (
    BIRTH,
    BORN,
    MOST_TRIED,
    check_identifiers,
    divided_patients,
    left_out,
    names_people,
    patient_column,
    unknown_column,
    words_of,
)
from partitions.recipes.pipeline import LONGEST_SHOWN
from partitions.recipes.recipe import NO_TEXT, OPEN, Column, FileFormat, Recipe, TextInput
from partitions.recipes.shared import Mapped, parse_shared, recipe_for
from partitions.recipes.signs import (
    MOST_NUMBERS,
    Asked,
    Evidence,
    evidence_of,
    share_of_numbers,
    signs_of,
)
from partitions.schema import Schema, few
from partitions.splits import Array


def draft_recipe(lines: Lines, options: ImportOptions) -> tuple[Recipe, Names, Problems]:
    """Return the first draft of a table's recipe, notes on columns that are left out, and problems, which stay open."""
    path, header, take = lines.path, lines.header, options.take
    if take.text and take.text not in header:
        raise unknown_column(path, take.text, header)
    problems = Problems()
    columns, patient = draft_roles(lines, options, problems)
    roles = tuple(name for name in columns if name != OPEN)
    kinds = check_lines(lines, roles, patient, problems)
    features, notes = chosen_columns(lines, roles, "" if patient == OPEN else patient, take)
    if patient != OPEN:
        with problems.collect():
            check_identifiers(lines, patient)
        notes = (*notes, *divided_patients(lines, patient, (*roles, *take.columns)))
    gaps = find_gaps(lines, features, take)
    drafted, decimal = draft_columns(lines, features, gaps, take, patient, problems)
    for column in drafted:
        if column.kind == "skip" and (name := column.origin) in take.columns:
            problems.add(
                f"{path}: {name} is no number, date or category: {column.why}{long_text(lines, name)}"
            )
    notes = (*notes, *kinds, *birth_notes(drafted), *telling_notes(lines, drafted, roles))
    with problems.collect():
        decimal = label_sign(lines, roles, gaps, take, decimal)
    used = {*features, *columns, "split", take.text, patient}
    skipped = tuple(draft_column(name, "skip") for name in header if name not in used)
    recipe = Recipe(
        columns=(*drafted, *skipped),
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


def birth_notes(columns: Sequence[Column]) -> Iterator[str]:
    """Yield a note on each birth date among the inputs."""
    for name in (column.origin for column in columns if column.kind == "date"):
        words = words_of(name)
        if not {*BORN}.isdisjoint(words) or any(stem in w for stem in BIRTH for w in words):
            yield (
                f"{name} is a birth date, which tells people apart: take the age instead, as a column of the csv, or "
                f'by since = "{name}" under another date in the recipe, with kind = "skip" here'
            )


def codes_of_lines(cells: Cells) -> Array:
    """Return a code for each line, (n,): by its cell, or by its value where a column of numbers keeps no cells."""
    values = cells.numbers.values if cells.numbers else cells.codes
    return np.unique(values, return_inverse=True)[1]


def telling_notes(lines: Lines, columns: Sequence[Column], labels: Names) -> Iterator[str]:
    """Yield a note on each input whose every value, in few rows or more on average, has one label only."""
    codes_of_labels = [codes_of_lines(lines.columns[label]) for label in labels]
    for name in [column.origin for column in columns if column.kind != "skip"]:
        codes = codes_of_lines(lines.columns[name])
        for kinds in codes_of_labels:
            values, classes = codes.max() + 1, kinds.max() + 1
            if not 1 < classes <= values <= len(lines) / FEWEST:
                continue
            if len(np.unique(codes * classes + kinds)) == values:
                yield (
                    f"{name} alone tells the label in all {len(lines)} rows: if it is known only after the label is, "
                    "leave it out with --columns"
                )


def file_format(lines: Lines, decimal: str, gaps: Names) -> FileFormat:
    """Return how a csv is written."""
    encoding = lines.encoding.replace(UTF8, "utf-8")
    return FileFormat(encoding=encoding, separator=lines.separator, decimal=decimal, gaps=gaps)


def draft_roles(lines: Lines, options: ImportOptions, problems: Problems) -> tuple[Names, str]:
    """Return the columns of labels and of patients; one not found is open, and ``problems`` gets the reason."""
    path, header, take = lines.path, lines.header, options.take
    label = options.survival or options.label
    columns: Names = (OPEN,)
    patient = OPEN
    with problems.collect():
        if not label and "label" not in header:
            raise DataError(
                f"{path} has no column label; name the label's column with --label: {list_columns(header)}"
            )
        columns = label_columns(path, header, label, ("label",))
        if take.text in columns:
            raise DataError(
                f"{path}: {take.text} is the text and the label; name another column with --label"
            )
    with problems.collect():
        patient = patient_column(lines, take.patient, (*columns, *take.columns))
    return columns, patient


def check_lines(lines: Lines, labels: Names, patient: str, problems: Problems) -> Names:
    """Return a note on rows of two kinds; ``problems`` gets the first line without a label, of each label."""
    with problems.collect():
        kinds = check_row_kinds(lines, patient)
        mend = kinds[0] if kinds else "fill it, or delete the line (a total below the table?)"
        for name in labels:
            cells = lines.columns[name]
            missing = [cell for cell in cells.texts if cell.casefold() in GAPS]
            if count := cells.count_in(missing):
                what = name if len(labels) > 1 else "label"
                others = f" (lines without one: {count})" * (count > 1)
                problems.add(
                    f"{lines.where(cells.first_of(missing))} has no {what}; {mend}{others}"
                )
        return kinds
    return ()


def shared_recipe(path: Path, schema: Schema, mapped: Mapped, options: ImportOptions) -> Recipe:
    """Return the recipe that makes the columns of a federation's schema from a hospital's csv.

    Raises DataError, one line.
    """
    take, shared = options.take, parse_shared(schema)
    labels, columns = (
        tuple(name for name in names if name not in options.unlabelled)
        for names in (schema.labels, shared.label)
    )
    shared = shared.model_copy(update={"label": columns})
    lines = read_lines(path, take)
    header = lines.header
    likely = shared.patient if shared.patient in header and take.patient == "" else take.patient
    patient = patient_column(lines, likely, (*mapped.columns.values(), *shared.label))
    gaps = find_gaps(lines, [name for name in header if name != patient], take)
    split = "split" if "split" in header else ""
    roles = {"patient": patient, "split": split, "seed": options.seed}
    recipe = recipe_for(lines, shared, labels, mapped, take, gaps, **roles)
    people = {
        column.name: column.origin
        for column in recipe.used
        if column.name not in mapped.columns
        and names_people(column.origin, set(lines.columns[column.origin].head(MOST_TRIED)))
    }
    if people:
        first = next(iter(people))
        raise DataError(
            f"{path}: the schema asks for {few(people, 20)}, and your column of that name may name people; if that "
            f"is meant, say --map {first}={people[first]}"
        )
    sign = label_sign(lines, recipe.label, gaps, take, ".")
    return recipe.model_copy(update={"file": file_format(lines, sign, gaps)})


def chosen_columns(
    lines: Lines, labels: Sequence[str], patient: str, take: Take
) -> tuple[list[str], Names]:
    """Return the columns that a draft examines, and notes on those that are left out without examination."""
    path, header = lines.path, lines.header
    roles = (*labels, "split", take.text, patient)
    likely = left_out(lines, (n for n in header if n not in (*roles, *take.columns)))
    others = [*filter(None, (*labels, "split", "patient", take.text, patient, *likely))]
    free = [name for name in header if name not in others]
    for name in take.columns:
        if name not in free:
            besides = ", ".join(dict.fromkeys(others))
            raise unknown_name(f"column of {path} besides {besides}:", name, free)
    features = list(dict.fromkeys(take.columns)) or free
    notes: Names = ()
    for why in dict.fromkeys(likely.values()):
        left = [name for name in likely if likely[name] == why and name != "patient"]
        takes = " (--columns takes what is named)" * ("patient" not in why)
        notes += (f"left out: {', '.join(left)}, as {why}{takes}",) * bool(left)
    if not take.text or take.columns:
        if features:
            return features, notes
        raise DataError(
            f"{path} has no column besides the label; what separates its columns? (--separator)"
        )
    if features:
        more = f"left out are {', '.join(features)}; --columns {','.join(features)} takes them beside the text"
        notes = (*notes, more)
    return [], notes


def long_text(lines: Lines, name: str) -> str:
    """Return the place of a column's first long text, and the option that reads it; the text itself is not shown."""
    for cell, where in cells_in(lines, name, ()).items():
        if len(cell) > LONGEST_SHOWN:
            return (
                f"; {where}: {name} is a text of {len(cell)} characters; --text {name} takes it"
            )
    return ""


def label_sign(
    lines: Lines, columns: Sequence[str], gaps: Collection[str], options: Asked, decimal: str
) -> str:
    """Return the decimal sign of the labels: as requested, as their cells show, or else that of the columns."""
    for name in columns:
        cells = cells_in(lines, name, gaps)
        evidence = evidence_of(cells)
        if (
            share_of_numbers(cells) > MOST_NUMBERS
            and (evidence.decimal or evidence.unclear)
            and not all(map(is_number, cells))
        ):
            return signs_of(name, evidence, Evidence(), options).decimal
    return options.decimal or (decimal if decimal != "," else ".")


def example(lines: Lines) -> str:
    """Return the first column name, or place of a cell, with a letter beyond ASCII, as an example of the encoding."""
    if column := next((name for name in lines.header if not name.isascii()), ""):
        return f", where it reads {column!r}"
    first = {
        name: cells.first_of(beyond)
        for name, cells in lines.columns.items()
        if (beyond := [c for c in cells.texts if not c.isascii()])
    }
    if not first:
        return ""
    name = min(first, key=first.__getitem__)
    return f", first in {lines.where(first[name]).rpartition(', ')[2]}, {name}"
