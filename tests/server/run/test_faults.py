"""Silos that fail, send nonsense, or are silent: left out, named, and the run goes on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from failing import fails
from flwr.app import Array, ArrayRecord, Context, Error, Message
from tiny import (
    METHODS,
    comparable,
    federate,
    random_silos,
    round_of,
    rows_of,
    same,
    train_replies,
    write_silo,
)
from torch import Tensor

import server.app
from client.app import app as client_app
from models.initialisation import flat_model
from partitions.common.errors import RunFailedError, UserError
from server.run.limits import OTHER_BYTES, SUMMARY_BYTES
from server.run.reporter import Progress
from server.simulation.engine import InProcessGrid
from strategies.base.robust import weighted_mean
from strategies.base.run_settings import parse_settings
from strategies.base.transport.payload import TensorArray, array_record, decode

# ---- Silos that fail -----------------------------------------------------------------------------------------------


def with_model(reply, vector):
    reply.content["model.model"] = array_record({"vector": vector})


def change(reply, **values):
    for key, value in values.items():
        reply.content["config"][key] = value


def drop(reply, key):
    del reply.content[key]


def raw(reply, data):
    record = ArrayRecord()
    record["vector"] = Array(dtype="float32", shape=(12,), stype="numpy.ndarray", data=data)
    reply.content["model.model"] = record


def beside(reply, record, key):
    """150 MB more than the model."""
    found: Any = reply.content.setdefault(record, ArrayRecord())
    found[key] = TensorArray(torch.zeros(150_000_000 // 4))


FAULTS: dict[str, tuple[Callable[[Message], object], str]] = {
    "NaN": (lambda r: with_model(r, torch.full((12,), math.nan)), "not finite"),
    "infinity": (lambda r: with_model(r, torch.tensor([math.inf] + [0.0] * 11)), "not finite"),
    "too short": (lambda r: with_model(r, torch.zeros(11)), r"shape \(11,\)"),
    "a matrix": (lambda r: with_model(r, torch.zeros(3, 4)), r"shape \(3, 4\)"),
    "float64": (lambda r: with_model(r, torch.zeros(12, dtype=torch.float64)), "float64"),
    "exploding": (lambda r: with_model(r, torch.full((12,), 1e9)), "exploded"),
    "another round": (lambda r: change(r, round=1), "for round 1, not of c for 2"),
    "another silo": (lambda r: change(r, silo="a"), "a reply of 'a'"),
    "no model": (lambda r: drop(r, "model.model"), "does not carry it"),
    "an empty manifest": (lambda r: change(r, manifest="[]"), "lacks model"),
    "no JSON": (lambda r: change(r, manifest="{"), "manifest is no JSON"),
    "no config": (lambda r: drop(r, "config"), "config"),
    "no metrics": (lambda r: drop(r, "metrics"), "metrics"),
    "no bytes": (lambda r: raw(r, b""), "model 'model': its bytes are no array of float32"),
    "other bytes": (lambda r: raw(r, b"PK not an array"), "its bytes are no array of float32"),
    "150 MB beside the model": (
        lambda r: beside(r, "more", "vector"),
        "the reply holds more, which the server did not ask for",
    ),
    "150 MB in its record": (
        lambda r: beside(r, "model.model", "more"),
        "more than 1048672 bytes, the most that it may",
    ),
    "a long text": (lambda r: change(r, more="x" * 2_000_000), "more than 1048672 bytes"),
    "long lists": (lambda r: change(r, more=[0.5] * 200_000), "more than 1048672 bytes"),
    "a long name": (
        lambda r: r.content.metric_records["metrics"].update({"x" * 2_000_000: 1.0}),
        "more than 1048672 bytes",
    ),
    "an unknown format": (
        lambda r: change(
            r,
            manifest='[{"name": "model", "silo": "c", "round": 2, "samples": 8, "dtype": "f7"}]',
        ),
        "its bytes are no array of f7",
    ),
    "a format that does not fit": (
        lambda r: change(
            r,
            manifest='[{"name": "model", "silo": "c", "round": 2, "samples": 8, "dtype": "float16"}]',
        ),
        "its bytes are no array of float16",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_reply_is_left_out_and_named(three, fault):
    """c's reply of round 2 is spoilt. The aggregate of round 2 is that of a and b, the run goes on, round 3 has c."""
    spoil, reason = FAULTS[fault]

    def after(silo, message, reply):
        if (silo, round_of(message)) == ("c", 2):
            spoil(reply)
        return reply

    seen: list[Progress] = []
    run = federate(three, strategy="fedavg", rounds=3, after=after, watch=seen.append)
    assert [sorted(p.rejected) for p in seen] == [[], ["c"], []]
    assert re.search(reason, seen[1].rejected["c"]), seen[1].rejected["c"]
    assert "\n" not in seen[1].rejected["c"]
    named = [(r.round, r.silo, r.value) for r in run.rows if r.metric == "rejected"]
    assert named == [(2, "c", 1.0)]
    sent = {
        key: decode(r.content)[0].models["model"].vector
        for key, r in train_replies(run.grid)
        if key[0] != "c"
    }
    expected = weighted_mean([sent["a", 2], sent["b", 2]], [6, 10])
    assert same(run.sent_to("a", 3)["global"].vector, expected)


