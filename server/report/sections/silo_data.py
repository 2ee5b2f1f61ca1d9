"""Sections on the data of the silos, and on the relationships between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.patches import Rectangle

from partitions.common.errors import DataError
from partitions.common.files import write_atomically
from partitions.labels import ONE_CLASS
from server.report.canvas import (
    AT_RIGHT,
    BLUE,
    DASHES,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SETTINGS,
    SKY,
    VERMILLION,
    Canvas,
    chart,
    in_widths,
    room_for,
    short_names,
    thin_names,
)
from server.report.html import render
from server.report.study import StudyResults
from server.results.manifest import label_counts
from server.results.run_directory import newest_states
from strategies import strategies
from strategies.base.info import MethodInfo
from strategies.base.plan import Relationships


def data_section(study: StudyResults) -> Markup:
    """Render the samples per silo and class; empty if they are unknown."""
    m = study.manifest
    if m is None or not study.task.single_label:
        return Markup()
    about = {key: m[key] for key in ("dataset", "partition", "seed")}
    return render("data", circles=in_widths(label_circles, m), seeds=len(study.seeds), **about)


@chart
def label_circles(manifest: Mapping[str, Any], width: float) -> str:
    """Draw a circle per silo and class."""
    c, most = draw_labels(manifest, width)
    return c.svg(
        f"labels{width:g}",
        f"Training samples per hospital and class; the largest circle stands for {most}.",
    )


def check_plot(path: str | Path) -> Path:
    """Return the path. Raises DataError unless it ends in .png, .svg or .pdf."""
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise DataError(f"{path} does not end in .png, .svg or .pdf")
    return path


def plot_partition(manifest: Mapping[str, Any], path: str | Path) -> None:
    """Plot a partition into a file, as in the report. ``manifest``: from `write_partition` or `describe`.

    Raises DataError for another ending than .png, .svg or .pdf, and where samples have no class.
    """
    path = check_plot(path)
    if (task := manifest.get("task", ONE_CLASS[0])) not in ONE_CLASS:
        raise DataError(
            f"there is nothing to draw: samples of {manifest['dataset']} have no class each ({task})"
        )
    with matplotlib.rc_context(SETTINGS):
        c, _ = draw_labels(manifest, 820)
        c.axes.set_title(
            f"{manifest['dataset']}, {manifest['partition']}, seed {manifest['seed']}"
        )
        save = partial(c.figure.savefig, dpi=150, bbox_inches="tight", facecolor="white")
        write_atomically(path, partial(save, format=path.suffix[1:]))


def draw_labels(manifest: Mapping[str, Any], width: float) -> tuple[Canvas, int]:
    """Draw a circle per silo and class, its area the number of training samples (validation included).

    Return the canvas, and the number of samples of the largest circle.
    """
    silos, classes = manifest["silos"], int(manifest["classes"])
    counts = label_counts(manifest)
    names, prefix = short_names([s["name"] for s in silos])
    turned = width > 500  # silos side by side if the chart is wide enough, as in the papers
    if not turned:
        counts = counts.T
    rows, columns = counts.shape
    left = 44.0 if turned else 14 + room_for(names)
    # Room for the key to the right, or above
    right, above = (165.0, 6.0) if turned else (6.0, 52.0)
    cell = min((width - left - right) / columns, 44)
    below = 44.0 if prefix or not turned else 44 + room_for(names)
    c = Canvas(
        left + cell * columns + right, cell * rows + above + below, (left, right, above, below)
    )
    a, most = c.axes, max(int(counts.max()), 1)
    largest = (0.92 * cell) ** 2 / most
    look = {"color": BLUE, "alpha": 0.85, "linewidths": 0}
    ys, xs = np.nonzero(counts)
    a.scatter(xs, ys, s=np.maximum(counts[ys, xs] * largest, 1.5), **look)
    for k, n in enumerate(round_numbers(most)):
        at = (
            (columns - 1 + 48 / cell, k + 0.5) if turned else ((70 * k + 10) / cell, -30 / cell)
        )
        a.scatter(*at, s=max(n * largest, 1.5), clip_on=False, **look)
        beside = {**AT_RIGHT, "xycoords": "data", "color": MUTED}
        a.annotate(f"{n} samples" if turned else str(n), at, (cell / 2 + 6, 0), **beside)
    silo_ticks = thin_names(names, 48)
    class_ticks = thin_names([str(i) for i in range(classes)], 30)
    across, down = (silo_ticks, class_ticks) if turned else (class_ticks, silo_ticks)
    a.set_xticks(*across, rotation=90 if turned and not prefix else 0)
    a.set_yticks(*down)
    a.set_xlabel((f"hospital ({prefix}…)" if prefix else "hospital") if turned else "class")
    a.set_ylabel("class" if turned else "")
    a.grid(color=GRID, linewidth=0.6)
    as_matrix(a, rows, columns)
    return c, most


def as_matrix(axes: Any, rows: int, columns: int) -> None:
    """Set the limits to those of a matrix, row 0 on top, without spines."""
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.spines[:].set_visible(False)


def round_numbers(most: int) -> list[int]:
    """Return two or three counts for a key, up to ``most``: 1, 2 or 5 times a power of ten."""
    fitting = [n for power in range(9) for n in (10**power, 2 * 10**power, 5 * 10**power)]
    return [n for n in fitting if n <= most][::-2][:3][::-1]


def relationships_section(study: StudyResults) -> Markup:
    """Render how much silos take from each other; empty if no method has such weights."""
    related = relationships(study)
    if related is None:
        return Markup()
    info, weights = related
    return render(
        "relationships",
        related_by=f"{info.spelling}: {info.role.relationships}",
        map=in_widths(relationship_map, weights, wide=600),
        last=weights.rounds[-1],
        first=weights.names[0],
        to_all=trajectories(weights, False),
        to_itself=trajectories(weights, True),
    )


def relationships(study: StudyResults) -> tuple[MethodInfo, Relationships] | None:
    """Return the relationships of the first run that has any, if the silos' states can be read (simulations)."""
    for name, seed in study.planned:
        method = strategies().get(name)
        if method is not None and method.info.role.relationships:
            states = newest_states(study.path / "checkpoint" / f"{name}-{seed}" / "silos")
            if weights := cast(Any, method).read_relationships(states):
                return method.info, weights
    return None


