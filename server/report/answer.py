"""The answer to "Should we federate?" in one sentence, with the conditions that it depends on.

The mean gain is decided once, by :func:`server.report.verdict.verdict`, as in the headline. Unseen hospitals and
calibration are compared in the same way (:func:`server.report.inference.over_hospitals`). A hospital is harmed if its
own gain's interval lies below zero, widened for the number of hospitals (Bonferroni). Without the correction, one in
four reports on twelve hospitals without any gain would name one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from server.report.html import (
    between,
    count_noun,
    format_duration,
    hospitals_of,
    markup,
    number,
    percent,
    points,
    size_text,
)
from server.report.inference import HOSPITALS_NEEDED, Gain, finite_or_nan, over_hospitals
from server.report.methods import alone, spell
from server.report.participation import MARK, worst
from server.report.sections.evidence import measurements_of, over_silos
from server.report.sections.unseen import held_out
from server.report.study import StudyResults
from server.report.verdict import GainVerdict, verdict

MOST_NAMES = 4  # maximum number of harmed hospitals in the sentence


@dataclass(frozen=True)
class Answer:
    """The sentence, and the conditions that it depends on."""

    sentence: Markup
    condition: str


def answer(study: StudyResults) -> Answer | None:
    """Return the answer; None if no method with an exchange has a result."""
    best = study.best
    base = alone()
    if best is None or worst(study, best) is None:
        return None
    if base not in study.methods:
        return Answer(
            markup("Not shown: training alone (<code>{}</code>) was not run beside it.", base),
            "",
        )
    found = verdict(study, best, base)
    if not found.gains:
        return Answer(
            markup("Not shown: no hospital has sent a score of both."), condition(found)
        )
    parts = [
        gain_part(found),
        worst_part(found),
        unseen_part(study, best),
        calibration_part(found),
        cost_part(found),
    ]
    return Answer(Markup("; ").join(parts) + ".", condition(found))


def gain_part(found: GainVerdict) -> Markup:
    """Return yes, no or not yet certain, with the gain over training alone and its interval."""
    lose = found.harmed
    name = spell(found.method)
    interval = between(found.gain)
    score = found.study.task.score_label
    gain = markup(
        "{} points of {} on average over training alone", points(found.gain.mean), score
    )
    gain += markup(" (95&#8239;% interval {})", interval) if interval else Markup()
    gain += markup(" in {}", found.tested_in)
    losers = markup("{} {} shown to lose", name_losers(lose), "is" if len(lose) == 1 else "are")
    if found.shown > 0:
        if lose:
            return markup(
                "Yes on average, and not for everybody: {}, while {} gains {}",
                losers,
                name,
                gain,
            )
        return markup("Yes: {} gains {}, and no hospital is shown to lose", name, gain)
    if found.shown < 0:
        return markup("No: {} has {}{}", name, gain, markup(", and {}", losers) if lose else "")
    why = "" if found.why == interval else markup(", {}", found.why)
    if lose:
        return markup(
            "No gain is certain, and harm is shown: {}; {} has {}{}", losers, name, gain, why
        )
    return markup("Not yet certain: {} has {}{}", name, gain, why)


def name_losers(lose: Mapping[str, Gain]) -> Markup:
    """Return silos with their losses."""
    each = [markup("{} ({})", silo, points(gain.mean)) for silo, gain in lose.items()]
    more = [count_noun(len(each) - MOST_NAMES, "other")] if len(each) > MOST_NAMES else []
    return Markup(", ").join([*each[:MOST_NAMES], *more])


def worst_part(found: GainVerdict) -> Markup:
    """Return the lowest score of a hospital beside its score with ``base``, also without hospitals seldom there."""
    first = worst(found.study, found.method)
    assert first is not None
    text = markup("the worst hospital, {}", describe_reached(found, first))
    if first in found.rare and (second := worst(found.study, found.method, found.rare)):
        text += markup("; without {} {}", MARK, describe_reached(found, second))
    return text


def describe_reached(found: GainVerdict, silo: str) -> Markup:
    """Return a hospital's score with both methods and its number of test samples: a minimum is low by chance, too."""
    study = found.study
    base = found.base
    own = study.score(base, silo).mean
    over = "alone" if base == alone() else f"with {spell(base)}"
    beside = "" if math.isnan(own) else markup(" ({}&#8239;% {})", percent(own), over)
    tested = sorted(set(study.sizes(silo, "n_test")) - {0})
    of = f" of {count_noun(tested[0], 'test sample')}" if tested else ""
    return markup(
        "{}, reaches {}&#8239;%{}{}",
        silo,
        percent(study.score(found.method, silo).mean),
        beside,
        of,
    )


