"""Canvas for charts: matplotlib figures as ``<svg>`` elements of the page, with colours, axes and line labels.

The page's CSS defines the colours, so that a chart follows the browser's light or dark setting.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from server.report.html import render
from server.report.methods import baselines
from server.report.study import StudyResults

# Okabe and Ito's colour-blind safe palette; the page's CSS has a lighter set for dark mode.
VARIABLES = {
    "#111111": "ink",
    "#666666": "muted",
    "#dddddd": "grid",
    "#fefefe": "card",
    "#0072b2": "blue",
    "#e69f00": "orange",
    "#009e73": "green",
    "#d55e00": "vermillion",
    "#cc79a7": "purple",
    "#56b4e9": "sky",
}
# Text beside the right end of the axes, at a height in data units; gains end in one line.
AT_RIGHT: dict[str, Any] = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "va": "center",
}
AT_RIGHT |= {"annotation_clip": False}
GAIN_AT = {**AT_RIGHT, "ha": "right"}
LOWEST = -1.0  # lower end of the axes, because a score (R2) may be far below 0
INK, MUTED, GRID, CARD, BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = VARIABLES
OTHERS = [(GREEN, "^"), (PURPLE, "v"), (VERMILLION, "P"), (SKY, "X"), (INK, "*")]
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]

SETTINGS: Any = {
    "font.size": 12.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.labelsize": 11.0,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.major.pad": 6.0,
    "ytick.major.pad": 6.0,
    "axes.axisbelow": True,
    "path.simplify_threshold": 0.2,
    "legend.frameon": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "lines.solid_capstyle": "round",
    "axes.labelpad": 6.0,
    "text.parse_math": False,
    "text.usetex": False,
}


@dataclass(frozen=True)
class Style:
    """Colour, marker and line style of one method in all charts."""

    colour: str
    marker: str
    dash: Any = "-"
    filled: bool = True

    @property
    def mark(self) -> dict[str, Any]:
        """The look of a marker."""
        face = self.colour if self.filled else CARD
        return {"color": self.colour, "markerfacecolor": face, "markeredgewidth": 1.4}


def styles(study: StudyResults) -> dict[str, Style]:
    """Return the methods' styles: blue for the headline's, grey and orange for the baselines, then the palette."""
    plain = (Style(MUTED, "o", filled=False), Style(ORANGE, "s"))
    chosen = dict(zip(baselines(), plain, strict=False))
    if study.best:
        chosen[study.best] = Style(BLUE, "D")
    rest = [m for m in study.methods if m not in chosen]
    looks = itertools.cycle([(c, m, d) for d in DASHES for c, m in OTHERS])
    return chosen | {m: Style(*look) for m, look in zip(rest, looks, strict=False)}


class Canvas:
    """Figure of ``width`` x ``height`` pixels with one axes inside the margins (left, right, top, bottom)."""

    def __init__(
        self, width: float, height: float, margins: tuple[float, float, float, float]
    ) -> None:
        left, right, top, bottom = margins
        self.width, self.height = width, height
        self.inner = width - left - right, height - top - bottom
        self.figure = Figure(figsize=(width / 72, height / 72))
        FigureCanvasSVG(self.figure)
        self.axes: Any = self.figure.add_axes(
            (left / width, bottom / height, self.inner[0] / width, self.inner[1] / height)
        )
        # Of lines: the last y, in data units, and its label, with the style of a marker or None
        self.ends: list[tuple[float, str, Style | None]] = []

    def line(self, x: Sequence[float], y: Sequence[float], style: Style, name: str) -> None:
        """Draw one method's line with about eight of its markers; ``name`` stands at its right end."""
        every = max(1, round(len(x) / 8))
        look = {**style.mark, "linestyle": style.dash, "linewidth": 2.0, "markersize": 6}
        self.axes.plot(x, y, marker=style.marker, markevery=every, **look)
        self.ends.append((y[-1], name, style))

    def finish_lines(self, x: str, *, rounds: bool = True, percent: bool = True) -> None:
        """Finish a chart of lines: its axes, the label of ``x``, and the labels at the lines' right ends."""
        axes = self.axes
        axes.margins(x=0.02)
        axes.grid(axis="y")
        if rounds:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if percent:
            percent_axis(axes.yaxis)
        axes.set_xlabel(x)
        axes.tick_params(axis="y", labelcolor=MUTED)
        low, high = axes.get_ylim()
        pixel = (high - low) / self.inner[1]
        places = apart([y for y, _, _ in self.ends], 16 * pixel, low, high)
        for (y, text, look), at in zip(self.ends, places, strict=True):
            if look is not None:
                place = {"transform": axes.get_yaxis_transform(), "clip_on": False}
                mark = {**look.mark, **place, "markersize": 6}
                axes.plot([1 + 8 / self.inner[0]], [at], look.marker, **mark)
            axes.annotate(text, (1, y), (16 if look else 8, (at - y) / pixel), **AT_RIGHT)

    def make_rows(self, names: Sequence[str], x: str) -> None:
        """Give each name a row, the first on top, and the other axis per cent and the label ``x``."""
        self.axes.set_ylim(len(names) - 0.5, -0.5)
        self.axes.set_yticks(range(len(names)), names)
        self.axes.grid(axis="x")
        percent_axis(self.axes.xaxis)
        self.axes.set_xlabel(x)
        self.axes.spines["left"].set_visible(False)

    def svg(self, key: str, label: str) -> str:
        """Return the figure as an ``<svg>`` element. ``key``: prefix of its ids; ``label``: text for screen readers."""
        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):
            self.figure.savefig(
                buffer,
                format="svg",
                transparent=True,
                metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
            )
        return inline(buffer.getvalue(), key, label, self.width, self.height)


