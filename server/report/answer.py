"""The answer to "Should we federate?" in one sentence, with the conditions that it depends on.

The mean gain is decided once, by :func:`server.report.verdict.verdict`, as in the headline. Unseen hospitals and
calibration are compared in the same way (:func:`server.report.inference.over_hospitals`). A hospital is harmed if its
own gain's interval lies below zero, widened for the number of hospitals (Bonferroni). Without the correction, one in
four reports on twelve hospitals without any gain would name one.
"""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from server.report.html import number, percent, sentences
from server.report.inference import HOSPITALS_NEEDED, finite_or_nan, over_hospitals
from server.report.methods import alone
from server.report.participation import worst
from server.report.sections.evidence import measurements_of, over_silos
from server.report.sections.unseen import held_out
from server.report.study import StudyResults
from server.report.verdict import GainVerdict, verdict

MOST_NAMES = 4  # maximum number of harmed hospitals in the sentence
SENTENCE = """{% macro gain() %}{{ found.gain.mean|points }} points of {{ study.task.score_label }} on average
over training alone{{ brackets(found.gain) }} in {{ found.tested_in }}{% endmacro %}
{% macro losers() %}{% set comma, lose = joiner(", "), found.harmed.items()|list %}
{%- for silo, own in lose[:most] %}{{ comma() }}{{ silo }} ({{ own.mean|points }}){% endfor %}
{%- if lose|length > most %}, {{ (lose|length - most)|noun("other") }}{% endif %}
{{ " is" if lose|length == 1 else " are" }} shown to lose{% endmacro %}
{% macro too_few(count, what="") %}
{%- if count < needed %}, {{ count|hospitals }}{{ what }}, at least {{ needed }} needed{% endif %}{% endmacro %}
{% set name, shown = found.method|spell, found.shown %}
{% set why = "" if found.why == found.gain|between else ", " ~ found.why %}
{% if shown > 0 and found.harmed %}Yes on average, and not for everybody: {{ losers() }}, while {{ name }} gains {{ gain() }}
{%- elif shown > 0 %}Yes: {{ name }} gains {{ gain() }}, and no hospital is shown to lose
{%- elif shown < 0 %}No: {{ name }} has {{ gain() }}{% if found.harmed %}, and {{ losers() }}{% endif %}
{%- elif found.harmed %}No gain is certain, and harm is shown: {{ losers() }}; {{ name }} has {{ gain() }}{{ why }}
{%- else %}Not yet certain: {{ name }} has {{ gain() }}{{ why }}{% endif %}; the {{ worst_hospital(found) }};
an unseen hospital: {% if unseen %}{% set mine, other, shown, count = unseen %}
{{ ["no difference", "a gain", "a loss"][shown] }} is shown ({{ mine }}&#8239;% as it comes, {{ other }}&#8239;% alone
{%- if count < held %}, in {{ count }} of {{ held|hospitals }} held out{% else %}{{ too_few(count, " held out") }}{% endif %})
{%- elif held %}not shown, {{ held|hospitals }} held out, none with both scores
{%- else %}not shown, none was held out{% endif %};
calibration: {% if calibration %}{% set mine, other, shown, count = calibration %}
{{ ["no difference is shown", "worse", "better"][shown] }}
({{ what }} {{ mine }}, {{ other }} alone{{ too_few(count) }})
{%- elif several %}not shown, each measurement has its own (evidence per hospital)
{%- else %}not shown, it was not measured{% endif %};
{% set bytes, seconds = study.cost(found.method) %}cost: {{ bytes|size }} and {{ seconds|long }},
{% if not study.config.get("dp") %}without differential privacy
{%- elif epsilon is not known %}with differential privacy, whose epsilon not every hospital has sent
{%- else %}with epsilon at most {{ "%.3g"|format(epsilon) }}{% if unfinished %} so far{% endif %}
{%- if runs > 1 %} in one run, as the hospitals' last replies say; runs on the same data add up{% endif %}{% endif %}."""
CONDITION = """{% set scored, count = found.gains|length, study.silos|length %}
Drawn from {% if scored < count %}{{ scored }} of {% endif %}{{ count|hospitals }}, each tested on its own samples;
{% if study.split %}{{ study.split|join(", split by ") }}{% else %}the hospitals' own data{% endif %};
{{ "%s to %s rounds"|format(ran|min, ran|max) if ran|length > 1 else ran[0]|noun("round") }}
{%- if study.joined %}; {{ study.joined|join(", ") }} joined late{% endif %}
{%- if study.unsearched %}; tuned on the split of other seeds, whose test samples these may be{% endif %};
{{ found.seeds|length|noun("seed") }}{% if chosen > 1 %}; the method was chosen among {{ chosen }} on
{{ "validation" if study.chosen_on == "val" else "the same test" }} data{% endif %}."""


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
        why = f"Not shown: training alone (<code>{base}</code>) was not run beside it."
        return Answer(Markup(why), "")
    found = verdict(study, best, base)
    if not found.gains:
        why = "Not shown: no hospital has sent a score of both."
        return Answer(Markup(why), condition(found))
    held = held_out(study)
    key, what = calibration_of(study)
    mine, other = (over_silos(study, method, key) for method in (best, base))
    sentence = sentences(
        SENTENCE,
        study=study,
        found=found,
        most=MOST_NAMES,
        needed=HOSPITALS_NEEDED,
        held=len(held),
        unseen=beside(
            [(of[best]["zero_shot"], of[best]["local"]) for of in held.values() if best in of],
            study.count_compared(best, base),
            percent,
        ),
        what=what,
        calibration=beside(
            [(abs(mine[s]), abs(other[s])) for s in sorted(mine.keys() & other.keys())],
            found.compared,
            lambda value: number(value, 3),
        ),
        several=bool(measurements_of(study)[0]),
        epsilon=largest_epsilon(study, best),
        unfinished=any((best, run["seed"]) not in study.finished for run in study.of(best)),
        runs=len(study.runs) - len(study.of(base)),  # training alone sends nothing
    )
    return Answer(sentence, condition(found))


def beside(
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


def condition(found: GainVerdict) -> str:
    """Return the conditions of the answer: silos, seeds and rounds of the two compared methods."""
    study = found.study
    return sentences(
        CONDITION,
        study=study,
        found=found,
        ran=sorted({r["rounds"] for m in (found.method, found.base) for r in study.of(m)}),
        chosen=sum(method != alone() for method in study.methods),
    )