# What the reply's numbers become; None: dropped
NUMBERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no sensitivities": (
        "player-fl",
        {"sensitivity": None},
        r"'sensitivity' is None, not a float from 0 to inf",
    ),
    "too few": ("player-fl", {"sensitivity": []}, "not a number for each layer"),
    "not finite": ("player-fl", {"sensitivity": [math.nan]}, "not a float from 0 to inf"),
    "text for numbers": ("player-fl", {"sensitivity": ["x"]}, "not a float from 0 to inf"),
    "no JSON": ("fedfomo", {"weights": "{"}, r"'weights' is '\{', not finite numbers"),
    "no object": ("fedfomo", {"weights": "[1]"}, "not finite numbers"),
    "no numbers": ("fedfomo", {"weights": '{"a": "x"}'}, "not finite numbers"),
    "an infinite one": ("fedfomo", {"weights": '{"a": Infinity}'}, "not finite numbers"),
    "a negative one": ("fedfomo", {"weights": '{"a": -1}'}, "not finite numbers"),
    "a number for text": ("fedfomo", {"weights": 3}, "not finite numbers"),
    "no list of names": ("apple", {"wanted": "a"}, "not a list of silos"),
    "numbers for names": ("apple", {"wanted": [1]}, "not a list of silos"),
}


@pytest.mark.parametrize("fault", NUMBERS)
def test_a_methods_own_numbers_are_checked(three, fault):
    """c's reply of round 1 is spoilt: it is left out with one line, the run goes on, and round 2 has it."""
    method, numbers, reason = NUMBERS[fault]

    def after(silo, message, reply):
        if (silo, round_of(message)) == ("c", 1):
            for key, value in numbers.items():
                if value is None:
                    del reply.content["config"][f"number.{key}"]
                else:
                    change(reply, **{f"number.{key}": value})
        return reply

    seen: list[Progress] = []
    federate(three, strategy=method, rounds=2, after=after, watch=seen.append)
    assert [sorted(p.rejected) for p in seen] == [["c"], []]
    assert re.search(reason, seen[0].rejected["c"]), seen[0].rejected["c"]
    assert "\n" not in seen[0].rejected["c"]


def test_a_reply_without_the_statistics_is_left_out(three, tiny_bn):
    """BatchNorm's, which travel with the model; also where the first silo lacks them."""

    def after(silo, message, reply):
        if (silo, round_of(message)) == ("a", 1):
            manifest = json.loads(str(reply.content["config"]["manifest"]))
            change(reply, manifest=json.dumps([m for m in manifest if m["name"] != "buffers"]))
        return reply

    seen: list[Progress] = []
    federate(
        three, strategy="fedavg", model="tiny-bn", rounds=2, after=after, watch=seen.append
    )
    assert [p.rejected for p in seen] == [{"a": "the reply lacks buffers"}, {}]


def test_a_silo_that_raises_is_left_out_with_its_reason(three):
    def before(silo, message, context):
        if (silo, round_of(message)) == ("b", 2):
            context.node_config["data"] = "/nowhere/b.npz"
        elif silo == "b":
            context.node_config["data"] = str(three["b"])

    seen: list[Progress] = []
    run = federate(three, strategy="fedavg", rounds=3, before=before, watch=seen.append)
    assert "/nowhere/b.npz" in seen[1].rejected["b"]
    assert run.rejected() == [(2, "b")]
    assert {r.round for r in run.rows if r.silo == "b" and r.split == "test"} == {1, 3, 4}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_without_a_silo(three, method):
    """b is away in rounds 1 and 3 of 4 and c in round 2: all come back, and only they are named."""

    run = federate(three, strategy=method, rounds=4, absent={("b", 1), ("c", 2), ("b", 3)})
    named = run.rejected()
    assert named == [(1, "b"), (2, "c"), (3, "b")]
    closing = {r.silo for r in run.rows if r.round == 5 and r.metric == "accuracy"}
    assert closing == {"a", "b", "c"}


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_arrives_twice_changes_nothing(three, tmp_path, method):
    """Every silo trains twice on every message, from the state that it had before, and of the second reply one hears.

    The server saves every third round only, so between them the silos' states are those that no checkpoint needs.
    """

    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "train":
                client_app(message, context)

        grid.before = before

    options = {"strategy": method, "rounds": 4, "checkpoint_every": 3}
    once, twice = (
        federate(
            three,
            directory=tmp_path / name / "run",
            state_dir=tmp_path / name / "state",
            prepare=p,
            **options,
        )
        for name, p in (("once", None), ("twice", prepare))
    )
    assert comparable(once.rows) == comparable(twice.rows)


