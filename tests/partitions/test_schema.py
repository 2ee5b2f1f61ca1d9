"""Schemas: what is one, its digest, what fits what, and data brought to the agreed order."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from failing import fails
from taken import imported, write_lines

from partitions.common.errors import DataError
from partitions.inputs import reorder_data
from partitions.recipes.pictures import read_any
from partitions.schema import (
    Feature,
    Schema,
    difference,
    load_schema,
    majority,
    parse_schema,
    read_schema,
)
from partitions.silo_file import (
    check_silo_file,
    read_dataset_file,
    read_silo_file,
    write_silo_file,
)
from partitions.simulated import join
from partitions.splits import Array, SiloData, Split
from partitions.stored import together
from server.results.manifest import write_partition

AGE = Feature("age", "years", (0.0, 120.0))
HEART = Schema((AGE, Feature("sex")), ("well", "ill"), "float32")
CONTENT = {
    "features": [{"name": "age", "unit": "years", "range": [0, 120]}, "sex"],
    "labels": ["well", "ill"],
    "dtype": "float32",
}


def named(*names, labels=(), dtype=""):
    return Schema(tuple(map(Feature, names)), labels, dtype)


def arrays(**changes):
    """A file of two columns and two classes; every row is known by its values."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    y = np.array([0, 0, 0, 1, 1, 1])
    parts = {
        f"{kind}_{split}": v
        for split in ("train", "val", "test")
        for kind, v in (("x", x), ("y", y))
    }
    texts = {
        "feature_names": np.array(["age", "sex"]),
        "label_names": np.array(["well", "ill"]),
    }
    return {**parts, **texts, **{key: np.asarray(value) for key, value in changes.items()}}


def save(path, content):
    np.savez(path, **content)
    return path


# ---- What is a schema ------------------------------------------------------------------------------------------------


def test_the_same_schema_in_every_form(tmp_path):
    """The digest, by hand: printf '%s' '<the canonical form>' | sha256sum."""
    forms = {
        "a.toml": 'features = [{name = "age", unit = "years", range = [0, 120]}, "sex"]\n'
        'labels = ["well", "ill"]\ndtype = "float32"\n',
        "a.yaml": "{dtype: float32, labels: [well, ill],\n"
        " features: [{range: [0, 120.0], unit: years, name: age}, {name: sex}]}\n",
        "a.json": HEART.text,
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        assert load_schema(tmp_path / name) == HEART == parse_schema(CONTENT)
    assert HEART.text == (
        '{"dtype":"float32","features":[{"name":"age","range":[0.0,120.0],"unit":"years"},{"name":"sex"}],'
        '"labels":["well","ill"]}'
    )
    assert HEART.digest == "e428b9d26bea3b6c4b3adab72d6e6a451844793f6cc113762878cce0a9a13933"
    assert "columns age [years, 0..120], sex; labels well, ill; dtype float32; SHA-256 " in str(
        HEART
    )


def test_names_that_only_look_different_are_the_same():
    """Composed or decomposed letters, a no-break space: as two programs write the same header."""
    assert parse_schema({"features": ["gr\u00f6\u00dfe  cm"]}) == parse_schema(
        {"features": ["gro\u0308\u00dfe\u00a0cm"]}
    )
    assert parse_schema({"features": ["Age"]}) != parse_schema({"features": ["age"]})


@pytest.mark.parametrize(
    "content, reason",
    [
        ([], "must be keys and values; a schema has features, labels, dtype, inputs and table"),
        ({"columns": []}, "'columns' is no key of it; a schema has features"),
        ({"features": "age"}, "features = 'age': must be a list"),
        ({"features": [3]}, "features.1 = 3: must be keys and values"),
        ({"features": [{"unit": "mm"}]}, "the key features.1.name is missing"),
        ({"features": [{"name": "age", "mean": 3}]}, "'features.1.mean' is no key of it"),
        ({"features": [{"name": 3}]}, "features.1.name = 3: must be"),
        ({"features": ["age", "age"]}, "two columns are called 'age'"),
        ({"features": [""]}, "has no usable name"),
        ({"features": ["a\x1b[2J"]}, "has no usable name"),
        ({"features": ["a\u202eb"]}, "has no usable name"),
        ({"features": ["x" * 201]}, "has no usable name"),
        ({"features": [{"name": "a", "unit": "\x07"}]}, "has no usable name"),
        ({"features": [{"name": "a", "range": [1, 0]}]}, "the smaller one first"),
        (
            {"features": [{"name": "a", "range": [0, float("inf")]}]},
            "a value is no text, number",
        ),
        ({"features": [{"name": "a", "range": [0]}]}, "the key features.1.range.2 is missing"),
        (
            {"features": [{"name": "a", "range": [0, "1"]}]},
            "features.1.range.2 = '1': must be a valid number",
        ),
        (
            {"features": [{"name": "a", "range": [0, 10**400]}]},
            "range.2 = 1000000.*: must be a valid number",
        ),
        ({"labels": [False, True]}, "labels.1 = False: must be a valid string"),
        ({"labels": ["a", "a"]}, "two labels are called 'a'"),
        ({"table": {"a": float("nan")}}, "a value is no text, number"),
        ({"dtype": 32}, "dtype = 32: must be a valid string"),
        ({"features": [f"{i:0199d}" for i in range(6000)]}, "a schema has at most 1048576"),
    ],
)
def test_what_is_no_schema(content, reason):
    said = fails(ValueError, reason, parse_schema, content)
    assert said.isprintable() and len(said) < 200


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '"a"', "x" * (1 << 20) + "x"])
def test_what_a_silo_may_not_send(text):
    fails(ValueError, "a schema has", read_schema, text)


