"""What a study registers is what the report tests: its words, its faults, its conclusions, and every deviation."""

from __future__ import annotations

import json
import math
import re
import tomllib

import numpy as np
import pytest
from scipy import stats
from studies import SIX, checked, make_run, plain
from study_text import study_text

from benchmarks.coverage import difference
from client.protocol.envelope import sign_study
from client.protocol.keys import new_key
from client.protocol.parsed import SiteError
from client.protocol.study import parse_study
from client.studies import study_page
from partitions.common.errors import UserError
from server.cli.main import main
from server.planning.plan import planned_analysis
from server.planning.power import Design, one_hospital
from server.report.checklist import LISTS, known_of
from server.report.head import headline
from server.report.inference import (
    Gain,
    carrier,
    excludes_zero,
    least_error,
    over_hospitals,
    over_patients,
    over_seeds,
    visible_loss,
    widen,
)
from server.report.registered import conclude, gains_of, registered
from server.report.study import StudyResults
from server.results.registration import STUDY, keep_study

ANALYSIS = {
    "method": '"apple"',
    "baseline": '"fedavg"',
    "metric": '"score"',
    "split": '"test"',
    "seeds": "[1, 2]",
    "rounds": "2",
    "smallest-effect": "3",
    "harm-margin": "25.0",
    "estimand": '"hospital"',
}
COUNTS = {f"h{k}": 200 for k in range(1, 7)}
FEDAVG = SIX
APPLE = tuple(v + 0.1 + 0.01 * k for k, v in enumerate(SIX))


def protocol(settings="", **changes):
    """A study's text with these settings and an analysis."""
    text = study_text(metrics='"loss", "score"', runs=12, bytes=10**6)
    text = text.replace("rounds = 9", "rounds = 99").replace(
        "[settings]\n",
        f'[settings]\nstrategy = ["local", "fedavg", "apple"]\nseed = [1, 2]\nrounds = 2\n{settings}\n',
    )
    table = {**ANALYSIS, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return text + "[analysis]\n" + "".join(f"{k} = {v}\n" for k, v in table.items() if v)


def run_of(path, text, fedavg=FEDAVG, apple=APPLE, seeds=(1, 2), **options):
    """A finished run that began with this study; signed."""
    test = {"fedavg": [fedavg] * len(seeds), "apple": [apple] * len(seeds)}
    test |= options.pop("more", {})
    options.setdefault("counts", COUNTS)
    options.setdefault("validation", dict.fromkeys(test, 0.5))
    make_run(path, test, seeds=seeds, **options)
    (path / STUDY).write_text(sign_study(text, new_key()))
    return StudyResults(path)


def words(study):
    return re.sub(r"\s+", " ", checked(study.path).text.replace("\u202f", " "))


# ---------------------------------------------------------------------------------------------------------------------
# The protocol


def test_the_analysis_is_shown_signed_and_summed_with_the_rest():
    study = parse_study(protocol(secondary='["local"]'), "f")
    page = " ".join(study_page(study, "").split())
    assert (
        "apple against fedavg: score on each hospital's test data, mean over hospitals, each counting alike; 2 rounds, "
        "seeds 1, 2; tested at 5 %." in page
    )
    assert (
        "A mean gain from 3 points on is worth having. A hospital that loses more than 25"
        in page
    )
    assert (
        "Secondary, with another 5 % among them: local against fedavg. Everything else" in page
    )
    assert "Nothing ([analysis] is missing)" in " ".join(
        study_page(parse_study(study_text(), "f"), "").split()
    )
    assert parse_study(protocol(harm_margin="9"), "f").digest != study.digest


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"method": '"nope"'}, "method"),
        ({"method": '"fedavg"'}, "name a method twice"),
        (
            {"baseline": '"ditto"'},
            "needs strategy = ditto, and .settings. has strategy = local or fedavg or apple",
        ),
        ({"seeds": "[1, 3]"}, "needs seed = 3, and .settings. has seed = 1 or 2"),
        ({"seeds": "[1, 1]"}, "seeds names one twice"),
        ({"seeds": "[]"}, "seeds"),
        ({"rounds": "3"}, "needs rounds = 3"),
        ({"metric": '"auc"'}, "metrics does not have it"),
        ({"metric": '"score_low"'}, "metric"),
        ({"smallest_effect": "0"}, "smallest-effect"),
        ({"harm_margin": "101"}, "harm-margin is more than 100 points"),
        ({"harm_margin": ""}, "harm-margin"),
        ({"estimand": '"region"'}, "estimand"),
        ({"power": "0.8"}, "power"),
    ],
)
def test_an_analysis_that_no_run_could_have_is_refused(changes, fault):
    with pytest.raises(SiteError, match=rf"^f: .*{fault}"):
        parse_study(protocol(**changes), "f")


