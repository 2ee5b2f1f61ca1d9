"""Head of the report's page: its headline, the caution, the faults, and four figures."""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from markupsafe import Markup

from server.report.html import render, sentences
from server.report.inference import SEEDS_NEEDED
from server.report.methods import exchanges, spell
from server.report.participation import rounds_missed
from server.report.study import StudyResults
from server.report.verdict import GainVerdict, verdict

BY_CHANCE = 0.025  # share of hospitals without any gain whose 95 % interval lies above zero
WHERE = """<b>{{ study.path.resolve().name }}</b>{% if study.split %} · {{ study.split|join(", ") }}{% endif %}
{% if study.silos %} · {{ study.silos|length|hospitals }}{% endif %}
{% set seeds = study.seeds %}
{% if seeds %} · {% if seeds|length == 1 %}seed {{ seeds[0] }}{% else %}{{ seeds|length|noun("seed") }}{% endif %}{% endif %} · {{ day }}"""
SENTENCE = """{% macro price() %}{% set bytes, seconds = study.cost(method) %}
{{ ("at a cost of " ~ bytes|size ~ " and " ~ seconds|long)|unbroken }}{% endmacro %}
{% if not study.runs %}{{ "The run failed" if failed else "There are no results yet" }}
{% elif silent %}The {{ "accuracies" if word == "accuracy" else word ~ " values" }} stayed in the hospitals
{% elif not base %}{{ method|spell if exchanged else "Training alone" }} reaches
{{ study.mean_score(method)[0]|percent }}&#8239;% mean {{ word }} over {{ known|hospitals }}, {{ price() }}
{% elif not found.gains %}{{ method|spell }} cannot be compared with {{ base|baseline }}
{% else %}{{ method|spell }}
{{ {1: "gains over", 0: "against", -1: "loses against"}[found.shown] }} {{ base|baseline }}:
<em class="{{ "shown" if found.shown else "not-shown" }}">{{ found.gain.mean|points }} points</em> of {{ word }} on average
in {{ found.tested_in }}{% if not found.shown %}, not yet certain ({{ found.why }}){% endif %}, {{ price() }}
{% endif %}"""
LEAD = """{% set a_score = ("a " if word[0] in "CD" else "an ") ~ word %}
{% if not study.runs %}No hospital has reported {{ a_score }}.
{% elif silent %}Every hospital's test set is too small for its metrics to be sent. They are in the hospitals' own logs.
{% elif not base %}What a hospital gains is not known: run
{% if exchanged %}<code>{{ alone() }}</code>{% else %}a method that shares something{% endif %} in the same study to compare.
{% elif not found.gains %}No hospital has reported {{ a_score }} for both.
{% else %}
{% if found.shown %}The average is clear of zero{{ brackets(found.gain) }}.{% else %}{{ found.settled_by }}{% endif %}
{% if found.compared > 1 %} No validation data: the method was chosen on the test data, and an interval counts
{{ found.compared }} methods.{% endif %}
{% set sizes, tested = study.count_tested(found.gains), found.gains|length %}
{% set clear = found.gains.values()|selectattr("shown", "gt", 0)|list|length %}
{% if sizes %} Each hospital is tested on its own
{{ sizes[0]|noun("sample") if sizes|length == 1 else "%s to %s samples"|format(sizes[0], sizes[-1]) }},
which leaves a single hospital's gain uncertain:
{% if not clear %}no gain is larger than chance alone could explain.{% else %}the 95&#8239;%
{{ "interval of one gain lies" if clear == 1 else "intervals of %s gains lie"|format(clear) }} above zero.
Chance alone puts about {{ "%.2g"|format(by_chance * tested) }} of {{ tested }} there.{% endif %}{% endif %}
{% set seeds = found.seeds|length %}
{{ " One seed was run" if seeds == 1 else " %s seeds were run"|format(seeds) }}
{%- if seeds < study.seeds|length %} with both methods{% endif %}
{%- if seeds < needed %}: how much others would change this is not counted.
{% else %}, with averages from {{ found.seed_means|min|points }} to {{ found.seed_means|max|points }}.{% endif %}
{% if found.without %} {{ mark }} {{ missed }}: without {{ "it" if found.rare|length == 1 else "them" }} the average is
{{ found.without.mean|points }} points{{ brackets(found.without) }}.{% endif %}
{% if base != alone() %} The {{ worst_hospital(found) }}.{% endif %}
{% set missing = study.silos|length - tested %}
{% if missing %} {{ missing|hospitals }} sent no {{ word }} and {{ "is" if missing == 1 else "are" }} not counted.{% endif %}
{% endif %}"""
FAULTS = """{% if faults or notes %}<div class="fault">{% for fault in faults %}<p>{{ fault }}.</p>{% endfor %}
{% if notes %}<p>From the run's log:</p>{% for note in notes %}
<p><span class="note">{{ note.time.replace("T", " ").replace("Z", " UTC") or "time not recorded" }}</span> {{ note.message }}.
{%- if note.times != 1 %} ({{ note.times }} times){% endif %}</p>{% endfor %}{% endif %}
</div>{% endif %}"""
TILES = """{% if study.runs %}{% set dot, br = joiner(" · "), joiner("<br>") %}
{% set mean, deviation = study.mean_score(method) %}{% set bytes, seconds = study.cost(method) %}
{% set number, unit = (bytes|size).split(" ") %}
<dl class="tiles"{% if not found %} style="grid-template-columns: repeat(2, 1fr)"{% endif %}>
{% if found %}{% set up, level, down = study.counts(method, study.base) %}{% set interval = found.gain|between %}
<div><dt>Hospitals that score higher</dt><dd>{{ up }}<small> of {{ up + level + down }}</small></dd><dd>{{ level }} level, {{ down }} lower</dd></div>
<div><dt>{{ {1: "Mean gain", 0: "Mean gain, not yet certain", -1: "Mean loss"}[found.shown] }}</dt><dd>{{ found.gain.mean|points }}<small> points</small></dd><dd>{% if interval %}{{ br()|safe }}95&#8239;% interval {{ interval }}{% endif %}
{%- if not found.shown and found.why != interval %}{{ br()|safe }}{{ found.why }}{% endif %}
{%- if found.without %}{{ br()|safe }}without {{ mark }} {{ found.without.mean|points }}{% endif %}</dd></div>{% endif %}
<div><dt>Mean {{ study.task.score_label }}, {{ method|spell }}</dt><dd>{{ mean|percent }}<small>&#8239;%</small></dd><dd>{% if deviation is known %}{{ dot() }}± {{ deviation|percent }} over seeds{% endif %}
{%- for other in study.columns if other != method %}
{{ dot() }}{{ other|spell }} {{ study.mean_score(other)[0]|percent }}
{%- else %}{% if deviation is not known %}over hospitals, each counting alike{% endif %}{% endfor %}</dd></div>
<div><dt>Cost of one run</dt><dd>{{ number }}<small> {{ unit }}</small></dd><dd>sent and received, in {{ seconds|duration }}</dd></div></dl>{% endif %}"""


