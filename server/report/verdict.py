"""The verdict on a method's mean gain: one decision for headline, text and tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from server.report.html import silos_of
from server.report.inference import HOSPITALS_NEEDED
from server.report.participation import seldom
from server.report.scores import Gain
from server.report.study import Study


@dataclass(frozen=True)
class Verdict:
    """The verdict: ``shown`` is 1 for a gain, -1 for a loss, 0 where neither is shown; ``why`` is the reason then."""

    gain: Gain
    without: Gain | None  # the mean without the silos that took part in few rounds, where there are some
    shown: int
    why: str


def verdict(study: Study, method: str, base: str) -> Verdict:
    """Return whether the 95 % interval excludes zero, with and without silos that missed many rounds."""
    differences = study.differences(method, base)
    compared = {silo for silo, seeds in differences.items() if seeds}
    rare = compared & seldom(study, [method, base]).keys()
    gain = study.mean_gain(method, base)
    without = study.mean_gain(method, base, rare) if rare else None
    signs = {excludes_zero(gain), excludes_zero(without or gain)}
    shown = signs.pop() if len(signs) == 1 else 0
    return Verdict(gain, without, shown, "" if shown else reason(len(compared), len(rare), gain, without))


def excludes_zero(gain: Gain) -> int:
    """Return the sign of the interval; 0 where it contains zero or is unknown."""
    low, high = gain.interval
    return 1 if low > 0 else -1 if high < 0 else 0


def reason(silos: int, rare: int, gain: Gain, without: Gain | None) -> str:
    """Return why neither a gain nor a loss is shown."""
    if silos < HOSPITALS_NEEDED:
        return f"{silos_of(silos)}, at least {HOSPITALS_NEEDED} needed"
    if math.isnan(gain.interval[0]):
        return "no interval of some scores"
    if without is None or not excludes_zero(gain):
        return "the interval contains zero"
    if silos - rare < HOSPITALS_NEEDED:
        return f"{silos_of(silos - rare)} took part in enough rounds, at least {HOSPITALS_NEEDED} needed"
    return "without silos that took part in few rounds, the interval contains zero"
