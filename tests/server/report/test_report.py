"""The report: its statistics by hand, its page for every kind of run there is, and what a real run puts into it.

The hand-made study: three silos with 10, 20 and 40 test samples, one round and a second one, one seed.

    test accuracy     a     b     c     mean       validation mean
    local            .5    .5    .5     .5         .5
    fedavg           .6    .6    .6     .6         .7
    apple            .7    .5    .4     .5333      .8

so validation chooses apple although fedavg is better on test; over local apple gains +.2, 0, -.1 (mean +.0333).
"""

from __future__ import annotations

import json
import math
import re
import sys
from html import unescape

import matplotlib
import pytest
import torch
from failing import fails
from studies import TEST, checked, make_run
from tiny import small_study, summary_of

import client.app
import server.app
from client.app import app as client_app
from partitions.common.errors import DataError, UserError
from server.cli.main import main
from server.report.canvas import SETTINGS, apart, short_names
from server.report.head import headline
from server.report.html import duration, size_text
from server.report.inference import Score, accuracy_interval, from_intervals
from server.report.page import page
from server.report.participation import silo_rounds
from server.report.sections.cost import bytes_up
from server.report.sections.repeat import commands
from server.report.sections.silo_data import round_numbers
from server.report.sections.silos import lifts
from server.report.study import StudyResults
from server.report.write import silo_table, try_report
from server.results.history import History, Row
from server.results.run_directory import newest_states
from server.results.study import server_context
from server.results.tracking import TRACKERS, open_trackers, round_values
from server.simulation.engine import InProcessGrid, flower_identity
from server.simulation.simulate import StudyBar, simulate
from strategies.apple import Apple
from strategies.base.run_settings import parse_settings
from strategies.base.state import State

# ---------------------------------------------------------------------------------------------------------------------
# Uncertainty


def difference_interval(a, n, b, m):
    return from_intervals(a, accuracy_interval(a, n), b, accuracy_interval(b, m))


def test_difference_interval_of_newcombe():
    """Newcombe 1998, table II, contrast (a), method 10: 56/70 - 48/80 lies in 0.0524..0.3339."""
    low, high = difference_interval(56 / 70, 70, 48 / 80, 80)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_intervals_of_nothing():
    unknown = (
        accuracy_interval(math.nan, 10),
        accuracy_interval(0.5, 0),
        difference_interval(0.5, 10, math.nan, 10),
    )
    assert all(map(math.isnan, sum(unknown, ())))


# ---------------------------------------------------------------------------------------------------------------------
# The study


def test_validation_chooses_the_method(tmp_path):
    study = StudyResults(make_run(tmp_path / "run"))
    assert (study.best, study.personalised, study.base) == ("apple", "apple", "local")
    assert study.columns == ["local", "fedavg", "apple"]
    assert study.counts("apple", "local") == (1, 1, 1)
    assert study.mean_gain("apple", "local").mean == pytest.approx(0.1 / 3)
    # a: apple 1, fedavg 2, local 3; b: fedavg 1, the others 2.5; c: fedavg 1, local 2, apple 3
    assert study.ranks == pytest.approx({"local": 7.5 / 3, "fedavg": 4 / 3, "apple": 6.5 / 3})
    assert study.chosen_on == "val"


def test_without_validation_the_test_data_choose_and_it_is_said(tmp_path):
    study = StudyResults(make_run(tmp_path / "run", validation=None))
    assert (study.best, study.personalised, study.chosen_on) == ("fedavg", "apple", "test")
    assert "chosen on the test data" in headline(study)[1]


def test_one_seed_has_score_intervals_and_several_a_spread(tmp_path):
    """Two seeds: apple in a .7 and .5, local .5 and .1: gains .2, .4, mean .3, spread .1414."""
    one = StudyResults(make_run(tmp_path / "one"))
    assert one.score("apple", "a").interval == accuracy_interval(0.7, 10)
    assert math.isnan(one.score("apple", "a").spread)
    assert one.gain("apple", "local", "a").interval == difference_interval(0.7, 10, 0.5, 10)
    test = {
        "local": [(0.5, 0.5, 0.5), (0.1, 0.5, 0.5)],
        "apple": [(0.7, 0.5, 0.5), (0.5, 0.5, 0.5)],
    }
    two = StudyResults(make_run(tmp_path / "two", test, seeds=(1, 2)))
    gain = two.gain("apple", "local", "a")
    assert gain.mean == pytest.approx(0.3) and not gain.shown and gain.sign == 1
    assert two.score("apple", "a").spread == pytest.approx(math.sqrt(0.02))
    assert two.mean_gain("apple", "local").mean == pytest.approx(0.1)  # .2, .4 and four times 0
    assert two.seeds == [1, 2]


