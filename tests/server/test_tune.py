"""`silofl tune`: which trials there are, by what they are compared, how a search goes on, and what it leaves."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import federate, write_silo

import server.tuning.search
from partitions.common.errors import RunFailedError, UserError
from server.cli.main import main
from server.results.history import History
from server.results.run_directory import RunDirectory, read_toml
from server.simulation.workers import Job, engine_of, work
from server.tuning.search import Request, budgets, tune
from server.tuning.space import read_space
from server.tuning.trials import Book, score_of

SPACE = ("learning-rate=log(0.001,1.0)", "fedprox.mu=[0.0,0.1]")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty rows of three columns, whose labels follow a linear rule."""
    return write_table(tmp_path_factory.mktemp("table") / "table.npz")


def write_table(path: Path) -> Path:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 3))
    y = (x @ rng.normal(size=(3, 2))).argmax(1)
    return write_silo(path, x, [int(label) for label in y])


def request(table: Path, sampler: str = "random", trials: int = 4, **changes: Any) -> Request:
    values = {"dataset": str(table), "partition": "iid", "silos": 2, "threads": 1, "model": "mlp", "mlp.hidden": ""}
    values |= {"rounds": 2, "seed": 5, "validation": 0.3}
    strategies = changes.pop("strategies", ["fedavg", "fedprox"])
    objective = changes.pop("objective", "mean")
    space = changes.pop("space", SPACE)
    return Request({**values, **changes}, strategies, read_space(space, strategies), trials, sampler, objective)


def search(request: Request, out: Path, engine: Any = None) -> Book:
    return tune(request, out, engine, quiet=True)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def left(out: Path) -> dict[str, str]:
    """All that a search leaves for its user, but the seconds."""
    return {file.name: file.read_text() for file in (out / "trials.csv", *sorted(out.glob("best-*.toml")))}


