"""The report's charts: matplotlib figures as inline SVG that takes its colours and type from the page.

One unit is one CSS pixel. Colours are drawn as fixed codes and replaced by the page's variables, so that a chart
follows light and dark. Nothing is told by colour alone: methods differ in marker and line style and are named where
they end, values are written beside their marks.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from server.report.study import EXACT, Study, alone, baselines, reports, spelled
from strategies.base.relationships import Relationships

# Okabe and Ito's colour-blind safe palette; the page has a lighter set for dark.
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
LOWEST = -1.0  # a score may be far below 0 (R2); the axes end here
INK, MUTED, GRID, CARD, BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = VARIABLES
OTHERS = [(GREEN, "^"), (PURPLE, "v"), (VERMILLION, "P"), (SKY, "X"), (INK, "*")]
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]

SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.size": 12.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 12.0,
    "axes.labelsize": 12.0,
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 12.0,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.major.pad": 6.0,
    "ytick.major.pad": 6.0,
    "axes.axisbelow": True,
    "path.simplify_threshold": 0.2,
    "legend.frameon": False,
    "legend.fontsize": 12.0,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "lines.solid_capstyle": "round",
    "axes.labelpad": 6.0,
    "text.parse_math": False,
    "text.usetex": False,
}


@dataclass(frozen=True)
class Style:
    """How one method is drawn everywhere."""

    colour: str
    marker: str
    dash: Any = "-"
    filled: bool = True

    @property
    def face(self) -> str:
        return self.colour if self.filled else CARD


def styles(study: Study) -> dict[str, Style]:
    """The headline's method is blue; the baselines grey and orange; then the palette, then other line styles."""
    plain = (Style(MUTED, "o", filled=False), Style(ORANGE, "s"))
    chosen = dict(zip(baselines(), plain, strict=False))
    if study.best:
        chosen[study.best] = Style(BLUE, "D")
    rest = [m for m in study.methods if m not in chosen]
    looks = itertools.cycle([(c, m, d) for d in DASHES for c, m in OTHERS])
    return chosen | {m: Style(*look) for m, look in zip(rest, looks, strict=False)}


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


class Canvas:
    """A figure of ``width`` x ``height`` pixels with one axes inside the margins (left, right, top, bottom)."""

    def __init__(self, width: float, height: float, margins: tuple[float, float, float, float]) -> None:
        left, right, top, bottom = margins
        self.width, self.height = width, height
        self.inner = width - left - right, height - top - bottom
        self.figure = Figure(figsize=(width / 72, height / 72))
        FigureCanvasSVG(self.figure)
        self.axes: Any = self.figure.add_axes(
            (left / width, bottom / height, self.inner[0] / width, self.inner[1] / height)
        )

    def svg(self, key: str, label: str) -> str:
        """The figure as an ``<svg>`` element; ``key`` keeps its ids apart from others', ``label`` is read aloud."""
        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):
            self.figure.savefig(
                buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
            )
        return inline(buffer.getvalue(), key, label, self.width, self.height)


