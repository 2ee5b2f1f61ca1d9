"""Run directories that a disk has damaged: nothing goes on silently with other numbers, and little is lost."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from damage import damaged
from failing import fails
from resuming import Crash, assert_equal, crash_after, interrupted
from tiny import comparable, federate, notes, simulated

import server.run.checkpoints
from server.results.history import History
from server.results.run_directory import BEFORE, NEWEST

OPTIONS: dict[str, Any] = {"strategy": "apple", "rounds": 4, "learning_rate": 0.3}


def files_of(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_of_a_damaged_checkpoint_the_one_before_is_taken(three, tmp_path):
    """Stopped after round 3; the run goes on from round 2 and is the uninterrupted one bit for bit. It says so."""
    whole = federate(three, directory=tmp_path / "whole", **OPTIONS)
    interrupted(three, tmp_path / "stopped", watch=crash_after(3), **OPTIONS)
    saved = files_of(tmp_path / "stopped")
    newest = tmp_path / "stopped/checkpoint/apple-7" / NEWEST
    for what, data in damaged(saved[newest], 6):
        parts = tmp_path / what[:4] / str(len(data))
        for path, content in saved.items():
            place = parts / path.relative_to(tmp_path / "stopped")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data if path == newest else content)
        resumed = federate(three, directory=parts, resume=True, **OPTIONS)
        assert_equal(whole, resumed, (tmp_path / "whole", parts))
        (note,) = notes(parts)
        assert (
            note.startswith(
                "apple-7 goes on after round 2, from the checkpoint before the newest: "
            )
            and NEWEST in note
        )


def test_a_crash_between_two_checkpoints_costs_a_round(three, tmp_path):
    """The newest was put aside, and the next is not in its place yet."""
    whole = federate(three, directory=tmp_path / "whole", **OPTIONS)
    interrupted(three, tmp_path / "parts", watch=crash_after(3), **OPTIONS)
    folder = tmp_path / "parts/checkpoint/apple-7"
    (folder / NEWEST).replace(folder / BEFORE)
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **OPTIONS)
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))
    (note,) = notes(tmp_path / "parts")
    assert note.startswith("apple-7 goes on after round 3, ") and note.endswith(
        f"{NEWEST} is missing"
    )


def test_without_a_good_checkpoint_nothing_is_changed(three, tmp_path):
    interrupted(three, tmp_path / "run", watch=crash_after(3), **OPTIONS)
    folder = tmp_path / "run/checkpoint/apple-7"
    for name in (NEWEST, BEFORE):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    before = files_of(tmp_path / "run")
    with pytest.raises(
        ValueError,
        match=f"{NEWEST} cannot be read: .*there is no other checkpoint: start the run",
    ):
        federate(three, directory=tmp_path / "run", resume=True, **{**OPTIONS, "rounds": 9})
    assert files_of(tmp_path / "run") == before


def test_a_run_without_its_checkpoint_does_not_begin_again_silently(three, tmp_path):
    interrupted(three, tmp_path / "run", watch=crash_after(3), **OPTIONS)
    shutil.rmtree(tmp_path / "run/checkpoint")
    federate(three, directory=tmp_path / "run", resume=True, **OPTIONS)
    (note,) = notes(tmp_path / "run")
    assert (
        note
        == "apple-7 has no checkpoint, though history.csv has rounds of it: it begins again at round 1"
    )


def test_a_history_with_holes_is_named(three, tmp_path):
    interrupted(three, tmp_path / "run", watch=crash_after(3), **OPTIONS)
    file = tmp_path / "run/history.csv"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(
        "".join(line for line in lines if not line.startswith(("apple,7,1,", "apple,7,3,")))
    )
    resumed = federate(three, directory=tmp_path / "run", resume=True, **OPTIONS)
    assert notes(tmp_path / "run") == [
        "history.csv has nothing of apple-7 in rounds 1, 3, of 3 that are done: it was damaged"
    ]
    assert {row.round for row in resumed.rows} == {2, 4, 5}


@pytest.mark.parametrize(("old", "new"), [(",0.", ",0.1"), (",received,", ",personal,")])
def test_a_history_with_other_numbers_is_named(three, tmp_path, old, new):
    """One row of the checkpoint's is another: no round is missing."""
    interrupted(three, tmp_path / "run", watch=crash_after(3), **OPTIONS)
    file = tmp_path / "run/history.csv"
    file.write_text(file.read_text().replace(old, new, 1))
    federate(three, directory=tmp_path / "run", resume=True, **OPTIONS)
    (note,) = notes(tmp_path / "run")
    assert note.startswith("history.csv has other rows of apple-7 than when round 3 was saved")


def test_a_history_that_is_as_it_was_is_not_named(three, tmp_path):
    interrupted(three, tmp_path / "run", watch=crash_after(3), **OPTIONS)
    federate(three, directory=tmp_path / "run", resume=True, **OPTIONS)
    assert notes(tmp_path / "run") == []


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_on_them(
    three, tmp_path, monkeypatch
):
    """At every checkpoint, what was last waited for of history.csv is all of it."""
    file, synced, checked = tmp_path / "run/history.csv", [0], []
    fsync, save = os.fsync, server.run.checkpoints.save_checkpoint

    def sync(descriptor):
        fsync(descriptor)
        if file.exists() and os.fstat(descriptor).st_ino == file.stat().st_ino:
            synced.append(os.fstat(descriptor).st_size)

    def checkpoint(*arguments):
        checked.append(synced[-1] == file.stat().st_size and synced[-1] > 500)
        save(*arguments)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(server.run.checkpoints, "save_checkpoint", checkpoint)
    federate(three, directory=tmp_path / "run", **OPTIONS)
    assert checked == [True] * 4


def test_an_interrupted_studys_rows_have_the_order_of_an_uninterrupted_ones(tmp_path):
    """The first run was done and is closed once more as the study is resumed, in the middle of the second."""
    study: list[dict[str, Any]] = [
        {"strategy": name, "rounds": 3, "silos": 3} for name in ("local", "fedavg")
    ]
    for options in study:
        simulated(directory=tmp_path / "whole", **options)
    simulated(directory=tmp_path / "parts", **study[0])
    with pytest.raises(Crash):
        simulated(directory=tmp_path / "parts", watch=crash_after(2), **study[1])
    for options in study:
        simulated(directory=tmp_path / "parts", resume=True, **options)
    whole, parts = (
        History(tmp_path / name / "history.csv").rows for name in ("whole", "parts")
    )
    assert [row.strategy for row in whole] == sorted(
        (row.strategy for row in whole), reverse=True
    )
    assert comparable(parts) == comparable(whole) and [r.strategy for r in parts] == [
        r.strategy for r in whole
    ]


@pytest.mark.parametrize(
    "line",
    [
        "apple,7,1,a,test,received,accuracy,0.5",
        "apple,7,1,a,test,received,accuracy,0.5,10,10",
        "apple,7,one,a,test,received,accuracy,0.5,10",
        "apple,7,1,a,test,received,accuracy,half,10",
        "apple,7,1,a,test,received,accuracy,0.5,many",
        "apple,7,1,a,test,received,accuracy,\"" + "9" * 200_000 + "\",10",
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    file = tmp_path / "history.csv"
    History(file)
    file.write_text(file.read_text() + f"apple,7,1,a,test,received,accuracy,0.5,10\n{line}\n")
    fails(ValueError, r"history\.csv, line 3: no row of a history", History, file)
