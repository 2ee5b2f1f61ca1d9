"""The answer to "should we federate?" on planted studies: a real gain, none, one harmed hospital, too few of both.

The answer must say what the headline says: both come from one decision.
"""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from studies import BETTER, SIX, changed, checked, conditions, make_run, planted, said

from server.report.head import headline
from server.report.inference import Gain, Z, least_error, over_hospitals, over_patients
from server.report.study import StudyResults
from server.report.verdict import answer, verdict
from server.results.study import TUNING


def test_a_real_gain(tmp_path):
    study = planted(tmp_path / "run", SIX, BETTER)
    text = said(study)
    assert text.startswith(
        "Yes: APPLE gains +20.0 points of accuracy on average over training alone (95 % interval +"
    )
    assert (
        "in 6 hospitals; no hospital's loss is shown, and 80 of 100 studies would show one from 14.8 points (h2) to"
        in text
        and not verdict(study, "apple", "local").harmed
    )
    assert "the worst hospital, h3, reaches 78.0 % (58.0 % alone) of 200 test samples" in text
    assert "an unseen hospital: not shown, none was held out" in text
    assert "calibration: not shown, it was not measured" in text
    assert "cost: 8.4 MB and 2.5 minutes, without differential privacy." in text
    assert text in checked(study.path).text.replace("\u202f", " ")


def test_no_gain(tmp_path):
    text = said(planted(tmp_path / "run", SIX, SIX))
    assert (
        text.startswith("Not yet certain: APPLE has 0.0 points")
        and "interval −2.5 to +2.5" in text
    )


def test_a_loss(tmp_path):
    text = said(planted(tmp_path / "run", BETTER, SIX))
    assert text.startswith("No: APPLE has −20.0 points") and "are shown to lose" in text


def test_one_harmed_hospital(tmp_path):
    """h1 falls from 60 to 30 %, the others rise by 20 points: of eight the mean is unclear, of fourteen it rises."""
    local, apple = (0.60, *SIX, 0.6), (0.30, *BETTER, 0.8)
    study = planted(tmp_path / "run", local, apple)
    assert set(verdict(study, "apple", "local").harmed) == {"h1"}
    text = said(study)
    assert "h1 (−30.0) is shown to lose" in text and "no hospital is shown" not in text
    many = said(planted(tmp_path / "many", (*local, *SIX), (*apple, *BETTER)))
    assert many.startswith(
        "Yes on average, and not for everybody: h1 (−30.0) is shown to lose, while APPLE gains +16.4"
    )
    # Three patients of ten are no evidence of harm
    few = said(planted(tmp_path / "few", local, apple, n=10))
    assert "shown to lose" not in few or "no hospital is shown to lose" in few


def test_harm_without_a_mean_gain(tmp_path):
    study = planted(tmp_path / "run", (0.9, *SIX[:5]), (0.5, *SIX[:5]))
    assert said(study).startswith(
        "No gain is certain, and harm is shown: h1 (−40.0) is shown to lose; APPLE has"
    )


def test_chance_harms_no_hospital(tmp_path):
    """Twelve hospitals, equal models, 100 patients: of 40 studies few name one; without the correction many would."""
    rng = np.random.default_rng(4)
    named = plain = 0
    for k in range(40):
        local, apple = (rng.binomial(100, 0.7, 12) / 100 for _ in range(2))
        study = planted(tmp_path / str(k), tuple(local), tuple(apple), n=100)
        named += bool(verdict(study, "apple", "local").harmed)
        plain += any(study.gain("apple", "local", s).interval[1] < 0 for s in study.silos)
    assert named <= 3 < plain


METHODS = ("fedavg", "fedprox", "ditto", "fedper", "fedala", "fedbn", "apfl", "scaffold")


