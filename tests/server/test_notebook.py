"""`import silofl`: a run's frames, models and plots, held against the files that they come from."""

from __future__ import annotations

import csv
import math
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from failing import fails
from tiny import SIMULATED, summary_of

import silofl
from client.flower.apps import build
from server.simulation.simulate import simulate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two methods with two seeds each; the silos' states are in the run directory, as simulations have them."""
    out = tmp_path_factory.mktemp("notebook") / "study"
    values = {
        **SIMULATED,
        "silos": 3,
        "rounds": 2,
        "strategy": "local,fedavg",
        "seed": "1,2",
        "out": str(out),
    }
    return simulate(values, quiet=True)


@pytest.fixture(scope="module")
def run(study):
    return silofl.load_run(study)


def test_the_history_is_the_file(run, study):
    with (study / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(run.history.columns) == list(rows[0])
    assert len(run.history) == len(rows)
    for row, (_, found) in zip(rows, run.history.iterrows(), strict=True):
        assert (row["strategy"], int(row["seed"]), int(row["round"])) == (
            found.strategy,
            found.seed,
            found["round"],
        )
        assert float(row["value"]) == found.value if row["value"] else math.isnan(found.value)


def test_runs_and_silos_are_the_summary(run, study):
    entries = summary_of(study)["runs"]
    assert [*zip(run.runs.strategy, run.runs.seed, strict=True)] == [
        (e["strategy"], e["seed"]) for e in entries
    ]
    assert run.runs["mean"].tolist() == [e["final"]["accuracy_mean"] for e in entries]
    assert (run.runs.rounds == 2).all() and (run.runs.planned == 2).all()
    table = run.silos.set_index(["strategy", "seed", "silo"])
    for entry in entries:
        for name, values in entry["per_silo"].items():
            found = table.loc[entry["strategy"], entry["seed"], name]
            assert found.score == found.accuracy == values["accuracy"]
            assert found.gain_over_local == values["gain_over_local"]


def test_rounds_have_the_means_that_the_report_chooses_by(run):
    """The reported round is the best one by the frame's validation column, the first of equals."""
    for _, entry in run.runs.iterrows():
        own = run.rounds[
            (run.rounds.strategy == entry.strategy) & (run.rounds.seed == entry.seed)
        ]
        chosen = own.loc[own.validation.idxmax(), "round"]
        assert chosen == entry.chosen
        assert own.set_index("round").test[chosen] == entry["mean"]
        assert own.bytes_up.sum() == entry.bytes_up


def test_a_silos_model_is_the_exported_one(run, study, tmp_path):
    """Its accuracy on samples of the file is what the silo itself has measured, on its own test part."""
    model = run.model("hospital-02", strategy="local", seed=1)
    assert (model.card["silo"], model.card["which"]) == ("hospital-02", "reported")
    assert not model.module.training
    x = np.zeros((4, *model.card["input"]["shape"][1:]), model.card["input"]["dtype"])
    np.savez(tmp_path / "data.npz", x=x)
    answers = model.predict(tmp_path / "data.npz")
    assert list(answers.index) == [0, 1, 2, 3]
    assert np.allclose(answers.filter(like="p_").sum(axis=1), 1, atol=1e-4)
    wanted = run.silos.set_index(["strategy", "seed", "silo"]).score["local", 1, "hospital-02"]
    assert model.card["metrics"]["test.accuracy"] == wanted
    with torch.no_grad():
        assert model.module(torch.zeros(1, *model.card["input"]["shape"])).shape[0] == 1


def test_the_shared_model_and_what_there_is_not(run):
    assert run.model(strategy="fedavg", seed=2).card["which"] == "shared"
    fails(silofl.UserError, "needs the name of a silo", run.model, which="best")
    fails(silofl.UserError, "holds several models of hospital-01", run.model, "hospital-01")
    fails(silofl.UserError, "one of validation, test", run.plot_rounds, "train")


def test_plots_show_themselves_in_a_notebook(run):
    for plot in (run.plot_rounds(), run.plot_rounds("test"), run.plot_silos()):
        assert plot._repr_png_().startswith(b"\x89PNG")
        assert set(plot.axes[0].get_legend_handles_labels()[1]) == {"Local", "FedAvg"}
    means = {
        line.get_label(): np.asarray(line.get_ydata())
        for line in run.plot_silos().axes[0].get_lines()
    }
    frame = run.silos.groupby(["strategy", "silo"]).score.mean()
    assert list(means["FedAvg"]) == list(frame["fedavg"])


@pytest.mark.exhaustive
def test_the_notebook_of_the_documentation(study, tmp_path):
    """Executed by a kernel of its own, beside such a study: tables, plots, a model, and no cell that fails."""
    nbclient = pytest.importorskip("nbclient", reason="make install brings it")
    nbformat = pytest.importorskip("nbformat")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/study").symlink_to(study)
    book = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    # A reader sees what their own run says
    assert not any(cell.get("outputs") for cell in book.cells)
    nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [
        "".join(str(out.get("data", out)) for out in c.outputs)
        for c in book.cells
        if c.cell_type == "code"
    ]
    assert len(shown) == 7 and all(shown)
    assert "text/html" in shown[1] and "fedavg" in shown[1]
    assert all("image/png" in one for one in shown[3:5])
    assert "silofl model of hospital-02: local, seed 1" in shown[6]


def test_no_run_is_one_clear_error(tmp_path):
    fails(silofl.UserError, "holds no run", silofl.load_run, tmp_path)


def test_a_run_that_has_just_begun(study, tmp_path):
    """Only its settings are there."""
    (tmp_path / "config.toml").write_text((study / "config.toml").read_text())
    run = silofl.load_run(tmp_path)
    assert (
        run.history.empty
        and run.runs.empty
        and run.silos.empty
        and run.rounds.empty
        and run.events.empty
    )
    assert run.config["silos"] == 3
    assert run.plot_rounds()._repr_png_() and run.plot_silos()._repr_png_()


def test_the_facade_is_public_names_and_nothing_else():
    public = {name for name in vars(silofl) if not name.startswith("_")}
    assert public == set(silofl.__all__)


def test_it_is_no_part_of_the_app():
    """A federation's build is what hospitals pin: a module for notebooks is not in it, and nothing there needs it."""
    with zipfile.ZipFile(BytesIO(build(ROOT))) as app:
        assert "server/notebook.py" in app.namelist()
        assert "silofl.py" not in app.namelist()
