"""Verdict on a method's mean gain: one decision for headline, text and tiles.

The answer to "Should we federate?" in one sentence, with the conditions that it depends on.

The mean gain is decided once, by :func:`verdict`, as in the headline. Unseen hospitals and
calibration are compared in the same way (:func:`server.report.inference.over_hospitals`). A hospital is harmed if its
own gain's interval lies below zero, widened for the number of hospitals (Bonferroni). Without the correction, one in
four reports on twelve hospitals without any gain would name one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from server.report.html import between, hospitals_of, number, percent, sentences
from server.report.inference import (
    HOSPITALS_NEEDED,
    Gain,
    excludes_zero,
    finite_or_nan,
    over_hospitals,
    visible_loss,
    with_interval,
)
from server.report.methods import alone
from server.report.participation import Rounds, seldom, worst
from server.report.sections.evidence import measurements_of, values_by_seed
from server.report.sections.silos import held_out
from server.report.study import StudyResults


@dataclass(frozen=True)
class GainVerdict:
    """The verdict on a method's gain over a baseline, with all that the page's sentences say about it.

    ``gains``: of the silos that have one; ``rare``: those that took part in few rounds, and ``without``: the mean
    without them. ``shown``: 1 for a gain, -1 for a loss, 0 for neither, with the reason.
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
        by_silo = self.study.differences(self.method, self.base).values()
        return [
            statistics.fmean(of[seed].mean for of in by_silo if seed in of)
            for seed in self.seeds
        ]

    @property
    def tested_in(self) -> str:
        return hospitals_of(len(self.gains))

    @property
    def pair(self) -> tuple[str, str]:
        return self.method, self.base

    @property
    def visible(self) -> tuple[tuple[float, str], tuple[float, str]] | None:
        """The least and the largest loss at one silo that 80 of 100 studies would show, with the silos; or None."""
        known = with_interval(self.gains)
        losses = [(visible_loss(gain, len(known)), silo) for silo, gain in known.items()]
        return (min(losses), max(losses)) if losses else None

    @property
    def harmed(self) -> dict[str, Gain]:
        """The silos with a shown loss, independent of the mean gain."""
        known = with_interval(self.gains)
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
    return GainVerdict(study, method, base, gains, gain, rare, without, shown, why)


def reason(silos: int, rare: int, gain: Gain) -> str:
    """Return the reason why neither a gain nor a loss is shown: the interval, or why it does not count."""
    if silos < HOSPITALS_NEEDED:
        return f"an interval needs {HOSPITALS_NEEDED} hospitals"
    if gain.shown:
        return rests_on_few(silos, rare)
    return between(gain) or "all hospitals gain equally, of patients that are not known"


def rests_on_few(silos: int, rare: int) -> str:
    """Return why an interval over all silos does not count, if it is not confirmed without the rare ones."""
    if silos - rare < HOSPITALS_NEEDED:
        return f"only {hospitals_of(silos - rare)} took part in enough rounds, {HOSPITALS_NEEDED} are needed"
    return "it rests on hospitals that took part in few rounds"


MOST_NAMES = 4  # maximum number of harmed hospitals in the sentence


@dataclass(frozen=True)
class Answer:
    """The sentence, and the conditions that it depends on."""

    sentence: Markup
    condition: str


def answer(study: StudyResults) -> Answer | None:
    """Return the answer; None if no method with an exchange has a result."""
    best, base = study.best, alone()
    if best is None or worst(study, best) is None:
        return None
    if base not in study.methods:
        return Answer(sentences("answer", found=None), "")
    gain_verdict = verdict(study, best, base)
    if not gain_verdict.gains:
        return Answer(sentences("answer", found=gain_verdict), condition(gain_verdict))
    held = held_out(study)
    key, what = calibration_of(study)
    sentence = sentences(
        "answer",
        study=study,
        found=gain_verdict,
        most=MOST_NAMES,
        needed=HOSPITALS_NEEDED,
        held=len(held),
        unseen=compare_means(
            [(of[best]["zero_shot"], of[best]["local"]) for of in held.values() if best in of],
            study.count_compared(best, base),
            percent,
        ),
        what=what,
        calibration=compare_means(
            distances(study, best, base, key),
            gain_verdict.compared,
            lambda value: number(value, 3),
        ),
        several=bool(measurements_of(study)[0]),
        epsilon=largest_epsilon(study, best),
        unfinished=any((best, run["seed"]) not in study.finished for run in study.of(best)),
        runs=len(study.runs) - len(study.of(base)),  # training alone sends nothing
    )
    return Answer(sentence, condition(gain_verdict))


def compare_means(
    each: Sequence[tuple[float, float]], methods: int, show: Callable[[float], str]
) -> tuple[str, str, int, int] | None:
    """Return two means over hospitals as text, the sign of a shown difference, and the number of hospitals.

    None without a hospital that has both values. Values that are equal as printed show no difference.
    """
    pairs = [pair for pair in each if not math.isnan(sum(pair))]
    if not pairs:
        return None
    mine, other = (show(statistics.fmean(side)) for side in zip(*pairs, strict=True))
    differences = [a - b for a, b in pairs] if mine != other else []
    return mine, other, over_hospitals(differences, methods).shown, len(pairs)


def distances(
    study: StudyResults, method: str, base: str, key: str
) -> list[tuple[float, float]]:
    """Return each hospital's distance from 0 of a value of the evidence, with both methods.

    Means over the seeds that both have. Seeds with opposite signs do not cancel.
    """
    pairs = []
    for silo in study.silos:
        mine, other = (values_by_seed(study, name, silo, key) for name in (method, base))
        if seeds := mine.keys() & other.keys():
            each = (statistics.fmean(abs(of[seed]) for seed in seeds) for of in (mine, other))
            pairs.append((next(each), next(each)))
    return pairs


def calibration_of(study: StudyResults) -> tuple[str, str]:
    """Return the value of the evidence that stands for calibration, and its name."""
    if study.task.name == "regression":
        return "calibration_in_the_large", "distance of mean measured and mean predicted"
    return "brier", "Brier score"


def largest_epsilon(study: StudyResults, method: str) -> float:
    """Return the largest epsilon of a hospital in one run; ``nan`` if not every hospital has sent its own."""
    spent = [
        finite_or_nan(v.get("epsilon"))
        for r in study.of(method)
        for v in r["per_silo"].values()
    ]
    return math.nan if any(map(math.isnan, spent)) else max(spent, default=math.nan)


def condition(gain_verdict: GainVerdict) -> str:
    """Return the conditions of the answer: silos, seeds and rounds of the two compared methods."""
    study = gain_verdict.study
    return sentences(
        "condition",
        study=study,
        found=gain_verdict,
        ran=sorted(
            {r["rounds"] for m in (gain_verdict.method, gain_verdict.base) for r in study.of(m)}
        ),
    )