def test_a_loss_has_no_points():
    """A gain of 2.5 days is 250 hundredths, and a share cannot gain more than 100 points."""
    changes = {"metric": '"mae"', "smallest_effect": "250", "harm_margin": "400"}
    text = protocol(**changes).replace("metrics = [", 'metrics = ["mae", ')
    analysis = parse_study(text, "f").analysis
    assert analysis
    first, second, *_ = analysis.in_words()
    assert first.startswith("apple against fedavg: mae on")
    assert second == (
        "A mean gain from 250 hundredths on is worth having. A hospital that loses more than 400 hundredths is harmed."
    )


@pytest.mark.parametrize(
    ("limit", "least"), [("runs = 12", "runs = 3"), ("rounds = 99", "rounds = 7")]
)
def test_an_analysis_beyond_the_limits_is_refused(limit, least):
    with pytest.raises(
        SiteError, match=rf"needs \d+ {least.split()[0]}, and .limits. has {least}"
    ):
        parse_study(protocol().replace(limit, least), "f")


def test_a_study_is_registered_before_the_run_or_not_at_all(tmp_path):
    text = protocol()
    keep_study(tmp_path, text)
    keep_study(tmp_path, text)  # resumed
    with pytest.raises(UserError, match="began with another study"):
        keep_study(tmp_path, protocol(rounds="1"))
    late = tmp_path / "late"
    late.mkdir()
    (late / "history.csv").write_text("")
    with pytest.raises(UserError, match="began without a study"):
        keep_study(late, text)


# ---------------------------------------------------------------------------------------------------------------------
# The report


def test_a_registered_gain_is_the_headline(tmp_path):
    study = run_of(tmp_path / "run", protocol())
    text = words(study)
    low, high = (
        f"{100 * end:+.1f}"
        for end in over_hospitals([0.1 + 0.01 * k for k in range(6)]).interval
    )
    assert plain(headline(study)[0]).startswith(
        "APPLE gains over FedAvg, as registered: +12.5 points of accuracy on average over hospitals"
    )
    assert (
        f"APPLE over FedAvg: +12.5 points (95 % interval {low} to {high}). Gain, and worth having"
        in text
    )
    assert "The run has no deviation from it." in text
    assert (
        "none is shown. A loss of more than 25 points is excluded at all 6 hospitals." in text
    )
    assert (
        "Not registered in advance" not in text
        and "All but what was registered is expl" in text
    )
    assert f"SHA-256 {study.registration.study.digest}, signed by SHA256:" in text


@pytest.mark.parametrize("validation", [{"local": 0.5, "fedavg": 0.5, "apple": 0.6}, None])
def test_a_registered_method_was_not_chosen(tmp_path, validation):
    local = {"local": [tuple(v - 0.1 for v in SIX)] * 2}
    text = protocol(baseline='"local"')
    study = run_of(tmp_path / "run", text, more=local, validation=validation)
    assert not re.search("was chosen|chose the method", words(study))


def test_without_an_analysis_nothing_was_registered(tmp_path):
    path = make_run(tmp_path / "run", config={"study": "heart"})
    assert "Not registered in advance (the run has the name of the study heart, not" in words(
        StudyResults(path)
    )
    (path / STUDY).write_text(study_text())
    assert "Not registered in advance (the study heart has no [analysis])" in words(
        StudyResults(path)
    )


