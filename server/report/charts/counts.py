"""Charts of counts: samples per silo and class, relationships between silos, bytes per round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from server.report.charts.canvas import (
    BLUE,
    CARD,
    GRID,
    MUTED,
    ORANGE,
    VERMILLION,
    chart,
    clipped,
    drawn,
    short_names,
    thinned,
)
from server.report.html import size_text, typical
from server.report.methods import spelled
from server.report.study import Study
from strategies.base.info import Relationships


@chart
def label_circles(manifest: Mapping[str, Any], width: float) -> str:
    """Draw a circle per silo and class, its area the number of training samples (validation included)."""
    silos, classes = manifest["silos"], int(manifest["classes"])
    counts = np.zeros((len(silos), classes), int)
    for row, silo in enumerate(silos):
        for part in ("train", "val"):
            for label, n in silo["labels"][part].items():
                counts[row, int(label)] += n
    names, prefix = short_names([s["name"] for s in silos])
    turned = width > 500  # silos side by side if the chart is wide enough, as in the papers
    if turned:
        counts = counts.T
    rows, columns = counts.shape
    left = 44.0 if turned else 14 + 7.2 * min(max(map(len, names)), 18)
    right, above = (165.0, 6.0) if turned else (6.0, 52.0)  # room for the key to the right, or above
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
    a.set_xlabel((f"hospital ({prefix}…)" if prefix else "hospital") if turned else "class")
    a.set_ylabel("class" if turned else "")
    a.grid(color=GRID, linewidth=0.6)
    for spine in a.spines.values():
        spine.set_visible(False)
    return c.svg(f"labels{width:g}", f"Training samples per hospital and class; the largest circle stands for {most}.")


def round_numbers(most: int) -> list[int]:
    """Return two or three counts for a key, up to ``most``: 1, 2 or 5 times a power of ten."""
    fitting = [digit * 10**power for power in range(9) for digit in (1, 2, 5) if digit * 10**power <= most]
    return fitting[::-2][:3][::-1]


@chart
def relationship_map(found: Relationships, width: float) -> str:
    """Draw p_ij after the last round: how much silo i (row) takes of silo j's core model (column)."""
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
        # Strength is shown by shade if the number fits into the cell, else by size.
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
    a.set_xlabel(f"takes from hospital j ({prefix}…)" if prefix else "takes from hospital j")
    for spine in a.spines.values():
        spine.set_visible(False)
    return c.svg(
        f"relations{width:g}", "Directed relationships of all hospitals after the last round, row i from column j."
    )


@chart
def bytes_per_round(study: Study) -> str:
    """Draw each method's bytes per round, one bar for down and one for up."""
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
    a.set_xlabel("all hospitals together: ↓ to them, ↑ from them")
    a.spines["bottom"].set_visible(False)
    return c.svg("bytes", "Bytes per round of each method, to the hospitals and from them.")
