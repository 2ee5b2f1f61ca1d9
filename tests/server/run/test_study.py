"""A study and what it leaves: config.toml, history.csv, summary.json, progress.jsonl."""

from __future__ import annotations

import csv
import io
import math
import os
import signal
import threading
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from failing import fails
from forks import ended, fork
from tiny import SIMULATED, events_of, history_without_seconds, small_study, summary_of

from models.evidence.measure import CALIBRATION
from models.metrics import METRICS
from models.tasks import MULTICLASS
from partitions.common.errors import UserError
from partitions.common.settings import toml_text
from server.results import run_directory
from server.results.history import HEADER, History, Row
from server.results.run_directory import RunDirectory, flatten, read_toml
from server.results.study import study_config, study_runs
from server.results.summary import FinishedRun, compare, run_summary
from server.run.recorder import silo_rows
from server.simulation.simulate import simulate
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.run_settings import defaults, parse_settings

SPLITS, SNAPSHOTS = ("test", "train", "val"), ("personal", "received")


# Of a run that measured none.
EVIDENCE: dict[str, Any] = {**dict.fromkeys(CALIBRATION), "evidence": {}}


def small(table, out, **changes):
    return small_study(out, table, **{"silos": 2, "rounds": 3, **changes})


@pytest.fixture(scope="module")
def study(table, tmp_path_factory):
    """Three methods with two seeds."""
    out = tmp_path_factory.mktemp("runs") / "study"
    return small(table, out, strategy="local,fedavg,apple", seed="1,2", apple__mu=0.5)


def summary(run):
    return summary_of(run)["runs"]


# ---------------------------------------------------------------------------------------------------------------------
# Studies


def test_a_study_is_its_single_runs(study, table, tmp_path):
    """Every method with every seed, seed by seed; each gives the rows that it gives alone."""
    assert [(r["strategy"], r["seed"]) for r in summary(study)] == [
        (name, seed) for seed in (1, 2) for name in ("local", "fedavg", "apple")
    ]
    alone = small(table, tmp_path / "alone", strategy="apple", seed=2, apple__mu=0.5)
    rows = history_without_seconds(study)
    assert [line for line in rows if line.startswith("apple,2,")] == history_without_seconds(
        alone
    )[1:]
    of_seed_1 = [line for line in rows if line.startswith("apple,1,")]
    assert of_seed_1 and of_seed_1 != [
        line.replace("apple,2,", "apple,1,") for line in history_without_seconds(alone)
    ]
    keys = {f"{name}-{seed}" for seed in (1, 2) for name in ("local", "fedavg", "apple")}
    assert {p.name for p in (study / "checkpoint").iterdir()} == keys


@pytest.mark.parametrize(
    "method, changes, line",
    [
        ("fedbn", {}, "fedbn keeps batch normalisation"),
        ("fedfomo", {"validation": 0.0}, "fedfomo weighs models on validation data"),
        ("fedselect", {"weight_decay": 0.1}, "fedselect holds single weights fixed"),
    ],
)
def test_a_method_that_does_not_fit_is_refused_before_another_runs(
    table, tmp_path, method, changes, line
):
    fails(
        UserError, line, small, table, tmp_path / "run", strategy=f"local,{method}", **changes
    )
    assert not (tmp_path / "run").exists()


def test_config_repeats_the_study(study, tmp_path):
    again = simulate(
        {**read_toml(study / "config.toml"), "out": str(tmp_path / "again")}, quiet=True
    )
    assert history_without_seconds(again) == history_without_seconds(study)
    assert (again / "config.toml").read_text() == (study / "config.toml").read_text()
    assert [without_seconds(r) for r in summary(again)] == [
        without_seconds(r) for r in summary(study)
    ]


def without_seconds(run):
    return {k: v for k, v in run.items() if k != "seconds"}


def test_config_holds_everything_that_matters(study):
    config = flatten(tomllib.loads((study / "config.toml").read_text()))
    common = {
        k: v for k, v in defaults().items() if "." not in k and k not in ("out", "resume")
    }
    assert set(common) <= set(config)
    assert (config["strategy"], config["seed"], config["silos"]) == (
        "local,fedavg,apple",
        "1,2",
        2,
    )
    assert (
        config["apple.mu"] == 0.5
        and config["apple.dr-learning-rate"] == defaults()["apple.dr-learning-rate"]
    )
    # Not of this study
    assert not any(key.startswith(("fedprox.", "dirichlet.")) for key in config)


