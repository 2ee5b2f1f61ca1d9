"""Boosted trees: the network against XGBoost's predictions, runs against loops of xgboost alone, and what leaves."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
import xgboost
from failing import fails
from near import near
from predictions import read_rows
from tiny import federate, rows_of, settings_of, write_silo

from client.export import export_model
from client.prediction.predict import predict_file
from models.flat import FlatModel
from models.networks.boosting import trees_of
from models.networks.trees import Trees, TreesSettings, check_nodes, count_used, nodes_of, split
from partitions.common.errors import DataError, UserError
from strategies.base.transport.payload import array_record

Numbers = npt.NDArray[Any]
# What boosting.py documents, written down once more
XGB: dict[str, Any] = {
    "objective": "binary:logistic",
    "base_score": 0.5,
    "eta": 0.3,
    "max_depth": 2,
    "lambda": 1.0,
    "min_child_weight": 1.0,
    "max_delta_step": 10.0,
    "tree_method": "hist",
    "nthread": 1,
    "verbosity": 0,
}
RUN: dict[str, Any] = {
    "strategy": "fedxgb",
    "model": "trees",
    "learning_rate": 0.3,
    "trees__depth": 2,
    "trees__capacity": 60,
    "rounds": 3,
}


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=n) > 0).astype(np.int64)
    return x, y


def silos(folder, *sizes):
    return {
        name: write_silo(folder / f"{name}.npz", *drawn(n, i))
        for i, (name, n) in enumerate(zip("abc", sizes, strict=False))
    }


def floored(file):
    x, y = rows_of(file)
    return np.floor(x.astype(np.float32) * 32) / 32, y.astype(np.float32)


def model_of(depth=2, outputs=2, capacity=60):
    return FlatModel(Trees((4,), outputs, TreesSettings(capacity=capacity, depth=depth)))


def outputs_of(run, vector, x):
    """The logit of class 1."""
    model = model_of()
    model.load(vector)
    return model.module(torch.from_numpy(x))[:, 1].detach().numpy()


@pytest.mark.parametrize(
    "objective, outputs",
    [("binary:logistic", 2), ("multi:softprob", 3), ("reg:squarederror", 1)],
)
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_network_predicts_as_xgboost(objective, outputs, depth):
    """Margins of 20 iterations, of rows that were not trained on; in trees that are not full, too."""
    x, _ = drawn(200, 1)
    rng = np.random.default_rng(2)
    y = rng.integers(outputs, size=200) if outputs > 1 else x[:, 0] * x[:, 1]
    options = {**XGB, "objective": objective, "max_depth": depth, "base_score": 0.5}
    options |= {"num_class": outputs} if outputs > 2 else {}
    booster = xgboost.train(options, xgboost.DMatrix(x, label=y), 20)
    model = model_of(depth, outputs, 25)
    nodes = nodes_of(model.layout, model.vector)
    nodes[:20] = trees_of(booster, nodes[:20])
    check_nodes(model.layout, model.vector)
    new, _ = drawn(100, 3)
    zero = np.zeros((100, outputs) if outputs > 2 else 100, np.float32)
    theirs = booster.predict(xgboost.DMatrix(new, base_margin=zero), output_margin=True)
    ours = model.module.eval()(torch.from_numpy(new)).detach().numpy()
    if outputs == 2:
        assert not ours[:, 0].any()
        ours = ours[:, 1]
    near(ours.reshape(theirs.shape), theirs, 2e-6)


def test_one_silo_is_xgboost_and_local_bit_for_bit(tmp_path):
    one = silos(tmp_path, 80)
    x, y = floored(one["a"])
    booster = xgboost.train(XGB, xgboost.DMatrix(x, label=y), 6)
    run = federate(one, **RUN, local_epochs=2)
    nodes = nodes_of(run.strategy.layout, run.strategy.state.model)
    assert count_used(nodes) == 6
    assert torch.equal(nodes[:6], trees_of(booster, nodes[:6]))
    alone = federate(one, **{**RUN, "strategy": "local"}, local_epochs=2)
    assert torch.equal(alone.personal("a"), run.strategy.state.model)


@pytest.mark.parametrize(
    "average, weights", [("samples", (0.25, 0.75)), ("silos", (0.5, 0.5)), ("sum", (1.0, 1.0))]
)
def test_two_silos_are_a_loop_of_xgboost(tmp_path, average, weights):
    """Each round a booster of each silo from the ensemble's margins; the ensemble's are the sums of all boosters'."""
    two = silos(tmp_path, 40, 120)
    run = federate(two, **RUN, fedxgb__average=average, local_epochs=2)
    data = [floored(file) for file in two.values()]
    boosters: list[tuple[float, xgboost.Booster]] = []

    def margin(x):
        total: Numbers = np.zeros(len(x), np.float32)
        for weight, booster in boosters:
            zero = xgboost.DMatrix(x, base_margin=np.zeros(len(x), np.float32))
            total = total + np.float32(weight) * booster.predict(zero, output_margin=True)
        return total

    for _ in range(3):
        made = [
            xgboost.train(XGB, xgboost.DMatrix(x, label=y, base_margin=margin(x)), 2)
            for x, y in data
        ]
        boosters += zip(weights, made, strict=True)
    new, _ = drawn(200, 9)
    new = np.floor(new * 32) / 32
    near(outputs_of(run, run.strategy.state.model, new), margin(new), 1e-5)


