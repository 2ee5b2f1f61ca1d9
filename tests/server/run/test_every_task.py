"""Every task through the whole house: methods, history, summary, report, resume, export and predictions."""

from __future__ import annotations

import csv
import functools
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import fails
from hospitals import ALL, MADE, NAMES, NETWORKS, OUTPUTS, TASK_OF, hospital_files, one_file
from inline_workers import inline
from representatives import seldom, some
from sklearn.metrics import roc_auc_score
from tiny import comparable, federate, json_of, one_block, small_study, summary_of

from client.export import export_model
from client.prediction.predict import predict_file
from models.tasks import TASKS, task_of
from partitions.common.errors import UserError
from partitions.silo_file import read_silo_file
from server.report.study import StudyResults
from server.report.write import silo_table
from server.results.history import History
from server.simulation.simulate import simulate
from server.simulation.workers import side_by_side

EASY = {"learning_rate": 0.1, "batch_size": 16, "normalization": "agreed", "local_epochs": 5}
FEWER = {"local_epochs": 2}  # what learns at once, and takes long
EASY_OF: dict[str, dict[str, Any]] = dict.fromkeys(
    ("segmentation", "balls", "nodules", "stays"), EASY | FEWER
)
# Each method on one task, each task with one method; on outlines and several inputs, too: `make test-all`
OTHERS = ("local", "fedavg", "apple", "ditto", "fedfomo", "fedper", "apfl")
OF_ONE_CLASS = {"fedproto", "fedrod", "fedpac", "gpfl"}


def go(folder, kind, **changes):
    return federate(
        hospital_files(folder, kind),
        **{**EASY_OF.get(kind, EASY), **NETWORKS[kind], "rounds": 2, **changes},
    )


@pytest.mark.parametrize(
    ("made", "strategy"),
    [
        *((made, "fedala") for made in ALL),
        *(("survival", strategy) for strategy in OTHERS[::2]),
        *(seldom("survival", strategy) for strategy in OTHERS[1::2]),
        *(seldom(made, strategy) for made in ("segmentation", "stays") for strategy in OTHERS),
    ],
)
def test_methods_learn_every_task(tmp_path, made, strategy):
    """Two rounds; every silo's metrics are those of the task, finite, and its loss is below that of the start."""
    changes = one_block(strategy) if made == "survival" else {}
    learns(go(tmp_path, made, strategy=strategy, rounds=2, **changes), made)


# With batch normalisation; the networks of tables have none, and the U-Net's is by groups.
@some("made", ["multilabel", "nodules"], lambda made: made == "multilabel")
def test_batch_normalisation_of_ones_own(tmp_path, made):
    # The silo's own model: the received one begins with running statistics of a few steps, and is as bad as the start.
    changes = {"model": "resnet8", "learning_rate": 0.1}
    learns(go(tmp_path, made, strategy="fedbn", **changes), made, "personal", **changes)


@pytest.mark.parametrize("made", ["ordinal", "regression", "survival", "segmentation", "balls"])
def test_networks_without_batch_normalisation_are_refused(tmp_path, made):
    fails(ValueError, r"fedbn .*batch normalisation", go, tmp_path, made, strategy="fedbn")


def learns(run, made, snapshot="", **changes):
    task = TASK_OF.get(made, made)
    kind = task_of(task)
    rows = [r for r in run.federation.history.rows if r.silo in NAMES and r.split == "test"]
    assert {r.silo for r in rows} == set(NAMES) and {r.metric for r in rows} == set(
        kind.metrics
    )
    assert run.federation.registration.data_spec.task == task and not run.strategy.rejected
    known = [r.value for r in rows if r.metric in ("loss", kind.score)]
    assert not any(map(math.isnan, known))
    loss = {
        (r.round, r.silo): r.value
        for r in rows
        if (r.metric, r.snapshot) == ("loss", snapshot or kind_of(run))
    }
    assert sum(loss[2, name] for name in NAMES) < start_loss(made, **changes)


def kind_of(run):
    return str(type(run.strategy).info.reports)


@functools.cache
def start_loss(made, **changes):
    """Of the model that all begin with, summed over the silos."""
    with tempfile.TemporaryDirectory() as folder:
        run = go(
            Path(folder), made, strategy="fedavg", rounds=1, **{**changes, "local_epochs": 0}
        )
    rows = run.federation.history.rows
    wanted = (1, "test", "loss", "received")
    losses = {
        r.silo: r.value for r in rows if (r.round, r.split, r.metric, r.snapshot) == wanted
    }
    return sum(losses[name] for name in NAMES)