def test_toml_of_all_kinds_of_values():
    given: dict[str, Any] = {
        "a": 'quote " and \\ back',
        "b": True,
        "c": 1e-05,
        "d": -3,
        "e": "",
    }
    given |= {"x.y": "µ", "x.z": 1e16, "v.w": 0.1}
    read = flatten(tomllib.loads(toml_text(given)))
    assert read == given and {k: type(v) for k, v in read.items()} == {
        k: type(v) for k, v in given.items()
    }


def test_study_runs_and_config_are_inverse():
    runs = study_runs(
        {"strategy": " local , apple ", "seed": "3,1", "apple.mu": "0.25", "rounds": 2}
    )
    assert [r.run_key for r in runs] == ["local-3", "apple-3", "local-1", "apple-1"]
    again = study_runs(study_config(runs))
    assert [r.flat() for r in again] == [r.flat() for r in runs]
    assert study_config([parse_settings({"seed": 5})])["seed"] == 5


# ---------------------------------------------------------------------------------------------------------------------
# History


def test_settings_of_one_run(tmp_path):
    """As tuned methods have them: written by run, read back, and of the network too; data are the same for all."""
    values = {**SIMULATED, "strategy": "fedavg,ditto", "seed": "1,2", "model": "mlp"}
    own = {
        "run.ditto-2.learning-rate": 0.25,
        "run.fedavg-1.mlp.hidden": "8",
        "run.ditto-1.ditto.lambda": "0.5",
    }
    runs = study_runs({**values, **own})
    assert [run.common.learning_rate for run in runs[:3]] == [0.05] * 3 and runs[
        3
    ].common.learning_rate == 0.25
    assert [run.method.lambda_ for run in (runs[1], runs[3])] == [0.5, 0.1]
    (tmp_path / "config.toml").write_text(toml_text(study_config(runs)))
    assert study_runs(read_toml(tmp_path / "config.toml")) == runs
    for key, line in (
        (
            "run.fedavg-3.learning-rate",
            "the study has no run 'fedavg-3'; it has fedavg-1, ditto-1",
        ),
        ("run.fedavg-1.dataset", "dataset is the same for all runs of a study"),
        ("run.fedavg-1.learning-rat", "unknown setting 'learning-rat'"),
    ):
        fails(UserError, line, study_runs, {**values, key: "1"})


def test_history_format(study):
    """Per silo and round: 4 metrics of 2 snapshots on val and test, and the training loss; received again at R + 1."""
    text = (study / "history.csv").read_text()
    assert text.startswith(
        "strategy,seed,round,silo,split,snapshot,metric,value,n\n"
    ) and text.endswith("\n")
    rows = list(csv.DictReader(io.StringIO(text)))
    of_one = [r for r in rows if (r["strategy"], r["seed"]) == ("apple", "1")]
    metrics = set(METRICS)
    for silo in ("hospital-01", "hospital-02"):
        for number in (1, 2, 3, 4):
            mine = [r for r in of_one if (r["silo"], r["round"]) == (silo, str(number))]
            found = {(r["split"], r["snapshot"], r["metric"]) for r in mine}
            assert len(found) == len(mine)
            received = {(split, "received", m) for split in ("val", "test") for m in metrics}
            personal = {
                (split, "personal", m) for split in ("val", "test") for m in metrics
            } | {("train", "personal", "loss")}
            assert found == (received | personal if number < 4 else received)
    for number in (1, 2, 3, 4):
        whole = [r for r in of_one if r["round"] == str(number) and not r["silo"]]
        assert [r["metric"] for r in whole] == ["round_seconds", "bytes_down", "bytes_up"]
        assert all((r["split"], r["snapshot"], r["n"]) == ("", "", "") for r in whole)
    # 30 test samples over two silos
    assert {r["n"] for r in rows if r["split"] == "test"} == {"15"}
    for r in rows:
        assert r["value"] == repr(float(r["value"])), (
            "floats are written by repr, so that they read back the same"
        )


