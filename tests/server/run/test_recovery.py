"""Damaged states of silos: the run goes back to where all are good, or says what it has lost. No number is silent."""

from __future__ import annotations

import os
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from damage import flip
from flwr.app import Error, Message
from representatives import sampled
from resuming import Crash, crash_after
from taken import silofl
from tiny import comparable, federate, notes, round_of, simulated

import client.app
import client.store
import server.run.checkpoints
from partitions.common.errors import UserError
from server.report.write import write_report
from server.results.history import History
from server.results.run_directory import BEFORE, NEWEST
from server.run.loop import RoundLoop
from server.run.reporter import Reporter
from strategies.base.transport.reporting import DamagedStateError

OPTIONS: dict[str, Any] = {"strategy": "apple", "rounds": 5, "silos": 3, "seed": 7}
KEY = "checkpoint/apple-7"


def rows(directory):
    return comparable(History(directory / "history.csv").rows)


def state(directory, silo, number):
    return directory / KEY / "silos" / f"hospital-0{silo}" / f"round-{number:06d}.safetensors"


def stopped(directory, after=3, **changes):
    with pytest.raises(Crash):
        simulated(directory=directory, watch=crash_after(after), **{**OPTIONS, **changes})
    return directory


def resumed(directory, **changes):
    return simulated(directory=directory, resume=True, **{**OPTIONS, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The history of the undisturbed run."""
    directory = tmp_path_factory.mktemp("whole")
    simulated(directory=directory, **OPTIONS)
    return rows(directory)


@pytest.fixture(scope="module")
def at_three(tmp_path_factory):
    """The run, stopped after round 3."""
    return stopped(tmp_path_factory.mktemp("three") / "run")


@pytest.fixture
def run(at_three, tmp_path):
    return Path(shutil.copytree(at_three, tmp_path / "run"))


# ---- In a simulation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", [70, 250, 40_003, 300_001])  # length and seal, numbers, tensors
@pytest.mark.parametrize(
    ("file", "told"),
    [
        (NEWEST, "apple-7 goes on after round 2, from the checkpoint before the newest"),
        (BEFORE, ""),
        (
            "silos/hospital-02/round-000003.safetensors",
            "hospital-02's state of round 3 is damaged: the run goes back",
        ),
        ("silos/hospital-02/round-000002.safetensors", ""),
        ("silos/hospital-02/round-000001.safetensors", ""),
    ],
)
def test_one_flipped_bit_changes_no_number(whole, run, file, told, bit):
    flip(run / KEY / file, bit)
    resumed(run)
    assert rows(run) == whole
    assert [note[: len(told)] for note in notes(run)] == ([told] if told else [])


def test_two_silos_states_of_the_same_round(run, tmp_path):
    undisturbed = Path(shutil.copytree(run, tmp_path / "whole"))
    resumed(undisturbed)
    for silo in (1, 3):
        flip(state(run, silo, 3))
    resumed(run)
    assert rows(run) == rows(undisturbed)
    assert notes(run) == [
        "hospital-01's state of round 3 and hospital-03's state of round 3 are damaged: the run goes back to the end "
        "of round 2 and repeats the rounds after it"
    ]


def test_a_run_that_was_stopped_in_the_middle_of_a_round(whole, run, monkeypatch):
    """The first silo has saved round 4 already, and still has its round 2 when the run goes back to it."""
    train = client.app.Message

    def third_silo(*arguments, **named):
        asked = named.get("reply_to")
        if (
            asked is not None
            and asked.metadata.dst_node_id == 3
            and asked.metadata.message_type == "train"
        ):
            raise Crash
        return train(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(client.app, "Message", third_silo)
        resumed(run)
    assert state(run, 1, 4).exists()
    state(run, 3, 4).unlink()
    flip(state(run, 3, 3))
    resumed(run)
    assert rows(run) == whole


@pytest.mark.parametrize(
    "changes", [{"checkpoint_every": 2}, {"participation": 0.7}, {"evaluate_every": 0}]
)
def test_checkpoints_and_participants_now_and_then(tmp_path, changes):
    simulated(directory=tmp_path / "whole", **{**OPTIONS, **changes})
    run = stopped(tmp_path / "run", after=4, **changes)
    damaged = max(run.rglob("hospital-0?/round-000004.safetensors"))
    flip(damaged)
    resumed(run, **changes)
    assert rows(run) == rows(tmp_path / "whole")
    back = 2 if "checkpoint_every" in changes else 3
    # Of one that was never drawn
    assert [line for line in notes(run) if not line.startswith("no evidence of")] == [
        f"{damaged.parent.name}'s state of round 4 is damaged: the run goes back to the end of round {back} and "
        "repeats the rounds after it"
    ]


def test_before_the_first_checkpoint_lies_the_start(whole, tmp_path):
    run = stopped(tmp_path / "run", after=1)
    flip(state(run, 2, 1))
    resumed(run)
    assert rows(run) == whole
    assert notes(run) == [
        "hospital-02's state of round 1 is damaged: the run begins again at round 1 and repeats the rounds after it"
    ]


def test_a_finished_run_that_is_closed_again(whole, tmp_path):
    run = tmp_path / "run"
    simulated(directory=run, **OPTIONS)
    flip(state(run, 2, 5))
    resumed(run)
    assert rows(run) == whole


@pytest.mark.parametrize("others", [[(2, 2), (2, 1)], [(1, 2)]])
def test_where_it_cannot_go_back_a_simulation_says_why(run, others):
    """All states of a silo are damaged; or the newest of one silo, and of another that before it."""
    for silo, number in [(2, 3), *others]:
        flip(state(run, silo, number))
    with pytest.raises(UserError) as refused:
        resumed(run)
    silo, number = (2, 3) if len(others) == 2 else others[0]
    line = f"hospital-0{silo}: its state of round {number} is damaged, and it can go back to "
    assert str(refused.value).startswith(line) and "round-00000" in str(refused.value)
    assert "restore the file from a backup, or start the run again with another --out" in str(
        refused.value
    )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["checkpoint", "forget", "note", "round", "save"])
def test_a_crash_as_it_goes_back(whole, run, monkeypatch, place):
    """Behind each step that changes a file; whoever resumes the run ends with the same history."""
    flip(state(run, 2, 3))
    targets: dict[str, tuple[Any, str]] = {
        "checkpoint": (server.run.checkpoints, "go_back_to"),
        "forget": (History, "forget"),
        "note": (Reporter, "note"),
        "round": (RoundLoop, "round"),
        "save": (server.run.checkpoints, "save_checkpoint"),
    }
    owner, name = targets[place]
    step, calls = getattr(owner, name), []

    def crashing(*arguments, **named):
        result = step(*arguments, **named)
        calls.append(name)
        # Resuming forgets, and the first round goes back
        if len(calls) == (2 if place in ("forget", "round") else 1):
            raise Crash
        return result

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(owner, name, crashing)
        resumed(run)
    resumed(run)
    assert rows(run) == whole


def test_a_crash_between_two_checkpoints_after_a_damaged_one(whole, run, monkeypatch):
    """The newest was damaged: it must not take the place of the good one before it."""
    flip(run / KEY / NEWEST)
    replace, place = os.replace, run / KEY / NEWEST

    def crashing(source, target):
        if Path(target) == place and Path(source).suffix == ".tmp":
            raise Crash
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(os, "replace", crashing)
        resumed(run)
    resumed(run)
    assert rows(run) == whole


@sampled("workers", ["1", "2"], 2)
@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            "silos/hospital-02/round-000002.safetensors",
            "hospital-02's state of round 2 is damaged: the run goes back to the end of round 1 and repeats the "
            "rounds after it",
        ),
        (
            NEWEST,
            "local-7 goes on after round 1, from the checkpoint before the newest: the state file ",
        ),
    ],
)
def test_the_screen_and_the_report_say_it_at_the_end(file, line, workers, tmp_path, capfd):
    run = tmp_path / "run"
    given = f"simulate --strategy local --silos 3 --seed 7 --out {run} --set".split()
    assert silofl(*given, "model=mlp", "--rounds", "2") == 0
    flip(run / "checkpoint/local-7" / file)
    capfd.readouterr()
    more = ["--rounds", "3", "--workers", workers, "--set", "resume=true"]
    assert silofl(*given, "model=mlp", *more) == 0
    assert "rounds = 3\n" in (run / "config.toml").read_text()
    assert any(text.startswith(line) for text in capfd.readouterr().out.splitlines())
    assert line in unescape((run / "report.html").read_text())


# ---- Silos with states of their own, as they are deployed ------------------------------------------------------------


def deployed(files, folder, **changes):
    options = {"strategy": "apple", "rounds": 5, "learning_rate": 0.3, **changes}
    return federate(files, directory=folder / "run", state_dir=folder / "states", **options)


def before_round(number, silo, do):
    """For ``prepare``: do something once, before a silo is given its message of a round."""
    done: list[bool] = []

    def before(name, message, context):
        if (name, round_of(message)) == (silo, number) and not done:
            done.append(True)
            client.store._WRITTEN.clear()  # its process was started anew, and reads the file
            do()

    return lambda grid: setattr(grid, "before", before)


def damage_all(folder, silo, *numbers):
    def do():
        files = [
            f for n in numbers for f in folder.rglob(f"{silo}/run-*/*-{n:06d}.safetensors")
        ]
        assert len(files) == len(numbers)
        for file in files:
            flip(file)

    return do


@pytest.mark.parametrize("every", [1, 2])
def test_a_federation_goes_back_in_the_middle_of_a_run(three, tmp_path, every):
    """With checkpoints of every other round the damaged state is of a round between two of them."""
    undisturbed = deployed(three, tmp_path / "whole", checkpoint_every=every)
    disturb = before_round(4, "b", damage_all(tmp_path / "run", "b", 3))
    run = deployed(three, tmp_path / "run", checkpoint_every=every, prepare=disturb)
    assert comparable(run.rows) == comparable(undisturbed.rows)
    assert rows(tmp_path / "run/run") == comparable(undisturbed.rows)
    assert [round_of(m) for m, _ in run.grid.traffic if m.metadata.dst_node_id == 2] == [
        0,
        1,
        2,
        3,
        4,
        3,
        4,
        5,
        6,
    ]
    assert run.federation.state.total_bytes == undisturbed.federation.state.total_bytes
    assert notes(tmp_path / "run/run") == [
        "b's state of round 3 is damaged: the run goes back to the end of round 2 and repeats the rounds after it"
    ]


def test_a_state_that_is_lost_is_marked(three, tmp_path):
    """All that b has kept is damaged: it misses a round, and begins anew with what it then receives."""
    disturb = before_round(4, "b", damage_all(tmp_path, "b", 3, 2, 1))
    run = deployed(three, tmp_path, rounds=6, prepare=disturb)
    assert [(r.round, r.silo, r.value) for r in run.rows if r.metric == "state_lost"] == [
        (4, "b", 3.0)
    ]
    assert run.rejected() == [(4, "b")]
    (note,) = notes(tmp_path / "run")
    assert note == (
        "b's state of round 3 is damaged, and the run cannot go back for it: it misses round 4 and then begins anew"
    )
    assert run.values("accuracy", "b", "personal")[3:]
    write_report(tmp_path / "run")
    assert note in unescape((tmp_path / "run/report.html").read_text())


def test_what_is_lost_stays_known_when_the_run_is_resumed(three, tmp_path):
    """b goes on from round 1 by the server's leave; it has not trained since when the server is started anew."""
    disturb = before_round(4, "b", damage_all(tmp_path, "b", 3, 2))

    def prepare(grid):
        disturb(grid)
        grid.absent = {("b", 5)}

    with pytest.raises(Crash):
        deployed(three, tmp_path, rounds=7, prepare=prepare, watch=crash_after(5))
    run = deployed(three, tmp_path, rounds=7, resume=True)
    assert [(r.round, r.value) for r in run.rows if r.metric == "state_lost"] == [(4, 2.0)]
    assert run.rejected() == [(4, "b"), (5, "b")]
    assert "then goes on from its state of round 1" in notes(tmp_path / "run")[0]


@pytest.mark.exhaustive
def test_a_silo_that_always_says_so_holds_nobody_up(three, tmp_path):
    """It gets one step back, whatever it claims; the others' numbers are those of a run in which it fails."""

    def lies(grid):
        def after(silo, message, reply):
            number = round_of(message)
            if silo != "c" or number < 4:
                return reply
            return Message(
                Error(1, str(DamagedStateError(number - 1, [number - 2], "none"))),
                reply_to=message,
            )

        grid.after = after

    def fails(grid):
        def after(silo, message, reply):
            return (
                reply
                if silo != "c" or round_of(message) < 4
                else Message(Error(1, "it"), reply_to=message)
            )

        grid.after = after

    run = deployed(three, tmp_path / "lies", rounds=8, prepare=lies)
    plain = deployed(three, tmp_path / "fails", rounds=8, prepare=fails)
    asked = [round_of(m) for m, _ in run.grid.traffic if m.metadata.dst_node_id == 1]
    assert asked == [*range(5), *range(3, 10)]
    left = ("round_seconds", "state_lost")
    assert comparable(run.rows, without=left) == comparable(plain.rows, without=left)
    assert [r.round for r in run.rows if r.metric == "state_lost"] == [4, 5, 6, 7, 8, 9]


def test_one_silo_that_cannot_be_helped_keeps_no_other_from_it(three, tmp_path):
    """b's state of round 3 is made anew; a has nothing left, and is marked in the round that all come to again."""
    of_b, of_a = damage_all(tmp_path, "b", 3), damage_all(tmp_path, "a", 3, 2, 1)

    def both():
        of_b()
        of_a()

    run = deployed(three, tmp_path, prepare=before_round(4, "a", both))
    assert [(r.round, r.silo) for r in run.rows if r.metric == "state_lost"] == [(3, "a")]
    assert [note.partition(":")[0] for note in notes(tmp_path / "run")] == [
        "b's state of round 3 is damaged",
        "a's state of round 2 is damaged, and the run cannot go back for it",
    ]
