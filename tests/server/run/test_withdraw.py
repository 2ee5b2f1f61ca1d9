"""A hospital withdraws: nothing that a run keeps tells of it any more, and the others' things are as they were."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from cases import CASES, OPTIONS
from failing import fails
from taken import silofl
from tiny import federate, small_study, summary_of
from two_layers import DEEP

from partitions.common.errors import UserError
from server.results.history import History
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from server.run.withdrawal import of_silo, withdraw
from server.simulation.evaluate import evaluate
from server.simulation.simulate import simulate
from strategies.base.state import State

OWN = ("personal", "best", "core.c")
KEEPING = (
    "apple",
    "diversifed",
    "fedamp",
    "fedapm",
    "fedcac",
    "fedfomo",
    "fedpac",
    "pfedla",
    "scaffold",
    "fedavg",
)


def kept(run):
    return {file: State.load(file) for file in run.rglob("*.safetensors")}


@pytest.mark.parametrize("name", KEEPING)
def test_its_models_leave_the_checkpoints(three, tmp_path, name):
    """Neither a name nor a number of it: no array of any state is one that the silo has made."""
    run = tmp_path / "run"
    settings = {**DEEP, **OPTIONS, **CASES[name][0], "rounds": 3, "directory": run}
    federate(three, **settings)
    own = [
        t
        for file, s in kept(run).items()
        if "c" in file.parts
        for n, t in s.arrays.items()
        if n in OWN
    ]
    before = kept(run)
    assert own
    withdraw("c", [run])
    after = kept(run)
    assert not any("c" in file.parts for file in after)
    for file, state in after.items():
        assert not any(of_silo(key, "c", "abc") for key in state.arrays)
        assert not any(
            torch.equal(tensor, model) for tensor in state.arrays.values() for model in own
        )
        assert all(
            torch.equal(tensor, before[file].arrays[key])
            for key, tensor in state.arrays.items()
        )
        numbers = {k: v for k, v in state.numbers.items() if k != "withdrawn"}
        assert '"c"' not in json.dumps(numbers) and '.c"' not in json.dumps(numbers)
    assert not any(r.silo == "c" for r in History(run / "history.csv").rows)
    with pytest.raises(UserError, match="c withdrew from this run, which cannot go on"):
        federate(three, **settings, resume=True)
    fails(UserError, "keeps anything of c", withdraw, "c", [run])


def test_a_state_that_cannot_be_read_goes(three, tmp_path):
    """Nobody can say what of the hospital is in it, and it must not keep the others from being cleaned."""
    run = tmp_path / "run"
    federate(three, strategy="apple", rounds=3, directory=run)
    damaged = [run / "checkpoint/apple-7/server.safetensors", min(run.rglob("a/round-*"))]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1])
    withdraw("c", [run])
    assert not any(file.exists() for file in damaged) and len(kept(run)) == 4
    assert not any(
        of_silo(key, "c", "abc") for state in kept(run).values() for key in state.arrays
    )
    with pytest.raises(UserError, match="c withdrew from this run"):
        federate(three, strategy="apple", rounds=3, directory=run, resume=True)


def test_a_whole_study(tmp_path, capsys, monkeypatch):
    """Of a simulation's files: no text names it, the means are the others', the report is made anew without it."""
    monkeypatch.chdir(tmp_path)
    run = small_study(tmp_path / "runs/one", "breast-cancer", strategy="local,apple")
    assert silofl("withdraw", "hospital-02") == 0
    assert (
        "runs/one: hospital-02 is deleted from 7 states of apple-42" in capsys.readouterr().out
    )
    texts = [
        file
        for file in run.rglob("*")
        if file.suffix in (".csv", ".json", ".jsonl", ".toml", ".html")
    ]
    assert {file.name for file in texts} >= {
        "history.csv",
        "summary.json",
        "manifest.json",
        "progress.jsonl",
    }
    assert not any("hospital-02" in file.read_text() for file in texts)
    assert not list(run.rglob("*hospital-02*"))
    for entry in summary_of(run)["runs"]:
        accuracies = [values["accuracy"] for values in entry["per_silo"].values()]
        assert entry["silos"] == ["hospital-01", "hospital-03"]
        assert entry["final"]["accuracy_mean"] == pytest.approx(sum(accuracies) / 2)
    assert silofl("report", run) == 0
    assert "hospital-02" not in (run / "report.html").read_text()
    with (run / "history.csv").open() as file:
        assert {row["silo"] for row in csv.DictReader(file)} == {
            "",
            "hospital-01",
            "hospital-03",
        }


@pytest.mark.exhaustive
def test_a_study_that_held_it_out(tmp_path):
    """The runs without it were there to evaluate it, and go. All others lose its numbers."""
    values = {
        "dataset": "breast-cancer",
        "partition": "iid",
        "silos": 3,
        "rounds": 1,
        "threads": 1,
    }
    run = simulate(
        {**values, "strategy": "apple", "out": str(tmp_path / "one")},
        quiet=True,
        hold_out="each",
    )
    evaluate(run, tmp_path / "matrix", "all", strategy="apple")
    lines = withdraw("hospital-02", [run, tmp_path / "matrix"])
    assert any("hold-out" in line for line in lines) and any(
        "matrix.csv" in line for line in lines
    )
    assert (
        any("report.html (`silofl report`" in line for line in lines)
        and not (run / "report.html").exists()
    )
    assert sorted(summary_of(run)["hold_out"]) == ["hospital-01", "hospital-03"]
    for other in ("hospital-01", "hospital-03"):
        part = run / "hold-out" / other
        state = State.load(part / "checkpoint/apple-42/server.safetensors")
        assert not any("hospital-02" in key for key in state.arrays) and any(
            other in key for key in state.arrays
        )
        entry = summary_of(part)["runs"][0]
        assert list(entry["hold_out"]) == [other] and len(entry["silos"]) == 1
    texts = [p for p in run.rglob("*") if p.suffix in (".csv", ".json", ".jsonl")]
    assert not any(
        "hospital-02" in p.read_text() for p in [*texts, tmp_path / "matrix/matrix.csv"]
    )
    assert not list(run.rglob("*hospital-02*")) and not list(
        (tmp_path / "matrix").rglob("*hospital-02*")
    )


def test_a_hospital_that_one_run_held_out(three, tmp_path):
    run = tmp_path / "run"
    federate(three, strategy="apple", rounds=2, directory=run, hold_out="c")
    state = State.load(run / "checkpoint/apple-7/server.safetensors")
    assert any(key.startswith("newcomer/c/") for key in state.arrays)
    assert 'hold-out = "c"' in (run / "config.toml").read_text()
    withdraw("c", [run])
    assert 'hold-out = ""' in (run / "config.toml").read_text()
    state = State.load(run / "checkpoint/apple-7/server.safetensors")
    assert not any(key.startswith("newcomer/c/") for key in state.arrays)
    assert "c" not in state.numbers["newcomers"]["silos"] and not History(
        run / "history.csv"
    ).drop("c")


def test_a_hospital_that_joined_late(three, tmp_path):
    run = tmp_path / "run"
    late = {"late_joiners": "b=2,c=2", "rounds": 2}
    finished = federate(three, strategy="apple", directory=run, **late)
    write_summary(
        RunDirectory(run), finished.federation.history, finished.federation.finish_run()
    )
    assert summary_of(run)["runs"][0]["joined"] == {"b": 2, "c": 2}
    withdraw("c", [run])
    assert 'late-joiners = "b=2"' in (run / "config.toml").read_text()
    assert summary_of(run)["runs"][0]["joined"] == {"b": 2}


def test_a_run_that_stopped_early_still_says_so(three, tmp_path):
    run = tmp_path / "run"
    finished = federate(three, directory=run, rounds=5, patience=1, min_delta=1.0)
    write_summary(
        RunDirectory(run), finished.federation.history, finished.federation.finish_run()
    )
    before = summary_of(run)["runs"][0]["stopped"]
    assert before["planned"] == 5
    withdraw("c", [run])
    assert summary_of(run)["runs"][0]["stopped"] == before


def test_a_name_within_another_is_not_meant():
    names = ["b", "a.b", "clinic"]
    assert of_silo("model.b", "b", names) and of_silo("b", "b", names)
    assert not of_silo("model.a.b", "b", names) and of_silo("model.a.b", "a.b", names)
    assert not of_silo("model.clinic-2", "clinic", names)


def test_a_run_that_is_going_on_is_refused(three, tmp_path):
    run = tmp_path / "run"
    federate(three, strategy="fedavg", rounds=1, directory=run)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with (
        RunDirectory(run).hold(),
        pytest.raises(ValueError, match="another run is writing to it"),
    ):
        withdraw("a", [run])
    assert all(file.read_bytes() == content for file, content in before.items())


def test_a_silo_that_is_called_like_something_of_ours(three, tmp_path):
    """Its name is a method's own key, and a checkpoint's: only what is the silo's goes."""
    files = {"global": three["a"], "round": three["b"], "c": three["c"]}
    run = tmp_path / "run"
    federate(files, strategy="fedamp", rounds=2, directory=run, **DEEP)
    before = State.load(next(run.rglob("server.safetensors")))
    withdraw("global", [run])
    withdraw("round", [run])
    after = State.load(next(run.rglob("server.safetensors")))
    assert set(before.arrays) - set(after.arrays) == {"model.global", "model.round"}
    assert after.numbers["round"] == 2 and after.numbers["silos"] == ["c"]
    assert after.numbers["withdrawn"] == ["global", "round"]


def test_of_the_progress_only_its_lines_go(three, tmp_path):
    run = tmp_path / "run"
    federate(three, strategy="fedavg", rounds=2, directory=run)
    file = run / "progress.jsonl"
    others = (
        file.read_text()
        + json.dumps({"event": "refused", "message": "node 1 calls itself a-2"})
        + "\n"
    )
    file.write_text(
        others
        + json.dumps({"event": "refused", "message": "node 1 calls itself a, and"})
        + "\n"
    )
    assert '"samples": {"a": 6, "b": 10, "c": 8}' in others
    withdraw("a", [run])
    events = [without_a(json.loads(line)) for line in others.splitlines()]
    assert [json.loads(line) for line in file.read_text().splitlines()] == events
    assert '"a"' not in file.read_text()


def without_a(value):
    """An event without what stands in it by the silo's name."""
    return (
        {k: without_a(v) for k, v in value.items() if k != "a"}
        if isinstance(value, dict)
        else value
    )
