"""Whole runs whose silos send changes, or only what has changed: which methods can, what is kept, what it costs."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from cases import CASES, OPTIONS, typical
from flwr.app import Error, Message
from representatives import product, seldom
from resuming import assert_equal, crash_after, interrupted
from tiny import comparable, federate, forget_models, same, simulated, train_replies, write_silo
from torch import nn
from two_layers import DEEP

from client.site.release import describe_reply
from models.networks.registry import MODELS, ModelSpec
from partitions.common.errors import UserError
from strategies import strategies
from strategies.base.transport.error_feedback import PROPOSED, RESIDUAL
from strategies.base.transport.payload import array_record, decode

TOPK = {"wire_dtype": "topk", "wire_topk": 0.2}
FEW = {
    "strategy": "fedavg",
    "rounds": 4,
    "batch_size": 4,
    "learning_rate": 0.3,
    "mlp__hidden": "6",
}
NAMES = (
    "apfl condistfl ditto fedadagrad fedadam fedalt fedas fedavg fedavg-ft fedavgm fedawa fedbabu fedbn fedem fedlc "
    "fednova fedntd fedper fedphp fedprox fedprox-ft fedrep fedrod fedsa-lora fedsim fedyogi floco gpfl knn-per local "
    "moon per-fedavg pfedme pooled"
)
SOUND = frozenset(NAMES.split())


def test_which_methods_can():
    """Those that were looked at, and no other: whoever adds a method decides, and says so here."""
    for name, method in strategies().items():
        assert (name in SOUND) == (method.info.aggregation.lossy or not method.info.uploads), (
            name
        )


@typical(CASES)
def test_every_method_is_refused_or_loses_nothing_where_all_is_sent(three, name, tiny_bn):
    """topk with k = Σ, so that C(p) = p: the run is that in float32 up to rounding, which says that the base is right.

    The last silo misses a round, and a reply of the first is lost.
    """
    settings, _, _ = CASES[name]
    options = {**DEEP, **OPTIONS, **settings, "rounds": 3, "learning_rate": 0.05}

    def disturb(grid):
        grid.absent.add(("c", 2))
        grid.after = lambda silo, message, reply: (
            Message(Error(1, "lost"), reply_to=message)
            if grid.key_of(message) == ("a", 2)
            else reply
        )

    def go(**changes):
        return federate(three, **{**options, **changes}, prepare=disturb)

    if settings["strategy"] not in SOUND or "ala" in settings:
        with pytest.raises(
            UserError, match=rf"^wire-dtype = topk: not for {settings['strategy']}.*: [^\n]+$"
        ):
            go(wire_dtype="topk")
        with pytest.raises(
            UserError, match="wire-dtype = float16, wire-feedback = on: not for"
        ):
            go(wire_dtype="float16", wire_feedback="on")
        if settings["strategy"] != "fedxgb":  # which has columns to name exactly
            go(wire_dtype="float16", rounds=1)
        return
    plain, coded = go(), go(wire_dtype="topk", wire_topk=1.0)
    for silo in three:
        assert torch.allclose(coded.personal(silo), plain.personal(silo), atol=2e-5)
    for key, vector in plain.strategy.state.arrays.items():
        assert torch.allclose(coded.strategy.state.arrays[key], vector, atol=2e-5)


@pytest.mark.parametrize("kind", ["int8", "topk", "float16"])
def test_what_is_sent_and_what_is_kept(three, kind):
    """The bytes of the history are those that the messages hold; what a silo owes does not leave it."""
    run = federate(three, **FEW, wire_dtype=kind, wire_topk=0.2, wire_feedback="on")
    size = run.strategy.layout.size
    one = {"int8": size + 4, "topk": 8 * round(0.2 * size), "float16": 2 * size}[kind]
    assert run.values("bytes_up")[:4] == [3 * one] * 4
    assert run.values("bytes_down")[0] == 3 * size * (2 if kind == "float16" else 4)
    residuals = {
        k: v
        for k, v in run.grid.state("a").arrays.items()
        if k not in ("candidate", "reported")
    }
    assert residuals.keys() == {
        "personal",
        "best",
        f"{RESIDUAL}model",
        f"{PROPOSED}{RESIDUAL}model",
    }
    for (silo, _), reply in train_replies(run.grid):
        assert set(reply.content.array_records) == {"model.model"}
        audited = [
            record for record in describe_reply(reply) if record["name"].startswith("model.")
        ]
        # A header for each array
        assert sum(record["bytes"] for record in audited) == one + 128 * len(audited)
        sent = (
            decode(reply.content, base=lambda name: torch.zeros(size))[0].models["model"].vector
        )
        assert not any(same(sent, kept) for kept in run.grid.state(silo).arrays.values())


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_a_reply_that_is_lost_or_left_out_counts_in_neither_place(three, kind):
    """Silo a's residual is the same when round 3 begins as when round 2 began: of round 2 nothing arrived."""
    residuals = {}

    def prepare(grid):
        def before(silo, message, context):
            if silo == "a" and message.metadata.message_type == "train":
                assert ("counted" in message.content["config"]) and message.content["config"][
                    "counted"
                ] in (0, 1, 3)

        def after(silo, message, reply):
            if silo == "a" and message.metadata.message_type == "train":
                residuals[grid.key_of(message)[1]] = grid.state("a").arrays.get(
                    f"{RESIDUAL}model", torch.zeros(0)
                )
            return (
                Message(Error(1, "lost"), reply_to=message)
                if grid.key_of(message) == ("a", 2)
                else reply
            )

        grid.before, grid.after = before, after

    run = federate(three, **FEW, wire_dtype=kind, prepare=prepare)
    assert residuals[1].numel() == 0
    assert same(residuals[2], residuals[3])
    assert not same(residuals[3], residuals[4])
    assert run.strategy.state.numbers["counted"] == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize(
    "wire", [{"wire_dtype": "int8"}, TOPK, {"wire_dtype": "bfloat16", "wire_feedback": "on"}]
)
def test_resumed_bit_for_bit(three, tmp_path, wire):
    whole = federate(three, directory=tmp_path / "whole", **FEW, **wire)
    interrupted(three, tmp_path / "parts", watch=crash_after(2), **FEW, **wire)
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **FEW, **wire)
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))