def test_files_that_are_no_schema(tmp_path):
    for name, text in {
        "a.toml": "features = [",
        "b.yaml": "{",
        "c.json": "{",
        "d.yaml": "[" * 5000,
    }.items():
        (tmp_path / name).write_text(text)
        fails(ValueError, name, load_schema, tmp_path / name)
    fails(ValueError, r"does not end in .toml", load_schema, tmp_path / "schema.txt")
    fails(ValueError, "cannot be read", load_schema, tmp_path / "none.toml")


# ---- What fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own, agreed, reason",
    [
        (named(), HEART, ""),
        (named("sex", "age", labels=("ill", "well")), HEART, ""),
        (named("sex", "age", labels=("ill",)), HEART, ""),
        (named("sex", "Age"), HEART, "columns named Age, most silos have age"),
        (named("age"), HEART, "no columns named sex, most silos have them"),
        (named(labels=("well", "dead")), HEART, "labels named dead, most silos have ill"),
        (named(dtype="uint8"), HEART, "samples of uint8, most silos have float32"),
        (
            Schema((Feature("sex"), Feature("age", "months"))),
            HEART,
            "age in months, most silos have years",
        ),
        (
            Schema((Feature("sex"), Feature("age", "", (0.0, 1.0)))),
            HEART,
            "a range of 0..1 for age, most silos have 0..120",
        ),
        (
            Schema(inputs=(("rate", "250"), ("window", "-600,1500"))),
            Schema(inputs=(("rate", "250"), ("window", "40,400"))),
            "inputs made with window -600,1500, most silos have 40,400: import them alike",
        ),
        (Schema(inputs=(("size", "64"),)), Schema(inputs=(("window", "40,400"),)), ""),
    ],
)
def test_what_differs_is_named(own, agreed, reason):
    said = difference(own, agreed, "most silos have")
    assert said.startswith(reason) and bool(said) == bool(reason)


def test_what_may_be_missing():
    assert difference(named(), HEART, "the federation file has", required=True).startswith(
        "no names of its columns, the federation file has age, sex: add `feature_names`"
    )
    assert difference(named("age", "sex"), HEART, "it has", required=True).startswith(
        "no names of its labels"
    )
    assert difference(
        named(labels=("well",)), named(labels=("well", "ill")), "most silos have", subset=False
    ).startswith("no labels named ill, most silos have them")
    long = named(*(f"{i}{'x' * 190}" for i in range(900)))
    assert len(difference(long, HEART, "the federation file has")) < 300