def test_every_deviation_is_named(tmp_path):
    local = [tuple(v - 0.1 for v in SIX)] * 2
    study = run_of(
        tmp_path / "run",
        protocol(settings="learning-rate = 0.01", seeds="[1, 2]", rounds="2").replace(
            "participants = 3", "participants = 8"
        ),
        more={"local": local},
        seeds=(1, 3),
        rounds=3,
        apple=(math.nan, *APPLE[1:]),
        config={"learning-rate": 0.2},
    )
    (study.path / STUDY).write_text(
        (study.path / STUDY).read_text().partition("\n[signature]")[0] + "\n"
    )
    found = registered(StudyResults(study.path))
    assert found is not None
    for wanted in (
        "The study is not signed",
        "FedAvg, seed 2, did not finish",
        "APPLE, seed 1, has 3 rounds, not 2",
        "Run in addition: Local",
        "Run in addition: seeds 3",
        "without score for APPLE and FedAvg: h1",
        "6 hospitals took part, at least 8",
        "has learning-rate = 0.01, the run 0.2",
    ):
        assert any(wanted in text for text in found.deviations), (wanted, found.deviations)
    assert f"{len(found.deviations)} deviations from what was registered" in words(
        StudyResults(study.path)
    )
    # The seed that was not registered is not tested: five hospitals are too few
    assert found.primary.conclusion == "not tested" and found.primary.hospitals == 5


def test_a_hospital_without_a_seed_is_a_deviation(tmp_path):
    found = registered(
        run_of(tmp_path / "run", protocol(), more={"apple": [APPLE, (math.nan, *APPLE[1:])]})
    )
    assert found is not None and found.deviations == [
        "Not in the mean of seed 2, without score for APPLE and FedAvg: h1"
    ]


def test_a_registered_gain_that_rests_on_hospitals_seldom_there_is_inconclusive(tmp_path):
    gains = (0.2, 0.21, 0.19, 0.2, 0.01, -0.01, 0.0, -0.02)
    study = run_of(
        tmp_path / "run",
        protocol(rounds="20").replace("rounds = 2\n", "rounds = 20\n"),
        fedavg=(0.6,) * 8,
        apple=tuple(0.6 + gain for gain in gains),
        counts={f"h{k}": 200 for k in range(8)},
        rounds=20,
        away=dict.fromkeys(("h0", "h1", "h2", "h3"), 2),
    )
    why = "only 4 hospitals took part in enough rounds, 6 are needed"
    sentence = headline(study)[0]
    assert f"inconclusive ({why})" in sentence and 'class="not-shown"' in sentence
    assert f"(h0, h1, h2, h3): −0.5 points. Inconclusive: {why}." in words(study)


def test_another_metric_is_tested_from_the_history_or_not_at_all(tmp_path):
    text = protocol(metric='"auc"').replace('metrics = ["loss", "score"]', 'metrics = ["auc"]')
    study = run_of(tmp_path / "run", text)
    found = registered(study)
    assert (
        found is not None and found.primary.conclusion == "not tested" and not found.harm.known
    )
    assert "No hospital has sent auc for APPLE and FedAvg on test data" in found.deviations
    assert "not tested; no hospital has an interval of auc" in words(study)
    for file in (study.path / "history.csv",):
        lines = file.read_text().splitlines()
        rows = [line.replace(",accuracy,", ",loss,") for line in lines if ",accuracy," in line]
        file.write_text("\n".join([*lines, *rows]) + "\n")
    analysis = found.analysis.model_copy(update={"metric": "loss"})
    gains = gains_of(StudyResults(study.path), analysis, "apple")
    assert gains["h1"] == pytest.approx(-0.1)  # a larger loss is no gain


