"""Everything that is parsed is parsed to a valid value, or is one clear error of the declared type, never another.

Documents are valid ones with edits in them, or values of any kind in the right places. What once found something stays
as an explicit example. `SILOFL_EXAMPLES=5000 pytest tests/test_parsing.py` looks longer than the suite does.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from fuzz import EDITS, FEW, NUMBERS, PLAIN, VALUES, WORDS, edited, one_line
from hypothesis import example, given
from hypothesis import strategies as st
from scans import leaks, sample_at, write_dicom, write_nifti

from client.protocol.keys import make_request, read_request
from client.protocol.policy import Policy, Rules, default_file, key_of, parse_policy
from client.site.trust.audit import Log, log_files, verify_log
from client.site.trust.bundle import read_bundle, site_of
from partitions.common.errors import DataError, UserError
from partitions.common.settings import toml_text
from partitions.importing.readers import dicom
from partitions.importing.readers.volumes import volume
from partitions.npz import write_npz
from partitions.recipes.pictures import Expected as PicturesExpected
from partitions.recipes.pictures import PictureRecipe, load_any, made_by, parse_any, read_any
from partitions.recipes.reading import ReadOptions
from partitions.recipes.recipe import Column, Recipe, load_recipe, parse_recipe
from partitions.silo_file import read_silo_file
from server.deploy.federation import Federation, read_federation
from server.report.survey import survey_page
from server.results.history import History, Row
from server.results.run_directory import read_toml
from server.results.survey import Surveyed
from server.simulation.engine import flower_identity
from strategies.base.run_settings import RunSettings, defaults, parse_settings
from strategies.base.state import State
from strategies.base.survey import read_answer, written_answer
from strategies.base.transport.payload import (
    ExpectedReply,
    Model,
    Payload,
    Update,
    encode,
    read_update,
)
from strategies.base.transport.reporting import read_data_summary


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A file to write examples to."""
    return tmp_path_factory.mktemp("parsed") / "file"


# ---- Settings --------------------------------------------------------------------------------------------------------


@FEW
@example(values={"\n": None})
@example(values={"rounds": 16**5000})
@example(values={"strategy": "\n", "loss": "\n" * 999})
@given(
    values=st.dictionaries(
        st.sampled_from(sorted(defaults())) | WORDS, PLAIN | VALUES, max_size=4
    )
)
def test_settings(values):
    try:
        assert isinstance(parse_settings(values), RunSettings)
    except UserError as error:
        one_line(error)


@FEW
@example(edits=[(0, 0, b"x = " + b"[" * 3000 + b"\n")])
@example(edits=[(0, 0, b"x = " + b"9" * 5000 + b"\n")])
@example(edits=[(0, 0, b"x" + b".x" * 3000 + b" = 1\n")])
@example(edits=[(0, 0, b"x = 0x" + b"f" * 5000 + b"\n")])
@given(edits=EDITS)
def test_a_settings_file(place, edits):
    place.write_bytes(edited(toml_text(defaults()).encode(), edits))
    try:
        values = read_toml(place)
        assert all(isinstance(key, str) for key in values)
        with contextlib.suppress(UserError):
            parse_settings(values)
    except UserError as error:
        one_line(error)
        assert str(place) in str(error)


# ---- federation.yaml, policies, bundles, requests --------------------------------------------------------------------

FEDERATION = """
name: demo
server: {address: 127.0.0.1, fleet-port: 9092, control-port: 8000}
demo: {dataset: digits, partition: dirichlet, seed: 42}
silos:
  - {name: hospital-01, device: cpu, data: demo}
  - {name: hospital-02, device: "cuda:0", data: /data/hospital-02.npz, memory: 4g, policy: public}
"""


def read_as_federation(file):
    try:
        assert isinstance(read_federation(file, check_data=False), Federation)
    except ValueError as error:
        one_line(error)
        assert str(file) in str(error)


@FEW
@example(edits=[(0, 0, b"\0")])
@example(edits=[(0, 0, b"x: !!timestamp now\n")])
@example(edits=[(0, 0, b"x: " + b"9" * 5000 + b"\n")])
@example(edits=[(1, 10, b"name: *a"), (0, 0, b"\nx: &a [*a]")])
@given(edits=EDITS)
def test_federation_yaml(place, edits):
    place.write_bytes(edited(FEDERATION.encode(), edits))
    read_as_federation(place)


