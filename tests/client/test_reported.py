"""``silofl export --which reported`` and ``shared``: what leaves has exactly the score that the report prints."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from cases import typical
from predictions import read_csv
from taken import silofl
from tiny import federate, json_of, one_block, random_silos, rows_of, summary_of

from client.export import export_model
from client.prediction.predict import predict_file
from partitions.simulated import part_of
from server.cli.main import main
from server.cli.research import outcome
from server.report.page import page
from server.report.sections.repeat import commands
from server.report.study import StudyResults
from server.results.history import History
from server.results.models import export_shared
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from server.simulation.simulate import simulate
from strategies import strategies
from strategies.base.run_settings import parse_settings

SIZES = {"a": 16, "b": 30, "c": 22}
# Jumps about, so that the best round is neither the first nor the last.
JUMPY = {"rounds": 5, "learning_rate": 20.0}


def finished(folder, strategy, state_dir=None, **changes):
    """A run with its summary, the silos' files, and the summary's entry."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    files = random_silos(folder / "data", SIZES)
    changes = {**JUMPY, **changes}
    run = federate(
        files, directory=folder / "run", state_dir=state_dir, strategy=strategy, **changes
    )
    directory = RunDirectory(folder / "run")
    (entry,) = write_summary(
        directory, History(directory.history), run.federation.finish_run()
    )["runs"]
    return run, files, entry


def trained(run):
    """The messages that had a silo train, with its replies."""
    return [(m, reply) for m, reply in run.grid.traffic if m.metadata.message_type == "train"]


def accuracy(model, file):
    """Of an exported model on a silo's test rows, by what ``predict`` writes."""
    _, labels, _ = read_csv(predict_file(model, file))
    y = rows_of(file)[1].tolist()
    return sum(a == b for a, b in zip(labels, y, strict=True)) / len(y)


def without_norms():
    """The methods that take a network without batch normalisation, any number of silos, and whose model is a file."""
    return [
        name
        for name, s in strategies().items()
        if not s.info.role.pooled
        and name not in ("fedbn", "fedex-lora", "fedsa-lora", "knn-per")
    ]


@typical(without_norms(), "method")
def test_the_reported_model_has_the_reported_score(tmp_path, method):
    """Of every method, in every silo: the figure of ``summary.json``, by another way than it was found."""
    rounds = {"rounds": 2, "learning_rate": 1.0} if method not in ("fedavg", "ditto") else JUMPY
    run, files, entry = finished(tmp_path, method, **rounds, **one_block(method))
    for silo, file in files.items():
        out = tmp_path / f"{silo}.safetensors"
        card = export_model(tmp_path / "run", silo, "reported", out)
        shown = entry["per_silo"][silo]
        assert (card.snapshot, card.round) == (
            run.strategy.info.reports,
            entry["final"]["round"],
        )
        assert accuracy(out, file) == shown["accuracy"] == card.metrics["test.accuracy"]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedavg-ft"])
def test_running_statistics_are_those_of_the_round(tmp_path, method):
    """Of networks with batch normalisation, whose statistics a silo keeps to itself or not."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 256, (120, 8, 8, 3), np.uint8), np.arange(120) % 3
    x[y == 1] //= 3  # something to learn
    np.savez(tmp_path / "pictures.npz", x=x, y=y)
    given = {
        "dataset": str(tmp_path / "pictures.npz"),
        "partition": "iid",
        "silos": 2,
        "rounds": 2,
        "threads": 1,
    }
    settings = parse_settings(
        {**given, "model": "resnet8", "batch-size": 16, "strategy": method}
    )
    run = simulate({**settings.flat(), "out": str(tmp_path / "run")}, quiet=True)
    (entry,) = summary_of(run)["runs"]
    for index, (silo, shown) in enumerate(entry["per_silo"].items()):
        card = export_model(run, silo, "reported", tmp_path / "m")
        test = part_of(settings.division, index).test
        np.savez(tmp_path / "test.npz", x=test.x, y=test.y)
        _, labels, _ = read_csv(predict_file(tmp_path / "m", tmp_path / "test.npz"))
        assert np.mean(labels == test.y) == shown["accuracy"] == card.metrics["test.accuracy"]


@pytest.mark.parametrize(
    ("method", "snapshot"), [("fedavg", "received"), ("ditto", "personal")]
)
def test_deployed_silos_keep_it_too(tmp_path, method, snapshot):
    """States in files only; the silo itself, without the summary, knows the round by the report's command."""
    _, files, entry = finished(
        tmp_path, method, state_dir=tmp_path / "states", participation=0.7, seed=3
    )
    for silo, file in files.items():
        out = tmp_path / f"{silo}.safetensors"
        shown = entry["per_silo"][silo]
        card = export_model(tmp_path / "states", silo, "reported", out, round=shown["round"])
        assert card.snapshot == snapshot and accuracy(out, file) == shown["accuracy"]
        # Of the closing exchange the server alone knows whether it is the best
        if snapshot == "received":
            with pytest.raises(
                ValueError, match=rf"models of rounds \d and 6 of {silo}: name it by --round"
            ):
                export_model(tmp_path / "states", silo, "reported", out)
        else:
            assert export_model(tmp_path / "states", silo, "reported", out) == card
        with pytest.raises(ValueError, match="kept no model of round 99, but of "):
            export_model(tmp_path / "states", silo, "reported", out, round=99)