def test_a_registered_harm_is_shown_or_not_excluded(tmp_path):
    apple = (FEDAVG[0] - 0.5, FEDAVG[1] - 0.1, *APPLE[2:])
    found = registered(run_of(tmp_path / "run", protocol(harm_margin="20"), apple=apple))
    assert found is not None
    assert set(found.harm.harmed) == {"h1"} == set(found.harm.lost)
    assert set(found.harm.unclear) == {"h2"}
    text = words(StudyResults(tmp_path / "run"))
    assert (
        "shown at h1 (−50.0), whose intervals lie below −20 points. A loss of more than 20 points is not"
        in text
    )


def test_patients_count_where_they_were_registered(tmp_path):
    counts = {**COUNTS, "h6": 2000}
    study = run_of(tmp_path / "run", protocol(estimand='"patient"'), counts=counts)
    found = registered(study)
    gains = [0.1 + 0.01 * k for k in range(6)]
    assert found is not None
    assert found.primary.gain.mean == pytest.approx(
        np.average(gains, weights=[200] * 5 + [2000])
    )
    assert "on average over patients" in plain(headline(study)[0])


# ---------------------------------------------------------------------------------------------------------------------
# The statistics


@pytest.mark.parametrize(
    ("interval", "wanted"),
    [
        ((0.01, 0.09), "gain"),
        ((0.01, 0.02), "equivalent"),
        ((-0.02, 0.02), "equivalent"),
        ((-0.02, 0.04), "inconclusive"),
        ((-0.04, 0.02), "inconclusive"),
        ((-0.09, -0.01), "loss"),
        ((math.nan, math.nan), "not tested"),
    ],
)
def test_one_interval_concludes(interval, wanted):
    assert conclude(Gain(0.0, interval), 0.03) == wanted


def test_equal_hospitals_make_one_mean_of_patients_and_hospitals():
    """The jackknife's variance of a mean of n equal weights is s² / n, and its degrees of freedom are n - 1."""
    values = [0.1, -0.02, 0.05, 0.0, 0.2, 0.07]
    mine, other = over_patients(values, [50] * 6), over_hospitals(values)
    assert (mine.mean, *mine.interval, mine.p) == pytest.approx(
        (other.mean, *other.interval, other.p)
    )
    assert not over_patients(values[:5], [50] * 5).has_interval
    assert not over_patients(values, [50] * 5 + [0]).has_interval


def simulate(rng, hospitals, mean, spread, sizes, draws):
    """Measured gains (draws, hospitals) of one patient's difference with deviation .6, and the sizes."""
    n = rng.choice(sizes, (draws, hospitals))
    return rng.normal(rng.normal(mean, spread, n.shape), 0.6 / np.sqrt(n)), n


