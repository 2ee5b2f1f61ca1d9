"""Hospitals whose columns stand in another order, whose labels are numbered another way, or whose names are others':
mapped by name, bit for bit as a file in the agreed order, or left out and named. In process, deployed, in `predict`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import fails
from flwr.app import ConfigRecord
from schemas import COLUMNS, DECLARED, LABELS, PERMUTED, hospitals, save
from tiny import comparable, federate, notes, one_block, same, simulated

from client.export import export_model
from client.prediction.predict import predict_file
from partitions.common.errors import UserError
from partitions.schema import Feature, Schema, parse_schema
from partitions.silo_file import check_silo_file
from strategies.base.state import State
from strategies.base.transport.data_summary import read_agreed
from strategies.base.transport.reporting import LONGEST, read_data_summary

OPTIONS: dict[str, Any] = {
    "strategy": "fedavg",
    "rounds": 3,
    "normalization": "agreed",
    "momentum": 0.5,
}


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """Three hospitals whose files are in the agreed order."""
    return hospitals(tmp_path_factory.mktemp("agreed"))


@pytest.fixture(scope="module")
def reference(agreed):
    return federate(agreed, **OPTIONS)


def assert_same(run, other):
    assert comparable(run.rows) == comparable(other.rows)
    states: list[tuple[State, State]] = [(run.strategy.state, other.strategy.state)]
    states += [(run.grid.state(silo), other.grid.state(silo)) for silo in run.strategy.silos]
    for one, two in states:
        assert one.arrays.keys() == two.arrays.keys()
        assert all(same(tensor, two.arrays[name]) for name, tensor in one.arrays.items())


# ---- Mapped by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agreement", ["", DECLARED], ids=["majority", "declared"])
@pytest.mark.parametrize("normalization", ["agreed", "silo", "none"])
def test_permuted_columns_and_flipped_labels(agreed, tmp_path, agreement, normalization):
    """Bit for bit the run of files in the agreed order, models and metrics; and a line says who maps what."""
    options = {**OPTIONS, "normalization": normalization, "agreed": agreement}
    run = federate(
        hospitals(tmp_path / "files", b=PERMUTED), directory=tmp_path / "run", **options
    )
    assert not run.federation.registration.left_out
    assert_same(run, federate(agreed, **options))
    assert notes(tmp_path / "run") == [
        "b has its columns and labels in another order: it maps them by name"
    ]


def test_everybody_in_another_order_than_declared(tmp_path, reference):
    files = hospitals(
        tmp_path / "files", a=PERMUTED, b=PERMUTED, c={"columns": ("sex", "age", "chol")}
    )
    assert_same(federate(files, agreed=DECLARED, **OPTIONS), reference)


@pytest.mark.parametrize("method", ["apple", "ditto", "fedper"])
def test_methods_that_keep_models_in_the_silo(agreed, tmp_path, method):
    options = {**OPTIONS, "strategy": method, "rounds": 2, **one_block(method)}
    assert_same(
        federate(hospitals(tmp_path, b=PERMUTED), **options), federate(agreed, **options)
    )


def test_resumed(tmp_path, reference):
    """What was agreed on holds: two silos that turn their columns round meanwhile map them to the run's order."""
    place: dict[str, Any] = {**OPTIONS, "directory": tmp_path / "run"}
    federate(hospitals(tmp_path / "files", c=PERMUTED), **{**place, "rounds": 1})
    later = hospitals(tmp_path / "files", a=PERMUTED, b=PERMUTED)
    run = federate(later, resume=True, **place)
    assert not run.federation.registration.left_out
    assert same(run.shared, reference.shared)


