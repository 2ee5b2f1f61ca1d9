"""Parsing of a csv's cells as numbers and dates, by a recipe's signs."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal

import numpy as np

from partitions.common.names import plain_text, words_in

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
LARGEST = float(np.finfo(np.float32).max)
MINUS = "\u2212"  # of typesetting, beside the hyphen that programs write
SIGN = f"[+{MINUS}-]?"
# 1,234: decimals, or thousands
ONE_GROUP = re.compile(rf"{SIGN}[1-9]\d{{0,2}}([.,])\d{{3}}", re.ASCII)
LAKHS = r"\d{1,2}(?:,\d{2})+,\d{3}"  # 1,00,000 is 100000, as in India
# Between groups of three digits, never before decimals
SPACES = (" ", "'", "\u2019", "\u00a0", "\u202f")
GROUPS = ("", ",", ".", *SPACES)  # signs between thousands
# Cells that mean a missing value, in lower case. A dash is not included, because beside a plus it is a finding.
GAPS = ("", "?", "na", "n/a", "nan", "null", "#n/a", "#na", "#nv")
EPOCH = "2000-01-01"
DAYS = {"days": 1.0, "years": 365.25}  # days in each unit of time since a date
# Formats of dates in exports. Where several fit the same cells, the user must choose.
DATE_FORMATS = tuple(
    f"{day}{time}"
    for day in words_in(
        "%Y-%m-%d %d.%m.%Y %d.%m.%y %d/%m/%Y %m/%d/%Y %Y/%m/%d %d-%m-%Y %d-%b-%Y"
    )
    for time in ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S", "T%H:%M")
)
LOOKS_LIKE_A_DATE = re.compile(
    r"\d{1,4}[-./](\d{1,2}|[A-Za-z]{3})[-./]\d{2,4}([T ]\d{1,2}:\d{2}(:\d{2})?)?", re.ASCII
)
# Identifiers: 007 and 7.0; 1e+05, as R writes 100000; zeros before a number.
WHOLE = re.compile(r"0*(\d+?)([.,]0+)?", re.ASCII)
ROUND = re.compile(r"\d(\.\d+)?e\+\d\d?", re.ASCII)
ZEROS = re.compile(r"(?<![\d.,])0+(?=\d)", re.ASCII)


def identifier(text: str) -> str:
    """Return the form in which all spellings of a patient's identifier are equal: 7, 007 and 7.0; P7, p7 and P007.

    "" for a cell that means a missing value.
    """
    plain = plain_text(text)
    if plain in GAPS:
        return ""
    if match := WHOLE.fullmatch(plain):
        return match[1]
    if ROUND.fullmatch(plain) and (number := Decimal(plain)) == number.to_integral_value():
        return str(int(number))
    return ZEROS.sub("", plain)


def is_number(text: str) -> bool:
    """Return whether the text is a finite float32 number in common notation, without Python's 1_000."""
    return bool(NUMBER.fullmatch(text)) and abs(float(text)) <= LARGEST


def parse_number(cell: str, decimal: str, thousands: str) -> float | None:
    """Return the number in a cell, or None where it is not a number with these signs."""
    cell = cell.replace(MINUS, "-")
    if thousands and thousands in cell:
        sign, group = re.escape(decimal), re.escape(thousands)
        whole = rf"\d{{1,3}}({group}\d{{3}})+" + f"|{LAKHS}" * (thousands == ",")
        if not re.fullmatch(rf"[+-]?({whole})({sign}\d+)?", cell, re.ASCII):
            return None
        cell = cell.replace(thousands, "")
    if decimal != ".":
        if "." in cell:
            return None
        cell = cell.replace(decimal, ".")
    return float(cell) if is_number(cell) else None


def parse_date(cell: str, form: str, latest: int = 0) -> datetime | None:
    """Return the date in a cell without its time zone, or None where it has another format.

    ``latest``: the last of the hundred years that two digits mean; 0: 2068, as in Python.
    """
    try:
        when = datetime.strptime(cell, form).replace(tzinfo=None)
        return (
            when.replace(year=latest - (latest - when.year) % 100)
            if latest and "%y" in form
            else when
        )
    except ValueError:
        return None


def latest_of(form: str) -> int:
    """Return the last year that two digits mean in a new recipe: this one, because a date in the future is rare."""
    return datetime.now().year if "%y" in form else 0


def date_formats(cells: list[str]) -> list[str]:
    """Return the formats in which all of these cells are dates."""
    if not all(LOOKS_LIKE_A_DATE.fullmatch(cell) for cell in cells):
        return []
    return [form for form in DATE_FORMATS if all(parse_date(cell, form) for cell in cells)]
