"""``silofl simulate``: one run, or a study of several methods and seeds, in this process."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from client.app import app as client_app
from partitions.common.errors import UserError
from partitions.common.files import is_full
from partitions.simulated import forget_changed, names_of
from server.app import errors_recorded, record_end
from server.report.study import StudyResults
from server.report.write import silo_table, try_report, write_manifest
from server.results.history import History
from server.results.hold_out import (
    Groups,
    groups_of,
    part_of,
    parts_of,
    read_groups,
    runs_without,
    with_local,
    write_groups,
    write_results,
)
from server.results.registration import keep_study
from server.results.run_directory import CONFIG, RunDirectory, default_out, read_toml
from server.results.study import TUNING, check_run, study_config, study_runs, tuned_study
from server.results.summary import write_summary
from server.results.tracking import Tracker, open_trackers, round_values
from server.results.worker_directories import WorkerDirectories
from server.run.loop import Progress, RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from strategies.base.run_settings import RunSettings
from strategies.base.settings import TEXTBOOK

# Executes a study's runs: one after the other (`run_all`), or those of `server.simulation.workers`; the last is `quiet`
StudyExecutor = Callable[[Sequence[RunSettings], RunDirectory, Sequence[Tracker], bool], None]


def check_trains(run: RunSettings) -> None:
    """Raise UserError for an evaluation or a survey, which have commands of their own."""
    if not run.strategy.info.trains:
        name = run.common.strategy
        raise UserError(f"strategy = {name} trains nothing: silofl {name} runs it")


def simulate(
    values: Mapping[str, object],
    *,
    quiet: bool = False,
    log: Sequence[str] = (),
    executor: StudyExecutor | None = None,
    hold_out: str | None = None,
    tuned: Sequence[Path] = (),
    study: str = "",
) -> Path:
    """Run the study in this process or with another executor, and return its directory.

    The report is written even if a run fails; the comparison per silo is printed. ``log``: tracking libraries.
    ``hold_out``: hospitals without which the methods are also trained, or ``each``. ``tuned``: searches of ``silofl
    tune``. ``study``: text of the run's study. Raises UserError, or RunFailedError if a run fails.
    """
    if tuned and hold_out is not None:
        raise UserError(
            "--hold-out: not with --tuned: the search has trained and validated at these hospitals"
        )
    values, record = tuned_study(tuned, values) if tuned else (values, {})
    values = textbook(values)
    trackers = open_trackers(log)
    groups, runs, without = plan_runs(values, hold_out)
    every = [*runs, *without]
    for run in every:
        check_trains(run)
        check_run(run)
    first = runs[0].common
    config = study_config(runs)
    out = Path(first.out) if first.out else default_out(str(config["strategy"]))
    with contextlib.ExitStack() as held:
        directory = held.enter_context(RunDirectory.open(out, config, resume=first.resume))
        keep_study(directory.path, study)
        if groups:
            write_groups(directory, groups)
        if record:
            directory.write_json(TUNING, record)
        for part, part_runs in parts_of(directory, every):
            if part.path != directory.path:
                resume = first.resume and (part.path / "config.toml").exists()
                held.enter_context(
                    RunDirectory.open(part.path, study_config(part_runs), resume=resume)
                )
            WorkerDirectories(part, part_runs).take_back_all()
        (executor or run_all)(every, directory, trackers, quiet)
    if not quiet:
        print(silo_table(StudyResults(directory.path)))
    return directory.path


def textbook(values: Mapping[str, object]) -> dict[str, object]:
    """Return a simulation's settings: the method as published, unless the settings or the resumed run say otherwise."""
    config = Path(str(values.get("out") or "")) / CONFIG
    resumes = str(values.get("resume", "")).lower() == "true" and config.is_file()
    before = read_toml(config) if resumes else {}
    return {**{key: before.get(key, value) for key, value in TEXTBOOK.items()}, **values}


def plan_runs(
    values: Mapping[str, object], hold_out: str | None
) -> tuple[Groups, list[RunSettings], list[RunSettings]]:
    """Return the held-out groups, the runs with all silos, and the runs without each group. Raises UserError.

    A resumed study reads its groups from its directory.
    """
    first = study_runs(values)[0].common
    forget_changed(first.dataset)
    before = groups_of(Path(first.out)) if first.resume and first.out else []
    names = () if hold_out is None else names_of(first.dataset, first.partition, first.silos)
    groups = before if hold_out is None else read_groups(hold_out, names)
    if first.resume and groups != before:
        raise UserError(
            f"--hold-out {hold_out}: {first.out} was run with another, or without: give --out a new directory"
        )
    if groups and first.hold_out:
        raise UserError(
            f"--hold-out {hold_out} and hold-out = {first.hold_out}: one of them is wanted"
        )
    if not groups:
        return [], study_runs(values), []
    return groups, study_runs(with_local(values)), runs_without(values, groups)


def run_all(
    runs: Sequence[RunSettings],
    directory: RunDirectory,
    trackers: Sequence[Tracker],
    quiet: bool,
) -> None:
    """Execute the runs one after the other with a progress bar; write the reports even if a run fails."""
    # The progress bar replaces one log line per silo and round.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        with one_line_of_warnings(quiet), StudyBar(runs, quiet) as bar:
            for run in runs:
                run_one(run, part_of(directory, run), bar, trackers)
    except BaseException as error:
        if is_full(error):  # the disk has no room for a report either
            raise UserError(
                f"{error.filename}: {error.strerror}; free some, then {how_to_continue(directory)}"
            ) from None
        try_reports(runs, directory)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(how_to_continue(directory)) from None
        raise
    try_reports(runs, directory)


