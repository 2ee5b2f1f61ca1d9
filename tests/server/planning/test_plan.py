"""`silofl plan`: sizes, a survey, a pilot run; text, JSON, page; what contradicts itself is refused."""

from __future__ import annotations

import json
import statistics

import pytest
from near import near
from studies import make_run
from taken import silofl
from tiny import random_silos

from server.planning.plan import make_plan, patients_tested, plan_page, plan_text
from server.planning.power import Design, power
from server.results.survey import read_survey

SIZES = "300,240,400,350,280,600"


def test_sizes(tmp_path, capsys):
    out = tmp_path / "plan"
    assert silofl("plan", "--sizes", SIZES, "--effect", 8, "--spread", "low", "--out", out) == 0
    said = capsys.readouterr().out.splitlines()
    plan = json.loads((out / "plan.json").read_text())
    design = Design((60, 48, 80, 70, 56, 120), 0.01, 0.6, 3)
    assert said[-1] == str(out)
    assert plan["design"]["tested"] == list(design.tested)
    assert plan["power"] == power(design, 0.08) and plan["answer"] == "answerable"
    assert said[3].startswith(
        f"ANSWERABLE: a mean gain of 8.0 points is shown in {100 * plan['power']:.0f} of 100"
    )
    # The least detectable gain, and the curve, agree with the power
    assert (
        plan["gains"]["0.8"] < 0.08 and dict(map(tuple, plan["curve"]))[0.08] == plan["power"]
    )
    page = (out / "plan.html").read_text()
    assert page.count("<svg") == 2 and f"{100 * plan['power']:.0f} of 100 such" in page


def test_too_few_hospitals(capsys):
    assert silofl("plan", "--sizes", "500,500,500,500,500", "--effect", 10) == 0
    said = capsys.readouterr().out
    assert "NOT ANSWERABLE: below 6 hospitals" in said and "detectable in" not in said
    # More hospitals answer it, more patients do not
    assert "hospitals like these: 6\n" in said and "test patients: not answerable" in said


def test_a_survey(tmp_path, capsys):
    folder = tmp_path / "hospitals"
    folder.mkdir()
    random_silos(folder, [40, 60, 50, 80, 70, 30])
    survey = tmp_path / "survey"
    assert silofl("survey", "--data", folder, "--out", survey) == 0
    capsys.readouterr()
    assert silofl("plan", "--survey", survey, "--effect", 3, "--test-share", 0.5, "--json") == 0
    plan = json.loads(capsys.readouterr().out)  # all that is printed
    counts = plan["design"]["tested"]
    assert plan["effect"] == 0.03
    answers = read_survey(survey).answers
    assert counts == [round(answers[name]["n"] / 2) for name in "abcdef"]


@pytest.mark.exhaustive
def test_a_pilot_run(tmp_path, capsys):
    """Gains of 0, 10, 20, 5, 5 and 20 points over .5: their standard deviation, and the baseline's score."""
    gains = (0.0, 0.1, 0.2, 0.05, 0.05, 0.2)
    path = make_run(
        tmp_path / "run",
        {"local": (0.5,) * 6, "ditto": tuple(0.5 + g for g in gains)},
        validation={"local": 0.5, "ditto": 0.8},
        counts={f"h{k}": 100 for k in range(1, 7)},
    )
    asked = ("plan", "--pilot", path, "--method", "ditto", "--effect", 5)
    assert silofl(*asked, "--json") == 0
    design = json.loads(capsys.readouterr().out)["design"]
    near(design["spread"], statistics.stdev(gains))
    near(design["base"], 0.5)
    assert design["tested"] == [100] * 6
    assert silofl(*asked, "--spread", 2, "--base", 70, "--json") == 0
    design = json.loads(capsys.readouterr().out)["design"]
    assert (design["spread"], design["base"]) == (0.02, 0.7)
    assert silofl("plan", "--pilot", path, "--effect", 5) == 2
    assert f"{path} has no fedavg: local, ditto" in capsys.readouterr().err


def test_another_score(capsys):
    asked = ("plan", "--sizes", SIZES, "--effect", 0.05, "--metric", "log-loss")
    assert silofl(*asked, "--patient-sd", 0.4, "--spread", 0.01, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["power"] == power(
        Design((60, 48, 80, 70, 56, 120), 0.01, 0.6, 3, deviation=0.4), 0.05
    )
    assert silofl(*asked, "--patient-sd", 0.4, "--spread", 0.01) == 0
    said = capsys.readouterr().out
    assert "a mean gain of 0.05 is" in said and "points" not in said and "baseline" not in said


@pytest.mark.parametrize(
    "options, said",
    [
        (("--sizes", "120,x"), "--sizes 120,x: each hospital's patients, such as 120,80,200"),
        (
            ("--sizes", "120,10"),
            "a hospital of 10 patients has 2 test patients with --test-share 0.2",
        ),
        (
            ("--sizes", SIZES, "--spread", "wide"),
            "--spread wide: low, middle, high, or a number",
        ),
        (
            ("--sizes", SIZES, "--spread", "nan"),
            "--spread nan: low, middle, high, or a number from 0",
        ),
        (("--sizes", SIZES, "--seeds", 0), "--seeds 0: from 1 to 50"),
        (("--sizes", SIZES, "--base", 100), "--base 100: from 1 to 99"),
        (
            ("--sizes", SIZES, "--effect", -1),
            "--effect -1: the smallest gain worth having is above 0",
        ),
        (("--sizes", SIZES, "--metric", "brier"), "--patient-sd goes with another --metric"),
        (("--sizes", SIZES, "--patient-sd", 1), "--patient-sd goes with another --metric"),
        (
            ("--sizes", SIZES, "--metric", "brier", "--patient-sd", 1),
            "--spread middle: of brier a number is needed",
        ),
        (("--sizes", SIZES, "--test-share", "nan"), "--test-share nan: from 0.01 to 1"),
        (("--sizes", SIZES, "--effect", "inf"), "--effect inf: the smallest"),
        (("--survey", "nowhere"), "nowhere"),
    ],
)
def test_refused_in_one_line(options, said, capsys):
    effect = () if "--effect" in options else ("--effect", 3)
    assert silofl("plan", *options, *effect) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_an_existing_folder_stays(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    assert (
        silofl("plan", "--sizes", "500,500,500,500,500", "--effect", 3, "--out", tmp_path) == 2
    )
    assert "name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_share_that_is_tested():
    assert patients_tested([100, 51], 0.2) == (20, 10)


def test_names_are_escaped_on_the_page():
    plan = make_plan("<b>loss</b>", Design((60,) * 6, 0.1, deviation=1.0), 0.1)
    assert "<b>loss" not in plan_page(plan) and "WEAK" in "\n".join(plan_text(plan))