@pytest.mark.parametrize("wire", [{"wire_dtype": "int8"}, TOPK, {"wire_sparse": True}])
@pytest.mark.parametrize("way", ["pickle", "deep copy"])
def test_the_same_numbers_however_messages_are_carried(three, wire, way):
    """As bytes (Ray, and the object store's arrays), or as tensors in one process."""
    carry = copy.deepcopy if way == "deep copy" else lambda x: pickle.loads(pickle.dumps(x))

    def prepare(grid):
        def after(silo, message, reply):
            reply.content = carry(reply.content)
            return reply

        grid.after = after

    carried, plain = (federate(three, **FEW, **wire, prepare=p) for p in (prepare, None))
    assert comparable(carried.rows) == comparable(plain.rows)


# ---- Accuracy ------------------------------------------------------------------------------------------------------

DIGITS: dict[str, Any] = {
    "silos": 12,
    "partition": "dirichlet",
    "rounds": 20,
    "strategy": "fedavg",
    "batch-size": 10,
    "mlp.hidden": "64",
    "evaluate-every": 20,
}


@functools.cache
def accuracy(**wire):
    """Mean test accuracy of the received model, after 20 rounds."""
    rows = simulated(**DIGITS, **wire).history.rows
    found = [
        r.value
        for r in rows
        if (r.round, r.split, r.snapshot, r.metric) == (21, "test", "received", "accuracy")
    ]
    assert len(found) == 12
    return sum(found) / 12


@pytest.fixture(scope="module")
def in_float32():
    return accuracy()


@pytest.mark.parametrize(
    ("wire", "within"),
    [
        seldom({"wire_dtype": "int8"}, 0.01),
        seldom({"wire_dtype": "topk", "wire_topk": 0.05}, 0.03),
        seldom({"wire_dtype": "topk", "wire_topk": 0.01}, 0.08),
        seldom({"wire_dtype": "float16", "wire_feedback": "on"}, 0.01),
    ],
)
def test_accuracy_is_near_that_of_float32(in_float32, wire, within):
    assert abs(accuracy(**wire) - in_float32) <= within


def test_without_feedback_what_is_not_sent_is_missed(in_float32):
    coarse = {"wire_dtype": "topk", "wire_topk": 0.01}
    with_it, without = accuracy(**coarse), accuracy(**coarse, wire_feedback="off")
    assert with_it > without + 0.1


# ---- Hostile silos -------------------------------------------------------------------------------------------------


def tampered(reply, name, value):
    record = reply.content["model.model"]
    record[name] = array_record({"v": value})["v"]


def ints(*given):
    return torch.tensor(given, dtype=torch.int32)