@chart
def relationship_map(weights: Relationships, width: float) -> str:
    """Draw p_ij after the last round: how much silo i (row) takes of silo j's core model (column)."""
    values, n = weights.values[-1], len(weights.names)
    names, prefix = short_names(weights.names)
    left = 14 + room_for(names)
    below = 44 if prefix else 44 + room_for(names)
    cell = min((width - left - 6) / n, 44)
    written = cell >= 24
    c = Canvas(left + cell * n + 6, cell * n + below + 6, (left, 6, 6, below))
    a = c.axes
    largest = max(float(np.nanmax(np.abs(values))), 1e-12)
    for i, j in np.argwhere(~np.isnan(values)).tolist():
        p = float(values[i, j])
        strength = abs(p) / largest
        colour = BLUE if p >= 0 else VERMILLION
        # Strength is shown by shade if the number fits into the cell, else by size.
        half, alpha = (
            (0.48, 0.04 + 0.66 * strength) if written else (0.48 * math.sqrt(strength), 0.85)
        )
        square = (j - half, i - half), 2 * half, 2 * half
        a.add_patch(Rectangle(*square, facecolor=colour, linewidth=0, alpha=alpha))
        if written:
            text = f"{p:.2f}".replace("0.", ".", 1).replace("-", "−")
            weight = "bold" if i == j else "normal"
            a.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=min(11.0, cell * 0.36),
                weight=weight,
            )
    a.set_xticks(*thin_names(names, 48), rotation=0 if prefix else 90)
    a.set_yticks(*thin_names(names, 48))
    a.set_xlabel(f"takes from hospital j ({prefix}…)" if prefix else "takes from hospital j")
    as_matrix(a, n, n)
    label = "Directed relationships of all hospitals after the last round, row i from column j."
    return c.svg(f"relations{width:g}", label)


@chart
def trajectories(weights: Relationships, to_itself: bool) -> str:
    """Draw relationships over the rounds: of the first silo to all, or of every silo ``to_itself``."""
    c = Canvas(340, 250, (40, 92, 8, 42))
    names, _ = short_names(weights.names, 12)
    lines = [weights.values[:, j if to_itself else 0, j] for j in range(len(names))]
    labelled = sorted(range(len(lines)), key=lambda j: -abs(float(lines[j][-1])))[:6]
    if not to_itself and 0 not in labelled:
        labelled = [0, *labelled[:5]]
    looks = itertools.cycle([BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY])
    for j, values in enumerate(lines):
        look: dict[str, Any] = {"color": MUTED, "alpha": 0.5, "linewidth": 0.9}
        if j in labelled:
            first = not to_itself and j == 0
            look = {"color": BLUE if first else next(looks), "linewidth": 2.4 if first else 1.6}
            look["linestyle"] = DASHES[j % len(DASHES)]
            c.ends.append((float(values[-1]), names[j], None))
        c.axes.plot(weights.rounds, values, **look)
    c.axes.axhline(0, color=INK, linewidth=0.8)
    c.finish_lines("round", percent=False)
    what = (
        "of every hospital to itself"
        if to_itself
        else f"of {weights.names[0]} to all hospitals"
    )
    return c.svg(
        f"dr-{'own' if to_itself else 'first'}",
        f"Directed relationships {what} over the rounds.",
    )
