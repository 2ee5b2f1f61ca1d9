"""Trials: their runs, their scores, and their files.

    DIR/trials.csv               trial,strategy,state,rounds,score,KEY...
    DIR/best-STRATEGY.toml       the best trial's settings, a `--config` of `silofl simulate`
    DIR/tuning.json              the request and its cost, with the privacy cost
    DIR/optuna.log               Optuna's storage: the trials, their values, states and scores
    DIR/trials/STRATEGY-0007/    a trial's run directory

Test data are not used: a score is taken from the history's validation rows only.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from client.privacy.private_round import KEPT
from models.privacy.accountant import epsilon_of
from partitions.common.errors import RunFailedError, UserError
from partitions.common.files import hold_lock, make_folder, write_atomically
from partitions.common.names import guard_formula
from partitions.common.settings import toml_text
from server.results.history import Chosen, History, Row, mean, spent_by_silo
from server.results.manifest import MANIFEST
from server.results.reading import read_events, read_json, read_summary
from server.results.run_directory import LOCK, RunDirectory, newest_states
from server.tuning.space import text_of
from strategies.base.run_settings import RunSettings
from strategies.base.settings import Value

OBJECTIVES = ("mean", "worst")
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
STORED = {COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}
STORAGE = "optuna.log"
# Silo -> delta, epsilon and the releases (noise, rate, steps)
Releases = dict[str, dict[str, Any]]


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


@dataclass
class Book:
    """The files of one tuning directory. ``request``: everything that the trials depend on."""

    path: Path
    request: Mapping[str, Any]
    keys: Sequence[str]
    trials: list[Trial] = field(default_factory=list)
    # Set at the end of the search
    privacy: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    storage: JournalStorage = field(init=False)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create or reopen the directory, and lock it.

        Raises UserError if it holds another search or anything else, DataError if another process searches there.
        """
        file, log = self.path / "tuning.json", self.path / STORAGE
        if (record := read_json(file)) is not None:
            before = record.get("asked", {})
            request = json.loads(json.dumps(dict(self.request)))
            if changed := sorted(
                key for key in {*before, *request} if before.get(key) != request.get(key)
            ):
                raise UserError(
                    f"{self.path} holds another search: {', '.join(changed)} differ; give --out a new one"
                )
            if not log.is_file():
                raise UserError(
                    f"{self.path} holds a search of silofl 0.2, or lost {STORAGE}; give --out a new one"
                )
        elif self.path.exists() and (
            not self.path.is_dir()
            or any(f.name not in (STORAGE, LOCK) for f in self.path.iterdir())
        ):
            raise UserError(
                f"{self.path} is not empty and holds no search: give --out a new directory"
            )
        make_folder(self.path)
        with hold_lock(self.path / LOCK, f"{self.path}: another silofl tune searches there"):
            if log.is_file():  # a line that was cut off by a crash
                data = log.read_bytes()
                os.truncate(log, data.rfind(b"\n") + 1)
            self.storage = JournalStorage(JournalFileBackend(str(log)))
            self.write()
            yield

    def study(self, strategy: str) -> optuna.Study:
        """Return Optuna's study of a method, with the trials so far."""
        options: dict[str, Any] = {"direction": "maximize", "load_if_exists": True}
        return optuna.create_study(storage=self.storage, study_name=strategy, **options)

    def trial(self, study: optuna.Study, number: int) -> Trial:
        """Return a stored trial, with its state if it has ended."""
        stored = study.get_trials(deepcopy=False)[number]
        trial = Trial(number, study.study_name, dict(stored.params))
        trial.why = study.user_attrs.get(trial.name, "")
        trial.state = next(
            (name for name, state in STORED.items() if state == stored.state), ""
        )
        self.trials.append(trial)
        return trial

    def end(self, study: optuna.Study, trial: Trial, state: str) -> None:
        """Store the final state of a trial."""
        if not trial.state:
            if trial.why:
                study.set_user_attr(trial.name, trial.why)
            study.tell(trial.number, trial.score if state == COMPLETE else None, STORED[state])
        trial.state = state
        self.write()

    def directory(self, trial: Trial) -> RunDirectory:
        return RunDirectory(self.path / "trials" / trial.name)

    def write(self) -> None:
        """Write the present state to ``trials.csv`` and ``tuning.json``."""
        columns = ["trial", "strategy", "state", "rounds", "score", *self.keys]
        rows = [
            {
                **{key: guard_formula(text_of(value)) for key, value in trial.values.items()},
                **{key: getattr(trial, key) for key in ("strategy", "state", "rounds")},
                "trial": trial.number,
                "score": "" if trial.score is None else repr(trial.score),
            }
            for trial in self.trials
            if trial.state
        ]
        text = pd.DataFrame(rows, columns=columns).to_csv(index=False)
        write_atomically(self.path / "trials.csv", text)
        record = {"asked": dict(self.request), "cost": self.costs(), "privacy": self.privacy}
        text = json.dumps(record, indent=1, ensure_ascii=False)
        write_atomically(self.path / "tuning.json", text + "\n")

    def of(self, strategy: str) -> list[Trial]:
        """Return a method's trials."""
        return [trial for trial in self.trials if trial.strategy == strategy]

    def costs(self) -> dict[str, dict[str, float]]:
        """Return the cost of each method's trials so far, including failed trials."""
        return {
            strategy: {"trials": sum(bool(trial.state) for trial in self.of(strategy))}
            | {
                key: sum(getattr(trial, key) for trial in self.of(strategy))
                for key in ("rounds", "bytes", "seconds")
            }
            for strategy in dict.fromkeys(trial.strategy for trial in self.trials)
        }

    def rounds_done(self, trial: Trial) -> int:
        """Return the last round in a trial's history, without the closing evaluation."""
        directory = self.directory(trial)
        if runs := read_summary(directory.summary)["runs"]:
            return int(runs[0]["rounds"])
        rows = trial_rows(directory)
        return max((row.round for row in rows if row.metric == "round_seconds"), default=0)

    def count(self, trial: Trial, run: RunSettings) -> None:
        """Set a trial's cost so far: rounds, bytes, seconds, and releases with differential privacy."""
        directory = self.directory(trial)
        rows = trial_rows(directory)
        trial.rounds = self.rounds_done(trial)
        sent = (row for row in rows if row.metric in ("bytes_down", "bytes_up"))
        trial.bytes = sum(int(row.value) for row in sent)
        trial.seconds = sum(row.value for row in rows if row.metric == "round_seconds")
        trial.privacy = releases_of(directory, run)

    def finish(self) -> None:
        """Write the total privacy cost of all trials, and of each method's trials."""
        if not any(trial.privacy for trial in self.trials):
            return
        self.privacy = {"all": together(trial.privacy for trial in self.trials)}
        for name in self.costs():
            self.privacy[name] = together(trial.privacy for trial in self.of(name))
        self.write()

    def write_best(self, trial: Trial, run: RunSettings) -> Path:
        """Write the settings of a method's best trial to ``best-STRATEGY.toml``."""
        kept = {key: value for key, value in run.flat().items() if key not in ("resume", "out")}
        file = self.path / f"best-{trial.strategy}.toml"
        write_atomically(
            file, f"# {trial.name}: {trial.score!r} on validation data\n{toml_text(kept)}"
        )
        return file


