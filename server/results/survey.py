"""Results of a survey of the silos' data: its files, and what is odd in one hospital.

A hospital is compared with the median of the others, so at least two others are needed. Hospitals differ: a finding is
a reason to check, and nothing is corrected. The thresholds are constants here.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from models.evidence.pooled import CURVE, WITHHELD
from models.evidence.survey import BINS, MISSING
from partitions.common.errors import DataError
from partitions.common.files import write_atomically
from partitions.common.names import Names, guard_formula
from server.results.history import csv_text
from server.results.survival import Curve, LogRank, kaplan_meier, log_rank, survival_rows
from server.results.units import conversion, known_ratio
from strategies.base.survey import PARTS, Answer

OTHERS = 2  # minimum number of other hospitals to compare with
RATIO = 2.0  # ratio of means, in either direction, from which a different unit is likely
LIKE = 1.6  # a constant factor scales mean and deviation equally, within this tolerance factor
FAR = 3.0  # distance of a shifted mean from the others', in standard deviations
ALMOST_ALL, FEW = 0.95, 0.5  # shares of missing values: at this hospital, and at the others
COMMON = 0.2  # minimum share at the others of a category that one hospital lacks
# Total variation between shares of categories: as they are, and with two exchanged
APART, ALIKE = 0.5, 0.2
MOST_EXCHANGED = 30  # maximum number of categories for which exchanges are tried
EDGE = 0.9  # share of values in the first or last cell of a range


class Finding(NamedTuple):
    """One anomaly. ``what``: the reason; ``look``: the line of the recipe or schema mapping to check."""

    silo: str
    column: str
    kind: str
    what: str
    look: str


def findings(
    answers: Mapping[str, Mapping[str, Any]], without: Mapping[str, str]
) -> list[Finding]:
    """Return all findings: first silos without a survey, then column by column."""
    every = [Finding(silo, "", "no survey", why, "") for silo, why in without.items()]
    for name, items in _columns(answers):
        every += _find_lacking(name, items, answers) if len(items) < len(answers) else []
        seen = [*_compare(name, items)]
        # Beside a hospital in another unit, two that agree seem shifted from the median of both
        if odd := tuple(of.silo for of in seen if of.kind == "unit"):
            seen = [of for of in seen if of.kind != "shift"]
            seen += [of for of in _compare(name, items, odd) if of.kind == "shift"]
        every += seen
    return every


def _columns(answers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each column's and label's name, with the patients and the values of the silos that have it."""
    for part in ("columns", "labels"):
        for name in dict.fromkeys(name for answer in answers.values() for name in answer[part]):
            yield (
                name,
                {
                    silo: (answer["n"], answer[part][name])
                    for silo, answer in answers.items()
                    if name in answer[part]
                },
            )


def _compare(name: str, items: Mapping[str, Any], odd: Names = ()) -> Iterator[Finding]:
    """Yield at most one finding for each silo's column, against those of the others without the odd ones."""
    for silo, texts in _comparisons(name, items, odd):
        for of_column in itertools.islice(filter(None, texts), 1):
            yield Finding(silo, name, *of_column)


Texts = tuple[str, str, str]


def _comparisons(
    name: str, items: Mapping[str, Any], odd: Names = ()
) -> Iterator[tuple[str, Iterator[Texts | None]]]:
    """Yield each silo whose column has enough others, with :func:`_of_column`."""
    for silo, (n, item) in items.items():
        others = [other for this, other in items.items() if this not in (silo, *odd)]
        if len(others) >= OTHERS:
            yield silo, _of_column(name, n, item, others)


def _find_lacking(
    name: str, items: Mapping[str, Any], answers: Mapping[str, Any]
) -> list[Finding]:
    """Return a finding for each silo without a column that most silos have."""
    if len(items) * 2 <= len(answers):
        return []
    why = f"{len(items)} of {len(answers)} hospitals have it"
    look = f'a column named "{name}" in the recipe (--map {name}=COLUMN)'
    lacking = [silo for silo in answers if silo not in items]
    return [Finding(silo, name, "no such column", why, look) for silo in lacking]


Others = Sequence[tuple[int, Mapping[str, Any]]]


def _of_column(
    name: str, n: int, item: Mapping[str, Any], others: Others
) -> Iterator[Texts | None]:
    """Yield the anomalies of this hospital's column, the likeliest first; None for each comparison that was made."""
    here, rest = share(n, item), [other for _, other in others]
    there = [s for k, other in others if (s := share(k, other)) is not None]
    if here is not None and there:
        yield None
    if here is not None and here >= ALMOST_ALL and there and median(there) <= FEW:
        what = f"{here:.0%} of its values are missing, elsewhere {median(there):.0%}"
        yield "missing", what, f'`from` (or --map) and `gaps` of the column "{name}"'
        return
    if item["kind"] == "category":
        yield from _of_category(name, item, rest)
        return
    known_ones = [other for other in rest if "mean" in other]
    if "mean" in item and len(known_ones) >= OTHERS:
        yield None
        yield from _of_numbers(name, item, known_ones)
    yield from _of_cells(name, item, rest)


