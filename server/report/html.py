"""Formatting of the report's values as text and markup: numbers, durations, sizes, lines of a heading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from markupsafe import Markup

from server.report.scores import EXACT, Gain
from server.report.study import Study


def markup(text: str, *values: object) -> Markup:
    """Return HTML with the values in place of ``{}``; values are escaped unless they are markup."""
    return Markup(text).format(*values)


def lines(text: str) -> Markup:
    """Return a heading, with a line break for each ``|``."""
    return Markup("<br>").join(text.split("|"))


def percent(value: float, digits: int = 1) -> str:
    """Return a share in per cent; ``–`` if unknown."""
    return "–" if math.isnan(value) else f"{100 * value:.{digits}f}"


def points(value: float, digits: int = 1) -> str:
    """Return a difference of scores in percentage points with its sign: a tiny loss is ``−0.0``, no loss ``0.0``.

    ``–`` if unknown.
    """
    if math.isnan(value):
        return "–"
    return f"{0:.{digits}f}" if abs(value) < EXACT else f"{100 * value:+.{digits}f}".replace("-", "−")


def number(value: float, digits: int) -> str:
    """Return a number with this many digits; ``–`` if unknown."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def plain(value: float, digits: int = 4, *, zeros: bool = True) -> str:
    """Return a number with so many digits that count, without an exponent; ``zeros``: also those at its end."""
    trim: Literal["k", "-"] = "k" if zeros else "-"
    text = np.format_float_positional(value, precision=digits, unique=False, fractional=False, trim=trim)
    return text.removesuffix(".").replace("-", "−")


def duration(seconds: float) -> str:
    """Return a duration: ``9.5 s``, ``2.5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def spoken(seconds: float) -> str:
    """Return a duration for a sentence: ``2.5 minutes``."""
    if seconds < 0.5:
        return "less than a second"
    if seconds < 60:
        return counted(round(seconds), "second")
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def size_text(value: float) -> str:
    """Return a size with its unit: ``613 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def typical(values: Mapping[int, float]) -> float:
    """Return the median of a value per round; 0 for none."""
    return float(np.median(list(values.values()))) if values else 0.0


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: ``1 hospital``, ``12 hospitals``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def hospitals_of(n: int) -> str:
    return counted(n, "hospital")


def between(gain: Gain, digits: int = 1) -> str:
    """Return the ends of a gain's interval; empty if unknown."""
    if math.isnan(gain.interval[0]):
        return ""
    low, high = (points(v, digits) for v in gain.interval)
    return f"{low} to {high}"


def with_spread(mean: float, deviation: float, show: str) -> Markup:
    """Return a mean with the standard deviation over seeds below it. ``show``: "%" or a number of digits."""
    mean_text, deviation_text = (percent(v) if show == "%" else number(v, int(show)) for v in (mean, deviation))
    below = Markup() if math.isnan(deviation) else markup("<small>±&#8202;{}</small>", deviation_text)
    return markup("{}", mean_text) + below


def mean_of(study: Study) -> str:
    """Return the key of a run's mean score."""
    return f"{study.task.score}_mean"


def capital(study: Study) -> str:
    """Return the score's name with a capital."""
    return study.task.score_label[0].upper() + study.task.score_label[1:]


def a_score(study: Study) -> str:
    """Return the score's name with its article."""
    return f"{'a' if study.task.score_label.startswith(('C', 'D')) else 'an'} {study.task.score_label}"


def scores(study: Study) -> str:
    """Return the score's name in the plural."""
    return "accuracies" if study.task.score_label == "accuracy" else f"{study.task.score_label} values"