def test_what_most_silos_have():
    """Of columns the set counts before the order; units come from whoever states them; of a tie the first silo's."""
    most = majority(
        [
            named("a", "c"),
            named("a", "c"),
            Schema((Feature("b"), Feature("a", "mm")), ("x",), "float32"),
            named("a", "b", labels=("y", "z")),
            Schema((Feature("b"), Feature("a")), ("y", "z"), "float32"),
        ]
    )
    assert most == Schema((Feature("b"), Feature("a", "mm")), ("y", "z"), "float32")
    assert majority([named(), named("b", "a"), named("a", "b")]).names == ("b", "a")
    assert majority([named(labels=("a",)), named(labels=("a", "b"))]).labels == ("a", "b")
    assert majority([named()]) == named()


# ---- Brought to the agreed order -------------------------------------------------------------------------------------


def silo(x, y, task, schema, classes):
    part = Split(x, y)
    return SiloData(part, part, part, classes, task, schema=schema)


def test_columns_and_classes_by_name():
    """(age, sex) = (1, 2) becomes (sex, age) = (2, 1); ill was 1 and is 0; a class that nobody here has makes room."""
    data = silo(
        np.array([[1, 2], [3, 4]], np.float32), np.array([0, 1]), "multiclass", HEART, 2
    )
    made = reorder_data(data, named("sex", "age", labels=("ill", "dead", "well")))
    assert made.train.x.tolist() == [[2, 1], [4, 3]] and made.train.x.flags.c_contiguous
    assert made.train.y.tolist() == [2, 0] and made.train.y.dtype == np.int64
    assert made.classes == 3 and made.schema == Schema(
        (Feature("sex"), AGE), ("ill", "dead", "well"), "float32"
    )
    assert reorder_data(data, HEART) is data and reorder_data(data, Schema()) is data
    assert reorder_data(data, named(labels=("well", "ill", "dead"))) is data
    fails(ValueError, "it has sex where bmi is wanted", reorder_data, data, named("age", "bmi"))
    fails(ValueError, "no label well", reorder_data, data, named(labels=("ill", "dead")))


def test_findings_and_measurements_are_columns():
    y = np.array([[1, 0, -1], [0, 1, 1]], np.float32)
    for task in ("multilabel", "regression"):
        data = silo(np.zeros((2, 1), np.float32), y, task, named(labels=("a", "b", "c")), 3)
        made = reorder_data(data, named(labels=("c", "a", "b")))
        assert (
            made.train.y.tolist() == [[-1, 1, 0], [1, 0, 1]]
            and made.train.y.flags.c_contiguous
            and made.classes == 3
        )
        with pytest.raises(ValueError, match="it has c where nothing is wanted"):
            reorder_data(data, named(labels=("a", "b")))


def test_masks_keep_what_does_not_count():
    data = silo(
        np.zeros((1, 1, 4, 1), np.uint8), np.array([[[0, 1, 2, 255]]], np.uint8), "segmentation",
        named(labels=("none", "organ", "tumour")), 3,
    )  # fmt: skip
    made = reorder_data(data, named(labels=("none", "tumour", "organ")))
    assert made.train.y.tolist() == [[[0, 2, 1, 255]]] and made.train.y.dtype == np.uint8
    assert made.train.x is data.train.x


def test_an_outline_that_a_hospital_does_not_name_is_no_background():
    """Whether the agreed order is the own one or not; a class that no patient has may be missing."""
    masks = silo(
        np.zeros((1, 1, 2, 1), np.uint8), np.array([[[0, 1]]], np.uint8), "segmentation",
        named(labels=("none", "organ")), 2,
    )  # fmt: skip
    for agreed in (("none", "organ", "tumour"), ("none", "tumour", "organ")):
        fails(DataError, "no outlines named tumour", reorder_data, masks, named(labels=agreed))
        with pytest.raises(
            DataError, match="b: no labels named tumour, most hospitals have them"
        ):
            full = replace(masks, schema=named(labels=agreed))
            join("three", {"a": full, "b": masks, "c": full})
    assert reorder_data(masks, Schema()) is masks
    classes = silo(np.zeros((1, 2), np.float32), np.array([1]), "multiclass", masks.schema, 2)
    assert reorder_data(
        classes, named(labels=("none", "organ", "tumour"))
    ).train.y.tolist() == [1]