def share(n: int, item: Mapping[str, Any]) -> float | None:
    """Return the share of missing values; None if it is withheld."""
    return None if item[MISSING] is None or not n else min(item[MISSING] / n, 1.0)


def _of_numbers(
    name: str, item: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> Iterator[Texts]:
    mean, sd = item["mean"], item["sd"]
    of = median(o["mean"] for o in others)
    spread = median(o["sd"] for o in others)
    against = f"mean {mean:g}, sd {sd:g}, elsewhere {of:g}, {spread:g} (medians of {len(others)} hospitals)"
    column = f'the column "{name}", without its old fill-value'
    if spread > 0 and (other := conversion(mean, sd, of, spread, name)):
        phrase, times, plus = other
        look = f"`factor = {times:.4g}`, `offset = {plus:.4g}` and `unit` of {column}"
        yield "unit", f"{against}: as {phrase}", look
        return
    far = min(abs(mean), abs(of)) > spread
    if mean * of < 0 and far and 1 / LIKE <= abs(mean / of) <= LIKE:
        yield "sign", f"{against}: the other sign", f"`factor = -1` of {column}"
        return
    if mean * of > 0 and sd > 0 and spread > 0:
        ratio, of_spreads = mean / of, sd / spread
        if max(ratio, 1 / ratio) >= RATIO and 1 / LIKE <= ratio / of_spreads <= LIKE:
            unit, times = known_ratio(ratio, name)
            cause = f"{ratio:.3g} times as large, in mean and deviation alike: {unit or 'a constant factor'}"
            look = f"`factor = {1 / times:.4g}` (1 / {times:.4g}) and `unit` of {column}"
            yield "unit", f"{against}: {cause}", look
            return
    if spread > 0 and abs(mean - of) > FAR * spread and sd <= LIKE * spread:
        by = f"{mean - of:+.3g}, {abs(mean - of) / spread:.1f} deviations"
        keys = "`format` and `since`" if item["kind"] == "date" else "`offset` and `from`"
        yield "shift", f"{against}: shifted by {by}", f"{keys} of {column}"


def _of_cells(
    name: str, item: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> Iterator[Texts | None]:
    """Yield a finding if nearly all values lie at one end of the range, unlike at the other hospitals."""
    here = shares(item)
    there = [
        s
        for other in others
        if (s := shares(other)) and other.get("range") == item.get("range")
    ]
    if not here or len(there) < OTHERS or len(here) != BINS:
        return
    yield None
    for end, place in (("lower", 0), ("upper", -1)):
        elsewhere = median(s[place] for s in there)
        if here[place] >= EDGE and elsewhere <= 1 - EDGE:
            low, high = item["range"]
            at = f"the {end} end of {low:g} to {high:g}"
            what = f"{here[place]:.0%} of its values lie at {at}, elsewhere {elsewhere:.0%}"
            yield (
                "unit",
                f"{what}: another unit, sign or code?",
                f'`factor` and `from` of the column "{name}", without its old fill-value',
            )


def shares(item: Mapping[str, Any]) -> list[float]:
    """Return the share of each cell in the reported counts; a withheld cell is treated as empty."""
    counts = [count or 0 for count in item.get("cells", ())]
    return [count / sum(counts) for count in counts] if sum(counts) else []


def _of_category(
    name: str, item: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> Iterator[Texts | None]:
    """Yield a finding if a category seems to have another code: two are exchanged, or a common one is missing."""
    levels, here = item["levels"], shares(item)
    there = [s for other in others if (s := shares(other)) and other.get("levels") == levels]
    if not here or len(there) < OTHERS:
        return
    yield None
    usual = [median(each) for each in zip(*there, strict=True)]
    usual = [value / sum(usual) for value in usual] if sum(usual) else usual
    look = f'`values` (or --codes) of "{name}", without its old fill-value'
    first, second, apart = (
        _find_exchanged(here, usual) if len(levels) <= MOST_EXCHANGED else (0, 0, math.inf)
    )
    if variation(here, usual) >= APART and apart <= ALIKE:
        what = f"as elsewhere if {levels[first]!r} and {levels[second]!r} change places"
        yield "code", what, look
        return
    for level, share_here, theirs in zip(levels, here, usual, strict=True):
        if share_here == 0 and theirs >= COMMON and item["cells"][levels.index(level)] is None:
            most = levels[max(range(len(here)), key=lambda i: here[i] - usual[i])]
            what = f"hardly a patient is {level!r}, elsewhere {theirs:.0%}; {most!r} has more instead"
            yield "code", what, look
            return


def variation(first: Sequence[float], other: Sequence[float]) -> float:
    """Return the total variation distance of two distributions, 0 to 1."""
    return sum(abs(a - b) for a, b in zip(first, other, strict=True)) / 2


def _find_exchanged(here: Sequence[float], usual: Sequence[float]) -> tuple[int, int, float]:
    """Return the two categories whose exchange brings the shares nearest to the usual ones, and the distance."""
    best = (0, 0, math.inf)
    for first, second in itertools.combinations(range(len(here)), 2):
        changed = list(here)
        changed[first], changed[second] = changed[second], changed[first]
        best = min(best, (first, second, variation(changed, usual)), key=itemgetter(2))
    return best


JSON, CSV, PAGE = "survey.json", "survey.csv", "survey.html"
SUM_KEYS = ("summed", "times", "unlike")
HEADER = ("silo", "part", "column", "statistic", "value")


@dataclass(frozen=True)
class Surveyed:
    """The silos' answers by name, and the reasons of silos without an answer or that do not fit."""

    answers: dict[str, Answer] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    # Under masks: the silos of the sum, whose groups the answers are of; the times; columns that are not in it
    summed: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return findings({} if self.summed else self.answers, self.without)

    @property
    def compared(self) -> bool:
        """Whether a value of one hospital was compared with others'."""
        each = (
            texts
            for name, items in _columns(self.answers)
            for _, texts in _comparisons(name, items)
        )
        return not self.summed and any(True for texts in each for _ in texts)

    @property
    def curves(self) -> dict[str, Curve]:
        """The survival curve of each group that has one."""
        tables = {name: answer.get(CURVE, {}) for name, answer in self.answers.items()}
        return {
            name: kaplan_meier(self.times, table["cells"])
            for name, table in tables.items()
            if sum(table.get("cells", ()))
        }

    @property
    def log_rank(self) -> LogRank | None:
        """The test of all curves; None for fewer than two, or without an event."""
        return log_rank([curve.table for curve in self.curves.values()])

    def names(self, part: str) -> list[str]:
        """Return the columns, or labels, of all silos."""
        every = (name for answer in self.answers.values() for name in answer[part])
        return list(dict.fromkeys(every))


def write_survey(folder: Path, survey: Surveyed) -> None:
    """Write the files."""
    content = {
        "silos": survey.answers,
        "without": survey.without,
        "findings": [finding._asdict() for finding in survey.findings],
    }
    if survey.summed:
        content |= {key: getattr(survey, key) for key in SUM_KEYS}
        content["survival"] = {name: curve.rows for name, curve in survey.curves.items()}
        content["log_rank"] = survey.log_rank and survey.log_rank._asdict()
    write_atomically(folder / JSON, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    guarded = (
        ([guard_formula(str(c)) for c in row[:4]], row[4]) for row in survey_rows(survey)
    )
    write_atomically(folder / CSV, csv_text([HEADER, *([*row, n] for row, n in guarded)]))


def read_survey(folder: Path) -> Surveyed:
    """Return a survey's results. Raises DataError if the file is damaged, OSError."""
    try:
        content = json.loads((folder / JSON).read_text(encoding="utf-8"))
        sums = (list(content.get(key, ())) for key in SUM_KEYS)
        return Surveyed(dict(content["silos"]), dict(content["without"]), *sums)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / JSON} cannot be read ({type(error).__name__}): run the survey again"
        ) from None


def survey_rows(survey: Surveyed) -> Iterator[tuple[str, str, str, str, Any]]:
    """Yield the rows of the csv file; a withheld value is empty."""
    for silo, answer in survey.answers.items():
        yield silo, "", "", "n", answer["n"]
        for part, key in PARTS.items():
            for name, item in answer[key].items():
                yield silo, part, name, MISSING, item[MISSING]
                for statistic in ("mean", "sd"):
                    if "mean" in item:
                        yield silo, part, name, statistic, item[statistic]
                for cell, count in zip(cell_names(item), item.get("cells", ()), strict=True):
                    yield silo, part, name, f"count {cell}", count
                if WITHHELD in item:
                    yield silo, part, name, "hospitals that withhold some", item[WITHHELD]
    yield from survival_rows(survey.curves, survey.log_rank)


def cell_names(item: Mapping[str, Any]) -> list[str]:
    """Return the names of the cells: the categories, or the intervals of the range."""
    if "levels" in item:
        return list(item["levels"])
    if not item.get("cells"):
        return []
    low, high = item["range"]
    edges = [low + (high - low) * i / BINS for i in range(BINS + 1)]
    return [f"{a:g}..{b:g}" for a, b in itertools.pairwise(edges)]


def without_silo(survey: Surveyed, name: str) -> Surveyed:
    """Return the survey of the other silos: of a sum with this silo nothing."""
    if name in survey.summed:
        return Surveyed(without=survey.without)
    answers = {silo: answer for silo, answer in survey.answers.items() if silo != name}
    return Surveyed(
        answers, {silo: why for silo, why in survey.without.items() if silo != name}
    )
