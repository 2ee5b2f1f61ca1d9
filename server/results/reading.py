"""Readers of the files of a run directory, whatever a killed process, a full disk or an editor left in them.

The lines of ``progress.jsonl`` that are incomplete, or no event, are skipped. A JSON file that is damaged is refused in
one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from partitions.common.errors import DataError, UserError
from partitions.common.parsed import Frozen, parse_values

LONGEST = 500  # maximum characters of a line
NAME = "name"  # file of a run directory
Event = dict[str, Any]
Line = Annotated[str, AfterValidator(lambda text: " ".join(text.split())[:LONGEST])]
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Number = Annotated[float, Field(gt=-1e308, lt=1e308)]
# The fields that events of a kind must have
NEEDED = {
    **{kind: {"message"} for kind in ("note", "refused", "transfer", "stopped", "error")},
    "silos": {"samples"},
    "models": {"strategy", "silos"},
}


class Lenient(Frozen):
    """Base of records that may hold more than their readers use."""

    model_config = ConfigDict(extra="ignore")


class Scores(Lenient):
    """Scores of one silo in a round."""

    val: Number | None = None
    test: Number | None = None


class RunEvent(Lenient):
    """The fields of events that readers use. Context: a site's own silo, whose entries alone stay; none: all."""

    event: Line
    strategy: Line = ""
    seed: Whole | None = None
    time: Number | str = ""
    message: Line = ""
    task: str = ""
    score: Line = ""
    silo: Line = ""
    round: Whole = 0
    rounds: Whole = 0
    number: Whole = 0
    closing: bool = False
    seconds: Number = 0.0
    bytes: Whole = 0
    bytes_down: Whole = 0
    bytes_up: Whole = 0
    # By silo; `silos` of a round's end is their number
    samples: dict[str, Whole] = Field({})
    silos: dict[str, Line] | list[str] | int = 0
    per_silo: dict[str, Scores] = Field({})
    epsilon: dict[str, Number] = Field({})
    rejected: dict[str, Line] = Field({})
    bounded: dict[str, Line] = Field({})

    @field_validator("samples", "silos", "per_silo", "epsilon", "rejected", "bounded")
    @classmethod
    def keep_own(cls, table: Any, info: ValidationInfo) -> Any:
        if info.context and isinstance(table, dict):
            return {name: value for name, value in table.items() if name == info.context}
        return table

    @model_validator(mode="after")
    def is_whole(self) -> Self:
        if lacking := NEEDED.get(self.event, set()) - self.model_fields_set:
            raise DataError(f"{self.event} has no {min(lacking)}")
        return self


def parse_event(line: bytes) -> Event | None:
    """Return the event in a line of ``progress.jsonl``; None if it is none."""
    try:
        event: Event = json.loads(line)
        RunEvent.model_validate(event)
    except (ValueError, RecursionError):
        return None
    return event


@dataclass
class Tail:
    """Reader of one file's new complete lines; each line is read once.

    ``position``: number of bytes read so far; ``largest``: maximum bytes read at once, -1: all.
    """

    file: Path
    position: int = 0
    largest: int = -1

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


def run_name(folder: Path) -> str:
    """Return the name that a run has in its federation's queue; else its directory's."""
    file = folder / NAME
    return file.read_text(encoding="utf-8") if file.is_file() else folder.resolve().name


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the record in a JSON file; None if there is no file. Raises UserError if it is damaged, OSError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; take it from a copy") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no record; take it from a copy")
    return value


class SummaryEntry(Lenient):
    """What readers of a run's entry in ``summary.json`` rely on."""

    strategy: str
    seed: int
    rounds: int
    silos: list[str]
    per_silo: dict[str, dict[str, float | dict[str, Any] | None]]
    final: dict[str, float | None]
    bytes_down: float
    bytes_up: float
    seconds: dict[str, Any]

    @model_validator(mode="after")
    def counts_samples(self) -> Self:
        for silo in self.silos:
            if not {"n_train", "n_test"} <= self.per_silo.get(silo, {}).keys():
                raise DataError(f"{silo} has no counts of samples")
        return self


class Summary(Lenient):
    """The content of ``summary.json``."""

    runs: list[SummaryEntry]
    hold_out: dict[str, Any] = Field({})


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of ``summary.json``; no runs if there is no file. Raises DataError if it is damaged."""
    mend = "take it from a copy, or delete it; then `silofl report` has history.csv only"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {"runs": []}
    parse_values(Summary, text, path, mend)
    content: dict[str, Any] = json.loads(text)
    return content


def find_entry(path: Path, which: tuple[str, int]) -> dict[str, Any] | None:
    """Return the entry of a run, by method and seed, in ``summary.json``; None if the run has not ended."""
    runs: list[dict[str, Any]] = read_summary(path)["runs"]
    return next((run for run in runs if which_of(run) == which), None)


def which_of(run: Mapping[str, Any]) -> tuple[str, int]:
    """Return method and seed of a run's entry."""
    return run["strategy"], run["seed"]
