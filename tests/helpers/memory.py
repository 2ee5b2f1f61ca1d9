"""A process's anonymous memory, now and at the most."""

from __future__ import annotations

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
