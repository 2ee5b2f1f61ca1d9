"""The demonstration: its data, its outcome, and that nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from server.deploy import submit
from server.deploy.control import Connection
from server.deploy.federation import read_federation
from server.deploy.local.demo_data import split_demo
from server.deploy.local.record import UpFederation
from server.report.study import StudyResults
from server.report.verdict import verdict
from server.simulation.simulate import simulate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo():
    return read_federation(ROOT / ".ci/demo.yaml")


def test_the_federation_file_has_the_demonstrations_data_and_settings(demo):
    """So the commands of docs/consortium.md print the demonstration's figures."""
    shown = read_federation(ROOT / "federation.yaml")
    assert (shown.demo, shown.run, shown.silos) == (demo.demo, demo.run, demo.silos)


def test_each_hospital_has_enough_to_test(demo, tmp_path):
    files = split_demo(demo, tmp_path, lambda line: None)
    assert list(files) == [f"hospital-{i:02d}" for i in range(1, 13)]
    for file in files.values():
        with np.load(file, allow_pickle=False) as data:
            assert len(data["y_test"]) >= 25 and len(data["y_train"]) >= 10


@pytest.mark.exhaustive  # `make demo` is what has it
def test_a_gain_is_shown(demo, tmp_path):
    """The demonstration's own settings in process, where they give the same numbers as deployed."""
    values = {**demo.settings, "seed": 42, "strategy": "local,fedavg,fedala", "rounds": 15}
    values |= {"silos": len(demo.silos), "checkpoint-every": 1000, "out": str(tmp_path / "run")}
    study = StudyResults(simulate(values, quiet=True))
    assert study.best is not None
    assert verdict(study, study.best, "local").shown == 1
    assert study.mean_gain(study.best, "local").mean > 0.05


def script(folder, failing=""):
    """Run `.ci/demo.sh` with a command that writes down how it was called, and fails at one; exit code and calls."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    parts = folder / "state/silofl/silofl-demo/data"
    parts.mkdir(parents=True, exist_ok=True)
    (parts / "manifest.json").touch()
    silofl = folder / "silofl"
    lines = (
        f"echo $1 >> {folder}/calls",
        "[ $1 != run ] || mkdir -p runs/demo",
        f"[ $1 != '{failing}' ]",
    )
    silofl.write_text("\n".join(["#!/bin/sh", *lines]))
    silofl.chmod(0o700)
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        [ROOT / ".ci/demo.sh", silofl],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    calls = folder / "calls"
    return done.returncode, calls.read_text().split() if calls.exists() else []


@pytest.mark.parametrize(
    ("failing", "calls"), [("", "down up run report down"), ("run", "down up run down")]
)
def test_everything_is_stopped_whatever_happens(failing, calls, tmp_path):
    assert script(tmp_path, failing) == (int(bool(failing)), calls.split())


def test_an_earlier_demonstration_is_replaced_and_nothing_else(tmp_path):
    out = tmp_path / "runs/demo"
    out.mkdir(parents=True)
    (out / "thesis.txt").touch()
    assert script(tmp_path) == (2, []) and (out / "thesis.txt").exists()
    (out / "config.toml").touch()
    assert script(tmp_path)[0] == 0 and not (out / "thesis.txt").exists()


def test_the_runs_own_config_repeats_it():
    """A federation of own files has no data set: the setting's default, which config.toml holds, asks for none."""
    up = UpFederation(
        name="x", file="federation.yaml", demo=None, connection=Connection("x", "127.0.0.1:2")
    )
    assert (
        submit._own_data(up, {"dataset": "digits", "partition": "dirichlet", "data-dir": ""})
        == {}
    )
    with pytest.raises(
        ValueError, match=r"dataset = breast-cancer: .*\(each silo's own file\)"
    ):
        submit._own_data(up, {"dataset": "breast-cancer"})