def test_chance_makes_no_best_of_eight(tmp_path):
    """Eight methods without a mean gain, ten hospitals that gain or lose, no validation data: the best method is the
    one with the most luck. Of forty studies few show a gain; were the choice not counted, many more would.
    """
    rng = np.random.default_rng(8)
    claimed = uncounted = 0
    for k in range(40):
        test = {m: tuple(np.round(rng.normal(0.7, 0.08, 10), 3)) for m in ("local", *METHODS)}
        counts = {f"h{i}": 2000 for i in range(1, 11)}
        study = StudyResults(make_run(tmp_path / str(k), test, counts=counts, validation=None))
        assert study.best is not None
        found = verdict(study, study.best, "local")
        claimed += found.shown > 0
        values = list(study.silo_means(study.best, "local").values())
        uncounted += over_hospitals(values).shown > 0
        assert found.gain == over_hospitals(values, 1 if study.best == "fedavg" else 7)
    assert claimed <= 2 < uncounted


def test_a_gain_that_is_large_is_shown_without_validation_data(tmp_path):
    """Validation data choose at the same hospitals, so that they share its luck: the choice counts either way."""
    test = {"local": SIX, **dict.fromkeys(METHODS, BETTER)}
    counts = {f"h{k}": 200 for k in range(1, 7)}
    assert said(
        StudyResults(make_run(tmp_path / "run", test, counts=counts, validation=None))
    ).startswith("Yes:")
    luck = {
        "local": SIX,
        **dict.fromkeys(METHODS, tuple(v + 0.1 * (-1) ** k for k, v in enumerate(SIX))),
    }
    chosen = StudyResults(
        make_run(tmp_path / "val", luck, counts=counts, validation=dict.fromkeys(luck, 0.6))
    )
    assert [chosen.count_compared(m, "local") for m in ("fedavg", "ditto")] == [1, 7]
    study = StudyResults(make_run(tmp_path / "not", luck, counts=counts, validation=None))
    assert study.count_compared("ditto", "fedavg") == 7


def test_settings_searched_on_another_seeds_split_are_a_condition(tmp_path):
    study = planted(tmp_path / "run", (SIX, SIX), (BETTER, BETTER), seeds=(1, 2))
    assert "tuned on the split" not in conditions(study)
    (study.path / TUNING).write_text(json.dumps({"searches": [{"seed": 1}]}))
    assert study.unsearched == [2] and "tuned on the split of other seeds" in conditions(study)


def test_too_few(tmp_path):
    text = said(planted(tmp_path / "run", (0.5,) * 3, (0.625,) * 3))
    assert text.startswith("Not yet certain: APPLE has +12.5 points")
    assert "in 3 hospitals, an interval needs 6 hospitals" in text


def test_without_training_alone_nothing_is_shown(tmp_path):
    study = StudyResults(
        make_run(tmp_path / "run", {"fedavg": (0.6,) * 3, "apple": (0.7,) * 3})
    )
    assert said(study).startswith("Not shown: training alone (local) was not run beside it")
    assert (
        answer(
            StudyResults(make_run(tmp_path / "alone", {"local": (0.6,) * 3}, validation=None))
        )
        is None
    )


def test_withheld_scores_show_nothing(tmp_path):
    nan = float("nan")
    study = StudyResults(make_run(tmp_path / "run", {"local": (nan,) * 3, "apple": (0.7,) * 3}))
    assert said(study) == "Not shown: no hospital has sent a score of both."


@pytest.mark.parametrize("seed", range(12))
def test_it_never_contradicts_the_headline(tmp_path, seed):
    """Random studies: of few or many hospitals and patients, one seed or three, with gains of any size."""
    rng = np.random.default_rng(seed)
    silos, n, shift = int(rng.integers(2, 10)), int(rng.integers(10, 300)), rng.normal(0, 0.1)
    seeds = (1, 2, 3) if seed % 2 else (1,)
    each = [
        [tuple(np.clip(rng.normal(0.6 + move, 0.1, silos), 0.05, 0.95).tolist()) for _ in seeds]
        for move in (0, shift)
    ]
    local, apple = (side if len(seeds) > 1 else side[0] for side in each)
    study = planted(tmp_path / "run", local, apple, n=n, seeds=seeds)
    word, text = re.sub(r"<[^>]+>", "", headline(study)[0]), said(study)
    if "not yet certain" in word:
        assert text.startswith(("Not yet certain", "No gain is certain"))
    elif " gains " in word:
        assert text.startswith("Yes")
    else:
        assert " loses " in word and text.startswith("No:")