@pytest.mark.parametrize("method", METHODS)
def test_when_all_fail_the_run_stops_with_one_line(two, method):
    said = fails(
        RuntimeError,
        None,
        federate,
        two,
        strategy=method,
        rounds=3,
        absent={("a", 2), ("b", 2)},
    )
    text = said
    assert (
        text
        == "round 2: no silo sent a usable update (a: the power is out; b: the power is out)"
    )


def test_a_failing_closing_evaluation_is_named(two):
    """The last exchange trains nothing, but a silo whose metrics are missing there must be seen."""

    def after(silo, message, reply):
        return (
            Message(Error(1, "disk gone"), reply_to=message)
            if (silo, round_of(message)) == ("b", 3)
            else reply
        )

    run = federate(two, strategy="fedavg", rounds=2, after=after)
    assert run.rejected() == [(3, "b")]
    assert {r.silo for r in run.rows if r.round == 3 and r.split} == {"a"}


def test_a_summary_and_a_closing_evaluation_that_are_too_large_are_named(three):
    def after(silo, message, reply):
        kind = message.metadata.message_type
        if silo == "c" and kind == "query":
            reply.content.config_records["summary"]["more"] = "x" * (SUMMARY_BYTES + 1)
        if silo == "b" and kind == "evaluate":
            reply.content.config_records["config"]["more"] = "x" * (OTHER_BYTES + 1)
        return reply

    run = federate(three, strategy="fedavg", rounds=1, after=after)
    assert "more than 16777216 bytes" in next(
        iter(run.federation.registration.left_out.values())
    )
    assert run.rejected() == [(2, "b")]


def test_a_silo_left_out_of_the_last_round_is_not_named_again_at_the_close(three):
    run = federate(three, strategy="fedavg", rounds=2, absent={("c", 2)})
    assert run.rejected() == [(2, "c")]


def test_a_silent_silo_is_named_when_the_time_is_up(three):
    def prepare(grid):
        grid.silent = {("c", 2)}

    seen: list[Progress] = []
    run = federate(
        three,
        strategy="fedavg",
        rounds=3,
        round_timeout=0.05,
        prepare=prepare,
        watch=seen.append,
    )
    assert seen[1].rejected == {"c": "no reply within 0.05 s"}
    assert run.rejected() == [(2, "c")]


@pytest.mark.parametrize("quorum, stops", [(0, False), (2, False), (3, True)])
def test_the_quorum(three, quorum, stops):
    def go():
        return federate(three, strategy="fedavg", rounds=3, min_silos=quorum, absent={("c", 2)})

    if not stops:
        assert len(go().values("round_seconds")) == 4
        return
    fails(RuntimeError, r"round 2: 2 usable updates, min-silos = 3 \(c: the power is out\)", go)


@pytest.mark.parametrize("method", ["fedavg", "apple"])
def test_what_a_failed_silo_froze_is_thawed_for_the_next(three, method):
    """The silos of a process share one network; here the one before has always left it frozen."""

    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "train":
                name, options = parse_settings(context.run_config).model_for((3,))
                flat_model(name, (3,), 3, options, "cpu").freeze(slice(0, 12))

        grid.before = before

    frozen, plain = (
        federate(three, strategy=method, rounds=2, prepare=p) for p in (prepare, None)
    )
    assert comparable(frozen.rows) == comparable(plain.rows)


