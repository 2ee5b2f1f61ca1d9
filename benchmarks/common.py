"""Paired, interleaved timing: because machines are noisy, two works are timed in turns and reported as a ratio."""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from client.app import app as client_app
from partitions.common.errors import UserError
from server.results.run_directory import RunDirectory
from server.run.loop import RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from strategies import strategies
from strategies.base.run_settings import RunSettings, parse_settings

Timed = Callable[[], object]
T = TypeVar("T")


def seconds(work: Timed) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter() - started


def interleaved(works: Mapping[str, Timed], repeats: int = 5) -> dict[str, list[float]]:
    """Return the seconds of each work, ``repeats`` times, in turns, after one untimed turn."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return for each work the median over turns of its time divided by the base's time of the same turn."""
    return {
        name: statistics.median(t / b for t, b in zip(values, times[base], strict=True))
        for name, values in times.items()
    }


def table(rows: list[list[str]], header: list[str]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


class Prepared:
    """A federation in this process after client registration; :meth:`round` runs one more round."""

    def __init__(self, values: Mapping[str, Any], *, on_disk: bool = False) -> None:
        # A line per silo and round would be part of the time
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.settings: RunSettings = parse_settings(
            {"evaluate-every": 0, "rounds": 10_000, **values}
        )
        directory = None
        if on_disk:
            self.folder = tempfile.TemporaryDirectory()
            directory = RunDirectory(Path(self.folder.name))
        states = directory.checkpoint(self.settings.run_key) / "silos" if directory else None
        grid = InProcessGrid(
            client_app, self.settings.common.silos, self.settings.flat(), states
        )
        with flower_identity():
            self.federation = RoundLoop(grid, self.settings, directory)
            self.strategy = self.federation.begin()
        self.done = 0

    def round(self) -> None:
        self.done += 1
        with flower_identity():
            self.federation.round(self.strategy, self.done)


def whole_run(values: Mapping[str, Any]) -> RoundLoop:
    """Execute a whole run of simulated silos in this process and in memory, and return its loop."""
    run = parse_settings(values)
    loop = RoundLoop(InProcessGrid(client_app, run.common.silos, run.flat()), run)
    with flower_identity():
        loop.run()
    return loop


def each_method(values: Mapping[str, Any], make: Callable[[dict[str, Any]], T]) -> dict[str, T]:
    """Call ``make`` on the settings with each method, except those that refuse them (fedbn without its layers)."""
    prepared = {}
    for name in sorted(strategies()):
        with contextlib.suppress(UserError):
            prepared[name] = make({**values, "strategy": name})
    return prepared


def random_pictures(file: Path, shape: Sequence[int], silos: int, samples: int) -> None:
    """Write an .npz of random pictures (height, width, channels) of ten classes, ``samples`` per silo for training.

    Half as many are for validation, half as many for testing.
    """
    rng = np.random.default_rng(0)
    count = 2 * samples * silos
    x, y = rng.integers(0, 256, (count, *shape), np.uint8), np.arange(count) % 10
    np.savez(
        file,
        x_train=x[::2],
        y_train=y[::2],
        x_val=x[1::4],
        y_val=y[1::4],
        x_test=x[3::4],
        y_test=y[3::4],
    )