def test_several_inputs():
    """Columns are counted through all tables, in the order of the inputs' names; other inputs stay as they are."""
    inputs: dict[str, Array] = {
        "scan": np.arange(8, dtype=np.uint8).reshape(2, 2, 2, 1),
        "blood": np.array([[1, 2], [3, 4]], np.float32),
        "pulse": np.array([[5], [6]], np.float32),
    }
    data = silo(together(inputs), np.array([0, 1]), "multiclass", named("crp", "na", "rate"), 2)
    x = reorder_data(data, named("na", "rate", "crp")).train.x
    assert x["blood"].tolist() == [[2, 5], [4, 6]] and x["pulse"].tolist() == [[1], [3]]
    assert np.array_equal(x["scan"], inputs["scan"])


# ---- In a data file --------------------------------------------------------------------------------------------------


def test_a_file_states_its_schema(tmp_path):
    stated = arrays(feature_units=["years", ""], feature_ranges=[[0, 120], [np.nan, np.nan]])
    data = read_silo_file(save(tmp_path / "a.npz", stated))
    assert data.schema == HEART
    write_silo_file(tmp_path / "b.npz", data)
    assert read_silo_file(tmp_path / "b.npz").schema == HEART
    check = next(
        check for check in check_silo_file(tmp_path / "b.npz") if check.name == "schema"
    )
    assert check.ok and check.detail == str(HEART)


