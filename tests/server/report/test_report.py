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
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any, cast

import matplotlib
import pytest
import torch
from tqdm import tqdm

import client.app
import server.app
from client.app import app as client_app
from server.cli.main import main
from server.report.charts import SETTINGS, VARIABLES, apart, round_numbers, short_names, size_text
from server.report.html import duration
from server.report.page import caution, commands, headline, page
from server.report.study import Study, newest_states
from server.report.uncertainty import accuracy_interval, difference_interval, paired_bootstrap
from server.report.write import silo_table, try_report, write_report
from server.run.engine import InProcessGrid, flower_identity
from server.run.history import History, Row
from server.run.rundir import RunDirectory
from server.run.study import server_context
from server.run.summary import compare, run_summary
from server.run.tracking import TRACKERS, open_trackers, round_values
from server.simulate import simulate, skip
from strategies.apple import Apple
from strategies.base.run_settings import parse_settings
from strategies.base.settings import UserError
from strategies.base.state import State

N_TEST = {"a": 10, "b": 20, "c": 40}
Table = Mapping[str, Sequence[float]]
TEST: Table = {"local": (0.5, 0.5, 0.5), "fedavg": (0.6, 0.6, 0.6), "apple": (0.7, 0.5, 0.4)}
VALIDATION = {"local": 0.5, "fedavg": 0.7, "apple": 0.8}


def rows_of(
    strategy: str, seed: int, test: Sequence[float], validation: float | None, counts: Mapping[str, int]
) -> Iterator[Row]:
    """Two rounds in which nothing changes; a ``nan`` accuracy is one that the silo withheld."""
    for server_round in (1, 2):
        for (name, n), value in zip(counts.items(), test, strict=True):
            for snapshot in ("received", "personal"):
                yield Row(strategy, seed, server_round, name, "test", snapshot, "accuracy", value, n)
                if validation is not None and not math.isnan(value):
                    yield Row(strategy, seed, server_round, name, "val", snapshot, "accuracy", validation, 8)
        for metric, value in (("round_seconds", 2.0), ("bytes_down", 3e6), ("bytes_up", 1.2e6)):
            yield Row(strategy, seed, server_round, "", "", "", metric, value, None)


def make_run(
    path: Path,
    test: Mapping[str, Sequence[float] | Sequence[Sequence[float]]] = TEST,
    *,
    counts: Mapping[str, int] = N_TEST,
    validation: Mapping[str, float] | None = VALIDATION,
    seeds: Sequence[int] = (42,),
    config: Mapping[str, Any] | None = None,
    finished: bool = True,
) -> Path:
    """A run directory as the round loop leaves it. ``test``: accuracies per silo, for several seeds a list of those."""
    listed = ",".join(map(str, seeds))
    plain: dict[str, Any] = {"strategy": ",".join(test), "rounds": 2, "seed": listed, "silos": len(counts)}
    with RunDirectory.open(path, {**plain, **(config or {})}, resume=False) as directory:
        pass
    history = History(directory.history)
    runs = []
    for strategy, values in test.items():
        for k, seed in enumerate(seeds):
            each = cast(Sequence[float], values if len(seeds) == 1 else values[k])
            chosen = None if validation is None else validation[strategy]
            history.add(rows_of(strategy, seed, each, chosen, counts))
            cards = {n: {"n_train": 5 * c, "n_test": c} for n, c in counts.items()}
            totals = {"down": 6_000_000, "up": 2_400_000}
            seconds = {"total": 150.0, "train": 90.0, "communicate": 55.0, "aggregate": 5.0}
            runs.append(run_summary(history, strategy, seed, 2, cards, totals, seconds))
    if finished:
        directory.write_json("summary.json", {"runs": compare(runs)})
    return path


