"""A run in a terminal as one plain table: once, or again after each news until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from partitions.common.names import escape
from partitions.common.output import columns, output_fault
from server.watch.source import WatchSource

REFRESH_SECONDS = 0.5


def show(source: WatchSource, *, once: bool) -> None:
    """Print the table; without ``once``, again whenever something has happened, until Ctrl-C."""
    while source.poll():  # a long file is read in parts
        pass
    while True:
        print("\n".join(lines(source.board.picture(), source.title)), flush=True)
        if once or output_fault():
            return
        while not source.poll():
            time.sleep(REFRESH_SECONDS)
        print()


def lines(picture: Mapping[str, Any], title: str) -> Iterator[str]:
    """Yield a picture's lines. Text from silos or the server is escaped: it cannot control the terminal."""
    run = picture["run"]
    if run is None:
        hint = "; silofl audit has messages that were refused" if picture["site"] else ""
        yield f"{escape(title)}: no run has begun{hint}"
        return
    where = (
        "closing evaluation"
        if run["closing"] and run["state"] == "running"
        else f"round {run['round']}"
    )
    left = f", about {seconds(run['left'])} to the end" if run["left"] is not None else ""
    method = f"{escape(run['strategy'])} seed {run['seed']}"
    yield f"{escape(title)}: {method}, {run['state']}, {where} of {run['rounds']}{left}, {run['bytes'] / 1e6:.1f} MB"
    yield from (escape(text) for text in (run["why"], run["transfer"]) if text)
    score = escape(run["score"]) or "score"
    head = [
        "silo",
        "now",
        "last reply",
        f"validation {score}",
        f"test {score}",
        "gain",
        "missed",
        "epsilon",
    ]
    rows = [[escape(cell) for cell in row(silo, picture["now"])] for silo in run["silos"]]
    table = columns([head, *(cells[:-1] for cells in rows)])
    yield table[0]
    yield from (
        f"{line}  {cells[-1]}".rstrip() for line, cells in zip(table[1:], rows, strict=True)
    )


def row(silo: Mapping[str, Any], now: float) -> list[str]:
    """Return the cells of a silo, and why its last reply was left out or bounded."""
    doing = silo["doing"]
    return [
        silo["name"],
        f"{doing} {seconds(now - silo['since'])}" if doing and silo["since"] else doing or "-",
        "-" if silo["seconds"] is None else seconds(silo["seconds"]),
        *(format_cell(silo[key]) for key in ("validation", "test")),
        format_cell(silo["gain"], "+.4f"),
        str(silo["missed"]),
        format_cell(silo["epsilon"], ".3g"),
        silo["left_out"] or silo["bounded"],
    ]


def format_cell(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def seconds(value: float) -> str:
    """Return a duration as text: ``4 s``, ``3 min``, ``2.5 h``."""
    value = max(value, 0.0)
    if value < 120:
        return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
