"""The report's values as text and markup: templates, numbers, durations, sizes, lines of a heading."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Literal

import numpy as np
from jinja2 import Environment
from jinja2.runtime import Macro
from markupsafe import Markup

from server.rendering import environment
from server.report.inference import EXACT, Gain
from server.report.methods import alone, baseline_name, spell
from server.report.participation import MARK, part_of_results, worst
from server.report.study import StudyResults


@cache
def report_environment() -> Environment:
    """Return the templates' environment with the report's filters and names."""
    templates = environment()
    templates.filters |= {
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
    templates.tests["known"] = lambda value: not math.isnan(value)
    templates.globals |= {
        "alone": alone,
        "baseline_name": baseline_name,
        "mark": MARK,
        "part_of_results": part_of_results,
        "worst": worst,
    }
    return templates


def render(name: str, /, **values: object) -> Markup:
    """Return the template ``report/NAME.html`` with these values; each is escaped unless it is already markup."""
    return Markup(report_environment().get_template(f"report/{name}.html").render(**values))


def text_lines(name: str, /, **values: object) -> list[str]:
    """Return the lines of the plain text ``report/NAME.txt``."""
    text = report_environment().get_template(f"report/{name}.txt").render(**values)
    return text.splitlines()


def sentences(name: str, /, **values: object) -> Markup:
    """Return a template's text with one space for each sequence of spaces and line ends."""
    return one_line(render(name, **values))


def macro_texts(name: str, /, **values: object) -> dict[str, Markup]:
    """Return the text of each macro in ``report/NAME.html``, as :func:`sentences`, by the macro's name."""
    module = report_environment().get_template(f"report/{name}.html").make_module(values)
    macros = {key: macro for key, macro in vars(module).items() if isinstance(macro, Macro)}
    return {key: one_line(macro()) for key, macro in macros.items()}


def one_line(text: str) -> Markup:
    """Return a markup with one space for each sequence of spaces and line ends."""
    return Markup(re.sub(r"[ \n]+", " ", text).strip())


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
