"""The first draft of a recipe from a csv, with a reason for the use of each column.

Where the cells are ambiguous, nothing is guessed: an error names the option that decides. Ranges are never drafted,
because the smallest and the largest value belong to patients.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from partitions.recipes.lines import Cells, Lines, Places, cells_in
from partitions.recipes.pipeline import elapsed_time, guess_formats, shorten_cell
from partitions.recipes.recipe import OPEN, Column, Recipe
from partitions.recipes.signs import (
    MOST_NUMBERS,
    Asked,
    evidence_of,
    join_signs,
    share_of_numbers,
    signs_of,
)
from partitions.recipes.values import far_values, two_scales
from partitions.schema import few, tidy
from partitions.splits import Array

FEWEST = 5  # patients of a category that a recipe names
MOST_OPTION = 12  # characters of a cell that a message proposes as an option
MOST_LEVELS = 30  # categories of a column; more are a text
FEW_BELOW = 0.05  # up to this share, cells below 0 are likely mistakes
MOST_TRIED = 200  # cells tested with each date format
IN_BRACKETS = re.compile(r"(.*\S)\s*[(\[]\s*([^()\[\]]+?)\s*[)\]]")
UNIT = re.compile(
    r"[%\u2030]|\u00b0?[CF]|(\d+|10\^?\d+|1[.,]73) ?(m\u00b2|m2|l|ml|g|h|min)?|[fpnu\u00b5\u03bcmckdM]?"
    r"(g|[lL]|mol|m|s|iu|IU|u|U|eq|Eq|osm|Osm|Hz|V|Pa|kat|cal|J|W)[23\u00b2\u00b3]?|mmHg|cmH2O|bpm|h|hr|hours?|min|sec|"
    r"d|days?|weeks?|months?|y|yrs?|years?|cells?"
)
MOST_GUESSED = 5  # first cells whose format of dates is guessed
CODES = 'cells begin with 0: codes need kind = "category"'
PLAIN = "number; a gap in other rows becomes the training part's median"
# In a message; an apostrophe in a word, as in "patient's", begins none
QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\")""")
LIMIT = re.compile(rf"[<>\u2264\u2265]=?\s*{SIGN}\d[\d.,]*", re.ASCII)
WITH_UNIT = re.compile(
    rf"[<>]?\s*{SIGN}\d[\d.,]*(\s*[%\u2030\u00b0\u20ac$\u00a3]|\s+\S|[a-zA-Z\u00b5]{{2}}).*"
)

WITHOUT_LETTERS = re.compile(r"(?=\D*\d)[^a-zA-Z]*")  # 120/80, 12:30, '7


def without_cells(draft: str, lines: Lines) -> str:
    """Return a draft without cells in its comments: others see it, and a rare text may be a patient's."""
    cells = {cell for column in lines.columns.values() for cell in column.different}
    quoted = {*map(repr, cells), *map(shlex.quote, cells)}

    def mask_quoted(comment: re.Match[str]) -> str:
        text = QUOTED.sub(lambda match: "'...'" if match[0] in quoted else match[0], comment[0])
        return re.sub(r"--gaps=('...'|\S+)", "--gaps=CELL", text)

    return re.sub(r"^#.*$", mask_quoted, draft, flags=re.MULTILINE)


def find_gaps(lines: Lines, columns: Sequence[str], options: Asked) -> Names:
    """Return the cells in these columns that mean a missing value, unchanged; the empty one first."""
    texts = {cell for name in columns for cell in lines.columns[name].texts}
    present = {cell for cell in texts if cell.casefold() in GAPS}
    return tuple(dict.fromkeys(["", *sorted(present), *options.gaps]))


def draft_columns(
    lines: Lines,
    columns: Sequence[str],
    gaps: Collection[str],
    options: Asked,
    patient: str,
    problems: Problems,
) -> tuple[tuple[Column, ...], str]:
    """Return a column of the recipe for each of the csv's, and the most frequent decimal sign.

    ``patient``: the column of patients, or "". A column with ambiguous cells is open; ``problems`` gets the reason.
    """
    cells = {name: cells_in(lines, name, gaps) for name in columns}
    evidence = {
        name: evidence_of(places)
        for name, places in cells.items()
        if share_of_numbers(places) > MOST_NUMBERS and not are_dates(places, options.dates)
    }
    whole = join_signs(evidence.values())
    drafted, decimals = list[Column](), Counter[str]()
    for name, places in cells.items():
        try:
            if name in evidence:
                signs = signs_of(name, evidence[name], whole, options)
                drafted.append(draft_number(name, lines, places, gaps, signs))
                decimals[signs.decimal] += bool(evidence[name].decimal)
            else:
                drafted.append(draft_other(name, lines, places, gaps, options, patient))
        except DataError as error:
            problems.errors.append(error)
            drafted.append(draft_column(name, OPEN, why=f"QUESTION. {error}"))
    likely = next((sign for sign, count in decimals.most_common(1) if count), ".")
    return tuple(drafted), options.decimal or likely


