"""Search: Optuna proposes values, trials are run, and their scores are returned; a seed determines the trials.

Optuna's storage in the directory keeps the trials, so a restarted search goes on with those that have not ended. Its
samplers depend on the seed, on the trial's number and on the scores so far. ``tpe`` proposes :data:`BATCH` trials at a
time for any number of workers, so that the number of workers changes no trial.

``random``: Bergstra and Bengio, JMLR 2012. ``tpe``: Bergstra et al., NeurIPS 2011. ``halving``: successive halving,
Jamieson and Talwalkar, AISTATS 2016, with rounds as the resource.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from tqdm import tqdm

from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.common.files import is_full
from server.results.run_directory import RunDirectory
from server.results.study import check_run, study_config
from server.results.worker_directories import WorkerDirectories
from server.simulation.simulate import run_one
from server.simulation.workers import Engine, Job
from server.tuning.space import Space
from server.tuning.trials import COMPLETE, FAILED, OBJECTIVES, PRUNED, Book, Trial, trial_score
from strategies.base.run_settings import RunSettings, defaults, parse_settings
from strategies.base.settings import TEXTBOOK, choose

BATCH = 4  # trials that tpe proposes at a time
ETA = 3  # 1/ETA of a rung's trials go on, with ETA times the rounds
SAMPLERS = ("random", "tpe", "halving")


@dataclass(frozen=True)
class Request:
    """Request for a search. ``values``: settings common to all trials; ``trials``: number of trials per method."""

    values: Mapping[str, object]
    strategies: Sequence[str]
    space: Space
    trials: int
    sampler: str
    objective: str

    def check(self) -> None:
        """Raise UserError for an invalid request, before anything is written."""
        choose("--sampler", self.sampler, SAMPLERS)
        choose("--objective", self.objective, OBJECTIVES)
        if self.trials < 1:
            raise UserError(f"--trials {self.trials}: at least 1 is needed here")
        for strategy in self.strategies:
            if not self.space.of(strategy, self.strategies):
                raise UserError(
                    f"--space has nothing for {strategy}: name one of its settings, or a common one"
                )
            check_run(parse_settings({**self.values, "strategy": strategy}))

    def settings_asked(self) -> dict[str, object]:
        """Return everything that the trials depend on, for ``tuning.json``."""
        return {
            "settings": {
                key: str(value)
                for key, value in self.values.items()
                if key not in ("out", "resume", "threads")
            },
            "strategies": list(self.strategies),
            "space": {key: repr(form) for key, form in self.space.distributions.items()},
            "trials": self.trials,
            "sampler": self.sampler,
            "objective": self.objective,
        }


def tune(request: Request, out: Path, engine: Engine | None, *, quiet: bool = False) -> Book:
    """Search, and return the results. Raises UserError, or RunFailedError if a method has no trial with a score."""
    request = replace(request, values={**TEXTBOOK, **request.values})
    request.check()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # The bar replaces a line per silo and round
    logging.getLogger("flwr").setLevel(logging.WARNING)
    book = Book(out, request.settings_asked(), list(request.space.distributions))
    total = request.trials * len(request.strategies)
    with book.hold():
        with tqdm(total=total, unit="trial", file=sys.stderr, disable=quiet or None) as bar:
            searcher = Searcher(request, book, engine, bar)
            for strategy in request.strategies:
                searcher.search(strategy)
        book.finish()
        return with_best(request, book)


def with_best(request: Request, book: Book) -> Book:
    """Write each method's best trial. Raises RunFailedError if a method has none with a score."""
    hopeless = []
    for strategy in request.strategies:
        trials = book.of(strategy)
        whole = [
            trial for trial in trials if trial.state == COMPLETE and trial.score is not None
        ]
        if whole:
            best = max(whole, key=lambda trial: (trial.score, -trial.number))
            book.write_best(
                best, parse_settings({**request.values, **best.values, "strategy": strategy})
            )
        else:
            hopeless.append(f"{strategy}: no trial has a score ({trials[0].why})")
    if hopeless:
        raise RunFailedError("; ".join(hopeless))
    return book