def test_an_unseen_hospital(tmp_path):
    def hold_out(gains):
        values = {
            f"h{k}": {
                "apple": {
                    "zero_shot": 0.6 + g,
                    "personalised": 0.7,
                    "local": 0.6,
                    "all_in": None,
                }
            }
            for k, g in enumerate(gains)
        }
        return lambda content: content.update({"hold_out": values})

    study = planted(tmp_path / "run", SIX, BETTER)
    text = said(changed(study, hold_out([0.1, 0.12, 0.09, 0.11, 0.1, 0.1])))
    assert "an unseen hospital: a gain is shown (70.3 % as it comes, 60.0 % alone)" in text
    assert "a loss is shown (49.8 %" in said(
        changed(study, hold_out([-0.1, -0.12, -0.09, -0.11, -0.1, -0.09]))
    )
    equal = said(changed(study, hold_out([1e-5] * 5 + [2e-5])))
    assert (
        "an unseen hospital: no difference is shown (60.0 % as it comes, 60.0 % alone)" in equal
    )
    few = said(changed(study, hold_out([0.1, 0.1])))
    assert (
        "no difference is shown (70.0 % as it comes, 60.0 % alone, 2 hospitals held out, at least 6 needed)"
        in few
    )
    missing = changed(
        study,
        lambda content: content.update({"hold_out": {"h1": {"apple": {"zero_shot": None}}}}),
    )
    assert "not shown, 1 hospital held out, none with both scores" in said(missing)


def test_calibration(tmp_path):
    def scores(gains):
        def change(content):
            for run in content["runs"]:
                for silo, gain in zip(run["per_silo"].values(), gains, strict=False):
                    silo["brier"] = 0.2 - (gain if run["strategy"] == "apple" else 0)

        return change

    study = planted(tmp_path / "run", SIX, BETTER)
    better = said(changed(study, scores([0.05, 0.06, 0.04, 0.05, 0.05, 0.05])))
    assert "calibration: better (Brier score 0.150, 0.200 alone)" in better
    # Certain, and nothing that a reader can see
    equal = said(changed(study, scores([-1e-5] * 5 + [-2e-5])))
    assert "calibration: no difference is shown (Brier score 0.200, 0.200 alone)" in equal
    assert "calibration: worse" in said(
        changed(study, scores([-0.05, -0.06, -0.04, -0.05, -0.05, -0.05]))
    )
    assert "calibration: no difference is shown" in said(
        changed(study, scores([0.3, -0.3, 0.1, -0.1, 0.05, -0.05]))
    )


def test_privacy(tmp_path):
    def spent(*values):
        def change(content):
            for run in content["runs"]:
                for silo, epsilon in zip(run["per_silo"].values(), values * 6, strict=False):
                    silo["epsilon"] = epsilon

        return change

    study = planted(tmp_path / "run", SIX, BETTER, config={"dp": True})
    assert "with differential privacy, whose epsilon not every hospital has sent." in said(
        study
    )
    assert "with epsilon at most 3.5." in said(changed(study, spent(2.0, 3.5)))
    table = planted(tmp_path / "table", SIX, BETTER, config={"normalization": "none"})
    for dp in (False, True):
        table.config["dp"] = dp
        none = "; no table's columns were standardised (normalization = none), also in training alone, "
        assert (none in conditions(table)) is dp


def test_the_condition(tmp_path):
    study = planted(tmp_path / "run", SIX, BETTER)
    assert conditions(study) == (
        "Drawn from 6 hospitals, each tested on its own samples; the hospitals' own data; 2 rounds; 1 seed."
    )
    test = dict.fromkeys(("local", "fedavg", "apple", "pooled"), (0.5,) * 3)
    study = StudyResults(
        make_run(tmp_path / "pooled", test, validation=dict.fromkeys(test, 0.5))
    )
    assert conditions(study).endswith(
        "chosen among 2 on validation data."
    )  # pooled is no candidate


