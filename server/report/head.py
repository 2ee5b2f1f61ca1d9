"""Head of the report's page: its headline, the caution, the faults, and four figures."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from server.report.answer import worst_part
from server.report.html import (
    a_score,
    between,
    counted,
    duration,
    hospitals_of,
    markup,
    mean_of,
    percent,
    points,
    scores,
    size_text,
    spoken,
)
from server.report.inference import SEEDS_NEEDED
from server.report.methods import alone, baseline_name, exchanges, spelled
from server.report.participation import MARK, rounds_missed, seldom
from server.report.study import Study
from server.report.templates import render
from server.report.verdict import Verdict, verdict

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
        bits.append(hospitals_of(len(study.silos)))
    seeds = f"seed {study.seeds[0]}" if len(study.seeds) == 1 else counted(len(study.seeds), "seed")
    bits += [seeds] if study.seeds else []
    file = next((f for f in ("summary.json", "history.csv", "config.toml") if (study.path / f).exists()), "")
    bits.append(time.strftime("%-d %B %Y", time.localtime((study.path / file).stat().st_mtime)))
    return Markup(" · ").join(bits)


def headline(study: Study) -> tuple[str, str]:
    """Return the sentence at the top, and the caution below it."""
    if not study.runs:
        sentence = "The run failed" if study.faults else "There are no results yet"
        return sentence, f"No hospital has reported {a_score(study)}."
    best, base = study.best, study.base
    known = [s for s in study.silos if any(not math.isnan(study.score(m, s).mean) for m in study.methods)]
    if not known:
        return f"The {scores(study)} stayed in the hospitals", (
            "Every hospital's test set is too small for its metrics to be sent. They are in the hospitals' own logs."
        )
    method = best or study.methods[0]
    bytes_, seconds = study.cost(method)
    price = Markup(re.sub(r"(\d) ", "\\1&nbsp;", f"at a cost of {size_text(bytes_)} and {spoken(seconds)}"))
    if base is None:
        mean = percent(study.final(method, mean_of(study))[0])
        how = spelled(method) if exchanges(method) else "Training alone"
        add = markup("<code>{}</code>", alone()) if exchanges(method) else "a method that shares something"
        silos = hospitals_of(len(known))
        return (
            markup("{} reaches {}&#8239;% mean {} over {}, {}", how, mean, study.task.score_label, silos, price),
            markup("What a hospital gains is not known: run {} in the same study to compare.", add),
        )
    assert best is not None
    over = baseline_name(base)
    if not any(study.counts(best, base)):
        return (
            markup("{} cannot be compared with {}", spelled(best), over),
            f"No hospital has reported {a_score(study)} for both.",
        )
    found = verdict(study, best, base)
    return markup("{}, {}", claim(study, found, best, over), price), caution(study, best, base, found)


def claim(study: Study, found: Verdict, best: str, over: str) -> Markup:
    """Return the sentence on the mean gain: its value, and whether it is shown."""
    total = hospitals_of(sum(study.counts(best, study.base or "")))
    emphasis, gain = "shown" if found.shown else "not-shown", points(found.gain.mean)
    measured = markup('<em class="{}">{} points</em> of {} on average', emphasis, gain, study.task.score_label)
    if not found.shown:
        name = spelled(best)
        return markup("{} against {}: {} in {}, not yet certain ({})", name, over, measured, total, found.why)
    word = "gains over" if found.shown > 0 else "loses against"
    return markup("{} {} {}: {} in {}", spelled(best), word, over, measured, total)


def caution(study: Study, best: str, base: str, found: Verdict) -> Markup:
    """Return the limits of the headline: uncertainty, seeds, missed rounds, the worst hospital, missing scores."""
    tested = [s for s in study.silos if not math.isnan(study.gain(best, base, s).mean)]
    text: list[str] = [average(study, best, base, found), *single_gains(study, best, base, tested)]
    text += seeds_apart(study, best, base)
    rare = seldom(study, [best, base])
    if found.without is not None:
        it = "it" if len(rare) == 1 else "them"
        mean, ends = points(found.without.mean), in_brackets(between(found.without))
        text.append(markup("{} {}: without {} the average is {} points{}.", MARK, rounds_missed(rare), it, mean, ends))
    if base != alone():  # else the answer below says it
        worst = worst_part(study, best, base)
        text.append(markup("{}{}.", worst[0].upper(), worst[1:]))
    if missing := len(study.silos) - len(tested):
        are = "is" if missing == 1 else "are"
        text.append(f"{hospitals_of(missing)} sent no {study.task.score_label} and {are} not counted.")
    return Markup(" ").join(text)


def seeds_apart(study: Study, best: str, base: str) -> list[str]:
    """Return a sentence on the seeds: the interval holds for these, and how far their averages lie apart."""
    seeds = study.paired_seeds(best, base)
    ran = "One seed was run" if len(seeds) == 1 else f"{len(seeds)} seeds were run"
    ran += " with both methods" if len(seeds) < len(study.seeds) else ""
    if len(seeds) < SEEDS_NEEDED:
        return [f"{ran}: how much others would change this is not counted."]
    means = [study.seed_mean(best, base, seed) for seed in seeds]
    return [markup("{}, with averages from {} to {}.", ran, points(min(means)), points(max(means)))]


def single_gains(study: Study, best: str, base: str, tested: Sequence[str]) -> list[str]:
    """Return a sentence on the number of silos whose own gain is clear of zero, and the number by chance alone."""
    sizes = sorted({n for s in tested for n in study.sizes(s, "n_test")} - {0})
    if not sizes:
        return []
    many = counted(sizes[0], "sample") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} samples"
    clear = sum(study.gain(best, base, s).interval[0] > 0 for s in tested)
    text = f"Each hospital is tested on its own {many}, which leaves a single hospital's gain uncertain: "
    if clear == 0:
        return [f"{text}no gain is larger than chance alone could explain."]
    word = (
        "the 95&#8239;% interval of one gain lies" if clear == 1 else f"the 95&#8239;% intervals of {clear} gains lie"
    )
    chance = f"Chance alone puts about {BY_CHANCE * len(tested):.2g} of {len(tested)} there."
    return [markup("{}{} above zero. {}", text, Markup(word), chance)]


def average(study: Study, best: str, base: str, found: Verdict) -> Markup:
    """Return a sentence on the average's interval, or on what would settle it where it is not certain."""
    text = markup("{}", found.settled_by)
    if found.shown:
        text = markup("The average is clear of zero{}.", in_brackets(between(found.gain)))
    if (methods := study.compared(best, base)) > 1:
        text += (
            f" No validation data: the method was chosen on the test data, and an interval counts {methods} methods."
        )
    return text


def in_brackets(interval: str) -> Markup:
    """Return an interval in brackets; empty if unknown."""
    return markup(" (95&#8239;% interval {})", interval) if interval else Markup()


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
    below = " · ".join(others) or "over hospitals, each counting alike"
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
    return "Hospitals that score higher", value, f"{level} level, {down} lower"


def mean_gain(found: Verdict) -> tuple[str, str, str]:
    """Return the tile with the mean gain, and whether it is shown by the headline's decision."""
    interval = between(found.gain)
    below = [markup("95&#8239;% interval {}", interval)] if interval else []
    name = "Mean gain" if found.shown > 0 else "Mean loss"
    if not found.shown:
        name = "Mean gain, not yet certain"
        below += [] if found.why == interval else [markup("{}", found.why)]
    if found.without is not None:
        below.append(markup("without {} {}", MARK, points(found.without.mean)))
    value = markup("{}<small> points</small>", points(found.gain.mean))
    return name, value, Markup("<br>").join(below)
