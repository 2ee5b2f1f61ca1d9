"""Units that are often confused, ``units.toml``, and the pair of them that two hospitals' values fit."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import NamedTuple

NEAR = 1.15  # a ratio of means within this factor of a known one matches it


class Factor(NamedTuple):
    """Conversion ``unit`` = ``times`` * ``other`` (+ ``plus``), for columns whose name contains one of ``words``.

    Without words it applies to every column.
    """

    times: float
    unit: str
    other: str
    words: tuple[str, ...] = ()
    plus: float = 0.0

    def named_in(self, column: str) -> bool:
        """Return whether a column's name has one of the words."""
        return any(word in column.lower() for word in self.words)


UNITS = tomllib.loads(Path(__file__).with_name("units.toml").read_text("utf-8"))
FACTORS = [
    Factor(**factor, words=tuple(group.get("words", ())))
    for group in UNITS["columns"]
    for factor in group["factors"]
]


def known_ratio(ratio: float, column: str) -> tuple[str, float]:
    """Return a phrase for the units with this ratio (own values to the others') and their factor; empty: none."""
    matches: list[tuple[bool, float, str, float]] = []
    for factor in FACTORS:
        named = factor.named_in(column)
        if factor.plus or (factor.words and not named):
            continue
        for times, here, theirs in (
            (factor.times, factor.unit, factor.other),
            (1 / factor.times, factor.other, factor.unit),
        ):
            distance = abs(math.log(ratio / times))
            if distance <= math.log(NEAR):
                matches.append(
                    (not named, distance, f"{here} against {theirs} is {times:.4g}", times)
                )
    return min(matches)[2:] if matches else ("", ratio)


def conversion(
    mean: float, sd: float, of: float, spread: float, column: str
) -> tuple[str, float, float] | None:
    """Return a phrase for the units, factor and offset that make the others' values of this hospital's.

    None unless ``mean`` and ``sd`` are nearer to ``of`` and ``spread`` in another affine unit than as they are.
    """
    for factor in (here for here in FACTORS if here.plus and here.named_in(column)):
        times, plus = factor.times, factor.plus
        for here, theirs, back, offset in (  # theirs = back * own + offset
            (factor.unit, factor.other, 1 / times, -plus / times),
            (factor.other, factor.unit, times, plus),
        ):
            apart = abs(back * mean + offset - of)
            if (
                apart <= 2 * spread
                and back * sd <= 3 * spread
                and apart < back * abs(mean - of)
            ):
                return f"{here} against {theirs}", back, offset
    return None
