"""The runs of a federation as an operator sees them: a line each, with name, state, round, owner and folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from partitions.common.errors import UserError
from partitions.common.output import columns
from server.deploy.control import Control, FlowerRun
from server.deploy.room.queue import INTERRUPTED, RUNNING, WAITING
from server.results.reading import Event, Tail

LATEST = 1 << 16  # bytes of a run's progress that are searched for its last round


class NamedRun(NamedTuple):
    """A run. ``place``: in the queue, 0: it does not wait; ``members``: numbers of its Flower runs, in their order."""

    name: str
    method: str
    state: str  # waiting, running, interrupted, completed, stopped, failed
    place: int
    round: int
    rounds: int
    owner: str
    folder: str
    details: str
    members: tuple[str, ...]

    @property
    def on(self) -> bool:
        """Whether it runs or waits."""
        return self.state in (RUNNING, WAITING)


def named_runs(
    control: Control, on_host: Callable[[Path], Path] = lambda folder: folder
) -> list[NamedRun]:
    """Return all runs, the latest first. ``on_host``: where a folder of the server's is on this machine."""
    by_name: dict[str, list[FlowerRun]] = {}
    runs = control.runs()
    # One without a name was interrupted, and another goes on with it
    for run in reversed([run for run in runs if run.name] or runs):
        by_name.setdefault(run.name or str(run.run_id), []).append(run)
    return [_named(name, runs, on_host) for name, runs in reversed(by_name.items())]


def _named(name: str, members: list[FlowerRun], on_host: Callable[[Path], Path]) -> NamedRun:
    now = next((run for run in members if run.status != "finished:completed"), members[-1])
    state, _, how = now.status.partition(":")
    place = int(now.details.removeprefix("place ")) if now.details.startswith("place ") else 0
    if now.details == INTERRUPTED:
        state, how = INTERRUPTED, ""
    elif state != "finished":
        state = WAITING if place else RUNNING
    out = str(now.settings.get("out", ""))
    folder = str(on_host(Path(out))) if out else ""
    last = last_round(Path(folder), now) if folder else {}
    return NamedRun(
        name,
        ",".join(dict.fromkeys(str(run.settings.get("strategy", "")) for run in members)),
        how or state,
        place,
        int(last.get("round", 0)),
        int(now.settings.get("rounds", last.get("rounds", 0))),
        now.owner,
        folder,
        "" if place or state == INTERRUPTED else now.details,
        tuple(str(run.run_id) for run in members),
    )


def last_round(folder: Path, run: FlowerRun) -> Event:
    """Return the last round in the progress of a run's folder; empty: none, or the folder is not on this machine."""
    file = folder / "progress.jsonl"
    start = file.stat().st_size - LATEST if file.is_file() else 0
    last: Event = {}
    for event in Tail(file, max(0, start)).events():
        ours = all(
            event.get(k) == run.settings.get(k, event.get(k)) for k in ("strategy", "seed")
        )
        if event["event"] == "round" and ours:
            last = event
    return last


def run_lines(runs: list[NamedRun]) -> list[str]:
    """Return a line for each run."""
    rows = [
        (
            run.name,
            f"{run.state} {run.place or ''}".strip(),
            f"{run.round}/{run.rounds}",
            *(run.method, run.owner, run.folder, " ".join(run.details.split())),
        )
        for run in runs
    ]
    return columns(rows) if rows else []


def find_named_run(runs: list[NamedRun], name: str) -> NamedRun | None:
    """Return the run of a name, or the only one that runs or waits; None: there is none.

    Raises UserError for a name of none, and without a name where there are several.
    """
    on = [run for run in runs if run.on]
    if name:
        matching = [run for run in runs if name in (run.name, *run.members)]
        if not matching:
            names = ", ".join(run.name for run in runs) or "none"
            raise UserError(f"there is no run {name} (there are: {names})")
        return matching[0]
    if len(on) > 1:
        names = ", ".join(f"{run.name} ({run.state})" for run in on)
        raise UserError(f"several runs are on or wait: {names}; say which: silofl stop RUN")
    return on[0] if on else None
