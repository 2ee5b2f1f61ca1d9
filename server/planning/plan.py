"""The plan of a study, as numbers, text and page: power, what can be seen, and what it would take to see more."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

from partitions.common.errors import UserError
from partitions.common.files import make_folder, write_atomically
from server.planning.power import (
    POWERS,
    Design,
    detectable_gain,
    detectable_harm,
    needed,
    power,
)
from server.report.canvas import BLUE, MUTED, SETTINGS, Canvas, chart, in_widths
from server.report.html import format_number, hospitals_of, report_environment
from server.report.inference import EXACT
from server.report.study import StudyResults
from server.results.survey import read_survey

# Standard deviations of hospitals' true gains, in shares: assumed, as in docs/uncertainty.md
SPREADS = {"low": 0.01, "middle": 0.03, "high": 0.10}
LEAST_TESTED = 5
CURVE_POINTS = 13
ACCURACY = "accuracy"


@dataclass(frozen=True)
class StudyPlan:
    """What a design can find out; gains and losses are in the units of the score, None where nothing shows them."""

    metric: str
    design: Design
    effect: float  # the smallest mean gain worth having
    power: float  # share of studies that show it
    claimed: float  # share of studies without any gain in which one is shown
    gains: dict[str, float | None]  # power -> the mean gain that is shown so often
    harms: dict[
        int, float | None
    ]  # a hospital's test patients -> its loss that is shown in .8 of studies
    more: dict[str, dict[str, int | None]]  # power -> hospitals, times as many patients, seeds
    curve: list[tuple[float, float]]  # mean gain, power

    @property
    def answer(self) -> str:
        """Return ``answerable``, ``weak`` (below .8) or ``not answerable`` (no interval)."""
        if not self.design.is_answerable:
            return "not answerable"
        return "answerable" if self.power >= min(POWERS) else "weak"


def make_plan(metric: str, design: Design, effect: float) -> StudyPlan:
    """Simulate a design's studies; the same design has the same numbers."""
    most = max(2 * effect, 1e-6)
    sizes = sorted(
        {min(design.tested), statistics.median_low(design.tested), max(design.tested)}
    )
    return StudyPlan(
        metric,
        design,
        effect,
        power(design, effect),
        power(design, 0.0),
        {f"{p:g}": detectable_gain(design, p) for p in POWERS},
        {n: detectable_harm(design, n, min(POWERS)) for n in sizes},
        {f"{p:g}": needed(design, effect, p) for p in POWERS},
        [
            (gain, power(design, gain))
            for gain in (most * i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS))
        ],
    )


def patients_tested(patients: Sequence[int], share: float) -> tuple[int, ...]:
    """Return the test patients of hospitals with these patients. Raises UserError if a hospital has too few."""
    tested = tuple(round(share * n) for n in patients)
    if min(tested, default=0) < LEAST_TESTED:
        raise UserError(
            f"a hospital of {min(patients, default=0)} patients has {min(tested, default=0)} test patients with "
            f"--test-share {share:g}; at least {LEAST_TESTED} are needed to measure a score"
        )
    return tested


def surveyed_sizes(folder: Path) -> list[int]:
    """Return the patients of each hospital of a survey. Raises DataError without one, UserError for sums."""
    survey = read_survey(folder)
    if survey.summed:
        raise UserError(
            f"{folder} has sums over hospitals, not each one's patients: use --sizes"
        )
    return [answer["n"] for _, answer in sorted(survey.answers.items())]


@dataclass(frozen=True)
class Pilot:
    """What a pilot run measured: each hospital's test patients, its gains' spread, and the baseline's mean score."""

    tested: tuple[int, ...]
    spread: float
    base: float


