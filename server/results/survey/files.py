"""Files of a survey: ``survey.json`` and ``survey.csv`` with answers and findings."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.survey import BINS, MISSING
from partitions.common.errors import DataError
from partitions.common.files import write_atomically
from partitions.common.names import guarded
from server.results.survey.findings import Finding, findings
from strategies.base.survey import PARTS, Answer

JSON, CSV, PAGE = "survey.json", "survey.csv", "survey.html"
HEADER = ("silo", "part", "column", "statistic", "value")


@dataclass(frozen=True)
class Surveyed:
    """The silos' answers by name, and the reasons of silos without an answer or that do not fit."""

    answers: dict[str, Answer] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return findings(self.answers, self.without)

    def names(self, part: str) -> list[str]:
        """Return the columns, or labels, of all silos."""
        return list(dict.fromkeys(name for answer in self.answers.values() for name in answer[part]))


def write_survey(folder: Path, found: Surveyed) -> None:
    """Write the files."""
    content = {
        "silos": found.answers,
        "without": found.without,
        "findings": [finding.content for finding in found.findings],
    }
    write_atomically(folder / JSON, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows([guarded(str(cell)) for cell in row[:4]] + [row[4]] for row in rows_of(found))
    write_atomically(folder / CSV, buffer.getvalue())


def read_survey(folder: Path) -> Surveyed:
    """Return a survey's results. Raises DataError if the file cannot be read."""
    try:
        content = json.loads((folder / JSON).read_text(encoding="utf-8"))
        return Surveyed(dict(content["silos"]), dict(content["without"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / JSON} cannot be read ({type(error).__name__}): run the survey again") from None


def rows_of(found: Surveyed) -> Iterator[tuple[str, str, str, str, Any]]:
    """Yield the rows of the csv file; a withheld value is empty."""
    for silo, answer in found.answers.items():
        yield silo, "", "", "n", answer["n"]
        for part, key in PARTS.items():
            for name, item in answer[key].items():
                yield silo, part, name, MISSING, _cell(item[MISSING])
                for statistic in ("mean", "sd"):
                    if "mean" in item:
                        yield silo, part, name, statistic, item[statistic]
                for cell, count in zip(cell_names(item), item.get("cells", ()), strict=True):
                    yield silo, part, name, f"count {cell}", _cell(count)


def cell_names(item: Mapping[str, Any]) -> list[str]:
    """Return the names of the cells: the categories, or the intervals of the range."""
    if "levels" in item:
        return list(item["levels"])
    if not item.get("cells"):
        return []
    low, high = item["range"]
    edges = [low + (high - low) * i / BINS for i in range(BINS + 1)]
    return [f"{a:g}..{b:g}" for a, b in itertools.pairwise(edges)]


def _cell(count: int | None) -> object:
    return "" if count is None else count


def without_silo(found: Surveyed, name: str) -> Surveyed:
    """Return the survey of the other silos."""
    answers = {silo: answer for silo, answer in found.answers.items() if silo != name}
    return Surveyed(answers, {silo: why for silo, why in found.without.items() if silo != name})
