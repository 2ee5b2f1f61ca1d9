"""The line in which a study's runs end."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.main import main
from server.cli.research import outcome
from server.deploy import submit
from server.report.study import Study
from server.report.write import silo_table
from server.simulation.simulate import simulate

RUN = {"silos": ["a", "b"], "rounds": 3, "bmcta": 0.75, "reports": "personal"}


def test_a_run_of_an_earlier_version_is_about_its_accuracy() -> None:
    """A study that was begun with it, and goes on, has such entries in its summary."""
    run = {**RUN, "final": {"round": 2, "accuracy_mean": 0.5}}
    assert outcome(run).startswith("accuracy 0.5000, the mean of 2 silos' test parts at round 2")
    run = {**RUN, "score": "auc", "final": {"round": 2, "auc_mean": 0.25}}
    assert outcome(run).startswith("auc 0.2500, the mean")
    assert outcome({**run, "final": {"round": None, "auc_mean": None}}) == "3 rounds, nothing evaluated"


def test_a_federations_run_ends_as_a_simulation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``silofl run`` prints the comparison per silo, one line for each run, and last the run directory."""
    small = {"dataset": "breast-cancer", "partition": "iid", "silos": 2, "rounds": 1, "threads": 1}
    out = simulate({**small, "strategy": "local,fedavg", "out": str(tmp_path / "run")}, quiet=True)
    monkeypatch.setattr(submit, "run", lambda values, connection: out)
    assert main(["run", "--strategy", "local,fedavg"]) == 0
    said = capsys.readouterr()
    assert silo_table(Study(out)) in said.err and "FedAvg" in said.err
    lines = said.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["local-42", "fedavg-42", str(out)]
    (out / "summary.json").unlink()  # the server is on another machine
    assert main(["run", "--strategy", "local,fedavg"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
