"""The report claims what the data show: the gain's interval, headline and tile, and silos seldom there."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from scipy import stats
from studies import checked, make_run

from benchmarks.coverage import difference
from server.planning.power import Design, measure
from server.report.canvas import Canvas, percent_axis
from server.report.head import headline, tiles
from server.report.html import report_environment
from server.report.inference import Gain, over_hospitals, over_seeds
from server.report.study import StudyResults
from server.report.write import silo_table, write_report

SIX = {f"h{k}": 100 for k in range(1, 7)}


def compared(path, local, apple, **options):
    """A run of two methods, one accuracy per silo each, for several seeds a list of those."""
    options.setdefault("counts", {f"h{k}": 100 for k in range(1, 1 + len(local))})
    test = {"local": local, "apple": apple}
    return make_run(path, test, validation={"local": 0.5, "apple": 0.8}, **options)


def decision(path):
    """What the headline makes of the mean gain, and its points; the tile must say the same."""
    run = StudyResults(path)
    sentence = re.sub(r"<[^>]+>", "", headline(run)[0])
    found = re.search(r"<dt>(Mean (?:gain|loss)[^<]*)</dt><dd>([^<]*)<", tiles(run))
    assert found is not None
    tile, points = found.groups()
    word = next(word for word in ("not yet certain", " gains ", " loses ") if word in sentence)
    tiles_of = {
        "not yet certain": "Mean gain, not yet certain",
        " gains ": "Mean gain",
        " loses ": "Mean loss",
    }
    assert tile == tiles_of[word] and f"{points} points" in sentence
    return word.strip(), points


def test_two_silos_with_one_patient_more_show_no_gain(tmp_path):
    """One of 32 and one of 40 patients more, each with an interval far below zero (-16..+22, -13..+18)."""
    path = compared(
        tmp_path / "run", (26 / 32, 34 / 40), (27 / 32, 35 / 40), counts={"a": 32, "b": 40}
    )
    text = checked(path).text
    assert "−16 to +22" in text and "−13 to +18" in text
    assert not re.search(r"is clear of zero|gains? with APPLE|2 of 2 hospitals", text)
    assert (
        "+2.8 points of accuracy on average in 2 hospitals, not yet certain (an interval needs 6 hospitals)"
        in text
    )
    assert decision(path) == ("not yet certain", "+2.8")


def test_a_gain_everywhere_is_shown_and_so_is_a_loss(tmp_path):
    up = compared(tmp_path / "up", (0.5,) * 6, (0.7, 0.72, 0.68, 0.7, 0.75, 0.65))
    assert decision(up) == ("gains", "+20.0")
    assert "\nAPPLE against Local: +20.0 points, 95 % interval +16.4 to +23.6\n" in silo_table(
        StudyResults(up)
    )
    assert (
        "the 95 % intervals of 6 gains lie above zero. Chance alone puts about 0.15 of 6 there."
        in checked(up).text
    )
    down = compared(tmp_path / "down", (0.7,) * 6, (0.5, 0.52, 0.48, 0.5, 0.55, 0.45))
    assert decision(down) == ("loses", "−20.0")
    assert "One seed was run" in checked(down).text


def test_headline_and_number_agree_whatever_the_study(tmp_path):
    rng = np.random.default_rng(5)
    words = []
    for silos, shift in itertools.product((1, 5, 6, 9), (-0.2, 0.0, 0.2)):
        local = rng.uniform(0.4, 0.6, silos)
        apple = np.clip(local + shift + rng.normal(0, 0.05, silos), 0, 1)
        path = compared(
            tmp_path / f"{silos}{shift}", local.round(2).tolist(), apple.round(2).tolist()
        )
        words.append(decision(path)[0])
    assert words == ["not yet certain"] * 6 + ["loses", "not yet certain", "gains"] * 2


def test_an_interval_that_is_not_certain_stands_in_the_headline(tmp_path):
    """+4.5 points on average, and where to read what another study would need."""
    apple = (0.6, 0.52, 0.45, 0.65, 0.48, 0.57)
    path = compared(tmp_path / "run", (0.5,) * 6, apple)
    low, high = stats.ttest_1samp(np.array(apple) - 0.5, 0).confidence_interval(0.95)
    text = checked(path).text
    assert (
        f"+4.5 points of accuracy on average in 6 hospitals, not yet certain (−{-100 * low:.1f} to +"
        in text
    )
    assert f"to +{100 * high:.1f})" in text
    assert "silofl plan --pilot has the hospitals, patients or seeds that another study" in text


def test_seeds_that_disagree_are_visible(tmp_path):
    """The interval holds for these seeds; from three on the page has how far their averages lie apart."""
    apple = [tuple(0.5 + 0.05 * seed + 0.02 * k for k in range(6)) for seed in (1, 2, 3)]
    path = compared(tmp_path / "run", [(0.5,) * 6] * 3, apple, seeds=(1, 2, 3), counts=SIX)
    text = checked(path).text
    assert "3 seeds were run, with averages from +10.0 to +20.0." in text
    expected = stats.ttest_1samp([0.1 + 0.02 * k for k in range(6)], 0).confidence_interval(
        0.95
    )
    assert StudyResults(path).mean_gain("apple", "local").interval == pytest.approx(
        tuple(expected)
    )


def test_the_page_names_one_worst_hospital(tmp_path):
    """h1 is the worst with APPLE, h2 the worst alone; the lowest of single seeds is another's, h3's."""
    local, apple = [(0.6, 0.2, 0.7)] * 2, [(0.5, 0.6, 0.45), (0.5, 0.6, 0.8)]
    counts = {f"h{k}": 100 for k in range(1, 4)}
    path = compared(tmp_path / "run", local, apple, seeds=(1, 2), counts=counts)
    text = checked(path).text
    assert re.findall("worst hospital, (h.), reaches (.*?) %.? .(.*?) %", text) == [
        ("h1", "50.0", "60.0")
    ]
    assert "50.0h1" in text and "20.0h2" in text  # in the table of methods, each method's own


def test_the_mean_holds_the_truth_as_often_as_it_says_and_sees_a_gain():
    """Six hospitals of 40 patients. Without a gain 95 of 100 intervals hold zero. Of a gain of 10 points with three
    seeds half are seen: patients that were added to the spread once more left few.
    """
    rng = np.random.default_rng(3)
    values = measure(Design((40,) * 6, 0.0), np.zeros((400, 6)), rng)
    found = [over_hospitals(study).interval for study in values.tolist()]
    assert 370 <= sum(low <= 0 <= high for low, high in found) <= 390
    values = measure(Design((40,) * 6, 0.0, seeds=3), np.full((200, 6), 0.1), rng)
    seen = [over_hospitals(study).interval[0] > 0 for study in values.tolist()]
    assert sum(seen) > 150


def test_one_hospitals_gain_counts_its_patients_once_and_its_seeds():
    """Three equal seeds may be of the same patients: they are worth one. Each end has its own distance: of 98 %, a
    score may be lower by more than it may be higher.
    """
    one = difference(0.98, 0.02, 50)
    low, high = one.interval
    assert one.mean - low > 3 * (high - one.mean)
    assert over_seeds({1: one}).interval == pytest.approx(one.interval)
    assert over_seeds(dict.fromkeys((1, 2, 3), one)).interval == pytest.approx(one.interval)
    seeds = {k: difference(a, 0.02, 50) for k, a in enumerate((0.98, 0.94, 0.9))}
    below, above = (
        np.mean([abs(d.mean - d.interval[end]) for d in seeds.values()]) for end in (0, 1)
    )
    of_seeds = float(stats.t.ppf(0.975, 2)) * 0.04 / math.sqrt(3)
    assert over_seeds(seeds).interval == pytest.approx(
        (0.92 - math.hypot(below, of_seeds), 0.92 + math.hypot(above, of_seeds))
    )


@pytest.mark.parametrize(
    ("interval", "kind"),
    [((0.1, 0.3), "up"), ((-0.3, -0.1), "down"), ((-0.1, 0.3), ""), ((math.nan,) * 2, "")],
)
def test_a_silos_gain_has_a_colour_where_its_interval_excludes_zero(interval, kind):
    gain = Gain(sum(interval) / 2, interval)
    call = '{% from "report/macros.html" import gain_cell %}{{ gain_cell(gain) }}'
    cell = report_environment().from_string(call)
    assert f'<td class="{kind}">' in cell.render(gain=gain)


def test_an_unknown_number_of_patients_leaves_one_silo_without_an_interval(tmp_path):
    """The mean needs none of theirs."""
    test = {"local": (0.5,) * 6, "apple": (0.7, 0.72, 0.68, 0.7, 0.75, 0.65)}
    path = make_run(
        tmp_path / "run", test, counts={**SIX, "h6": 0}, validation={"local": 0.5, "apple": 0.8}
    )
    assert math.isnan(StudyResults(path).gain("apple", "local", "h6").interval[0])
    assert decision(path)[0] == "gains"


# ---------------------------------------------------------------------------------------------------------------------
# Silos that were seldom there


def test_a_silo_that_missed_22_of_25_rounds_is_marked(tmp_path):
    """h8 has 10 % with both methods' models of round 3, the others 60 and 80 %."""
    counts = {f"h{k}": 100 for k in range(1, 9)}
    local, apple = (0.6,) * 7 + (0.1,), (0.8,) * 7 + (0.1,)
    path = compared(tmp_path / "run", local, apple, counts=counts, rounds=25, away={"h8": 3})
    text = checked(path).text
    assert "† h8 took part in 3 of 25 rounds. Scores are those of the last round" in text
    assert (
        "h8 took part in 3 of 25 rounds: without it the average is +20.0 points (95 % interval +"
        in text
    )
    assert (
        "the worst hospital, h8, reaches 10.0 % (10.0 % alone) of 100 test samples; without † h1, reaches 80.0 %"
        in text
    )
    rows = re.sub(
        r"<[^>]+>",
        " ",
        write_report(path).read_text().partition("<tfoot>")[2].partition("</tfoot>")[0],
    )
    assert rows.split() == [
        "Mean",
        "53.8",
        "71.2",
        "+17.5",
        "without",
        "†",
        "60.0",
        "80.0",
        "+20.0",
    ]
    assert "10.0h8†" in text  # the methods' worst silo
    assert "without † +20.0" in tiles(StudyResults(path))
    assert "\nh8 took part in 3 of 25 rounds: scores are" in silo_table(StudyResults(path))