def are_dates(cells: Collection[str], form: str) -> bool:
    """Return whether cells that look like numbers are all dates as the user says: 20240131 by %Y%m%d."""
    if "%m" not in form or "%d" not in form:
        return False
    dates = ((cell, parse_date(cell, form)) for cell in cells)
    return all(date is not None and date.strftime(form) == cell for cell, date in dates)


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
    filled = remark_on_gaps(lines, name, gaps, "the training part's median")
    between = f", {signs.thousands!r} between thousands" if signs.thousands else ""
    plain = not filled and signs.decimal == "." and not between
    remarks = [] if plain else [f"number, decimal sign {signs.decimal!r}{between}", filled]
    numbers = cells.numbers
    short, unit = without_unit(name, lines.header)
    remarks += [f"{short} in {unit}, by the header"] if unit else []
    form = {"decimal": signs.decimal, "thousands": signs.thousands, "unit": unit}
    column = draft_column(name, "number", short, fill="median", **form)
    if numbers and numbers.fits(signs.decimal, signs.thousands, gaps):
        values, zeros = numbers.values, numbers.zeros
    else:
        parsed = {cell: parse_number(cell, signs.decimal, signs.thousands) for cell in cells}
        if strange := [cell for cell, value in parsed.items() if value is None]:
            count = lines.columns[name].count_in(strange)
            raise no_number(name, cells[strange[0]], strange, count)
        values = line_values(lines.columns[name], parsed)
        zeros = any(cell[0] == "0" and len(cell) > 1 and cell.isdigit() for cell in parsed)
    remarks += remarks_on_values(values, column, lines)
    remarks += [CODES] * zeros
    return column.model_copy(update={"why": "; ".join(filter(None, remarks)) or PLAIN})


def line_values(column: Cells, parsed: Mapping[str, float | None]) -> Array:
    """Return each line's value, float64 (n,): that of its cell, or NaN."""
    return np.array([*map(parsed.get, column.different)], float)[column.codes]


def remarks_on_values(values: Array, column: Column, lines: Lines) -> Iterator[str]:
    """Yield remarks on values that a person should check: a few below 0, and those that may mean "unknown"."""
    negative, far = np.flatnonzero(values < 0), [*far_values(values, column)]
    for row, remark in far:
        cell = lines.columns[column.origin][row]
        yield f"{remark.format(cell)}: if that means missing, add --gaps={shlex.quote(cell)}"
    yield two_scales(values) if column.kind == "number" else ""
    others = negative[~np.isin(values[negative], [values[row] for row, _ in far])]
    if column.kind == "number" and 0 < len(others) <= FEW_BELOW * (~np.isnan(values)).sum():
        first = lines.where(others[0]).rpartition(", ")[2]
        yield f"{len(others)} cells are below 0, the first in {first}: a `range` refuses such"


def no_number(name: str, where: str, cells: Sequence[str], count: int) -> DataError:
    """Return the error for other cells in a column of numbers, with their count and the first one's place."""
    cell, *rest = cells
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
    # Whole, because `without_cells` finds only whole cells
    shown = [*map(shorten_cell, rest)]
    others += f": {few(shown, 4, max(map(len, shown)))}" if rest else ""
    return DataError(
        f"{where}: {name} is {shorten_cell(cell)}, no number; {mend}{more}{others}"
    )


def remark_on_gaps(lines: Lines, name: str, gaps: Collection[str], filled: str) -> str:
    """Return a remark on a column's gaps, or an empty text."""
    count = lines.columns[name].count_in(gaps)
    return f"{count} gaps become {filled}" if count else ""


def draft_other(
    name: str, lines: Lines, cells: Places, gaps: Collection[str], wanted: Asked, patient: str
) -> Column:
    """Draft a column of dates or categories, or one that is left out, with the reason."""
    if not cells:
        return draft_column(name, "skip", why="left out: it has no values")
    formats = date_formats(list(cells))
    if wanted.dates and all(parse_date(cell, wanted.dates) for cell in cells):
        formats = [wanted.dates]
    if not formats and (taken_by := check_dates(name, cells)):
        why = f"left out: its cells are dates; {taken_by} takes them"
        return draft_column(name, "skip", why=why)
    if len(formats) > 1:
        cell, where = next(iter(cells.items()))
        options = " or ".join(f"--dates {form!r}" for form in formats)
        raise DataError(
            f"{where}: {name} is {cell!r}, and all its dates can be read in {len(formats)} ways: {options}"
        )
    if formats:
        filled = remark_on_gaps(lines, name, gaps, "the training part's median")
        latest = latest_of(formats[0])
        years = f"two digits mean {latest - 99} to {latest} (`latest`)" if latest else ""
        column = draft_column(name, "date", format=formats[0], latest=latest, fill="median")
        parsed = {cell: elapsed_time(cell, "", column, (), {})[0] for cell in cells}
        odd = remarks_on_values(line_values(lines.columns[name], parsed), column, lines)
        remarks = (f"date written {formats[0]}: years since 2000-01-01", years, filled, *odd)
        return column.model_copy(update={"why": "; ".join(filter(None, remarks))})
    return draft_category(name, lines, cells, gaps, patient)