def test_intervals_of_hospitals_are_statsmodels():
    """``DescrStatsW([.1, .2, .05, .15, .3, -.1]).tconfint_mean()`` of statsmodels 0.15.0."""
    values = [0.1, 0.2, 0.05, 0.15, 0.3, -0.1]
    found = over_hospitals(values)
    assert found.interval == pytest.approx(
        (-0.026713537787432726, 0.2600468711207661), abs=1e-9
    )
    assert found.p == pytest.approx(0.09070960218611414, abs=1e-9)  # ``ttest_mean(0)[1]``
    assert (
        not found.shown
        and not over_hospitals([0.1] * 5).shown
        and over_hospitals([0.1, 0.2] * 3).shown == 1
    )


def test_a_zero_spread_is_not_certain(tmp_path):
    """One more of ten patients is right at each of six hospitals: the error is half of the independent tests', and of
    hospitals whose patients are not known nothing is tested.
    """
    for values in ([0.0] * 6, [0.1] * 6):
        assert not over_hospitals(values).has_interval
        assert not over_patients(values, [10] * 6).has_interval
    one = Gain(0.1, (0.1 - 2 * Z, 0.1 + 2 * Z), n_seeds=4)
    assert least_error(one) == pytest.approx(0.5)
    assert least_error(Gain(0.1, (math.nan, math.nan))) == 0
    errors = [0.5] * 6
    half = stats.t.ppf(0.975, 5) * 0.5 / math.sqrt(6)
    for gain in (
        over_hospitals([0.1] * 6, 1, errors),
        over_patients([0.1] * 6, [10] * 6, 1, errors),
    ):
        assert gain.interval == pytest.approx((0.1 - half, 0.1 + half))
    tenth = {"local": (0.5,) * 6, "apple": (0.6,) * 6}
    path = make_run(tmp_path / "run", tenth, counts={f"h{k}": 10 for k in range(6)})
    # By the signs of six differences alone, 2 / 64
    assert StudyResults(path).mean_gain("apple", "local").p > 2 / 64


def test_several_methods_share_five_per_cent():
    """``DescrStatsW(...).tconfint_mean(0.05 / 4)`` is as wide."""
    values = [0.1, 0.2, 0.05, 0.15, 0.3, -0.1]
    one, four = over_hospitals(values), over_hospitals(values, 4)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 4)
    assert four.interval == pytest.approx((low, high), abs=1e-9) and four.p == pytest.approx(
        4 * one.p
    )


def test_evidence_stands_in_its_section_and_under_what_left(tmp_path):
    """Brier of the method and, below it, of training alone; sets; subgroups; what a silo has not sent is a dash."""

    def change(content):
        for run in content["runs"]:
            first = run["per_silo"]["h1"]
            first |= {
                "brier": 0.125,
                "calibration_slope": -0.5,
                "calibration_in_the_large": 0.1,
                "ece": 0.05,
            }
            first["evidence"] = {
                "reliability": [50.0, 0.2, 0.25, 50.0, 0.8, 0.7],
                "conformal": [100.0, 0.8],
                "conformal_sets": [100.0, 0.9, 1.2, 0.9, 1.2, 0.91, 1.25],
                "subgroup.sex <f>": [120.0, 0.8, 0.7, 0.9],
            }

    document = checked(changed(planted(tmp_path / "run", SIX, BETTER), change).path)
    assert "h10.1250.125−0.50−0.500.100.100.0500.05091 %, 1.2591 %, 1.25" in document.text
    assert "sex <f>" in document.text and "12080.070–90" in document.text
    assert (
        "Once, at the end, evidence: brier, calibration_in_the_large, calibration_slope, conformal"
        in document.text
    )
    assert (
        "Evidence per hospital"
        not in checked(planted(tmp_path / "none", SIX, BETTER).path).text
    )
