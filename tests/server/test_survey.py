"""``silofl survey``: its files and page, and the outlier of one hospital by its reason."""

from __future__ import annotations

import csv
import re

import pytest
from surveyed import hospital, recoded, times
from taken import silofl
from tiny import json_of, random_silos

from models.evidence.survey import BINS, MISSING
from server.cli.main import main
from server.report.survey import survey_text
from server.results.survey import Surveyed, findings, read_survey
from server.results.units import FACTORS, known_ratio
from server.run.withdrawal import withdraw


def a_century(row):
    return {**row, "since": str(int(row["since"][:4]) + 100) + row["since"][4:]}


FAULTS = {
    "units": ("glucose", "unit", times("glucose", 18.016)),
    "sign": ("glucose", "sign", times("glucose", -1)),
    "codes": ("kind", "code", recoded("kind", {"a": "c", "c": "a"})),
    "dates": ("since", "shift", a_century),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("a", "b", "c", "d")):
        hospital(folder, name, 160, seed)
    for seed, (name, (_, _, change)) in enumerate(FAULTS.items(), start=10):
        hospital(folder, name, 160, seed, change)
    return folder


@pytest.fixture(scope="module")
def surveyed(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "survey"
    policy = out.parent / "policy.toml"
    # As in a new bundle: it keeps no preview away
    policy.write_text('methods = ["survey"]\nstudies = "required"\n')
    assert main(f"survey --data {data} --policy {policy} --out {out}".split()) == 0
    return out


def test_two_hospitals_are_not_called_alike(surveyed):
    """None of them can be compared with the median of two others, so nothing may be said of what is odd."""
    answers = read_survey(surveyed).answers
    few = Surveyed({name: answers[name] for name in ("a", "units")})
    assert survey_text(few)[-1].startswith("nothing was compared: it takes 3 hospitals")
    alike = Surveyed({name: answers[name] for name in ("a", "b", "c")})
    assert survey_text(alike)[-1] == "nothing odd is found in one hospital alone"
    withheld = {
        "age": {"kind": "number", MISSING: None, "cells": [None] * BINS, "range": [0, 9]}
    }
    for columns in (withheld, {}):
        silent = {name: {"n": 50, "columns": columns, "labels": {}} for name in "abc"}
        assert survey_text(Surveyed(silent))[-1].startswith("nothing was compared: no column")


def test_each_fault_is_named_once_and_nothing_else(surveyed):
    """Through the whole path, and what the default rules let out is enough for it."""
    found = {(f.silo, f.column, f.kind) for f in read_survey(surveyed).findings}
    assert found == {(silo, column, kind) for silo, (column, kind, _) in FAULTS.items()}
    told = {f.silo: f for f in read_survey(surveyed).findings}
    assert (
        "mg/dl against mmol/l is 18.02" in told["units"].what
        and "`factor = 0.05551`" in told["units"].look
    )
    assert (
        told["sign"].look == '`factor = -1` of the column "glucose", without its old fill-value'
    )
    assert (
        told["codes"].what == "as elsewhere if 'a' and 'c' change places"
        and "`values`" in told["codes"].look
    )
    assert "`format` and `since`" in told["dates"].look


def test_json_csv_and_page_say_the_same(surveyed):
    content = json_of(surveyed / "survey.json")
    assert len(content["findings"]) == 4 and set(content["silos"]) == {*"abcd", *FAULTS}
    with (surveyed / "survey.csv").open(newline="") as file:
        rows = {
            (r["silo"], r["column"], r["statistic"]): r["value"] for r in csv.DictReader(file)
        }
    item = content["silos"]["a"]["columns"]["glucose"]
    assert float(rows["a", "glucose", "mean"]) == item["mean"] and rows["a", "", "n"] == "160"
    assert rows["a", "sex", "count female"] == str(item_of(content, "a", "sex")["cells"][0])
    assert rows["a", "age", "count 0..12"] == ""  # withheld
    html = (surveyed / "survey.html").read_text()
    assert (
        "mg/dl against mmol/l" in html
        and "http" not in html.replace("http-equiv", "")
        and "withheld" in html
    )
    assert '<small class="ends"><span>0</span><span>120</span></small>' in html  # of age
    assert (
        '<small class="names">female · male</small>' in html
        and "<code>factor = 0.05551</code>" in html
    )
    (surveyed / "survey.html").unlink()
    assert silofl("report", surveyed) == 0
    assert (surveyed / "survey.html").read_text() == html


def item_of(content, silo, column):
    return content["silos"][silo]["columns"][column]


def test_a_hospital_that_withdraws_leaves_it(surveyed, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in surveyed.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    assert withdraw("units", [run]) == [f"{run}: units is deleted from survey.json, survey.csv"]
    assert "units" not in (run / "survey.json").read_text() + (run / "survey.csv").read_text()
    assert not (run / "survey.html").exists() and len(read_survey(run).findings) == 3


def test_a_simulation_and_a_name_that_would_be_markup(tmp_path, capfd):
    out = tmp_path / "digits"
    given = f"--dataset digits --set silos=3 partition=dirichlet --out {out}".split()
    assert silofl("survey", *given) == 0
    found = read_survey(out)
    assert sum(sum(a["labels"]["label"]["cells"]) for a in found.answers.values()) == 1797
    assert capfd.readouterr().out.splitlines()[-1] == str(out)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "one of the arguments --data --federation --dataset is required"),
        (["--data", "nowhere"], "there is no nowhere"),
        (["--dataset", "digits", "--policy", "p"], "--policy goes with --data"),
        (["--data", "file", "--set", "silos=2"], "--set goes with --dataset or --federation"),
        (["--data", "file", "--policy", "no.toml"], "no.toml: No such file"),
        (["--data", "file", "--out", "taken"], "is there already"),
    ],
)
def test_one_clear_line(tmp_path, monkeypatch, capfd, arguments, line):
    random_silos(tmp_path, {"file": 30})["file"].rename(tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/x").touch()
    try:
        code = silofl("survey", *arguments)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2 and line in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


# ---- Reasons, from answers made by hand ----------------------------------------------------------------------------


def answers(name, *items):
    base = {"kind": "number", MISSING: 0}
    return {
        f"h{i}": {"n": 100, "columns": {name: {**base, **item}}, "labels": {}}
        for i, item in enumerate(items)
    }


def only(name, *items):
    """Silo and text of the one finding."""
    (found,) = findings(answers(name, *items), {})
    return found.silo, f"{found.kind}: {found.what}"


def usual(mean, sd):
    return [{"mean": mean * f, "sd": sd * f} for f in (1.0, 1.01, 0.99)]


@pytest.mark.parametrize(
    ("name", "mean", "sd", "own", "spread", "said"),
    [
        (
            "Temperatur",
            37.0,
            0.6,
            98.6,
            1.1,
            "unit: mean 98.6, sd 1.1, elsewhere 37, 0.6 (medians of 3 hospitals): as °F against °C",
        ),
        ("temperature", 98.6, 1.1, 37.0, 0.6, "as °C against °F"),
        ("temperature", 37.0, 0.6, 310.2, 0.6, "as K against °C"),
        ("HbA1c", 6.5, 1.2, 47.5, 13.1, "as mmol/mol against %"),
        ("hba1c", 47.5, 13.1, 6.5, 1.2, "as % against mmol/mol"),
        ("creatinine", 1.0, 0.3, 90.0, 27.0, "µmol/l against mg/dl is 88.42"),
        ("creatinine", 90.0, 27.0, 1.0, 0.3, "mg/dl against µmol/l is 0.01131"),
        (
            "anything",
            4.0,
            1.0,
            20.0,
            5.0,
            "5 times as large, in mean and deviation alike: a constant factor",
        ),
        (
            "anything",
            4.0,
            1.0,
            4000.0,
            1000.0,
            "a unit 1,000 times smaller against the others' is 1000",
        ),
        ("height", 170.0, 8.0, 67.0, 3.2, "inch against cm is 0.3937"),
        (
            "zero",
            50.0,
            5.0,
            90.0,
            5.0,
            "shift: mean 90, sd 5, elsewhere 50, 5 (medians of 3 hospitals): shifted by +40",
        ),
    ],
)
def test_numbers(name, mean, sd, own, spread, said):
    silo, text = only(name, *usual(mean, sd), {"mean": own, "sd": spread})
    assert silo == "h3" and said in text


@pytest.mark.parametrize(
    ("own", "theirs"), [((47.54, 13.1), (6.5, 1.2)), ((6.5, 1.2), (47.54, 13.1))]
)
def test_an_affine_unit_has_the_recipes_factor_and_offset(own, theirs):
    """HbA1c: mmol/mol = 10.93 % - 23.5. A constant factor alone would move the mean by more than two deviations."""
    given = answers("hba1c", *usual(*theirs), {"mean": own[0], "sd": own[1]})
    (found,) = findings(given, {})
    factor, offset = map(float, re.findall(r"`(?:factor|offset) = (.*?)`", found.look))
    assert factor * own[0] + offset == pytest.approx(theirs[0], rel=1e-2)
    assert factor * own[1] == pytest.approx(theirs[1], rel=1e-2)


def test_of_three_hospitals_the_one_in_another_unit_is_named_alone():
    """The median of two others, one in °F, is no measure of the third."""
    celsius = [{"mean": mean, "sd": 0.8} for mean in (37.5, 37.3)]
    (alone,) = findings(answers("temp", *celsius, {"mean": 99.3, "sd": 1.4}), {})
    assert (alone.silo, alone.kind) == ("h2", "unit") and "°F against °C" in alone.what


def test_hospitals_that_differ_as_hospitals_do_are_not_named():
    """A ward of children beside others: the mean alone is smaller, and its deviation is not; and two are too few."""
    assert not findings(answers("age", *usual(50, 15), {"mean": 30.0, "sd": 14.0}), {})
    assert not findings(answers("hba1c", *usual(6.5, 2.0), {"mean": 6.8, "sd": 2.1}), {})
    assert not findings(answers("crp", *usual(10, 10), {"mean": 15.0, "sd": 20.0}), {})
    assert not findings(
        answers("x", {"mean": 1.0, "sd": 1.0}, {"mean": 900.0, "sd": 900.0}), {}
    )


def test_a_column_that_is_all_missing():
    silo, text = only(
        "crp", {MISSING: 20}, {MISSING: 0}, {MISSING: None}, {MISSING: 100}, {MISSING: 10}
    )
    assert (silo, text) == ("h3", "missing: 100% of its values are missing, elsewhere 10%")


def test_a_column_that_is_not_there_and_a_hospital_that_refuses():
    given = answers("crp", {}, {}, {}) | {"h9": {"n": 5, "columns": {}, "labels": {}}}
    found = [(f.silo, f.kind, f.what) for f in findings(given, {"h8": "refuses"})]
    assert found == [
        ("h8", "no survey", "refuses"),
        ("h9", "no such column", "3 of 4 hospitals have it"),
    ]


def test_values_at_the_end_of_the_range():
    """A policy that lets no sums out has cells: all of them in the last one are another unit, or code."""
    flat = {"range": [0, 10], "cells": [None, 20, 30, 30, 20, *[None] * 5]}
    silo, text = only(
        "x", flat, flat, flat, {"range": [0, 10], "cells": [*[None] * (BINS - 1), 100]}
    )
    assert (
        silo == "h3"
        and "100% of its values lie at the upper end of 0 to 10, elsewhere 0%" in text
    )


def test_a_category_that_has_another_code():
    usual_ones = [
        {"kind": "category", "levels": ["f", "m", "other"], "cells": [50, 45, None]}
    ] * 3
    item = {"kind": "category", "levels": ["f", "m", "other"], "cells": [50, None, 50]}
    silo, text = only("sex", *usual_ones, item)
    assert silo == "h3" and text.startswith("code: ") and "'other'" in text


def test_factors_are_those_of_molar_masses():
    """180.16 g/mol of glucose: 1 mmol/l is 180.16 mg/l, so 18.016 mg/dl; of the other substances alike."""
    masses = {
        "gluc": 180.16,
        "chol": 386.65,
        "trig": 885.7,
        "urea": 60.06,
        "calc": 40.078,
        "phos": 30.974,
    }
    for word, mass in masses.items():
        assert known_ratio(mass / 10, word)[1] == pytest.approx(mass / 10, rel=1e-3)
    for word, mass in {"creat": 113.12, "bili": 584.66, "uric": 168.11}.items():
        assert known_ratio(1e4 / mass, word)[1] == pytest.approx(1e4 / mass, rel=1e-3)
    assert known_ratio(1.01, "gluc") == ("", 1.01) and len(FACTORS) > 20