class Document(HTMLParser):
    """Tags that do not match, ids given twice, references to anything outside the page, and the visible text."""

    EMPTY = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                (self.links if (value or "").startswith("#") else self.outside).append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def checked(path: Path) -> Document:
    """The report of a run, after the checks that every report must pass."""
    html = write_report(path).read_text(encoding="utf-8")
    document = Document(html)
    assert document.wrong == []
    assert len(set(document.ids)) == len(document.ids)
    assert document.outside == [] and "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    assert {link[1:] for link in document.links} <= set(document.ids)
    assert "script" not in document.tags
    assert not re.search("|".join(VARIABLES), html.partition("</style>")[2]), "a colour that does not follow the scheme"
    text = re.sub(r"\s+", " ", document.text)
    assert not re.search(r"\bnan\b|\bNone\b|Traceback", text.partition("All settings")[0])
    document.text = text
    return document


# ---------------------------------------------------------------------------------------------------------------------
# Uncertainty


def test_difference_interval_of_newcombe() -> None:
    """Newcombe 1998, table II, contrast (a), method 10: 56/70 - 48/80 lies in 0.0524..0.3339."""
    low, high = difference_interval(56 / 70, 70, 48 / 80, 80)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_intervals_of_nothing() -> None:
    assert all(map(math.isnan, accuracy_interval(math.nan, 10) + accuracy_interval(0.5, 0)))
    assert all(map(math.isnan, difference_interval(0.5, 10, math.nan, 10)))
    assert all(map(math.isnan, paired_bootstrap([0.3]) + paired_bootstrap([0.3, math.nan])))


def test_paired_bootstrap() -> None:
    """Means of two draws from {0, 1} are 0, 1/2, 1 with 1/4, 1/2, 1/4: the central 95 % reach from 0 to 1."""
    assert paired_bootstrap([0.0, 1.0]) == (0.0, 1.0)
    assert paired_bootstrap([0.25, 0.25, 0.25]) == (0.25, 0.25)
    many = [0.1] * 50 + [0.3] * 50
    low, high = paired_bootstrap(many)  # 0.2 +- 1.96 x 0.1 / sqrt(100)
    assert low == pytest.approx(0.2 - 0.0196, abs=0.003) and high == pytest.approx(0.2 + 0.0196, abs=0.003)
    assert paired_bootstrap(many) == (low, high)


# ---------------------------------------------------------------------------------------------------------------------
# The study


def test_validation_chooses_the_method(tmp_path: Path) -> None:
    study = Study(make_run(tmp_path / "run"))
    assert (study.best, study.personalised, study.base) == ("apple", "apple", "local")
    assert study.columns == ["local", "fedavg", "apple"]
    assert study.counts("apple", "local") == (1, 1, 1)
    assert study.mean_gain("apple", "local").mean == pytest.approx(0.1 / 3)
    # a: apple 1, fedavg 2, local 3; b: fedavg 1, the others 2.5; c: fedavg 1, local 2, apple 3
    assert study.ranks == pytest.approx({"local": 7.5 / 3, "fedavg": 4 / 3, "apple": 6.5 / 3})
    assert study.chosen_on == "val"


def test_without_validation_the_test_data_choose_and_it_is_said(tmp_path: Path) -> None:
    study = Study(make_run(tmp_path / "run", validation=None))
    assert (study.best, study.personalised, study.chosen_on) == ("fedavg", "apple", "test")
    assert "chosen on the test data" in headline(study)[1]