def test_rounded_sums_of_permuted_columns(agreed, tmp_path):
    """Under a policy the sums are rounded and remembered, in the order of the file: the agreed mean is the same."""
    rules = tmp_path / "policy.toml"
    rules.write_text(
        "min-sum-samples = 5\nmin-batch-size = 1\nmin-metric-samples = 1\nfloor = 5\n"
    )
    options = {**OPTIONS, "rounds": 1, "policy": str(rules)}
    run = federate(
        hospitals(tmp_path / "files", b=PERMUTED),
        state_dir=tmp_path / "one",
        directory=tmp_path / "r",
        **options,
    )
    other = federate(agreed, state_dir=tmp_path / "two", directory=tmp_path / "s", **options)
    assert "sum" in run.federation.registration.summaries["b"]
    assert {
        k: run.federation.registration.summaries["b"][k] for k in ("sum", "square_sum")
    } == {k: other.federation.registration.summaries["b"][k] for k in ("sum", "square_sum")}
    assert run.strategy.plan.numbers["mean"] == other.strategy.plan.numbers["mean"]
    assert comparable(run.rows) == comparable(other.rows)


def test_a_hospital_without_patients_of_a_class(tmp_path):
    """It numbers "dead" 1, because nobody is ill there; the others have 2 for it: with names it is 2 there, too."""

    def without_ill(folder, labels):
        files = dict(hospitals(folder))
        with np.load(files["c"]) as npz:
            arrays: dict[str, Any] = dict(npz)
        for split in ("train", "val", "test"):
            arrays[f"y_{split}"] = np.where(arrays[f"y_{split}"] == 0, 0, labels.index("dead"))
        np.savez(
            files["c"],
            **{**arrays, "label_names": np.array(labels), "classes": np.array(len(labels))},
        )
        return files

    run = federate(without_ill(tmp_path / "one", ("well", "dead")), **OPTIONS)
    assert_same(run, federate(without_ill(tmp_path / "two", LABELS), **OPTIONS))


def test_findings_and_measurements(tmp_path):
    """Columns of labels move like those of inputs; of measurements their sums, too."""
    for task in ("multilabel", "regression"):
        runs = []
        for folder, order in (("one", [0, 1, 2]), ("two", [2, 0, 1])):
            files = hospitals(
                tmp_path / f"{task}-{folder}", **({"b": PERMUTED} if folder == "two" else {})
            )
            for name, file in files.items():
                own = order if name == "b" else [0, 1, 2]
                with np.load(file) as npz:
                    arrays: dict[str, Any] = {k: v for k, v in npz.items() if k != "classes"}
                rng = np.random.default_rng(ord(name))
                for split in ("train", "val", "test"):
                    y = rng.normal(size=(len(arrays[f"y_{split}"]), 3))
                    y = (
                        (y > 0).astype(np.int8)
                        if task == "multilabel"
                        else y.astype(np.float32) * [1, 5, 90] + 7
                    )
                    arrays[f"y_{split}"] = np.ascontiguousarray(
                        y[:, own].astype(np.float32 if task == "regression" else np.int8)
                    )
                arrays["label_names"] = np.array(LABELS)[own]
                np.savez(file, **{**arrays, "task": np.array(task)})
            runs.append(federate(files, **OPTIONS))
        assert not runs[1].federation.registration.left_out
        assert_same(runs[1], runs[0])