def test_the_own_model_is_the_ensemble_and_trees_that_stay(tmp_path):
    """In the last round a silo has the ensemble's 8 trees, the 2 that it sent, and 3 more; 4 bytes a number go up."""
    two = silos(tmp_path, 40, 60)
    run = federate(two, **RUN, local_epochs=2, fedxgb__epochs=3)
    received = run.received("a", 3)
    nodes, own = (nodes_of(run.strategy.layout, v) for v in (received, run.personal("a")))
    assert (count_used(nodes), count_used(own)) == (8, 13)
    assert torch.equal(own[:8], nodes[:8])
    after = nodes_of(run.strategy.layout, run.strategy.state.model)
    assert torch.equal(split(own[8:10])[1], split(after[8:10])[1])  # those that were sent
    assert torch.equal(split(own[8:10])[2] * 0.4, split(after[8:10])[2])
    assert run.values("bytes_up")[:3] == [2 * 4 * 2 * 10] * 3


def test_a_leaf_has_as_many_rows_as_a_batch_must_and_no_threshold_is_a_value(tmp_path):
    one = silos(tmp_path, 150)
    x, _ = rows_of(one["a"])
    options = {**RUN, "trees__depth": 5, "trees__min_child_weight": 0.0, "rounds": 8}
    run = federate(one, **options, min_batch_size=8)
    nodes = nodes_of(run.strategy.layout, run.strategy.state.model)
    model = model_of(5)
    model.load(run.strategy.state.model)
    leaves = model.module.leaves(torch.from_numpy(x.astype(np.float32)))
    assert leaves.shape[1] == 8
    for tree in range(8):
        _, counts = leaves[:, tree].unique(return_counts=True)
        assert len(counts) > 1
        assert counts.min() >= 8
    columns, thresholds, _ = split(nodes[:8])
    cut = thresholds[columns >= 0]
    assert torch.equal(cut * 32, (cut * 32).round())
    assert not set(cut.tolist()) & set(x.astype(np.float32).ravel().tolist())


