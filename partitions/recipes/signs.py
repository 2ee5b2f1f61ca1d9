"""The decimal sign of a csv's numbers and the sign between thousands: as asked for, or as the cells show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.recipes.cells import ONE_GROUP, SIGN, SPACES
from partitions.recipes.lines import Places

MOST_NUMBERS = 0.5  # above this share of numbers in a column, another cell is a mistake
SPACED = "".join(SPACES)
DECIMAL = re.compile(rf"{SIGN}\d*([.,])\d+([eE][+-]?\d+)?|{SIGN}\d+([.,])", re.ASCII)
GROUPS = re.compile(
    rf"{SIGN}\d{{1,3}}(?:([.,])\d{{3}}(?:\1\d{{3}})+|([{SPACED}])\d{{3}}(?:\2\d{{3}})*)",
    re.ASCII,
)
BOTH = re.compile(
    rf"{SIGN}\d{{1,3}}([.,{SPACED}])\d{{3}}(?:\1\d{{3}})*(?!\1)([.,])\d+", re.ASCII
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
    found = Evidence()
    if own := cells.numbers:
        for shown_first, place in ((found.decimal, own.decimal), (found.unclear, own.unclear)):
            if place:
                shown_first[own.sign] = cells.lines.where(place[0]), place[1]
        return found
    for cell, where in cells.items():
        if match := BOTH.fullmatch(cell):
            found.thousands.setdefault(match[1], (where, cell))
            found.decimal.setdefault(match[2], (where, cell))
        elif match := GROUPS.fullmatch(cell):
            found.thousands.setdefault(match[1] or match[2], (where, cell))
        elif match := ONE_GROUP.fullmatch(cell):
            found.unclear.setdefault(match[1], (where, cell))
        elif match := DECIMAL.fullmatch(cell):
            found.decimal.setdefault(match[1] or match[3], (where, cell))
    return found


def signs_of(name: str, own: Evidence, file: Evidence, asked: Asked) -> Asked:
    """Return a column's signs: as requested, from its cells, or else from other columns. Raises DataError."""
    if asked.decimal:
        decimal = asked.decimal
    elif len(own.decimal) > 1:
        (one, a), (two, b) = (own.decimal[sign] for sign in (".", ","))
        raise DataError(
            f"{one}: {name} is {a!r}, and in {two.rpartition(', ')[2]} {b!r}: write all with one sign"
        )
    else:
        shown_here = own.decimal or {
            sign: at for sign, at in file.decimal.items() if len(file.decimal) == 1
        }
        decimal = next(iter(shown_here), "," if "." in own.thousands else ".")
    grouped = own.thousands or {
        sign: at for sign, at in file.thousands.items() if sign != decimal
    }
    thousands = asked.thousands or (next(iter(grouped)) if len(grouped) == 1 else "")
    thousands = "" if thousands == decimal else thousands
    for sign, (where, cell) in {**own.unclear, **own.decimal}.items():
        if sign not in (decimal, thousands):
            raise DataError(f"{where}: {name} is {cell!r}{sign_asked(sign, asked, cell)}")
    return Asked(decimal, thousands)


def sign_asked(sign: str, asked: Asked, cell: str) -> str:
    """Return the text of a message on an ambiguous sign."""
    if sign == ".":
        return (
            f", which has a point: with --decimal , write numbers as 1234,5, or add --thousands . if {cell} has no "
            "decimals"
        )
    return (
        "; add --decimal , if that is a decimal comma, "
        "or --thousands , if it stands between thousands (1,234 is 1234)"
    )


def share_of_numbers(cells: Places) -> float:
    """Return the share of different cells that are numbers with any signs."""
    if cells.numbers:
        return 1.0
    whole, decimal, groups, both = (own.fullmatch for own in ANY_NUMBER)
    count = sum(
        1 for cell in cells if whole(cell) or decimal(cell) or groups(cell) or both(cell)
    )
    return count / max(len(cells), 1)


def join_signs(found: Iterable[Evidence]) -> Evidence:
    """Return the signs of several columns."""
    whole = Evidence()
    for own in found:
        whole.decimal |= own.decimal
        whole.thousands |= own.thousands
    return whole
