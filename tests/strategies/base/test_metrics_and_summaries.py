"""What the server takes from silos: nothing that one of them sends stops the others or spoils what is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing import fails
from flwr.app import ConfigRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from tiny import federate, round_of, same

from partitions.common.errors import DataError
from server.run.reporter import Progress
from strategies.base.transport.payload import array_record
from strategies.base.transport.reporting import (
    COLUMNS,
    SCHEMA,
    SUMMARY,
    SUMS,
    WITHHELD,
    read_data_summary,
    read_metrics,
    reason_of,
)

Spoil = Callable[[Message], object]


def spoilt(files, spoil, when=2, kind="train", **changes):
    """A run of three rounds in which c's reply of one round is spoilt."""

    def after(silo, message, reply):
        if (silo, round_of(message), message.metadata.message_type) == ("c", when, kind):
            spoil(reply)
        return reply

    seen: list[Progress] = []
    given = {"strategy": "fedavg", "rounds": 3, **changes}
    run = federate(
        files, prepare=lambda grid: setattr(grid, "after", after), watch=seen.append, **given
    )
    return run, seen


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def metric(name, value):
    def spoil(reply):
        reply.content["metrics"][name] = value

    return spoil


def no_numbers(reply):
    reply.content["metrics"] = ConfigRecord({"received.test.accuracy": "high"})


def none_at_all(reply):
    del reply.content["metrics"]


METRICS = {
    "an unknown name": (
        metric("received.foo.accuracy", 0.5),
        "'received.foo.accuracy' is no metric that is known here",
    ),
    "a list": (
        metric("received.test.accuracy", [0.5]),
        r"the metric 'received.test.accuracy' is [0.5]",
    ),
    "above one": (
        metric("personal.test.accuracy", 1000.0),
        "the metric 'personal.test.accuracy' is 1000.0",
    ),
    "infinite": (metric("personal.val.auc", math.inf), "the metric 'personal.val.auc' is inf"),
    "a score that no mean survives": (
        metric("personal.val.r2", -1e308),
        "the metric 'personal.val.r2' is -1e+308",
    ),
    "an error without end": (
        metric("personal.test.rmse", math.inf),
        "the metric 'personal.test.rmse' is inf",
    ),
    "negative": (
        metric("received.val.macro_f1", -0.5),
        "the metric 'received.val.macro_f1' is -0.5",
    ),
    "no time": (metric("seconds.train", math.nan), "the metric 'seconds.train' is nan"),
    "no numbers": (no_numbers, "the reply carries no metrics"),
    "none": (none_at_all, "the reply carries no metrics"),
}


@pytest.mark.parametrize("fault", METRICS)
def test_a_reply_with_wrong_metrics_is_left_out(three, fault):
    """Whole, with one line; none of its metrics is written down; round 3 has the silo again."""
    spoil, reason = METRICS[fault]
    run, seen = spoilt(three, spoil)
    assert [p.rejected for p in seen] == [{}, {"c": reason}, {}]
    assert {r.round for r in run.rows if r.silo == "c" and r.split} == {1, 3, 4}


@pytest.mark.parametrize("fault", METRICS)
def test_the_closing_evaluation_too(three, fault):
    spoil, _ = METRICS[fault]
    run, _ = spoilt(three, spoil, when=4, kind="evaluate")
    assert run.rejected() == [(4, "c")]
    assert {r.silo for r in run.rows if r.round == 4 and r.split} == {"a", "b"}


def test_what_a_metric_may_be():
    """Unknown (nan: one class only) and, of a loss, anything: a model may be that bad, a training loss below 0."""
    given: dict[str, Any] = {
        "personal.train.loss": -0.5,
        "received.test.loss": math.inf,
        "personal.test.auc": math.nan,
        "seconds.train": 0.0,
        "personal.val.accuracy": 1.0,
    }
    assert str(read_metrics(MetricRecord(given))) == str(given)
    fails(DataError, "is 1000", read_metrics, MetricRecord({"received.test.loss": 10**400}))


def test_the_metrics_of_a_rejected_reply_are_not_written_down(three):
    """It names another round, and so its numbers are not this round's."""

    def another_round(reply):
        config = reply.content["config"]
        config["round"] = 1

    run, seen = spoilt(three, another_round)
    assert list(seen[1].rejected) == ["c"]
    assert {r.silo for r in run.rows if r.round == 2 and r.split} == {"a", "b"}


