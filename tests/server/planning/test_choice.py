"""The methods that can run there, why the others cannot, and what was measured of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from failing import fails
from study_text import study_text
from taken import silofl

from client.protocol.study import parse_study
from partitions.common.errors import UserError
from server.deploy.study_draft import check_study
from server.planning.choice import choices, choices_in, evidence_line, read_gains
from strategies import strategies
from strategies.base.run_settings import parse_settings

GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sums": {"secure-aggregation": True},
    "privacy": {"dp": True},
    "survival": {"task": "survival"},
    "robust": {"robust": "median"},
}
TABLE = """dataset,network,most,method,seed,fold,hospital,tested,loss,score
wards,linear,0,local,0,0,a,9,0.50,0
wards,linear,0,local,0,1,b,9,0.30,0
wards,linear,0,ditto,0,0,a,9,0.30,0
wards,linear,0,ditto,0,1,b,9,0.40,0
wards,linear,30,ditto,0,1,b,9,0.01,0
clinics,trees,0,local-trees,0,0,a,9,0.50,0
clinics,trees,0,ditto,0,0,a,9,0.60,0
clinics,linear,0,ditto,0,0,a,9,0.10,0
"""


def names(rows):
    return [row["name"] for row in rows if not row["refused"]]


@pytest.mark.parametrize("what", GIVEN)
def test_those_that_cannot_are_those_that_a_run_refuses_with_its_line(what):
    rows = choices(GIVEN[what])
    assert [row["name"] for row in rows] == [*strategies()] and names(rows)
    for row in rows:
        values = {**GIVEN[what], "strategy": row["name"]}
        if what == "survival":
            classes = strategies()[row["name"]].info.training.needs_classes
            assert not classes or "one class each, which survival has not" in row["refused"]
        elif row["refused"]:
            assert fails(UserError, None, parse_settings, values) == row["refused"]
        else:
            parse_settings(values)


def test_by_declaration():
    able = {name for name, s in strategies().items() if s.info.aggregation.sums}
    assert {*names(choices(GIVEN["sums"]))} <= able and "apple" not in able
    private = {name for name, s in strategies().items() if s.info.training.dp}
    assert {*names(choices(GIVEN["privacy"]))} == private
    robust = {name for name, s in strategies().items() if "median" in s.info.aggregation.robust}
    silent = {name for name, s in strategies().items() if not s.info.uploads}
    assert {*names(choices(GIVEN["robust"]))} - silent == robust - silent


def test_a_study_decides(tmp_path):
    """Its check refuses a listed method with the line that the choice has."""
    peers = "".join(f'{name} = "SHA256:{name * 64}"\n' for name in "abcde")
    settings = 'strategy = "{}"\nsecure-aggregation = true\nnormalization = "none"'
    text = study_text().replace("[settings]", f"[settings]\n{settings}") + f"[peers]\n{peers}"
    study = parse_study(text.format("ditto"), "study.toml")
    rows = {row["name"]: row for row in choices_in(study)}
    assert [name for name, row in rows.items() if row["listed"]] == ["ditto"]
    check_study(text.format("ditto"), "study.toml")
    assert not rows["ditto"]["refused"]
    line = fails(UserError, "not with apple", check_study, text.format("apple"), "study.toml")
    assert rows["apple"]["refused"] == line
    assert names(rows.values()) == names(choices(GIVEN["sums"] | {"normalization": "none"}))


def test_a_method_must_fit_every_value_that_a_study_allows():
    text = study_text().replace("[settings]", '[settings]\nrobust = ["none", "median"]')
    study = parse_study(text, "study.toml")
    assert names(choices_in(study)) == names(choices(GIVEN["robust"]))


def test_the_evidence_by_hand(tmp_path):
    """Ditto's mean loss is 0.35 where training alone has 0.40, and 0.60 where it has 0.50."""
    (tmp_path / "table.csv").write_text(TABLE)
    gains = read_gains(tmp_path / "table.csv")
    expected = {"wards, linear": 12.5, "clinics, trees": -20.0}
    assert gains == {"ditto": pytest.approx(expected)}
    line = "loss below training alone's on 1 of 2: -12.5 % (wards, linear) to +20.0 % (clinics, trees)"
    assert evidence_line(gains["ditto"]) == line


def test_without_a_table_there_is_no_evidence(tmp_path):
    (tmp_path / "other.csv").write_text("dataset,method\nwards,local\n")
    assert not read_gains(tmp_path / "none.csv") and not read_gains(tmp_path / "other.csv")
    assert evidence_line({}) == "no evidence in the reference table"
    assert "+5e+11 % (visits)" in evidence_line({"visits": -5.4e11})


def test_the_command(tmp_path, capsys):
    assert silofl("strategies", "--sums", "--set", "task=survival") == 0
    able, unable = capsys.readouterr().out.split("These cannot run:")
    assert "ditto             Global model" in able and "down Σ, up Σ" in able
    assert "\napple " in unable and "not a sum of steps" in unable
    assert "\nfedrod " in unable and "which survival has not" in unable
    assert silofl("strategies", "--dp", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["fedavg"]["evidence"] == "no evidence in the reference table"
    assert rows["fedgh"]["refused"].startswith("dp = true") and not rows["fedavg"]["refused"]
    (tmp_path / "study.toml").write_text(study_text())
    assert silofl("strategies", "--for", tmp_path / "study.toml") == 0
    out = capsys.readouterr().out
    assert out.count("the study does not list it") == len(strategies()) - 1
    assert silofl("strategies", "--for", tmp_path / "study.toml", "--sums") == 2
    assert "the study has the settings" in capsys.readouterr().err
