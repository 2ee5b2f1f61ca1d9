"""``simulate --workers``: what runs side by side leave is what a study in turns leaves, whatever ends them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forks import ended, fork
from inline_workers import inline, left, read_json
from taken import silofl

import server.simulation.simulate
import server.simulation.workers
from partitions.common.errors import UserError
from server.cli.main import main
from server.deploy.processes import spawn
from server.results.run_directory import WORKERS, RunDirectory, read_toml
from server.results.study import study_runs
from server.results.tracking import TRACKERS, Tracker
from server.results.worker_directories import WorkerDirectories
from server.run.loop import RoundLoop
from server.run.withdrawal import withdraw
from server.simulation.simulate import simulate
from server.simulation.workers import (
    Job,
    end_with_parent,
    executor_of,
    in_processes,
    side_by_side,
    start_job,
    work,
)
from strategies.base.settings import TEXTBOOK


def values(table, out, **changes):
    given = {
        "dataset": str(table),
        "partition": "iid",
        "silos": 2,
        "rounds": 3,
        "threads": 1,
        "out": str(out),
        **TEXTBOOK,
    }
    return {**given, "strategy": "local,fedavg,apple", "seed": "1,2", **changes}


@pytest.fixture(scope="module")
def in_turns(table, tmp_path_factory):
    return simulate(values(table, tmp_path_factory.mktemp("runs") / "study"), quiet=True)


def events(run, strategy, seed):
    """What happened to one of the runs, rounds by their number."""
    known = (json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines())
    ours = [event for event in known if (event["strategy"], event["seed"]) == (strategy, seed)]
    return [
        event.get("round") or event["event"]
        for event in ours
        if event["event"] not in ("begin", "closed")
    ]


def study(given, engine=inline, log=()):
    return simulate(
        given, quiet=True, log=log, executor=partial(side_by_side, engine=engine, workers="2")
    )


@contextlib.contextmanager
def handed_out(given):
    """The directory of a study whose runs have theirs, and its runs."""
    runs = study_runs(given)
    config = server.simulation.simulate.study_config(runs)
    with RunDirectory.open(Path(given["out"]), config, resume=False) as directory:
        WorkerDirectories(directory, runs).hand_out()
        yield directory, runs


def crash_in(key, server_round, monkeypatch):
    """As if everything were killed in that round of that run."""
    ordinary = RoundLoop.round

    def round(self, strategy, number):
        if (self.settings.run_key, number) == (key, server_round):
            raise KeyboardInterrupt
        ordinary(self, strategy, number)

    monkeypatch.setattr(RoundLoop, "round", round)


# ---------------------------------------------------------------------------------------------------------------------
# The same study


def test_the_order_is_the_studys(in_turns, table, tmp_path):
    """The runs end in the opposite order; gains, which look at other runs, are there all the same."""
    apart = study(values(table, tmp_path / "run"))
    assert left(apart) == left(in_turns)
    gains = [
        r["per_silo"]["hospital-01"]["gain_over_local"]
        for r in read_json(apart / "summary.json")["runs"]
    ]
    assert len(gains) == 6 and None not in gains
    assert all(
        events(apart, name, seed) == [1, 2, 3, "done"]
        for name in ("local", "apple")
        for seed in (1, 2)
    )


@pytest.mark.exhaustive
def test_more_rounds_for_a_study_that_is_done(in_turns, table, tmp_path):
    """Begun in turns, gone on side by side, and the other way round."""
    short = simulate(values(table, tmp_path / "a", rounds=1), quiet=True)
    assert (
        left(study(values(table, short, resume=True)))["history"] == left(in_turns)["history"]
    )
    assert events(short, "apple", 2) == [1, "done", 2, 3, "done"]
    short = study(values(table, tmp_path / "b", rounds=2))
    assert (
        left(simulate(values(table, short, resume=True), quiet=True))["history"]
        == left(in_turns)["history"]
    )


def test_trackers_hear_what_they_hear_in_turns(table, tmp_path, monkeypatch):
    class Heard(Tracker):
        def __init__(self):
            self.heard: list[Any] = []
            made.append(self.heard)

        def start(self, run, out):
            self.heard.append((run.run_key, out.name))

        def record(self, step, values):
            self.heard.append(
                (step, {k: v for k, v in values.items() if k != "round/round_seconds"})
            )

        def end(self, failed):
            self.heard.append(failed)

    made: list[list[Any]] = []
    monkeypatch.setitem(TRACKERS, "heard", Heard)
    given = values(table, tmp_path / "1/run", strategy="fedavg", seed=1)
    simulate(given, quiet=True, log=["heard"])
    study({**given, "out": str(tmp_path / "2/run")}, log=["heard"])
    assert made[0] == made[1] and len(made[0]) == 1 + 4 + 1


# ---------------------------------------------------------------------------------------------------------------------
# What can go wrong

KILLED = """
import os, signal, sys
from server.run.loop import RoundLoop
from server.simulation.workers import work

