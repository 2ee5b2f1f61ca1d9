"""What the report says of sums, of a history with rows of them."""

from __future__ import annotations

from server.report.participation import opened_sums
from server.report.sections.privacy import privacy_section
from server.report.sections.silos import silos_section
from server.report.study import StudyResults
from server.results.history import History, Row
from server.simulation.simulate import simulate

RUN = {"strategy": "fedavg,local", "dataset": "digits", "rounds": 2, "silos": 3, "threads": 1}


def test_the_report_says_over_how_many_silos(tmp_path):
    settings = {**RUN, "model": "mlp", "secure-aggregation": True, "out": str(tmp_path / "run")}
    out = simulate(settings, quiet=True)
    study = StudyResults(out)
    first = "FedAvg, seed 42: 2 sums of 3 of 3 hospitals"
    assert opened_sums(study) == [first]
    page = str(silos_section(study))
    assert "in a simulation nothing is masked" in page and first in page
    assert "its update follows from their two sums (secure-group = 1)" in page
    assert "One hospital that lies can replace the model" in page
    # It makes no epsilon smaller
    assert not privacy_section(study) and "epsilon" not in page.lower()


def test_repeats_absences_and_impossible_sums(tmp_path, monkeypatch):
    out = simulate({**RUN, "model": "mlp", "out": str(tmp_path / "run")}, quiet=True)
    assert opened_sums(StudyResults(out)) == []
    History(out / "history.csv").add(
        Row("fedavg", 42, number, "", "", "", metric, value, None)
        for number, values in {1: (3, 1), 2: (2, 3), 3: (0, 1)}.items()
        for metric, value in zip(("secure_silos", "secure_attempts"), values, strict=True)
    )
    study = StudyResults(out)
    assert opened_sums(study) == [
        "FedAvg, seed 42: 2 sums of 2-3 of 3 hospitals, 1 of them repeated; impossible sums, which changed "
        "no model: 1"
    ]
    monkeypatch.setattr(StudyResults, "simulated", False)
    assert "hospitals masked their updates" in str(silos_section(study))