@FEW
@example(top={"server": {"\n": None}}, silo={})
@example(top={"demo": {"dataset": []}}, silo={})
@example(top={}, silo={"data": "~nobody-of-that-name/x.npz"})
@example(top={}, silo={"policy": "nowhere"})
@example(top={}, silo={"policy": "\0"})
@example(top={}, silo={"policy": "\ud800"})
@given(
    top=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("name", "server", "demo", "silos"), VALUES)
    ),
    silo=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("name", "device", "data", "memory", "policy"), VALUES)
    ),
)
def test_federation_yaml_of_any_values(place, top, silo):
    whole = {"name": "demo", "silos": [{"name": "a", "data": "x.npz", **silo}], **top}
    place.write_text(yaml.safe_dump(whole), encoding="utf-8", errors="surrogatepass")
    read_as_federation(place)


@FEW
@example(edits=[(0, 0, b"floor = " + b"[" * 3000 + b"\n")])
@example(edits=[(0, 0, b"floor = " + b"9" * 5000 + b"\n")])
@example(edits=[(0, 0, b"floor = 0x" + b"f" * 5000 + b"\n")])
@given(edits=EDITS)
def test_a_policy(edits):
    try:
        policy = parse_policy(
            edited(default_file().encode(), edits).decode(errors="replace"), "policy.toml"
        )
        assert isinstance(policy, Policy)
    except ValueError as error:
        one_line(error)
        assert "policy.toml" in str(error)


@FEW
@given(
    key=st.sampled_from([*map(key_of, Rules.model_fields)]),
    value=VALUES.filter(lambda value: value is not None),
)
def test_a_policy_of_any_values(key, value):
    """JSON's scalars and lists are TOML's too."""
    try:
        parse_policy(f"{key} = {json.dumps(value)}", "policy.toml")
    except ValueError as error:
        one_line(error)
        assert "policy.toml" in str(error)


BUNDLE = {
    ".env": b"SILOFL_NAME=clinic\nSILOFL_SERVER=fl.example.org:9092\nSILOFL_DEVICE=cpu\n",
    "allowed-apps": b"a" * 64 + b"\n",
    "ca.crt": b"-----BEGIN CERTIFICATE-----\n",
    "policy.toml": default_file().encode(),
}


def tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"clinic/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@FEW
@given(edits=EDITS)
def test_a_bundle(place, edits):
    place.write_bytes(edited(tar(BUNDLE), edits))
    try:
        files = read_bundle(place)
        assert site_of(files, place.parent).name
    except ValueError as error:
        one_line(error)


@FEW
@given(edits=EDITS)
def test_a_bundles_variables(edits):
    try:
        site = site_of({**BUNDLE, ".env": edited(BUNDLE[".env"], edits)}, Path("clinic"))
        assert "/" not in site.name and not site.name.startswith(".")
    except ValueError as error:
        one_line(error)


@pytest.fixture(scope="module")
def request_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("request")
    _, out, _ = make_request("clinic", folder, None)
    return out.read_bytes()


@FEW
@example(edits=[(0, 0, b"[" * 3000)])
@given(edits=EDITS)
def test_a_request(place, request_text, edits):
    """What is taken is signed: no edit of what it says is."""
    place.write_bytes(edited(request_text, edits))
    try:
        assert read_request(place).name == "clinic"
    except ValueError as error:
        one_line(error)


# ---- States, histories, logs, data -----------------------------------------------------------------------------------


@FEW
@given(edits=EDITS)
def test_a_state(place, edits):
    """A sealed one is not read at all, unless it is what was written."""
    State({"w": torch.arange(20.0)}, {"round": 3}).save(place)
    whole = place.read_bytes()
    place.write_bytes(edited(whole, edits))
    try:
        assert State.load(place).numbers == {"round": 3} and place.read_bytes() == whole
    except ValueError as error:
        assert str(place) in str(error)