def check_dates(name: str, cells: Mapping[str, str]) -> str:
    """Return the options that take cells as dates which no draft takes, such as instants; "" where most are none.

    Raises DataError where most cells are dates, but not all in one format.
    """
    tried = list(cells)[:MOST_TRIED]
    likely = len([*filter(LOOKS_LIKE_A_DATE.fullmatch, tried)])
    guessed = {form for cell in tried[:MOST_GUESSED] for form in guess_formats(cell)}
    if whole := [f for f in sorted(guessed) if all(parse_date(cell, f) for cell in cells)]:
        return " or ".join(f"--dates {shlex.quote(form)}" for form in whole)
    most = MOST_NUMBERS * len(tried)
    counts = {
        form: sum(parse_date(cell, form) is not None for cell in tried)
        for form in (*guessed, *(DATE_FORMATS if likely > most else ()))
    }
    count, form = max(((count, form) for form, count in counts.items()), default=(0, ""))
    if not count or max(likely, count) <= most:
        return ""
    strange = next(cell for cell in cells if parse_date(cell, form) is None)
    raise DataError(
        f"{cells[strange]}: {name} is {shorten_cell(strange)}, and other dates of it are written {form}: write all in "
        f"one way, take this one as missing with --gaps={shlex.quote(strange)}, or leave the column out with --columns"
    )


def draft_category(
    name: str, lines: Lines, cells: Mapping[str, str], gaps: Collection[str], patient: str
) -> Column:
    """Draft a column of categories; rare ones become ``other``, because their names would disclose few patients."""
    if len(cells) > MOST_LEVELS or any(shorten_cell(cell) != repr(cell) for cell in cells):
        why = f"left out: {len(cells)} different texts in {len(lines)} rows; --text takes a column of notes as text"
        return draft_column(name, "skip", why="; ".join([why, *remarks_on_units(cells)]))
    whose = patients_by(lines, name, tidy, patient)
    # The cells of each value, which may differ in blanks and line breaks
    spellings = defaultdict[str, list[str]](list)
    for cell in cells:
        spellings[tidy(cell)].append(cell)
    common = sorted(v for v in spellings if whose[v] >= FEWEST and v.isprintable())
    if not common:
        why = f"left out: none of its values has {FEWEST} patients or more"
        return draft_column(name, "skip", why="; ".join([why, *remarks_on_units(cells)]))
    remarks, other = [f"category, one column for each of {few(common, 8)}"], ""
    if rare := len(spellings) - len(common):
        other = next(v for v in ("other", "other values", "all others") if v not in common)
        unprintable = ", or unprintable," * (not all(map(str.isprintable, spellings)))
        of_few = f"of fewer than {FEWEST} patients{unprintable}"
        remarks.append(f"{rare} values {of_few} become {other!r}, unnamed")
    if filled := remark_on_gaps(lines, name, gaps, "the training part's most frequent"):
        no = f'if a gap means no: categories = ["{common[0]}", "no"], fill = "value", fill-value = "no"'
        remarks += [filled, *[no] * (len(spellings) == 1)]
    remarks += remarks_on_units(cells)
    folded = Counter(value.casefold() for value in spellings)
    if twice := [value for value in common if folded[value.casefold()] > 1]:
        remarks.append(
            f"{few(twice, 4)} differ in case only: `values` in the recipe makes one of them"
        )
    values = {cell: value for value in common for cell in spellings[value] if cell != value}
    more: dict[str, Any] = {"categories": tuple(common), "values": values, "other": other}
    why = "; ".join(remarks)
    return draft_column(name, "category", fill="most-frequent", why=why, **more)


def patients_by(
    lines: Lines, name: str, value_of: Callable[[str], str], patient: str
) -> dict[str, int]:
    """Return the number of patients with each value, which ``value_of`` makes of a column's cells.

    Texts of fewer than :data:`FEWEST` are in no draft, recipe or schema without the hospital's word. A line without a
    patient's identifier is of another patient.
    """
    values = lines.columns[name].map(value_of)
    whose = np.arange(len(lines))
    if patient in lines.columns:
        people = lines.columns[patient].map(identifier)
        nameless = people.lines_of([""])
        whose = np.where(nameless, whose + len(people.different), people.codes)
    pairs = np.unique(np.stack([values.codes, whose]), axis=1)[0]
    counts = np.bincount(pairs, minlength=len(values.different))
    return dict(zip(values.different, counts.tolist(), strict=True))


def remarks_on_units(cells: Collection[str]) -> list[str]:
    """Return remarks on a column in which most texts are numbers with a unit, or with other signs."""
    advice = {
        WITH_UNIT: "write them without units",
        WITHOUT_LETTERS: "write one in each cell, and nothing else",
    }
    return [
        f"its cells are texts: to have numbers, {mend}"
        for form, mend in advice.items()
        if sum(map(bool, map(form.fullmatch, cells))) > MOST_NUMBERS * len(cells)
    ]


def explain(recipe: Recipe) -> Iterator[str]:
    """Yield a line on each column of a draft, except plain numbers."""
    for column in recipe.columns:
        if column.why not in ("", PLAIN):
            yield f"{column.origin}: {column.why}"
