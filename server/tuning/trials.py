"""Trials: their runs, their scores, and their files.

    DIR/trials.csv               trial,strategy,state,rounds,score,KEY...
    DIR/best-STRATEGY.toml       the best trial's settings, a `--config` of `silofl simulate`
    DIR/tuning.json              the request and its cost, with the privacy cost
    DIR/trials/STRATEGY-0007/    a trial's run directory

Test data are not used: a score is taken from the history's validation rows only.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.common.names import guarded
from server.results.chosen import Chosen, mean
from server.results.history import History
from server.results.reading import read_events, read_summary
from server.results.run_directory import RunDirectory
from server.tuning.privacy import Releases, releases_of, together
from server.tuning.space import text_of
from strategies.base.run_settings import RunSettings, toml_text
from strategies.base.settings import Value

OBJECTIVES = ("mean", "worst")
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"


@dataclass
class Trial:
    """One trial of one method. ``score``: the objective on validation data; None without a score."""

    number: int
    strategy: str
    values: dict[str, Value]
    state: str = ""
    rounds: int = 0
    score: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    why: str = ""
    privacy: Releases = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.number:04d}"

    def row(self, keys: Sequence[str]) -> list[str]:
        """Return the trial's row of ``trials.csv``."""
        score = "" if self.score is None else repr(self.score)
        own = [guarded(text_of(self.values[key])) if key in self.values else "" for key in keys]
        return [str(self.number), self.strategy, self.state, str(self.rounds), score, *own]


@dataclass
class Cost:
    """Total cost of a method's trials."""

    trials: int = 0
    rounds: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Book:
    """The files of one tuning directory. ``asked``: everything that the trials depend on."""

    path: Path
    asked: Mapping[str, Any]
    keys: Sequence[str]
    trials: list[Trial] = field(default_factory=list)
    privacy: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # set at the end of the search

    def open(self) -> None:
        """Create or reopen the directory. Raises UserError if it holds another search or anything else."""
        file = self.path / "tuning.json"
        if file.is_file():
            try:
                before = json.loads(file.read_text())["asked"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{file} cannot be read ({error!r}); give --out a new directory") from None
            asked = json.loads(json.dumps(dict(self.asked)))
            if changed := sorted(key for key in {*before, *asked} if before.get(key) != asked.get(key)):
                raise UserError(f"{self.path} holds another search: {', '.join(changed)} differ; give --out a new one")
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"{self.path} is not empty and holds no search: give --out a new directory")
        self.path.mkdir(parents=True, exist_ok=True)
        self.write()

    def directory(self, trial: Trial) -> RunDirectory:
        return RunDirectory(self.path / "trials" / trial.name)

    def outcome_file(self, trial: Trial) -> Path:
        return self.directory(trial).path / "outcome.json"

    def outcome(self, trial: Trial) -> dict[str, Any] | None:
        """Return the stored outcome of a trial; None if it has not ended."""
        file = self.outcome_file(trial)
        if not file.is_file():
            return None
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def keep(self, trial: Trial) -> None:
        """Store the outcome of a trial on disk."""
        found = {key: value for key, value in asdict(trial).items() if key not in ("number", "strategy", "values")}
        write_atomically(self.outcome_file(trial), json.dumps(found, indent=1) + "\n")

    def write(self) -> None:
        """Write the present state to ``trials.csv`` and ``tuning.json``."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(["trial", "strategy", "state", "rounds", "score", *self.keys])
        writer.writerows(trial.row(self.keys) for trial in self.trials if trial.state)
        write_atomically(self.path / "trials.csv", buffer.getvalue())
        cost = {strategy: asdict(found) for strategy, found in self.costs().items()}
        found = {"asked": dict(self.asked), "cost": cost, "privacy": self.privacy}
        text = json.dumps(found, indent=1, ensure_ascii=False)
        write_atomically(self.path / "tuning.json", text + "\n")

    def costs(self) -> dict[str, Cost]:
        """Return the cost of each method's trials so far, including failed trials."""
        found: dict[str, Cost] = {}
        for trial in self.trials:
            cost = found.setdefault(trial.strategy, Cost())
            cost.trials += bool(trial.state)
            cost.rounds += trial.rounds
            cost.bytes += trial.bytes
            cost.seconds += trial.seconds
        return found

    def rounds_done(self, trial: Trial) -> int:
        """Return the last round in a trial's history, without the closing evaluation."""
        directory = self.directory(trial)
        if directory.summary.exists():
            return max((int(run["rounds"]) for run in read_summary(directory.summary)["runs"]), default=0)
        rows = History(directory.history).rows if directory.history.exists() else []
        return max((row.round for row in rows if row.metric == "round_seconds"), default=0)

    def count(self, trial: Trial, run: RunSettings) -> None:
        """Set a trial's cost so far: rounds, bytes, seconds, and releases with differential privacy."""
        file = self.directory(trial).history
        rows = History(file).rows if file.exists() else []
        trial.rounds = self.rounds_done(trial)
        trial.bytes = sum(int(row.value) for row in rows if row.metric in ("bytes_down", "bytes_up"))
        trial.seconds = sum(row.value for row in rows if row.metric == "round_seconds")
        trial.privacy = releases_of(self.directory(trial), run)

    def finish(self) -> None:
        """Write the total privacy cost of all trials, and of each method's trials."""
        if not any(trial.privacy for trial in self.trials):
            return
        self.privacy = {"all": together(trial.privacy for trial in self.trials)}
        for name in self.costs():
            self.privacy[name] = together(trial.privacy for trial in self.trials if trial.strategy == name)
        self.write()

    def write_best(self, trial: Trial, run: RunSettings) -> Path:
        """Write the settings of a method's best trial to ``best-STRATEGY.toml``."""
        kept = {key: value for key, value in run.flat().items() if key not in ("resume", "out")}
        file = self.path / f"best-{trial.strategy}.toml"
        write_atomically(file, f"# {trial.name}: {trial.score!r} on validation data\n{toml_text(kept)}")
        return file


def score_of(directory: RunDirectory, run: RunSettings, objective: str, until: int = 0) -> float | None:
    """Return the validation score at the round that the report would show; None if no silo has one.

    ``objective``: the unweighted ``mean`` over silos, or the ``worst`` silo. ``until``: last round to use; 0: all.
    """
    rows = History(directory.history).of(run.common.strategy, run.common.seed) if directory.history.exists() else []
    task = next((str(score) for score in scores_in(directory)), "accuracy")
    chosen = Chosen(run.strategy.info.reports, task)
    for number in sorted({row.round for row in rows if not until or row.round <= until}):
        chosen.add([row for row in rows if row.round == number and row.split == "val"])
    if not chosen.best:
        return None
    return mean(chosen.best) if objective == "mean" else min(chosen.best.values())


def scores_in(directory: RunDirectory) -> list[str]:
    """Return the score names in a run's events: one, once a round is done."""
    rounds = (event for event in read_events(directory.progress_file) if event["event"] == "round")
    return list(dict.fromkeys(event["score"] for event in rounds if "score" in event))
