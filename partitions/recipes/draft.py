"""The first draft of a recipe from a csv, with a reason for the use of each column.

Where the cells are ambiguous, nothing is guessed: an error names the option that decides. Ranges are never drafted,
because the smallest and the largest value belong to patients.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from partitions.common.errors import DataError, Problems
from partitions.common.names import Names
from partitions.recipes.cells import (
    DATE_FORMATS,
    GAPS,
    LOOKS_LIKE_A_DATE,
    SIGN,
    date_formats,
    identifier,
    latest_of,
    parse_date,
    parse_number,
)
from partitions.recipes.lines import Cells, Lines, Numbers, Places, cells_in
from partitions.recipes.pipeline import shorten_cell
from partitions.recipes.recipe import OPEN, Column, Recipe
from partitions.recipes.signs import (
    MOST_NUMBERS,
    Asked,
    evidence_of,
    join_signs,
    share_of_numbers,
    signs_of,
)
from partitions.schema import few, tidy
from partitions.splits import Array

FEWEST = 5  # patients of a category that a recipe names
MOST_OPTION = 12  # characters of a cell that a message proposes as an option
MOST_LEVELS = 30  # categories of a column; more are a text
CODED_GAPS = tuple(map(str, (-1, -9, -99, -999, -9999)))
NINES = tuple(map(str, (99, 999, 9999, 99999)))
FEW_BELOW = 0.05  # up to this share, cells below 0 are likely mistakes
MOST_TRIED = 200  # cells tested with each date format
IN_BRACKETS = re.compile(r"(.*\S)\s*[(\[]\s*([^()\[\]]+?)\s*[)\]]")
UNIT = re.compile(
    r"[%\u2030]|\u00b0?[CF]|(\d+|10\^?\d+|1[.,]73) ?(m\u00b2|m2|l|ml|g|h|min)?|[fpnu\u00b5\u03bcmckdM]?"
    r"(g|[lL]|mol|m|s|iu|IU|u|U|eq|Eq|osm|Osm|Hz|V|Pa|kat|cal|J|W)[23\u00b2\u00b3]?|mmHg|cmH2O|bpm|h|hr|hours?|min|sec|"
    r"d|days?|weeks?|months?|y|yrs?|years?|cells?"
)
CODES = 'cells begin with 0: codes need kind = "category"'
PLAIN = "number; a gap in other rows becomes the training part's median"
LONGEST_GAP = max(map(len, GAPS))
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")  # in a message
LIMIT = re.compile(rf"[<>\u2264\u2265]=?\s*{SIGN}\d[\d.,]*", re.ASCII)
WITH_UNIT = re.compile(
    rf"[<>]?\s*{SIGN}\d[\d.,]*(\s*[%\u2030\u00b0\u20ac$\u00a3]|\s+\S|[a-zA-Z\u00b5]{{2}}).*"
)


def without_cells(draft: str, lines: Lines) -> str:
    """Return a draft without cells in its comments: others see it, and a rare text may be a patient's."""
    cells = {cell for column in lines.columns.values() for cell in column.different}
    quoted = {*map(repr, cells), *map(shlex.quote, cells)}

    def mask_quoted(comment: re.Match[str]) -> str:
        text = QUOTED.sub(lambda own: "'...'" if own[0] in quoted else own[0], comment[0])
        return re.sub(r"--gaps=('...'|\S+)", "--gaps=CELL", text)

    return re.sub(r"^#.*$", mask_quoted, draft, flags=re.MULTILINE)


def find_gaps(lines: Lines, columns: Sequence[str], asked: Asked) -> Names:
    """Return the cells in these columns that mean a missing value, unchanged; the empty one first."""
    found = {
        cell
        for name in columns
        for cell in lines.columns[name].texts
        if len(cell) <= LONGEST_GAP and cell.casefold() in GAPS
    }
    return tuple(dict.fromkeys(["", *sorted(found), *asked.gaps]))


