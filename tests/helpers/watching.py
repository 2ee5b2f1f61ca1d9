"""Events as a run writes them to `progress.jsonl`, and `silofl watch` beside them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Event = dict[str, Any]


def event(kind: str, strategy: str = "fedavg", seed: int = 1, **values: Any) -> Event:
    return {"event": kind, "strategy": strategy, "seed": seed, **values}


def begin(
    number: int,
    silos: Mapping[str, str],
    *,
    rounds: int,
    strategy: str = "fedavg",
    **values: Any,
) -> Event:
    defaults = {"closing": False, "time": time.time()}
    return event(
        "begin",
        strategy,
        number=number,
        rounds=rounds,
        silos=dict(silos),
        **{**defaults, **values},
    )


def round_done(
    number: int,
    scores: Mapping[str, float],
    *,
    rounds: int,
    strategy: str = "fedavg",
    rejected: Any = None,
) -> list[Event]:
    """A round from its beginning to its end; every silo has the same score on both parts."""
    per_silo = {name: {"val": value, "test": value} for name, value in scores.items()}
    values: dict[str, Any] = {
        "silos": len(scores),
        "task": "multiclass",
        "score": "accuracy",
        "seconds": 2.0,
        "bytes": 3000,
    }
    values |= {
        "rejected": rejected or {},
        "bounded": {},
        "bytes_down": 2000,
        "bytes_up": 1000,
        "per_silo": per_silo,
    }
    first = begin(number, dict.fromkeys(scores, "train"), rounds=rounds, strategy=strategy)
    return [
        first,
        event("round", strategy, round=number, rounds=rounds, accuracy=0.5, **values),
    ]


def done(strategy: str = "fedavg") -> Event:
    return event("done", strategy, out="/somewhere")


def write(folder: Path, *events: Event) -> None:
    """Add events to a run's file, as the server does: whole lines, one write."""
    folder.mkdir(exist_ok=True)
    with (folder / "progress.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in events))


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`silofl watch` as its own process, and its address."""
    command = [sys.executable, "-m", "server.cli.main", "watch", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()