def test_a_withheld_accuracy_is_not_in_the_mean(three):
    """c's 8 test rows are below the 9 that are asked for; the mean is that of a silo that has as many, b (10 rows)."""
    seen: list[Progress] = []
    run = federate(three, "fedavg", rounds=1, min_metric_samples=9, watch=seen.append)
    assert seen[0].score == run.values("accuracy", "b", "received")[0]


# ---- Vectors ---------------------------------------------------------------------------------------------------------


def model(vector, name="model"):
    def spoil(reply):
        reply.content[f"model.{name}"] = array_record({"vector": vector})

    return spoil


def extra_first(reply):
    """An empty vector of another name before the model."""
    config = reply.content["config"]
    entry = {"name": "buffers", "silo": "c", "round": 2, "samples": 8, "dtype": "float32"}
    config["manifest"] = json.dumps([entry, *json.loads(config["manifest"])])
    model(torch.empty(0), "buffers")(reply)


def test_vectors_that_a_method_does_not_send(three):
    _, seen = spoilt(three, extra_first)
    assert [p.rejected for p in seen] == [
        {},
        {"c": "the reply holds model.buffers, which the server did not ask for"},
        {},
    ]


def test_the_order_of_the_vectors_does_not_matter(three, tiny_bn):
    def turned(reply):
        config = reply.content["config"]
        config["manifest"] = json.dumps(json.loads(config["manifest"])[::-1])

    options = {"model": "tiny-bn", "learning_rate": 0.1}
    (one, seen), (other, _) = (
        spoilt(three, turned, **options),
        spoilt(three, lambda reply: None, **options),
    )
    assert not seen[1].rejected
    assert same(one.shared, other.shared)


@pytest.mark.parametrize(
    "value, reason",
    [
        (1e6, "'buffers' exploded: its step of length 2.83e+06"),
        (-1e-3, "'buffers' holds a variance below 0"),
    ],
)
def test_statistics_out_of_all_proportion_are_left_out(three, tiny_bn, value, reason):
    """They would spoil every silo's model, for good."""
    run, seen = spoilt(
        three, model(torch.full((8,), value), "buffers"), model="tiny-bn", learning_rate=0.1
    )
    assert list(seen[1].rejected) == ["c"] and seen[1].rejected["c"].startswith(reason)
    assert all(math.isfinite(v) for silo in three for v in run.values("loss", silo, "personal"))


def test_two_silos_are_measured_against_what_they_got(two):
    """Two steps have no middle; the length of the model that was sent is the third."""

    def after(silo, message, reply):
        if (silo, round_of(message)) == ("b", 2):
            model(torch.full((12,), 1e20))(reply)
        return reply

    seen: list[Progress] = []
    federate(
        two, "fedavg", rounds=3, prepare=lambda g: setattr(g, "after", after), watch=seen.append
    )
    assert [list(p.rejected) for p in seen] == [[], ["b"], []]
    assert "exploded" in seen[1].rejected["b"]


def test_a_shape_that_is_only_said_counts_for_nothing(three):
    """A silo that says that its array has 2^1860 numbers has sent what it has sent: 12."""

    def boast(reply):
        array = reply.content["model.model"]["vector"]
        array.__dict__["shape"] = (2**31 - 1,) * 60

    run, seen = spoilt(three, boast)
    assert not seen[1].rejected
    assert run.values("bytes_up") == [144, 144, 144, 0]


# ---- Data summaries --------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "name": "c",
    "n_train": 8,
    "n_val": 8,
    "n_test": 8,
    "task": "multiclass",
    "shape": [3],
    "classes": 3,
    "own_file": True,
    "simulated": False,
    "device": "cpu",
    "threads": 1,
    "versions": "",
    "sum": [0.0] * 3,
    "square_sum": [1.0] * 3,
}
SUMMARIES: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": None}, "lacks name"),
    "a list of names": ({"name": ["c"]}, "its name is"),
    "a name with a control character": ({"name": "c\n"}, "its name is"),
    "a path": ({"name": "../c"}, "its name is"),
    "an empty name": ({"name": ""}, "its name is"),
    "no training samples": ({"n_train": 0}, "n_train = 0"),
    "a negative number": ({"n_test": -1}, "n_test = -1"),
    "far too many": ({"n_train": 10**12}, "n_train = 1000000000000"),
    "a broken number": ({"n_train": math.nan}, "n_train = nan"),
    "no thread": ({"threads": 0}, "threads = 0"),
    "text for a number": ({"n_val": "8"}, "n_val = '8'"),
    "another task": ({"task": "fortune-telling"}, "task = 'fortune-telling'"),
    "no shape": ({"shape": []}, r"shape = \[\]"),
    "a shape of nothing": ({"shape": [3, 0]}, r"shape = \[3, 0\]"),
    "a thousand million classes": ({"classes": 10**9}, "classes = 1000000000"),
    "a broken sum": ({"sum": [math.nan, 0.0, 0.0]}, "no sum of 3 finite numbers"),
    "too few sums": ({"square_sum": [1.0]}, "no square_sum of 3 finite numbers"),
    "a reason of two lines": (
        {WITHHELD: "a\nb"},
        "no line of at most 300 characters as sums_withheld",
    ),
    "half of the sums": ({"square_sum": None}, "no square_sum of 3 finite numbers"),
}


