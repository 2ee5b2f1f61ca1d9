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
from typing import Any

from markupsafe import Markup

from server.report.evidence import measurements_of, over_silos
from server.report.html import between, counted, hospitals_of, markup, number, percent, points, size_text, spoken
from server.report.inference import HOSPITALS_NEEDED, excludes_zero, over_hospitals
from server.report.methods import alone, spelled
from server.report.participation import MARK, seldom, worst
from server.report.scores import Gain
from server.report.study import Study
from server.report.verdict import Verdict, verdict
from server.results.hold_out import results_in
from server.results.reading import read_json
from server.results.tuned import TUNING

MOST_NAMES = 4  # maximum number of harmed hospitals in the sentence


@dataclass(frozen=True)
class Answer:
    """The sentence, and the conditions that it depends on."""

    sentence: Markup
    condition: str


def answer(study: Study) -> Answer | None:
    """Return the answer; None if no method with an exchange has a result."""
    best, base = study.best, alone()
    if best is None or not any(not math.isnan(study.score(best, s).mean) for s in study.silos):
        return None
    if base not in study.methods:
        return Answer(markup("Not shown: training alone (<code>{}</code>) was not run beside it.", base), "")
    if not any(study.counts(best, base)):
        return Answer(markup("Not shown: no hospital has sent a score of both."), condition(study, best, base))
    found = verdict(study, best, base)
    parts = [
        gain_part(study, best, base, found),
        worst_part(study, best, base),
        unseen_part(study, best),
        calibration_part(study, best, base),
        cost_part(study, best),
    ]
    return Answer(Markup("; ").join(parts) + ".", condition(study, best, base))


def harmed(study: Study, best: str, base: str) -> dict[str, Gain]:
    """Return the silos with a shown loss, independent of the mean gain."""
    gains = {silo: study.gain(best, base, silo) for silo in study.silos}
    gains = {silo: gain for silo, gain in gains.items() if not math.isnan(gain.interval[1])}
    return {silo: gain for silo, gain in gains.items() if excludes_zero(gain, len(gains)) < 0}


def gain_part(study: Study, best: str, base: str, found: Verdict) -> Markup:
    """Return yes, no or not yet certain, with the gain over training alone and its interval."""
    lose, name = harmed(study, best, base), spelled(best)
    interval = between(found.gain)
    gain = markup("{} points of {} on average over training alone", points(found.gain.mean), study.task.score_label)
    gain += markup(" (95&#8239;% interval {})", interval) if interval else Markup()
    gain += markup(" in {}", hospitals_of(sum(study.counts(best, base))))
    losers = markup("{} {} shown to lose", named(lose), "is" if len(lose) == 1 else "are")
    if found.shown > 0:
        first = markup("Yes on average, and not for everybody: {}, while", losers) if lose else Markup("Yes:")
        end = Markup() if lose else Markup(", and no hospital is shown to lose")
        return markup("{} {} gains {}{}", first, name, gain, end)
    if found.shown < 0:
        return markup("No: {} has {}{}", name, gain, markup(", and {}", losers) if lose else "")
    why = "" if found.why == interval else markup(", {}", found.why)
    if lose:
        return markup("No gain is certain, and harm is shown: {}; {} has {}{}", losers, name, gain, why)
    return markup("Not yet certain: {} has {}{}", name, gain, why)


def named(lose: Mapping[str, Gain]) -> Markup:
    """Return silos with their losses."""
    each = [markup("{} ({})", silo, points(gain.mean)) for silo, gain in lose.items()]
    more = [counted(len(each) - MOST_NAMES, "other")] if len(each) > MOST_NAMES else []
    return Markup(", ").join([*each[:MOST_NAMES], *more])


def worst_part(study: Study, best: str, base: str) -> Markup:
    """Return the lowest score of a hospital beside its score with ``base``, also without hospitals seldom there."""
    first = worst(study, best)
    assert first is not None
    text = markup("the worst hospital, {}", reached(study, best, base, first))
    rare = seldom(study, [best, base])
    if first in rare and (second := worst(study, best, rare)):
        text += markup("; without {} {}", MARK, reached(study, best, base, second))
    return text


def reached(study: Study, best: str, base: str, silo: str) -> Markup:
    """Return a hospital's score with both methods and its number of test samples: a minimum is low by chance, too."""
    own, over = study.score(base, silo).mean, "alone" if base == alone() else f"with {spelled(base)}"
    beside = "" if math.isnan(own) else markup(" ({}&#8239;% {})", percent(own), over)
    tested = sorted(set(study.sizes(silo, "n_test")) - {0})
    of = f" of {counted(tested[0], 'test sample')}" if tested else ""
    return markup("{}, reaches {}&#8239;%{}{}", silo, percent(study.score(best, silo).mean), beside, of)