def test_an_exported_ensemble_predicts_without_xgboost(tmp_path, monkeypatch):
    """The own model as a file, and as ONNX: as the network of the run."""
    two = silos(tmp_path, 40, 60)
    run = federate(two, **RUN, directory=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "xgboost", None)
    export_model(tmp_path / "run", "a", "last", tmp_path / "m.safetensors", onnx=True)
    x, y = drawn(20, 9)
    np.savez(tmp_path / "new.npz", x=x, y=y)
    table = read_rows(predict_file(tmp_path / "m.safetensors", tmp_path / "new.npz"))
    (onnx,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    p = 1 / (1 + np.exp(-outputs_of(run, run.personal("a"), x)))
    near([float(row["p_1"]) for row in table], p, 1e-5)
    near(onnx[:, 1], p)


def broken(kind, vector, shape):
    vector = vector.clone()
    columns, thresholds, leaves = split(vector.view(-1, *shape[1:]))
    part, value = {
        "column": (columns, 4.0),
        "fraction": (columns, 0.5),
        "negative": (columns, -2.0),
        "threshold": (thresholds, float("inf")),
        "leaf": (leaves, 3.1),  # the learning rate times 10 is 3
    }[kind]
    part[0, 0, 0] = value
    return vector


@pytest.mark.parametrize("kind", ["column", "fraction", "negative", "threshold", "leaf"])
def test_a_silos_invalid_trees_are_left_out(tmp_path, kind):
    three = silos(tmp_path, 40, 60, 50)

    def prepare(grid):
        def after(silo, message, reply):
            record = reply.content.array_records.get("model.trees")
            if silo == "b" and record is not None:
                vector = torch.from_numpy(record["vector"].numpy())
                reply.content["model.trees"] = array_record(
                    {"vector": broken(kind, vector, (1, 1, 10))}
                )
            return reply

        grid.after = after

    run = federate(three, **RUN, prepare=prepare)
    assert count_used(nodes_of(run.strategy.layout, run.strategy.state.model)) == 6
    assert len(run.values("loss", "b", "personal")) == 0


@pytest.mark.parametrize("kind", ["column", "fraction", "negative"])
def test_a_silo_refuses_a_servers_invalid_trees(tmp_path, kind):
    """No round ends: one line says what is wrong, before XGBoost has any part in it."""
    two = silos(tmp_path, 40, 60)

    def prepare(grid):
        def before(silo, message, context):
            record = message.content.array_records.get("model.global")
            if record is not None:
                vector = torch.from_numpy(record["vector"].numpy())
                message.content["model.global"] = array_record(
                    {"vector": broken(kind, vector, (60, 1, 10))}
                )

        grid.before = before

    with pytest.raises(Exception, match="a tree splits a column that is none of the 4"):
        federate(two, **RUN, prepare=prepare)


def test_no_numbers_make_the_network_read_outside_of_a_sample():
    model = model_of(3)
    for seed in range(20):
        torch.manual_seed(seed)
        bits = torch.randint(-(2**31), 2**31 - 1, model.vector.shape, dtype=torch.int32)
        model.load(bits.view(torch.float32))
        assert model.module(torch.randn(5, 4)).shape == (5, 2)
    model.load(torch.full_like(model.vector, float("nan")))
    assert model.module(torch.randn(5, 4)).shape == (5, 2)


def test_check_nodes_takes_an_empty_ensemble():
    model = model_of()
    check_nodes(model.layout, model.vector)
    assert count_used(nodes_of(model.layout, model.vector)) == 0
    model.vector[3] = float("nan")  # the first threshold
    fails(DataError, "no finite number", check_nodes, model.layout, model.vector)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "mlp"}, "model = mlp: not for fedxgb; set model = trees"),
        (
            {"strategy": "fedavg"},
            "model = trees: not for fedavg; fedxgb, local and pooled boost trees",
        ),
        ({"momentum": 0.9}, "momentum = 0.9: it means nothing to model = trees"),
        ({"wire_dtype": "float16"}, "wire-dtype = float16: it means nothing"),
        ({"class_weights": "balanced"}, "class-weights = balanced: it means nothing"),
        ({"trainable": "head"}, "trainable = head: it means nothing"),
        ({"trees__resolution": 10}, "trees.resolution = 10: a power of two"),
        ({"trees__capacity": 5}, "trees.capacity = 5: rounds = 3 may make 11 trees .* = 11"),
        ({"dp": True}, "dp = true: not with fedxgb: XGBoost's splits"),
        ({"secure_aggregation": True}, "the server appends each silo's trees"),
        ({"robust": "median"}, "robust = median: fedxgb .*none, screen are for it"),
        ({"robust": "clip"}, "robust = clip: fedxgb .*none, screen are for it"),
        ({"ala": True}, "ala = true: fedxgb"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    fails(UserError, message, settings_of, silos(tmp_path, 40, 60), **{**RUN, **changes})


def test_a_task_that_is_not_boosted_is_refused(tmp_path):
    rows: dict[str, Any] = {
        f"x_{part}": np.zeros((30, 4), np.float32) for part in ("train", "val", "test")
    }
    times = np.column_stack([np.arange(1, 31), np.ones(30)]).astype(np.float32)
    rows |= {f"y_{part}": times for part in ("train", "val", "test")}
    files = {}
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", task=np.array("survival"), **rows)
        files[name] = tmp_path / f"{name}.npz"
    fails(UserError, re.escape("not for survival with 1 outputs"), federate, files, **RUN)
