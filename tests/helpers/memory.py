"""A process's anonymous memory, now and at the most."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def own_memory() -> int:
    """Return this process's anonymous memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Context that yields a list with the most bytes that were held in it, beyond those at its start."""
    before, over, peak = own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.001):
            peak[0] = max(peak[0], own_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def bytes_alone(code: str, *words: object) -> list[int]:
    """Return the numbers that a Python of its own prints last: other tests have left nothing in it."""
    helpers = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=helpers.parents[1],
        env={**os.environ, "PYTHONPATH": str(helpers)},
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return [int(word) for word in found.stdout.splitlines()[-1].split()]