def test_byte_counts(study):
    """APPLE downloads the core models of all silos and uploads one: Σ = (3 + 1) 64 + (64 + 1) 3 floats of 4 bytes."""
    sigma = 4 * ((3 + 1) * 64 + (64 + 1) * 3)
    rows = History(study / "history.csv").rows
    sent = {
        (r.strategy, r.round, r.metric): r.value
        for r in rows
        if r.seed == 1 and r.metric.startswith("bytes")
    }
    for number in (1, 2, 3):
        for method, size in (("local", 0), ("fedavg", 2 * sigma)):
            for way in ("bytes_down", "bytes_up"):
                assert sent[method, number, way] == size
        assert sent["apple", number, "bytes_up"] == 2 * sigma
    assert (sent["fedavg", 4, "bytes_down"], sent["fedavg", 4, "bytes_up"]) == (2 * sigma, 0)
    of_fedavg = next(r for r in summary(study) if r["strategy"] == "fedavg")
    assert (of_fedavg["bytes_down"], of_fedavg["bytes_up"]) == (3 * 2 * sigma, 3 * 2 * sigma)


def test_withheld_values_are_empty(table, tmp_path):
    """15 test and 5 validation samples per silo, 10 wanted: the validation rows say that they are withheld."""
    given = {"strategy": "fedavg", "rounds": 1, "min_metric_samples": 10}
    run = small(table, tmp_path / "run", **given)
    lines = [line for line in history_without_seconds(run) if ",val," in line]
    assert [line for line in lines if "hospital-01" in line] == [
        "fedavg,42,1,hospital-01,val,personal,accuracy,,5",
        "fedavg,42,1,hospital-01,val,received,accuracy,,5",
        "fedavg,42,2,hospital-01,val,received,accuracy,,5",
    ]
    [one] = summary(run)
    # Without validation: the last
    assert one["final"]["round"] == 2 and one["final"]["accuracy_mean"] is not None


def test_silo_rows_by_hand():
    metrics = {"personal.test.accuracy": 0.5, "seconds.train": 3.0, "personal.train.loss": 1.0}
    strategy: Any = SimpleNamespace(
        common=SimpleNamespace(which=("local", 1)),
        plan=RoundPlan(numbers={"min_metric_samples": 10}),
    )
    rows = silo_rows(strategy, SiloInfo("a", 1, 20, 0, 12), metrics, 2, "accuracy")
    assert [r.cells() for r in rows] == [
        ["local", "1", "2", "a", "test", "personal", "accuracy", "0.5", "12"],
        ["local", "1", "2", "a", "train", "personal", "loss", "1.0", "20"],
    ]


def row(round, metric="accuracy", value=0.5, silo="a", **changes):
    given = {
        "strategy": "local",
        "seed": 1,
        "split": "test",
        "snapshot": "personal",
        "n": 10,
        **changes,
    }
    return Row(round=round, metric=metric, value=value, silo=silo, **given)


def test_history_reads_what_it_wrote(tmp_path):
    rows = [
        row(1, value=0.1 + 0.2),
        row(1, value=math.nan, silo="b", n=3),
        row(1, "bytes_up", 4e9, silo="", split="", snapshot="", n=None),
        row(2, "loss", math.inf, silo='a "quoted", silo', seed=2),
    ]
    History(tmp_path / "history.csv").add(rows)
    read = History(tmp_path / "history.csv").rows
    assert [r.cells() for r in read] == [r.cells() for r in rows]
    assert read[0].value == 0.1 + 0.2 and math.isnan(read[1].value) and read[2].n is None


def test_history_forgets_what_is_repeated(tmp_path):
    """Only rows of that method, that seed, and later rounds; the file is what is in memory."""
    history = History(tmp_path / "history.csv")
    history.add(
        [
            row(r, strategy=s, seed=n)
            for s in ("local", "fedavg")
            for n in (1, 2)
            for r in (1, 2, 3)
        ]
    )
    history.forget("fedavg", 2, after=1)
    left = [(r.strategy, r.seed, r.round) for r in history.rows]
    assert left == [
        (s, n, r)
        for s in ("local", "fedavg")
        for n in (1, 2)
        for r in (1, 2, 3)
        if (s, n) != ("fedavg", 2) or r == 1
    ]
    assert [r.cells() for r in History(tmp_path / "history.csv").rows] == [
        r.cells() for r in history.rows
    ]
    history.add([row(2, strategy="fedavg", seed=2)])
    assert len(History(tmp_path / "history.csv").rows) == len(left) + 1


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_history_cut_off_by_a_crash(tmp_path, cut):
    """A last line without its end is not read, and is gone from the file before anything is added."""
    path = tmp_path / "history.csv"
    History(path).add([row(1), row(2), row(3)])
    path.write_text(path.read_text()[:-cut])
    history = History(path)
    assert [r.round for r in history.rows] == [1, 2]
    history.forget("local", 1, after=2)
    history.add([row(3, value=0.75)])
    assert [(r.round, r.value) for r in History(path).rows] == [(1, 0.5), (2, 0.5), (3, 0.75)]
    assert path.read_text().count("\n") == 4