@some("task", ALL, {"survival", "stays"}.__contains__)
def test_a_run_that_is_resumed_is_the_same(tmp_path, task):
    run = {"strategy": "apple", "local_epochs": 1}
    whole = go(tmp_path, task, **run, rounds=3)
    run["directory"] = tmp_path / "run"
    go(tmp_path, task, **run, rounds=2)
    again = go(tmp_path, task, **run, rounds=3, resume=True)
    rounds = [r for r in again.federation.history.rows if r.round <= 3]
    assert comparable(rounds) == comparable(
        [r for r in whole.federation.history.rows if r.round <= 3]
    )


@some("made", ALL, {*[*MADE][::2], "stays"}.__contains__)
def test_summary_report_export_and_predictions(tmp_path, made):
    task, out = TASK_OF.get(made, made), tmp_path / "run"
    kind, file = task_of(task), one_file(tmp_path, made)
    changes = {"min_metric_samples": 1, **EASY_OF.get(made, EASY), **NETWORKS[made]}
    small_study(out, file, **{**changes, "strategy": "local,ditto"})
    entries = summary_of(out)["runs"]
    for entry in entries:
        assert (entry["task"], entry["score"]) == (task, kind.score)
        scores = [silo[kind.score] for silo in entry["per_silo"].values()]
        assert entry["final"][f"{kind.score}_mean"] == pytest.approx(np.mean(scores))
        assert entry["final"][f"{kind.score}_worst"] == min(scores)
    gains = [silo["gain_over_local"] for silo in entries[-1]["per_silo"].values()]
    assert gains == [
        mine[kind.score] - alone[kind.score]
        for mine, alone in zip(
            entries[-1]["per_silo"].values(), entries[0]["per_silo"].values(), strict=True
        )
    ]
    study = StudyResults(out)
    assert study.task == kind
    page = (out / "report.html").read_text()
    word = kind.score_label[0].upper() + kind.score_label[1:]
    assert f"{word} by round" in page and f"test {kind.score_label}" in page
    assert kind.score == "accuracy" or "accuracy of" not in page
    assert silo_table(study).splitlines()[-1].startswith(f"{kind.score_label} in %")
    for name in study.silos:
        cell = study.score("ditto", name)
        assert cell.interval[0] <= cell.mean <= cell.interval[1] + 1e-12

    model = tmp_path / "model.safetensors"
    card = export_model(out, study.silos[0], "last", model, "ditto", 42)
    assert card.task == task
    masks = tmp_path / "masks.npz" if task == "segmentation" else None
    answers = list(csv.DictReader(io.StringIO(predict_file(model, file, masks))))
    with np.load(file) as data:
        y, n = data.get("y"), len(data["time" if task == "survival" else "y"])
    assert len(answers) == n
    if task == "multilabel":
        p = [[float(row[f"p_{k}"]) for k in range(3)] for row in answers]
        assert roc_auc_score(y, p, average="macro") > 0.5
    if task == "regression":  # in the labels' own units
        said = np.array([float(row["y_0"]) for row in answers])
        assert abs(said.mean() - y[:, 0].mean()) < y[:, 0].std() / 2
    if masks is not None:
        with np.load(masks) as found:
            assert found["masks"].shape == y.shape
            assert found["masks"][0].sum() == int(answers[0]["pixels_1"])


def test_whoever_learns_something_else_is_left_out(tmp_path):
    files = hospital_files(tmp_path, "multilabel")
    (tmp_path / "other").mkdir()
    files["west"] = hospital_files(tmp_path / "other", "segmentation")["west"]
    run = federate(files, **NETWORKS["multilabel"], strategy="fedavg", rounds=1)
    reason = "west is left out: it has labels for segmentation, most silos have for multilabel (`task` in the data file"
    assert run.federation.registration.left_out["west"].startswith(reason)
    assert set(run.strategy.silos) == {"north", "south"}


def test_the_federation_file_may_say_the_task(tmp_path):
    files = hospital_files(tmp_path, "multilabel")
    with pytest.raises(
        UserError, match="it has labels for multilabel, the federation file has for survival"
    ):
        federate(files, rounds=1, agreed='{"task": "survival"}', **NETWORKS["multilabel"])
    with pytest.raises(UserError, match="agreed: task = 'x': one of multiclass, ordinal"):
        federate(files, rounds=1, agreed='{"task": "x"}', **NETWORKS["multilabel"])


def test_a_run_cannot_take_classes_for_measurements(three):
    """The sums of measurements leave a silo: of classes they would tell how many samples each has."""
    with pytest.raises(
        UserError,
        match="this silo's data file is for multiclass, and only the file can say otherwise",
    ):
        federate(three, strategy="fedavg", rounds=1, task="regression")
    assert (
        federate(
            three, strategy="fedavg", rounds=1, task="ordinal"
        ).federation.registration.data_spec.task
        == "ordinal"
    )


