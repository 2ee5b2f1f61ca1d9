"""Directories of a study's parallel runs: each run has ``workers/STRATEGY-SEED`` while it is executed.

There its process writes ``history.csv``, ``progress.jsonl`` and ``summary.json`` of this run only; its checkpoints are
in the study's directory. Only the process of the study writes the study's own files; it merges a run's folder into them
when the run is over. If all processes were killed, a folder remains, and the next process that opens the directory
merges it. The merge is idempotent, also after an interruption.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from typing import Any

from server.results.history import History, write_history
from server.results.run_directory import WORKERS, RunDirectory
from server.results.summary import add_to_summary, entries
from strategies.base.run_settings import RunSettings


class WorkerDirectories:
    """The runs' directories in a study's directory that this process has locked."""

    def __init__(self, directory: RunDirectory, runs: Sequence[RunSettings]) -> None:
        self.directory, self.runs = directory, runs
        self.order = [(run.common.strategy, run.common.seed) for run in runs]
        self._read: dict[str, int] = {}  # run -> bytes of its progress that are already copied to the study

    def of(self, run: RunSettings) -> RunDirectory:
        """Return the directory for this run's process."""
        return RunDirectory(self.directory.path, run.run_key)

    def hand_out(self) -> None:
        """Create a directory for every run, with its rows so far."""
        history = History(self.directory.history)
        for run, which in zip(self.runs, self.order, strict=True):
            part = self.of(run)
            part.own.mkdir(parents=True)
            write_history(part.history, history.of(*which))
            self._read[run.run_key] = 0

    def follow(self, run: RunSettings) -> list[dict[str, Any]]:
        """Copy the run's new lines of progress to the study's ``progress.jsonl``, and return them."""
        file, key, known = self.of(run).progress_file, run.run_key, set[str]()
        if not file.exists():
            return []
        if key not in self._read and self.directory.progress_file.exists():  # an earlier process may have copied some
            known.update(self.directory.progress_file.read_text().splitlines())
        with file.open("rb") as reading:
            reading.seek(self._read.get(key, 0))
            data = reading.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        self._read[key] = self._read.get(key, 0) + len(whole)
        lines = [line for line in whole.decode().splitlines() if line not in known]
        if lines:
            with self.directory.progress_file.open("a") as writing:
                writing.write("".join(f"{line}\n" for line in lines))
        return [json.loads(line) for line in lines]

    def take_back(self, run: RunSettings) -> list[dict[str, Any]]:
        """Move the run's results to the study's own files, and return its last lines of progress.

        Runs stand in the study's order in history and summary. Raises DataError if a process still holds the folder.
        """
        part, which = self.of(run), (run.common.strategy, run.common.seed)
        if not part.own.is_dir():
            return []
        with part.held():
            new_events = self.follow(run)
            if part.history.exists():
                others = [r for r in History(self.directory.history).rows if (r.strategy, r.seed) != which]
                rows = [*others, *History(part.history).rows]
                places = {which: place for place, which in enumerate(self.order)}
                rows.sort(key=lambda r: places.get((r.strategy, r.seed), len(places)))
                write_history(self.directory.history, rows)
            if part.summary.exists():
                add_to_summary(self.directory, entries(part), self.order)
            shutil.rmtree(part.own)
        return new_events

    def take_back_all(self) -> None:
        """Move the results of every run that has a directory (:meth:`take_back`)."""
        if (self.directory.path / WORKERS).is_dir():
            for run in self.runs:
                self.take_back(run)
            (self.directory.path / WORKERS).rmdir()
