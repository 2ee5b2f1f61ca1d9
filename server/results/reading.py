"""Readers of the files of a run directory, whatever a killed process, a full disk or an editor left in them.

The lines of ``progress.jsonl`` that are incomplete, or no event, are skipped. A JSON file that is damaged is refused in
one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError

Event = dict[str, Any]
NUMBER = (int, float)
# The types of fields of events, of any kind, and the fields that a kind must have.
TYPES: dict[str, Any] = {
    "event": str,
    "strategy": str,
    "seed": int,
    "message": str,
    "task": str,
    "score": str,
    "round": int,
    "rounds": int,
    "seconds": NUMBER,
    "bytes": NUMBER,
    "samples": dict,
    "rejected": dict,
    "bounded": dict,
}
NEEDED = {
    **dict.fromkeys(("note", "refused", "transfer", "stopped", "error"), ("message",)),
    "silos": ("samples",),
    "models": ("strategy", "silos"),
}


def parse_event(line: bytes) -> Event | None:
    """Return the event in a line of ``progress.jsonl``; None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return None
    typed = all(isinstance(found[key], kind) for key, kind in TYPES.items() if key in found)
    return found if typed and found.keys() >= {*NEEDED.get(found["event"], ())} else None


class Tail:
    """Reader of one file's new complete lines; each line is read once.

    ``position``: number of bytes read so far; ``largest``: maximum bytes read at once, -1: all.
    """

    def __init__(self, file: Path, position: int = 0, largest: int = -1) -> None:
        self.file = file
        self.position = position
        self.largest = largest

    def lines(self) -> list[bytes]:
        """Return the next complete lines; none if there is no file."""
        try:
            with self.file.open("rb") as reading:
                reading.seek(self.position)
                data = reading.read(self.largest)
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == self.largest:
            end = self.largest  # a line longer than any that silofl writes
        self.position += end
        return [line for line in data[:end].split(b"\n") if line]

    def events(self) -> Iterator[Event]:
        """Yield the events of the next complete lines."""
        return (event for line in self.lines() if (event := parse_event(line)) is not None)


def read_events(file: Path) -> list[Event]:
    """Return all events of a run; empty if there is no file."""
    return list(Tail(file).events())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the record in a JSON file; None if there is no file. Raises UserError if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; take it from a copy") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no record; take it from a copy")
    return value


# What readers of a run's entry in ``summary.json`` rely on.
ENTRY: dict[str, Any] = {
    "strategy": str,
    "seed": int,
    "rounds": int,
    "silos": list,
    "per_silo": dict,
    "final": dict,
}
ENTRY |= {"bytes_down": NUMBER, "bytes_up": NUMBER, "seconds": dict}


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of ``summary.json``; no runs if there is no file. Raises UserError if it is damaged."""
    if (found := read_json(path)) is None:
        return {"runs": []}
    if fault := _summary_fault(found):
        raise UserError(
            f"{path} is damaged ({fault}): take it from a copy, or delete it; then `silofl report` has history.csv only"
        )
    return found


def find_entry(path: Path, which: tuple[str, int]) -> dict[str, Any] | None:
    """Return the entry of a run, by method and seed, in ``summary.json``; None if the run has not ended."""
    runs: list[dict[str, Any]] = read_summary(path)["runs"]
    for run in runs:
        if (run["strategy"], run["seed"]) == which:
            return run
    return None


def _summary_fault(found: dict[str, Any]) -> str:
    """Return what is wrong with a summary; empty: nothing."""
    runs = found.get("runs")
    if not isinstance(runs, list) or not isinstance(found.get("hold_out", {}), dict):
        return "no list of runs"
    for place, run in enumerate(runs):
        if not isinstance(run, dict):
            return f"run {place + 1} is no record"
        wrong = [key for key, kind in ENTRY.items() if not isinstance(run.get(key), kind)]
        if wrong:
            return f"run {place + 1} has no {wrong[0]}"
        for name, values in {**run["per_silo"], "final": run["final"]}.items():
            if not isinstance(values, dict):
                return f"{name} in run {place + 1} is no record"
            if bad := [
                key
                for key, value in values.items()
                if not isinstance(value, int | float | dict | None)
            ]:
                return f"{bad[0]} of {name} in run {place + 1} is no number"
        if lacking := [
            silo
            for silo in run["silos"]
            if not {"n_train", "n_test"} <= {*run["per_silo"].get(silo, ())}
        ]:
            return f"{lacking[0]} in run {place + 1} has no counts of samples"
    return ""
