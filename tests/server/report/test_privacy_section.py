"""The report's section on differential privacy, of a history with rows of it."""

from __future__ import annotations

import math

import pytest

from server.report import canvas
from server.report.page import page
from server.report.sections import privacy
from server.report.sections.privacy import bought, privacy_section, private_methods
from server.report.study import StudyResults
from server.results.history import History, Row, budgets_of, spent_by_silo
from server.simulation.simulate import simulate

UNDRAWN = canvas.log_undrawn  # the tests of other modules raise in its place
RUN = {
    "strategy": "fedavg",
    "dataset": "digits",
    "rounds": 2,
    "silos": 2,
    "threads": 1,
    "model": "mlp",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two rounds of two silos, to whose history are added what these would have cost."""
    out = simulate({**RUN, "out": str(tmp_path_factory.mktemp("runs") / "run")}, quiet=True)
    history = History(out / "history.csv")
    costs = {1: (1.0, 1e-5, 4.0), 2: (1.5, 1e-5, 8.0)}
    history.add(
        Row("fedavg", 42, number, silo, "", "", metric, value, None)
        for number, values in costs.items()
        for silo in ("hospital-01", "hospital-02")
        for metric, value in zip(("epsilon", "delta", "dp_steps"), values, strict=True)
    )
    return StudyResults(out)


def test_the_table_and_the_chart(study):
    page = " ".join(str(privacy_section(study)).split())
    assert page.count("<td>fedavg, 42</td>".replace("fedavg", "FedAvg")) == 2
    assert page.count("<td>1.50</td><td>1e-05</td><td>8</td>") == 2
    assert (
        "these numbers show what a deployed run costs" in page
        and "epsilon spent in the run" in page
    )


def test_a_chart_that_fails_stops_no_page(study, monkeypatch):
    """An epsilon of an earlier version's history that no axis can hold."""
    monkeypatch.setattr(canvas, "log_undrawn", UNDRAWN)
    monkeypatch.setattr(privacy, "bought", lambda *_: [(1e308, 0.5), (1.5, 0.5)])
    found = page(study)
    assert (
        found.count("This chart could not be drawn; the reason is in the log.") == 2
        and "</html>" in found
    )


def test_what_an_epsilon_has_bought(study):
    """FedAvg is evaluated by what a silo receives: in round 2 by the model that round 1 has paid for."""
    assert private_methods(study) == ["fedavg"]
    assert study.per_round("fedavg", "epsilon", "hospital-01") == {1: 1.0, 2: 1.5}
    points = bought(study, "fedavg", "hospital-01")
    assert [epsilon for epsilon, _ in points] == [1.0, 1.5] and not any(
        math.isnan(score) for _, score in points
    )


def test_the_last_reply_says_what_a_run_has_cost(study):
    found = spent_by_silo(study.history.of("fedavg", 42))
    assert {silo: (cost.epsilon, cost.steps) for silo, cost in found.items()} == dict.fromkeys(
        study.silos, (1.5, 8)
    )
    assert [one["spent"] for one in budgets_of(study.history, "record")] == [1.5, 1.5]


def test_without_differential_privacy_there_is_no_section(tmp_path):
    out = simulate({**RUN, "rounds": 1, "out": str(tmp_path / "run")}, quiet=True)
    assert not privacy_section(StudyResults(out))