def draft_columns(
    lines: Lines,
    columns: Sequence[str],
    gaps: Collection[str],
    asked: Asked,
    patient: str,
    problems: Problems,
) -> tuple[tuple[Column, ...], str]:
    """Return a column of the recipe for each of the csv's, and the most frequent decimal sign.

    ``patient``: the column of patients, or "". A column with ambiguous cells is open; ``problems`` gets the reason.
    """
    cells = {name: cells_in(lines, name, gaps) for name in columns}
    evidence = {
        name: evidence_of(own)
        for name, own in cells.items()
        if share_of_numbers(own) > MOST_NUMBERS
    }
    whole = join_signs(evidence.values())
    made, decimals = list[Column](), Counter[str]()
    for name, own in cells.items():
        known = len(problems.errors)
        with problems.collect():
            if name in evidence:
                signs = signs_of(name, evidence[name], whole, asked)
                made.append(draft_number(name, lines, own, gaps, signs))
                decimals[signs.decimal] += bool(evidence[name].decimal)
            else:
                made.append(draft_other(name, lines, own, gaps, asked, patient))
        for error in problems.errors[known:]:
            made.append(draft_column(name, OPEN, why=f"QUESTION. {error}"))
    likely = [sign for sign, count in decimals.most_common(1) if count]
    return tuple(made), asked.decimal or next(iter(likely), ".")


def draft_column(name: str, kind: str, short: str = "", **fields: Any) -> Column:
    """Return the recipe's column for the csv's column ``name``; one of an open kind cannot be read again.

    ``short``: its name in the data file, where that is another one.
    """
    make, plain = (Column.model_construct if kind == OPEN else Column), tidy(short or name)
    return make(name=plain, kind=kind, source=name if plain != name else "", **fields)


def without_unit(name: str, header: Sequence[str]) -> tuple[str, str]:
    """Return a column's name and the unit in it, "" without one: ``LDL (mmol/L)`` is LDL in mmol/L.

    A name that two columns would have stays as it is.
    """
    match = IN_BRACKETS.fullmatch(name)
    if not match or not all(UNIT.fullmatch(part) for part in match[2].split("/")):
        return name, ""
    short = [bracketed[1] for each in header if (bracketed := IN_BRACKETS.fullmatch(each))]
    taken = match[1] in header or short.count(match[1]) > 1
    return (name, "") if taken else (match[1], match[2])


def draft_number(
    name: str, lines: Lines, cells: Places, gaps: Collection[str], signs: Asked
) -> Column:
    """Draft a column of numbers. Raises DataError at another cell."""
    remarks = [remark_on_gaps(lines, name, gaps, "the training part's median")]
    if any(remarks) or signs.decimal != "." or signs.thousands:
        sign = f"number, decimal sign {signs.decimal!r}"
        remarks.insert(
            0, sign + (f", {signs.thousands!r} between thousands" if signs.thousands else "")
        )
    own = cells.numbers
    if own and own.fits(signs.decimal, signs.thousands, gaps) and not may_be_coded(own.values):
        remarks += odd_values(own, lines)
    else:
        values = {cell: parse_number(cell, signs.decimal, signs.thousands) for cell in cells}
        counts = lines.columns[name].counts
        if strange := [cell for cell, value in values.items() if value is None]:
            count = sum(counts[cell] for cell in strange)
            raise no_number(name, cells[strange[0]], strange[0], count)
        known = {cell: value for cell, value in values.items() if value is not None}
        remarks += odd_numbers(cells, counts, known)
    short, unit = without_unit(name, lines.header)
    remarks += [f"{short} in {unit}, by the header"] if unit else []
    why = "; ".join(filter(None, remarks)) or PLAIN
    form = {"decimal": signs.decimal, "thousands": signs.thousands, "unit": unit}
    return draft_column(name, "number", short, fill="median", why=why, **form)


def no_number(name: str, where: str, cell: str, count: int) -> DataError:
    """Return the error for other cells in a column of numbers, with their count and the first one's place."""
    mend = "fill or drop such rows"
    if shorten_cell(cell) != repr(cell):
        mend = f"--text {name} takes it as such"
    elif LIMIT.fullmatch(cell):
        mend = "write a number in its place, such as half of the limit"
    elif WITH_UNIT.fullmatch(cell):
        mend = "write numbers without units"
    more = (
        f", or --gaps={shlex.quote(cell)} takes it as missing"
        if len(cell) < MOST_OPTION
        else ""
    )
    others = f"; {count - 1} cells more are no numbers" if count > 1 else ""
    return DataError(
        f"{where}: {name} is {shorten_cell(cell)}, no number; {mend}{more}{others}"
    )