@pytest.mark.parametrize("fault", SUMMARIES)
def test_a_wrong_data_summary_is_refused(fault):
    changes, reason = SUMMARIES[fault]
    with pytest.raises(ValueError, match=reason) as caught:
        read_data_summary(
            ConfigRecord({k: v for k, v in {**GOOD, **changes}.items() if v is not None})
        )
    assert "\n" not in str(caught.value)


def test_a_right_data_summary():
    assert {*GOOD, WITHHELD, SCHEMA, COLUMNS} == set(SUMMARY)
    without = {key: value for key, value in GOOD.items() if key not in SUMS} | {
        WITHHELD: "its policy has sums = false"
    }
    assert read_data_summary(ConfigRecord(without)) == without
    assert read_data_summary(ConfigRecord(GOOD)) == GOOD
    fails(ValueError, "no data summary", read_data_summary, None)


def test_the_others_go_on_without_a_silo_whose_summary_is_wrong(three, caplog):
    def after(silo, message, reply):
        if (silo, message.metadata.message_type) == ("c", "query"):
            summary = reply.content["summary"]
            summary["n_train"] = math.nan
        return reply

    run = federate(
        three, "fedavg", rounds=1, min_silos=2, prepare=lambda g: setattr(g, "after", after)
    )
    assert list(run.strategy.silos) == ["a", "b"]
    assert "cannot take part: c's data summary says n_train = nan" in caplog.text


# ---- Who answers -----------------------------------------------------------------------------------------------------


def test_the_superlinks_own_errors_name_the_silo(three):
    """Where a node is away, the SuperLink answers in its place, under a number and a type of its own."""

    def after(silo, message, reply):
        if (silo, round_of(message)) == ("c", 2):
            reply = Message(
                Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=message
            )
            reply.metadata.__dict__.update(_src_node_id=10**6, _message_type="system")
        return reply

    seen: list[Progress] = []
    federate(
        three,
        "fedavg",
        rounds=3,
        prepare=lambda g: setattr(g, "after", after),
        watch=seen.append,
    )
    assert [p.rejected for p in seen] == [{}, {"c": "Node Unavailable"}, {}]


def test_a_silo_that_was_removed_is_not_waited_for(three):
    """The SuperLink takes no message for it; the round does not wait for its time to be up."""

    def prepare(grid):
        push = grid.push_messages

        def pushed(messages):
            sent = list(messages)
            ids = list(push(sent))
            return [
                "" if grid.key_of(m) in {("c", 2), ("c", 3)} else i
                for i, m in zip(ids, sent, strict=True)
            ]

        grid.push_messages = pushed

    seen: list[Progress] = []
    federate(three, "fedavg", rounds=2, round_timeout=600, prepare=prepare, watch=seen.append)
    assert seen[1].rejected == {"c": "the server does not know it any more"}


def test_a_quorum_starts_when_the_time_is_up(three, caplog):
    """One of three silos never says who it is; with min-silos = 2 the others begin, and it is named."""

    def prepare(grid):
        nodes = list(grid.contexts)
        grid.get_node_ids = lambda: nodes[:2]

    run = federate(three, "fedavg", rounds=1, min_silos=2, round_timeout=0.1, prepare=prepare)
    assert list(run.strategy.silos) == ["a", "b"]
    assert "goes on with 2 of 3 silos" in caplog.text
    with pytest.raises(RuntimeError, match="here are 2: a, b"):
        federate(three, "fedavg", rounds=1, round_timeout=0.1, prepare=prepare)


def test_a_reason_is_the_silos_own_words():
    """Flower wraps what is raised before the app runs."""
    assert (
        reason_of("<class 'silofl_site.policy.PolicyRefusedError'>:<'a refuses: b'>")
        == "a refuses: b"
    )
    assert reason_of("no such column") == "no such column"
    assert reason_of(None) == reason_of("") == "failed without a reason"