@FEW
@given(edits=EDITS)
def test_a_history(place, edits):
    """What is read can be written, and read again."""
    place.unlink(missing_ok=True)
    rows = [
        Row("fedavg", 7, r, s, "test", "received", "loss", r / 3, 10)
        for r in (1, 2)
        for s in ("", "a")
    ]
    History(place).add(rows)
    place.write_bytes(edited(place.read_bytes(), edits))
    try:
        history = History(place)
        history.forget("fedavg", 7, after=1)
        assert [row.cells() for row in History(place).rows] == [
            row.cells() for row in history.rows
        ]
    except ValueError as error:
        one_line(error)
        assert str(place) in str(error)


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("audit")


@FEW
@given(edits=EDITS)
def test_an_audit_log(log_folder, edits):
    """It is never an error to look, and always a fault or a note where a line is not as it was written."""
    for file in log_folder.iterdir():
        file.unlink()
    fields = (
        "time",
        "silo",
        "asked-by",
        "run-id",
        "run",
        "round",
        "asked",
        "method",
        "app",
        "settings",
        "rule",
        "bytes",
    )
    for number in range(3):
        Log(log_folder).append({**dict.fromkeys(fields, number), "sent": []})
    (file,) = log_files(log_folder)
    whole = file.read_bytes()
    file.write_bytes(edited(whole, edits))
    found = verify_log(log_folder)
    changed = [line for line in file.read_bytes().split(b"\n") if line] != whole.split(b"\n")[
        :-1
    ]
    assert not changed or found.faults or found.notes
    Log(log_folder).append({**dict.fromkeys(fields, 9), "sent": []})
    assert verify_log(log_folder).entries[-1]["time"] == 9


@FEW
@given(edits=EDITS)
def test_a_data_file(place, edits):
    file = place.with_suffix(".npz")
    arrays: dict[str, Any] = {
        "x": np.arange(24, dtype=np.float32).reshape(8, 3),
        "y": np.arange(8) % 2,
        "label_names": np.array(["a", "b"]),
    }
    write_npz(file, arrays)
    file.write_bytes(edited(file.read_bytes(), edits))
    try:
        assert len(read_silo_file(file).train)
    except ValueError as error:
        one_line(error)
        assert str(file) in str(error)


# ---- Replies and summaries -------------------------------------------------------------------------------------------

# What Flower's records can hold.
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | WORDS
    | st.binary(max_size=8)
)
CELLS = (
    SCALARS
    | st.lists(st.floats(), max_size=4)
    | st.lists(st.integers(0, 9), max_size=4)
    | st.lists(WORDS, max_size=3)
)
MODEL = {"name": "model", "silo": "a", "round": 1, "samples": 6, "dtype": "float32"}


def reply_of(content):
    with flower_identity():
        return Message(content, dst_node_id=1, message_type="train")


EXPECTED = ExpectedReply("fedavg", 1, {"a": 6}, ("model",), lambda name, silo: 4, ("alpha",))


@FEW
@given(
    manifest=st.one_of(
        st.just(json.dumps([MODEL])),
        VALUES.map(json.dumps),
        st.lists(
            st.fixed_dictionaries({}, optional=dict.fromkeys(MODEL, VALUES)), max_size=2
        ).map(json.dumps),
        WORDS,
    ),
    config=st.dictionaries(
        st.sampled_from(["round", "silo", "number.steps", "x"]), CELLS, max_size=3
    ),
    array=st.builds(
        Array,
        dtype=st.sampled_from(["float32", "float64", "int64", "object", "nonsense", "<U3"]),
        shape=st.lists(st.integers(-1, 5), max_size=3).map(tuple),
        stype=st.sampled_from(["numpy.ndarray", "torch"]),
        data=st.binary(max_size=200) | st.just(b"\x93NUMPY" + b"\1\0" + b"v\0" + b"{" * 118),
    )
    | st.just(Array(np.ones(4, np.float32))),
    metrics=st.dictionaries(
        st.sampled_from(["received.test.loss", "personal.val.accuracy", "x"]),
        NUMBERS,
        max_size=2,
    ),
)
def test_a_reply(manifest, config, array, metrics):
    whole = {"round": 1, "silo": "a", "manifest": manifest, **config}
    content = RecordDict(
        {"config": ConfigRecord(whole), "model.model": ArrayRecord({"vector": array})}
    )
    # Numbers that Flower itself does not carry
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        content["metrics"] = MetricRecord(metrics)
    try:
        found = read_update(reply_of(content), "a", EXPECTED)
        assert isinstance(found, Update) and bool(torch.isfinite(found.vector).all())
    except ValueError as error:
        one_line(error)