@pytest.fixture(scope="module")
def whole(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A search by each sampler, in one go."""
    folder = tmp_path_factory.mktemp("searches")
    for sampler, trials, rounds in (("random", 3, 2), ("tpe", 6, 2), ("halving", 4, 6)):
        search(request(table, sampler, trials, rounds=rounds), folder / sampler)
    return {sampler: folder / sampler for sampler in ("random", "tpe", "halving")}


def test_the_file_of_trials(whole: dict[str, Path]) -> None:
    """As in the contract: equally many trials of each method, and a method's own setting in its rows alone."""
    head = (whole["random"] / "trials.csv").read_text().splitlines()[0]
    assert head == "trial,strategy,state,rounds,score,learning-rate,fedprox.mu"
    found = rows(whole["random"])
    assert [(row["strategy"], row["trial"]) for row in found] == [
        (strategy, str(number)) for strategy in ("fedavg", "fedprox") for number in range(3)
    ]
    for row in found:
        assert (row["state"], row["rounds"]) == ("complete", "2")
        assert 0 <= float(row["score"]) <= 1 and 0.001 <= float(row["learning-rate"]) <= 1
        assert row["fedprox.mu"] in (("",) if row["strategy"] == "fedavg" else ("0.0", "0.1"))


def test_scores_are_of_validation_at_the_reported_round(whole: dict[str, Path]) -> None:
    """Recomputed by hand from a trial's history: the best round's mean over the two silos."""
    for row in rows(whole["random"]):
        directory = whole["random"] / "trials" / f"{row['strategy']}-{int(row['trial']):04d}"
        means: dict[int, list[float]] = {}
        for one in History(directory / "history.csv").rows:
            if (one.split, one.snapshot, one.metric) == ("val", "received", "accuracy"):
                means.setdefault(one.round, []).append(one.value)
        assert float(row["score"]) == max(sum(values) / 2 for values in means.values())


@pytest.mark.parametrize("sampler", ["random", "halving"])
def test_the_best_file_repeats_the_best_trial(whole: dict[str, Path], tmp_path: Path, sampler: str) -> None:
    out = whole[sampler]
    own = [row for row in rows(out) if row["strategy"] == "fedprox" and row["state"] == "complete"]
    best = max(own, key=lambda row: (float(row["score"]), -int(row["trial"])))
    values = read_toml(out / "best-fedprox.toml")
    assert values["strategy"] == "fedprox" and "out" not in values and "resume" not in values
    assert repr(values["learning-rate"]) == best["learning-rate"]
    assert main(["simulate", "--config", str(out / "best-fedprox.toml"), "--out", str(tmp_path / "again")]) == 0
    trial = out / "trials" / f"fedprox-{int(best['trial']):04d}" / "history.csv"
    lines = [
        [line for line in file.read_text().splitlines() if "seconds" not in line]
        for file in (trial, tmp_path / "again" / "history.csv")
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("sampler", ["random", "tpe", "halving"])
def test_the_same_seed_the_same_trials(whole: dict[str, Path], table: Path, tmp_path: Path, sampler: str) -> None:
    """Also with trials that end in another order, each as a worker's process does it; another seed has others."""
    shape = {"random": (3, 2), "tpe": (6, 2), "halving": (4, 6)}[sampler]
    again = request(table, sampler, shape[0], rounds=shape[1])
    search(again, tmp_path / "again", backwards)
    assert left(tmp_path / "again") == left(whole[sampler])
    if sampler == "random":
        search(request(table, sampler, 3, seed=6), tmp_path / "other")
        assert rows(tmp_path / "other")[0]["learning-rate"] != rows(whole[sampler])[0]["learning-rate"]


def backwards(jobs: dict[str, Job]) -> Any:
    for key, job in reversed(list(jobs.items())):
        code = work(str(job.directory.path), job.run.run_key, job.run.common.resume, job.until)
        yield {key: code}


@pytest.mark.parametrize(("sampler", "place"), [("random", 2), ("tpe", 5), ("halving", 5)])
def test_a_killed_search_goes_on(
    whole: dict[str, Path], table: Path, tmp_path: Path, sampler: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed within the run of a trial, before anything of it is kept: no finished trial is run again."""
    shape = {"random": (3, 2), "tpe": (6, 2), "halving": (4, 6)}[sampler]
    asked = request(table, sampler, shape[0], rounds=shape[1])
    ran: list[str] = []

    class Killed(BaseException):
        pass

    def dying(run: Any, directory: Any, **given: Any) -> None:
        if len(ran) == place:
            raise Killed
        ran.append(directory.path.name)
        ordinary(run, directory, **given)

    ordinary = server.tuning.search.run_one
    with monkeypatch.context() as patch:
        patch.setattr(server.tuning.search, "run_one", dying)
        with pytest.raises(Killed):
            search(asked, tmp_path / "out")
    before, place = set(ran), -1
    ran.clear()
    with monkeypatch.context() as patch:
        patch.setattr(server.tuning.search, "run_one", dying)
        search(asked, tmp_path / "out")
    assert left(tmp_path / "out") == left(whole[sampler])
    if sampler != "halving":
        assert not before & set(ran)


def test_test_data_are_not_read(table: Path, tmp_path: Path) -> None:
    """Other test labels: the same trials, the same scores, the same best settings, though test scores differ."""
    with np.load(table) as data:
        arrays = dict(data)
    silos = {}
    for flip in (False, True):
        for name, part in (("a", slice(0, 30)), ("b", slice(30, 60))):
            own = {key: value[part] if key != "classes" else value for key, value in arrays.items()}
            if flip:
                own["y_test"] = 1 - own["y_test"]
            np.savez(tmp_path / f"{name}-{flip}.npz", **own)
            silos[name, flip] = tmp_path / f"{name}-{flip}.npz"
    found = {
        flip: scores({name: silos[name, flip] for name in "ab"}, tmp_path / f"out-{flip}") for flip in (False, True)
    }
    assert found[False][0] == found[True][0]
    assert found[False][1] != found[True][1]


def scores(files: Any, out: Path) -> tuple[list[float | None], list[float]]:
    """Validation scores of two learning rates as trials have them, and all test scores."""
    kept, tested = [], []
    for place, rate in enumerate((0.01, 1.0)):
        directory = out / str(place)
        directory.parent.mkdir(exist_ok=True)
        run = federate(files, directory=directory, strategy="fedavg", rounds=3, learning_rate=rate)
        kept += [score_of(RunDirectory(directory), run.settings, objective) for objective in ("mean", "worst")]
        tested += [row.value for row in run.rows if row.split == "test"]
    return kept, tested


def test_the_worst_silo_as_the_objective(table: Path, tmp_path: Path, whole: dict[str, Path]) -> None:
    """The same trials; no score is above the mean's, and one is below it."""
    search(request(table, "random", 3, objective="worst"), tmp_path / "worst")
    pairs = [
        (float(a["score"]), float(b["score"]))
        for a, b in zip(rows(tmp_path / "worst"), rows(whole["random"]), strict=True)
    ]
    assert all(worst <= mean for worst, mean in pairs) and any(worst < mean for worst, mean in pairs)


def test_halving_gives_rounds_to_the_better_ones(whole: dict[str, Path]) -> None:
    """Four trials of 6 rounds: all do 2, the best of them 6. Who is left out has the lower score at round 2."""
    assert budgets(4, 6) == [2, 6]
    assert budgets(27, 90) == [3, 10, 30, 90]
    assert (budgets(1, 9), budgets(9, 2), budgets(2, 9)) == ([9], [2], [9])
    for strategy in ("fedavg", "fedprox"):
        own = [row for row in rows(whole["halving"]) if row["strategy"] == strategy]
        assert sorted((row["state"], row["rounds"]) for row in own) == [("complete", "6"), *[("pruned", "2")] * 3]


def test_what_it_cost(whole: dict[str, Path]) -> None:
    cost = json.loads((whole["halving"] / "tuning.json").read_text())["cost"]["fedavg"]
    assert (cost["trials"], cost["rounds"]) == (4, 6 + 3 * 2)
    histories = (whole["halving"] / "trials").glob("fedavg-*/history.csv")
    sent = sum(int(r.value) for h in histories for r in History(h).rows if r.metric in ("bytes_up", "bytes_down"))
    assert cost["bytes"] == sent > 0


def test_a_trial_that_fails_costs_the_others_nothing(table: Path, tmp_path: Path) -> None:
    """A batch smaller than the run's least one is refused: that trial has failed, with the reason beside it."""
    asked = request(
        table, "random", 6, strategies=["fedavg"], space=["batch-size=[2,16]"], seed=7, **{"min-batch-size": 8}
    )
    search(asked, tmp_path / "out")
    found = rows(tmp_path / "out")
    assert {(row["batch-size"], row["state"], bool(row["score"])) for row in found} == {
        ("2", "failed", False),
        ("16", "complete", True),
    }
    failed = next(row for row in found if row["state"] == "failed")
    why = (tmp_path / "out" / "trials" / f"fedavg-{int(failed['trial']):04d}" / "outcome.json").read_text()
    assert "min-batch-size = 8 is more than batch-size = 2" in why
    with pytest.raises(RunFailedError, match="fedavg: no trial has a score"):
        search(
            request(table, "random", 1, strategies=["fedavg"], space=["batch-size=[2,3]"], **{"min-batch-size": 8}),
            tmp_path / "none",
        )


def test_another_search_is_refused(whole: dict[str, Path], table: Path, tmp_path: Path) -> None:
    before = left(whole["random"])
    with pytest.raises(UserError, match="holds another search: trials differ"):
        search(request(table, "random", 4), whole["random"])
    assert left(whole["random"]) == before
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(UserError, match="is not empty and holds no search"):
        search(request(table), tmp_path)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("learning-rat=log(0.1,1)", "unknown setting 'learning-rat'"),
        ("rounds=[1,2]", "it decides what trials are measured by"),
        ("validation=[0.1,0.2]", "it decides what trials are measured by"),
        ("apple.mu=[0.1,0.2]", "apple is not tuned here"),
        ("learning-rate", "KEY=FORM or a .toml file"),
        ("learning-rate=log(0,1)", "more than 0"),
        ("learning-rate=log(1,0.1)", "0 < LO < HI"),
        ("learning-rate=int(1,3)", r"log\(LO,HI\), uniform"),
        ("local-epochs=log(1,3)", r"int\(LO,HI\), logint"),
        ("optimizer=uniform(0,1)", "optimizer = "),
        ("optimizer=[sgd,rmsprop]", "one of sgd, adam"),
        ("optimizer=[sgd]", "two or more different values"),
        ("momentum=[0.1,0.10]", "two or more different values"),
        ("momentum=something", "one of log"),
    ],
)
def test_a_space_that_cannot_be_searched_is_one_line(entry: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        read_space([entry], ["fedavg"])


def test_spaces_in_a_file(tmp_path: Path) -> None:
    """The same as on the command line, with tables for a method's own settings."""
    file = tmp_path / "space.toml"
    file.write_text('learning-rate = "log(0.001, 1.0)"\n[fedprox]\nmu = [0.0, 0.1]\n')
    assert read_space([str(file)], ["fedprox"]) == read_space(SPACE, ["fedprox"])
    with pytest.raises(UserError, match="names learning-rate twice"):
        read_space([str(file), "learning-rate=[0.1,0.2]"], ["fedprox"])


def test_without_validation_it_is_refused(table: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no validation score"):
        search(request(table, validation=0.0), tmp_path / "out")


def test_the_command_line(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "tune",
        "--strategy",
        "fedavg",
        "--data",
        str(table),
        "--partition",
        "iid",
        "--silos",
        "2",
        "--rounds",
        "1",
    ]
    given += ["--set", "threads=1", "validation=0.3", "--space", "learning-rate=log(0.01,1)", "--trials", "2"]
    assert main(given) == 2
    assert "--out DIR is wanted here" in capsys.readouterr().err
    assert main([*given, "--out", str(tmp_path / "out"), "--seed", "1,2"]) == 2
    assert "one seed is wanted here" in capsys.readouterr().err
    assert main([*given, "--out", str(tmp_path / "out"), "--sampler", "random"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == str(tmp_path / "out")
    assert "2 trials, 2 rounds" in shown.err
    assert len(rows(tmp_path / "out")) == 2


def test_workers_have_processes_of_their_own(table: Path, tmp_path: Path, whole: dict[str, Path]) -> None:
    """Two real processes at a time, with the same trials."""
    search(request(table, "random", 3), tmp_path / "out", engine_of("2"))
    assert left(tmp_path / "out") == left(whole["random"])
