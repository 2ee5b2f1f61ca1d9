"""Head of the report's page: its headline, the caution, the faults, and four figures."""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from server.report.answer import worst_part
from server.report.html import (
    a_score,
    between,
    count_noun,
    duration,
    format_duration,
    hospitals_of,
    markup,
    percent,
    points,
    render,
    scores,
    size_text,
)
from server.report.inference import SEEDS_NEEDED, Gain
from server.report.methods import alone, baseline_name, exchanges, spell
from server.report.participation import MARK, rounds_missed, worst
from server.report.study import StudyResults
from server.report.verdict import GainVerdict, verdict

BY_CHANCE = 0.025  # share of hospitals without any gain whose 95 % interval lies above zero
FAULTS = """{% if faults or notes %}<div class="fault">{% for fault in faults %}<p>{{ fault }}.</p>{% endfor %}
{% if notes %}<p>From the run's log:</p>{% for when, message, times in notes %}<p><span class="note">{{ when }}</span> {{ message }}.{% if times != 1 %} ({{ times }} times){% endif %}</p>{% endfor %}{% endif %}
</div>{% endif %}"""
TILES = """<dl class="tiles"{% if tiles|length < 4 %} style="grid-template-columns: repeat({{ tiles|length }}, 1fr)"{% endif %}>
{% for name, value, below in tiles %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd><dd>{{ below }}</dd></div>{% endfor %}</dl>"""


def where(study: StudyResults) -> Markup:
    """Return the line above the headline: run, data, silos, seeds, date."""
    about = study.manifest or study.config
    bits: list[str] = [markup("<b>{}</b>", study.path.resolve().name)]
    if study.manifest or study.simulated:
        bits.append(f"{Path(str(about.get('dataset', ''))).name}, {about.get('partition', '')}")
    bits += [hospitals_of(len(study.silos))] if study.silos else []
    seeds = (
        f"seed {study.seeds[0]}"
        if len(study.seeds) == 1
        else count_noun(len(study.seeds), "seed")
    )
    bits += [seeds] if study.seeds else []
    file = next(
        (
            f
            for f in ("summary.json", "history.csv", "config.toml")
            if (study.path / f).exists()
        ),
        "",
    )
    bits.append(time.strftime("%-d %B %Y", time.localtime((study.path / file).stat().st_mtime)))
    return Markup(" · ").join(bits)


def headline(study: StudyResults) -> tuple[str, str]:
    """Return the sentence at the top, and the caution below it."""
    if not study.runs:
        sentence = "The run failed" if faults_of(study) else "There are no results yet"
        return sentence, f"No hospital has reported {a_score(study)}."
    if all(worst(study, method) is None for method in study.methods):
        return f"The {scores(study)} stayed in the hospitals", (
            "Every hospital's test set is too small for its metrics to be sent. They are in the hospitals' own logs."
        )
    method = study.best or study.methods[0]
    base = study.base
    bytes_, seconds = study.cost(method)
    cost = f"at a cost of {size_text(bytes_)} and {format_duration(seconds)}"
    price = Markup(re.sub(r"(\d) ", "\\1&nbsp;", cost))
    if base is None:
        mean = percent(study.mean_score(method)[0])
        how = spell(method) if exchanges(method) else "Training alone"
        add = (
            markup("<code>{}</code>", alone())
            if exchanges(method)
            else "a method that shares something"
        )
        known = [
            s
            for s in study.silos
            if any(not math.isnan(study.score(m, s).mean) for m in study.methods)
        ]
        silos = hospitals_of(len(known))
        return (
            markup(
                "{} reaches {}&#8239;% mean {} over {}, {}",
                how,
                mean,
                study.task.score_label,
                silos,
                price,
            ),
            markup(
                "What a hospital gains is not known: run {} in the same study to compare.", add
            ),
        )
    found = verdict(study, method, base)
    if not found.gains:
        return (
            markup("{} cannot be compared with {}", spell(method), baseline_name(base)),
            f"No hospital has reported {a_score(study)} for both.",
        )
    return markup("{}, {}", claim(found), price), caution(found)


def claim(found: GainVerdict) -> Markup:
    """Return the sentence on the mean gain: its value, and whether it is shown."""
    name = spell(found.method)
    over = baseline_name(found.base)
    score = found.study.task.score_label
    emphasis = "shown" if found.shown else "not-shown"
    gain = points(found.gain.mean)
    measured = markup('<em class="{}">{} points</em> of {} on average', emphasis, gain, score)
    if not found.shown:
        return markup(
            "{} against {}: {} in {}, not yet certain ({})",
            name,
            over,
            measured,
            found.tested_in,
            found.why,
        )
    word = "gains over" if found.shown > 0 else "loses against"
    return markup("{} {} {}: {} in {}", name, word, over, measured, found.tested_in)


def caution(found: GainVerdict) -> Markup:
    """Return the limits of the headline: uncertainty, seeds, missed rounds, the worst hospital, missing scores."""
    text: list[str] = [average(found), *single_gains(found), seeds_apart(found)]
    if found.without is not None:
        it = "it" if len(found.rare) == 1 else "them"
        mean = points(found.without.mean)
        ends = in_brackets(found.without)
        missed = rounds_missed(found.rare)
        text.append(
            markup(
                "{} {}: without {} the average is {} points{}.", MARK, missed, it, mean, ends
            )
        )
    if found.base != alone():  # else the answer below says it
        lowest = worst_part(found)
        text.append(markup("{}{}.", lowest[0].upper(), lowest[1:]))
    if missing := len(found.study.silos) - len(found.gains):
        are = "is" if missing == 1 else "are"
        text.append(
            f"{hospitals_of(missing)} sent no {found.study.task.score_label} and {are} not counted."
        )
    return Markup(" ").join(text)


