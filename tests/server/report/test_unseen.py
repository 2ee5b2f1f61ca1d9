"""The report's section on hospitals that did not train, and its words on hospitals that joined late."""

from __future__ import annotations

import html
import re

import pytest
from studies import BETTER, SIX, changed, checked, conditions, planted

from server.report.sections.silos import unseen_section
from server.report.verdict import answer


def scores(zero_shot, personalised=0.8):
    return {"zero_shot": zero_shot, "personalised": personalised, "local": 0.6, "all_in": 0.9}


def text_of(study):
    page = (
        str(unseen_section(study))
        .replace("</td>", " ")
        .replace("</th>", " ")
        .replace("<small>", " ")
    )
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", page)))


def with_held_out(path, *each):
    study = planted(path, SIX, BETTER)
    held = {f"h{k}": {"apple": values} for k, values in enumerate(each, start=1)}
    return changed(study, lambda summary: summary.update(hold_out=held))


def test_six_hospitals_have_an_interval(tmp_path):
    """Differences 0.10, 0.12, ..., 0.20: mean 0.15, Student's half width 2.571 * 0.03742 / sqrt(6) = 0.0393."""
    study = with_held_out(tmp_path / "run", *(scores(0.70 + 0.02 * k) for k in range(6)))
    text = text_of(study)
    assert (
        "6 hospitals held out of the training" in text
        and "Below a difference is its 95 % interval over hospitals" in text
    )
    assert "APPLE 75.0 80.0 60.0 90.0 +15.0 +11.1 to +18.9 +20.0 not shown 70.0" in text
    assert "h3 APPLE 74.0 80.0 60.0 90.0" in text
    assert "Hospitals that did not train" in checked(study.path).text


def test_too_few_are_not_shown(tmp_path):
    text = text_of(with_held_out(tmp_path / "run", scores(0.7), scores(0.9)))
    assert "APPLE 80.0 80.0 60.0 90.0 +20.0 not shown +20.0 not shown 70.0" in text
    assert "No interval is shown: 2 hospitals held out, at least 6 needed." in text


def test_what_is_withheld_makes_no_mean(tmp_path):
    """One silo's score is not known: neither the mean nor the worst is made of the others."""
    study = with_held_out(tmp_path / "run", scores(None), scores(0.9))
    assert (
        "APPLE – 80.0 60.0 90.0 +30.0 not shown, 1 of 2 hospitals +20.0 not shown –"
        in text_of(study)
    )


def test_a_run_without_any_has_no_section(tmp_path):
    assert not unseen_section(planted(tmp_path / "run", SIX, BETTER))


def test_a_run_that_holds_out_itself_shows_what_it_has(tmp_path):
    """``role: held-out`` in a federation: the run's entry has the scores, and nobody trained alone there."""

    def change(summary):
        for run in summary["runs"]:
            run["hold_out"] = {
                "h9": {
                    "n_test": 50,
                    "zero_shot": {"accuracy": 0.7},
                    "personalised": {"accuracy": 0.8},
                }
            }

    study = changed(planted(tmp_path / "run", SIX, BETTER), change)
    assert "APPLE 70.0 80.0 – – – – 70.0" in text_of(study)
    found = answer(study)
    assert (
        found
        and "an unseen hospital: not shown, 1 hospital held out, none with both scores"
        in found.sentence
    )


@pytest.mark.parametrize("late", [{}, {"h2": 4}])
def test_a_late_joiner_is_named_beside_the_gains(tmp_path, late):
    def change(summary):
        for run in summary["runs"]:
            run.update({"joined": late} if late else {})

    study = changed(planted(tmp_path / "run", SIX, BETTER), change)
    text = checked(study.path).text
    assert ("h2 joined late: it took part from round 4 on (Local, APPLE)" in text) is bool(late)
    assert ("h2 joined late" in conditions(study)) is bool(late)