def read_pilot(folder: Path, method: str, base: str) -> Pilot:
    """Return what two methods of a run measured. Raises UserError without both, two hospitals' gains, or accuracies.

    The spread is the standard deviation of the measured gains: it includes the error of the pilot's own test
    patients, so the plan does not promise too much.
    """
    study = StudyResults(folder)
    if missing := [name for name in (method, base) if name not in study.methods]:
        raise UserError(f"{folder} has no {missing[0]}: {', '.join(study.methods)}")
    if study.task.score != ACCURACY:
        raise UserError(
            f"{folder} has scores of another kind, {study.task.score_label}: give --sizes and --metric"
        )
    gains = study.silo_means(method, base)
    if len(gains) < 2:
        raise UserError(
            f"{folder} has scores of {method} and {base} from fewer than two hospitals"
        )
    tested = tuple(max(study.sizes(silo, "n_test")) for silo in sorted(gains))
    scores = [study.score(base, silo).mean for silo in gains]
    return Pilot(tested, statistics.stdev(gains.values()), statistics.fmean(scores))


def plan_values(plan: StudyPlan) -> dict[str, Any]:
    """Return what the templates of text and page use."""
    of_accuracy = plan.metric == ACCURACY

    def amount(value: float | None) -> str:
        if value is None or math.isnan(value):
            return "–"
        if of_accuracy:
            return f"{100 * value:.1f} points"
        return format_number(value, 3, zeros=False) if abs(value) > EXACT else "0"

    return {"plan": plan, "amount": amount, "of_accuracy": of_accuracy, "powers": POWERS}


def plan_text(plan: StudyPlan) -> list[str]:
    """Return the plan as lines for a terminal."""
    template = report_environment().get_template("planning/plan.txt")
    return template.render(**plan_values(plan)).splitlines()


def plan_page(plan: StudyPlan) -> str:
    """Return the plan as an HTML page with its figure."""
    template = report_environment().get_template("planning/plan.html")
    with matplotlib.rc_context(SETTINGS):
        return template.render(**plan_values(plan), charts=in_widths(power_curve, plan))


@chart
def power_curve(plan: StudyPlan, width: float) -> str:
    """Draw power against mean gain."""
    c = Canvas(width, 300, (56, 24, 12, 44))
    scale = 100 if plan.metric == ACCURACY else 1
    x, y = zip(*plan.curve, strict=True)
    c.axes.axhline(min(POWERS), color=MUTED, linewidth=1)
    c.axes.axvline(scale * plan.effect, color=MUTED, linewidth=1)
    c.axes.plot([scale * gain for gain in x], y, color=BLUE, linewidth=2.0, marker="o")
    c.axes.set_ylim(0, 1.02)
    unit = "percentage points" if scale == 100 else plan.metric
    c.finish_lines(f"true mean gain, {unit}", rounds=False)
    return c.svg(
        f"power{width:.0f}", "Share of studies that show the gain, by the true mean gain"
    )


def write_plan(plan: StudyPlan, folder: Path) -> None:
    """Write ``plan.json`` and ``plan.html`` into a new folder. Raises UserError if it exists."""
    if folder.exists():
        raise UserError(f"{folder} exists; name a new folder with --out")
    make_folder(folder)
    write_atomically(folder / "plan.json", plan_json(plan))
    write_atomically(folder / "plan.html", plan_page(plan))


def plan_json(plan: StudyPlan) -> str:
    """Return the plan as JSON."""
    return json.dumps({**asdict(plan), "answer": plan.answer}, indent=1) + "\n"


def planned_analysis(folder: Path) -> dict[str, Any]:
    """Return what a plan's ``plan.json`` says for a study's [analysis]. Raises UserError if it cannot be read.

    ``metric``, ``effect`` in hundredths of it, ``seeds``, and ``text``, the plan in a sentence.
    """
    try:
        plan = json.loads((folder / "plan.json").read_text("utf-8"))
        design, effect = plan["design"], round(100 * float(plan["effect"]), 6)
        metric = str(plan["metric"])
        # A study's file has hundredths of any metric; points are those of a share
        gain = f"{effect / 100:g} of {metric} ({effect:g} hundredths)"
        if metric == ACCURACY:
            gain = f"{effect:g} points"
        return {
            "metric": metric,
            "effect": effect,
            "seeds": int(design["seeds"]),
            "text": f"Planned: a mean gain of {gain} is shown in {100 * plan['power']:.0f} of 100 such "
            f"studies of {hospitals_of(len(design['tested']))}.",
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} holds no plan ({type(error).__name__}): silofl plan --out makes one"
        ) from None
