"""The report claims what the data show: the gain's two-level interval, headline and tile, and silos seldom there."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import permutation_test
from studies import checked, make_run

from benchmarks.coverage import study
from server.report.charts.canvas import drawn, percent_axis
from server.report.head import headline, tiles
from server.report.inference import mean_interval, paired_test
from server.report.scores import Gain
from server.report.sections.silos import gain_cell
from server.report.study import Study
from server.report.write import silo_table, write_report

SIX = {f"h{k}": 100 for k in range(1, 7)}


def compared(path: Path, local: Sequence[Any], apple: Sequence[Any], **options: Any) -> Path:
    """A run of two methods, one accuracy per silo each, for several seeds a list of those."""
    options.setdefault("counts", {f"h{k}": 100 for k in range(1, 1 + len(local))})
    test = {"local": local, "apple": apple}
    return make_run(path, test, validation={"local": 0.5, "apple": 0.8}, **options)


def decision(path: Path) -> tuple[str, str]:
    """What the headline makes of the mean gain, and its points; the tile must say the same."""
    run = Study(path)
    sentence = re.sub(r"<[^>]+>", "", headline(run)[0])
    found = re.search(r"<dt>(Mean (?:gain|loss)[^<]*)</dt><dd>([^<]*)<", tiles(run))
    assert found is not None
    tile, points = found.groups()
    word = next(word for word in ("No gain", " gains ", " loses ") if word in sentence)
    assert tile == {"No gain": "Mean gain, not shown", " gains ": "Mean gain", " loses ": "Mean loss"}[word]
    assert f"{points} points" in sentence
    return word.strip(), points


def test_two_silos_with_one_patient_more_show_no_gain(tmp_path: Path) -> None:
    """One of 32 and one of 40 patients more, each with an interval far below zero (-16..+22, -13..+18)."""
    path = compared(tmp_path / "run", (26 / 32, 34 / 40), (27 / 32, 35 / 40), counts={"a": 32, "b": 40})
    text = checked(path).text
    assert "−16 to +22" in text and "−13 to +18" in text
    assert not re.search(r"is clear of zero|gains? with APPLE|2 of 2 silos", text)
    assert "No gain of APPLE over training alone is shown: +2.8 points of accuracy on average in 2 silos" in text
    assert "2 silos are too few, it takes 6" in text and decision(path) == ("No gain", "+2.8")


def test_three_seeds_with_one_patient_more_are_no_more_than_chance(tmp_path: Path) -> None:
    """One of 32 patients more with each of three seeds: they may be the same patient."""
    local, apple = [(26 / 32,)] * 3, [(27 / 32,)] * 3
    path = compared(tmp_path / "run", local, apple, counts={"a": 32}, seeds=(1, 2, 3))
    gain = Study(path).gain("apple", "local", "a")
    assert gain.interval[0] < -0.1 and gain.interval[1] > 0.1
    assert "no gain is larger than chance alone could explain" in checked(path).text


def test_seeds_that_disagree_widen_the_interval(tmp_path: Path) -> None:
    apple = [(0.6,), (0.75,), (0.9,)]
    one = compared(tmp_path / "one", (0.5,), (0.75,))
    three = compared(tmp_path / "three", [(0.5,)] * 3, apple, seeds=(1, 2, 3), counts={"h1": 100})
    (low, high), (lower, higher) = (Study(p).gain("apple", "local", "h1").interval for p in (one, three))
    assert low > 0 > lower and higher > high


def test_a_gain_everywhere_is_shown_and_so_is_a_loss(tmp_path: Path) -> None:
    up = compared(tmp_path / "up", (0.5,) * 6, (0.7, 0.72, 0.68, 0.7, 0.75, 0.65))
    assert decision(up) == ("gains", "+20.0")
    assert "the 95 % intervals of 6 gains lie above zero. Chance alone puts about 0.15 of 6 there." in checked(up).text
    down = compared(tmp_path / "down", (0.7,) * 6, (0.5, 0.52, 0.48, 0.5, 0.55, 0.45))
    assert decision(down) == ("loses", "−20.0")
    assert "One seed was run" in checked(down).text


def test_headline_and_number_agree_whatever_the_study(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    words = []
    for silos, shift in itertools.product((1, 5, 6, 9), (-0.2, 0.0, 0.2)):
        local = rng.uniform(0.4, 0.6, silos)
        apple = np.clip(local + shift + rng.normal(0, 0.05, silos), 0, 1)
        path = compared(tmp_path / f"{silos}{shift}", local.round(2).tolist(), apple.round(2).tolist())
        words.append(decision(path)[0])
    assert words == ["No gain"] * 6 + ["loses", "No gain", "gains"] * 2


def test_mean_over_silos_holds_the_truth_as_often_as_it_says() -> None:
    """Six hospitals of 40 patients without any gain: the hospitals' bootstrap alone excluded zero 15 times in 100."""
    rng = np.random.default_rng(3)
    found = [mean_interval(study(rng, np.zeros((6, 1)), 40)) for _ in range(100)]
    assert sum(low <= 0 <= high for low, high in found) >= 95


