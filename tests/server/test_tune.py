"""`silofl tune`: which trials there are, by what they are compared, how a search goes on, and what it leaves."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from representatives import seldom, some
from taken import silofl
from tiny import history_without_seconds, json_of, write_silo

import server.tuning.search
from models.privacy.accountant import Releases, composed_epsilon
from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.common.files import hold_lock
from server.cli.main import main
from server.results.history import History, Row
from server.results.run_directory import RunDirectory, read_toml
from server.results.study import study_runs, tuned_study
from server.run.loop import RoundLoop
from server.simulation.workers import engine_of, keep_workers, work
from server.tuning.search import Request, budgets, tune
from server.tuning.space import read_space
from server.tuning.trials import STORAGE, Book, together, trial_score
from strategies.base.run_settings import parse_settings
from strategies.base.state import State

SHAPES = {"random": (3, 2), "tpe": (6, 2), "halving": (4, 6)}  # trials and rounds of a search
SPACE = ("learning-rate=log(0.001,1.0)", "fedprox.mu=[0.0,0.1]")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Sixty rows of three columns, whose labels follow a linear rule."""
    return write_table(tmp_path_factory.mktemp("table") / "table.npz")


def write_table(path):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 3))
    y = (x @ rng.normal(size=(3, 2))).argmax(1)
    return write_silo(path, x, [int(label) for label in y])


def request(table, sampler="random", trials=4, **changes):
    values = {
        "dataset": str(table),
        "partition": "iid",
        "silos": 2,
        "threads": 1,
        "model": "mlp",
        "mlp.hidden": "",
    }
    values |= {"rounds": 2, "seed": 5, "validation": 0.3}
    strategies = changes.pop("strategies", ["fedavg", "fedprox"])
    objective = changes.pop("objective", "mean")
    space = changes.pop("space", SPACE)
    return Request(
        {**values, **changes},
        strategies,
        read_space(space, strategies),
        trials,
        sampler,
        objective,
    )


def search(request, out, engine=None):
    return tune(request, out, engine, quiet=True)