def test_history_cut_off_in_its_first_line(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("strategy,se")
    history = History(path)
    assert history.rows == []
    history.forget("local", 1, after=0)
    assert path.read_text() == ",".join(HEADER) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Summary


def test_summary_has_the_stated_form(study):
    runs = summary(study)
    for run in runs:
        assert {
            "strategy",
            "seed",
            "rounds",
            "silos",
            "bmcta",
            "bmcta_round",
            "final",
            "per_silo",
            "incentivized_rate",
            "bytes_down",
            "bytes_up",
            "seconds",
        } <= set(run)
        assert set(run["threads"]) == {"server", "hospital-01", "hospital-02"} and all(
            run["threads"].values()
        )
        assert run["rounds"] == 3 and run["silos"] == ["hospital-01", "hospital-02"] == list(
            run["per_silo"]
        )
        assert set(run["final"]) == {
            "round",
            "accuracy_mean",
            "accuracy_weighted",
            "accuracy_worst",
            *(f"{name}_mean" for name in MULTICLASS.secondary_metrics),
            "fairness_variance",
        }
        assert set(run["seconds"]) == {"total", "train", "communicate", "aggregate"}
        assert all(isinstance(v, float) and v >= 0 for v in run["seconds"].values())
        assert (
            type(run["bytes_down"]) is int
            and type(run["bytes_up"]) is int
            and type(run["bmcta_round"]) is int
        )
        for silo in run["per_silo"].values():
            assert set(silo) == {
                "n_train",
                "n_test",
                "accuracy",
                *MULTICLASS.secondary_metrics,
                *EVIDENCE,
                "gain_over_local",
                "gain_over_fedavg",
                "round",
            }
            assert type(silo["n_train"]) is int and 0 <= silo["accuracy"] <= 1
        assert 0 <= run["incentivized_rate"] <= 1


def test_what_is_not_known_is_null(table, tmp_path):
    """Without evaluation there is no accuracy, without local and fedavg no gain over them."""
    run = small(table, tmp_path / "run", strategy="apple", evaluate_every=0, rounds=1)
    [one] = summary(run)
    assert (one["bmcta"], one["bmcta_round"], one["incentivized_rate"]) == (None, None, None)
    assert set(one["final"].values()) == {None}
    assert one["per_silo"]["hospital-01"] == {
        "n_train": 25,
        "n_test": 15,
        "accuracy": None,
        **dict.fromkeys(MULTICLASS.secondary_metrics),
        "gain_over_local": None,
        "gain_over_fedavg": None,
        "round": None,
        **EVIDENCE,
    }
    assert [p["accuracy"] for p in events_of(run) if p["event"] == "round"] == [None]


def made_up(strategy, tables, **sizes):
    """The summary of a run over silos a, b (30 and 10 test samples) with these values, round by round."""
    history = History()
    snapshot = "personal" if strategy != "fedavg" else "received"
    for (split, metric), rounds in tables.items():
        for number, pair in enumerate(rounds, start=1):
            history.add(
                row(
                    number,
                    metric,
                    value,
                    silo,
                    strategy=strategy,
                    split=split,
                    snapshot=snapshot,
                )
                for silo, value in zip("ab", pair, strict=True)
            )
            # The other snapshot is better throughout, and must not be looked at.
            other = "received" if snapshot == "personal" else "personal"
            history.add(
                [row(number, metric, 1.0, "a", strategy=strategy, split=split, snapshot=other)]
            )
    cards = {"b": {"n_train": 20, "n_test": 10}, "a": {"n_train": 60, "n_test": 30}}
    seconds = {"total": 4.0, "train": 3.0, "communicate": 0.5, "aggregate": 0.5}
    last = len(next(iter(tables.values())))
    totals = {"down": 5, "up": 7}
    run = FinishedRun(
        strategy=strategy, seed=1, rounds=last, silos=cards, total_bytes=totals, seconds=seconds
    )
    return run_summary(history, run)


def test_summary_by_hand():
    """Two silos, three rounds; test accuracies (.5, .7), (.9, .7), (.6, .8), validation (.5, .5), (.6, .8), (.9, .7).

    Means on test: .6, .8, .7: bmcta = .8 in round 2. Means on val: .5, .7, .8: the final values are round 3's:
    mean .7; weighted (30 * .6 + 10 * .8) / 40 = .65; variance ((.6 - .7)² + (.8 - .7)²) / 2 = .01. AUC is known of
    one silo only in round 3.
    """
    nan = math.nan
    one = made_up(
        "apple",
        {
            ("test", "accuracy"): [[0.5, 0.7], [0.9, 0.7], [0.6, 0.8]],
            ("val", "accuracy"): [[0.5, 0.5], [0.6, 0.8], [0.9, 0.7]],
            ("test", "macro_f1"): [[0, 0], [0, 0], [0.2, 0.4]],
            ("test", "auc"): [[0.9, 0.9], [0.9, 0.9], [0.75, nan]],
        },
    )
    assert one["bmcta"] == pytest.approx(0.8) and one["bmcta_round"] == 2
    final = {
        "round": 3,
        "accuracy_mean": 0.7,
        "accuracy_weighted": 0.65,
        "accuracy_worst": 0.6,
        "macro_f1_mean": 0.3,
        "auc_mean": 0.75,
        "fairness_variance": 0.01,
    }
    assert one["final"] == pytest.approx(one["final"] | final)
    assert one["silos"] == ["a", "b"]
    a = {"n_train": 60, "n_test": 30, "accuracy": 0.6, "macro_f1": 0.2, "auc": 0.75}
    b = {"n_train": 20, "n_test": 10, "accuracy": 0.8, "macro_f1": 0.4, "auc": None}
    unknown = {"round": 3, "gain_over_local": None, "gain_over_fedavg": None} | EVIDENCE
    assert one["per_silo"] == {
        name: one["per_silo"][name] | of | unknown for name, of in (("a", a), ("b", b))
    }
    assert (one["bytes_down"], one["bytes_up"], one["incentivized_rate"]) == (5, 7, None)


def test_a_round_is_not_better_for_an_absence():
    """b, the weaker one, misses rounds 1, 3 and 4: it counts with its .4 of round 2, before which it has none.

    Means on val: .5, .65, .65, .6: final is round 2, the first of the best. On test .5, .6, .65, .7.
    """
    nan = math.nan
    one = made_up(
        "apple",
        {
            ("test", "accuracy"): [[0.6, nan], [0.8, 0.4], [0.9, nan], [1, nan]],
            ("val", "accuracy"): [[0.6, nan], [0.9, 0.4], [0.9, nan], [0.8, nan]],
            ("test", "macro_f1"): [[0.9, nan], [0.5, 0.3], [0.6, nan], [0.6, nan]],
        },
    )
    assert (one["bmcta_round"], one["bmcta"]) == (4, pytest.approx(0.7))
    assert one["final"]["round"] == 2
    later = made_up(
        "apple",
        {
            ("test", "accuracy"): [[0.8, 0.4], [0.9, nan]],
            ("val", "accuracy"): [[0.5, 0.5], [0.9, nan]],
            ("test", "macro_f1"): [[0.5, 0.3], [0.6, nan]],
        },
    )
    assert later["final"]["round"] == 2
    assert later["final"]["accuracy_mean"] == pytest.approx(0.65)
    assert later["final"]["macro_f1_mean"] == pytest.approx(0.45)
    assert later["per_silo"]["b"]["accuracy"] == 0.4


def test_the_first_of_equal_rounds():
    equal = [[0.5, 0.5], [0.5, 0.5]]
    one = made_up("local", {("test", "accuracy"): equal, ("val", "accuracy"): equal})
    assert (one["bmcta_round"], one["final"]["round"]) == (1, 1)


def test_gains_and_incentivised_rate_by_hand():
    """Final test accuracies: local (.6, .7), FedAvg (.8, .5), APPLE (.7, .8).

    APPLE over local: (.1, .1); over FedAvg: (-.1, .3). It is better than both in silo b only: rate 1/2. Local and
    FedAvg are never strictly better than themselves: rate 0.
    """

    def run(strategy, accuracies):
        pair = [list(accuracies)]
        return made_up(strategy, {("test", "accuracy"): pair, ("val", "accuracy"): pair})

    local, fedavg, apple = compare(
        [run("local", (0.6, 0.7)), run("fedavg", (0.8, 0.5)), run("apple", (0.7, 0.8))]
    )
    assert apple["per_silo"]["a"]["gain_over_local"] == pytest.approx(0.1)
    assert apple["per_silo"]["b"]["gain_over_local"] == pytest.approx(0.1)
    assert apple["per_silo"]["a"]["gain_over_fedavg"] == pytest.approx(-0.1)
    assert apple["per_silo"]["b"]["gain_over_fedavg"] == pytest.approx(0.3)
    assert (
        local["incentivized_rate"],
        fedavg["incentivized_rate"],
        apple["incentivized_rate"],
    ) == (0, 0, 0.5)
    # Without FedAvg there is nothing to compare with; another seed's FedAvg does not count.
    alone = compare([local, {**fedavg, "seed": 2}, apple])[2]
    assert (
        alone["incentivized_rate"] is None
        and alone["per_silo"]["a"]["gain_over_fedavg"] is None
    )
    assert alone["per_silo"]["a"]["gain_over_local"] == pytest.approx(0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Progress


def test_progress_events(study):
    """One line per round, and one at the end of each run, in the order of the study."""
    # The others: test_watch.py
    events = [e for e in events_of(study) if e["event"] in ("round", "done")]
    told = [(e["event"], e["strategy"], e["seed"], e.get("round")) for e in events]
    assert told == [
        (event, name, seed, number)
        for seed in (1, 2)
        for name in ("local", "fedavg", "apple")
        for event, number in (("round", 1), ("round", 2), ("round", 3), ("done", None))
    ]
    first = events[0]
    assert set(first) == {
        "event",
        "strategy",
        "task",
        "score",
        "seed",
        "round",
        "rounds",
        "silos",
        "accuracy",
        "seconds",
        "bytes",
        "bytes_down",
        "bytes_up",
        "per_silo",
        "rejected",
        "bounded",
    }
    assert (first["rounds"], first["silos"], first["rejected"], first["bytes"]) == (3, 2, {}, 0)
    assert {e["out"] for e in events if e["event"] == "done"} == {str(study.resolve())}
    for e in events:
        if e["event"] == "round" and e["strategy"] == "apple":
            wanted = (e["round"], "test", "personal", "accuracy")
            rows = History(study / "history.csv").of("apple", e["seed"])
            found = [
                r.value for r in rows if (r.round, r.split, r.snapshot, r.metric) == wanted
            ]
            assert e["accuracy"] == sum(found) / 2


def test_two_processes_do_not_write_one_run_directory(tmp_path, monkeypatch):
    """The first holds it until it ends, however it ends; a second one, which resumes it, is refused in one line, unless
    the first, as that of a stopped run does, ends a moment later.
    """
    config = tmp_path / "run/config.toml"
    with RunDirectory.open(config.parent, {"rounds": 1}, resume=False) as directory:
        pass
    before = config.read_bytes(), config.stat().st_mtime_ns
    ready, says = os.pipe()

    def hold():
        with RunDirectory(directory.path).hold():
            os.write(says, b"1")
            signal.pause()

    other = fork(hold)
    try:
        assert os.read(ready, 1) == b"1"
        refused = "another run is writing to it; silofl stop ends it"
        with pytest.raises(ValueError, match=refused), directory.hold():
            pass
        fails(ValueError, refused, directory.check_free)
        # As it would be, were it alone
        opened = RunDirectory.open(config.parent, {"rounds": 9}, resume=True)
        monkeypatch.setattr(run_directory, "LINGER_SECONDS", 0.3)
        with pytest.raises(ValueError, match=refused), opened:
            pass
        assert (config.read_bytes(), config.stat().st_mtime_ns) == before
        monkeypatch.setattr(run_directory, "LINGER_SECONDS", 60.0)
        threading.Timer(0.3, os.kill, (other, signal.SIGKILL)).start()
        with RunDirectory.open(config.parent, {"rounds": 9}, resume=True) as alone:
            alone.begin()
            assert b"rounds = 9" in config.read_bytes()
    finally:
        os.kill(other, signal.SIGKILL)
        assert ended(other) == -signal.SIGKILL
        os.close(ready)
        os.close(says)
    directory.check_free()
