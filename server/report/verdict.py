"""Verdict on a method's mean gain: one decision for headline, text and tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import special

from server.report.html import silos_of
from server.report.inference import HOSPITALS_NEEDED, Z
from server.report.participation import seldom
from server.report.scores import Gain
from server.report.study import Study


@dataclass(frozen=True)
class Verdict:
    """The verdict. ``shown``: 1 for a gain, -1 for a loss, 0 for neither, with the reason in ``why``."""

    gain: Gain
    without: Gain | None  # the mean without the silos that took part in few rounds, if there are any
    shown: int
    why: str


def verdict(study: Study, method: str, base: str) -> Verdict:
    """Return the verdict: the 95 % interval must exclude zero, with and without silos that missed many rounds.

    A method that was chosen among several on its own test data has the most favourable random error. Its interval is
    therefore widened for their number (Bonferroni). Otherwise, one in six reports on eight methods without a gain would
    show one.
    """
    differences = study.differences(method, base)
    compared = {silo for silo, seeds in differences.items() if seeds}
    rare = compared & seldom(study, [method, base]).keys()
    gain = study.mean_gain(method, base)
    without = study.mean_gain(method, base, rare) if rare else None
    candidates = chosen_among(study, base)
    signs = {excludes_zero(gain, candidates), excludes_zero(without or gain, candidates)}
    shown = signs.pop() if len(signs) == 1 else 0
    why = "" if shown else reason(len(compared), len(rare), gain, without)
    if not shown and {excludes_zero(gain), excludes_zero(without or gain)} in ({1}, {-1}):
        why = f"the interval contains zero once it counts the choice among {candidates} methods on the same test data"
    return Verdict(gain, without, shown, why)


def chosen_among(study: Study, base: str) -> int:
    """Return the number of methods that were compared on test scores to choose the best; 1 with validation data."""
    return max(1, sum(m != base for m in study.methods)) if study.chosen_on == "test" else 1


def excludes_zero(gain: Gain, candidates: int = 1) -> int:
    """Return the sign of the interval, widened for ``candidates`` methods; 0 if it contains zero or is unknown."""
    wider = float(special.ndtri(1 - 0.025 / candidates)) / Z
    low, high = (gain.mean + wider * (end - gain.mean) for end in gain.interval)
    return 1 if low > 0 else -1 if high < 0 else 0


def reason(silos: int, rare: int, gain: Gain, without: Gain | None) -> str:
    """Return the reason why neither a gain nor a loss is shown."""
    if silos < HOSPITALS_NEEDED:
        return f"at least {HOSPITALS_NEEDED} silos are needed"
    if math.isnan(gain.interval[0]):
        return "no interval of some scores"
    if without is None or not excludes_zero(gain):
        return "the interval contains zero"
    if silos - rare < HOSPITALS_NEEDED:
        return f"{silos_of(silos - rare)} took part in enough rounds, at least {HOSPITALS_NEEDED} needed"
    return "without silos that took part in few rounds, the interval contains zero"