def seeds_apart(found: GainVerdict) -> str:
    """Return a sentence on the seeds: the interval holds for these, and how far their averages lie apart."""
    seeds = found.seeds
    ran = "One seed was run" if len(seeds) == 1 else f"{len(seeds)} seeds were run"
    ran += " with both methods" if len(seeds) < len(found.study.seeds) else ""
    if len(seeds) < SEEDS_NEEDED:
        return f"{ran}: how much others would change this is not counted."
    means = [found.study.seed_mean(found.method, found.base, seed) for seed in seeds]
    return markup(
        "{}, with averages from {} to {}.", ran, points(min(means)), points(max(means))
    )


def single_gains(found: GainVerdict) -> list[str]:
    """Return a sentence on the number of silos whose own gain is clear of zero, and the number by chance alone."""
    sizes = sorted({n for silo in found.gains for n in found.study.sizes(silo, "n_test")} - {0})
    if not sizes:
        return []
    many = (
        count_noun(sizes[0], "sample")
        if len(sizes) == 1
        else f"{sizes[0]} to {sizes[-1]} samples"
    )
    clear = sum(gain.shown > 0 for gain in found.gains.values())
    tested = len(found.gains)
    text = f"Each hospital is tested on its own {many}, which leaves a single hospital's gain uncertain: "
    if clear == 0:
        return [f"{text}no gain is larger than chance alone could explain."]
    word = "the 95&#8239;% interval of one gain lies"
    if clear > 1:
        word = f"the 95&#8239;% intervals of {clear} gains lie"
    chance = f"Chance alone puts about {BY_CHANCE * tested:.2g} of {tested} there."
    return [markup("{}{} above zero. {}", text, Markup(word), chance)]


def average(found: GainVerdict) -> Markup:
    """Return a sentence on the average's interval, or on what would settle it where it is not certain."""
    text = markup("{}", found.settled_by)
    if found.shown:
        text = markup("The average is clear of zero{}.", in_brackets(found.gain))
    if (methods := found.compared) > 1:
        text += f" No validation data: the method was chosen on the test data, and an interval counts {methods} methods."
    return text


def in_brackets(gain: Gain) -> Markup:
    """Return a gain's interval in brackets; empty if unknown."""
    return markup(" (95&#8239;% interval {})", between(gain)) if gain.has_interval else Markup()


def faults(study: StudyResults) -> Markup:
    """Render the runs that did not end and the notes of the run's log; empty if there are none."""
    notes = [
        (
            n.time.replace("T", " ").replace("Z", " UTC") or "time not recorded",
            n.message,
            n.times,
        )
        for n in notes_of(study)
    ]
    return render(FAULTS, faults=faults_of(study), notes=notes)


def tiles(study: StudyResults) -> Markup:
    """Render up to four figures below the headline; empty without results."""
    if not study.runs:
        return Markup()
    tiles: list[tuple[str, str, str]] = []
    method = study.best or study.methods[0]
    base = study.base
    if base and study.best:
        found = verdict(study, method, base)
        up, level, down = study.counts(method, base)
        higher = markup("{}<small> of {}</small>", up, up + level + down)
        tiles += [
            ("Hospitals that score higher", higher, f"{level} level, {down} lower"),
            mean_gain(found),
        ]
    mean, deviation = study.mean_score(method)
    others = [
        f"{spell(m)} {percent(study.mean_score(m)[0])}" for m in study.columns if m != method
    ]
    if not math.isnan(deviation):
        others = [f"± {percent(deviation)} over seeds", *others]
    value = markup("{}<small>&#8239;%</small>", percent(mean))
    below = " · ".join(others) or "over hospitals, each counting alike"
    tiles.append((f"Mean {study.task.score_label}, {spell(method)}", value, below))
    bytes_, seconds = study.cost(method)
    size, _, unit = size_text(bytes_).partition(" ")
    took = f"sent and received, in {duration(seconds)}"
    tiles.append(("Cost of one run", markup("{}<small> {}</small>", size, unit), took))
    return render(TILES, tiles=tiles)


def mean_gain(found: GainVerdict) -> tuple[str, str, str]:
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


@dataclass(frozen=True)
class Note:
    """A line of the run's log: its first time in UTC (empty in a run of 0.1) and its number of occurrences."""

    message: str
    time: str
    times: int


def faults_of(study: StudyResults) -> list[str]:
    """Return the runs that did not end, one sentence each."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for event in study.events:
        last[event.get("strategy", ""), event.get("seed", 0)] = event
    found = []
    # The closing exchange has the number rounds + 1
    asked = int(study.config.get("rounds", 0))
    for key in study.planned:
        event = last.get(key, {})
        name = f"{spell(key[0])}, seed {key[1]}"
        rounds = min(max((r.round for r in study.history.of(*key)), default=0), asked)
        if event.get("event") == "error":
            where = f"after round {rounds}" if rounds else "before its first round ended"
            found.append(f"{name} failed {where}: {event.get('message', 'no reason given')}")
        elif key not in study.finished and rounds:
            found.append(f"{name} stopped after round {rounds} of {asked}")
        elif key not in study.finished:
            found.append(f"{name} was not run")
    return found


def notes_of(study: StudyResults) -> list[Note]:
    """Return the notes of the run's log on silos and the server, each once."""
    found: dict[str, Note] = {}
    for event in study.events:
        if event["event"] == "note":
            first = found.get(
                event["message"], Note(event["message"], str(event.get("time", "")), 0)
            )
            found[first.message] = replace(first, times=first.times + 1)
    return list(found.values())