ordinary = RoundLoop.round

def round(self, strategy, number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ordinary(self, strategy, number)

RoundLoop.round = round
work(sys.argv[1], sys.argv[2], sys.argv[3] == "resume")
"""


@pytest.mark.exhaustive
def test_a_killed_worker(table, tmp_path, monkeypatch):
    """Killed in round 2 of 3: it is named, the other run ends, and what is done is not done again."""

    def start_one(job, stdin):
        return (
            start_job(job, stdin, ("-c", KILLED))
            if job.run.run_key == "apple-1"
            else start_job(job, stdin)
        )

    given = values(table, tmp_path / "run", strategy="apple,fedavg", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(server.simulation.workers, "start_job", start_one)
        with pytest.raises(
            RuntimeError,
            match=r"^apple-1: its process was killed \(signal 9; if memory ran out: lower",
        ):
            study(given, partial(in_processes, 2))
    run = tmp_path / "run"
    assert not (run / WORKERS).exists() and (run / "report.html").exists()
    assert events(run, "fedavg", 1) == [1, 2, 3, "done"] and events(run, "apple", 1) == [
        1,
        "error",
    ]
    assert [r["strategy"] for r in read_json(run / "summary.json")["runs"]] == ["fedavg"]
    study({**given, "resume": True})
    assert events(run, "apple", 1) == [1, "error", 2, 3, "done"]
    assert events(run, "fedavg", 1) == [1, 2, 3, "done", "done"]
    assert left(run) == left(simulate({**given, "out": str(tmp_path / "whole")}, quiet=True))


@pytest.mark.parametrize("way", ["in turns", "apart"])
def test_everything_was_killed(way, in_turns, table, tmp_path, monkeypatch):
    """Two runs have ended, one is in round 2, three wait; nobody has taken anything back."""
    given = values(table, tmp_path / "run")
    crash_in("apple-1", 2, monkeypatch)
    with handed_out(given) as (directory, _):
        for key in ("local-2", "fedavg-1"):
            assert work(str(directory.path), key, False) == 0
        with pytest.raises(KeyboardInterrupt):
            work(str(directory.path), "apple-1", False)
    monkeypatch.undo()
    assert len(list((tmp_path / "run" / WORKERS).iterdir())) == 6
    again = {**given, "resume": True}
    run = simulate(again, quiet=True) if way == "in turns" else study(again)
    assert left(run) == left(in_turns)
    assert events(run, "apple", 1) == [1, 2, 3, "done"] and events(run, "local", 2) == [
        1,
        2,
        3,
        "done",
        "done",
    ]


def test_half_taken_back(table, tmp_path):
    """Killed after history and progress were merged and before the folder was gone: nothing is there twice."""
    given = values(table, tmp_path / "run", strategy="fedavg", seed=1)
    with handed_out(given) as (directory, runs):
        parts, [run] = WorkerDirectories(directory, runs), runs
        assert work(str(directory.path), run.run_key, False) == 0
        before = WorkerDirectories(directory, runs)
        before.follow(run)
        directory.history.write_bytes(parts.of(run).history.read_bytes())
        merged = directory.history.read_bytes(), directory.progress_file.read_bytes()
        WorkerDirectories(directory, runs).take_back_all()
        assert (directory.history.read_bytes(), directory.progress_file.read_bytes()) == merged
        assert not (directory.path / WORKERS).exists() and directory.summary.exists()


def test_ctrl_c(in_turns, table, tmp_path):
    """In the fourth run: what is done is taken back, and the line that is printed goes on with as many workers."""

    def stop(key):
        if key == "apple-1":
            raise KeyboardInterrupt

    out = tmp_path / "run"
    offer = f"continue with silofl simulate --config {out}/config.toml --out {out} --set resume=true --workers 2"
    with pytest.raises(KeyboardInterrupt, match=f"^{offer}$"):
        study(values(table, out), partial(inline, stop=stop))
    assert not (out / WORKERS).exists()
    assert {r["seed"] for r in read_json(out / "summary.json")["runs"]} == {2}
    assert left(
        study({**read_toml(out / "config.toml"), "out": str(out), "resume": True})
    ) == left(in_turns)


def test_ctrl_c_while_a_process_still_holds_its_directory(table, tmp_path):
    """The line is that of Ctrl-C; the directory stays, and who goes on takes it back."""
    out, held = tmp_path / "run", contextlib.ExitStack()

    def stop(key):
        if key == "apple-1":
            held.enter_context(RunDirectory(out, key).hold())
            raise KeyboardInterrupt

    with held, pytest.raises(KeyboardInterrupt, match=r"^continue with silofl simulate"):
        study(values(table, out), partial(inline, stop=stop))
    assert (out / WORKERS / "apple-1").is_dir() and (out / "report.html").is_file()


def test_a_run_that_fails_is_named_and_the_others_finish(table, tmp_path, capsys, monkeypatch):
    """FedBN refuses a network without batch normalisation: the user's to mend, exit code 2, as in turns.

    The study would find it first, which is another test's.
    """
    monkeypatch.setattr(server.simulation.simulate, "check_run", lambda run: None)
    monkeypatch.setattr(
        server.simulation.workers, "in_processes", lambda count, *given: inline(*given)
    )
    given = f"simulate --strategy fedbn,local --data {table} --partition iid --silos 2".split()
    given += ["--rounds", "1", "--set", "threads=1", "--out"]
    assert silofl(*given, tmp_path / "turns") == 2
    why = capsys.readouterr().err.splitlines()[-1].removeprefix("silofl simulate: ")
    assert silofl(*given, tmp_path / "apart", "--workers", "2") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"silofl simulate: fedbn-42: {why}"
    assert [r["strategy"] for r in read_json(tmp_path / "apart/summary.json")["runs"]] == [
        "local"
    ]
    assert events(tmp_path / "apart", "fedbn", 42) == ["error"]


def test_a_run_that_is_at_work_is_left_alone(table, tmp_path):
    """A process that outlived its study, as one far away can: the study is refused until it has ended."""
    given = values(table, tmp_path / "run", strategy="fedavg", seed=1)
    with handed_out(given):
        pass
    with (
        RunDirectory(tmp_path / "run", "fedavg-1").hold(),
        pytest.raises(ValueError, match="another run is writing to it"),
    ):
        study({**given, "resume": True})
    assert (tmp_path / "run" / WORKERS / "fedavg-1").is_dir()
    study({**given, "resume": True})


def test_of_processes_that_have_ended_nothing_stays_open(table, tmp_path, monkeypatch):
    """One ends by itself; the other, which waits, is killed when the study ends."""
    started = []

    def start_one(job, stdin):
        code = "" if job.run.run_key == "local-1" else "import time; time.sleep(600)"
        started.append(spawn([sys.executable, "-S", "-c", code], {}, stdin=stdin))
        return started[-1]

    monkeypatch.setattr(server.simulation.workers, "start_job", start_one)
    runs = study_runs(values(table, tmp_path / "run", strategy="local,fedavg", seed=1))
    going = in_processes(
        2, {run.run_key: Job(RunDirectory(tmp_path / "run"), run) for run in runs}
    )
    assert next(ended for ended in going if ended) == {"local-1": 0}
    before = len(os.listdir("/proc/self/fd"))
    going.close()
    assert (
        not any(one.runs() for one in started)
        and len(os.listdir("/proc/self/fd")) == before - 2
    )


def test_a_worker_ends_with_its_study():
    (stdin, study), (ready, begun) = os.pipe(), os.pipe()

    def at_work():
        os.close(study)
        os.dup2(stdin, 0)
        sys.stdin = os.fdopen(0, closefd=False)
        threading.Thread(target=end_with_parent).start()
        os.write(begun, b"1")
        time.sleep(600)

    worker = fork(at_work)
    assert os.read(ready, 1) == b"1" and os.waitpid(worker, os.WNOHANG) == (0, 0)  # it goes on
    os.close(study)
    assert ended(worker) == 1
    for descriptor in (stdin, ready, begun):
        os.close(descriptor)


def test_a_hospital_withdraws_from_a_study_that_was_killed(table, tmp_path):
    given = values(table, tmp_path / "run", strategy="fedavg", seed=1)
    with handed_out(given) as (directory, _):
        assert work(str(directory.path), "fedavg-1", False) == 0
    withdraw("hospital-02", [tmp_path / "run"])
    files = [f for f in (tmp_path / "run").rglob("*") if f.is_file()]
    named = {f.suffix for f in files if b"hospital-02" in f.read_bytes()}
    assert named == {".safetensors"}  # the checkpoints say who withdrew
    assert not (tmp_path / "run" / WORKERS).exists()
    assert "hospital-01" in (tmp_path / "run/history.csv").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# The option


@pytest.mark.parametrize("workers", ["0", "-1", "many", "", "1.5", "²"])
def test_workers_is_a_number_or_ray(workers):
    with pytest.raises(
        UserError, match=f"^--workers {workers}: a number of processes, or ray, is needed here$"
    ):
        executor_of(workers)


def test_without_ray(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(f"simulate --workers ray --out {tmp_path}/run".split()) == 2
    line = "silofl simulate: --workers ray needs Ray, which is not installed: pip install 'flwr[simulation]'\n"
    assert capsys.readouterr().err == line and not (tmp_path / "run").exists()


@pytest.mark.exhaustive
@pytest.mark.deployed
def test_on_ray(table, tmp_path):
    """A cluster of this machine's own, two runs; one whose process dies there is named."""
    given = values(table, tmp_path / "run", strategy="fedavg,apple", seed=1)
    run = simulate(given, quiet=True, executor=executor_of("ray"))
    assert left(run) == left(simulate({**given, "out": str(tmp_path / "turns")}, quiet=True))