def test_a_run_that_was_resumed_keeps_the_same(tmp_path):
    _, files, whole = finished(tmp_path / "whole", "fedavg")
    _, _, half = finished(tmp_path / "half", "fedavg", rounds=3)
    _, _, resumed = finished(tmp_path / "half", "fedavg", resume=True)
    assert half["final"]["round"] <= 4 and resumed["final"] == whole["final"]
    for silo, file in files.items():
        card = export_model(tmp_path / "half/run", silo, "reported", tmp_path / "m")
        assert card.round == whole["final"]["round"]
        assert accuracy(tmp_path / "m", file) == whole["per_silo"][silo]["accuracy"]


def test_a_silo_that_never_trained(tmp_path):
    """It has tested what it received, and the report prints that score; a personal model it has not."""
    run, files, entry = finished(
        tmp_path, "fedavg", tmp_path / "states", participation=0.4, rounds=2
    )
    (silo,) = {"a", "b", "c"} - {
        run.grid.name_of(m.metadata.dst_node_id) for m, _ in trained(run)
    }
    shown = entry["per_silo"][silo]
    export_model(tmp_path / "states", silo, "reported", tmp_path / "m", round=shown["round"])
    assert accuracy(tmp_path / "m", files[silo]) == shown["accuracy"]
    with pytest.raises(
        ValueError, match=f"{silo} has not trained in this run, so it has no personal model"
    ):
        export_model(tmp_path / "states", silo, "best", tmp_path / "m")


def test_a_silo_that_missed_the_round_stands_with_its_own(tmp_path):
    """Its last score before is what the report prints of it, and its model of then what is exported."""

    def prepare(grid):
        grid.silent = {("a", number) for number in (3, 4, 5, 6)}

    _, files, entry = finished(tmp_path, "fedavg", prepare=prepare, round_timeout=0.2)
    shown = entry["per_silo"]["a"]
    assert shown["round"] <= 2 < entry["final"]["round"] == entry["per_silo"]["b"]["round"]
    card = export_model(tmp_path / "run", "a", "reported", tmp_path / "m")
    assert (
        card.round == shown["round"]
        and accuracy(tmp_path / "m", files["a"]) == shown["accuracy"]
    )


def test_the_server_asks_for_nothing_more(tmp_path):
    """The same messages and replies, but for one number down: the round that the report would show."""
    run, _, entry = finished(tmp_path, "fedavg")
    told = []
    for message, reply in run.grid.traffic:
        config = message.content["config"]
        if message.metadata.message_type != "query":
            told.append(config.get("reported"))
            assert set(reply.content) <= {"config", "metrics", "model.model"}
    rounds = [told[i : i + 3] for i in range(0, len(told), 3)]
    assert rounds[0] == [None] * 3 and rounds[1] == [1] * 3
    assert all(len(set(r)) == 1 for r in rounds) and len(rounds) == 6
    assert entry["final"]["round"] in (rounds[-1][0], 6)


@pytest.mark.parametrize("said", ["two", True, 1.0, 4, -1, [1]])
def test_a_server_cannot_make_a_silo_export_a_wrong_model(tmp_path, said):
    """Whatever it says: the model that is exported is of the round that its card names, or there is none."""

    def before(silo, message, context):
        config = message.content.get("config")
        if config and "round" in config:
            config["reported"] = said

    def prepare(grid):
        grid.before = before

    run, files, _ = finished(tmp_path, "fedavg", tmp_path / "states", prepare=prepare)
    for number in (1, 4, 6):
        shown = [
            r.value
            for r in run.rows
            if (r.round, r.silo, r.split, r.snapshot, r.metric)
            == (number, "a", "test", "received", "accuracy")
        ]
        try:
            export_model(tmp_path / "states", "a", "reported", tmp_path / "m", round=number)
        except ValueError as error:
            assert f"no model of round {number}" in str(error)
        else:
            assert [accuracy(tmp_path / "m", files["a"])] == shown