def test_a_reply_that_is_right_is_read():
    """The property above is not about refusals alone."""
    content = encode(
        Payload({"model": Model(torch.ones(4), "a", 1, 6)}), {"round": 1, "silo": "a"}
    )
    content["metrics"] = MetricRecord({"received.test.loss": 0.5})
    found = read_update(reply_of(content), "a", EXPECTED)
    assert found.vector.tolist() == [1, 1, 1, 1] and found.metrics == {
        "received.test.loss": 0.5
    }


SUMMARY = {
    "name": "clinic", "n_train": 60, "n_val": 20, "n_test": 20, "threads": 2, "shape": [3], "classes": 2,
    "own_file": True, "simulated": False, "device": "cpu", "versions": "silofl 0.2", "sum": [1.0, 2.0, 3.0],
    "square_sum": [1.0, 4.0, 9.0],
}  # fmt: skip


@FEW
@given(
    changes=st.dictionaries(st.sampled_from(sorted(SUMMARY)) | WORDS, CELLS, max_size=3),
    left_out=st.sets(st.sampled_from(sorted(SUMMARY)), max_size=2),
)
def test_a_summary(changes, left_out):
    summary = {
        key: value for key, value in {**SUMMARY, **changes}.items() if key not in left_out
    }
    try:
        assert read_data_summary(ConfigRecord(summary))["name"]
    except ValueError as error:
        one_line(error)


SURVEYED = {
    "age": {
        "kind": "number",
        "unit": "years",
        "range": [0, 120],
        "missing": 5,
        "mean": 60.5,
        "sd": 11.2,
        "cells": [20] * 10,
    },
    "sex": {
        "kind": "category",
        "levels": ["female", "male"],
        "missing": None,
        "cells": [20, None],
    },
}


@FEW
@example(edits=[(0, 0, b"[" * 3000)])
@example(edits=[(0, 70, b'{"kind":"number","missing":1,"mean":' + b"9" * 4000 + b',"sd":1}')])
@given(edits=EDITS)
def test_a_survey(edits):
    """An answer that is read can be compared with others and shown."""
    answer = {"n": 200, "day": "", "columns": SURVEYED, "labels": {}}
    record = written_answer(answer)
    for name in SURVEYED:
        record[f"column.{name}"] = edited(json.dumps(SURVEYED[name]).encode(), edits).decode(
            errors="replace"
        )
    try:
        found = read_answer(record)
    except ValueError as error:
        one_line(error)
    else:
        assert survey_page(Surveyed({"a": answer, "b": answer, "c": answer, "d": found}))


# ---- Scans -----------------------------------------------------------------------------------------------------------


RECIPE = Recipe(
    columns=(
        Column(
            name="age",
            kind="number",
            unit="years",
            range=(0, 120),
            decimal=",",
            thousands=".",
            fill="median",
            fill_value=3.5,
        ),
        Column(
            name="sex",
            kind="category",
            source="SEX",
            categories=("f", "m"),
            values={"w": "f"},
            other="other",
            fill="most-frequent",
        ),
        Column(
            name="since",
            kind="date",
            format="%d.%m.%Y",
            per="days",
            fill="refuse",
            mark_gaps=True,
        ),
        Column(name="ward", kind="skip"),
    ),
    label=("state",),
    classes=("well", "ill"),
)


@FEW
@given(edits=EDITS)
def test_a_recipe(place, edits):
    """As a file, and as the text in a data file or a model's card: what is read is written and read again alike."""
    for text in (RECIPE.toml("a comment"), RECIPE.as_json):
        place.write_bytes(edited(text.encode(), edits))
        try:
            is_json = text == RECIPE.as_json
            found = (
                read_any(place.read_bytes().decode(errors="replace"))
                if is_json
                else load_recipe(place)
            )
        except ValueError as error:
            one_line(error)
        else:
            assert read_any(found.as_json) == found == parse_recipe(tomllib.loads(found.toml()))