def rows(out):
    with (out / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def left(out):
    """All that a search leaves for its user, but the seconds."""
    return {
        file.name: file.read_text()
        for file in (out / "trials.csv", *sorted(out.glob("best-*.toml")))
    }


@pytest.fixture(scope="module")
def whole(table, tmp_path_factory):
    """A search by each sampler, in one go."""
    folder = tmp_path_factory.mktemp("searches")
    for sampler, (trials, rounds) in SHAPES.items():
        search(request(table, sampler, trials, rounds=rounds), folder / sampler)
    return {sampler: folder / sampler for sampler in SHAPES}


def test_the_file_of_trials(whole):
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
        trial = whole["random"] / "trials" / trial_name(row)
        assert read_toml(trial / "config.toml")["evidence"] == "off"  # which is of test data
    assert read_toml(whole["random"] / "best-fedavg.toml")["evidence"] == "auto"


def test_scores_are_of_validation_at_the_reported_round(whole):
    """Recomputed by hand from a trial's history: the best round's mean over the two silos."""
    for row in rows(whole["random"]):
        assert float(row["score"]) == max(
            validation_means(whole["random"] / "trials" / trial_name(row))[1:]
        )


def trial_name(row):
    return f"{row['strategy']}-{int(row['trial']):04d}"


def validation_means(directory):
    """Mean validation accuracy of the two silos by round; a number for no round first."""
    means: dict[int, list[float]] = {0: []}
    for one in History(directory / "history.csv").rows:
        if (one.split, one.snapshot, one.metric) == ("val", "received", "accuracy"):
            means.setdefault(one.round, []).append(one.value)
    return [sum(values) / 2 for _, values in sorted(means.items())]


@pytest.mark.parametrize("sampler", ["random", "halving"])
def test_the_best_file_repeats_the_best_trial(whole, tmp_path, sampler):
    out = whole[sampler]
    own = [
        row for row in rows(out) if row["strategy"] == "fedprox" and row["state"] == "complete"
    ]
    best = max(own, key=lambda row: (float(row["score"]), -int(row["trial"])))
    values = read_toml(out / "best-fedprox.toml")
    assert values["strategy"] == "fedprox" and "out" not in values and "resume" not in values
    assert repr(values["learning-rate"]) == best["learning-rate"]
    assert (
        main(f"simulate --config {out}/best-fedprox.toml --out {tmp_path}/again".split()) == 0
    )
    trial = out / "trials" / trial_name(best)
    assert history_without_seconds(trial) == history_without_seconds(tmp_path / "again")


@some("sampler", ["random", "tpe", "halving"], "halving".__eq__)
def test_the_same_seed_the_same_trials(whole, table, tmp_path, sampler):
    """Also with trials that end in another order, each as a worker's process does it; another seed has others."""
    again = request(table, sampler, SHAPES[sampler][0], rounds=SHAPES[sampler][1])
    search(again, tmp_path / "again", backwards)
    assert left(tmp_path / "again") == left(whole[sampler])
    if sampler == "random":
        search(request(table, sampler, 3, seed=6), tmp_path / "other")
        assert (
            rows(tmp_path / "other")[0]["learning-rate"]
            != rows(whole[sampler])[0]["learning-rate"]
        )


def backwards(jobs):
    for key, job in reversed(list(jobs.items())):
        code = work(str(job.directory.path), job.run.run_key, job.run.common.resume, job.until)
        yield {key: code}


@pytest.mark.parametrize(
    ("sampler", "place"), [seldom("random", 2), ("tpe", 5), seldom("halving", 5)]
)
def test_a_killed_search_goes_on(whole, table, tmp_path, sampler, place, monkeypatch):
    """Killed within the run of a trial, before anything of it is kept: no finished trial is run again."""
    asked = request(table, sampler, SHAPES[sampler][0], rounds=SHAPES[sampler][1])
    ran: list[str] = []

    class Killed(BaseException):
        pass

    def dying(run, directory, **given):
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


def test_a_second_search_in_one_place_is_refused_and_changes_nothing(table, whole, tmp_path):
    """While another process searches there: neither the trials' table nor Optuna's file is touched."""
    copy = Path(shutil.copytree(whole["random"], tmp_path / "out"))
    before = {file: file.read_bytes() for file in copy.iterdir() if file.is_file()}
    asked = request(table, "random", SHAPES["random"][0], rounds=SHAPES["random"][1])
    with hold_lock(copy / ".lock", ""), pytest.raises(DataError, match="another silofl tune"):
        search(asked, copy)
    assert {file: file.read_bytes() for file in copy.iterdir() if file.is_file()} == before


def test_the_worst_silo_as_the_objective(table, tmp_path):
    """The same trials; no score is above the mean's, and one is below it. With low rates silos would score alike."""
    for objective in ("worst", "mean"):
        learns = ("learning-rate=log(0.3,1.0)", "fedprox.mu=[0.0,0.1]")
        asked = request(table, "random", 3, objective=objective, space=learns)
        search(asked, tmp_path / objective)
    pairs = [
        (float(a["score"]), float(b["score"]))
        for a, b in zip(rows(tmp_path / "worst"), rows(tmp_path / "mean"), strict=True)
    ]
    assert all(worst <= mean for worst, mean in pairs) and any(
        worst < mean for worst, mean in pairs
    )


def test_halving_gives_rounds_to_the_better_ones(whole):
    """Four trials of 6 rounds: all do 2, the best of them 6. Who is left out has the lower score at round 2."""
    assert budgets(4, 6) == [2, 6]
    assert budgets(27, 90) == [3, 10, 30, 90]
    assert (budgets(1, 9), budgets(9, 2), budgets(2, 9)) == ([9], [2], [9])
    for strategy in ("fedavg", "fedprox"):
        own = [row for row in rows(whole["halving"]) if row["strategy"] == strategy]
        assert sorted((row["state"], row["rounds"]) for row in own) == [
            ("complete", "6"),
            *[("pruned", "2")] * 3,
        ]
        found = {
            row["trial"]: validation_means(whole["halving"] / "trials" / trial_name(row))
            for row in own
        }
        at_rung = {trial: max(means[1:3]) for trial, means in found.items()}
        for row in own:
            best = (
                at_rung[row["trial"]]
                if row["state"] == "pruned"
                else max(found[row["trial"]][1:])
            )
            assert float(row["score"]) == best
            assert row["state"] == "pruned" or at_rung[row["trial"]] == max(at_rung.values())


def test_halving_continues_the_best_third_by_the_score_at_the_rung(
    table, tmp_path, monkeypatch
):
    """Nine trials of 9 rounds: 1, 3, 9. Scores are made up, and change their order from rung to rung."""
    # Until -> score of each trial
    made = {1: [5, 1, 7, 2, 9, 3, 8, 4, 6], 3: [0, 0, 2, 0, 1, 0, 3, 0, 0], 0: [1] * 9}
    ran: list[tuple[int, int]] = []

    def number(directory):
        return int(directory.path.name[-4:])

    def run(run, directory, until):
        ran.append((until, number(directory)))

    def score(directory, run, objective, until):
        return made[until][number(directory)]

    monkeypatch.setattr(server.tuning.search, "run_one", run)
    monkeypatch.setattr(server.tuning.search, "trial_score", score)
    search(
        request(table, "halving", 9, rounds=9, strategies=["fedavg"], space=SPACE[:1]),
        tmp_path / "out",
    )
    assert ran == [
        *((1, trial) for trial in range(9)),
        *((3, trial) for trial in (2, 4, 6)),
        (0, 6),
    ]
    assert [row["trial"] for row in rows(tmp_path / "out") if row["state"] == "complete"] == [
        "6"
    ]


def test_a_rung_is_scored_by_its_own_last_round(table, tmp_path):
    """0.5, 0.75, 0.25 and then 1.0 on validation data in rounds 1 to 4."""
    directory = RunDirectory(tmp_path)
    History(directory.history).add(
        Row("fedavg", 5, number, silo, "val", "received", "accuracy", value, 8)
        for number, value in ((1, 0.5), (2, 0.75), (3, 0.25), (4, 1.0))
        for silo in "ab"
    )
    run = parse_settings({**request(table).values, "strategy": "fedavg"})
    assert [trial_score(directory, run, "mean", until) for until in (1, 2, 3, 4, 0)] == [
        0.5,
        0.75,
        0.75,
        1.0,
        1.0,
    ]


def test_settings_with_which_a_hospital_diverges_do_not_win(table, tmp_path):
    """At the higher rate b's logits overflow float32, and a alone has a score. The search goes on as it was."""
    rng = np.random.default_rng(3)
    (tmp_path / "silos").mkdir()
    for name, size in (("a", 1.0), ("b", 1e10)):
        x = rng.normal(size=(40, 3))
        write_silo(tmp_path / "silos" / f"{name}.npz", x * size, [int(v > 0) for v in x[:, 0]])
    asked = request(
        tmp_path / "silos",
        "random",
        16,  # draws depend on the data set's path; among so many are both rates
        strategies=["local"],
        space=["learning-rate=[0.1,1e30]"],
        partition="natural",
        normalization="none",
    )
    out = tmp_path / "out"
    search(asked, out)
    before = rows(out)
    assert {
        (r["learning-rate"], r["state"], bool(r["score"]), r["rounds"]) for r in before
    } == {("0.1", "complete", True, "2"), ("1e+30", "failed", False, "2")}
    assert "no validation score of b" in (out / STORAGE).read_text()
    search(asked, out)
    assert rows(out) == before


@pytest.mark.parametrize("lost", ["rejected", "nan"])
def test_a_hospital_without_validation_data_needs_no_score(table, tmp_path, lost):
    """c lost its rounds, as b did, but has no validation data."""
    history, sizes = History(tmp_path / "history.csv"), dict.fromkeys("ab", 8) | {"c": 0}
    history.add([Row("fedavg", 5, 1, "a", "val", "received", "accuracy", 0.5, 8)])
    run = parse_settings({**request(table).values, "strategy": "fedavg"})

    def score(lost_silo):
        kind = (
            ("", "", "rejected", 1.0)
            if lost == "rejected"
            else ("val", "received", "loss", np.nan)
        )
        history.add([Row("fedavg", 5, 2, lost_silo, *kind, None)])
        return trial_score(RunDirectory(tmp_path), run, "worst", 0)

    silos = [{"name": name, "n_val": n} for name, n in sizes.items()]
    (tmp_path / "manifest.json").write_text(json.dumps({"silos": silos}))
    assert score("c") == 0.5
    with pytest.raises(RunFailedError, match="no validation score of b"):
        score("b")


def test_what_it_cost(whole):
    cost = json_of(whole["halving"] / "tuning.json")["cost"]["fedavg"]
    assert (cost["trials"], cost["rounds"]) == (4, 6 + 3 * 2)
    histories = (whole["halving"] / "trials").glob("fedavg-*/history.csv")
    sent = sum(
        int(r.value)
        for h in histories
        for r in History(h).rows
        if r.metric in ("bytes_up", "bytes_down")
    )
    assert cost["bytes"] == sent > 0


def test_a_trial_that_fails_costs_the_others_nothing(table, tmp_path):
    """A batch smaller than the run's least one is refused: that trial has failed, with the reason beside it."""
    asked = request(
        table,
        "random",
        6,
        strategies=["fedavg"],
        space=["batch-size=[2,16]"],
        seed=7,
        **{"min-batch-size": 8},
    )
    search(asked, tmp_path / "out")
    found = rows(tmp_path / "out")
    assert {(row["batch-size"], row["state"], bool(row["score"])) for row in found} == {
        ("2", "failed", False),
        ("16", "complete", True),
    }
    why = (tmp_path / "out" / STORAGE).read_text()
    assert "min-batch-size = 8 is more than batch-size = 2" in why
    with pytest.raises(RunFailedError, match="fedavg: no trial has a score"):
        search(
            request(
                table,
                "random",
                1,
                strategies=["fedavg"],
                space=["batch-size=[2,3]"],
                **{"min-batch-size": 8},
            ),
            tmp_path / "none",
        )


def test_another_search_is_refused(whole, table, tmp_path):
    before = left(whole["random"])
    with pytest.raises(UserError, match="holds another search: trials differ"):
        search(request(table, "random", 4), whole["random"])
    assert left(whole["random"]) == before
    (whole["random"] / STORAGE).rename(tmp_path / STORAGE)
    with pytest.raises(UserError, match="holds a search of silofl 0"):
        search(request(table, "random", 3), whole["random"])
    (tmp_path / STORAGE).rename(whole["random"] / STORAGE)
    (tmp_path / "mine.txt").write_text("")
    fails(UserError, "is not empty and holds no search", search, request(table), tmp_path)


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
def test_a_space_that_cannot_be_searched_is_one_line(entry, line):
    fails(UserError, line, read_space, [entry], ["fedavg"])


def test_spaces_in_a_file(tmp_path):
    """The same as on the command line, with tables for a method's own settings."""
    file = tmp_path / "space.toml"
    file.write_text('learning-rate = "log(0.001, 1.0)"\n[fedprox]\nmu = [0.0, 0.1]\n')
    assert read_space([str(file)], ["fedprox"]) == read_space(SPACE, ["fedprox"])
    with pytest.raises(UserError, match="names learning-rate twice"):
        read_space([str(file), "learning-rate=[0.1,0.2]"], ["fedprox"])


def test_without_validation_it_is_refused(table, tmp_path):
    with pytest.raises(UserError, match="has no validation score"):
        search(request(table, validation=0.0), tmp_path / "out")


def test_the_command_line(table, tmp_path, capsys):
    given = shlex.split(
        "tune --strategy fedavg --partition iid --silos 2 --rounds 1 --trials 2 --set threads=1"
    )
    given += f"validation=0.3 --data {table} --space learning-rate=log(0.01,1)".split()
    assert main(given) == 2
    assert "--out DIR is needed here" in capsys.readouterr().err
    assert silofl(*given, *f"--out {tmp_path}/out --seed 1,2".split()) == 2
    assert "one seed is needed here" in capsys.readouterr().err
    assert silofl(*given, *f"--out {tmp_path}/out --sampler random".split()) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == str(tmp_path / "out")
    assert "2 trials, 2 rounds" in shown.out
    assert len(rows(tmp_path / "out")) == 2


@pytest.mark.exhaustive
def test_workers_have_processes_of_their_own(table, tmp_path):
    """Two real processes at a time, with the same trials."""
    few = request(table, "random", 2, strategies=["fedprox"])
    search(few, tmp_path / "out", engine_of("2"))
    search(few, tmp_path / "turns")
    assert left(tmp_path / "out") == left(tmp_path / "turns")


# A run that has got to round 2 of this trial, and a search that has ended two trials, are killed as the kernel kills.
def killed(given):
    ordinary, keep = RoundLoop.round, Book.end

    def round_until(loop, strategy, number):
        if loop.directory and loop.directory.path.name == "fedprox-0001" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        ordinary(loop, strategy, number)

    def keep_until(book, *trial):
        keep(book, *trial)
        if sum(one.state != "" for one in book.trials) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    patch = pytest.MonkeyPatch()
    if "--workers" in given:
        patch.setattr(Book, "end", keep_until)
    else:
        patch.setattr(RoundLoop, "round", round_until)
    main(given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
def test_kill_9_in_the_middle_of_a_search(table, whole, tmp_path, workers):
    """In a trial's round, and while workers have trials: the same command leaves what an undisturbed search leaves."""
    line = (
        "tune --strategy fedavg,fedprox --partition iid --silos 2 --rounds 2 --seed 5 --trials 3 --sampler random "
        f"--data {table} --out {tmp_path}/out --set threads=1 model=mlp mlp.hidden= validation=0.3"
    )
    given = [*line.split(), *workers, "--space", *SPACE]
    # A fork may not train
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(given,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    done = rows(tmp_path / "out")
    assert 1 <= len(done) < 6
    assert main(given) == 0
    assert left(tmp_path / "out") == left(whole["random"])


@pytest.mark.deployed
@pytest.mark.exhaustive
def test_trials_on_ray(table, tmp_path):
    """One cluster of this machine's own for the whole search, also where halving asks it twice."""
    import ray

    small = {"strategies": ["fedavg"], "space": SPACE[:1], "rounds": 3}
    with keep_workers("ray"):
        search(request(table, "halving", 3, **small), tmp_path / "ray", engine_of("ray"))
        assert ray.is_initialized()
    assert not ray.is_initialized()
    search(request(table, "halving", 3, **small), tmp_path / "turns")
    assert left(tmp_path / "ray") == left(tmp_path / "turns")


# ---------------------------------------------------------------------------------------------------------------------
# The study of what was found


def test_the_study_of_tuned_methods_is_that_of_their_best_trials(whole, tmp_path):
    """Row for row, though the two learning rates differ; the directory repeats it; the report has the budgets."""
    out, found = tmp_path / "study", whole["random"]
    assert main(f"simulate --tuned {found} --out {out}".split()) == 0
    wanted = []
    for strategy in ("fedavg", "fedprox"):
        best = max(
            (row for row in rows(found) if row["strategy"] == strategy),
            key=lambda row: (float(row["score"]), -int(row["trial"])),
        )
        wanted += history_without_seconds(found / "trials" / trial_name(best))[1:]
        assert (
            repr(read_toml(out / "config.toml")[f"run.{strategy}-5.learning-rate"])
            == best["learning-rate"]
        )
    assert history_without_seconds(out)[1:] == wanted
    assert main(f"simulate --config {out}/config.toml --out {tmp_path}/again".split()) == 0
    assert history_without_seconds(tmp_path / "again")[1:] == wanted
    page = " ".join((out / "report.html").read_text().split())
    assert (
        "How the methods were tuned" in page
        and "3 trials of each method (random, 2 rounds)" in page
    )
    assert "same number of trials and of rounds" in page and "3, 0, 0" in page
    assert "How the methods were tuned" not in (tmp_path / "again/report.html").read_text()


def test_a_search_for_each_seed(table, whole, tmp_path):
    """Each seed has the settings of its own search; searches that were not alike are not compared."""
    search(request(table, "random", 3, seed=6), tmp_path / "6")
    both = [str(whole["random"]), str(tmp_path / "6")]
    values, record = tuned_study([Path(one) for one in both], {"strategy": "fedprox"})
    assert (values["seed"], values["strategy"]) == ("5,6", "fedprox")
    for seed, one in zip((5, 6), both, strict=True):
        best = read_toml(Path(one) / "best-fedprox.toml")
        assert values[f"run.fedprox-{seed}.learning-rate"] == best["learning-rate"]
        assert values[f"run.fedprox-{seed}.fedprox.mu"] == best["fedprox.mu"]
    assert [one["seed"] for one in record["searches"]] == [5, 6]
    runs = study_runs(values)
    assert [run.method.mu for run in runs] == [
        values["run.fedprox-5.fedprox.mu"],
        values["run.fedprox-6.fedprox.mu"],
    ]
    search(request(table, "random", 1, seed=7), tmp_path / "7")
    for given, line in (
        ([*both, str(tmp_path / "7")], r"differ in trials; searches that are compared"),
        ([both[0], both[0]], "have the same seed 5"),
        ([str(tmp_path)], "holds no search"),
    ):
        fails(UserError, line, tuned_study, [Path(one) for one in given], {})
    with pytest.raises(UserError, match="several searches bring their own seeds"):
        tuned_study([Path(one) for one in both], {"seed": "1"})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--set", "learning-rate=0.1"], "--tuned: learning-rate is the search's"),
        (["--silos", "3"], "--tuned: silos is the search's"),
        (["--strategy", "fedavg,apple"], "--tuned: apple was not tuned in"),
        (["--hold-out", "each"], "--hold-out: not with --tuned"),
    ],
)
def test_what_a_tuned_study_refuses(whole, tmp_path, capsys, options, line):
    given = ["simulate", "--tuned", str(whole["random"]), "--out", str(tmp_path / "out")]
    assert silofl(*given, *options) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and line in said[0]
    assert not (tmp_path / "out").exists()


def test_a_search_that_is_not_finished_is_refused(whole, tmp_path):
    shutil.copytree(whole["random"], tmp_path / "search")
    trials = tmp_path / "search/trials.csv"
    trials.write_text("".join(trials.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(
        UserError, match="the search is not finished; the same silofl tune goes on with it"
    ):
        tuned_study([tmp_path / "search"], {})


def test_other_seeds_than_the_searched_one_are_named(whole, tmp_path):
    """A split that the seed draws may put patients of the search's training part into the test part."""
    out = tmp_path / "study"
    assert silofl("simulate", "--tuned", whole["halving"], "--seed", "5,8", "--out", out) == 0
    page = " ".join((out / "report.html").read_text().split())
    assert (
        "Seeds 8 have the settings of seed 5" in page and "their scores may be too high" in page
    )
    assert "1, 3, 0" in page


# ---------------------------------------------------------------------------------------------------------------------
# Differential privacy


def test_the_deltas_of_lost_states_add_up():
    """Two trials that compose, and two of which only (1, 1e-5) and (2, 1e-6) are known: 3 more, at 2.1e-5."""
    kept = {
        "delta": 1e-5,
        "epsilon": 9.0,
        "releases": [{"noise": 1.5, "rate": 0.1, "steps": 10}],
    }
    lost = [
        {"delta": delta, "epsilon": epsilon, "releases": []}
        for epsilon, delta in ((1.0, 1e-5), (2.0, 1e-6))
    ]
    both = composed_epsilon([Releases(1.5, 0.1, 10)] * 2, 1e-5)
    found = together(
        [
            {"a": one, "b": other}
            for one, other in zip([kept, kept, *lost], [*lost, *lost], strict=True)
        ]
    )
    assert found["a"] == {"epsilon": pytest.approx(both + 3), "delta": pytest.approx(2.1e-5)}
    assert found["b"] == {"epsilon": pytest.approx(6), "delta": pytest.approx(2.2e-5)}


def test_all_trials_count_towards_the_budget(table, tmp_path):
    """The steps of all trials compose: by an accountant's sum over both methods, and more than any trial's epsilon."""
    private = {"dp": True, "dp.target-epsilon": 2.0, "dp.delta": 1e-5, "normalization": "none"}
    asked = request(table, "random", 2, rounds=1, **private)
    search(asked, tmp_path / "out")
    found = json_of(tmp_path / "out/tuning.json")["privacy"]
    assert set(found) == {"all", "fedavg", "fedprox"} and set(found["all"]) == {
        "hospital-01",
        "hospital-02",
    }
    for silo, cost in found["all"].items():
        releases, each = [], []
        for folder in sorted((tmp_path / "out/trials").iterdir()):
            state = State.load(
                next(folder.glob(f"checkpoint/*/silos/{silo}/round-*.safetensors"))
            )
            releases += [
                Releases(one["noise"], one["rate"], one["steps"])
                for one in state.numbers["privacy"]
            ]
            each += [
                r.value
                for r in History(folder / "history.csv").rows
                if (r.silo, r.metric) == (silo, "epsilon")
            ]
        assert len(releases) == len(each) == 4
        assert cost == {
            "epsilon": pytest.approx(composed_epsilon(releases, 1e-5)),
            "delta": 1e-5,
        }
        assert max(each) <= 2.0 < cost["epsilon"] < sum(each)
        assert found["fedavg"][silo]["epsilon"] < cost["epsilon"]
    assert main(f"simulate --tuned {tmp_path}/out --out {tmp_path}/study".split()) == 0
    page = (tmp_path / "study/report.html").read_text()
    assert (
        f"epsilon {max(one['epsilon'] for one in found['all'].values()):.2f} at delta 1e-05 (seed 5)"
        in page
    )