def chart(draw: Callable[..., str]) -> Callable[..., Markup]:
    """Decorate a function that draws a chart: one that fails is a line of text, and the page goes on."""

    @functools.wraps(draw)
    def draw_marked(*arguments: Any, **options: Any) -> Markup:
        try:
            return Markup(draw(*arguments, **options))
        except Exception as error:
            return log_undrawn(draw.__name__, error)

    return draw_marked


def in_widths(draw: Callable[..., Markup], *arguments: Any, wide: float = 820) -> list[Markup]:
    """Return a chart for a desk and for a phone; the page's CSS shows one of them."""
    return [svg for width in (wide, 350) if (svg := draw(*arguments, width))]


def log_undrawn(name: str, error: Exception) -> Markup:
    """Log why a chart could not be drawn; return the text in its place."""
    logging.getLogger("silofl").error(
        "the report's chart %s could not be drawn", name, exc_info=error
    )
    return render("undrawn")


def inline(text: str, key: str, label: str, width: float, height: float) -> str:
    """Return matplotlib's document as an element of the page: no prologue, unique ids, the page's colours."""
    body = text[text.index("<svg") :]
    body = body[body.index(">") + 1 : body.rindex("</svg>")]
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', body))
    body = re.sub(
        r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", body
    )
    body = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{key}-", body).replace(
        "xlink:href", "href"
    )
    body = re.sub(r"font: (?:\w+ )*([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    body = re.sub("|".join(VARIABLES), lambda m: f"var(--{VARIABLES[m[0]]})", body)
    body = re.sub(r"\n\s*", "\n", body)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width: {width * 1.3:g}px" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


def percent_axis(axis: Any) -> None:
    """Format an axis in per cent, with as few digits as possible."""
    axis.set_major_formatter(
        lambda value, _: f"{round(100 * value, 6) + 0.0:g}".replace("-", "−")
    )


def short_names(names: Sequence[str], length: int = 18) -> tuple[list[str], str]:
    """Return names for an axis, cut off and without their common prefix up to a hyphen, and the prefix.

    ``(["01", "02"], "hospital-")`` for ``hospital-01`` and ``hospital-02``.
    """
    prefixes = {"".join(name.rpartition("-")[:2]) for name in names}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return [clip_name(name.removeprefix(prefix), length) for name in names], prefix


def clip_name(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def thin_names(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    step = math.ceil(len(names) / most)
    return list(range(0, len(names), step)), list(names[::step])


def apart(positions: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Return positions moved so that neighbours are ``least`` apart, within low..high if they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = list(positions)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + least)
    if order and moved[order[-1]] > high:
        moved[order[-1]] = high
        for after, before in itertools.pairwise(reversed(order)):
            moved[before] = max(min(moved[before], moved[after] - least), low)
    return moved


def room_for(names: Iterable[str]) -> float:
    """Return the width of the longest name."""
    return 7.2 * max(map(len, names), default=0)