@FEW
@given(key=st.sampled_from(sorted(RECIPE.content["columns"][0])), value=VALUES)
def test_a_recipe_of_any_values(key, value):
    content = RECIPE.content
    for changed in (
        {**content, "file": value},
        {**content, "columns": [{**content["columns"][0], key: value}]},
    ):
        with contextlib.suppress(DataError):
            parse_recipe(changed)


PICTURES = PictureRecipe(
    pictures=made_by(
        (8, 32, 32, 1),
        "float32",
        ReadOptions(
            window=(40, 400),
            series="T1*",
            volume=(8, 32, 32),
            voxel=(3, 1.5, 1.5),
            outlines=("liver", "core?"),
        ),
    ),
    expected=PicturesExpected(
        formats=("dicom",),
        modalities=("CT", "MR"),
        planes=("axial", ""),
        photometric=("MONOCHROME2",),
        rescaled=("yes",),
        pixel=(0.3, 2),
        between=(1, 6),
    ),
    labels_by="outlines",
    task="segmentation",
    classes=("background", "liver", "core"),
    outputs=3,
)


@FEW
@given(edits=EDITS)
def test_a_recipe_of_pictures(place, edits):
    for text in (PICTURES.toml("a comment"), PICTURES.as_json):
        place.write_bytes(edited(text.encode(), edits))
        try:
            is_json = text == PICTURES.as_json
            found = (
                read_any(place.read_bytes().decode(errors="replace"))
                if is_json
                else load_any(place)
            )
        except ValueError as error:
            one_line(error)
        else:
            assert read_any(found.as_json) == found == parse_any(tomllib.loads(found.toml()))


@FEW
@given(
    key=st.sampled_from(["pictures", "expected", "classes", "label"]),
    inner=st.text(),
    value=VALUES,
)
@example(key="pictures", inner="shape", value=[8, 8, float("nan"), 1])
@example(key="pictures", inner="shape", value=[8, 8, 10**400])
@example(key="pictures", inner="window", value=[1, 10**400])
def test_a_recipe_of_pictures_of_any_values(key, inner, value):
    content = PICTURES.content
    own = content[key]
    for changed in (
        {**content, key: value},
        {**content, key: {**own, inner: value} if isinstance(own, dict) else own},
    ):
        with contextlib.suppress(DataError):
            parse_any(changed)


def reads_or_says_one_line(file, reading):
    """And says nothing of what is in the file, whose every text field names somebody."""
    try:
        picture = reading()
        assert (
            picture.dtype in (np.uint8, np.float32)
            and picture.ndim == 3
            and np.isfinite(picture).all()
        )
    except ValueError as error:
        one_line(error, 200)
        assert (
            leaks(str(error)) == [] and str(file) not in str(error) and error.__cause__ is None
        )


@FEW
@given(edits=EDITS)
def test_dicom(place, edits):
    write_dicom(
        place, np.arange(64, dtype=np.uint16).reshape(8, 8), RescaleSlope=2, RescaleIntercept=-9
    )
    place.write_bytes(edited(place.read_bytes(), edits))
    options = ReadOptions(size=4)
    reads_or_says_one_line(
        place,
        lambda: (
            dicom.READER.probe(sample_at(place), options),
            dicom.READER.read(sample_at(place), options),
        )[1],
    )
    with contextlib.suppress(ValueError):
        assert isinstance(dicom.read_header(place, "here"), dicom.Header | str)


@FEW
@given(edits=EDITS, suffix=st.sampled_from([".nii", ".nii.gz"]))
def test_nifti(place, edits, suffix):
    file = write_nifti(
        place.with_suffix(suffix), np.arange(64, dtype=np.int16).reshape(4, 4, 4)
    )
    file.write_bytes(edited(file.read_bytes(), edits))
    options = ReadOptions(size=4)
    reads_or_says_one_line(
        file,
        lambda: (
            volume.probe_volume([file], "here", options),
            volume.read_volume([file], "here", options),
        )[1],
    )
