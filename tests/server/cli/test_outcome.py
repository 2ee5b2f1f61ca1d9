"""The line in which a study's runs end."""

from __future__ import annotations

import logging
from logging import WARNING
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Message, RecordDict
from flwr.common.logger import log
from taken import silofl
from tiny import small_study

from server.cli.research import outcome
from server.deploy import submit
from server.report.study import StudyResults
from server.report.write import silo_table
from server.results.run_directory import RunDirectory
from server.results.study import study_config
from server.simulation.engine import InProcessGrid, flower_identity
from server.simulation.simulate import run_all, silos_shown
from strategies.base.run_settings import parse_settings

RUN = {"silos": ["a", "b", "c"], "rounds": 3, "bmcta": 0.75, "reports": "personal"}


def test_a_run_is_about_the_score_of_its_task():
    per_silo = {"a": {"auc": 0.25}, "b": {"auc": 0.25}, "c": {"auc": None}}
    run = {**RUN, "score": "auc", "final": {"round": 2, "auc_mean": 0.25}, "per_silo": per_silo}
    assert outcome(run).startswith("auc 0.2500, the mean of 2 silos' test parts at round 2")
    assert (
        outcome({**run, "final": {"round": None, "auc_mean": None}})
        == "3 rounds, nothing evaluated"
    )


@pytest.mark.parametrize(("rate", "learned"), [("0.00001", False), ("0.5", True)])
def test_a_run_that_learned_nothing_says_so(rate, learned, tmp_path, capsys):
    command = (
        f"simulate --strategy fedavg,local --silos 2 --rounds 3 --out {tmp_path}/run".split()
    )
    settings = ["--set", "model=linear", "partition=iid", f"learning-rate={rate}", "threads=1"]
    assert silofl(*command, *settings) == 0
    lines = capsys.readouterr().out.splitlines()[-3:-1]
    assert ["hardly better than before training (0." in line for line in lines] == [
        not learned
    ] * 2


def test_a_studys_warnings_are_one_line_behind_the_bar(monkeypatch, tmp_path, capsys):
    def warn(*_):
        for number in range(3):
            log(WARNING, "round %d bounds %s", number, "a")
        log(WARNING, "another")

    monkeypatch.setattr("server.simulation.simulate.run_one", warn)
    monkeypatch.setattr("server.simulation.simulate.try_reports", warn_not)
    values = parse_settings({"rounds": 2, "silos": 2})
    with RunDirectory.open(tmp_path / "run", study_config([values]), resume=False) as directory:
        run_all([values], directory, (), quiet=False)
    errors = capsys.readouterr().err
    # No bar is drawn where standard error is no terminal
    assert errors == "note: round 0 bounds a (and 2 like it); another; the report names all\n"
    assert errors.count("bounds") == 1 and logging.getLogger("flwr").filters == []


def warn_not(*_):
    """Write no report."""


def test_the_bar_shows_the_silos_of_a_long_round(monkeypatch):
    clock, shown = iter(range(100)), list[str]()
    monkeypatch.setattr(
        "server.simulation.simulate.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    grid = InProcessGrid(cast(Any, lambda message, context: message), 2, {})
    grid.answered = silos_shown(
        cast(Any, SimpleNamespace(set_description=shown.append)), "fedavg-1"
    )
    with flower_identity():
        messages = [
            Message(RecordDict(), dst_node_id=i, message_type="train") for i in (1, 2, 1)
        ]
        assert len(list(grid.send_and_receive(messages))) == 3
    assert shown == ["fedavg-1, silo 2 of 3"]


def test_a_federations_run_ends_as_a_simulation_does(tmp_path, monkeypatch, capsys):
    """``silofl run`` prints the comparison per silo, one line for each run, and last the run directory."""
    out = small_study(tmp_path / "run", "breast-cancer", rounds=1, strategy="local,fedavg")
    monkeypatch.setattr(submit, "run", lambda values, connection, **_: out)
    assert silofl("run", "--strategy", "local,fedavg") == 0
    said = capsys.readouterr()
    assert silo_table(StudyResults(out)) in said.out and not said.err
    lines = said.out.splitlines()[-3:]
    assert [line.partition(":")[0] for line in lines] == ["local-42", "fedavg-42", str(out)]
    (out / "summary.json").unlink()  # the server is on another machine
    assert silofl("run", "--strategy", "local,fedavg") == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
