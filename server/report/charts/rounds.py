"""Charts over the rounds: scores, relationships, seconds."""

from __future__ import annotations

import itertools

import numpy as np

from server.report.charts.canvas import (
    BLUE,
    CARD,
    DASHES,
    GREEN,
    INK,
    LOWEST,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Style,
    chart,
    clipped,
    drawn,
    end_labels,
    percent_axis,
    short_names,
    styles,
)
from server.report.methods import reports, spelled
from server.report.study import Study
from strategies.base.info import Relationships


@chart
def by_round(study: Study, width: float) -> str:
    """Draw each method's mean score over silos, for its reported snapshot, by rounds of training."""
    look = styles(study)
    right = 26 + 7.2 * max(len(spelled(m)) for m in study.methods)
    c = drawn(width, 360 if width > 500 else 290, (38, right, 10, 42))
    a = c.axes
    ends = []
    for method in study.methods:
        snapshot = reports(method)
        shift = 1 if snapshot == "received" else 0  # the model received in round r was trained for r - 1 rounds
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
    return c.svg(f"by-round{width:g}", f"Mean test {study.task.score_label} over hospitals by round and method.")


@chart
def before_after(study: Study, method: str) -> str:
    """Draw one method's mean score before and after local training, with single silos in the background."""
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
        f"before-{method}",
        f"{spelled(method)}: mean test {study.task.score_label} by round before and after local training.",
    )


@chart
def trajectories(found: Relationships, own: bool) -> str:
    """Draw relationships over the rounds: of the first silo to all (``own`` false), or of every silo to itself."""
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
    what = "of every hospital to itself" if own else f"of {found.names[0]} to all hospitals"
    return c.svg(f"dr-{'own' if own else 'first'}", f"Directed relationships {what} over the rounds.")


@chart
def seconds_per_round(study: Study) -> str:
    """Draw the wall time of every round, one line per method."""
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
