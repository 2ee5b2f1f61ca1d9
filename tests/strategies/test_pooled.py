"""Pooled, the reference: one silo trains on everybody's samples, all evaluate on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tiny import comparable, federate, session_of, simulated

from partitions.common.errors import UserError
from partitions.simulated import divide
from server.report.study import StudyResults
from server.simulation.simulate import simulate

OPTIONS: dict[str, Any] = {"silos": 4, "rounds": 3, "momentum": 0.5, "batch_size": 32}


def test_the_first_silo_has_everybodys_training_samples():
    run = simulated(strategy="pooled", **OPTIONS)
    whole, silos = divide(run.settings.division)
    contexts = list(run.grid.contexts.values())  # type: ignore[attr-defined]
    first = session_of(run.settings, contexts[0]).used_data
    indices = np.concatenate([silo.train for silo in silos])
    assert_array_equal(first.train.y, whole.labels[indices])
    assert (
        len(set(indices))
        == len(indices)
        == sum(summary["n_train"] for summary in run.registration.summaries.values())
    )
    assert_array_equal(first.test.y, whole.labels[silos[0].test])
    second = session_of(run.settings, contexts[1]).used_data
    assert len(second.train) == len(silos[1].train)


def test_its_data_are_standardised_by_their_own_statistics():
    """Not by those of the first silo, which are another hospital's to most of them."""
    run = simulated(strategy="pooled", dataset="breast-cancer", normalization="silo", **OPTIONS)
    whole, silos = divide(run.settings.division)
    for context, trained in zip(
        run.grid.contexts.values(),  # type: ignore[attr-defined]
        [np.concatenate([silo.train for silo in silos]), silos[1].train],
        strict=False,
    ):
        session = session_of(run.settings, context)
        session.config = run.state.numbers
        rows = np.concatenate([whole.train.x, whole.test.x])[trained]
        assert session.statistics[0][0] == pytest.approx(rows.mean(0), rel=1e-4)


def test_one_trains_and_all_evaluate():
    run = simulated(strategy="pooled", **OPTIONS)
    trained = {r.silo for r in run.history.rows if r.split == "train"}
    tested = {r.silo for r in run.history.rows if (r.split, r.snapshot) == ("test", "received")}
    assert trained == {"hospital-01"} and tested == {f"hospital-0{i}" for i in range(1, 5)}


def test_of_one_silo_it_is_fedavg():
    """Bit for bit: there is nothing to pool."""
    runs = [
        simulated(strategy=name, **{**OPTIONS, "silos": 1}) for name in ("pooled", "fedavg")
    ]
    assert comparable(runs[0].history.rows) == comparable(runs[1].history.rows)


@pytest.mark.exhaustive
def test_it_shows_what_federation_costs(tmp_path):
    """On skewed silos the pooled model is better than FedAvg's, and no method's headline."""
    values = {
        "silos": 6,
        "rounds": 2,
        "local-epochs": 3,
        "dirichlet.beta": 0.1,
        "threads": 1,
        "learning-rate": 0.2,
    }
    names = "local,fedavg,pooled"
    study = StudyResults(
        simulate({**values, "strategy": names, "out": str(tmp_path / "run")}, quiet=True)
    )
    pool, fedavg = (study.final(name, "accuracy_mean")[0] for name in ("pooled", "fedavg"))
    assert pool > fedavg + 0.02
    assert study.best == "fedavg" and study.personalised is None


def test_hospitals_data_are_not_pooled(two):
    with pytest.raises(
        RuntimeError,
        match="pooled needs all silos' data in one place: it runs in simulations only",
    ):
        federate(two, "pooled", rounds=1)
    assert issubclass(UserError, ValueError)