def unseen_part(study: StudyResults, best: str) -> Markup:
    """Return the result of silos held out of the training, compared with training alone."""
    held = held_out(study)
    each = [(of[best]["zero_shot"], of[best]["local"]) for of in held.values() if best in of]
    pairs = [pair for pair in each if not math.isnan(sum(pair))]
    if not pairs:
        why = (
            f"{hospitals_of(len(held))} held out, none with both scores"
            if held
            else "none was held out"
        )
        return markup("an unseen hospital: not shown, {}", why)
    mine, other = (percent(statistics.fmean(side)) for side in zip(*pairs, strict=True))
    differences = [a - b for a, b in pairs] if mine != other else []
    word = decide(
        differences, study.count_compared(best, alone()), "a gain is shown", "a loss is shown"
    )
    what = markup("{}&#8239;% as it comes, {}&#8239;% alone", mine, other)
    missing = (
        f", in {len(pairs)} of {hospitals_of(len(held))} held out"
        if len(pairs) < len(held)
        else ""
    )
    return markup(
        "an unseen hospital: {} ({}{})", word, what, missing or too_few(len(pairs), " held out")
    )


def calibration_of(study: StudyResults) -> tuple[str, str]:
    """Return the value of the evidence that stands for calibration, and its name."""
    if study.task.name == "regression":
        return "calibration_in_the_large", "distance of mean measured and mean predicted"
    return "brier", "Brier score"


def calibration_part(found: GainVerdict) -> Markup:
    """Return whether calibration is better or worse: by the Brier score, or for measurements by the mean difference."""
    study = found.study
    key, what = calibration_of(study)
    mine, other = (over_silos(study, m, key) for m in (found.method, found.base))
    pairs = [(abs(mine[silo]), abs(other[silo])) for silo in sorted(mine.keys() & other.keys())]
    if not pairs:
        each = measurements_of(study)[0]
        why = (
            "each measurement has its own (evidence per hospital)"
            if each
            else "it was not measured"
        )
        return markup("calibration: not shown, {}", why)
    means = [number(statistics.fmean(side), 3) for side in zip(*pairs, strict=True)]
    differences = [b - a for a, b in pairs] if means[0] != means[1] else []
    word = decide(differences, found.compared, "better", "worse")
    return markup(
        "calibration: {} ({} {}, {} alone{})", word, what, *means, too_few(len(pairs))
    )


def decide(differences: Sequence[float], methods: int, gain: str, loss: str) -> str:
    """Return the words for a shown gain or loss. No differences: values that are equal as printed show nothing."""
    return {1: gain, -1: loss, 0: "no difference is shown"}[
        over_hospitals(differences, methods).shown
    ]


def too_few(hospitals: int, what: str = "") -> str:
    few = f", {hospitals_of(hospitals)}{what}, at least {HOSPITALS_NEEDED} needed"
    return few if hospitals < HOSPITALS_NEEDED else ""


def cost_part(found: GainVerdict) -> Markup:
    """Return bytes, seconds and epsilon."""
    study = found.study
    best = found.method
    size, seconds = study.cost(best)
    price = markup("cost: {} and {}", size_text(size), format_duration(seconds))
    if not study.config.get("dp"):
        return price + ", without differential privacy"
    spent = [
        finite_or_nan(v.get("epsilon")) for r in study.of(best) for v in r["per_silo"].values()
    ]
    if any(map(math.isnan, spent)):
        return price + ", with differential privacy, whose epsilon not every hospital has sent"
    far = (
        " so far"
        if any((best, r["seed"]) not in study.finished for r in study.of(best))
        else ""
    )
    runs = len(study.runs) - len(study.of(alone()))  # training alone sends nothing
    more = (
        ", as the hospitals' last replies say; runs on the same data add up" if runs > 1 else ""
    )
    return price + markup(
        ", with epsilon at most {:.3g}{}{}",
        max(spent),
        f"{far} in one run" if more else far,
        more,
    )


def condition(found: GainVerdict) -> str:
    """Return the conditions of the answer: silos, seeds and rounds of the two compared methods."""
    study = found.study
    scored = len(found.gains)
    of = f"{scored} of " if scored < len(study.silos) else ""
    data = "the hospitals' own data"
    if study.manifest or study.simulated:
        about = study.manifest or study.config
        data = (
            f"{Path(str(about.get('dataset', ''))).name}, split by {about.get('partition', '')}"
        )
    count = sum(1 for m in study.methods if m != alone())
    chosen = f"chosen among {count} on {'validation' if study.chosen_on == 'val' else 'the same test'} data"
    ran = sorted({r["rounds"] for m in (found.method, found.base) for r in study.of(m)})
    rounds = f"{ran[0]} to {ran[-1]} rounds" if len(ran) > 1 else count_noun(ran[0], "round")
    late = f"; {', '.join(study.joined)} joined late" if study.joined else ""
    late += (
        "; tuned on the split of other seeds, whose test samples these may be"
        if study.unsearched
        else ""
    )
    return (
        f"Drawn from {of}{hospitals_of(len(study.silos))}, each tested on its own samples; {data}; {rounds}{late}; "
        f"{count_noun(len(found.seeds), 'seed')}"
        + (f"; the method was {chosen}." if count > 1 else ".")
    )
