"""Parallel execution of a study's runs, each in its own process: ``silofl simulate --workers N`` or ``ray``.

The process of the study distributes the runs, shows their progress, and merges their results into the study's files
(``server.results.hold_out``). A run's process receives the run directory and the run's name, and reads
everything else from ``config.toml``. So it works on this machine and on a cluster with a shared file system. Every run
has the same number of threads as in sequential execution, so the results are bit-identical. A run that fails, or whose
process is killed, is reported at the end, and the others finish.

    python -m server.simulation.workers RUN STRATEGY-SEED new|resume UNTIL
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.common import log

from client.faults import is_fault, is_users
from client.local_data import device_of
from models.training import threads_for
from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.common.files import private
from server.deploy.processes import Process, end, exit_code, spawn
from server.report.write import write_manifest
from server.results.history import History, Row
from server.results.hold_out import part_of, parts_of
from server.results.reasons import merge_reasons
from server.results.run_directory import RunDirectory
from server.results.study import server_context, study_runs
from server.results.tracking import Tracker, round_values
from server.results.worker_directories import WorkerDirectories
from server.run.reporter import Reporter
from server.simulation.simulate import (
    StudyBar,
    StudyExecutor,
    how_to_continue,
    run_all,
    run_one,
    try_reports,
)
from strategies.base.run_settings import RunSettings

PAUSE = 0.2  # seconds between polls of the runs' progress
# Run -> exit code: 0, 1 or 2 as of `silofl`, or minus a signal's number
Ends = Mapping[str, int]
# Yields, a few times a second, the runs that have ended since the last time; closing it ends the remaining runs.
Engine = Callable[[Mapping[str, "Job"]], Generator[Ends, None, None]]


@dataclass(frozen=True)
class Job:
    """One run to execute in its study's directory. ``until``: the round after which it pauses; 0: no pause."""

    directory: RunDirectory
    run: RunSettings
    until: int = 0


def executor_of(workers: str) -> StudyExecutor:
    """Return the executor for ``--workers N`` or ``--workers ray``. Raises UserError for anything else."""
    engine = engine_of(workers)
    return run_all if engine is None else partial(side_by_side, engine=engine, workers=workers)


def engine_of(workers: str) -> Engine | None:
    """Return the engine for parallel runs; None for sequential ones. Raises UserError for any other value."""
    if workers == "ray":
        return on_ray()
    if not workers.isascii() or not workers.isdigit() or int(workers) < 1:
        raise UserError(f"--workers {workers}: a number of processes, or ray, is needed here")
    return None if int(workers) == 1 else partial(in_processes, int(workers))


# ---------------------------------------------------------------------------------------------------------------------
# The study


def side_by_side(
    runs: Sequence[RunSettings],
    directory: RunDirectory,
    trackers: Sequence[Tracker],
    quiet: bool,
    *,
    engine: Engine,
    workers: str,
) -> None:
    """Execute all runs in parallel with one progress bar; write the reports even if runs fail.

    After all runs have ended, raises RunFailedError that names the failed runs, or UserError if all failures are user
    errors.
    """
    directories: dict[str, WorkerDirectories] = {}
    for part, part_runs in parts_of(directory, runs):
        write_manifest(part, part_runs[0])
        of_part = WorkerDirectories(part, part_runs)
        of_part.hand_out()
        directories |= {run.label: of_part for run in part_runs}
    jobs = {run.label: Job(part_of(directory, run), run) for run in runs}
    try:
        with StudyBar(runs, quiet) as bar, contextlib.closing(engine(jobs)) as ends:
            study = SideBySide(runs, directories, trackers, bar)
            for ended in ends:
                study.poll(ended)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{how_to_continue(directory)} --workers {workers}") from None
    finally:
        for of_part in dict.fromkeys(directories.values()):
            # A remote process may end a little later: the next start merges it
            with contextlib.suppress(DataError):
                of_part.take_back_all()
        try_reports(runs, directory)
    if study.failed:
        reasons = "; ".join(
            merge_reasons(((key, why) for key, (_, why) in study.failed.items()), "runs")
        )
        users = all(code == 2 for code, _ in study.failed.values())
        raise (UserError if users else RunFailedError)(reasons)