def inline(text: str, key: str, label: str, width: float, height: float) -> str:
    """matplotlib's document as an element of the page: no prologue, ids of its own, the page's colours."""
    body = text[text.index("<svg") :]
    body = body[body.index(">") + 1 : body.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{key}-", body).replace("xlink:href", "href")
    body = re.sub(r"font: (?:\w+ )*([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    body = re.sub("|".join(VARIABLES), lambda m: f"var(--{VARIABLES[m[0]]})", body)
    body = re.sub(r"\n\s*", "\n", body)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width: {width * 1.3:g}px" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


def drawn(width: float, height: float, margins: tuple[float, float, float, float]) -> Canvas:
    return Canvas(width, height, margins)


def percent_axis(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Names without what they all begin with up to a hyphen, and that beginning: ``(["01", "02"], "hospital-")``."""
    prefixes = {name.rpartition("-")[0] + "-" for name in names if "-" in name}
    if len(prefixes) == 1 and all("-" in name for name in names):
        prefix = prefixes.pop()
        return [name.removeprefix(prefix) for name in names], prefix
    return list(names), ""


def clipped(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def apart(positions: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Positions moved as little as it takes for neighbours to be ``least`` apart, within low..high where they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = list(positions)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + least)
    if order and moved[order[-1]] > high:
        moved[order[-1]] = high
        for after, before in itertools.pairwise(reversed(order)):
            moved[before] = max(min(moved[before], moved[after] - least), low)
    return moved


def end_labels(canvas: Canvas, entries: Sequence[tuple[float, str, Style | None]]) -> None:
    """Name the lines where they end, each behind its marker: (y in data units, text, how the line looks)."""
    axes = canvas.axes
    low, high = axes.get_ylim()
    pixel = (high - low) / canvas.inner[1]
    for (y, text, look), at in zip(entries, apart([e[0] for e in entries], 16 * pixel, low, high), strict=True):
        right = 8.0
        if look is not None:
            x = 1 + right / canvas.inner[0]
            axes.plot(
                [x],
                [at],
                look.marker,
                color=look.colour,
                markerfacecolor=look.face,
                markersize=6,
                markeredgewidth=1.4,
                transform=axes.get_yaxis_transform(),
                clip_on=False,
            )
            right = 16.0
        axes.annotate(
            text,
            (1, y),
            (right, (at - y) / pixel),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Charts


def gains(study: Study, width: float) -> str:
    """Per silo the score of the baselines and the personalised method, joined, with its interval and the gain.

    Silos that have withheld everything are left out; at least one must be left.
    """
    look, methods, best = styles(study), study.columns, study.best or study.methods[0]
    base = study.base
    order = [s for s in study.silos if any(not math.isnan(study.score(m, s).mean) for m in methods)]
    gain = {s: study.gain(best, base, s) for s in order} if base else {}
    if base:
        order.sort(key=lambda s: -gain[s].mean if not math.isnan(gain[s].mean) else 9)
    narrow = width < 500
    left = 8 + 7.2 * min(max(map(len, order)), 18)
    height = 24 * len(order) + 96
    c = drawn(width, height, (left, 52 if base else 14, 40, 40))
    a = c.axes
    lows = []
    for row, silo in enumerate(order):
        cells = {m: study.score(m, silo) for m in methods}
        low, high = cells[best].interval
        if not math.isnan(low):
            a.plot([low, high], [row, row], color=look[best].colour, alpha=0.25, linewidth=6, zorder=1)
            lows.append(low)
        if base and not math.isnan(gain[silo].mean):
            a.plot([cells[base].mean, cells[best].mean], [row, row], color=INK, linewidth=1.4, zorder=2)
        for method, cell in cells.items():
            if math.isnan(cell.mean):
                continue
            lows.append(cell.mean)
            style, front = look[method], method == best
            a.plot(
                cell.mean,
                row,
                style.marker,
                color=style.colour,
                markerfacecolor=style.face,
                markersize=8.5 if front else 7,
                markeredgewidth=1.6,
                zorder=4 if front else 3,
            )
        if base:
            g = gain[silo]
            text = "–" if math.isnan(g.mean) else signed(g.mean)
            a.annotate(
                text,
                (1, row),
                (46, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center",
                annotation_clip=False,
                weight="bold" if g.sign > 0 else "normal",
                color=MUTED if g.sign == 0 else INK,
            )
    if base:
        a.annotate(
            "gain",
            (1, 1),
            (46, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=MUTED,
            fontsize=11,
        )
    floor = math.floor(10 * min(lows, default=0.0)) / 10
    a.set(xlim=(max(floor - 0.02, LOWEST if floor < 0 else -0.02), 1.02), ylim=(len(order) - 0.5, -0.5))
    a.set_yticks(range(len(order)), [clipped(s, 18) for s in order])
    a.grid(axis="x")
    percent_axis(a.xaxis)
    a.set_xlabel(f"test {study.task.word}, %")
    a.spines["left"].set_visible(False)
    marks = [
        a.plot(
            [],
            [],
            look[m].marker,
            color=look[m].colour,
            markerfacecolor=look[m].face,
            markersize=7.5,
            markeredgewidth=1.6,
            label=spelled(m),
        )[0]
        for m in methods
    ]
    if len(study.seeds) == 1:
        marks += a.plot(
            [], [], color=look[best].colour, alpha=0.25, linewidth=6, label="95 %" if narrow else "95 % interval"
        )
    c.figure.legend(
        handles=marks,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=len(marks),
        borderpad=0,
        borderaxespad=0.2,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.9 if narrow else 1.6,
    )
    names = ", ".join(spelled(m) for m in methods)
    return c.svg(
        f"gains{width:g}", f"Test {study.task.word} per silo with {names}; the numbers are in the table below."
    )


def compared(study: Study, width: float) -> str:
    """Per method the gain over the baseline: a mark per silo, the mean and its interval."""
    look, base = styles(study), study.base or alone()
    methods = sorted((m for m in study.methods if m != base), key=lambda m: -study.mean_gain(m, base).mean)
    left = 8 + 7.2 * max(len(spelled(m)) for m in methods)
    c = drawn(width, 40 * len(methods) + 50, (left, 60, 6, 44))
    a = c.axes
    for row, method in enumerate(methods):
        each = [study.gain(method, base, s).mean for s in study.silos]
        known = [g for g in each if not math.isnan(g)]
        a.plot(known, [row + 0.2] * len(known), "|", color=MUTED, markersize=9, markeredgewidth=1.4, alpha=0.8)
        total = study.mean_gain(method, base)
        if math.isnan(total.mean):
            continue
        if not math.isnan(total.interval[0]):
            a.plot(total.interval, [row - 0.12] * 2, color=look[method].colour, linewidth=2.5)
        a.plot(total.mean, row - 0.12, look[method].marker, color=look[method].colour, markersize=8)
        a.annotate(
            signed(total.mean),
            (1, row - 0.12),
            (54, 0),
            va="center",
            ha="right",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            weight="bold",
        )
    a.axvline(0, color=INK, linewidth=1)
    a.set_ylim(len(methods) - 0.4, -0.6)
    a.set_yticks(range(len(methods)), [spelled(m) for m in methods])
    a.grid(axis="x")
    percent_axis(a.xaxis)
    a.set_xlabel(f"gain over {spelled(base)}, points of test {study.task.word}")
    a.spines["left"].set_visible(False)
    return c.svg(f"compared{width:g}", f"Mean gain over {spelled(base)} of each method with its 95 % interval.")


def by_round(study: Study, width: float) -> str:
    """Mean score over silos of every method's own snapshot, by the rounds of training behind it."""
    look = styles(study)
    right = 26 + 7.2 * max(len(spelled(m)) for m in study.methods)
    c = drawn(width, 360 if width > 500 else 290, (38, right, 10, 42))
    a = c.axes
    ends = []
    for method in study.methods:
        snapshot = reports(method)
        shift = 1 if snapshot == "received" else 0  # what is received in round r has r - 1 rounds behind it
        curve = {k - shift: v for k, v in study.curve(method, snapshot).items()}
        if not curve:
            continue
        x, y = list(curve), [float(np.mean(v)) for v in curve.values()]
        if len(study.seeds) > 1:
            a.fill_between(
                x,
                [min(v) for v in curve.values()],
                [max(v) for v in curve.values()],
                color=look[method].colour,
                alpha=0.12,
                linewidth=0,
            )
        every = max(1, round(len(x) / 8))
        a.plot(
            x,
            y,
            color=look[method].colour,
            linestyle=look[method].dash,
            linewidth=2.0,
            marker=look[method].marker,
            markevery=every,
            markersize=6,
            markerfacecolor=look[method].face,
            markeredgewidth=1.4,
        )
        ends.append((y[-1], spelled(method), look[method]))
    a.margins(x=0.02)
    a.grid(axis="y")
    a.xaxis.get_major_locator().set_params(integer=True)
    percent_axis(a.yaxis)
    a.set_xlabel("rounds of training")
    a.tick_params(axis="y", labelcolor=MUTED)
    end_labels(c, ends)
    return c.svg(f"by-round{width:g}", f"Mean test {study.task.word} over silos by round, one line per method.")


def before_after(study: Study, method: str) -> str:
    """One method: mean score of the received model and, after local training, of the personal one; silos behind."""
    c = drawn(340, 230, (36, 78, 8, 42))
    a = c.axes
    if len(study.silos) <= 40:
        for silo in study.silos:
            curve = study.curve(method, "personal", silo)
            a.plot(list(curve), [float(np.mean(v)) for v in curve.values()], color=MUTED, alpha=0.22, linewidth=0.8)
    ends = []
    for snapshot, colour, dash, marker, name in (
        ("received", ORANGE, (0, (4, 2)), "s", "received"),
        ("personal", BLUE, "-", "o", "personal"),
    ):
        found = study.curve(method, snapshot)
        if not found:
            continue
        x, y = list(found), [float(np.mean(v)) for v in found.values()]
        a.plot(
            x,
            y,
            color=colour,
            linestyle=dash,
            linewidth=2,
            marker=marker,
            markersize=5,
            markerfacecolor=CARD,
            markevery=max(1, round(len(x) / 6)),
        )
        ends.append((y[-1], name, Style(colour, marker, filled=False)))
    lowest = min((y for y, _, _ in ends), default=0.0)
    a.set_ylim(max(lowest - 0.1, LOWEST) if lowest < 0 else -0.02, 1.02)
    a.margins(x=0.02)
    a.grid(axis="y")
    a.xaxis.get_major_locator().set_params(integer=True)
    percent_axis(a.yaxis)
    a.set_xlabel("round")
    a.tick_params(axis="y", labelcolor=MUTED)
    end_labels(c, ends)
    return c.svg(
        f"before-{method}", f"{spelled(method)}: mean test {study.task.word} by round before and after local training."
    )


def label_circles(manifest: Mapping[str, Any], width: float) -> str:
    """Who holds what: a circle per silo and class, its area the number of training samples (validation included)."""
    silos, classes = manifest["silos"], int(manifest["classes"])
    counts = np.zeros((len(silos), classes), int)
    for row, silo in enumerate(silos):
        for part in ("train", "val"):
            for label, n in silo["labels"][part].items():
                counts[row, int(label)] += n
    names, prefix = short_names([s["name"] for s in silos])
    turned = width > 500  # silos side by side where there is room, as the papers draw it
    if turned:
        counts = counts.T
    rows, columns = counts.shape
    left = 44.0 if turned else 14 + 7.2 * min(max(map(len, names)), 18)
    right, above = (165.0, 6.0) if turned else (6.0, 52.0)  # the key stands to the right, or above
    cell = min((width - left - right) / columns, 44)
    below = 44.0 if prefix or not turned else 44 + 6.0 * min(max(map(len, names)), 18)
    c = drawn(left + cell * columns + right, cell * rows + above + below, (left, right, above, below))
    a = c.axes
    most = max(int(counts.max()), 1)
    largest = (0.92 * cell) ** 2 / most
    ys, xs = np.nonzero(counts)
    a.scatter(xs, ys, s=np.maximum(counts[ys, xs] * largest, 1.5), color=BLUE, alpha=0.85, linewidths=0)
    a.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    for k, n in enumerate(round_numbers(most)):
        x, y = ((columns - 0.5) * cell + 48, cell * (k + 0.5)) if turned else (70.0 * k + 10, -30.0)
        at = (x / cell - (0.5 if turned else 0), y / cell)
        a.scatter(*at, s=max(n * largest, 1.5), color=BLUE, alpha=0.85, linewidths=0, clip_on=False)
        a.annotate(
            f"{n} samples" if turned else str(n),
            at,
            (cell / 2 + 6, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
            color=MUTED,
        )
    silo_ticks, class_ticks = (
        thinned([clipped(n, 18) for n in names], 48),
        thinned([str(i) for i in range(classes)], 30),
    )
    across, down = (silo_ticks, class_ticks) if turned else (class_ticks, silo_ticks)
    a.set_xticks(*across, rotation=90 if turned and not prefix else 0)
    a.set_yticks(*down)
    a.set_xlabel((f"silo ({prefix}…)" if prefix else "silo") if turned else "class")
    a.set_ylabel("class" if turned else "")
    a.grid(color=GRID, linewidth=0.6)
    for spine in a.spines.values():
        spine.set_visible(False)
    return c.svg(f"labels{width:g}", f"Training samples per silo and class; the largest circle stands for {most}.")


def round_numbers(most: int) -> list[int]:
    """Two or three counts for a key, up to ``most``: 1, 2 or 5 times a power of ten, far enough apart to tell."""
    fitting = [digit * 10**power for power in range(9) for digit in (1, 2, 5) if digit * 10**power <= most]
    return fitting[::-2][:3][::-1]


def thinned(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    step = math.ceil(len(names) / most)
    return list(range(0, len(names), step)), list(names[::step])


def relationship_map(found: Relationships, width: float) -> str:
    """p_ij after the last round: how much silo i (row) takes of silo j's core model (column)."""
    from matplotlib.patches import Rectangle

    values, n = found.values[-1], len(found.names)
    names, prefix = short_names(found.names)
    left = 14 + 7.2 * min(max(map(len, names)), 18)
    cell = min((width - left - 6) / n, 44)
    written = cell >= 24
    below = 44 if prefix else 44 + 6.0 * min(max(map(len, names)), 18)
    c = drawn(left + cell * n + 6, cell * n + below + 6, (left, 6, 6, below))
    a = c.axes
    largest = max(float(np.nanmax(np.abs(values))), 1e-12)
    for i, j in itertools.product(range(n), range(n)):
        p = float(values[i, j])
        if math.isnan(p):
            continue
        strength, colour = abs(p) / largest, BLUE if p >= 0 else VERMILLION
        # Shade where the number can be written into the cell; size where it cannot.
        half = 0.48 if written else 0.48 * math.sqrt(strength)
        a.add_patch(
            Rectangle(
                (j - half, i - half),
                2 * half,
                2 * half,
                facecolor=colour,
                linewidth=0,
                alpha=0.04 + 0.66 * strength if written else 0.85,
            )
        )
        if written:
            text = f"{p:.2f}".replace("0.", ".", 1).replace("-", "−")
            a.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=min(11.0, cell * 0.36),
                weight="bold" if i == j else "normal",
            )
    a.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5))
    a.set_xticks(*thinned([clipped(x, 18) for x in names], 48), rotation=0 if prefix else 90)
    a.set_yticks(*thinned([clipped(x, 18) for x in names], 48))
    a.set_xlabel(f"takes from silo j ({prefix}…)" if prefix else "takes from silo j")
    for spine in a.spines.values():
        spine.set_visible(False)
    return c.svg(
        f"relations{width:g}", "Directed relationships of all silos after the last round, row i from column j."
    )


def trajectories(found: Relationships, own: bool) -> str:
    """Relationships over the rounds: of the first silo to all (``own`` false), or of every silo to itself."""
    c = drawn(340, 250, (40, 92, 8, 42))
    a = c.axes
    names, prefix = short_names(found.names)
    lines = [found.values[:, j, j] if own else found.values[:, 0, j] for j in range(len(names))]
    final = [float(line[-1]) for line in lines]
    labelled = sorted(range(len(lines)), key=lambda j: -abs(final[j]))[:6]
    if not own and 0 not in labelled:
        labelled = [0, *labelled[:5]]
    looks = itertools.cycle([BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY])
    ends = []
    for j, line in enumerate(lines):
        if j in labelled:
            colour = BLUE if not own and j == 0 else next(looks)
            a.plot(
                found.rounds,
                line,
                color=colour,
                linewidth=2.4 if not own and j == 0 else 1.6,
                linestyle=DASHES[j % len(DASHES)],
            )
            ends.append((final[j], clipped(names[j] if prefix else found.names[j], 12), None))
        else:
            a.plot(found.rounds, line, color=MUTED, alpha=0.5, linewidth=0.9)
    a.axhline(0, color=INK, linewidth=0.8)
    a.margins(x=0.02)
    a.grid(axis="y")
    a.xaxis.get_major_locator().set_params(integer=True)
    a.set_xlabel("round")
    a.tick_params(axis="y", labelcolor=MUTED)
    end_labels(c, ends)
    what = "of every silo to itself" if own else f"of {found.names[0]} to all silos"
    return c.svg(f"dr-{'own' if own else 'first'}", f"Directed relationships {what} over the rounds.")


def bytes_per_round(study: Study) -> str:
    """Bytes down and up per round of every method, one bar each."""
    methods = study.methods
    left = 8 + 7.2 * max(len(spelled(m)) for m in methods)
    c = drawn(340, 46 * len(methods) + 40, (left, 66, 4, 36))
    a = c.axes
    down, up = ([typical(study.per_round(m, k)) for m in methods] for k in ("bytes_down", "bytes_up"))
    rows = np.arange(len(methods))
    a.barh(rows - 0.17, down, 0.3, color=BLUE)
    a.barh(rows + 0.17, up, 0.3, color=CARD, edgecolor=ORANGE, linewidth=1.2, hatch="////")
    for row, values in zip(rows, zip(down, up, strict=True), strict=True):
        for shift, value, arrow in ((-0.17, values[0], "↓"), (0.17, values[1], "↑")):
            a.annotate(
                f"{arrow} {size_text(value)}",
                (value, row + shift),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=11,
                annotation_clip=False,
            )
    a.set(ylim=(len(methods) - 0.5, -0.5), xlim=(0, max([*down, *up, 1.0])))
    a.set_yticks(rows, [spelled(m) for m in methods])
    a.set_xticks([])
    a.set_xlabel("all silos together: ↓ to them, ↑ from them")
    a.spines["bottom"].set_visible(False)
    return c.svg("bytes", "Bytes per round of each method, to the silos and from them.")


def seconds_per_round(study: Study) -> str:
    """Wall time of every round, one line per method."""
    look = styles(study)
    right = 26 + 7.2 * max(len(spelled(m)) for m in study.methods)
    c = drawn(340, 230, (40, right, 8, 42))
    a = c.axes
    ends = []
    for method in study.methods:
        found = study.training_seconds(method)
        if not found:
            continue
        x, y = list(found), list(found.values())
        a.plot(
            x,
            y,
            color=look[method].colour,
            linestyle=look[method].dash,
            linewidth=1.6,
            marker=look[method].marker,
            markersize=5,
            markevery=max(1, round(len(x) / 6)),
            markerfacecolor=look[method].face,
        )
        ends.append((y[-1], spelled(method), look[method]))
    a.set_ylim(bottom=0)
    a.margins(x=0.02)
    a.grid(axis="y")
    a.xaxis.get_major_locator().set_params(integer=True)
    a.set_xlabel("round")
    a.set_ylabel("seconds")
    a.tick_params(axis="y", labelcolor=MUTED)
    end_labels(c, ends)
    return c.svg("seconds", "Seconds per round of each method.")


def typical(values: Mapping[int, float]) -> float:
    """The median of a value per round; 0 for none."""
    return float(np.median(list(values.values()))) if values else 0.0


def signed(difference: float) -> str:
    """A difference of accuracies in points, with its sign: a tiny loss is ``−0.0``, no loss ``0.0``."""
    return "0.0" if abs(difference) < EXACT else f"{100 * difference:+.1f}".replace("-", "−")


def size_text(value: float) -> str:
    """Bytes as people read them: ``613 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