def test_states_without_it_say_so(tmp_path):
    """A run that is not evaluated has none to report."""
    finished(tmp_path, "fedavg", evaluate_every=0, rounds=1)
    with pytest.raises(
        ValueError, match="holds no model that a report shows: no round was evaluated; "
    ):
        export_model(tmp_path / "run", "a", "reported", tmp_path / "m")
    assert export_model(tmp_path / "run", "a", "last", tmp_path / "m").snapshot == "personal"


def test_a_personal_model_of_two_networks_is_not_exported(tmp_path):
    finished(tmp_path, "apfl", apfl__mix="logits", rounds=1)
    with pytest.raises(ValueError, match="it is two networks with apfl"):
        export_model(tmp_path / "run", "a", "reported", tmp_path / "m")


# ---- The shared model ----------------------------------------------------------------------------------------------


def test_the_shared_model_is_what_all_silos_received(tmp_path):
    """FedAvg's: its score in every silo is the one that the report prints. The newest is there too."""
    run, files, entry = finished(tmp_path, "fedavg")
    card = export_shared(tmp_path / "run", tmp_path / "m")
    assert (card.round, card.silo, card.which) == (entry["final"]["round"], None, "shared")
    assert card.round < 6, "the data of this test should make an earlier round the best"
    for silo, file in files.items():
        assert accuracy(tmp_path / "m", file) == entry["per_silo"][silo]["accuracy"]
    newest = export_shared(tmp_path / "run", tmp_path / "m", round=6)
    assert newest.when == "received after round 5, the last"
    assert [accuracy(tmp_path / "m", files["b"])] == run.values("accuracy", "b", "received")[
        -1:
    ]
    with pytest.raises(
        ValueError, match=r"no shared model of round 99, but of \d and 6: name one by --round"
    ):
        export_shared(tmp_path / "run", tmp_path / "m", round=99)


def test_methods_without_a_shared_model_say_so(tmp_path):
    for method in ("local", "fedper", "lp-proj"):
        finished(tmp_path / method, method, rounds=1, learning_rate=0.1, **one_block(method))
        with pytest.raises(
            ValueError, match=f"{method} has no model that all silos share: export a silo's"
        ):
            export_shared(tmp_path / method / "run", tmp_path / "m")
    finished(tmp_path / "own", "fedavg", rounds=1, normalization="silo")
    with pytest.raises(
        ValueError, match="normalization = silo: every silo standardises by its own statistics"
    ):
        export_shared(tmp_path / "own/run", tmp_path / "m")


def test_the_report_names_the_commands(tmp_path, monkeypatch):
    """They run as they stand, and give the models whose scores it shows; a closing exchange is no round 2 of 1."""
    _, files, entry = finished(tmp_path, "fedavg", rounds=1, learning_rate=1.0)
    assert entry["final"]["round"] == 2
    study = StudyResults(tmp_path / "run")
    asked = [
        shlex.split(line)[1:] for line in commands(study) if line.startswith("silofl export")
    ]
    assert [line[line.index("--which") + 1] for line in asked] == ["reported", "shared"]
    monkeypatch.chdir(tmp_path)
    for line in asked:
        assert main(line) == 0
        assert accuracy(Path(line[-1]), files["a"]) == entry["per_silo"]["a"]["accuracy"]
    assert "<small>after round 1</small>" in page(study) and "round 2" not in page(study)
    assert "test parts after round 1 (received model" in outcome(entry)


def test_a_hospital_is_told_the_round(tmp_path):
    """The states of a deployment are not in the run directory, and only the report knows the round."""
    _, files, entry = finished(tmp_path, "fedavg", tmp_path / "states")
    (line,) = [c for c in commands(StudyResults(tmp_path / "run")) if "--which reported" in c]
    assert (
        f"silofl export STATE/run --silo a --strategy fedavg --which reported --round {entry['final']['round']}"
        in line
    )
    given = shlex.split(line.replace("STATE", str(tmp_path / "states")))[1:]
    assert silofl(*given[:-1], tmp_path / "m") == 0
    assert accuracy(tmp_path / "m", files["a"]) == entry["per_silo"]["a"]["accuracy"]


def test_the_command_line(tmp_path, capsys):
    """Which model it is, in the last words of the line; no "round 6 of 5"."""
    finished(tmp_path, "fedavg", rounds=1)
    command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "m")]
    assert silofl(*command, *["--which", "shared", "--round", "2"]) == 0
    assert (
        "shared model of all silos: received after round 1, the last" in capsys.readouterr().out
    )
    assert silofl(*command, *["--which", "reported", "--silo", "a"]) == 0
    assert json_of(tmp_path / "m.json")["which"] == "reported"
    assert silofl(*command, *["--which", "shared", "--silo", "a"]) == 2
    assert silofl(*command, "--which", "best") == 2
    assert silofl(*command, *["--which", "best", "--silo", "a", "--round", "1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "--silo NAME is needed here" in errors[1]
