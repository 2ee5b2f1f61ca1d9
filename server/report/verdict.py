"""GainVerdict on a method's mean gain: one decision for headline, text and tiles, and what would settle it."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from server.report.html import between, hospitals_of
from server.report.inference import (
    HOSPITALS_NEEDED,
    Gain,
    excludes_zero,
    hospitals_to_settle,
    seeds_to_settle,
)
from server.report.participation import Rounds, seldom
from server.report.study import StudyResults


@dataclass(frozen=True)
class GainVerdict:
    """The verdict on a method's gain over a baseline, with all that the page's sentences say about it.

    ``gains``: of the silos that have one; ``rare``: those that took part in few rounds, and ``without``: the mean
    without them. ``shown``: 1 for a gain, -1 for a loss, 0 for neither, with the reason and what would settle it.
    """

    study: StudyResults
    method: str
    base: str
    gains: Mapping[str, Gain]
    gain: Gain
    rare: Mapping[str, Rounds]
    without: Gain | None
    shown: int
    why: str
    settled_by: str

    @property
    def compared(self) -> int:
        """Number of methods that share the 5 % of the intervals."""
        return self.study.count_compared(self.method, self.base)

    @property
    def seeds(self) -> list[int]:
        return self.study.paired_seeds(self.method, self.base)

    @property
    def seed_means(self) -> list[float]:
        """The mean gain of each seed over the silos that have it."""
        found = self.study.differences(self.method, self.base).values()
        return [
            statistics.fmean(of[seed].mean for of in found if seed in of) for seed in self.seeds
        ]

    @property
    def tested_in(self) -> str:
        return hospitals_of(len(self.gains))

    @property
    def harmed(self) -> dict[str, Gain]:
        """The silos with a shown loss, independent of the mean gain."""
        known = {silo: gain for silo, gain in self.gains.items() if gain.has_interval}
        return {
            silo: gain for silo, gain in known.items() if excludes_zero(gain, len(known)) < 0
        }


def verdict(study: StudyResults, method: str, base: str) -> GainVerdict:
    """Return the verdict: the 95 % interval must exclude zero, with and without silos that missed many rounds."""
    gains = study.gains(method, base)
    rare = seldom(study, [method, base])
    few = gains.keys() & rare.keys()
    gain = study.mean_gain(method, base)
    without = study.mean_gain(method, base, few) if few else None
    shown = gain.shown if gain.shown == (without or gain).shown else 0
    why = "" if shown else reason(len(gains), len(few), gain)
    settled_by = (
        "" if shown else estimate_settling(study, method, base, few if gain.shown else ())
    )
    return GainVerdict(study, method, base, gains, gain, rare, without, shown, why, settled_by)


def reason(silos: int, rare: int, gain: Gain) -> str:
    """Return the reason why neither a gain nor a loss is shown: the interval, or why it does not count."""
    if silos < HOSPITALS_NEEDED:
        return f"an interval needs {HOSPITALS_NEEDED} hospitals"
    if not gain.shown:
        return between(gain)
    if silos - rare < HOSPITALS_NEEDED:
        return f"only {hospitals_of(silos - rare)} took part in enough rounds, {HOSPITALS_NEEDED} are needed"
    return "it rests on hospitals that took part in few rounds"


def estimate_settling(
    study: StudyResults, method: str, base: str, without: Collection[str]
) -> str:
    """Return the numbers of hospitals and of seeds that would settle it, if average and spread stay as they are."""
    values = study.silo_means(method, base, without)
    methods = study.count_compared(method, base)
    if len(values) < 2:
        return f"It takes {HOSPITALS_NEEDED} hospitals or more to settle it."
    hospitals = hospitals_to_settle(list(values.values()), methods)
    if hospitals is None:
        return "More hospitals like these are not likely to settle it: the average is too close to zero."
    differences = study.differences(method, base)
    seeds = seeds_to_settle([differences[silo] for silo in values], methods)
    more = f", or {seeds} seeds in these," if seeds else ""
    too = (
        "; more seeds or test patients narrow the interval, too"
        if len(study.paired_seeds(method, base)) == 1
        else ""
    )
    return f"About {hospitals} hospitals like these{more} would settle it, if average and spread stay as they are{too}."
