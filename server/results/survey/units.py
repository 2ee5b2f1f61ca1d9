"""Conversions between commonly confused units; a survey uses them to name a likely cause of a difference.

Factors between mass and amount of substance follow from molar masses: glucose 180.16 g/mol is 18.016 mg/dl per mmol/l
(IUPAC atomic weights; units as in Young and Huth, SI Units for Clinical Measurement, 1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TIME = ("age", "alter", "day", "tag", "time", "zeit", "dauer", "duration", "since", "month", "year", "stay", "follow")
NEAR = 1.15  # a ratio of means within this factor of a known one matches it


@dataclass(frozen=True)
class Factor:
    """Conversion ``one`` = ``times`` * ``other`` (+ ``plus``), for columns whose name contains one of ``words``.

    Without words it applies to every column.
    """

    times: float
    one: str
    other: str
    words: tuple[str, ...] = ()
    plus: float = 0.0


FACTORS = (
    Factor(18.016, "mg/dl", "mmol/l", ("gluc", "gluk", "sugar", "zucker", "bz")),
    Factor(38.67, "mg/dl", "mmol/l", ("chol", "ldl", "hdl")),
    Factor(88.57, "mg/dl", "mmol/l", ("trig",)),
    Factor(88.42, "µmol/l", "mg/dl", ("creat", "krea")),
    Factor(17.104, "µmol/l", "mg/dl", ("bili",)),
    Factor(6.006, "mg/dl", "mmol/l", ("urea", "harnstoff")),
    Factor(2.801, "mg/dl (urea nitrogen)", "mmol/l", ("bun", "urea", "harnstoff")),
    Factor(59.48, "µmol/l", "mg/dl", ("uric", "urat", "harnsäure")),
    Factor(4.008, "mg/dl", "mmol/l", ("calc", "kalz")),
    Factor(3.097, "mg/dl", "mmol/l", ("phos",)),
    Factor(1.611, "g/dl", "mmol/l", ("hemoglobin", "haemoglobin", "hämoglobin", "hgb")),
    Factor(7.5006, "mmHg", "kPa", ("press", "druck", "bp", "po2", "pco2", "sys", "dia")),
    Factor(1.8, "°F", "°C", ("temp",), 32.0),
    Factor(1.0, "K", "°C", ("temp",), 273.15),
    Factor(10.93, "mmol/mol", "%", ("a1c", "glyc", "glyk"), -23.5),  # HbA1c: IFCC against NGSP, the master equation
    Factor(2.2046, "lb", "kg", ("weight", "gewicht", "mass")),
    Factor(2.54, "cm", "inch", ("height", "length", "size", "grö", "waist")),
    Factor(365.25, "days", "years", TIME),
    Factor(12.0, "months", "years", TIME),
    Factor(30.44, "days", "months", TIME),
    Factor(7.0, "days", "weeks", TIME),
    Factor(24.0, "hours", "days", TIME),
    Factor(60.0, "minutes", "hours", TIME),
    *(Factor(10.0**k, f"a unit {10**k:,} times smaller", "the others'") for k in (1, 2, 3, 6, 9)),
)


def known(ratio: float, column: str) -> tuple[str, float]:
    """Return a phrase for the units with this ratio (own values to the others') and their factor; empty: none."""
    found: list[tuple[bool, float, str, float]] = []
    for factor in FACTORS:
        named = any(word in column.lower() for word in factor.words)
        if factor.plus or (factor.words and not named):
            continue
        for times, own, theirs in (
            (factor.times, factor.one, factor.other),
            (1 / factor.times, factor.other, factor.one),
        ):
            distance = abs(math.log(ratio / times))
            if distance <= math.log(NEAR):
                found.append((not named, distance, f"{own} against {theirs} is {times:.4g}", times))
    return min(found)[2:] if found else ("", ratio)


def conversion(mean: float, sd: float, of: float, spread: float, column: str) -> tuple[str, float, float] | None:
    """Return a phrase for the units, factor and offset that make the others' values of this hospital's.

    None unless ``mean`` and ``sd`` are nearer to ``of`` and ``spread`` in another affine unit than as they are.
    """
    for factor in (factor for factor in FACTORS if factor.plus):
        if not any(word in column.lower() for word in factor.words):
            continue
        times, plus = factor.times, factor.plus
        for own, theirs, back, offset in (  # theirs = back * own + offset
            (factor.one, factor.other, 1 / times, -plus / times),
            (factor.other, factor.one, times, plus),
        ):
            apart = abs(back * mean + offset - of)
            if apart <= 2 * spread and back * sd <= 3 * spread and apart < back * abs(mean - of):
                return f"{own} against {theirs}", back, offset
    return None