class Warnings(logging.Filter):
    """Withholds the warnings of a logger, and stores them by the text that was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, list[str]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is shown now."""
        if record.levelno == logging.WARNING:
            self.lines.setdefault(record.msg, []).append(record.getMessage())
        return record.levelno != logging.WARNING

    def __str__(self) -> str:
        """Return the first warning of each kind, with the number of others like it, in one line."""
        return "; ".join(
            texts[0] + (f" (and {len(texts) - 1} like it)" if texts[1:] else "")
            for texts in self.lines.values()
        )


@contextlib.contextmanager
def one_line_of_warnings(quiet: bool) -> Iterator[None]:
    """Print the warnings of a study as one line behind its progress bar; ``quiet`` leaves them to the log."""
    withheld = Warnings()
    logger = logging.getLogger("flwr")
    try:
        if not quiet:
            logger.addFilter(withheld)
        yield
    finally:
        logger.removeFilter(withheld)
        if withheld.lines:
            print(f"note: {withheld}; the report names all", file=sys.stderr)


def try_reports(runs: Sequence[RunSettings], directory: RunDirectory) -> None:
    """Write the report of each of the study's directories, after the results of hospitals that were held out."""
    write_results(directory)
    for part, _ in parts_of(directory, runs):
        try_report(part.path)


def how_to_continue(directory: RunDirectory) -> str:
    config_file = directory.path / "config.toml"
    return f"continue with silofl simulate --config {config_file} --out {directory.path} --set resume=true"


class StudyBar(contextlib.AbstractContextManager["StudyBar"]):
    """Progress bar of a study, with a step for each round."""

    def __init__(self, runs: Sequence[RunSettings], quiet: bool) -> None:
        total = sum(run.common.rounds for run in runs)
        self.bar: tqdm[Any] = tqdm(
            total=total,
            unit="round",
            file=sys.stderr,
            disable=quiet or None,  # and where standard error is no terminal
            dynamic_ncols=True,
            smoothing=0.1,
        )
        self.shown: dict[str, int] = {}  # run -> its last round

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def round(self, run: RunSettings, number: int, score: str) -> None:
        """Show a round that is done. An empty ``score`` leaves that of the last evaluated round."""
        if run.label not in self.shown:
            self.skip(number - 1)
        self.shown[run.label] = number
        if score:
            self.bar.set_postfix_str(score, refresh=False)
        self.bar.update()

    def end(self, run: RunSettings) -> None:
        """Skip the rounds that were done before, or that early stopping left out."""
        self.skip(run.common.rounds - self.shown.get(run.label, 0))

    def skip(self, rounds: int) -> None:
        """Advance without including these rounds in the rate."""
        if not self.bar.disable:  # a disabled bar lacks these attributes
            self.bar.initial += rounds
            self.bar.last_print_n += rounds
            self.bar.n += rounds


def run_one(
    run: RunSettings,
    directory: RunDirectory,
    bar: StudyBar | None = None,
    trackers: Sequence[Tracker] = (),
    until: int = 0,
) -> None:
    """Execute one method with one seed, and add it to the study's history and summary.

    ``until``: pause after this round, without a summary (:meth:`server.run.loop.RoundLoop.run`).
    """

    def watch(progress: Progress) -> None:
        if bar is not None:
            label = federation.registration.task.score_label
            bar.bar.set_description(run.label, refresh=False)
            bar.round(
                run,
                progress.round,
                "" if math.isnan(progress.score) else f"{label} {progress.score:.4f}",
            )
        record(progress.round)

    def record(server_round: int) -> None:
        if trackers:
            values = round_values(federation.history, *run.common.which, server_round)
            for tracker in trackers:
                tracker.record(server_round, values)

    state_path = directory.checkpoint(run.run_key) / "silos"
    grid = InProcessGrid(client_app, run.common.silos, run.flat(), state_path)
    grid.answered = None if bar is None else silos_shown(bar.bar, run.label)
    write_manifest(directory, run)
    with errors_recorded(directory, run), track(run, directory, trackers):
        with flower_identity(), freeze_objects():
            federation = RoundLoop(grid, run, directory, watch)
            federation.run(until)
        if not federation.ended:
            return
        record(federation.last + 1)  # the closing evaluation
        write_summary(directory, History(directory.history), federation.finish_run())
    if bar is not None:
        bar.end(run)
    record_end(directory, run)


def silos_shown(bar: tqdm[Any], label: str) -> Callable[[int, int], None]:
    """Return a function that shows the silos within a round, once a second at most."""
    shown = time.monotonic()

    def show_answered(replies: int, messages: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            bar.set_description(f"{label}, silo {replies} of {messages}")

    return show_answered


@contextlib.contextmanager
def track(
    run: RunSettings, directory: RunDirectory, trackers: Sequence[Tracker]
) -> Iterator[None]:
    """Start the trackers, and end them with the run."""
    for tracker in trackers:
        tracker.start(run, directory.path)
    finished = False
    try:
        yield
        finished = True
    finally:
        for tracker in trackers:
            tracker.end(failed=not finished)


@contextlib.contextmanager
def freeze_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection: several hundred thousand, mostly of libraries.

    Scanning them repeatedly takes a tenth of the time of small rounds.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