@dataclass
class Searcher:
    """Execution of one search."""

    request: Request
    book: Book
    engine: Engine | None
    bar: tqdm[Any]

    def search(self, strategy: str) -> None:
        """Execute all trials of one method that have not ended."""
        values = {**defaults(), **self.request.values}
        seed, dataset = str(values["seed"]), str(values["dataset"])
        tpe = self.request.sampler == "tpe"
        sampler = optuna.samplers.TPESampler if tpe else optuna.samplers.RandomSampler
        self.study = self.book.study(strategy)
        distributions = self.request.space.of(strategy, self.request.strategies)
        size = BATCH if tpe else self.request.trials
        for start in range(0, self.request.trials, size):
            end = min(start + size, self.request.trials)
            for number in range(len(self.study.trials), end):
                self.study.sampler = sampler(seed=seed_of(seed, dataset, strategy, number))
                self.study.ask(distributions)
            trials = [self.book.trial(self.study, number) for number in range(start, end)]
            if self.request.sampler == "halving":
                self.halve(trials)
            else:
                self.execute(trials, 0)

    def halve(self, trials: Sequence[Trial]) -> None:
        """Execute a few rounds of all trials, then in each rung more rounds of fewer trials, the best so far."""
        settings = parse_settings({**self.request.values, "strategy": trials[0].strategy})
        *rungs, _ = budgets(len(trials), settings.common.rounds)
        going = list(trials)
        for until in rungs:
            self.execute(going, until)
            going = [trial for trial in going if trial.state != FAILED]
            ranked = sorted(going, key=lambda t: (-(t.score or 0.0), t.number))
            kept = ranked[: max(1, len(going) // ETA)]
            for trial in (t for t in going if t not in kept):
                self.end(trial, PRUNED)
            going = sorted(kept, key=lambda t: t.number)
        self.execute(going, 0)

    def settings(self, trial: Trial) -> RunSettings:
        """Return the settings of a trial's run. Raises UserError if its values are incompatible."""
        directory = self.book.directory(trial)
        exists = (directory.path / "config.toml").is_file()
        values = {**self.request.values, **trial.values, "strategy": trial.strategy}
        # Evidence uses test data, which trials must not use.
        return parse_settings(
            {**values, "out": str(directory.path), "resume": exists, "evidence": "off"}
        )

    def execute(self, trials: Sequence[Trial], until: int) -> None:
        """Run the trials up to round ``until`` (0: to their end) if they are not there yet, and set their scores."""
        by_name = {trial.name: trial for trial in trials}
        with contextlib.ExitStack() as held:
            jobs = {t.name: job for t in trials if (job := self.job(t, until, held))}
            for trial in trials:
                if trial.name not in jobs and trial.state != FAILED:
                    self.measure(trial, until)
            for name, why in self.ends(jobs):
                if why:
                    self.fail(by_name[name], why)
                else:
                    self.measure(by_name[name], until)

    def job(self, trial: Trial, until: int, held: contextlib.ExitStack) -> Job | None:
        """Return the job for a trial, and lock its directory; None if nothing has to be run."""
        if trial.state != FAILED and (
            self.book.rounds_done(trial) >= until > 0
            or self.book.directory(trial).summary.exists()
        ):
            return None
        try:
            if trial.state == FAILED:
                raise UserError(trial.why)
            run = self.settings(trial)
            opened = RunDirectory.open(
                Path(run.common.out), study_config([run]), resume=run.common.resume
            )
            directory = held.enter_context(opened)
        except UserError as error:
            self.fail(trial, str(error))
            return None
        WorkerDirectories(directory, [run]).take_back_all()
        return Job(directory, run, until)

    def measure(self, trial: Trial, until: int) -> None:
        """Set a trial's score so far. Raises UserError if there is no validation score to compare trials."""
        run = self.settings(trial)
        self.book.count(trial, run)
        try:
            trial.score = trial_score(
                self.book.directory(trial), run, self.request.objective, until
            )
        except RunFailedError as error:
            self.fail(trial, str(error))
            return
        if trial.score is None:
            raise UserError(
                f"{trial.name} has no validation score, by which trials are compared: set validation = 0.2, and "
                "evaluate-every = 1"
            )
        if not until:
            self.end(trial, COMPLETE)

    def ends(self, jobs: Mapping[str, Job]) -> Iterator[tuple[str, str]]:
        """Execute the jobs; yield the name of each that has ended and the reason of its failure (empty: none)."""
        if not jobs:
            return
        if self.engine is None:
            for name, job in jobs.items():
                why = ""
                try:
                    run_one(job.run, job.directory, until=job.until)
                except (RunFailedError, UserError, DataError) as error:
                    if is_full(error):
                        raise
                    why = str(error)
                yield name, why
            return
        directories = {
            name: WorkerDirectories(job.directory, [job.run]) for name, job in jobs.items()
        }
        for part in directories.values():
            part.hand_out()
        with contextlib.closing(self.engine(jobs)) as engine:
            for ended in engine:
                for name, code in ended.items():
                    events = directories[name].follow(jobs[name].run)
                    directories[name].take_back_all()
                    errors = [
                        str(event["message"]) for event in events if event["event"] == "error"
                    ]
                    errors.insert(0, f"its process ended with code {code}")
                    yield name, errors[-1] if code else ""

    def fail(self, trial: Trial, why: str) -> None:
        """End a trial without a result. Its values may be the cause, so the search goes on."""
        self.book.directory(trial).path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(UserError):  # invalid values, so no run and no cost
            self.book.count(trial, self.settings(trial))
        trial.why = " ".join(why.split())
        trial.score = None
        self.end(trial, FAILED)

    def end(self, trial: Trial, state: str) -> None:
        """Store the final state of a trial."""
        self.book.end(self.study, trial, state)
        self.bar.update(sum(bool(trial.state) for trial in self.book.trials) - self.bar.n)


def seed_of(seed: str, dataset: str, strategy: str, number: int) -> int:
    """Return the sampler's seed for a trial, which differs between data sets and methods."""
    text = json.dumps(["tune", seed, dataset, strategy, number])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def budgets(trials: int, rounds: int) -> list[int]:
    """Return the rounds of each rung, the last with all rounds: 3, 10, 30, 90 for 27 trials of 90 rounds."""
    steps = int(math.log(max(1, min(trials, rounds)), ETA) + 1e-9)
    return [max(1, rounds // ETA**step) for step in range(steps, -1, -1)]
