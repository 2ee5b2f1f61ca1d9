"""Studies of which a part is missing: the report says of how many silos, seeds and rounds its numbers are."""

from __future__ import annotations

import json
import math

import pytest
from studies import BETTER, SIX, changed, checked, conditions, make_run, plain, planted, said

from server.report.checklist import known_of
from server.report.head import headline
from server.report.sections.methods import tuning_section
from server.report.sections.privacy import privacy_rows
from server.report.study import StudyResults
from server.report.write import silo_table
from server.results.history import History, Row
from server.results.study import TUNING

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
            [0.69, 0.71] * 3 + [None, None],
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


GONE = (NONE,) * 3
ONE_SEED = {
    "local": [(0.6, 0.3, 0.3)] * 3,
    "fedavg": [(0.8,) * 3, (0.5,) * 3, (0.5,) * 3],
    "apple": [(0.7,) * 3, GONE, GONE],
}


@pytest.mark.parametrize(
    ("test", "seeds", "best", "partial"),
    [
        (
            {
                "local": (0.9, 0.9, 0.3),
                "fedavg": (0.88, 0.88, NONE),
                "apple": (0.92, 0.92, 0.35),
            },
            (42,),
            "apple",
            ("FedAvg", "88.0", "2 of 3 hospitals"),
        ),
        (ONE_SEED, (1, 2, 3), "fedavg", ("APPLE", "70.0", "1 of 3 seeds")),
    ],
)
def test_no_method_is_best_for_want_of_a_weak_hospital_or_seed(
    tmp_path, test, seeds, best, partial
):
    study = StudyResults(make_run(tmp_path / "run", test, seeds=seeds, validation=None))
    method, mean, part = partial
    assert study.best == best and f"{mean}{part}" in checked(study.path).text
    assert f"\n{method}: the mean is over {part}" in silo_table(study)


def test_a_mean_is_over_the_methods_own_hospitals(tmp_path):
    test = {"fedavg": (0.6, 0.6, NONE), "ditto": (0.5,) * 3}
    study = StudyResults(make_run(tmp_path / "run", test, validation=None))
    assert "60.0 % mean accuracy over 2 hospitals" in plain(headline(study)[0])


def test_a_method_without_a_score_is_not_chosen(tmp_path):
    """An R² may be far below -1."""
    test = {"local": (0.5,) * 3, "apple": GONE, "fedavg": (0.5,) * 3}
    validation = {"local": 0.1, "apple": 0.5, "fedavg": -1.4}
    assert (
        StudyResults(make_run(tmp_path / "run", test, validation=validation)).best == "fedavg"
    )


@pytest.mark.parametrize(
    ("local", "lead", "without"),
    [
        ((0.5, NONE, NONE), "No hospital has a score with both APPLE and Local.", "a"),
        (
            (NONE, NONE, 0.3),
            "Both scores are known of 1 of 3 hospitals; none of these scores lower with APPLE",
            "a",
        ),
    ],
)
def test_hospitals_without_both_scores_are_in_no_sentence(tmp_path, local, lead, without):
    test = {"local": local, "apple": (NONE, 0.5, 0.4)}
    study = StudyResults(make_run(tmp_path / "run", test, validation=None))
    assert lead in checked(study.path).text
    assert known_of(study)["flow"].endswith(f"without a score: {without}")
    assert "in % on test data, at the last round\n" in silo_table(study)


def test_only_a_simulation_divides_the_data_by_the_seed(tmp_path):
    study = planted(tmp_path / "run", (SIX,) * 2, (BETTER,) * 2, seeds=(1, 2))
    assert "splits the data" not in checked(study.path).text
    (study.path / "checkpoint/apple-1/silos").mkdir(parents=True)
    assert "each seed splits the data anew" in checked(study.path).text


def test_rounds_of_a_search_are_counted(tmp_path):
    """The same numbers of rounds, in other searches."""
    study = StudyResults(make_run(tmp_path / "run"))
    names = ("fedavg", "apple")

    def search(*rounds):
        counts = dict.fromkeys(("complete", "pruned", "failed", "bytes", "seconds"), 1)
        asked = {"strategies": names, "trials": 1, "sampler": "random", "objective": "mean"}
        return {
            "seed": 1,
            "asked": {**asked, "settings": {}, "space": {}},
            "cost": {m: {**counts, "rounds": n} for m, n in zip(names, rounds, strict=True)},
            "best": {m: {"score": 0.5, "values": {}} for m in names},
            "privacy": {},
        }

    searches = [search(200, 200), search(200, 110), search(110, 110)]
    (study.path / TUNING).write_text(json.dumps({"searches": searches}))
    assert "number of trials. Their rounds differ" in plain(tuning_section(study))


@pytest.mark.parametrize(
    ("local", "apple", "expected"),
    [
        # The seed that only APPLE has is the easier one
        ((0.2, None), (0.2, 0.1), "no difference is shown (Brier score 0.200, 0.200 alone)"),
        # A mean of signed differences would be 0
        ((0.1, 0.1), (0.5, -0.5), "worse (Brier score 0.500, 0.100 alone)"),
    ],
)
def test_calibration_is_compared_seed_by_seed(tmp_path, local, apple, expected):
    def measured(content):
        for run in content["runs"]:
            each = local if run["strategy"] == "local" else apple
            value = each[run["seed"] - 1]
            for place, values in enumerate(run["per_silo"].values()):  # which differ a little
                values["brier"] = value and value * (1 + (place - 2.5) / 1000)

    study = planted(tmp_path / "run", (SIX,) * 2, (BETTER,) * 2, seeds=(1, 2))
    assert f"calibration: {expected}" in said(changed(study, measured))