def where(study: StudyResults) -> Markup:
    """Return the line above the headline: run, data, silos, seeds, date."""
    files = (study.path / name for name in ("summary.json", "history.csv", "config.toml"))
    written = next(file for file in files if file.exists()).stat().st_mtime
    return sentences(
        WHERE, study=study, day=time.strftime("%-d %B %Y", time.localtime(written))
    )


def headline(study: StudyResults) -> tuple[Markup, Markup]:
    """Return the sentence at the top, and the caution below it: the limits of what it says."""
    scored = [
        silo
        for silo in study.silos
        if any(not math.isnan(study.score(method, silo).mean) for method in study.methods)
    ]
    found = compare_headline(study)
    values = {
        "study": study,
        "word": study.task.score_label,
        "method": study.headed,
        "base": study.base,
        "found": found,
        "failed": bool(faults_of(study)),
        "silent": not scored,
        "known": len(scored),
        "exchanged": exchanges(study.headed),
        "by_chance": BY_CHANCE,
        "needed": SEEDS_NEEDED,
        "missed": rounds_missed(found.rare) if found else "",
    }
    return sentences(SENTENCE, **values), sentences(LEAD, **values)


def compare_headline(study: StudyResults) -> GainVerdict | None:
    """Return the verdict on the headline's method; None if there is no baseline to compare it with."""
    return verdict(study, study.headed, study.base) if study.base else None


def faults(study: StudyResults) -> Markup:
    """Render the runs that did not end and the notes of the run's log; empty if there are none."""
    return render(FAULTS, faults=faults_of(study), notes=notes_of(study))


def tiles(study: StudyResults) -> Markup:
    """Render up to four figures below the headline; empty without results."""
    return render(TILES, study=study, method=study.headed, found=compare_headline(study))


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


def notes_of(study: StudyResults) -> list[dict[str, Any]]:
    """Return the notes of the run's log on silos and the server, each once.

    ``time``: its first time in UTC, empty in a run of 0.1; ``times``: how often it was noted.
    """
    notes = [event for event in study.events if event["event"] == "note"]
    first = {note["message"]: str(note.get("time", "")) for note in reversed(notes)}
    return [
        {"message": message, "time": first[message], "times": times}
        for message, times in Counter(note["message"] for note in notes).items()
    ]