def trial_rows(directory: RunDirectory) -> list[Row]:
    """Return the history of a trial's run so far."""
    return History.stored(directory.history).rows


def trial_score(
    directory: RunDirectory, run: RunSettings, objective: str, until: int
) -> float | None:
    """Return the validation score at the round that the report would show; None if no silo has one.

    ``objective``: the unweighted ``mean`` over silos, or the ``worst`` silo. ``until``: last round to use; 0: all.
    Raises RunFailedError if a silo has no score because it diverged or was left out.
    """
    rows = [row for row in trial_rows(directory) if not until or row.round <= until]
    scores = (
        e["score"]
        for e in read_events(directory.progress_file)
        if e["event"] == "round" and "score" in e
    )
    chosen = Chosen(run.strategy.info.reports, next(scores, "accuracy"))
    for number in sorted({row.round for row in rows}):
        chosen.add([row for row in rows if row.round == number and row.split == "val"])
    # A mean of the others would favour settings with which a silo diverges
    if lost := (unmeasured(rows) & validating(directory, run)) - chosen.best.keys():
        raise RunFailedError(
            f"no validation score of {', '.join(sorted(lost))}: left out, or its training diverged"
        )
    if not chosen.best:
        return None
    return mean(chosen.best) if objective == "mean" else min(chosen.best.values())


def unmeasured(rows: Iterable[Row]) -> set[str]:
    """Return the silos that were left out of a round, or whose validation loss was not finite in one."""
    return {
        row.silo
        for row in rows
        if row.metric == "rejected"
        or ((row.split, row.metric) == ("val", "loss") and not math.isfinite(row.value))
    }


def validating(directory: RunDirectory, run: RunSettings) -> set[str]:
    """Return the silos of a trial that have enough validation data for a score, by its manifest."""
    silos = (read_json(directory.path / MANIFEST) or {"silos": []})["silos"]
    least = max(1, run.common.min_metric_samples)
    return {silo.get("origin", silo["name"]) for silo in silos if silo["n_val"] >= least}


def releases_of(directory: RunDirectory, run: RunSettings) -> Releases:
    """Return the releases of each silo in a trial so far. Empty without differential privacy.

    Noise and rate come from the state, all steps from the history: a failed trial may not have saved its last state.
    """
    if run.privacy is None:
        return {}
    states = newest_states(directory.checkpoint(run.run_key) / "silos")
    by_silo: Releases = {}
    for silo, cost in spent_by_silo(trial_rows(directory)).items():
        kept = states[silo].numbers.get(KEPT, []) if silo in states else []
        steps = sum(release["steps"] for release in kept)
        releases = [dict(release) for release in kept]
        if releases:
            releases[0]["steps"] += max(cost.steps - steps, 0)
        by_silo[silo] = {"delta": cost.delta, "epsilon": cost.epsilon, "releases": releases}
    return by_silo


def together(trials: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return total epsilon and delta by silo of several trials' releases (:func:`releases_of`).

    A silo's trials train on the same patients. They compose as its runs do at a hospital (client/site/budget): the
    Rényi divergences of all noised steps are added. For a trial whose states are lost, both are added to those of the
    others (basic composition).
    """
    every = defaultdict[str, list[Mapping[str, Any]]](list)
    for silo, releases in (pair for trial in trials for pair in trial.items()):
        every[silo].append(releases)
    total = {}
    for silo, of_silo in sorted(every.items()):
        lost = [trial for trial in of_silo if not trial["releases"]]
        known = [release for trial in of_silo for release in trial["releases"]]
        delta = max((trial["delta"] for trial in of_silo if trial["releases"]), default=0.0)
        epsilon = (epsilon_of(known, delta) if known else 0.0) + sum(
            trial["epsilon"] for trial in lost
        )
        total[silo] = {
            "epsilon": epsilon,
            "delta": delta + sum(trial["delta"] for trial in lost),
        }
    return total