def test_one_seed_has_score_intervals_and_several_a_bootstrap(tmp_path: Path) -> None:
    """Two seeds: apple in a .7 and .5, local .5 and .1: gains .2, .4, mean .3, bootstrap .2 to .4, spread .1414."""
    one = Study(make_run(tmp_path / "one"))
    assert one.score("apple", "a").interval == accuracy_interval(0.7, 10)
    assert math.isnan(one.score("apple", "a").spread)
    assert one.gain("apple", "local", "a").interval == difference_interval(0.7, 10, 0.5, 10)
    test = {"local": [(0.5, 0.5, 0.5), (0.1, 0.5, 0.5)], "apple": [(0.7, 0.5, 0.5), (0.5, 0.5, 0.5)]}
    two = Study(make_run(tmp_path / "two", test, seeds=(1, 2)))
    gain = two.gain("apple", "local", "a")
    assert (gain.mean, *gain.interval) == pytest.approx((0.3, 0.2, 0.4))
    assert gain.certain and gain.sign == 1
    assert two.score("apple", "a").spread == pytest.approx(math.sqrt(0.02))
    assert two.mean_gain("apple", "local").mean == pytest.approx(0.1)  # .2, .4 and four times 0
    assert two.seeds == [1, 2]


def test_curve_and_costs(tmp_path: Path) -> None:
    """1.2 MB up per round from three silos: 400 kB each, 100,000 numbers, 800 kB over the two rounds."""
    study = Study(make_run(tmp_path / "run"))
    assert study.curve("apple", "personal") == {r: [pytest.approx(1.6 / 3)] for r in (1, 2)}
    assert study.curve("apple", "personal", "a") == {1: [0.7], 2: [0.7]}
    assert study.per_round("apple", "bytes_up") == {1: 1.2e6, 2: 1.2e6}
    assert study.cost("apple") == (8.4e6, 150.0)
    text = checked(tmp_path / "run").text
    assert "400 kB100,000 numbers" in text
    # b: three methods x two rounds of replies, 0.8 MB per method, two snapshots x two splits in each reply
    assert "b62.4 MB24" in text


