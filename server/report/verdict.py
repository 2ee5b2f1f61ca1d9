"""Verdict on a method's mean gain: one decision for headline, text and tiles, and what would settle it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from server.report.html import between, hospitals_of
from server.report.inference import HOSPITALS_NEEDED, hospitals_to_settle, seeds_to_settle
from server.report.participation import seldom
from server.report.scores import Gain
from server.report.study import Study


@dataclass(frozen=True)
class Verdict:
    """The verdict. ``shown``: 1 for a gain, -1 for a loss, 0 for neither, with the reason and what would settle it."""

    gain: Gain
    without: Gain | None  # the mean without the silos that took part in few rounds, if there are any
    shown: int
    why: str
    settled_by: str


def verdict(study: Study, method: str, base: str) -> Verdict:
    """Return the verdict: the 95 % interval must exclude zero, with and without silos that missed many rounds."""
    compared = study.silo_means(method, base)
    rare = compared.keys() & seldom(study, [method, base]).keys()
    gain = study.mean_gain(method, base)
    without = study.mean_gain(method, base, rare) if rare else None
    shown = gain.shown if gain.shown == (without or gain).shown else 0
    if shown:
        return Verdict(gain, without, shown, "", "")
    settled_by = settling(study, method, base, rare if gain.shown else ())
    return Verdict(gain, without, 0, reason(len(compared), len(rare), gain), settled_by)


def reason(silos: int, rare: int, gain: Gain) -> str:
    """Return the reason why neither a gain nor a loss is shown: the interval, or why it does not count."""
    if silos < HOSPITALS_NEEDED:
        return f"an interval needs {HOSPITALS_NEEDED} hospitals"
    if not gain.shown:
        return between(gain)
    if silos - rare < HOSPITALS_NEEDED:
        return f"only {hospitals_of(silos - rare)} took part in enough rounds, {HOSPITALS_NEEDED} are needed"
    return "it rests on hospitals that took part in few rounds"


def settling(study: Study, method: str, base: str, without: Collection[str]) -> str:
    """Return the numbers of hospitals and of seeds that would settle it, if average and spread stay as they are."""
    values, methods = study.silo_means(method, base, without), study.compared(method, base)
    if len(values) < 2:
        return f"It takes {HOSPITALS_NEEDED} hospitals or more to settle it."
    hospitals = hospitals_to_settle(list(values.values()), methods)
    if hospitals is None:
        return "More hospitals like these are not likely to settle it: the average is too close to zero."
    differences = study.differences(method, base)
    seeds = seeds_to_settle([differences[silo] for silo in values], methods)
    more = f", or {seeds} seeds in these," if seeds else ""
    too = "; more seeds or test patients narrow the interval, too" if len(study.paired_seeds(method, base)) == 1 else ""
    return f"About {hospitals} hospitals like these{more} would settle it, if average and spread stay as they are{too}."
