"""Tasks besides classes, several inputs and a declared schema in a real federation: three hospitals' own files, over
gRPC.
"""

from __future__ import annotations

import pytest
from hospitals import LABELS as NAMED
from hospitals import NAMES, NETWORKS, hospital_files, partly_labelled
from schemas import COLUMNS, LABELS, PERMUTED, save
from tiny import PLAIN, federate, random_silos
from trio import bring_up, rows

from client.protocol.launch import FLOWER
from server.deploy import local, submit
from server.results.reading import read_summary

pytestmark = pytest.mark.deployed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A federation of three hospitals, whose files lie in this folder: each task's in the place of the one before."""
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
            patch.setenv(key, str(folder / value))
        for key, value in FLOWER.items():
            patch.setenv(key, value)
        files = hospital_files(folder, "ordinal")
        silos = "".join(
            f"\n  - {{name: {name}, data: {file}, policy: public}}"
            for name, file in files.items()
        )
        (folder / "schema.toml").write_text(
            f"features = {list(COLUMNS)}\nlabels = {list(LABELS)}\n"
        )
        (folder / "federation.yaml").write_text(f"name: tasks\nsilos:{silos}\n")
        bring_up(folder)
        yield folder
        local.down("tasks")


# In process: test_every_task.py; over gRPC: the next tests, and test_deployed.py
@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["balls", "stays", "regression", "survival", "segmentation"])
def test_deployed_and_in_process_are_the_same(folder, tmp_path, task):
    """Of "balls" masks of volumes, which move with their pictures. Several labels: the next tests. Classes, and so
    grades: ``test_deployed.py``.
    """
    compare(hospital_files(folder, task), task, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "own"),
    [
        *((task, {}) for task in NAMED),
        ("multilabel", {"strategy": "fedmlp", "rounds": 3, "fedmlp.adapt": False}),
    ],
)
def test_a_hospital_without_a_label_deployed(folder, tmp_path, task, own):
    compare(partly_labelled(folder, task), task, tmp_path, **own)
    (run,) = read_summary(tmp_path / "there" / "summary.json")["runs"]
    assert run["unlabelled"] == {NAMED[task][2]: ["south"]}


@pytest.mark.exhaustive
def test_embeddings_deployed(folder, tmp_path):
    """A frozen encoder's embeddings are kept at the hospitals, and a second run reads them."""
    files = hospital_files(folder, "multilabel")
    for out in ("one", "two"):
        compare(files, "multilabel", tmp_path / out, trainable="head", strategy="ditto")
    assert len([*folder.rglob(".embeddings/*.npy")]) >= 3


def compare(files, task, tmp_path, **more):
    run = {
        "strategy": "fedala",
        "rounds": 2,
        "threads": 1,
        "batch-size": 16,
        "learning-rate": 0.05,
        "seed": 42,
    }
    run |= {
        key.replace("__", ".").replace("_", "-"): value for key, value in NETWORKS[task].items()
    }
    run |= {"normalization": "silo", "min-metric-samples": 0}
    if task in ("segmentation", "balls"):  # masks move with their pictures
        run["augment"] = "flip,rotate:20"
    run |= more
    submit.run({**run, "out": str(tmp_path / "there")})
    federate(files, policy="public", directory=tmp_path / "here", **run)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


@pytest.mark.exhaustive
def test_trees_deployed_and_in_process_are_the_same(folder, tmp_path):
    files = random_silos(folder, dict.fromkeys(NAMES, 30))
    run = {**PLAIN, "strategy": "fedxgb", "model": "trees", "rounds": 2}
    submit.run({**run, "out": str(tmp_path / "there")})
    federate(files, policy="public", directory=tmp_path / "here", **run)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


@pytest.mark.exhaustive
def test_files_in_other_orders_give_the_numbers_of_the_declared_order(folder, tmp_path):
    """One hospital's file is permuted, one has a foreign column and is left out; the other two train."""
    one, other, foreign = NAMES
    save(folder / f"{one}.npz")
    save(folder / f"{other}.npz", **PERMUTED)
    save(folder / f"{foreign}.npz", feature_names=("age", "sex", "bmi"))
    file = folder / "federation.yaml"
    file.write_text(file.read_text() + "schema: schema.toml\n")
    run = {**PLAIN, "strategy": "fedala", "rounds": 2, "normalization": "agreed"}
    submit.run({**run, "out": str(tmp_path / "there")})
    fitting = {name: save(tmp_path / f"{name}.npz") for name in (one, other)}
    federate(fitting, directory=tmp_path / "here", **run)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    notes = (tmp_path / "there" / "progress.jsonl").read_text()
    assert f"{other} has its columns and labels in another order: it maps them by name" in notes
    assert (
        f"{foreign} is left out: it has columns named bmi, the federation file has chol"
        in notes
    )