def test_a_gain_that_rests_on_silos_seldom_there_is_not_shown(tmp_path):
    apple = (0.7, 0.72, 0.68, 0.7, 0.75, 0.65)
    assert decision(compared(tmp_path / "all", (0.5,) * 6, apple, rounds=25))[0] == "gains"
    path = compared(tmp_path / "away", (0.5,) * 6, apple, rounds=25, away={"h6": 3})
    assert decision(path)[0] == "not yet certain"
    assert "only 5 hospitals took part in enough rounds, 6 are needed" in checked(path).text


def test_silos_drawn_for_few_rounds_like_all_others_are_not_marked(tmp_path):
    away = dict.fromkeys(SIX, 3)
    path = compared(tmp_path / "run", (0.5,) * 6, (0.7,) * 6, rounds=25, away=away)
    assert "†" not in checked(path).text


def test_lines_of_the_log_have_their_time(tmp_path):
    path = compared(tmp_path / "run", (0.5,), (0.7,))
    line = {
        "event": "note",
        "strategy": "apple",
        "seed": 42,
        "message": "h1 is gone; waits for it",
    }
    lines = [{**line, "time": f"2026-11-23T15:0{k}:11Z"} for k in (2, 7)] + [
        {**line, "message": "h1 is back"}
    ]
    (path / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    text = checked(path).text
    assert (
        "From the run's log:2026-11-23 15:02:11 UTC h1 is gone; waits for it. (2 times)" in text
    )
    assert "time not recorded h1 is back." in text


# ---------------------------------------------------------------------------------------------------------------------
# The page's width, its axes and its words


def test_an_axis_has_no_tick_twice():
    for high in (0.004, 0.03, 0.5, 1.0):
        canvas = Canvas(300, 100, (10, 10, 10, 30))
        canvas.axes.set_xlim(-high / 3, high)
        percent_axis(canvas.axes.xaxis)
        canvas.figure.canvas.draw()
        labels = [label.get_text() for label in canvas.axes.get_xticklabels()]
        assert len(set(labels)) == len(labels) > 2 and "0" in labels


def test_the_terms_are_explained_where_asked(tmp_path):
    html = write_report(compared(tmp_path / "run", (0.5,), (0.7,))).read_text()
    explained = re.findall(
        r"<details[^>]*><summary>What is this\?</summary>(.*?)</details>", html, re.DOTALL
    )
    assert any("Incentivised rate" in text and "BMCTA" in text for text in explained)
    assert "<dl class='terms'>" not in re.sub(
        r"<details.*?</details>", "", html, flags=re.DOTALL
    )


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
def test_tables_fit_or_show_that_they_scroll(width, tmp_path):
    """At 1280 px all of the comparison is there; at 390 px its first column stays, under a sign that there is more."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    path = write_report(compared(tmp_path / "run", (0.5,) * 6, (0.7,) * 6, counts=SIX))
    page = tmp_path / "page.html"
    html = path.read_text() + MEASURE.replace("document.title", "parent.document.title")
    # The window's least width is more than a phone's; a frame has any.
    escaped = html.replace("&", "&amp;").replace('"', "&quot;")
    page.write_text(
        f'<body><iframe srcdoc="{escaped}" width={width} height=900 frameborder=0></iframe>'
    )
    flags = "--headless --no-sandbox --disable-gpu --disable-sync --no-first-run"
    flags += f" --user-data-dir={tmp_path / 'browser'}"
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
# The table of gains


def test_the_table_of_methods_has_the_headlines_interval(tmp_path):
    """FedAvg over Local is named in advance, and APPLE the only other method: each has 5 % to itself."""
    test = {
        "local": (0.5,) * 6,
        "fedavg": (0.6, 0.52, 0.45, 0.65, 0.48, 0.57),
        "apple": (0.7, 0.72, 0.68, 0.7, 0.7, 0.6),
    }
    path = make_run(
        tmp_path / "run",
        test,
        counts=SIX,
        validation={"local": 0.5, "fedavg": 0.6, "apple": 0.8},
    )
    rows = re.sub(
        r"<[^>]+>", " ", write_report(path).read_text().partition("Gain over Local</h3>")[2]
    )
    each = {m: over_hospitals([a - 0.5 for a in test[m]]) for m in ("fedavg", "apple")}
    low, high = (f"{100 * end:+.1f}" for end in each["apple"].interval)
    assert f"APPLE +18.3 6 hospitals {low} to {high} &lt; 0.001" in re.sub(r"\s+", " ", rows)
    low, high = (f"{100 * end:+.1f}".replace("-", "−") for end in each["fedavg"].interval)
    assert f"FedAvg +4.5 6 hospitals {low} to {high} {each['fedavg'].p:.3f}" in re.sub(
        r"\s+", " ", rows
    )
    assert "FedAvg over training alone), and a registered comparison" in checked(path).text
    assert (
        "Gain over Local" not in checked(compared(tmp_path / "one", (0.5,), (math.nan,))).text
    )