def test_what_a_hospital_sends_in_a_round_does_not_depend_on_the_seeds(tmp_path):
    path = make_run(tmp_path / "run", {"apple": [TEST["apple"]] * 2}, seeds=(1, 2))
    shares = bytes_up(StudyResults(path)).query("strategy == 'apple' and silo == 'a'").share
    assert shares.to_list() == [4e5] * 4  # a third of 1.2 MB


def test_curve_and_costs(tmp_path):
    """1.2 MB up per round from three silos: 400 kB each, 100,000 numbers, 800 kB over the two rounds."""
    study = StudyResults(make_run(tmp_path / "run"))
    assert study.curve("apple", "personal") == {r: [pytest.approx(1.6 / 3)] for r in (1, 2)}
    assert study.curve("apple", "personal", "a") == {1: [0.7], 2: [0.7]}
    assert study.per_round("apple", "bytes_up") == {1: 1.2e6, 2: 1.2e6}
    assert study.cost("apple") == (8.4e6, 150.0)
    text = checked(tmp_path / "run").text
    assert "400 kB100,000 numbers" in text
    # b: three methods x two rounds of replies, 0.8 MB per method, two snapshots x two splits in each reply
    assert "b62.4 MB24" in text


def test_silo_table(tmp_path):
    assert silo_table(StudyResults(make_run(tmp_path / "run"))) == "\n".join(
        [
            "silo       test  Local  FedAvg  APPLE  APPLE gains",
            "--------------------------------------------------",
            "a            10   50.0    60.0   70.0        +20.0",
            "b            20   50.0    60.0   50.0          0.0",
            "c            40   50.0    60.0   40.0        -10.0",
            "--------------------------------------------------",
            "mean              50.0    60.0   53.3         +3.3",
            "mean rank         2.50    1.33   2.17",
            "APPLE against Local: +3.3 points, not yet certain: an interval needs 6 hospitals",
            "accuracy in % on test data, at the round that validation data chose",
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------
# The page


def test_headline(tmp_path):
    """a gains 7/10 - 5/10, far from certain over 10 samples; three silos are too few for the mean's interval."""
    study = StudyResults(make_run(tmp_path / "run"))
    sentence, trust = (
        unescape(re.sub(r"<[^>]+>|&#8239;", "", t)).replace("\u00a0", " ")
        for t in headline(study)
    )
    assert sentence == (
        "Federating: +10.0 points of accuracy on average in 3 hospitals over training alone, not yet certain (an "
        "interval needs 6 hospitals); personalising with APPLE: −6.7 points, not yet certain (an interval needs 6 "
        "hospitals), at a cost of 8.4 MB and 2.5 minutes"
    )
    assert trust == (
        "The average is not clear of zero. silofl plan --pilot has the hospitals, patients or seeds that another study "
        "would need. One hospital carries the average: a (+20.0). Without it the average is "
        "−5.0 points, and the lowest gain is −10.0. Each hospital is tested on its own 10 to 40 samples, which leaves "
        "a single hospital's gain uncertain: no gain is larger than chance alone could explain. One seed was run: how "
        "much others would change this is not counted. Not registered in advance: every comparison here is exploratory."
    )


def test_page_of_the_study(tmp_path):
    text = checked(make_run(tmp_path / "run")).text
    for wanted in (
        "What each hospital gained",
        "Lower with APPLE than with Local: c (−10.0)",
        "Fairness variance",
        "Incentivised rate",
        "Mean rank",
        "BMCTA",
        "What left each hospital",
        "Repeat it",
    ):
        assert wanted in text
    assert "Who holds what" not in text  # a deployment has no manifest
    assert "Who learns from whom" not in text


def test_everything_is_escaped(tmp_path):
    """Names and settings come from elsewhere: one silo is called like a script, one like mathematics for matplotlib."""
    counts = {"<script>alert(1)</script>": 10, "$\\frac{": 20, "\"&'<b>": 40}
    path = make_run(
        tmp_path / "<i>run",
        counts=counts,
        config={"data-dir": "</pre><img src=x onerror=alert(1)>"},
    )
    events = [
        {
            "event": "note",
            "time": "<script>alert(3)</script>",
            "message": "<script>alert(4)</script>",
        },
        {
            "event": "round",
            "strategy": "apple",
            "seed": 42,
            "rejected": {"$\\frac{": "<script>alert(5)</script>"},
        },
        {
            "event": "error",
            "strategy": "apple",
            "seed": 42,
            "message": "<script>alert(2)</script>",
        },
    ]
    (path / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    History(path / "history.csv").add(
        [Row("apple", 42, 1, "$\\frac{", "", "", "rejected", 1.0, None)]
    )
    silos = [{"name": name, "labels": {"train": {"0": 5}, "val": {}}} for name in counts]
    manifest = {
        "dataset": "<script>alert(6)</script>",
        "partition": "<script>alert(7)</script>",
        "seed": 42,
    }
    (path / "manifest.json").write_text(json.dumps({**manifest, "classes": 1, "silos": silos}))
    document = checked(path)
    assert {"script", "img", "i"}.isdisjoint(document.tags)
    assert all(f"<script>alert({k})</script>" in document.text for k in range(1, 8))
    assert "$\\frac{" in document.text


def test_only_local(tmp_path):
    text = checked(make_run(tmp_path / "run", {"local": TEST["local"]})).text
    assert "Training alone reaches 50.0 % mean accuracy over 3 hospitals" in text
    assert "What a hospital gains is not known" in text


def test_without_local(tmp_path):
    assert (
        "APPLE reaches 53.3 %"
        in checked(make_run(tmp_path / "one", {"apple": TEST["apple"]})).text
    )
    text = checked(make_run(tmp_path / "two", {k: TEST[k] for k in ("fedavg", "apple")})).text
    assert (
        "APPLE against FedAvg's shared model: −6.7 points of accuracy on average in 3 hospitals"
        in text
    )


def test_one_silo(tmp_path):
    test = {name: values[:1] for name, values in TEST.items()}
    text = checked(make_run(tmp_path / "run", test, counts={"a": 10})).text
    assert (
        "Federating: +10.0 points" in text and "personalising with APPLE: +10.0 points" in text
    )
    assert "an interval needs 6 hospitals" in text


def test_forty_silos_and_many_methods(tmp_path):
    counts = {f"hospital-{k:02d}": 20 + k for k in range(1, 41)}
    names = ["local", "fedavg", "apple", "fedala", "fedavg-ft", "apfl", "fedprox", "ditto"]
    test = {name: [round(0.5 + 0.04 * i, 2)] * 40 for i, name in enumerate(names)}
    path = make_run(
        tmp_path / "run", test, counts=counts, validation={n: v[0] for n, v in test.items()}
    )
    for name in ("config.toml", "history.csv", "summary.json"):  # a run of another version's
        file = path / name
        file.write_text(file.read_text().replace("fedprox", "no-longer-known"))
    text = checked(path).text
    assert "Federating gains +4.0 points" in text
    assert "personalising with Ditto gains +24.0 points more" in text
    assert "All methods per hospital" in text and "Shown are 6 of 8 methods" in text
    assert "no-longer-known" in text


def test_marks_of_equal_scores_do_not_hide_each_other():
    """Two of four methods score alike, a third nearly so; a mark by itself stays in its row."""
    values = {"local": 0.8, "fedavg": 0.5, "ditto": 0.8, "apple": 0.805, "apfl": math.nan}
    found = lifts({m: Score(v, math.nan, (v, v), 10) for m, v in values.items()}, 0.01)
    assert found["fedavg"] == 0 and "apfl" not in found
    rows = sorted(found[m] for m in ("local", "ditto", "apple"))
    assert rows == pytest.approx([-0.8 / 3, 0, 0.8 / 3])


def test_withheld_metrics(tmp_path):
    """Silo a keeps its accuracies to itself: it is named, and it is no part of the counts."""
    test = {name: (math.nan, *values[1:]) for name, values in TEST.items()}
    path = make_run(tmp_path / "some", test)
    assert StudyResults(path).withheld == ["a"]
    text = checked(path).text
    assert "of accuracy on average in 2 hospitals" in text and "stand behind them: a." in text
    assert (
        "on its own 20 to 40 samples" in text
        and "1 hospital sent no accuracy and is not counted." in text
    )
    nothing = dict.fromkeys(TEST, (math.nan,) * 3)
    assert (
        "The accuracies stayed in the hospitals"
        in checked(make_run(tmp_path / "all", nothing)).text
    )


def test_failed_before_its_first_round(tmp_path):
    path = make_run(tmp_path / "run", {}, config={"strategy": "local,apple"})
    (path / "summary.json").unlink()
    event = {
        "event": "error",
        "strategy": "local",
        "seed": 42,
        "message": "hospital-03 has samples of another shape",
    }
    # Killed while it wrote
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n" + '{"event": "rou')
    text = checked(path).text
    assert "The run failed" in text
    assert (
        "Local, seed 42 failed before its first round ended: hospital-03 has samples of another shape."
        in text
    )
    assert "APPLE, seed 42 was not run." in text


def test_stopped_midway_shows_what_there_is(tmp_path):
    """No summary: the numbers come from the history alone."""
    path = make_run(tmp_path / "run", finished=False, config={"rounds": 9})
    text = checked(path).text
    assert "APPLE, seed 42 stopped after round 2 of 9." in text
    assert "+10.0 points of accuracy on average in 3 hospitals" in text


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("rejected", "Rounds that went on without a hospital"),
        ("bounded", "Rounds in which a hospital's step was bounded"),
    ],
)
def test_silos_left_out_or_bounded_are_named_with_the_reason(tmp_path, kind, title):
    path = make_run(tmp_path / "run")
    history = History(path / "history.csv")
    history.add([Row("apple", 42, r, "b", "", "", kind, 0.1, None) for r in (1, 2)])
    event = {"event": "round", "strategy": "apple", "seed": 42, "rejected": {}, "bounded": {}}
    event[kind] = {"b": "cut: <b>far</b>"}
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n")
    study = StudyResults(path)
    assert silo_rounds(study, kind) == [("APPLE", 42, "b", "2", "cut: <b>far</b>")]
    (other,) = {"rejected", "bounded"} - {kind}
    assert not silo_rounds(study, other)
    text = checked(path).text
    assert title in text and text.count("Rounds ") == 1


def test_hospitals_of_one_reason_are_one_row(tmp_path):
    path = make_run(tmp_path / "run")
    rows = [
        Row("apple", 42, r, name, "", "", "rejected", 1.0, None)
        for r, name in ((1, "a"), (1, "b"), (2, "b"))
    ]
    History(path / "history.csv").add(rows)
    event = {
        "event": "round",
        "strategy": "apple",
        "seed": 42,
        "rejected": dict.fromkeys("ab", "no reply"),
    }
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n")
    study = StudyResults(path)
    assert silo_rounds(study, "rejected") == [
        ("APPLE", 42, "2 hospitals: a, b", "1–2", "no reply")
    ]
    text = checked(path).text
    assert text.count("2 hospitals: a, b") == 1 and text.count("no reply") == 1


def test_several_seeds(tmp_path):
    test = {name: [values, tuple(v + 0.05 for v in values)] for name, values in TEST.items()}
    text = checked(make_run(tmp_path / "run", test, seeds=(1, 2))).text
    # .05 / sqrt(2)
    assert "Means over 2 seeds, ± standard deviation" in text and "± 3.5 over seeds" in text


def test_commands_repeat_the_run(tmp_path):
    """Only what differs from the defaults is written out; every value is quoted for the shell."""
    config = {
        "apple.mu": 0.5,
        "rounds": 2,
        "dataset": "breast-cancer",
        "data-dir": "my data",
        "batch-size": 64,
    }
    study = StudyResults(make_run(tmp_path / "run", config=config))
    line = next(c for c in commands(study) if "--strategy" in c)
    assert (
        line
        == "silofl run --strategy local,fedavg,apple --rounds 2 --seed 42 --set 'data-dir=my data' apple.mu=0.5"
    )
    (tmp_path / "run" / "study").write_text("/my files/federation.yaml")
    assert (
        commands(StudyResults(tmp_path / "run"))[0] == "silofl up '/my files/federation.yaml'"
    )
    (tmp_path / "run" / "checkpoint" / "apple-42" / "silos").mkdir(parents=True)
    line = next(c for c in commands(StudyResults(tmp_path / "run")) if "--strategy" in c)
    assert line == (
        "silofl simulate --strategy local,fedavg,apple --rounds 2 --seed 42 --dataset breast-cancer --silos 3 "
        "--set 'data-dir=my data' apple.mu=0.5"
    )


def test_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text('strategy = "local"\nseed = 1\n')
    (tmp_path / "summary.json").write_text("{")
    fails(DataError, r"summary\.json: it is no JSON", StudyResults, tmp_path)
    try_report(tmp_path)  # at the end of a run it is no reason to fail
    assert not (tmp_path / "report.html").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Small things of the charts


def test_labels_are_moved_apart():
    assert apart([1.0, 1.0, 5.0], 2.0, 0.0, 10.0) == [1.0, 3.0, 5.0]
    assert apart([9.0, 9.5], 2.0, 0.0, 10.0) == [8.0, 10.0]
    assert apart([], 2.0, 0.0, 1.0) == []


def test_small_texts():
    assert short_names(["hospital-01", "hospital-02"]) == (["01", "02"], "hospital-")
    assert short_names(["a-1", "b-1"]) == (["a-1", "b-1"], "")
    sizes = map(size_text, (0, 999, 1000, 99_600, 2_543_000, 613_000_000, 2e12, 5e15))
    assert ", ".join(sizes) == "0 B, 999 B, 1.0 kB, 100 kB, 2.5 MB, 613 MB, 2.0 TB, 5000.0 TB"
    assert [duration(s) for s in (0.04, 9.96, 99.4, 150, 7200)] == [
        "0.0 s",
        "10 s",
        "99 s",
        "2.5 min",
        "2.0 h",
    ]
    assert round_numbers(64) == [2, 10, 50] and round_numbers(1) == [1]


def test_the_users_matplotlib_settings_stay_as_they_are(tmp_path):
    before = {key: matplotlib.rcParams[key] for key in SETTINGS}
    page(StudyResults(make_run(tmp_path / "run")))
    assert {key: matplotlib.rcParams[key] for key in SETTINGS} == before


# ---------------------------------------------------------------------------------------------------------------------
# At the end of a real run


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Three silos of digits, two rounds of local, fedavg and apple."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return small_study(out, strategy="local,fedavg,apple")


def test_simulation_ends_with_a_report(simulated):
    assert (simulated / "report.html").exists()
    text = checked(simulated).text
    assert "Who holds what" in text and "Who learns from whom" in text
    assert "of accuracy on average in 3 hospitals" in text


def test_relationships_start_at_p0_and_end_at_the_states(simulated):
    """Round 0 is p_0 (eq. 7's sample shares), the last round the `dr` of the silos' states; names are sorted."""
    folder = simulated / "checkpoint" / "apple-42" / "silos"
    found = Apple.read_relationships(newest_states(folder))
    assert found is not None and found.names == ["hospital-01", "hospital-02", "hospital-03"]
    assert found.rounds == [0, 1, 2]
    summary = summary_of(simulated)
    counts = [v["n_train"] for v in summary["runs"][-1]["per_silo"].values()]
    for i, name in enumerate(found.names):
        assert found.values[0, i].tolist() == pytest.approx([n / sum(counts) for n in counts])
        state = State.load(folder / name / "round-000002.safetensors")
        assert torch.equal(
            torch.tensor(found.values[-1, i], dtype=torch.float32), state.arrays["dr"]
        )
    assert not (found.values[0] == found.values[-1]).all()


def test_an_absent_silos_relationships_stay(tmp_path):
    """b trained in rounds 1 and 2, a in round 2 only: in round 1 a has its start."""
    for name, rounds, values in (
        ("a", [1, 2], [[0.5, 0.5], [0.7, 0.3]]),
        ("b", [0, 1, 2], [[0.5, 0.5], [0.4, 0.6], [0.1, 0.9]]),
    ):
        state = State({"dr_history": torch.tensor(values)}, {"dr_rounds": rounds})
        state.save(tmp_path / name / "round-000002.safetensors")
    # The one before is shown
    (tmp_path / "b" / "round-000003.safetensors").write_bytes(b"damaged")
    found = Apple.read_relationships(newest_states(tmp_path))
    assert found is not None and found.rounds == [0, 1, 2]
    assert found.values[:, 1, 1].tolist() == pytest.approx([0.5, 0.6, 0.9])
    assert math.isnan(found.values[0, 0, 0]) and found.values[
        1:, 0, 0
    ].tolist() == pytest.approx([0.5, 0.7])
    assert Apple.read_relationships(newest_states(tmp_path / "nowhere")) is None


def test_command_line(simulated, capsys):
    assert main(["report", str(simulated)]) == 0
    assert capsys.readouterr().out == f"{simulated / 'report.html'}\n"


def test_study_prints_the_table_and_ends_with_the_directory(tmp_path, capsys):
    out = tmp_path / "run"
    line = f"simulate --strategy local,fedavg --rounds 1 --silos 2 --partition iid --set threads=1 --out {out}"
    assert main(line.split()) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(out)
    assert silo_table(StudyResults(out)) in said.out and "round/s" not in said.err


@pytest.mark.parametrize("simulated", [True, False])
def test_server_app_ends_with_a_report(simulated, tmp_path, monkeypatch):
    """Label counts only where the data are the simulation's: hospitals do not send theirs."""
    out = tmp_path / "run"
    values = {
        "strategy": "fedavg",
        "rounds": 1,
        "silos": 2,
        "partition": "iid",
        "threads": 1,
        "out": str(out),
    }
    settings = parse_settings(values)
    summary = client.app.data_summary
    kind = {"simulated": simulated, "own_file": not simulated}
    monkeypatch.setattr(
        client.app, "data_summary", lambda session, **asked: {**summary(session), **kind}
    )
    with flower_identity():
        server.app.run_app(
            InProcessGrid(client_app, 2, settings.flat()), server_context(settings)
        )
    # For its user alone
    assert {p.stat().st_mode & 0o077 for p in (out, *out.rglob("*"))} == {0}
    assert (out / "manifest.json").exists() == simulated
    assert ("Who holds what" in checked(out).text) == simulated


def test_rounds_done_before_do_not_count_for_the_pace(monkeypatch):
    """Ten rounds, four from an earlier start: two more in this one make 6 of 10, and 4 are left at this one's pace."""
    run = parse_settings({"rounds": 10})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for quiet in (False, True):  # a silent bar has no counters
        with StudyBar([run], quiet) as study:
            study.round(run, 5, "")
            study.round(run, 6, "")
            bar = study.bar
            assert quiet or (bar.n, bar.initial, bar.format_dict["total"] - bar.n) == (6, 4, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Tracking


def test_round_values():
    """Mean over silos, each silo's own, the round's; withheld values and other rounds are left out."""
    history = History()
    history.add([Row("apple", 1, 1, "a", "test", "personal", "accuracy", 0.9, 10)])
    history.add(
        [
            Row("apple", 1, 2, "a", "test", "personal", "accuracy", 0.5, 10),
            Row("apple", 1, 2, "b", "test", "personal", "accuracy", 0.7, 10),
            Row("apple", 1, 2, "c", "test", "personal", "accuracy", math.nan, 3),
            Row("apple", 1, 2, "", "", "", "round_seconds", 2.5, None),
        ]
    )
    assert round_values(history, "apple", 1, 2) == {
        "test/accuracy/personal": pytest.approx(0.6),
        "a/test/accuracy/personal": 0.5,
        "b/test/accuracy/personal": 0.7,
        "round/round_seconds": 2.5,
    }
    assert round_values(history, "apple", 1, 3) == {}


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_missing_library_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None
    )
    with pytest.raises(
        UserError, match=rf"--log {name} needs a library .* pip install -e '.\[tracking\]'"
    ):
        simulate({"out": str(tmp_path / "run")}, quiet=True, log=[name])
    assert not (tmp_path / "run").exists()


def test_unknown_library():
    with pytest.raises(
        UserError, match=r"unknown --log 'tensorbord' \(did you mean 'tensorboard'\?\)"
    ):
        open_trackers(["tensorbord"])


def logged_study(folder, tracker):
    given = {"strategy": "local,fedavg", "rounds": 2, "silos": 2, "partition": "iid"}
    return simulate({**given, "out": str(folder / "run")}, quiet=True, log=[tracker])


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (silofl[tracking])")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = logged_study(tmp_path, "tensorboard")
    events = EventAccumulator(str(out / "tensorboard" / "fedavg-42"))
    events.Reload()
    study = StudyResults(out)
    curve = study.curve("fedavg", "received")
    logged = {e.step: e.value for e in events.Scalars("test/accuracy/received")}
    assert logged == pytest.approx({r: v[0] for r, v in curve.items()})
    assert list(logged) == [1, 2, 3]  # 3: the closing evaluation


def test_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (silofl[tracking])")
    out = logged_study(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("silofl").experiment_id])
    assert sorted(r.info.run_name for r in runs) == ["fedavg-42", "local-42"]
    run = next(r for r in runs if r.info.run_name == "fedavg-42")
    assert run.info.status == "FINISHED" and run.data.params["learning-rate"] == "0.05"
    logged = {
        m.step: m.value
        for m in client.get_metric_history(run.info.run_id, "test/accuracy/received")
    }
    assert logged == pytest.approx(
        {r: v[0] for r, v in StudyResults(out).curve("fedavg", "received").items()}
    )
