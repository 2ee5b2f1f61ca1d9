"""Head of the report's page: its headline, the caution, the faults, and four figures."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from server.report.html import (
    a_score,
    between,
    duration,
    markup,
    mean_of,
    percent,
    points,
    scores,
    silos_of,
    size_text,
    spoken,
)
from server.report.inference import HOSPITALS_NEEDED, SEEDS_NEEDED
from server.report.methods import alone, baseline_name, exchanges, spelled
from server.report.participation import MARK, rounds_missed, seldom, without, worst_silos
from server.report.study import Study
from server.report.templates import render
from server.report.verdict import Verdict, excludes_zero, verdict

BY_CHANCE = 0.025  # share of hospitals without any gain whose 95 % interval lies above zero


def title(study: Study) -> str:
    """Return the page's title."""
    return f"silofl report: {study.path.resolve().name}"


def where(study: Study) -> Markup:
    """Return the line above the headline: run, data, silos, seeds, date."""
    c = study.config
    bits: list[str] = [markup("<b>{}</b>", study.path.resolve().name)]
    if study.manifest or study.simulated:
        dataset = str((study.manifest or c).get("dataset", ""))
        bits.append(f"{Path(dataset).name}, {(study.manifest or c).get('partition', '')}")
    if study.silos:
        bits.append(silos_of(len(study.silos)))
    seeds = f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"
    bits += [seeds] if study.seeds else []
    file = next((f for f in ("summary.json", "history.csv", "config.toml") if (study.path / f).exists()), "")
    bits.append(time.strftime("%-d %B %Y", time.localtime((study.path / file).stat().st_mtime)))
    return Markup(" · ").join(bits)


def headline(study: Study) -> tuple[str, str]:
    """Return the sentence at the top, and the caution below it."""
    if not study.runs:
        sentence = "The run failed" if study.faults else "There are no results yet"
        return sentence, f"No silo has reported {a_score(study)}."
    best, base = study.best, study.base
    known = [s for s in study.silos if any(not math.isnan(study.score(m, s).mean) for m in study.methods)]
    if not known:
        return f"The {scores(study)} stayed in the silos", (
            "Every silo's test set is too small for its metrics to be sent. They are in the silos' own logs."
        )
    method = best or study.methods[0]
    bytes_, seconds = study.cost(method)
    price = Markup(re.sub(r"(\d) ", "\\1&nbsp;", f"at a cost of {size_text(bytes_)} and {spoken(seconds)}"))
    if base is None:
        mean = percent(study.final(method, mean_of(study))[0])
        how = spelled(method) if exchanges(method) else "Training alone"
        add = markup("<code>{}</code>", alone()) if exchanges(method) else "a method that shares something"
        silos = silos_of(len(known))
        return (
            markup("{} reaches {}&#8239;% mean {} over {}, {}", how, mean, study.task.score_label, silos, price),
            markup("What a silo gains is not known: run {} in the same study to compare.", add),
        )
    assert best is not None
    over = baseline_name(base)
    if not any(study.counts(best, base)):
        return (
            markup("{} cannot be compared with {}", spelled(best), over),
            f"No silo has reported {a_score(study)} for both.",
        )
    found = verdict(study, best, base)
    return markup("{}, {}", claim(study, found, best, over), price), caution(study, best, base, found)


def claim(study: Study, found: Verdict, best: str, over: str) -> Markup:
    """Return the sentence on the mean gain: whether it is shown, and its value."""
    total = silos_of(sum(study.counts(best, study.base or "")))
    emphasis, gain = "shown" if found.shown else "not-shown", points(found.gain.mean)
    measured = markup('<em class="{}">{} points</em> of {}', emphasis, gain, study.task.score_label)
    if not found.shown:
        return markup("No gain of {} over {} is shown: {} on average in {}", spelled(best), over, measured, total)
    word = "gains" if found.shown > 0 else "loses"
    against = "over" if found.shown > 0 else "against"
    return markup("{} {} {} {}: {} on average over {}", spelled(best), word, against, over, measured, total)


def caution(study: Study, best: str, base: str, found: Verdict) -> Markup:
    """Return the limits of the headline: uncertainty, seeds, missed rounds, the worst silo, missing scores."""
    tested = [s for s in study.silos if not math.isnan(study.gain(best, base, s).mean)]
    text = [*single_gains(study, best, base, tested), average(len(tested), len(study.silos), found)]
    if (paired := len(study.paired_seeds(best, base))) < SEEDS_NEEDED:
        seeds = "One seed was run" if paired == 1 else f"{paired} seeds were run"
        seeds += " with both methods" if paired < len(study.seeds) else ""
        text.append(f"{seeds}: how much others would change this is not counted.")
    rare = seldom(study, [best, base])
    if found.without is not None:
        it = "it" if len(rare) == 1 else "them"
        mean, ends = points(found.without.mean), in_brackets(between(found.without))
        text.append(markup("{} {}: without {} the average is {} points{}.", MARK, rounds_missed(rare), it, mean, ends))
    text += worst(study, best, base, list(rare))
    if missing := len(study.silos) - len(tested):
        text.append(
            f"{silos_of(missing)} sent no {study.task.score_label} and {'is' if missing == 1 else 'are'} not counted."
        )
    if study.chosen_on == "test" and len(study.methods) > 2:
        text.append(
            "There are no validation data, so the method was chosen on the test data that it is measured on. Whether a "
            "gain is shown counts that choice; the printed gains and intervals do not."
        )
    return Markup(" ").join(text)