def test_silo_table(tmp_path: Path) -> None:
    assert silo_table(Study(make_run(tmp_path / "run"))) == "\n".join(
        [
            "silo       test  Local  FedAvg  APPLE  APPLE gains",
            "--------------------------------------------------",
            "a            10   50.0    60.0   70.0        +20.0",
            "b            20   50.0    60.0   50.0          0.0",
            "c            40   50.0    60.0   40.0        -10.0",
            "--------------------------------------------------",
            "mean              50.0    60.0   53.3         +3.3",
            "mean rank         2.50    1.33   2.17",
            "accuracy in % on test data, at the round that validation data chose",
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------
# The page


def test_headline(tmp_path: Path) -> None:
    """a gains 7/10 - 5/10, far from certain over 10 samples. The three gains' bootstrap reaches from -.1 to +.2."""
    study = Study(make_run(tmp_path / "run"))
    sentence, trust = (re.sub(r"<[^>]+>|&#8239;", "", t).replace("&nbsp;", " ") for t in headline(study))
    assert sentence == (
        "1 of 3 silos gains with APPLE: on average +3.3 points of accuracy over training alone, "
        "at a cost of 8.4 MB and 2.5 minutes"
    )
    assert trust == (
        "Each silo is tested on its own 10 to 40 samples, which leaves a single silo's gain uncertain: no gain is "
        "larger than chance alone could explain. The average over all silos is not clear of zero "
        "(95% interval −10.0 to +20.0). The worst silo reaches 40.0% (50.0% with Local)."
    )
    assert "no gain is" in caution(study, "apple", "local")


def test_page_of_the_study(tmp_path: Path) -> None:
    text = checked(make_run(tmp_path / "run")).text
    for wanted in (
        "What each silo gained",
        "Worse off with APPLE than with Local: c (−10.0)",
        "Fairness variance",
        "Incentivised rate",
        "Mean rank",
        "BMCTA",
        "What left each silo",
        "Repeat it",
    ):
        assert wanted in text
    assert "Who holds what" not in text  # a deployment has no manifest
    assert "Who learns from whom" not in text


def test_everything_is_escaped(tmp_path: Path) -> None:
    """Names and settings come from elsewhere: one silo is called like a script, one like mathematics for matplotlib."""
    counts = {"<script>alert(1)</script>": 10, "$\\frac{": 20, "\"&'<b>": 40}
    path = make_run(tmp_path / "<i>run", counts=counts, config={"data-dir": "</pre><img src=x onerror=alert(1)>"})
    event = {"event": "error", "strategy": "apple", "seed": 42, "message": "<script>alert(2)</script>"}
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n")
    document = checked(path)
    assert {"script", "img", "i"}.isdisjoint(document.tags)
    assert "<script>alert(1)</script>" in document.text and "<script>alert(2)</script>" in document.text
    assert "$\\frac{" in document.text


def test_only_local(tmp_path: Path) -> None:
    text = checked(make_run(tmp_path / "run", {"local": TEST["local"]})).text
    assert "Training alone reaches 50.0 % mean accuracy over 3 silos" in text
    assert "What a silo gains is not known" in text


def test_without_local(tmp_path: Path) -> None:
    assert "APPLE reaches 53.3 %" in checked(make_run(tmp_path / "one", {"apple": TEST["apple"]})).text
    text = checked(make_run(tmp_path / "two", {k: TEST[k] for k in ("fedavg", "apple")})).text
    assert "1 of 3 silos gains with APPLE: on average −6.7 points of accuracy over FedAvg's shared model" in text


def test_one_silo(tmp_path: Path) -> None:
    test = {name: values[:1] for name, values in TEST.items()}
    text = checked(make_run(tmp_path / "run", test, counts={"a": 10})).text
    assert "1 of 1 silo gains with APPLE: on average +20.0 points" in text
    assert "one silo: no interval" in text


def test_forty_silos_and_many_methods(tmp_path: Path) -> None:
    counts = {f"hospital-{k:02d}": 20 + k for k in range(1, 41)}
    names = ["local", "fedavg", "apple", "fedala", "fedavg-ft", "apfl", "fedprox", "ditto"]
    test = {name: [round(0.5 + 0.04 * i, 2)] * 40 for i, name in enumerate(names)}
    path = make_run(tmp_path / "run", test, counts=counts, validation={n: v[0] for n, v in test.items()})
    for name in ("config.toml", "history.csv", "summary.json"):  # a run of another version's
        file = path / name
        file.write_text(file.read_text().replace("fedprox", "no-longer-known"))
    text = checked(path).text
    assert "40 of 40 silos gain with Ditto: on average +28.0 points" in text
    assert "All methods per silo" in text and "Shown are 6 of 8 methods" in text
    assert "no-longer-known" in text


def test_withheld_metrics(tmp_path: Path) -> None:
    """Silo a keeps its accuracies to itself: it is named, and it is no part of the counts."""
    test = {name: (math.nan, *values[1:]) for name, values in TEST.items()}
    path = make_run(tmp_path / "some", test)
    assert Study(path).withheld == ["a"]
    text = checked(path).text
    assert "0 of 2 silos gain" in text and "stand behind them: a." in text
    assert "on its own 20 to 40 samples" in text and "1 silo sent no accuracy and is not counted." in text
    nothing = dict.fromkeys(TEST, (math.nan,) * 3)
    assert "The accuracies stayed in the silos" in checked(make_run(tmp_path / "all", nothing)).text


def test_failed_before_its_first_round(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", {}, config={"strategy": "local,apple"})
    (path / "summary.json").unlink()
    event = {"event": "error", "strategy": "local", "seed": 42, "message": "hospital-03 has samples of another shape"}
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n" + '{"event": "rou')  # killed while it wrote
    text = checked(path).text
    assert "The run failed" in text
    assert "Local, seed 42 failed before its first round ended: hospital-03 has samples of another shape." in text
    assert "APPLE, seed 42 was not run." in text


def test_stopped_midway_shows_what_there_is(tmp_path: Path) -> None:
    """No summary: the numbers come from the history alone."""
    path = make_run(tmp_path / "run", finished=False, config={"rounds": 9})
    text = checked(path).text
    assert "APPLE, seed 42 stopped after round 2 of 9." in text
    assert "1 of 3 silos gains with APPLE" in text


def test_silos_left_out_are_named_with_the_reason(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    history = History(path / "history.csv")
    history.add([Row("apple", 42, r, "b", "", "", "rejected", 1.0, None) for r in (1, 2)])
    event = {"event": "round", "strategy": "apple", "seed": 42, "rejected": {"b": "no reply within 3 s"}}
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n")
    assert Study(path).absences == [("apple", 42, "b", 2, "no reply within 3 s")]
    assert "Rounds that went on without a silo" in checked(path).text


def test_silos_whose_step_was_bounded_are_named_with_the_reason(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    history = History(path / "history.csv")
    history.add([Row("apple", 42, r, "b", "", "", "bounded", 0.1, None) for r in (1, 2)])
    event = {"event": "round", "strategy": "apple", "seed": 42, "rejected": {}, "bounded": {"b": "cut: <b>far</b>"}}
    (path / "progress.jsonl").write_text(json.dumps(event) + "\n")
    assert Study(path).bounds == [("apple", 42, "b", 2, "cut: <b>far</b>")] and not Study(path).absences
    text = checked(path).text
    assert "Rounds in which a silo's step was bounded" in text and "Rounds that went on without" not in text


def test_several_seeds(tmp_path: Path) -> None:
    test = {name: [values, tuple(v + 0.05 for v in values)] for name, values in TEST.items()}
    text = checked(make_run(tmp_path / "run", test, seeds=(1, 2))).text
    assert "Means over 2 seeds, ± standard deviation" in text and "± 3.5 over seeds" in text  # .05 / sqrt(2)


def test_label_circles_come_with_a_manifest(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    silos = [{"name": n, "labels": {"train": {"0": 5 * c}, "val": {"1": c}}} for n, c in N_TEST.items()]
    manifest = {"dataset": "digits", "partition": "iid", "seed": 42, "classes": 2, "silos": silos}
    (path / "manifest.json").write_text(json.dumps(manifest))
    text = checked(path).text
    assert "Who holds what" in text and "digits split by iid" in text


def test_commands_repeat_the_run(tmp_path: Path) -> None:
    """Only what differs from the defaults is written out; every value is quoted for the shell."""
    config = {"apple.mu": 0.5, "rounds": 2, "dataset": "breast-cancer", "data-dir": "my data", "batch-size": 64}
    study = Study(make_run(tmp_path / "run", config=config))
    line = next(c for c in commands(study) if "--strategy" in c)
    assert line == "silofl run --strategy local,fedavg,apple --rounds 2 --seed 42 --set 'data-dir=my data' apple.mu=0.5"
    (tmp_path / "run" / "study").write_text("/my files/federation.yaml")
    assert commands(Study(tmp_path / "run"))[0] == "silofl up '/my files/federation.yaml'"
    (tmp_path / "run" / "checkpoint" / "apple-42" / "silos").mkdir(parents=True)
    line = next(c for c in commands(Study(tmp_path / "run")) if "--strategy" in c)
    assert line == (
        "silofl simulate --strategy local,fedavg,apple --rounds 2 --seed 42 --dataset breast-cancer --silos 3 "
        "--set 'data-dir=my data' apple.mu=0.5"
    )


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text('strategy = "local"\nseed = 1\n')
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json cannot be read"):
        Study(tmp_path)
    try_report(tmp_path)  # at the end of a run it is no reason to fail
    assert not (tmp_path / "report.html").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Small things of the charts


def test_labels_are_moved_apart() -> None:
    assert apart([1.0, 1.0, 5.0], 2.0, 0.0, 10.0) == [1.0, 3.0, 5.0]
    assert apart([9.0, 9.5], 2.0, 0.0, 10.0) == [8.0, 10.0]
    assert apart([], 2.0, 0.0, 1.0) == []


def test_small_texts() -> None:
    assert short_names(["hospital-01", "hospital-02"]) == (["01", "02"], "hospital-")
    assert short_names(["a-1", "b-1"]) == (["a-1", "b-1"], "")
    assert [size_text(v) for v in (0, 999, 1000, 99_600, 2_543_000, 613_000_000, 2e12, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "100 kB",
        "2.5 MB",
        "613 MB",
        "2.0 TB",
        "5000.0 TB",
    ]
    assert [duration(s) for s in (0.04, 9.96, 99.4, 150, 7200)] == ["0.0 s", "10 s", "99 s", "2.5 min", "2.0 h"]
    assert round_numbers(64) == [2, 10, 50] and round_numbers(1) == [1]


def test_the_users_matplotlib_settings_stay_as_they_are(tmp_path: Path) -> None:
    before = {key: matplotlib.rcParams[key] for key in SETTINGS}
    page(Study(make_run(tmp_path / "run")))
    assert {key: matplotlib.rcParams[key] for key in SETTINGS} == before


# ---------------------------------------------------------------------------------------------------------------------
# At the end of a real run


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three silos of digits, two rounds of local, fedavg and apple."""
    values = {"strategy": "local,fedavg,apple", "rounds": 2, "silos": 3, "partition": "iid", "threads": 1}
    return simulate({**values, "out": str(tmp_path_factory.mktemp("runs") / "run")}, quiet=True)


def test_simulation_ends_with_a_report(simulated: Path) -> None:
    assert (simulated / "report.html").exists()
    text = checked(simulated).text
    assert "Who holds what" in text and "Who learns from whom" in text
    assert "of 3 silos gain" in text


def test_relationships_start_at_p0_and_end_at_the_states(simulated: Path) -> None:
    """Round 0 is p_0 (eq. 7's sample shares), the last round the `dr` of the silos' states; names are sorted."""
    folder = simulated / "checkpoint" / "apple-42" / "silos"
    found = Apple.read_relationships(newest_states(folder))
    assert found is not None and found.names == ["hospital-01", "hospital-02", "hospital-03"]
    assert found.rounds == [0, 1, 2]
    summary = json.loads((simulated / "summary.json").read_text())
    counts = [v["n_train"] for v in summary["runs"][-1]["per_silo"].values()]
    for i, name in enumerate(found.names):
        assert found.values[0, i].tolist() == pytest.approx([n / sum(counts) for n in counts])
        state = State.load(folder / name / "round-000002.safetensors")
        assert torch.equal(torch.tensor(found.values[-1, i], dtype=torch.float32), state.arrays["dr"])
    assert not (found.values[0] == found.values[-1]).all()


def test_an_absent_silos_relationships_stay(tmp_path: Path) -> None:
    """b trained in rounds 1 and 2, a in round 2 only: in round 1 a has its start."""
    for name, rounds, values in (
        ("a", [1, 2], [[0.5, 0.5], [0.7, 0.3]]),
        ("b", [0, 1, 2], [[0.5, 0.5], [0.4, 0.6], [0.1, 0.9]]),
    ):
        state = State({"dr_history": torch.tensor(values)}, {"dr_rounds": rounds})
        state.save(tmp_path / name / "round-000002.safetensors")
    (tmp_path / "b" / "round-000003.safetensors").write_bytes(b"damaged")  # the one before is shown
    found = Apple.read_relationships(newest_states(tmp_path))
    assert found is not None and found.rounds == [0, 1, 2]
    assert found.values[:, 1, 1].tolist() == pytest.approx([0.5, 0.6, 0.9])
    assert math.isnan(found.values[0, 0, 0]) and found.values[1:, 0, 0].tolist() == pytest.approx([0.5, 0.7])
    assert Apple.read_relationships(newest_states(tmp_path / "nowhere")) is None


def test_command_line(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(simulated)]) == 0
    assert capsys.readouterr().out == f"{simulated / 'report.html'}\n"


def test_study_prints_the_table_and_ends_with_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    line = f"simulate --strategy local,fedavg --rounds 1 --silos 2 --partition iid --set threads=1 --out {out}"
    assert main(line.split()) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(out)
    assert silo_table(Study(out)) in said.err


def test_failed_simulation_leaves_a_report(tmp_path: Path) -> None:
    """A learning rate that makes every silo diverge: the run fails, the report says why."""
    values = {"strategy": "fedavg", "rounds": 2, "silos": 2, "partition": "iid", "threads": 1, "learning-rate": 1e30}
    with pytest.raises(RuntimeError):
        simulate({**values, "out": str(tmp_path / "run")}, quiet=True)
    text = checked(tmp_path / "run").text
    assert "FedAvg, seed 42 failed" in text and "diverged" in text


@pytest.mark.parametrize("simulated", [True, False])
def test_server_app_ends_with_a_report(simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Label counts only where the data are the simulation's: hospitals do not send theirs."""
    out = tmp_path / "run"
    values = {"strategy": "fedavg", "rounds": 1, "silos": 2, "partition": "iid", "threads": 1, "out": str(out)}
    settings = parse_settings(values)
    card = client.app.data_card
    kind = {"simulated": simulated, "own_file": not simulated}
    monkeypatch.setattr(client.app, "data_card", lambda *given: {**card(*given), **kind})
    with flower_identity():
        server.app.main(InProcessGrid(client_app, 2, settings.flat()), server_context(settings))
    assert {p.stat().st_mode & 0o077 for p in (out, *out.rglob("*"))} == {0}  # for its user alone
    assert (out / "manifest.json").exists() == simulated
    assert ("Who holds what" in checked(out).text) == simulated


def test_rounds_done_before_do_not_count_for_the_pace() -> None:
    """Ten rounds, four from an earlier start: two more in this one make 6 of 10, and 4 are left at this one's pace."""
    with tqdm(total=10, file=StringIO()) as bar:
        skip(bar, 4)
        bar.update(2)
        assert (bar.n, bar.initial, bar.format_dict["total"] - bar.n) == (6, 4, 4)
    with tqdm(total=10, disable=True) as silent:
        skip(silent, 4)  # has no counters


# ---------------------------------------------------------------------------------------------------------------------
# Tracking


def test_round_values() -> None:
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
def test_missing_library_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(UserError, match=rf"--log {name} needs a library .* pip install -e '.\[tracking\]'"):
        simulate({"out": str(tmp_path / "run")}, quiet=True, log=[name])
    assert not (tmp_path / "run").exists()


def test_unknown_library() -> None:
    with pytest.raises(UserError, match=r"unknown --log 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        open_trackers(["tensorbord"])


TINY = {"strategy": "local,fedavg", "rounds": 2, "silos": 2, "partition": "iid", "threads": 1}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (silofl[tracking])")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = simulate({**TINY, "out": str(tmp_path / "run")}, quiet=True, log=["tensorboard"])
    events = EventAccumulator(str(out / "tensorboard" / "fedavg-42"))
    events.Reload()
    study = Study(out)
    curve = study.curve("fedavg", "received")
    logged = {e.step: e.value for e in events.Scalars("test/accuracy/received")}
    assert logged == pytest.approx({r: v[0] for r, v in curve.items()})
    assert list(logged) == [1, 2, 3]  # 3: the closing evaluation


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (silofl[tracking])")
    out = simulate({**TINY, "out": str(tmp_path / "run")}, quiet=True, log=["mlflow"])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("silofl").experiment_id])
    assert sorted(r.info.run_name for r in runs) == ["fedavg-42", "local-42"]
    run = next(r for r in runs if r.info.run_name == "fedavg-42")
    assert run.info.status == "FINISHED" and run.data.params["learning-rate"] == "0.05"
    logged = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "test/accuracy/received")}
    assert logged == pytest.approx({r: v[0] for r, v in Study(out).curve("fedavg", "received").items()})
