"""ComBat harmonisation of a survey: ``combat.toml``, and the report on it in ``survey.json``.

No file holds the original sums. But ``combat.toml`` holds the parameters with all digits, from which a hospital's mean
and deviation follow (docs/attacks.md). The means in ``survey.json`` have four digits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from models.survey.combat import Combat, Fit, Sums, combat
from partitions.common.errors import DataError
from partitions.recipes.combat import Harmonised
from partitions.recipes.harmonisation import Harmonisation
from partitions.schema import few
from strategies.base.schema.combat import KEY, sums_in
from strategies.base.schema.survey import Answer

ABOUT = (
    "How the columns of each hospital are harmonised (ComBat), from silofl survey --harmonize. A hospital needs the",
    "columns and its own [[silos]]: silofl import FILE.csv --recipe R.toml --harmonize THIS --silo NAME --out NEW.npz",
    "It removes what differs between hospitals in mean and spread, also where the patients differ, but for covariates.",
    "It tells each hospital's mean and deviation, less what covariates explain. Of two hospitals each can work out the",
    "other's exactly; of more, those of the others together. Leaving out other [[silos]] does not change that.",
)
Report = dict[str, Any]


def harmonise(answers: Mapping[str, Answer], shrink: bool) -> tuple[Harmonisation | None, Report]:
    """Return the content of ``combat.toml`` (None: nothing is harmonised) and the report for ``survey.json``.

    The report has ``means``: by column and silo, before and after, rounded; ``without``: silos that take no part;
    ``columns`` and ``cells``: those left out. Each omission has its reason.
    """
    parts = {silo: answer[KEY] for silo, answer in answers.items() if KEY in answer}
    without = {silo: part["refused"] for silo, part in parts.items() if part["refused"]}
    given = {silo: part for silo, part in parts.items() if silo not in without}
    terms = Counter(tuple(part["covariates"]) for part in given.values()).most_common(1)
    covariates = terms[0][0] if terms else ()
    for silo in [silo for silo, part in given.items() if tuple(part["covariates"]) != covariates]:
        own = few(given.pop(silo)["covariates"]) or "none"
        without[silo] = f"its covariates are {own}, those of the others {few(covariates) or 'none'}"
    report: Report = {"without": without, "columns": {}, "means": {}}
    report["cells"] = [cell(silo, name, why) for silo, p in given.items() for name, why in p["withheld"].items()]
    sums: dict[str, dict[str, Sums]] = {}
    for silo, part in given.items():
        for name, found in sums_in(part).items():
            if why := misfit(found, usual_range(answers, name)):
                report["cells"].append(cell(silo, name, why))
            else:
                sums.setdefault(name, {})[silo] = found
    try:
        made = combat(sums, shrink)
    except DataError as error:
        return None, report | {"fault": str(error) or "no hospital gave sums"}
    report["without"], report["columns"] = without | dict(made.silos), dict(made.columns)
    report["cells"] += [cell(silo, name, why) for (silo, name), why in made.cells.items()]
    silos = {silo: [entry(name, made, silo) for name in sorted(own)] for silo, own in made.used.items()}
    for silo, columns in silos.items():
        for column in columns:
            before = sums[column.name][silo]
            after = mean_after(column, made.fits[column.name], before, silo)
            report["means"].setdefault(column.name, {})[silo] = [rounded(before.mean), rounded(after)]
    return Harmonisation(tuple(covariates), silos), report


def usual_range(answers: Mapping[str, Answer], name: str) -> tuple[float, float] | None:
    """Return the range that most hospitals declare for a column; None if no hospital does."""
    stated = Counter(tuple(own["range"]) for a in answers.values() if "range" in (own := a["columns"].get(name, {})))
    return stated.most_common(1)[0][0] if stated else None


def misfit(sums: Sums, range_: tuple[float, float] | None) -> str:
    """Return why a hospital's sums cannot come from values within the range; empty if they can."""
    low, high = range_ or (-math.inf, math.inf)
    slack = 1e-6 * (high - low)
    far = range_ is not None and sums.square > sums.n * (high - low + slack) ** 2
    if low - slack <= sums.mean <= high + slack and not far:
        return ""
    return f"its sums are of values outside of the range {low:g}..{high:g}, which its data file cannot hold"


def cell(silo: str, column: str, why: str) -> dict[str, str]:
    """Return the entry for a hospital's column that is not harmonised."""
    return {"silo": silo, "column": column, "why": why}


def entry(name: str, found: Combat, silo: str) -> Harmonised:
    """Return one hospital's harmonisation parameters for a column."""
    fit, place = found.fits[name], found.used[silo][name]
    return Harmonised(name, fit.alpha, tuple(map(float, fit.beta)), fit.sigma, place.gamma, place.delta)


def mean_after(own: Harmonised, fit: Fit, sums: Sums, silo: str) -> float:
    """Return the mean of a hospital's column after harmonisation."""
    left = (fit.places[silo].gamma - own.gamma) / own.delta**0.5
    return float(own.alpha + sums.x @ fit.beta + left * own.sigma)


def rounded(mean: float) -> float:
    """Round to four digits: a hospital's exact mean times its number of rows would reveal its sum."""
    return float(f"{mean:.4g}")


def combat_text(report: Report) -> Iterator[str]:
    """Yield the report for a terminal: one line for each column, and for each omission."""
    for name, means in report["means"].items():
        each = ", ".join(f"{silo} {before:.4g} > {after:.4g}" for silo, (before, after) in means.items())
        yield f"harmonised {name}: means {each}"
    if fault := report.get("fault"):
        yield f"nothing is harmonised: {fault}"
    yield from (f"{silo}: not harmonised: {why}" for silo, why in report["without"].items())
    yield from (f"{name}: not harmonised: {why}" for name, why in report["columns"].items())
    yield from (f"{own['silo']}, {own['column']}: not harmonised: {own['why']}" for own in report["cells"])