@pytest.mark.parametrize("task", MADE)
def test_methods_that_look_at_classes_say_so(tmp_path, task):
    for strategy in sorted(OF_ONE_CLASS):
        if TASKS[task].single_label:
            go(tmp_path, task, strategy=strategy, rounds=1)
        else:
            with pytest.raises(
                UserError,
                match=f"{strategy} works on samples that have one class each, which {task}",
            ):
                go(tmp_path, task, strategy=strategy, rounds=1)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("survival", {"loss": "focal"}, "loss = focal: survival has one loss of its own"),
        (
            "segmentation",
            {"model": "small-cnn"},
            "model 'small-cnn' is not for segmentation: take unet, or auto",
        ),
        ("multilabel", {"model": "unet"}, "model 'unet' is not for multilabel: take apple-cnn"),
        ("multilabel", {"task": "ordinal"}, r"y is \(60, 3\); give one label per sample"),
        (
            "ordinal",
            {"task": "regression"},
            "data file is for ordinal, and only the file can say otherwise",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(tmp_path, task, changes, message):
    fails(ValueError, message, go, tmp_path, task, **changes, strategy="fedavg", rounds=1)


def test_a_simulation_without_classes_says_how_to_divide(tmp_path):
    file = hospital_files(tmp_path, "regression")["north"]
    run = {
        "dataset": str(file),
        "silos": 2,
        "rounds": 1,
        "out": str(tmp_path / "run"),
        "strategy": "fedavg",
    }
    with pytest.raises(
        ValueError,
        match=r"partition = dirichlet divides samples by their class, .*: take iid or natural",
    ):
        simulate(run, quiet=True)
    apart = functools.partial(side_by_side, engine=inline, workers="2")
    simulate(
        {**run, "partition": "iid", "strategy": "fedavg,local"}, quiet=True, executor=apart
    )
    manifest = json_of(tmp_path / "run/manifest.json")
    assert manifest["task"] == "regression" and all(
        "labels" not in silo for silo in manifest["silos"]
    )
    assert "Who holds what" not in (tmp_path / "run/report.html").read_text()


BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("ordinal", {"task": "ordinal", "learning-rate": 0.1}),
    "digit-findings": ("multilabel", {"learning-rate": 0.2}),
    "diabetes": ("regression", {"learning-rate": 0.05}),
}


@pytest.mark.parametrize(
    ("dataset", "methods"),
    [
        *((dataset, "fedavg") for dataset in BUILT_IN),
        seldom("diabetes", "local,fedala,apple,ditto"),
    ],
)
def test_the_examples_of_the_documentation(tmp_path, dataset, methods):
    """docs/tasks.md: data that come with silofl, two rounds, every method better than nothing."""
    task, changes = BUILT_IN[dataset]
    given = {
        "batch-size": 16,
        "local-epochs": 5,
        "apple.common-init": True,
        "strategy": methods,
    }
    runs = summary_of(small_study(tmp_path / "run", dataset, **given, **changes))["runs"]
    assert [one["strategy"] for one in runs] == methods.split(",")
    least = {"multilabel": 0.8, "ordinal": 0.6, "regression": 0.2}[task]
    for one in runs:
        assert one["task"] == task and one["final"][f"{one['score']}_mean"] > least


def test_breast_cancer_in_six_regions(tmp_path, data_dir):
    """FLamby's Fed-TCGA-BRCA with its own centres and test parts. A linear Cox model on whole batches is far better
    than its published figures (pooled 0.68), which batches of eight have made (docs/tasks.md).
    """
    settings = {
        "dataset": "tcga-brca",
        "data-dir": str(data_dir),
        "partition": "natural",
        "silos": 6,
        "mlp.hidden": "",
    }
    settings |= {
        "batch-size": 300,
        "learning-rate": 0.3,
        "threads": 1,
        "rounds": 30,
        "evaluate-every": 10,
    }
    out = simulate(
        {**settings, "strategy": "fedavg,local", "out": str(tmp_path / "run"), "seed": "1"},
        quiet=True,
    )
    runs = {run["strategy"]: run for run in summary_of(out)["runs"]}
    sizes = [(silo["n_train"], silo["n_test"]) for silo in runs["fedavg"]["per_silo"].values()]
    assert [n for _, n in sizes] == [63, 40, 42, 33, 33, 11]
    assert runs["fedavg"]["final"]["c_index_mean"] > 0.72
    assert History(out / "history.csv").rows and runs["local"]["score"] == "c_index"


def test_files_hold_what_was_meant(tmp_path):
    for task in MADE:
        (tmp_path / task).mkdir()
        data = read_silo_file(hospital_files(tmp_path / task, task)["north"])
        assert (data.task, data.classes) == (task, OUTPUTS[task])