@pytest.mark.parametrize("method", METHODS)
def test_a_silo_that_diverges_keeps_its_last_good_state(three, tmp_path, method):
    """In round 2 silo c trains on rows of size 1e30 with all labels wrong, and overflows.

    It names the learning rates that may mend it, the run's and the method's. Its state stays that of round 1, finite;
    in round 3, with its own rows again, it is back.
    """
    x, y = rows_of(three["c"])
    huge = write_silo(tmp_path / "huge.npz", x * 1e30, ((y + 1) % 3).tolist(), classes=3)
    states: dict[int, dict[str, Tensor]] = {}

    def prepare(grid):
        def before(silo, message, context):
            if silo == "c":
                context.node_config["data"] = str(
                    huge if round_of(message) == 2 else three["c"]
                )
                if "arrays" in context.state:
                    states[round_of(message)] = grid.state("c").arrays

        grid.before = before

    seen: list[Progress] = []
    federate(
        three,
        strategy=method,
        rounds=3,
        local_epochs=5,
        evaluate_every=0,
        prepare=prepare,
        watch=seen.append,
        fedala__max_epochs=2,
    )
    rates = "learning-rate or apple.dr-learning-rate" if method == "apple" else "learning-rate"
    assert [p.rejected for p in seen] == [
        {},
        {"c": f"the local training diverged (a lower {rates} may help)"},
        {},
    ]
    assert states[2].keys() == states[3].keys()
    for name, array in states[3].items():
        assert same(array, states[2][name])
        assert bool(torch.isfinite(array).all())


@pytest.mark.parametrize(
    "size, changes, cause",
    [
        (1e5, {"precision": "fp16"}, "left the range of precision = fp16, which ends at 65504"),
        (
            1e5,
            {"wire_dtype": "float16"},
            "'buffers' holds numbers too large for wire-dtype = float16",
        ),
        (
            1.0,
            {"batch_size": 1},
            "batch-size = 1, and this network's batch normalisation needs 2",
        ),
    ],
)
def test_a_setting_that_is_the_cause_is_named(tmp_path, tiny_bn, size, changes, cause):
    """Inputs beyond float16, a variance beyond it, a batch of one: the same runs with the default end well."""
    files = random_silos(tmp_path, [8, 8])
    for file in files.values():
        with np.load(file) as held:
            arrays = dict(held)
        scaled = {key: x * size for key, x in arrays.items() if key.startswith("x_")}
        np.savez(file, **{**arrays, **scaled})
    seen: list[Progress] = []
    options = {
        "strategy": "fedavg",
        "rounds": 1,
        "learning_rate": 1e-6,
        "model": "tiny-bn",
        "normalization": "none",
    }
    federate(files, **options, watch=seen.append)
    assert seen[0].rejected == {}
    with pytest.raises(RunFailedError, match=cause):
        federate(files, **options, **changes)


# ---- Faults of the program are blamed on nobody ----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["registration.data_summaries", "collector"])
def test_a_fault_of_the_server_is_blamed_on_no_silo(three, monkeypatch, place):
    """A ValueError of NumPy's or our own mistake, as a reply is checked, ends the run; no silo is left out for it."""

    def broken(*arguments):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(f"server.run.{place}.check_reply", broken)
    seen: list[Progress] = []
    with pytest.raises(ValueError, match="broadcast") as raised:
        federate(three, strategy="fedavg", rounds=1, watch=seen.append)
    assert not isinstance(raised.value, UserError) and seen == []


def test_what_a_silo_reports_of_a_fault_is_logged_as_an_error(three, caplog):
    """The traceback is in the silo's log, also at ERROR: both are one process here."""

    def train(*arguments):
        raise TypeError("no such thing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.base.client.SiloClient.fit", train)
        with pytest.raises(RunFailedError, match="no silo sent a usable update"):
            federate(three, strategy="fedavg", rounds=1, evaluate_every=0)
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert any("c reports an exception: TypeError in client/app.py:" in line for line in errors)
    assert "a fault of the program: no such thing" in errors
    assert any(
        r.exc_info and r.exc_info[0] is TypeError
        for r in caplog.records
        if r.levelname == "ERROR"
    )


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (TypeError("a mistake"), True),
        (UserError("a setting"), False),
        (RunFailedError("late"), False),
    ],
)
def test_the_server_logs_the_traceback_of_a_fault(
    tmp_path, monkeypatch, caplog, error, traceback
):
    def fail(loop):
        raise error

    monkeypatch.setattr(server.app.RoundLoop, "run", fail)
    settings = {**parse_settings({}).flat(), "out": str(tmp_path / "run")}
    with pytest.raises(type(error)):
        server.app.run_app(
            InProcessGrid(client_app, 1, settings),
            cast(Context, SimpleNamespace(run_config=settings)),
        )
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert bool(record.exc_info) == traceback and str(error) in record.getMessage()
