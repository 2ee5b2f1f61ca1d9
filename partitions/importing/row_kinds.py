"""Rows of two kinds in one table: base values of a patient in some lines, repeated ones in others.

REDCap writes such a table for repeating instruments. Gaps of one kind are no missing values, so a median must not fill
them: the table is joined first.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.recipes.cells import GAPS
from partitions.recipes.lines import Cells, Lines
from partitions.splits import Array, Arrays

INSTRUMENT = "redcap_repeat_instrument"
LEAST_SHARE = 0.05  # of the lines that are of a kind
MOST_WITHOUT = 0.1  # of the lines that are of neither
MOST_COLUMNS = 100  # with gaps that are compared


def check_row_kinds(lines: Lines, patient: str) -> Names:
    """Return a note where a patient's rows are of two kinds. Raises DataError for REDCap's repeating instruments."""
    columns = lines.columns
    known = {name: filled(cells) for name, cells in columns.items() if name != patient}
    if INSTRUMENT in columns and 0 < known[INSTRUMENT].sum() < len(lines):
        repeats = known[INSTRUMENT]
        raise DataError(
            f"{lines.path} is REDCap's export of a repeating instrument: {repeats.sum()} of {len(lines)} lines are its "
            f"repeats, without the patient's other columns; {how_to_join(lines, known, ~repeats, patient)}"
        )
    if patient not in columns:
        return ()
    partly = [
        name for name, cells in known.items() if LEAST_SHARE <= cells.mean() <= 1 - LEAST_SHARE
    ][:MOST_COLUMNS]
    for first, second in combinations(partly, 2):
        base, more = known[first], known[second]
        if (
            not (base & more).any()
            and (base | more).mean() >= 1 - MOST_WITHOUT
            and mixed(columns[patient], base, more)
        ):
            return (
                f"rows are of two kinds: {base.sum()} of {len(lines)} lines have {first}, and {more.sum()} others of "
                f"the same patients have {second}; {how_to_join(lines, known, base, patient)}",
            )
    return ()


def filled(cells: Cells) -> Array:
    """Return which lines have a value, bool (n,)."""
    return ~cells.lines_of([text for text in cells.texts if text.casefold() in GAPS])


def mixed(patients: Cells, base: Array, more: Array) -> bool:
    """Return whether at least half of the patients with several lines have lines of both kinds."""
    count = len(patients.different)
    lines = np.bincount(patients.codes, minlength=count)
    both = [np.bincount(patients.codes[kind], minlength=count) > 0 for kind in (base, more)]
    several = int((lines > 1).sum())
    return 0 < several <= 2 * int((both[0] & both[1]).sum())


def how_to_join(lines: Lines, known: Arrays, base: Array, patient: str) -> str:
    """Return how to join lines of two kinds by patient, with pandas. ``base``: lines of the first kind."""
    key = patient if patient in lines.columns else lines.header[0]
    dropped = [name for name, cells in known.items() if not (cells & base).any()]
    repeated = [name for name in dropped if not name.startswith("redcap_")]
    means = f"t.groupby({key!r})[{repeated}].mean()"
    return (
        f"join them by {key} first, so that each patient has one line, for example with pandas: "
        f"t[t[{dropped[0]!r}].isna()].drop(columns={dropped}).merge({means}, on={key!r})"
    )
