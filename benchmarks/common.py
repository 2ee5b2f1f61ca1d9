"""Paired, interleaved timing: because machines are noisy, two works are timed in turns and reported as a ratio."""

from __future__ import annotations

import itertools
import logging
import statistics
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from client.app import app as client_app
from server.results.run_directory import RunDirectory
from server.run.loop import RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from strategies.base.run_settings import RunSettings, parse_settings


def interleaved(
    works: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each work, ``repeats`` times, in turns, after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + repeats):
        for name, work in works.items():
            started = clock()
            work()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            times[name].append(clock() - started)
    return {name: seconds[1:] for name, seconds in times.items()}


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return for each work the median over turns of its time divided by the base's time of the same turn."""
    return {
        name: statistics.median(t / b for t, b in zip(values, times[base], strict=True))
        for name, values in times.items()
    }


def print_table(header: str, rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table, each row when it is there. ``header``: names with `` | `` between them.

    Floats have two digits.
    """
    names = header.split(" | ")
    for row in itertools.chain([names, ["---"] * len(names)], rows):
        cells = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row]
        print("| " + " | ".join(cells) + " |", flush=True)


def command_line(description: str | None) -> ArgumentParser:
    """Return a parser that shows a module's docstring as it stands."""
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


class Prepared:
    """A federation in this process after client registration; :meth:`round` runs one more round."""

    def __init__(self, values: Mapping[str, Any], *, on_disk: bool = False) -> None:
        # A line per silo and round would be part of the time
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.settings: RunSettings = parse_settings(
            {"evaluate-every": 0, "rounds": 10_000, **values}
        )
        directory = states = None
        if on_disk:
            self.folder = tempfile.TemporaryDirectory()
            directory = RunDirectory(Path(self.folder.name))
            states = directory.checkpoint(self.settings.run_key) / "silos"
        grid = InProcessGrid(
            client_app, self.settings.common.silos, self.settings.flat(), states
        )
        with flower_identity():
            self.federation = RoundLoop(grid, self.settings, directory)
            self.strategy = self.federation.begin()

    def round(self) -> None:
        with flower_identity():
            self.federation.round(self.strategy, self.federation.done + 1)


def whole_run(values: Mapping[str, Any]) -> RoundLoop:
    """Execute a whole run of simulated silos in this process and in memory, and return its loop."""
    run = parse_settings(values)
    loop = RoundLoop(InProcessGrid(client_app, run.common.silos, run.flat()), run)
    with flower_identity():
        loop.run()
    return loop


def final_scores(loop: RoundLoop, metric: str = "accuracy") -> dict[str, float]:
    """Return each silo's last test score, of the snapshot that the method's paper reports."""
    wanted = ("test", loop.settings.strategy.info.reports, metric)
    rows = loop.history.rows
    return {r.silo: r.value for r in rows if (r.split, r.snapshot, r.metric) == wanted}