def test_a_partition_keeps_the_names(tmp_path):
    many = {
        key: np.repeat(value, 5, 0) if key[1] == "_" else value
        for key, value in arrays().items()
    }
    whole = read_dataset_file(save(tmp_path / "a.npz", many))
    write_partition(whole, "iid", tmp_path / "parts", silos=2, seed=1)
    for file in sorted((tmp_path / "parts").glob("*.npz")):
        assert read_silo_file(file).schema == named(
            "age", "sex", labels=("well", "ill"), dtype="float32"
        )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a name twice": ({"feature_names": ["age", "age"]}, "two columns are called 'age'"),
    "a label twice": ({"label_names": ["ill", "ill"]}, "two labels are called 'ill'"),
    "an escape sequence": ({"label_names": ["ill", "\x1b[2J"]}, "leave control characters out"),
    "a name that is too long": ({"feature_names": ["age", "x" * 201]}, "has no usable name"),
    "numbers for units": ({"feature_units": [1, 2]}, "feature_units does not hold 2 texts"),
    "one unit": ({"feature_units": ["years"]}, "feature_units does not hold 2 texts"),
    "one range": ({"feature_ranges": [[0, 1]]}, "feature_ranges is not of 2 x 2 numbers"),
    "half a range": (
        {"feature_ranges": [[0, np.nan], [0, 1]]},
        "feature_ranges is not of 2 x 2 numbers",
    ),
    "a range that is upside down": (
        {"feature_ranges": [[12, 0], [0, 12]]},
        "values of 'age' outside of its range 12..0",
    ),
    "values outside": (
        {"feature_ranges": [[0, 8], [0, 12]]},
        "train has 1 values of 'age' outside of its range 0..8",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_file_with_a_wrong_schema(tmp_path, fault):
    changes, reason = BAD[fault]
    said = fails(
        ValueError, reason, read_silo_file, save(tmp_path / "a.npz", arrays(**changes))
    )
    assert "\n" not in said and "; " in said


def test_units_without_names(tmp_path):
    content = arrays(feature_units=["years", ""])
    del content["feature_names"]
    with pytest.raises(ValueError, match="has feature_units, but no feature_names"):
        read_silo_file(save(tmp_path / "a.npz", content))


def test_a_file_beside_the_federations_schema(tmp_path):
    file = save(tmp_path / "a.npz", arrays())
    fits = {check.name: check for check in check_silo_file(file, agreed=HEART)}[
        "federation's schema"
    ]
    assert fits.ok and fits.detail == f"the file fits; SHA-256 {HEART.digest}"
    turned = check_silo_file(file, agreed=named("sex", "age", labels=("ill", "well")))[-2]
    assert turned.ok and turned.detail.startswith(
        "columns and labels in another order: each run maps them by name"
    )
    other = check_silo_file(file, agreed=named("age", "bmi"))[-2]
    assert not other.ok and other.detail == "has columns named sex, the federation has bmi"
    assert other.fix == "rename them in the data file, or set `schema` in the federation file"


# ---- How inputs were made ----


def made_as(shape: list[int], expected: dict[str, Any], **pictures: Any) -> dict[str, str]:
    kind = "signals" if len(shape) == 2 else "pictures"
    pictures |= {"shape": shape, "dtype": "float32"}
    content = {"version": 1, "kind": kind, "pictures": pictures, "expected": expected}
    return dict(read_any(json.dumps(content)).settings)


def test_settings_of_pictures_scans_volumes_and_signals():
    """Settings alone: no name of a file, no date, nothing of a header but channels and their units."""
    scan = {
        "formats": ["dicom"],
        "modalities": ["CT"],
        "planes": ["axial"],
        "pixel-mm": [0.3, 2.0],
    }
    assert made_as([64, 64, 1], {"formats": ["picture"]}) == {}
    assert made_as([64, 64, 1], {"formats": ["picture"]}, resize=True) == {"size": "64"}
    assert made_as(
        [64, 64, 1], scan, window=[40.0, 400.0], spacing=1.5, series="patient Meier"
    ) == {"window": "40,400", "spacing": "1.5", "orientation": "axial", "slices": "1"}
    assert made_as([8, 64, 64, 1], scan, spacing=[3.0, 1.0, 1.0])["spacing"] == "3,1,1"
    assert made_as([8, 64, 64, 1], {**scan, "planes": ["axial", "coronal"]}) == {
        "window": "none",
        "spacing": "none",
        "slices": "1",
    }
    waves = {"formats": ["edf"], "units": ["mV", ""], "rates": [500.0]}
    assert made_as([1000, 2], waves, rate=250.0, channels=["I", "II"]) == {
        "rate": "250",
        "channels": "I,II",
        "units": "mV,none",
    }
    many = made_as(
        [1000, 90], {"formats": ["edf"]}, rate=250.0, channels=[f"EEG {i}" for i in range(90)]
    )
    assert many["channels"].startswith("90 names, SHA-256 ")


def test_tokens_are_a_setting(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("fever\nno\n")
    rows = [f"P{i},{('no fever', 'fever no')[i % 2]} {i},{i % 2}" for i in range(40)]
    source = write_lines(tmp_path / "t.csv", "pid,note,ill", *rows)
    take: dict[str, Any] = {"text": "note", "patient": "pid"}
    options: list[dict[str, Any]] = [
        {},
        {"vocabulary": "hashed:100"},
        {"vocabulary": str(words)},
    ]
    inputs = [
        dict(imported(source, label="ill", **take, **more).data.schema.inputs)["tokens"]
        for more in options
    ]
    digest = hashlib.sha256(words.read_bytes()).hexdigest()[:16]
    assert inputs == ["hashed:65536", "hashed:100", f"words, SHA-256 {digest}"]


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"patient": "Meier"}, "inputs has 'patient'; its keys are window, spacing"),
        ({"window": "x" * 201}, "the window 'xxx"),
        ({"window": "\x1b[2J"}, "the window"),
        ({"window": 40}, "inputs.window = 40: must be a valid string"),
    ],
)
def test_a_schema_has_no_other_settings(inputs, reason):
    with pytest.raises(DataError, match=re.escape(reason)):
        parse_schema({"inputs": inputs})


def test_a_study_that_states_no_settings_covers_those_of_the_majority():
    agreed = Schema(HEART.features, HEART.labels, "float32", inputs=(("window", "40,400"),))
    other = Schema(HEART.features, HEART.labels, "float32", inputs=(("window", "-600,1500"),))
    assert agreed.digest != HEART.digest and agreed.matches(HEART.digest)
    assert agreed.matches(agreed.digest) and not agreed.matches(other.digest)
    assert not HEART.matches(agreed.digest)