# ---- Left out and named ----------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "a foreign column": (
        {"feature_names": ("age", "sex", "bmi")},
        "it has columns named bmi, most silos have chol",
    ),
    "a foreign label": (
        {"label_names": ("well", "ill", "gone")},
        "it has labels named gone, most silos have dead",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_foreign_name(agreed, tmp_path, kind):
    changes, reason = MISFITS[kind]
    files = hospitals(tmp_path / "files", c=changes)
    run = federate(files, directory=tmp_path / "run", **OPTIONS)
    assert (
        list(run.strategy.silos) == ["a", "b"]
        and reason in run.federation.registration.left_out["c"]
    )
    assert len(run.federation.registration.left_out["c"]) <= LONGEST
    without = federate({name: agreed[name] for name in ("a", "b")}, **OPTIONS)
    assert comparable(run.rows) == comparable(without.rows)
    assert notes(tmp_path / "run") == [run.federation.registration.left_out["c"]]


def test_another_unit(tmp_path):
    units = [("years", "", unit) for unit in ("mg/dl", "", "mmol/l")]
    changes = {name: {"feature_units": own} for name, own in zip("abc", units, strict=True)}
    run = federate(hospitals(tmp_path, **changes), **OPTIONS)
    assert (
        "c is left out: it has chol in mmol/l, most silos have mg/dl"
        in run.federation.registration.left_out["c"]
    )
    assert run.federation.registration.data_spec.schema.features[2] == Feature("chol", "mg/dl")


def pictures_made_with(path: Path, window: list[float]) -> Path:
    """A hospital's file of scans that were read with a window, as its recipe says."""
    recipe = {
        "version": 1,
        "kind": "pictures",
        "pictures": {"shape": [4, 4, 1], "dtype": "float32", "window": window},
        "expected": {"formats": ["dicom"], "planes": ["axial"]},
    }
    rng = np.random.default_rng(sum(map(ord, path.stem)))
    parts: dict[str, Any] = {
        f"x_{part}": rng.random((8, 1, 4, 4), np.float32) for part in ("train", "test")
    }
    parts |= {f"y_{part}": np.arange(8) % 2 for part in ("train", "test")}
    np.savez(path, **parts, recipe=np.array(json.dumps(recipe)))
    return path


def test_another_window(tmp_path):
    """How inputs were made is in what hospitals compare, and in its digest; a federation may declare it."""
    windows = {"a": [40.0, 400.0], "b": [40.0, 400.0], "c": [-600.0, 1500.0]}
    files = {
        name: pictures_made_with(tmp_path / f"{name}.npz", own) for name, own in windows.items()
    }
    run = federate(files, directory=tmp_path / "run", strategy="fedavg", rounds=1)
    reason = "c is left out: it has inputs made with window -600,1500, most silos have 40,400: import them alike"
    assert run.federation.registration.left_out == {"c": reason}
    assert notes(tmp_path / "run") == [reason] and list(run.strategy.silos) == ["a", "b"]
    declared = json.dumps({"schema": {"inputs": {"window": "-600,1500"}}})
    run = federate(files, strategy="fedavg", rounds=1, agreed=declared)
    assert list(run.strategy.silos) == ["c"]
    lines = [
        check.detail
        for name in "abc"
        for check in check_silo_file(files[name])
        if check.name == "schema"
    ]
    assert all(
        "made with orientation axial, slices 1, spacing none, window" in line for line in lines
    )
    assert len({line.rpartition(" ")[2] for line in lines}) == 2  # digests


def test_another_number_format(tmp_path):
    """Bytes are scaled by 255, float32 pictures are taken as they are: they are not of one kind."""
    files = {}
    for name, dtype in (("a", np.uint8), ("b", np.uint8), ("c", np.float32)):
        x = np.random.default_rng(0).integers(0, 2, (8, 4, 4, 1)).astype(dtype)
        parts: dict[str, Any] = {
            f"x_{split}": x if dtype == np.uint8 else np.moveaxis(x, -1, 1)
            for split in ("train", "test")
        }
        files[name] = tmp_path / f"{name}.npz"
        np.savez(files[name], **parts, y_train=np.arange(8) % 2, y_test=np.arange(8) % 2)
    run = federate(files, strategy="fedavg", rounds=1)
    assert (
        "c is left out: it has samples of float32, most silos have uint8"
        in run.federation.registration.left_out["c"]
    )


def test_missing_names(agreed, tmp_path, reference):
    """A file without names takes part as before, and is named; where the federation file has a schema it may not."""
    files = hospitals(tmp_path / "files", c={"feature_names": None, "label_names": None})
    run = federate(files, directory=tmp_path / "run", **OPTIONS)
    assert_same(run, reference)
    assert notes(tmp_path / "run") == [
        f"c names no {what}: they are taken to be in the order of the other silos"
        for what in ("features", "labels")
    ]
    run = federate(files, agreed=DECLARED, **OPTIONS)
    assert list(run.strategy.silos) == ["a", "b"]
    assert (
        "c is left out: it has no names of its columns, the federation file has age, sex and 1 more"
        in (run.federation.registration.left_out["c"])
    )
    features = json.dumps({"schema": {"labels": list(LABELS)}})
    unlabelled = hospitals(
        tmp_path / "unlabelled", b={"feature_names": None}, c={"label_names": None}
    )
    run = federate(unlabelled, agreed=features, **OPTIONS)
    assert list(run.federation.registration.left_out) == ["c"], (
        "columns are not declared: b need not name them"
    )


def test_nobody_names_anything(tmp_path):
    """The messages and the numbers are those of before."""
    nothing = {"feature_names": None, "label_names": None}
    run = federate(hospitals(tmp_path, **dict.fromkeys("abc", nothing)), **OPTIONS)
    assert (
        "schema" not in run.strategy.plan.numbers and not run.federation.registration.left_out
    )


def test_the_declared_schema_stands_above_the_majority(tmp_path):
    other = {"feature_names": ("a", "b", "c")}
    run = federate(hospitals(tmp_path, a=other, b=other), agreed=DECLARED, **OPTIONS)
    assert list(run.strategy.silos) == ["c"]
    assert (
        "it has columns named a, b and 1 more, the federation file has age, sex and 1 more"
        in run.federation.registration.left_out["b"]
    )


def test_a_silo_that_cannot_map_says_so(agreed, caplog):
    """A server that sends a schema of other columns than the silo has gets no model."""
    wrong = Schema((Feature("age"), Feature("sex"), Feature("bmi")))

    def before(silo, message, context):
        config: Any = message.content.get("config", {})
        if silo == "b" and message.metadata.message_type == "train":
            config["schema"] = wrong.text

    run = federate(agreed, before=before, **{**OPTIONS, "rounds": 1})
    assert {r.silo for r in run.rows if r.metric == "rejected"} == {"b"}
    assert "b cannot take the run's schema: it has chol where bmi is wanted" in caplog.text


SUMMARIES: dict[str, tuple[Any, str]] = {
    "a list": (["age"], "says schema = "),
    "no JSON": ("{", "has no usable schema: it is no JSON"),
    "a deep one": ("[" * 100_000, "has no usable schema: it is no JSON"),
    "an endless one": (
        "x" * 2_000_000,
        "has no usable schema: a schema has at most 1048576 characters",
    ),
    "the smallest and the largest of the data": (
        '{"features":[{"name":"a","min":3}]}',
        "has no usable schema",
    ),
    "an escape sequence": ('{"labels":["a\\u001bb"]}', "has no usable schema"),
    "too few columns": ('{"features":["age"]}', "names 1 columns, of 3"),
    "too many labels": ('{"labels":["a","b","c","d"]}', "names 4 labels, of 3"),
}


@pytest.mark.parametrize("kind", SUMMARIES)
def test_what_a_summary_may_not_say(agreed, kind):
    content, reason = SUMMARIES[kind]

    def after(silo, message, reply):
        if (silo, message.metadata.message_type) == ("c", "query"):
            summary: Any = reply.content["summary"]
            reply.content["summary"] = ConfigRecord({**dict(summary), "schema": content})
        return reply

    run = federate(agreed, after=after, **{**OPTIONS, "rounds": 1})
    assert list(run.strategy.silos) == ["a", "b"]
    assert reason in next(iter(run.federation.registration.left_out.values()))


def test_a_summary_states_no_values_of_the_data(agreed):
    """Names, and what the file declares of units and ranges: no smallest or largest value."""
    grid = federate(agreed, **{**OPTIONS, "rounds": 1}).grid
    reply = next(
        reply for message, reply in grid.traffic if message.metadata.message_type == "query"
    )
    assert parse_schema(
        json.loads(read_data_summary(reply.content["summary"])["schema"])
    ) == Schema(tuple(map(Feature, COLUMNS)), LABELS, "float32")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"schema": []}, "agreed: schema: must be keys and values"),
        (
            {"schema": {"labels": ["a", "b"]}, "classes": 3},
            "agreed: schema names 2 labels, and classes = 3",
        ),
        (
            {"schema": {"features": ["a", "b"]}, "shape": [3]},
            "agreed: schema names 2 columns, and shape = [3]",
        ),
    ],
)
def test_what_cannot_be_declared(said, reason):
    with pytest.raises(UserError) as caught:
        read_agreed(json.dumps(said))
    assert reason in str(caught.value)


