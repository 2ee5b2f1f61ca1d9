"""Studies of which a part is missing: the report says of how many silos, seeds and rounds its numbers are."""

from __future__ import annotations

import math

import pytest
from studies import BETTER, SIX, changed, conditions, plain, planted, said

from server.report.head import headline
from server.report.sections.privacy import privacy_rows
from server.results.history import History, Row

NONE = math.nan


def test_silos_without_a_score_are_in_no_count(tmp_path):
    """Two of eight withhold theirs with APPLE: "all silos" and "drawn from 8 silos" would count them."""
    study = planted(tmp_path / "run", (*SIX, 0.9, 0.9), (*BETTER, NONE, NONE))
    assert said(study).startswith("Yes:") and "in 6 hospitals" in said(study)
    assert conditions(study).startswith("Drawn from 6 of 8 hospitals, each tested")
    below = plain(headline(study)[1])
    assert (
        "2 hospitals sent no accuracy and are not counted." in below
        and "all hospitals" not in below
    )


def test_seeds_of_one_method_alone_are_in_no_count(tmp_path):
    """Local was run with three seeds, APPLE has results with one: the comparison is of that one."""
    study = planted(tmp_path / "run", (SIX,) * 3, (BETTER,) * 3, seeds=(1, 2, 3))
    assert conditions(study).endswith("2 rounds; 3 seeds.") and "run:" not in headline(study)[1]

    def without(content):
        for run in content["runs"]:
            if run["strategy"] == "apple" and run["seed"] > 1:
                run["per_silo"] = {
                    silo: values | {"accuracy": None}
                    for silo, values in run["per_silo"].items()
                }

    one = changed(study, without)
    assert conditions(one).endswith("2 rounds; 1 seed.")
    assert (
        "One seed was run with both methods: how much others would change this is not counted."
        in headline(one)[1]
    )


def test_a_run_that_was_cut_off_has_its_own_rounds(tmp_path):
    """Local went to its end; APPLE has 3 of its 9 rounds, and its epsilon is what these have cost."""
    study = planted(tmp_path / "run", SIX, BETTER, rounds=9, config={"dp": True})
    rows = [r for r in study.history.rows if r.strategy == "local" or r.round <= 3]
    cost = {"epsilon": 2.5, "delta": 1e-5, "dp_steps": 40.0}
    rows += [
        Row("apple", 42, 3, silo, "", "", metric, v, None)
        for silo in study.silos
        for metric, v in cost.items()
    ]
    (study.path / "history.csv").unlink()
    History(study.path / "history.csv").add(rows)
    cut = changed(
        study,
        lambda content: content.update(
            runs=[r for r in content["runs"] if r["strategy"] == "local"]
        ),
    )
    assert "3 to 9 rounds" in conditions(cut)
    assert "with epsilon at most 2.5 so far." in said(cut)
    assert {run for _, run, *_ in privacy_rows(cut, ["apple"])} == {"APPLE, 42, not finished"}


def test_epsilon_of_one_run_is_not_that_of_the_study(tmp_path):
    study = planted(
        tmp_path / "run", (SIX,) * 2, (BETTER,) * 2, seeds=(1, 2), config={"dp": True}
    )

    def spent(content):
        for run in content["runs"]:
            for values in run["per_silo"].values():
                values["epsilon"] = 3.5

    text = said(changed(study, spent))
    assert (
        "epsilon at most 3.5 in one run, as the hospitals' last replies say; runs on the same data add up."
        in text
    )


@pytest.mark.parametrize(
    ("zero_shot", "expected"),
    [
        (
            [0.7] * 6 + [None, None],
            "a gain is shown (70.0 % as it comes, 60.0 % alone, in 6 of 8 hospitals held out)",
        ),
        ([None, None], "not shown, 2 hospitals held out, none with both scores"),
        ([], "not shown, none was held out"),
    ],
)
def test_held_out_silos_without_a_score_are_named(tmp_path, zero_shot, expected):
    """A model that diverges at a hospital has no score there: the mean is of those where it did not."""
    each = {f"h{k}": {"apple": {"zero_shot": v, "local": 0.6}} for k, v in enumerate(zero_shot)}
    study = changed(
        planted(tmp_path / "run", SIX, BETTER), lambda content: content.update(hold_out=each)
    )
    assert f"an unseen hospital: {expected}" in said(study)


def test_calibration_of_several_measurements_was_measured(tmp_path):
    def measured(content):
        for run in content["runs"]:
            for values in run["per_silo"].values():
                values["evidence"] = {"measurement.a.b.calibration_slope": 1.0}

    study = changed(planted(tmp_path / "run", SIX, BETTER), measured)
    assert (
        "calibration: not shown, each measurement has its own (evidence per hospital)"
        in said(study)
    )
