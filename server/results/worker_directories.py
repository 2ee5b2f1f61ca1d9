"""Directories of a study's parallel runs: each run has ``workers/STRATEGY-SEED`` while it is executed.

There its process writes ``history.csv``, ``progress.jsonl`` and ``summary.json`` of this run only; its checkpoints are
in the study's directory. Only the process of the study writes the study's own files; it merges a run's folder into them
when the run is over. If all processes were killed, a folder remains, and the next process that opens the directory
merges it. The merge is idempotent, also after an interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.results.history import History, history_file, write_history
from server.results.reading import Tail, parse_event, read_summary
from server.results.run_directory import WORKERS, RunDirectory
from server.results.summary import add_to_summary
from strategies.base.run_settings import RunSettings


@dataclass(eq=False)
class WorkerDirectories:
    """The runs' directories in a study's directory that this process has locked."""

    directory: RunDirectory
    runs: Sequence[RunSettings]

    def __post_init__(self) -> None:
        self.order = [run.common.which for run in self.runs]
        # Run -> reader of its progress, whose lines are copied to the study
        self._tails: dict[str, Tail] = {}

    def of(self, run: RunSettings) -> RunDirectory:
        """Return the directory for this run's process."""
        return RunDirectory(self.directory.path, run.run_key)

    def hand_out(self) -> None:
        """Create a directory for every run, with its rows so far."""
        history = History(self.directory.history)
        for run, which in zip(self.runs, self.order, strict=True):
            part = self.of(run)
            part.folder.mkdir(parents=True)
            write_history(part.history, history.of(*which))
            self._tails[run.run_key] = Tail(part.progress_file)

    def follow(self, run: RunSettings) -> list[dict[str, Any]]:
        """Copy the run's new lines of progress to the study's ``progress.jsonl``, and return them."""
        key = run.run_key
        known = set[bytes]()
        study = self.directory.progress_file
        if key not in self._tails:  # an earlier process may have copied some
            self._tails[key] = Tail(self.of(run).progress_file)
            known.update(Tail(study).lines())
        lines = [line for line in self._tails[key].lines() if line not in known]
        if lines:
            with study.open("ab") as writing:
                writing.write(b"".join(line + b"\n" for line in lines))
        return [event for line in lines if (event := parse_event(line)) is not None]

    def take_back(self, run: RunSettings) -> list[dict[str, Any]]:
        """Move the run's results to the study's own files, and return its last lines of progress.

        Runs stand in the study's order in history and summary. Raises DataError if a process still holds the folder.
        """
        part = self.of(run)
        which = run.common.which
        if not part.folder.is_dir():
            return []
        with part.hold():
            new_events = self.follow(run)
            if history_file(part.history).exists():
                others = History(self.directory.history).rows
                rows = [*(r for r in others if r.which != which), *History(part.history).rows]
                places = {which: place for place, which in enumerate(self.order)}
                rows.sort(key=lambda r: places.get(r.which, len(places)))
                write_history(self.directory.history, rows)
            if part.summary.exists():
                add_to_summary(self.directory, read_summary(part.summary)["runs"], self.order)
            shutil.rmtree(part.folder)
        return new_events

    def take_back_all(self) -> None:
        """Move the results of every run that has a directory (:meth:`take_back`)."""
        if (self.directory.path / WORKERS).is_dir():
            for run in self.runs:
                self.take_back(run)
            (self.directory.path / WORKERS).rmdir()
