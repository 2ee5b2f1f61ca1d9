"""The decimal sign of a csv's numbers and the sign between thousands: as asked for, or as the cells show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.recipes.cells import LAKHS, ONE_GROUP, SIGN, SPACES
from partitions.recipes.lines import Places

MOST_NUMBERS = 0.5  # above this share of numbers in a column, another cell is a mistake
SPACED = "".join(SPACES)
DECIMAL = re.compile(rf"{SIGN}\d*([.,])\d+([eE][+-]?\d+)?|{SIGN}\d+([.,])", re.ASCII)
GROUPS = re.compile(
    rf"{SIGN}(?:\d{{1,3}}(?:([.,])\d{{3}}(?:\1\d{{3}})+|([{SPACED}])\d{{3}}(?:\2\d{{3}})*)|{LAKHS})",
    re.ASCII,
)
BOTH = re.compile(
    rf"{SIGN}(?:\d{{1,3}}([.,{SPACED}])\d{{3}}(?:\1\d{{3}})*(?!\1)([.,])\d+|{LAKHS}\.\d+)",
    re.ASCII,
)
ANY_NUMBER = (re.compile(rf"{SIGN}\d+([eE][+-]?\d+)?", re.ASCII), DECIMAL, GROUPS, BOTH)


@dataclass(frozen=True)
class Asked:
    """The user's options on a csv's format. Empty: to be determined from the cells."""

    decimal: str = ""
    thousands: str = ""
    dates: str = ""
    gaps: Names = ()


@dataclass
class Evidence:
    """The signs that a column's cells show, each with the first such cell."""

    decimal: dict[str, tuple[str, str]] = field(default_factory=dict)
    thousands: dict[str, tuple[str, str]] = field(default_factory=dict)
    unclear: dict[str, tuple[str, str]] = field(default_factory=dict)  # 1,234 or 1.234


def evidence_of(cells: Places) -> Evidence:
    """Return the signs that cells show."""
    evidence = Evidence()
    if numbers := cells.numbers:
        for shown_first, place in (
            (evidence.decimal, numbers.decimal),
            (evidence.unclear, numbers.unclear),
        ):
            if place:
                shown_first[numbers.sign] = cells.lines.where(place[0]), place[1]
        return evidence
    for cell, where in cells.items():
        if match := BOTH.fullmatch(cell):
            evidence.thousands.setdefault(match[1] or ",", (where, cell))
            evidence.decimal.setdefault(match[2] or ".", (where, cell))
        elif match := GROUPS.fullmatch(cell):
            evidence.thousands.setdefault(match[1] or match[2] or ",", (where, cell))
        elif match := ONE_GROUP.fullmatch(cell):
            evidence.unclear.setdefault(match[1], (where, cell))
        elif match := DECIMAL.fullmatch(cell):
            evidence.decimal.setdefault(match[1] or match[3], (where, cell))
    return evidence


def signs_of(name: str, evidence: Evidence, file: Evidence, options: Asked) -> Asked:
    """Return a column's signs: as requested, from its cells, or else from other columns. Raises DataError."""
    if options.decimal:
        decimal = options.decimal
    elif len(evidence.decimal) > 1:
        (first, a), (two, b) = (evidence.decimal[sign] for sign in (".", ","))
        raise DataError(
            f"{first}: {name} is {a!r}, and in {two.rpartition(', ')[2]} {b!r}: write all with one sign"
        )
    else:
        shown_here = evidence.decimal or {
            sign: at for sign, at in file.decimal.items() if len(file.decimal) == 1
        }
        decimal = next(iter(shown_here), "," if "." in evidence.thousands else ".")
    grouped = evidence.thousands or {
        sign: at for sign, at in file.thousands.items() if sign != decimal
    }
    thousands = options.thousands or (next(iter(grouped)) if len(grouped) == 1 else "")
    thousands = "" if thousands == decimal else thousands
    for sign, (where, cell) in {**evidence.unclear, **evidence.decimal}.items():
        if sign not in (decimal, thousands):
            mend = (
                f", which has a point: with --decimal , write numbers as 1234,5, or add --thousands . if {cell} has no "
                "decimals"
                if sign == "."
                else "; add --decimal , if that is a decimal comma, or --thousands , if it stands between thousands "
                "(1,234 is 1234)"
            )
            raise DataError(f"{where}: {name} is {cell!r}{mend}")
    return Asked(decimal, thousands)


def share_of_numbers(cells: Places) -> float:
    """Return the share of different cells that are numbers with any signs."""
    if cells.numbers:
        return 1.0
    count = sum(any(pattern.fullmatch(cell) for pattern in ANY_NUMBER) for cell in cells)
    return count / max(len(cells), 1)


def join_signs(evidences: Iterable[Evidence]) -> Evidence:
    """Return the signs of several columns."""
    whole = Evidence()
    for evidence in evidences:
        whole.decimal |= evidence.decimal
        whole.thousands |= evidence.thousands
    return whole