def odd_numbers(
    cells: Places, counts: Mapping[str, int], values: Mapping[str, float]
) -> Iterator[str]:
    """Yield remarks on a column of numbers that a person should check. ``counts``: the number of each cell."""
    negative = [cell for cell, value in values.items() if value < 0]
    below = sum(counts[cell] for cell in negative)
    if len(negative) == 1 and negative[0] in CODED_GAPS:
        cell = negative[0]
        yield f"{below} cells are {cell} and no other is below 0: if that means missing, add --gaps={cell}"
    elif 0 < below <= FEW_BELOW * sum(counts[cell] for cell in values):
        yield few_below(below, cells[negative[0]])
    cell = max(values, key=values.__getitem__, default="")
    if (
        cell in NINES
        and counts[cell] > 1
        and 0 < 2 * sorted((0.0, *values.values()))[-2] < values[cell]
    ):
        yield f"{counts[cell]} cells are {cell}, far above all others: if that means missing, add --gaps={cell}"
    if any(cell[0] == "0" and len(cell) > 1 and cell.isdigit() for cell in values):
        yield CODES


def may_be_coded(values: Array) -> bool:
    """Return whether the one value below 0, or the largest one, may stand for a missing value: its cells decide."""
    low, high = (f"{value:g}" for value in (np.nanmin(values), np.nanmax(values)))
    return high in NINES or (
        low in CODED_GAPS and not ((values < 0) & (values != float(low))).any()
    )


def odd_values(own: Numbers, lines: Lines) -> Iterator[str]:
    """Yield the same remarks on many numbers, none of which may be coded."""
    negative = np.flatnonzero(own.values < 0)
    if 0 < len(negative) <= FEW_BELOW * (own.kinds < 0).sum():
        yield few_below(len(negative), lines.where(negative[0]))
    if own.zeros:
        yield CODES


def few_below(count: int, where: str) -> str:
    return f"{count} cells are below 0, the first in {where.rpartition(', ')[2]}: a `range` refuses such"


def remark_on_gaps(lines: Lines, name: str, gaps: Collection[str], filled: str) -> str:
    """Return a remark on a column's gaps, or an empty text."""
    count = lines.columns[name].count_in(gaps)
    return f"{count} gaps become {filled}" if count else ""


def draft_other(
    name: str, lines: Lines, cells: Places, gaps: Collection[str], asked: Asked, patient: str
) -> Column:
    """Draft a column of dates or categories, or one that is left out, with the reason."""
    if not cells:
        return draft_column(name, "skip", why="left out: it has no values")
    formats = date_formats(list(cells))
    if asked.dates and all(parse_date(cell, asked.dates) for cell in cells):
        formats = [asked.dates]
    if not formats:
        check_dates(name, cells)
    if len(formats) > 1:
        where, cell = next(iter((where, cell) for cell, where in cells.items()))
        options = " or ".join(f"--dates {form!r}" for form in formats)
        raise DataError(
            f"{where}: {name} is {cell!r}, and all its dates can be read in {len(formats)} ways: {options}"
        )
    if formats:
        filled = remark_on_gaps(lines, name, gaps, "the training part's median")
        latest = latest_of(formats[0])
        years = f"two digits mean {latest - 99} to {latest} (`latest`)" if latest else ""
        why = "; ".join(
            filter(None, (f"date written {formats[0]}: years since 2000-01-01", years, filled))
        )
        return draft_column(
            name, "date", format=formats[0], latest=latest, fill="median", why=why
        )
    return draft_category(name, lines, cells, gaps, patient)


def check_dates(name: str, cells: Mapping[str, str]) -> None:
    """Raise DataError where most cells are dates, but not all in one format."""
    tried = [cell for cell in cells if LOOKS_LIKE_A_DATE.fullmatch(cell)][:MOST_TRIED]
    if len(tried) <= MOST_NUMBERS * min(len(cells), MOST_TRIED):
        return
    count, form = max(
        (sum(parse_date(cell, form) is not None for cell in tried), form)
        for form in DATE_FORMATS
    )
    if not count:
        return
    cell, where = next(own for own in cells.items() if parse_date(own[0], form) is None)
    raise DataError(
        f"{where}: {name} is {shorten_cell(cell)}, and other dates of it are written {form}: write all in one way, "
        f"take this one as missing with --gaps={shlex.quote(cell)}, or leave the column out with --columns"
    )