@pytest.mark.parametrize("hospitals", [6, 12])
@pytest.mark.parametrize("spread", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("estimand", ["hospital", "patient"])
def test_the_registered_test_rejects_five_of_a_hundred_and_covers_the_rest(
    hospitals, spread, estimand
):
    """4,000 studies without a gain, hospitals of 20 to 400 test patients: ± .007 at .05. A mean over patients holds the
    truth in .949 to .974.
    """
    draws, low = 4000, 0.035 if estimand == "hospital" else 0.02
    values, sizes = simulate(
        np.random.default_rng(11), hospitals, 0.0, spread, (20, 60, 150, 400), draws
    )
    gains = [
        over_patients(v, n) if estimand == "patient" else over_hospitals(v)
        for v, n in zip(values.tolist(), sizes.tolist(), strict=True)
    ]
    assert low <= np.mean([gain.shown != 0 for gain in gains]) <= 0.065
    # At the edge of the margin, equivalence is claimed in at most 2.5 of 100 studies
    edge = [Gain(g.mean + 0.03, (g.interval[0] + 0.03, g.interval[1] + 0.03)) for g in gains]
    assert np.mean([conclude(gain, 0.03) == "equivalent" for gain in edge]) <= 0.025


@pytest.mark.parametrize(
    ("patients", "margin", "base"),
    [(5, 0.03, 0.9), (20, 0.03, 0.7), (20, 0.01, 0.9), (40, 0.03, 0.96), (100, 0.03, 0.96)],
)
def test_few_patients_that_are_alike_are_not_equivalent(patients, margin, base):
    """The true gain is the margin: the method is right where the baseline is, and on a few of the others. In 4,000
    studies equivalence is claimed in at most .017; without the least error in .04 to .40.
    """
    rng, claimed = np.random.default_rng(0), 0
    for _ in range(1000):
        b = rng.binomial(patients, base, 6)
        a = b + rng.binomial(patients - b, margin / (1 - base))
        gains = [
            difference(*pair, patients) for pair in zip(a / patients, b / patients, strict=True)
        ]
        errors = list(map(least_error, gains))
        gain = over_hospitals([gain.mean for gain in gains], 1, errors)
        claimed += conclude(gain, margin) == "equivalent"
    assert claimed <= 0.025 * 1000


def test_a_method_chosen_by_validation_at_these_hospitals_shares_the_five_percent():
    """Ten methods without a mean gain, whose gains differ by 10 points between twelve hospitals. The best on validation
    data of the same hospitals is claimed to gain three times too often, were the choice not counted.
    """
    rng, draws = np.random.default_rng(1), 1000
    true = rng.normal(0, 0.1, (draws, 10, 12))
    val, test = (true + rng.normal(0, 0.6 / math.sqrt(40), true.shape) for _ in range(2))
    chosen = test[np.arange(draws), val.mean(2).argmax(1)].tolist()
    alone, shared = (np.mean([over_hospitals(v, m).shown > 0 for v in chosen]) for m in (1, 10))
    assert alone > 0.07 and shared <= 0.025


def test_a_visible_loss_is_seen_in_eighty_of_a_hundred_studies():
    """Both models tested on the same patients: the report's interval, which takes them as independent, sees it at least
    so often. A loss half as large is mostly missed.
    """
    for n in (40, 150):
        wide = difference(0.6, 0.6, n)
        loss = visible_loss(wide, 12)
        design = Design(tested=(n,) * 12, spread=0.0)
        assert 0.78 <= one_hospital(design, n, loss, 1000) <= 0.9
        assert one_hospital(design, n, loss / 2, 1000) < 0.2


def test_harm_is_claimed_by_chance_in_few_studies():
    """Twelve hospitals without any loss, 100 patients each: 5 of 100 studies at most name one."""
    rng, claimed = np.random.default_rng(2), 0
    for _ in range(400):
        right = rng.binomial(100, 0.7, (2, 12)) / 100
        gains = [difference(a, b, 100) for a, b in right.T.tolist()]
        claimed += any(excludes_zero(gain, 12) < 0 for gain in gains)
    assert claimed <= 20


def test_a_widened_interval_is_bonferronis():
    low, high = widen(Gain(0.1, (0.0, 0.3)), 12)
    z = stats.norm.ppf(1 - 0.025 / 12) / stats.norm.ppf(0.975)
    assert (low, high) == pytest.approx((0.1 - 0.1 * z, 0.1 + 0.2 * z))
    values = [0.1, 0.2, 0.4]  # seeds, each of a test part without end
    gain = over_seeds({k: Gain(v, (v, v)) for k, v in enumerate(values)})
    for among in (1, 12):
        wanted = stats.t.interval(1 - 0.05 / among, 2, np.mean(values), stats.sem(values))
        assert widen(gain, among) == pytest.approx(wanted)
    assert math.isnan(widen(over_seeds({}), 12)[0])


def test_one_hospital_that_carries_a_mean_is_named(tmp_path):
    others = {f"h{k}": 0.01 * (-1) ** k for k in range(15)}
    assert carrier({"x": 0.82, "y": -0.12, **others}) == "x"
    assert carrier({"x": 0.2, "y": 0.15, **others}) is None
    assert carrier({"x": 0.9, "y": 0.1}) is None
    apple = (0.99, *(v - 0.02 for v in SIX[1:]))
    path = make_run(
        tmp_path / "run",
        {"local": SIX, "apple": apple},
        counts=COUNTS,
        validation={"local": 0.5, "apple": 0.8},
    )
    assert (
        "One hospital carries the average: h1 (+39.0). Without it the average is −2.0 points, and the lowest gain is"
        in words(StudyResults(path))
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tiles, risk and checklists


def test_federating_and_personalising_have_a_tile_each(tmp_path):
    test = {"local": SIX, "fedavg": tuple(v + 0.08 for v in SIX), "apple": APPLE}
    path = make_run(
        tmp_path / "run",
        test,
        counts=COUNTS,
        validation={"local": 0.5, "fedavg": 0.6, "apple": 0.8},
    )
    text = words(StudyResults(path))
    assert re.search(r"Federating: FedAvg over Local ?\+8\.0 points", text)
    assert re.search(r"Personalising: APPLE over FedAvg ?\+4\.5 points", text)
    assert (
        "Federating gains +8.0 points of accuracy on average in 6 hospitals over training alone; pers"
        in text
    )


def test_the_line_of_risk_says_what_protected_the_patients(tmp_path):
    plain_run = words(StudyResults(make_run(tmp_path / "plain")))
    assert (
        "7.2 MB of model vectors left the hospitals in all runs, and no mask hides an update from the server; no "
        "differential privacy; no study; each hospital's policy bounded what left" in plain_run
    )
    masked = {"secure-aggregation": True, "dp": True, "study": "heart"}
    text = words(StudyResults(make_run(tmp_path / "masked", config=masked)))
    assert (
        "under masks, so that the server opens sums alone; differential privacy, of unknown eps"
        in text
    )


def test_the_checklist_is_filled_from_run_and_study_and_names_the_rest(tmp_path):
    study = run_of(tmp_path / "run", protocol())
    assert main(["report", str(study.path), "--checklist"]) == 0
    text = " ".join(
        re.sub(r"<[^>]+>", " ", (study.path / "checklist.html").read_text()).split()
    )
    assert "18d registration apple against fedavg: score" in text
    assert "6a setting, and number of centres 6 hospitals" in text
    assert "18a funding — for the authors" in text
    assert re.search(r"Filled: \d+ of 52\. For the authors: 2, 3a, 3c, 5b", text)
    lists = tomllib.loads(LISTS.read_text())
    assert [len(items) for items in lists.values()] == [52, 37, 14]
    known = {key for items in lists.values() for _, _, key in items if key}
    assert known <= known_of(study).keys()  # no item asks for what is not there


def test_a_draft_takes_the_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = {
        "metric": "accuracy",
        "effect": 0.03,
        "power": 0.84,
        "design": {"seeds": 2, "tested": [60] * 8},
    }
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan/plan.json").write_text(json.dumps(plan))
    new = f"study new study.toml --name trial --sum {'0' * 64} --strategy local,fedavg,apple --seed 1,2 --rounds 3"
    assert main([*new.split(), "--primary", "apple", "--harm", "10", "--plan", "plan"]) == 0
    text = (tmp_path / "study.toml").read_text()
    assert (
        "# Planned: a mean gain of 3 points is shown in 84 of 100 such studies of 8 hospitals."
        in text
    )
    made = parse_study(
        re.sub('(purpose|contact|results|retention) = ""', r'\1 = "x"', text), "f"
    ).analysis
    assert made is not None and made.seeds == (1, 2) and made.metric == "accuracy"
    assert (made.smallest_effect, made.harm_margin, made.secondary) == (3.0, 10.0, ("local",))
    capsys.readouterr()
    again = [*new.split(), "--overwrite", "--primary", "apple"]
    for more, fault in (
        (["--effect", "3"], "--primary, --harm, and --effect or --plan go together"),
        (
            ["--harm", "9", "--effect", "4", "--plan", "plan"],
            "--plan is of a gain of 3 and 2 seeds, not of 4",
        ),
        (["--harm", "9", "--plan", "nowhere"], "nowhere holds no plan"),
    ):
        assert main([*again, *more]) == 2 and fault in capsys.readouterr().err
    plan |= {"metric": "loss", "effect": 0.05}
    (tmp_path / "plan/plan.json").write_text(json.dumps(plan))
    assert (
        "gain of 0.05 of loss (5 hundredths) is" in planned_analysis(tmp_path / "plan")["text"]
    )