def single_gains(study: Study, best: str, base: str, tested: Sequence[str]) -> list[str]:
    """Return a sentence on the number of silos whose own gain is clear of zero, and the number by chance alone."""
    sizes = sorted({n for s in tested for n in study.sizes(s, "n_test")} - {0})
    if not sizes:
        return []
    many = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    clear = sum(study.gain(best, base, s).interval[0] > 0 for s in tested)
    text = f"Each silo is tested on its own {many} samples, which leaves a single silo's gain uncertain: "
    if clear == 0:
        return [f"{text}no gain is larger than chance alone could explain."]
    word = (
        "the 95&#8239;% interval of one gain lies" if clear == 1 else f"the 95&#8239;% intervals of {clear} gains lie"
    )
    chance = f"Chance alone puts about {BY_CHANCE * len(tested):.2g} of {len(tested)} there."
    return [markup("{}{} above zero. {}", text, Markup(word), chance)]


def average(tested: int, silos: int, found: Verdict) -> str:
    """Return a sentence on whether the mean gain, over ``tested`` of all ``silos``, is clear of zero."""
    interval, of = between(found.gain), "all" if tested == silos else f"{tested} of {silos}"
    if not interval:
        few = f"{silos_of(tested)} {'is' if tested == 1 else 'are'} too few, it takes {HOSPITALS_NEEDED}"
        return f"The average has no interval: {few if tested < HOSPITALS_NEEDED else found.why}."
    if found.shown or not excludes_zero(found.gain):
        sure = "clear of zero" if found.shown else "not clear of zero"
        return markup("The average over {} silos is {}{}.", of, sure, in_brackets(interval))
    ends = in_brackets(interval)
    if found.without is None:
        return markup("The average over {} silos{} is not clear of zero: {}.", of, ends, found.why)
    return markup("The average over {} silos{} rests on silos that took part in few rounds.", of, ends)


def in_brackets(interval: str) -> Markup:
    """Return an interval in brackets; empty if unknown."""
    return markup(" (95&#8239;% interval {})", interval) if interval else Markup()


def worst(study: Study, best: str, base: str, rare: Sequence[str]) -> list[str]:
    """Return a sentence on the worst scores, also without the ``rare`` silos if one of them has the worst score."""
    mine, other = (study.final(m, f"{study.task.score}_worst")[0] for m in (best, base))
    if math.isnan(mine) or math.isnan(other):
        return []
    text = markup(
        "The worst silo reaches {}&#8239;% ({}&#8239;% with {})", percent(mine), percent(other), spelled(base)
    )
    if (worst_silos(study, best) | worst_silos(study, base)).intersection(rare):
        mine, other = (without(study, m, rare)[1] for m in (best, base))
        text += markup("; without {} {}&#8239;% ({}&#8239;%)", MARK, percent(mine), percent(other))
    return [text + "."]


def faults(study: Study) -> Markup:
    """Render the runs that did not end and the notes of the run's log; empty if there are none."""
    notes = [
        (n.time.replace("T", " ").replace("Z", " UTC") or "time not recorded", n.message, n.times) for n in study.notes
    ]
    return render("faults", faults=study.faults, notes=notes)


def tiles(study: Study) -> Markup:
    """Render up to four figures below the headline; empty without results."""
    if not study.runs:
        return Markup()
    found: list[tuple[str, str, str]] = []
    method, base = study.best or study.methods[0], study.base
    if base and study.best:
        found += [score_higher(study, study.best, base), mean_gain(verdict(study, study.best, base))]
    mean, deviation = study.final(method, mean_of(study))
    others = [f"{spelled(m)} {percent(study.final(m, mean_of(study))[0])}" for m in study.columns if m != method]
    if not math.isnan(deviation):
        others = [f"± {percent(deviation)} over seeds", *others]
    value = markup("{}<small>&#8239;%</small>", percent(mean))
    below = " · ".join(others) or "over silos, each counting alike"
    found.append((f"Mean {study.task.score_label}, {spelled(method)}", value, below))
    bytes_, seconds = study.cost(method)
    size, _, unit = size_text(bytes_).partition(" ")
    took = f"sent and received, in {duration(seconds)}"
    found.append(("Cost of one run", markup("{}<small> {}</small>", size, unit), took))
    return render("tiles", tiles=found)


def score_higher(study: Study, best: str, base: str) -> tuple[str, str, str]:
    """Return the tile with the number of silos that gain."""
    up, level, down = study.counts(best, base)
    value = markup("{}<small> of {}</small>", up, up + level + down)
    return "Silos that score higher", value, f"{level} level, {down} lower"


def mean_gain(found: Verdict) -> tuple[str, str, str]:
    """Return the tile with the mean gain, and whether it is shown by the headline's decision."""
    interval = between(found.gain)
    below = [markup("95&#8239;% interval {}", interval)] if interval else []
    name = "Mean gain" if found.shown > 0 else "Mean loss"
    if not found.shown:
        name = "Mean gain, not shown"
        below += [markup("{}", found.why)] if found.why else []
    if found.without is not None:
        below.append(markup("without {} {}", MARK, points(found.without.mean)))
    value = markup("{}<small> points</small>", points(found.gain.mean))
    return name, value, Markup("<br>").join(below)