@pytest.mark.parametrize(
    ("wire", "name", "value", "why"),
    [
        (TOPK, "places", ints(-1, 1, 2, 3), "places are not all in"),
        (TOPK, "places", ints(0, 1, 2, 2**31 - 1), "places are not all in"),
        (TOPK, "places", ints(0, 1, 1, 2), "ascending"),
        (TOPK, "places", ints(0), "not torch.int32 of"),
        (TOPK, "values", torch.full((4,), math.nan), "not finite"),
        ({"wire_dtype": "int8"}, "scales", torch.tensor([math.nan]), "no sizes of steps"),
        (
            {"wire_dtype": "int8"},
            "values",
            torch.zeros(64, dtype=torch.int8),
            "not torch.int8 of",
        ),
        (
            {"wire_dtype": "int8"},
            "values",
            torch.zeros(2**21, dtype=torch.int8),
            "its reply has more than",
        ),
        ({"wire_sparse": True}, "runs", ints(0, 2**31 - 1).view(1, 2), "its runs are not"),
    ],
)
def test_hostile_changes_are_left_out_with_one_line(three, wire, name, value, why):
    def prepare(grid):
        def after(silo, message, reply):
            if grid.key_of(message) == ("c", 2) and message.metadata.message_type == "train":
                if "wire_sparse" in wire:  # dense layers change whole: as if it had sent runs
                    reply.content["model.model"] = array_record({"values": torch.ones(3)})
                    config = reply.content["config"]
                    config["manifest"] = config["manifest"].replace(
                        '"float32"', '"float32", "form": "sparse"'
                    )
                tampered(reply, name, value)
            return reply

        grid.after = after

    seen = []
    options = {**FEW, "mlp__hidden": "", "wire_topk": 1 / 3}
    run = federate(
        three, **{**wire, **options}, prepare=prepare, watch=lambda p: seen.append(p.rejected)
    )
    assert [set(rejected) for rejected in seen] == [set(), {"c"}, set(), set()]
    assert why in seen[1]["c"] and "\n" not in seen[1]["c"] and len(seen[1]["c"]) <= 300
    assert len(run.values("round_seconds")) == 5


# ---- Only what has changed -----------------------------------------------------------------------------------------


class CodedWords(nn.Module):
    """The mean of three words' rows of a table, and a linear layer."""

    def __init__(self, classes):
        super().__init__()
        self.embedding = nn.Embedding(500, 8)
        self.linear = nn.Linear(8, classes)

    def forward(self, x):
        return self.linear(self.embedding(x.long().clamp(0, 499)).mean(1))


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Two silos of twelve texts of three words of 500; makes ``words`` known, a network for them."""
    spec = ModelSpec(
        "words", "tests", "any input", lambda shape, classes, _: CodedWords(classes), ("table",)
    )
    monkeypatch.setitem(MODELS, "words", spec)
    draw = torch.Generator().manual_seed(0)
    files = {}
    for name in ("a", "b"):
        x = torch.randint(500, (12, 3), generator=draw)
        files[name] = write_silo(
            tmp_path / f"{name}.npz", x.double().numpy(), (x[:, 0] % 2).tolist()
        )
    yield files
    forget_models()


@product(dtype=["float32", "bfloat16"], strategy=["fedavg", "feddyn", "fedamp"])
def test_rows_of_an_embedding_that_were_not_touched_are_not_sent(words, strategy, dtype):
    """Bit for bit the run that sends all; up go at most the 36 rows of 8, their places, and the linear layer."""
    options = {
        "strategy": strategy,
        "model": "words",
        "rounds": 3,
        "local_epochs": 2,
        "batch_size": 4,
    }
    sparse, dense = (
        federate(words, **options, wire_dtype=dtype, wire_sparse=s) for s in (True, False)
    )
    rows = [row for row in comparable(sparse.rows) if "bytes_up" not in row]
    assert rows == [row for row in comparable(dense.rows) if "bytes_up" not in row]
    for key, vector in dense.strategy.state.arrays.items():
        assert same(sparse.strategy.state.arrays[key], vector)
    width = 4 if dtype == "float32" else 2
    if strategy == "fedavg":
        for up in sparse.values("bytes_up")[:3]:
            assert 0 < up <= 2 * (36 * (8 * width + 8) + 18 * width + 8)
    assert dense.values("bytes_up")[0] == 2 * width * (500 * 8 + 18)


def test_sparse_is_for_vectors_not_for_changes(two):
    with pytest.raises(
        UserError, match=r"^wire-sparse = true: with wire-dtype = int8 changes are sent"
    ):
        federate(two, strategy="fedavg", wire_sparse=True, wire_dtype="int8")