def draft_category(
    name: str, lines: Lines, cells: Mapping[str, str], gaps: Collection[str], patient: str
) -> Column:
    """Draft a column of categories; rare ones become ``other``, because their names would disclose few patients."""
    if len(cells) > MOST_LEVELS or any(shorten_cell(cell) != repr(cell) for cell in cells):
        why = f"left out: {len(cells)} different texts in {len(lines)} rows; --text takes a column of notes as text"
        return draft_column(name, "skip", why="; ".join([why, *remarks_on_units(cells)]))
    tidied = {cell: tidy(cell) for cell in lines.columns[name].different}
    whose = patients_by(lines, name, tidied, patient)
    # The cells of each value, which may differ in blanks and line breaks
    spellings: dict[str, list[str]] = {}
    for cell in cells:
        spellings.setdefault(tidied[cell], []).append(cell)
    common = sorted(own for own in spellings if whose[own] >= FEWEST and own.isprintable())
    rare = len(spellings) - len(common)
    of_few = f"of fewer than {FEWEST} patients" + (
        "" if all(map(str.isprintable, spellings)) else ", or unprintable,"
    )
    if not common:
        why = f"left out: none of its values has {FEWEST} patients or more"
        return draft_column(name, "skip", why="; ".join([why, *remarks_on_units(cells)]))
    other = (
        next(own for own in ("other", "other values", "all others") if own not in common)
        if rare
        else ""
    )
    remarks = [f"category, one column for each of {few(common, 8)}"]
    remarks += [f"{rare} values {of_few} become {other!r}, unnamed"] if rare else []
    remarks.append(remark_on_gaps(lines, name, gaps, "the training part's most frequent"))
    if len(spellings) == 1 and remarks[-1]:
        remarks.append(
            f'if a gap means no: categories = ["{common[0]}", "no"], fill = "value", fill-value = "no"'
        )
    remarks += remarks_on_units(cells)
    folded = Counter(own.casefold() for own in spellings)
    if twice := [own for own in common if folded[own.casefold()] > 1]:
        remarks.append(
            f"{few(twice, 4)} differ in case only: `values` in the recipe makes one of them"
        )
    values = {cell: own for own in common for cell in spellings[own] if cell != own}
    return draft_column(
        name,
        "category",
        categories=tuple(common),
        values=values,
        other=other,
        fill="most-frequent",
        why="; ".join(filter(None, remarks)),
    )


def patients_by(
    lines: Lines, name: str, tidied: Mapping[str, str], patient: str
) -> dict[str, int]:
    """Return the number of patients with each value, by the ``tidied`` cells of a column and that of patients.

    Texts of fewer than :data:`FEWEST` are in no draft, recipe or schema without the hospital's word. A line without a
    patient's identifier is of another patient.
    """
    values = Cells.of([tidied[cell] for cell in lines.columns[name].different])
    own = values.codes[lines.columns[name].codes]
    whose = np.arange(len(lines))
    if patient in lines.columns:
        people = Cells.of([identifier(cell) for cell in lines.columns[patient].different])
        missing = [code for code, cell in enumerate(people.different) if not cell]
        codes = people.codes[lines.columns[patient].codes]
        whose = np.where(np.isin(codes, missing), whose + len(people.different), codes)
    pairs = np.unique(own * np.int64(whose.max() + 1) + whose)
    counts = np.bincount(pairs // (whose.max() + 1), minlength=len(values.different))
    return dict(zip(values.different, counts.tolist(), strict=True))


def remarks_on_units(cells: Collection[str]) -> list[str]:
    """Return remarks on a column in which most texts are numbers with a unit."""
    found = [cell for cell in cells if WITH_UNIT.fullmatch(cell)]
    if len(found) <= MOST_NUMBERS * len(cells):
        return []
    return ["its cells are texts: to have numbers, write them without units"]


def explain(recipe: Recipe) -> Iterator[str]:
    """Yield a line on each column of a draft, except plain numbers."""
    for column in recipe.columns:
        if column.why not in ("", PLAIN):
            yield f"{column.origin}: {column.why}"