@dataclass
class SideBySide:
    """A study whose runs other processes execute: its bar, and the results of its runs."""

    runs: Sequence[RunSettings]
    directories: Mapping[str, WorkerDirectories]
    trackers: Sequence[Tracker]
    bar: StudyBar

    def __post_init__(self) -> None:
        self.going = {run.label: run for run in self.runs}
        self.failed: dict[str, tuple[int, str]] = {}
        self.errors: dict[str, str] = {}  # run -> its last error message
        self.describe()

    def poll(self, ended: Ends) -> None:
        """Show the progress of the runs, and collect those that have ended."""
        for key, run in self.going.items():
            self.show(run, self.directories[key].follow(run))
        for key, code in ended.items():
            self.end(self.going.pop(key), code)
            self.describe()

    def show(self, run: RunSettings, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["event"] == "error":
                self.errors[run.label] = event["message"]
            if event["event"] == "round":
                value = event[name := event["score"]]
                self.bar.round(
                    run,
                    event["round"],
                    "" if value is None else f"{run.label} {name} {value:.4f}",
                )

    def describe(self) -> None:
        done = len(self.runs) - len(self.going) - len(self.failed)
        failed = f", {len(self.failed)} failed" if self.failed else ""
        self.bar.bar.set_description(f"{done} of {len(self.runs)} runs{failed}")

    def end(self, run: RunSettings, code: int) -> None:
        directories = self.directories[run.label]
        rows = self.new_rows(run) if self.trackers else []
        self.show(run, directories.take_back(run))
        if not code:
            self.bar.end(run)
        else:
            why = self.errors.get(run.label)
            if why is None:
                memory = "; if memory ran out: lower --workers or batch-size"
                reason = f"signal {-code}{memory * (-code == signal.SIGKILL)}"
                killed = f"its process was killed ({reason})"
                why = killed if code < 0 else f"its process ended with exit code {code}"
                Reporter(run.common, directories.directory).event("error", message=why)
            self.failed[run.label] = code, " ".join(why.split())
        self.track(run, rows, failed=bool(code))

    def new_rows(self, run: RunSettings) -> list[Row]:
        """Return the rows of rounds that the study's history does not have yet."""
        directories = self.directories[run.label]
        known = History(directories.directory.history).of(*run.common.which)
        before = {row.round for row in known}
        return [
            row for row in History(directories.of(run).history).rows if row.round not in before
        ]

    def track(self, run: RunSettings, rows: Sequence[Row], *, failed: bool) -> None:
        """Record a finished run's new rounds with the trackers here, as only one process may write their files."""
        rounds: dict[int, History] = {}
        for row in rows:
            rounds.setdefault(row.round, History()).rows.append(row)
        for tracker in self.trackers:
            tracker.start(run, self.directories[run.label].directory.path)
            for number, of_round in rounds.items():
                tracker.record(number, round_values(of_round, *run.common.which, number))
            tracker.end(failed=failed)


# ---------------------------------------------------------------------------------------------------------------------
# Processes of this machine


def in_processes(count: int, jobs: Mapping[str, Job]) -> Generator[Ends, None, None]:
    """Execute the jobs in at most ``count`` processes at a time; they end with this one."""
    first = next(iter(jobs.values())).run.common
    count = min(count, len(jobs))
    threads = threads_for(first.threads)
    cores = os.cpu_count() or 1
    if count * threads > cores:
        log(
            logging.WARNING,
            "%d processes with %d threads each on %d cores hinder one another: threads=%d uses these cores better",
            *(count, threads, cores, max(cores // count, 1)),
        )
    waiting, going = list(jobs), dict[str, Process]()
    stdin, held = os.pipe()  # the processes end when it closes, also where this one is killed
    try:
        while waiting or going:
            for key in waiting[: count - len(going)]:
                going[key] = start_job(jobs[key], stdin)
                waiting.remove(key)
            time.sleep(PAUSE)
            ended = {
                key: code
                for key, process in going.items()
                if (code := exit_code(process)) is not None
            }
            going = {key: process for key, process in going.items() if key not in ended}
            yield ended
    finally:
        os.close(stdin)
        os.close(held)
        end([*going.values()], grace=0)


def start_job(
    job: Job, stdin: int, program: Sequence[str] = ("-m", "server.simulation.workers")
) -> Process:
    """Start a process for this run."""
    how = "resume" if job.run.common.resume else "new"
    # The process imports the same modules as this one, independent of the working directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-P",
        *program,
        str(job.directory.path),
        job.run.run_key,
        how,
        str(job.until),
    ]
    return spawn(command, environment, stdin=stdin, stdout=subprocess.DEVNULL)


def work(path: str, key: str, resume: bool, until: int = 0) -> int:
    """Execute one run of the study in ``path``; return an exit code, whose reason is in the run's progress."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    part = RunDirectory(Path(path), key)
    runs = study_runs({**part.settings(), "resume": resume})
    run = next(run for run in runs if run.run_key == key)
    try:
        with private(), part.hold():
            run_one(run, part, until=until)
    except Exception as error:
        if is_fault(error) or os.environ.get("SILOFL_TRACEBACK"):
            traceback.print_exc()
        return 2 if is_users(error) else 1
    return 0


def end_with_parent() -> None:
    """End this process when its standard input closes, because the process of the study has ended."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# Ray


def on_ray() -> Engine:
    """Return an engine of Ray tasks on the cluster in RAY_ADDRESS, one running here, or one started here.

    Raises UserError if Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UserError(
            "--workers ray needs Ray, which is not installed: pip install 'flwr[simulation]'"
        ) from None

    def engine(jobs: Mapping[str, Job]) -> Generator[Ends, None, None]:
        with cluster(ray):
            yield from _on(ray, jobs)

    return engine


@contextlib.contextmanager
def cluster(ray: Any) -> Iterator[None]:
    """Connect to Ray until the block ends, unless connected already: a search calls its engine many times."""
    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def keep_workers(workers: str) -> Iterator[None]:
    """Keep one Ray connection for all engine calls in the block."""
    if workers != "ray":
        yield
        return
    import ray

    with cluster(ray):
        yield


def _on(ray: Any, jobs: Mapping[str, Job]) -> Generator[Ends, None, None]:
    runs = [job.run for job in jobs.values()]
    threads = threads_for(runs[0].common.threads)
    gpus = int(any(device_of(run, server_context(run)).type == "cuda" for run in runs))
    nodes: Any = ray.nodes()
    largest = max(node["Resources"].get("CPU", 1) for node in nodes if node["Alive"])
    # One process per run: its threads and its GPU memory are released with it.
    task = ray.remote(
        num_cpus=min(threads, largest), num_gpus=gpus, max_retries=0, max_calls=1
    )(work_on_ray)
    going = {
        task.remote(
            str(j.directory.path.resolve()),
            j.run.run_key,
            j.run.common.resume,
            threads,
            j.until,
        ): key
        for key, j in jobs.items()
    }
    try:
        while going:
            ready, _ = ray.wait(list(going), num_returns=len(going), timeout=PAUSE)
            yield {going.pop(done): _code_of(ray, done) for done in ready}
    finally:
        for left in going:
            ray.cancel(left, force=True)


def work_on_ray(path: str, key: str, resume: bool, threads: int, until: int) -> int:
    # For threads = 0: Ray sets its own number otherwise
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return work(path, key, resume, until)


def _code_of(ray: Any, task: Any) -> int:
    try:
        return int(ray.get(task))
    except ray.exceptions.RayError:  # the process, or its machine, died
        return 1


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(work(sys.argv[1], sys.argv[2], sys.argv[3] == "resume", int(sys.argv[4])))
