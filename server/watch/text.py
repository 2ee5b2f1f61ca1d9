"""Picture of a run in a terminal, drawn by rich: once, or repeatedly until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from partitions.common.names import escaped
from server.watch.source import Source

REFRESH_SECONDS = 0.5
LOG_LINES = 5
MOST_NAME = 30  # characters of a silo's name that even a narrow terminal shows


def show(source: Source, *, once: bool) -> None:
    """Print the picture; without ``once``, update it until Ctrl-C."""
    console = Console(highlight=False, emoji=False)
    while source.poll():  # a long file is read in parts
        pass
    if once:
        console.print(drawn(source.board.picture(), source.title))
        return
    with Live(drawn(source.board.picture(), source.title), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_SECONDS)
            source.poll()
            live.update(drawn(source.board.picture(), source.title), refresh=True)


def drawn(picture: Mapping[str, Any], title: str) -> RenderableType:
    """Return a picture for rich. Text from silos or the server is escaped: neither markup nor terminal control."""
    run = picture["run"]
    if run is None:
        hint = "; silofl audit has messages that were refused" if picture["site"] else ""
        return Text(f"{escaped(title)}: no run has begun{hint}")
    parts: list[RenderableType] = [Text(headline(run, title, picture["now"]), style="bold")]
    parts += [Text(escaped(found)) for found in (run["why"], run["transfer"]) if found]
    parts.append(silo_table(run, picture["now"]))
    if len(picture["runs"]) > 1:
        parts.append(run_table(picture["runs"]))
    parts += [Text(escaped(f"{note['time']} {note['text']}".strip())) for note in picture["notes"][:LOG_LINES]]
    return Group(*parts)


def headline(run: Mapping[str, Any], title: str, now: float) -> str:
    where = "closing evaluation" if run["closing"] and run["state"] == "running" else f"round {run['round']}"
    phrases = [f"{escaped(title)}: {escaped(run['strategy'])} seed {run['seed']}", run["state"]]
    phrases.append(f"{where} of {run['rounds']}")
    if run["asked"]:
        phrases.append(f"the next one for {seconds(now - run['asked'])}")
    if run["left"] is not None:
        phrases.append(f"about {seconds(run['left'])} to the end")
    phrases.append(f"{run['bytes'] / 1e6:.1f} MB")
    return ", ".join(phrases)


def silo_table(run: Mapping[str, Any], now: float) -> Table:
    """Return a table with a row per silo."""
    score = escaped(run["score"]) or "score"
    table = Table(box=None, pad_edge=False)
    longest = max((len(escaped(silo["name"])) for silo in run["silos"]), default=0)
    table.add_column("silo", min_width=min(longest, MOST_NAME))  # names cut to `hospital-…` could not be told apart
    for name in ("now", "last reply"):
        table.add_column(name)
    for name in (f"validation {score}", f"test {score}", "gain", "missed"):
        table.add_column(name, justify="right")
    with_epsilon = any(silo["epsilon"] is not None for silo in run["silos"])
    if with_epsilon:
        table.add_column("epsilon", justify="right")
    table.add_column("left out or bounded")
    for silo in run["silos"]:
        doing = silo["doing"]
        cells = [silo["name"], f"{doing} {seconds(now - silo['since'])}" if doing and silo["since"] else doing or "-"]
        cells += ["-" if silo["seconds"] is None else seconds(silo["seconds"])]
        cells += [shown(silo["validation"]), shown(silo["test"]), shown(silo["gain"], "+.4f"), str(silo["missed"])]
        cells += [shown(silo["epsilon"], ".3g")] if with_epsilon else []
        cells.append(silo["left_out"] or silo["bounded"])
        style = "red" if silo["left_out"] or doing == "late" else ""
        table.add_row(*(Text(escaped(cell)) for cell in cells), style=style)
    return table


def run_table(runs: list[Mapping[str, Any]]) -> Table:
    """Return a table with a row per run of the study."""
    table = Table(box=None, pad_edge=False)
    for name in ("method", "seed", "state", "rounds", "best round", "validation", "test", "gain"):
        table.add_column(name)
    for run in runs:
        best = [shown(run["best_validation"]), shown(run["best_test"]), shown(run["gain"], "+.4f")]
        rounds = f"{run['round']}/{run['rounds']}"
        cells = [run["strategy"], str(run["seed"]), run["state"], rounds, run["best_when"] or "-", *best]
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    return table


def shown(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def seconds(value: float) -> str:
    """Return a duration as text: ``4 s``, ``3 min``, ``2.5 h``."""
    value = max(value, 0.0)
    if value < 120:
        return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
