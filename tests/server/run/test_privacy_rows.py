"""A silo's epsilon in the history: only where the run has dp, and within what settings allow."""

from __future__ import annotations

import math
from typing import Any

import pytest
from failing import fails
from flwr.app import MetricRecord
from tiny import array_record, federate, random_silos, tensor_of

from partitions.common.errors import DataError
from server.results.history import spent_by_silo
from strategies.base.transport.reporting import PRIVACY, read_metrics

PRIVATE = {"dp": True, "batch_size": 10, "learning_rate": 0.1}


COST: dict[str, Any] = {"epsilon": 600.0, "delta": 1e-5, "dp_steps": 10.0}


def run_with(folder, metrics, vector=0.0, **settings):
    """Two rounds in which silo a says this of itself, and adds ``vector`` to what it sends."""

    def after(silo, message, reply):
        if silo == "a" and message.metadata.message_type == "train":
            for record in reply.content.array_records.values():
                for key, array in list(record.items()):
                    record[key] = array_record({key: tensor_of(array) + vector})[key]
            reply.content["metrics"] = MetricRecord(
                {**dict(reply.content.metric_records["metrics"]), **metrics}
            )
        return reply

    files = random_silos(folder, {"a": 40, "b": 40, "c": 40})
    return federate(
        files, state_dir=folder / "state", strategy="fedavg", rounds=2, after=after, **settings
    )


def test_an_epsilon_without_differential_privacy_is_none(tmp_path):
    run = run_with(tmp_path, {"epsilon": 0.0, "delta": 1e-5, "dp_steps": 0.0})
    assert not spent_by_silo(run.rows) and not {row.metric for row in run.rows} & {*PRIVACY}


def test_an_epsilon_that_no_noise_costs_is_rejected_and_the_others_have_a_report(tmp_path):
    run = run_with(tmp_path, {"epsilon": 1e308}, **PRIVATE)
    assert set(spent_by_silo(run.rows)) == {"b", "c"}
    assert {row.silo for row in run.rows if row.metric == "rejected"} == {"a"}


def test_a_rejected_replys_epsilon_is_recorded(tmp_path):
    """The server has seen the reply, so its patients have paid."""
    run = run_with(tmp_path, {}, vector=math.nan, **PRIVATE)
    assert {row.silo for row in run.rows if row.metric == "rejected"} == {"a"}
    costs = spent_by_silo(run.rows)
    assert costs["a"] == costs["b"] == costs["c"] and costs["a"].epsilon > 0


@pytest.mark.parametrize(
    "given",
    [
        {"epsilon": 1.0},
        {**COST, "delta": 0.0},
        {**COST, "dp_steps": 1e300},
        {**COST, "epsilon": 1e4},
    ],
)
def test_a_cost_that_cannot_be(given):
    assert read_metrics(MetricRecord(COST)) == COST
    fails(DataError, r"epsilon|delta", read_metrics, MetricRecord(given))
