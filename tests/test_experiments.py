"""The papers' experiments: every file is a study that ``silofl simulate --config`` takes, with no setting in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.results.run_directory import read_toml
from server.results.study import study_runs
from server.tuning.space import read_space

ROOT = Path(__file__).parents[1]
SPACE = ROOT / "experiments/tuned/space.toml"
FILES = sorted(file for file in (ROOT / "experiments").rglob("*.toml") if file != SPACE)


@pytest.mark.parametrize(
    "file", FILES, ids=lambda file: str(file.relative_to(ROOT / "experiments"))
)
def test_every_experiment_parses(file):
    """Each names its command, and sets nothing that none of its runs reads (another method's or partition's key)."""
    values = read_toml(file)
    used = set().union(*(run.flat() for run in study_runs(values)))
    assert set(values) <= used
    assert f"silofl simulate --config {file.relative_to(ROOT).as_posix()}\n" in file.read_text()


# What the papers and their authors' scripts give (file, key, value); a wrong one would quietly be another experiment.
GIVEN = [
    ("*/*", {"weight-cap": 0, "robust": "none"}),  # no silo counts as less, nothing is bounded
    (
        "apple/*",
        {
            "silos": 12,
            "rounds": 160,
            "local-epochs": 5,
            "batch-size": 256,
            "learning-rate": 0.01,
            "momentum": 0.9,
            "model": "apple-cnn",
            "dataset": "mnist",
            "apple.dr-learning-rate": 0.001,
        },
    ),
    ("apple/mnist-practical", {"partition": "apple-practical"}),
    ("apple/mnist-pathological", {"partition": "apple-pathological"}),
    ("diversifed/*", {"silos": 40, "rounds": 500, "local-epochs": 10, "batch-size": 100}),
    ("diversifed/*[l0-9]", {"optimizer": "adam", "learning-rate": 0.001}),
    ("diversifed/fmnist-*", {"dataset": "fashion-mnist", "model": "mlp", "mlp.hidden": "64"}),
    # 300, and 75 for validation
    ("diversifed/fmnist-dirichlet-*", {"diversifed-dirichlet.train-size": 375}),
    (
        "diversifed/cifar10-*",
        {
            "dataset": "cifar10",
            "model": "diversifed-cnn",
            "validation": 0.2,
            "diversifed-dirichlet.train-size": 625,
        },
    ),
    (
        "diversifed/cifar10-dirichlet-0.1",
        {"diversifed-dirichlet.alpha": 0.1, "diversifed.tau": 1.0},
    ),
    (
        "diversifed/cifar10-dirichlet-0.5",
        {"diversifed-dirichlet.alpha": 0.5, "diversifed.tau": 0.7},
    ),
    (
        "diversifed/fmnist-dirichlet-0.1",
        {"diversifed-dirichlet.alpha": 0.1, "diversifed.tau": 0.9},
    ),
    (
        "diversifed/fmnist-dirichlet-0.5",
        {"diversifed-dirichlet.alpha": 0.5, "diversifed.tau": 0.6},
    ),
    (
        "diversifed/fmnist-dirichlet-1.0",
        {"diversifed-dirichlet.alpha": 1.0, "diversifed.tau": 0.5},
    ),
    (
        "fedapm/*",
        {
            "silos": 20,
            "participation": 0.3,
            "rounds": 300,
            "local-epochs": 3,
            "batch-size": 50,
            "dataset": "cifar10",
            "fedapm-dirichlet.beta": 0.5,
        },
    ),
    (
        "fedala/agnews",
        {
            "dataset": "ag-news",
            "partition": "dirichlet",
            "dirichlet.beta": 0.1,
            "silos": 20,
            "rounds": 2000,
            "local-epochs": 1,
            "batch-size": 10,
            "learning-rate": 0.1,
            "model": "fasttext",
            "fedala.eta": 1.0,
            "fedala.sample-percent": 80,
            "fedala.layers": 1,
        },
    ),
    (
        "fedapm/cifar10-dirichlet",
        {"learning-rate": 0.1, "fedapm.rho": 0.01, "fedapm.sigma": 0.01},
    ),
    (
        "playerfl/fmnist-*",
        {"silos": 5, "rounds": 100, "batch-size": 128, "player-dirichlet.beta": 0.5},
    ),
    ("playerfl/fmnist-*", {"augment": "rotate:10,shift:2.8,scale:0.1,perspective:0.2"}),
    ("flamby/*", {"partition": "natural", "mlp.hidden": ""}),
    (
        "flamby/heart",
        {
            "dataset": "heart-flamby",
            "silos": 4,
            "batch-size": 4,
            "optimizer": "adam",
            "learning-rate": 1e-3,
        },
    ),
    (
        "playerfl/heart-*",
        {"silos": 4, "rounds": 20, "batch-size": 32, "loss": "focal", "focal-gamma": 3.0},
    ),
    ("playerfl/heart-local", {"learning-rate": 0.05, "weight-decay": 1e-4, "amsgrad": True}),
    ("playerfl/heart-fedavg", {"learning-rate": 0.1, "weight-decay": 1e-4, "amsgrad": True}),
    (
        "playerfl/heart-fedavg-ft",
        {"learning-rate": 0.01, "weight-decay": 1e-4, "amsgrad": True},
    ),
    (
        "playerfl/heart-fedprox",
        {"learning-rate": 0.05, "weight-decay": 1e-4, "amsgrad": True, "fedprox.mu": 0.1},
    ),
    (
        "playerfl/heart-ditto",
        {"learning-rate": 0.05, "weight-decay": 1e-4, "amsgrad": True, "ditto.lambda": 0.1},
    ),
    (
        "playerfl/heart-player-fl",
        {"learning-rate": 0.01, "weight-decay": 1e-4, "amsgrad": True},
    ),
    (
        "playerfl/heart-player-fl-random",
        {"learning-rate": 0.01, "weight-decay": 1e-4, "amsgrad": True},
    ),
    (
        "playerfl/fmnist-local-playerfl",
        {"learning-rate": 0.001, "weight-decay": 1e-4, "amsgrad": True},
    ),
    (
        "playerfl/fmnist-fedavg-fedprox-ditto",
        {"learning-rate": 0.0005, "weight-decay": 1e-4, "fedprox.mu": 0.1, "ditto.lambda": 0.1},
    ),
]


@pytest.mark.parametrize("pattern, wanted", GIVEN, ids=[pattern for pattern, _ in GIVEN])
def test_the_published_settings(pattern, wanted):
    files = [file for file in FILES if file.match(f"experiments/{pattern}.toml")]
    assert files
    for file in files:
        values = read_toml(file)
        assert {key: values.get(key) for key in wanted} == wanted, file.name


def test_there_are_experiments_of_each_paper():
    papers = {
        "apple",
        "diversifed",
        "fedala",
        "fedapm",
        "flamby",
        "foundation",
        "playerfl",
        "unseen",
    }
    assert {file.parent.name for file in FILES} == {*papers, "tuned"}


def test_ten_methods_are_tuned_alike():
    """The same methods and rounds on both data sets; the space has the learning rate of all, and settings of them."""
    both = [read_toml(file) for file in FILES if file.parent.name == "tuned"]
    names = str(both[0]["strategy"]).split(",")
    assert len(names) == 10 and [b["strategy"] for b in both] == [both[0]["strategy"]] * 2
    assert (
        both[0]["rounds"] == both[1]["rounds"]
        and both[0]["validation"] == both[1]["validation"]
    )
    space = read_space([str(SPACE)], names)
    assert all("learning-rate" in space.of(name, names) for name in names)
