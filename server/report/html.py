"""The report's values as text and markup: templates, numbers, durations, sizes, lines of a heading."""

# ruff: noqa: E501  (template)

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Literal

import numpy as np
from jinja2 import DictLoader, Environment, StrictUndefined, Template
from markupsafe import Markup

from server.report.inference import EXACT, Gain
from server.report.methods import alone, baseline_name, spell
from server.report.participation import MARK, worst
from server.report.study import StudyResults

MACROS = """
{% macro table(head, kind="") %}
{% if head|length - (2 if kind == "silos" else 0) > 5 or kind in ("wordy", "reasons") %}<p class="swipe note" aria-hidden="true">more columns →</p>{% endif %}
<div class="scroll" tabindex="0"><table class="{{ kind }}"><thead><tr><th>{{ head[0] }}</th>{% for name in head[1:] %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>{{ caller() }}</table></div>
{% endmacro %}
{% macro cells(values) %}{% for value in values %}<td>{{ value }}</td>{% endfor %}{% endmacro %}
{% macro widths(pair) %}<div class="wide">{{ pair[0] }}</div><div class="narrow">{{ pair[1] }}</div>{% endmacro %}
{% macro explained() %}<details class="note"><summary>What is this?</summary>{{ caller() }}</details>{% endmacro %}
{% macro rare(text) %}{% if text %}<p class="note">{{ mark }} {{ text }}. Scores are those of the last round that a hospital took part in.</p>{% endif %}{% endmacro %}
{% macro spread(pair, form="percent", digits=1) %}{{ pair[0]|percent if form == "percent" else pair[0]|number(digits) }}{% if pair[1] is known %}<small>±&#8202;{{ pair[1]|percent if form == "percent" else pair[1]|number(digits) }}</small>{% endif %}{% endmacro %}
{% macro gain_cell(gain) %}<td class="{{ ["", "up", "down"][gain.shown] }}">{{ gain.mean|points }}{% set interval = gain|between(0) %}{% if interval %}<small>{{ interval }}</small>{% endif %}</td>{% endmacro %}
{% macro brackets(gain) %}{% if gain.has_interval %} (95&#8239;% interval {{ gain|between }}){% endif %}{% endmacro %}
{% macro reached(found, silo) %}{% set own, tested = found.study.score(found.base, silo).mean, found.study.count_tested([silo]) %}
{{ silo }}, reaches {{ found.study.score(found.method, silo).mean|percent }}&#8239;%{% if own is known %} ({{ own|percent }}&#8239;% {{ "alone" if found.base == alone() else "with " ~ found.base|spell }}){% endif %}
{% if tested %} of {{ tested[0]|noun("test sample") }}{% endif %}{% endmacro %}
{% macro worst_hospital(found) %}{% set first = worst(found.study, found.method) %}
worst hospital, {{ reached(found, first) }}{% if first in found.rare %}{% set second = worst(found.study, found.method, found.rare) %}{% if second %}; without {{ mark }} {{ reached(found, second) }}{% endif %}{% endif %}{% endmacro %}
"""
IMPORT = """{% from "macros" import table, cells, widths, explained, rare, spread, gain_cell, brackets, reached, worst_hospital with context %}
"""


@cache
def environment() -> Environment:
    """Return the templates' environment: values are escaped, and a missing value is an error."""
    loader = DictLoader({"macros": MACROS})
    found = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "percent": percent,
        "points": points,
        "number": number,
        "noun": count_noun,
        "hospitals": hospitals_of,
        "spell": spell,
        "size": size_text,
        "duration": duration,
        "long": format_duration,
        "between": between,
        "capital": capital,
        "whole": round,
        "quote": shlex.quote,
        "baseline": baseline_name,
        "unbroken": lambda text: Markup(re.sub(r"(\d) ", r"\1&nbsp;", text)),
    }
    found.tests["known"] = lambda value: not math.isnan(value)
    found.globals |= {
        "alone": alone,
        "baseline_name": baseline_name,
        "mark": MARK,
        "worst": worst,
    }
    return found


@cache
def compile_template(template: str) -> Template:
    return environment().from_string(IMPORT + template)


def render(template: str, **values: object) -> Markup:
    """Return a template rendered with these values; every value is escaped unless it is already markup."""
    return Markup(compile_template(template).render(**values))


def text_lines(template: str, **values: object) -> list[str]:
    """Return the lines of a template of plain text, in which nothing is escaped."""
    plain = environment().overlay(autoescape=False)
    return plain.from_string(template).render(**values).splitlines()


def sentences(template: str, **values: object) -> Markup:
    """Return a template's text with one space for each sequence of spaces and line ends."""
    return Markup(re.sub(r"[ \n]+", " ", render(template, **values)).strip())


def percent(value: float, digits: int = 1) -> str:
    """Return a share in per cent; ``–`` if unknown."""
    return "–" if math.isnan(value) else f"{100 * value:.{digits}f}"


def points(value: float, digits: int = 1) -> str:
    """Return a difference of scores in percentage points with its sign: a tiny loss is ``−0.0``, no loss ``0.0``.

    ``–`` if unknown.
    """
    if math.isnan(value):
        return "–"
    return (
        f"{0:.{digits}f}"
        if abs(value) < EXACT
        else f"{100 * value:+.{digits}f}".replace("-", "−")
    )


def number(value: float, digits: int) -> str:
    """Return a number with this many digits; ``–`` if unknown."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def format_number(value: float, digits: int = 4, *, zeros: bool = True) -> str:
    """Return a number with so many digits that count, without an exponent; ``zeros``: also those at its end."""
    trim: Literal["k", "-"] = "k" if zeros else "-"
    text = np.format_float_positional(
        value, precision=digits, unique=False, fractional=False, trim=trim
    )
    return text.removesuffix(".").replace("-", "−")


def duration(seconds: float) -> str:
    """Return a duration: ``9.5 s``, ``2.5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_duration(seconds: float) -> str:
    """Return a duration for a sentence: ``2.5 minutes``."""
    if seconds < 0.5:
        return "less than a second"
    if seconds < 60:
        return count_noun(round(seconds), "second")
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def size_text(value: float) -> str:
    """Return a size with its unit: ``613 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return (
                f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
            )
        value /= 1000
    return f"{value:.1f} TB"


def typical(values: Mapping[int, float]) -> float:
    """Return the median of a value per round; 0 for none."""
    return float(np.median(list(values.values()))) if values else 0.0


def count_noun(n: int, noun: str) -> str:
    """Return a number with its noun: ``1 hospital``, ``12 hospitals``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def hospitals_of(n: int) -> str:
    return count_noun(n, "hospital")


def between(gain: Gain, digits: int = 1) -> str:
    """Return the ends of a gain's interval; empty if unknown."""
    return (
        " to ".join(points(end, digits) for end in gain.interval) if gain.has_interval else ""
    )


def capital(study: StudyResults) -> str:
    """Return the score's name with a capital."""
    return study.task.score_label[0].upper() + study.task.score_label[1:]