# ---- A simulation, the model's card, and predict ------------------------------------------------------------------


def test_a_simulation_of_a_file_keeps_its_names(tmp_path):
    """`simulate --data FILE`: summaries and models have them; a declared order is mapped to, pooled or not."""
    (tmp_path / "turned").mkdir()
    file, turned = save(tmp_path / "all.npz"), save(tmp_path / "turned/all.npz", **PERMUTED)
    for method in ("fedavg", "pooled"):
        options: dict[str, Any] = {
            "strategy": method,
            "silos": 2,
            "rounds": 2,
            "partition": "iid",
            "mlp.hidden": "4",
        }
        runs = [simulated(dataset=str(f), agreed=DECLARED, **options) for f in (file, turned)]
        assert all(summary["schema"] for summary in runs[0].registration.summaries.values())
        assert comparable(runs[0].history.rows) == comparable(runs[1].history.rows)


def test_predict_maps_by_name(agreed, tmp_path, capsys):
    """The model of a silo whose file is permuted: its card has the run's schema, and predicts files in any order."""
    files = hospitals(tmp_path / "files", b=PERMUTED)
    federate(files, directory=tmp_path / "run", **OPTIONS)
    model = tmp_path / "b.safetensors"
    card = export_model(tmp_path / "run", "b", "last", model)
    schema = parse_schema(card.columns_and_labels)
    assert (schema.names, schema.labels, schema.dtype) == (COLUMNS, LABELS, "float32")
    answers = predict_file(model, agreed["b"])
    assert not capsys.readouterr().err
    assert predict_file(model, files["b"]) == answers
    assert "has its columns and labels in another order: mapped by name" in (
        capsys.readouterr().err
    )
    bare = save(tmp_path / "files/b.npz", feature_names=None, label_names=None)
    assert predict_file(model, bare) == answers
    assert "names no columns: they are taken to be age, sex, chol" in capsys.readouterr().err
    for changes, reason in (
        ({"feature_names": ("age", "sex", "bmi")}, "has columns named bmi, the model has chol"),
        ({"label_names": ("well", "ill", "gone")}, "has labels named gone, the model has dead"),
        ({"feature_units": ("months", "", ""), "feature_names": COLUMNS}, ""),
    ):
        other = save(tmp_path / "other.npz", **changes)
        if reason:
            said = fails(UserError, None, predict_file, model, other)
            assert reason in said
        else:
            predict_file(model, other)


def test_a_model_of_before(agreed, tmp_path):
    """A state that knows of no schema: its model takes what has its shape."""
    federate(agreed, directory=tmp_path / "run", **OPTIONS)
    file = max((tmp_path / "run/checkpoint/fedavg-7/silos").rglob("round-*.safetensors"))
    silo = file.parent.name if file.parent.name in agreed else file.parent.parent.name
    state = State.load(file)
    del state.numbers["model"]["schema"]
    state.save(file)
    model = tmp_path / "m.safetensors"
    assert export_model(tmp_path / "run", silo, "last", model).columns_and_labels == {}
    assert predict_file(model, agreed[silo]).startswith("index,label,p_0")