@pytest.mark.parametrize(
    ("interval", "kind"), [((0.1, 0.3), "up"), ((-0.3, -0.1), "down"), ((-0.1, 0.3), ""), ((math.nan,) * 2, "")]
)
def test_a_silos_gain_has_a_colour_where_its_interval_excludes_zero(interval: tuple[float, float], kind: str) -> None:
    assert gain_cell(Gain(sum(interval) / 2, interval))[0] == kind


def test_one_unknown_interval_leaves_the_mean_without_one(tmp_path: Path) -> None:
    test = {"local": (0.5,) * 6, "apple": (0.7,) * 6}
    path = make_run(tmp_path / "run", test, counts={**SIX, "h6": 0}, validation={"local": 0.5, "apple": 0.8})
    assert all(map(math.isnan, Study(path).mean_gain("apple", "local").interval))
    assert decision(path)[0] == "No gain"


# ---------------------------------------------------------------------------------------------------------------------
# Silos that were seldom there


def test_a_silo_that_missed_22_of_25_rounds_is_marked(tmp_path: Path) -> None:
    """h8 has 10 % with both methods' models of round 3, the others 60 and 80 %."""
    counts = {f"h{k}": 100 for k in range(1, 9)}
    local, apple = (0.6,) * 7 + (0.1,), (0.8,) * 7 + (0.1,)
    path = compared(tmp_path / "run", local, apple, counts=counts, rounds=25, away={"h8": 3})
    text = checked(path).text
    assert "† h8 took part in 3 of 25 rounds. Scores are those of the last round" in text
    assert "h8 took part in 3 of 25 rounds: without it the average is +20.0 points (95 % interval +" in text
    assert "The worst silo reaches 10.0 % (10.0 % with Local); without † 80.0 % (60.0 %)." in text
    rows = re.sub(r"<[^>]+>", " ", write_report(path).read_text().partition("<tfoot>")[2].partition("</tfoot>")[0])
    assert rows.split() == ["Mean", "53.8", "71.2", "+17.5", "without", "†", "60.0", "80.0", "+20.0"]
    assert "†10.0" in text  # the methods' worst silo
    assert "without † +20.0" in tiles(Study(path))
    assert "\nh8 took part in 3 of 25 rounds: scores are" in silo_table(Study(path))


def test_a_gain_that_rests_on_silos_seldom_there_is_not_shown(tmp_path: Path) -> None:
    apple = (0.7, 0.72, 0.68, 0.7, 0.75, 0.65)
    assert decision(compared(tmp_path / "all", (0.5,) * 6, apple, rounds=25))[0] == "gains"
    path = compared(tmp_path / "away", (0.5,) * 6, apple, rounds=25, away={"h6": 3})
    assert decision(path)[0] == "No gain"
    assert "5 silos took part in enough rounds, at least 6 needed" in checked(path).text


def test_silos_drawn_for_few_rounds_like_all_others_are_not_marked(tmp_path: Path) -> None:
    away = dict.fromkeys(SIX, 3)
    path = compared(tmp_path / "run", (0.5,) * 6, (0.7,) * 6, rounds=25, away=away)
    assert "†" not in checked(path).text