def unseen_part(study: Study, best: str) -> Markup:
    """Return the result of silos held out of the training, compared with training alone."""
    held = results_in(study.summary)
    pairs = [
        (float(values[best]["zero_shot"]), float(values[best]["local"]))
        for values in held.values()
        if is_number(values.get(best, {}).get("zero_shot")) and is_number(values.get(best, {}).get("local"))
    ]
    if not pairs:
        why = f"{hospitals_of(len(held))} held out, none with both scores" if held else "none was held out"
        return markup("an unseen hospital: not shown, {}", why)
    mine, other = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    what = markup("{}&#8239;% as it comes, {}&#8239;% alone", percent(mine), percent(other))
    # Values that are equal as printed are no difference, even if the sign is certain.
    gain = over_hospitals([a - b for a, b in pairs], study.compared(best, alone()))
    sign = 0 if percent(mine) == percent(other) else gain.shown
    word = {1: "a gain is shown", -1: "a loss is shown", 0: "no difference is shown"}[sign]
    missing = f", in {len(pairs)} of {hospitals_of(len(held))} held out" if len(pairs) < len(held) else ""
    few = f", {hospitals_of(len(pairs))} held out, at least {HOSPITALS_NEEDED} needed" if few_of(pairs) else ""
    return markup("an unseen hospital: {} ({}{})", word, what, missing or few)


def calibration_part(study: Study, best: str, base: str) -> Markup:
    """Return whether calibration is better or worse: by the Brier score, or for measurements by the mean difference."""
    key, what = "brier", "Brier score"
    if study.task.name == "regression":
        key, what = "calibration_in_the_large", "distance of mean measured and mean predicted"
    mine, other = ({s: abs(v) for s, v in over_silos(study, m, key).items()} for m in (best, base))
    both = sorted(mine.keys() & other.keys())
    if not both:
        each = measurements_of(study)[0]
        why = "each measurement has its own (evidence per hospital)" if each else "it was not measured"
        return markup("calibration: not shown, {}", why)
    means = [number(statistics.fmean(found[s] for s in both), 3) for found in (mine, other)]
    gain = over_hospitals([other[s] - mine[s] for s in both], study.compared(best, base))
    sign = 0 if means[0] == means[1] else gain.shown
    word = {1: "better", -1: "worse", 0: "no difference is shown"}[sign]
    few = f", {hospitals_of(len(both))}, at least {HOSPITALS_NEEDED} needed" if few_of(both) else ""
    return markup("calibration: {} ({} {}, {} alone{})", word, what, *means, few)


def cost_part(study: Study, best: str) -> Markup:
    """Return bytes, seconds and epsilon."""
    size, seconds = study.cost(best)
    price = markup("cost: {} and {}", size_text(size), spoken(seconds))
    if not study.config.get("dp"):
        return price + ", without differential privacy"
    spent = [v.get("epsilon") for r in study.of(best) for v in r["per_silo"].values()]
    known = [float(e) for e in spent if is_number(e)]
    if len(known) < len(spent):
        return price + ", with differential privacy, whose epsilon not every hospital has sent"
    far = " so far" if any((best, r["seed"]) not in study.finished for r in study.of(best)) else ""
    runs = len(study.runs) - len(study.of(alone()))  # training alone sends nothing
    more = ", as the hospitals' last replies say; runs on the same data add up" if runs > 1 else ""
    return price + markup(", with epsilon at most {:.3g}{}{}", max(known), f"{far} in one run" if more else far, more)


def condition(study: Study, best: str, base: str) -> str:
    """Return the conditions of the answer: silos, seeds and rounds of the two compared methods."""
    c, seeds, scored = study.config, len(study.paired_seeds(best, base)), sum(study.counts(best, base))
    of = f"{scored} of " if scored < len(study.silos) else ""
    data = "the hospitals' own data"
    if study.manifest or study.simulated:
        about = study.manifest or c
        data = f"{Path(str(about.get('dataset', ''))).name}, split by {about.get('partition', '')}"
    count = sum(1 for m in study.methods if m != alone())
    chosen = f"chosen among {count} on {'validation' if study.chosen_on == 'val' else 'the same test'} data"
    ran = sorted({r["rounds"] for m in (best, base) for r in study.of(m)})
    rounds = f"{ran[0]} to {ran[-1]} rounds" if len(ran) > 1 else counted(ran[0], "round")
    late = f"; {', '.join(study.joined)} joined late" if study.joined else ""
    late += "; tuned on the split of other seeds, whose test samples these may be" if unsearched(study) else ""
    return (
        f"Drawn from {of}{hospitals_of(len(study.silos))}, each tested on its own samples; {data}; {rounds}{late}; "
        f"{counted(seeds, 'seed')}" + (f"; the method was {chosen}." if count > 1 else ".")
    )


def unsearched(study: Study) -> list[int]:
    """Return the seeds whose settings were chosen by a search on another seed's split."""
    searches = (read_json(study.path / TUNING) or {}).get("searches", [])
    return [seed for seed in study.seeds if searches and seed not in {search["seed"] for search in searches}]


def few_of(found: Sequence[Any]) -> bool:
    return len(found) < HOSPITALS_NEEDED


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
