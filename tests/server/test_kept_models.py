"""The matrix of models x hospitals of a run whose silos have sent their own models at its end (``keep-models``)."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import fails
from representatives import seldom
from taken import silofl
from tiny import json_of, small_study

from client.export import card_file, export_model, read_model
from partitions.common.errors import UserError
from server.deploy import submit
from server.results.models import FILE, FOLDER
from server.simulation.evaluate import evaluate, gather_models
from strategies.base.evaluation import OWN
from strategies.base.state import State

SILOS = [f"hospital-{number:02d}" for number in range(1, 13)]


def read(matrix):
    with matrix.open(newline="") as file:
        return {(row["model"], row["silo"]) for row in csv.DictReader(file)}


def without_states(run, folder):
    """A run as a federation leaves it on the server: what the silos keep is at the silos."""
    return shutil.copytree(run, folder, ignore=shutil.ignore_patterns("silos"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Twelve hospitals; three methods whose models never leave otherwise; one of them without the setting, too."""
    folder = tmp_path_factory.mktemp("kept")
    rng = np.random.default_rng(1)
    y = np.arange(480) % 3
    np.savez(
        folder / "table.npz", x=(rng.normal(size=(480, 4)) + y[:, None]).astype(np.float32), y=y
    )
    given = {"dataset": folder / "table.npz", "silos": 12, "validation": 0.2, "model": "mlp"}
    given |= {"mlp__hidden": "4", "evidence": "off"}
    kept = {"strategy": "ditto,fedper,apfl", "keep_models": "reported"}
    small_study(folder / "kept", **given, **kept)
    small_study(folder / "plain", **given, strategy="fedper")
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ditto", *(seldom(m) for m in ("fedper", "apfl"))])
def test_the_whole_matrix_of_a_server_without_states(runs, tmp_path, method):
    """12 x 12, byte for byte that of the same run with its silos' states. The settings name the same SHA-256."""
    here = evaluate(runs / "kept", tmp_path / "states", "all", strategy=method)
    bare = without_states(runs / "kept", tmp_path / "run")
    there = evaluate(bare, tmp_path / "server", "all", strategy=method)
    assert there.read_text() == here.read_text()
    shared = set() if method == "fedper" else {"shared"}
    assert read(there) == {(model, silo) for model in {*SILOS, *shared} for silo in SILOS}
    names = [(tmp_path / folder / "config.toml").read_text() for folder in ("states", "server")]
    assert names[0] == names[1] and names[0].count("@hospital-") == 12


def test_the_setting_changes_nothing_else(runs, tmp_path):
    """The same history, and the matrix of the run without it."""
    plain = evaluate(runs / "plain", tmp_path / "a", "all").read_text()
    assert (
        plain == evaluate(runs / "kept", tmp_path / "b", "all", strategy="fedper").read_text()
    )
    with pytest.raises(
        UserError, match=r"own models of .* lie at the silos: --federation NAME evaluates there"
    ):
        evaluate(without_states(runs / "plain", tmp_path / "bare"), tmp_path / "c", "all")


def test_each_is_a_model_file_with_its_card(runs, tmp_path):
    """As ``silofl export`` makes it of the state, but for the metrics of the silo's own, and the state's own words."""
    bare = without_states(runs / "kept", tmp_path / "run")
    files = gather_models(bare, tmp_path / "models", "all", "ditto")
    assert [file.name.removesuffix(".safetensors") for file in files] == ["shared", *SILOS]
    exported = tmp_path / "exported.safetensors"
    for silo in SILOS[:2]:
        export_model(runs / "kept", silo, "reported", exported, "ditto")
        mine, theirs = (
            json_of(card_file(f))
            for f in (tmp_path / "models" / f"{silo}.safetensors", exported)
        )
        assert {key for key in mine if mine[key] != theirs[key]} <= {"metrics", "schema"}
        assert (mine["silo"], mine["which"], mine["snapshot"]) == (silo, "reported", "personal")
        assert read_model(exported)[1].vector.equal(
            read_model(tmp_path / "models" / f"{silo}.safetensors")[1].vector
        )


def test_what_a_federation_is_asked(runs, tmp_path, monkeypatch, capsys):
    """One hospital sent none: its model is not in the settings, its diagonal is, and a line says so."""
    bare, sent = without_states(runs / "kept", tmp_path / "run"), list[dict[str, Any]]()
    shutil.rmtree(bare / "checkpoint/fedper-42" / FOLDER / SILOS[4])

    def run(values, connection, fill):
        sent.append(values)
        Path(values["out"]).mkdir()
        fill(Path(values["out"]))

    monkeypatch.setattr(submit, "run", run)
    command = f"evaluate {bare} --models all --strategy fedper --federation c".split()
    assert silofl(*command, "--out", tmp_path / "m") == 0
    (values,) = sent
    others = [silo for silo in SILOS if silo != SILOS[4]]
    assert [e.partition("=")[0] for e in values["evaluate.models"].split(",")] == others
    assert [e.partition("@")[2] for e in values["evaluate.models"].split(",")] == others
    assert values["keep-models"] == "none" and values["rounds"] == 11
    assert {file.name for file in (tmp_path / "m/models").glob("*.safetensors")} == {
        f"{s}.safetensors" for s in others
    }
    assert (SILOS[4], SILOS[4]) in read(tmp_path / "m/matrix.csv")
    said = capsys.readouterr().err
    assert (
        f"not evaluated: {SILOS[4]}: the server has no model of theirs that the report shows"
        in said
    )


@pytest.mark.parametrize(
    ("damage", "line"),
    [("other round", ""), ("cut", "damaged"), ("no checkpoint", "checkpoint")],
)
def test_a_file_that_is_not_the_reported_model(runs, tmp_path, damage, line):
    """Of a round that the report no longer shows it is left out; one that cannot be read is one line."""
    bare = without_states(runs / "kept", tmp_path / "run")
    file = bare / "checkpoint/fedper-42" / FOLDER / SILOS[0] / FILE
    if damage == "other round":
        state = State.load(file)
        State(state.arrays, {**state.numbers, "round": 99}).save(file)
        found = gather_models(bare, tmp_path / "models", "all", "fedper")
        assert [f.name for f in found] == [f"{silo}.safetensors" for silo in SILOS[1:]]
        return
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        for own in (bare / "checkpoint/fedper-42").glob("*.safetensors"):
            own.unlink()
    fails(UserError, line, gather_models, bare, tmp_path / "models", "all", "fedper")


def test_what_is_kept_is_one_vector(runs):
    files = sorted((runs / "kept/checkpoint").glob(f"*/{FOLDER}/*/{FILE}"))
    assert len(files) == 36 and all(set(State.load(file).arrays) == {OWN} for file in files)
    assert not list((runs / "plain").rglob(FOLDER))


def test_the_report_says_whose_models_left(runs):
    """And not that personal models never leave."""
    kept, plain = ((runs / name / "report.html").read_text() for name in ("kept", "plain"))
    for method in ("Ditto", "FedPer", "APFL"):
        assert f'(<code>keep-models = "reported"</code>; {method}): {", ".join(SILOS)}.' in kept
    assert "but for the models above" in kept and "but for the models above" not in plain