def test_lines_of_the_log_have_their_time(tmp_path: Path) -> None:
    path = compared(tmp_path / "run", (0.5,), (0.7,))
    line = {"event": "note", "strategy": "apple", "seed": 42, "message": "h1 is gone; waits for it"}
    lines = [{**line, "time": f"2026-11-23T15:0{k}:11Z"} for k in (2, 7)] + [{**line, "message": "h1 is back"}]
    (path / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    text = checked(path).text
    assert "From the run's log:2026-11-23 15:02:11 UTC h1 is gone; waits for it. (2 times)" in text
    assert "time not recorded h1 is back." in text


# ---------------------------------------------------------------------------------------------------------------------
# The page's width, its axes and its words


def test_an_axis_has_no_tick_twice() -> None:
    for high in (0.004, 0.03, 0.5, 1.0):
        canvas = drawn(300, 100, (10, 10, 10, 30))
        canvas.axes.set_xlim(-high / 3, high)
        percent_axis(canvas.axes.xaxis)
        canvas.figure.canvas.draw()
        labels = [label.get_text() for label in canvas.axes.get_xticklabels()]
        assert len(set(labels)) == len(labels) > 2 and "0" in labels


def test_the_terms_are_explained_where_asked(tmp_path: Path) -> None:
    html = write_report(compared(tmp_path / "run", (0.5,), (0.7,))).read_text()
    explained = re.findall(r"<details[^>]*><summary>What is this\?</summary>(.*?)</details>", html, re.DOTALL)
    assert any("Incentivised rate" in text and "BMCTA" in text for text in explained)
    assert "<dl class='terms'>" not in re.sub(r"<details.*?</details>", "", html, flags=re.DOTALL)


MEASURE = """<script>
const of = [...document.querySelectorAll('.scroll')].map(box => {
  const cell = box.querySelector('tbody th'), hint = box.previousElementSibling;
  box.scrollLeft = 1000;
  return [box.scrollWidth > box.clientWidth, cell.getBoundingClientRect().left - box.getBoundingClientRect().left,
          !!hint && hint.className.includes('swipe') && getComputedStyle(hint).display != 'none'];
});
document.title = 'measured ' + JSON.stringify(of);
</script>"""


@pytest.mark.parametrize("width", [1280, 390])
def test_tables_fit_or_show_that_they_scroll(width: int, tmp_path: Path) -> None:
    """At 1280 px all of the comparison is there; at 390 px its first column stays, under a sign that there is more."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    path = write_report(compared(tmp_path / "run", (0.5,) * 6, (0.7,) * 6, counts=SIX))
    page = tmp_path / "page.html"
    html = path.read_text() + MEASURE.replace("document.title", "parent.document.title")
    # The window's least width is more than a phone's; a frame has any.
    escaped = html.replace("&", "&amp;").replace('"', "&quot;")
    page.write_text(f'<body><iframe srcdoc="{escaped}" width={width} height=900 frameborder=0></iframe>')
    flags = (
        f"--headless --no-sandbox --disable-gpu --disable-sync --no-first-run --user-data-dir={tmp_path / 'browser'}"
    )
    quiet = "--disable-quic --disable-background-networking --disable-component-update"
    command = [browser, *flags.split(), *quiet.split(), "--dump-dom", page.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = re.search(r"<title>measured (.*?)</title>", found.stdout)
    assert measured is not None
    for overflows, left, hint in json.loads(measured[1]):
        assert not (width == 1280 and overflows)
        assert left == pytest.approx(0, abs=1)
        assert hint or not overflows or width == 1280


# ---------------------------------------------------------------------------------------------------------------------
# Paired tests


def test_paired_tests_are_statsmodels_and_scipys() -> None:
    """``DescrStatsW(d).ttest_mean(0)[1]`` of statsmodels 0.15.0; all 64 flips of the signs by scipy."""
    d = np.array([0.1, 0.2, 0.05, 0.15, 0.3, -0.1])
    found = paired_test(d, 6)
    assert found is not None and found.t == pytest.approx(0.09070960218611414, abs=1e-9)
    flips = permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert found.flips == pytest.approx(flips.pvalue, abs=1e-9) and found.n == 6
    assert paired_test(d[:5], 6) is None and paired_test(np.full(6, 0.1), 6) is None


def test_drawn_flips_are_near_all_of_them() -> None:
    d = np.random.default_rng(1).normal(0.1, 0.3, 17)
    found = paired_test(d, 6)
    assert found is not None and found.flips == pytest.approx(found.t, abs=0.02)


def test_the_report_has_paired_tests_with_their_assumptions(tmp_path: Path) -> None:
    """Six hospitals and three seeds; below either number there is a dash, and below both no table."""
    local = [(0.5, 0.52, 0.51, 0.53, 0.5, 0.49)] * 3
    apple = [tuple(v + 0.1 + 0.01 * k * i for i, v in enumerate(row)) for k, row in enumerate(local)]
    text = checked(compared(tmp_path / "run", local, apple, seeds=(1, 2, 3), counts=SIX)).text
    assert "Paired tests against Local" in text and "a small p says nothing about other patients" in text
    one = checked(compared(tmp_path / "one", local[0], apple[1], counts=SIX)).text
    assert "0.031–––" in one.replace(" ", "")  # all six gain: 2 of 64 flips are as far from zero
    assert "Paired tests" not in checked(compared(tmp_path / "few", (0.5, 0.5), (0.6, 0.7))).text
