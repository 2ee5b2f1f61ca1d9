"""The page of the reference table, from finished cells: Markdown with what is shown, HTML with all rows, csv files.

Every number comes from the report (server/report): a set's best lines are written as the summary of a study, and
:class:`StudyResults` reads it. So a gain has the report's interval: Student's t over the hospitals, each a mean over
its seeds, from six hospitals on. The methods of a set share the 5 % (Bonferroni), also those that are not measured yet.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from benchmarks.common import table
from benchmarks.reference_cells import (
    FIRST,
    NOTHING_TO_GAIN,
    SETS,
    Cell,
    Form,
    best_of,
    cells_of,
    file_of,
    ordered_methods,
    read_lines,
    strategy_of,
    why_refused,
)
from partitions.common.files import write_atomically
from partitions.common.settings import toml_text
from partitions.datasets.registry import DATASETS
from server.report.html import (
    between,
    count_noun,
    duration,
    number,
    percent,
    points,
    report_environment,
    size_text,
)
from server.report.inference import HOSPITALS_NEEDED, Gain, finite_or_nan, over_hospitals
from server.report.methods import alone, spell
from server.report.participation import worst
from server.report.sections.evidence import over_silos
from server.report.sections.silos import held_out
from server.report.study import StudyResults
from server.report.verdict import calibration_of
from server.results.hold_out import held_out_rows, means
from server.results.summary import compare
from strategies import strategies

NAME = "reference-table"
PAGE, CHART = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("reference_page.html", "gain_chart.html")
)
OVERVIEW = FIRST[:7]
HEAD = (
    *("method", "mean", "worst hospital", "gain over local", "95 % interval", "shown"),
    *("unseen hospital", "calibration", "epsilon", "bytes", "seconds"),
)
SHOWN = {1: "gain", -1: "loss", 0: "–"}


@dataclass(frozen=True)
class FinishedStudies:
    """What is finished of one data set: its study, and the methods that are not in it, with the reason."""

    dataset: str
    study: StudyResults | None
    left_out: dict[str, str]
    missing: list[str]

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """Each method's gain over training alone, with the report's interval."""
        if self.study is None or alone() not in self.study.methods:
            return {}
        return {
            method: over_hospitals(
                [*self.study.silo_means(method, alone()).values()], self.compared
            )
            for method in self.study.methods
            if method != alone()
        }

    @property
    def compared(self) -> int:
        """Number of methods that share the 5 %: also those to come, so that no gain is shown because they are late."""
        finished = self.study.methods if self.study else []
        return max(1, len({*finished, *self.missing} - {alone()}))

    @property
    def title(self) -> str:
        about = SETS[self.dataset]
        noise = ", with differential privacy" if about.get("dp") else ""
        return f"{self.dataset}: {DATASETS[about.get('dataset', self.dataset)].title}{noise}"

    def shown(self, sign: int) -> list[str]:
        """Return the methods whose interval excludes zero on this side."""
        return [spell(method) for method, gain in self.gains.items() if gain.shown == sign]

    @property
    def sentence(self) -> str:
        """What is shown on this set, and plainly, when nothing is."""
        if self.study is None:
            return "Nothing is finished yet."
        if not self.gains:
            return "No gain can be read yet: training alone, or all else, is not finished."
        silos = count_noun(len(self.study.silos), "centre")
        if not any(gain.has_interval for gain in self.gains.values()):
            return f"No difference is shown: an interval needs {HOSPITALS_NEEDED} centres, here are {silos}."
        parts = [
            f"{word} {', '.join(names)}"
            for sign, word in ((1, "a gain is shown for"), (-1, "a loss is shown for"))
            if (names := self.shown(sign))
        ]
        what = "; ".join(parts) or "no difference is shown"
        of = f"Of {count_noun(len(self.gains), 'method')} beside training alone, in {silos}"
        return f"{of}, {self.compared} sharing the 5 %: {what}."


def found_of(folder: Path, dataset: str, form: Form) -> FinishedStudies:
    """Read a set's cells. A method is in its study once all seeds have ended, its unseen hospitals once all have."""
    runs: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    left_out, missing = dict[str, str](), list[str]()
    for method in ordered_methods():
        if why := why_refused(dataset, method, form):
            left_out[method] = why
            continue
        lines = read_lines(file_of(folder, dataset, method))
        cells, others = cells_of(dataset, method, form)
        hopeless = [why for cell in cells if (why := why_failed(lines, cell, form))]
        every = [best_of(lines, cell, form) for cell in cells]
        without = [best_of(lines, cell, form) for cell in others]
        if hopeless:
            left_out[method] = hopeless[0].partition(";")[0]
        elif None in every:
            missing.append(method)
        else:
            runs += [line["entry"] for line in every if line]
            held += [line["entry"] for line in without if line] if None not in without else []
    if not runs:
        return FinishedStudies(dataset, None, left_out, missing)
    names = dict.fromkeys(run["strategy"] for run in runs)
    settings = {"strategy": ",".join(names), "seed": ",".join(map(str, range(form.seeds)))}
    path = folder / "studies" / dataset
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / "config.toml", toml_text({**settings, **SETS[dataset]}))
    summary = {"runs": compare(runs), "hold_out": means(list(held_out_rows(held, runs)))}
    write_atomically(path / "summary.json", json.dumps(summary))
    return FinishedStudies(dataset, StudyResults(path), left_out, missing)


def why_failed(lines: Sequence[dict[str, Any]], cell: Cell, form: Form) -> str:
    """Return why no trial of a cell has a score; empty: one has, or some are still to come."""
    reasons = [line.get("why", "") for line in cell.lines(lines, form)]
    return reasons[0] if len(reasons) == form.trials and all(reasons) else ""


def kind_of(method: str) -> str:
    """Return the score of an unseen hospital: as it receives the model, or where it has a part to train, after that."""
    newcomer = strategies()[strategy_of(method)].info.newcomer
    return "zero_shot" if newcomer in ("model", "mixture") else "personalised"


def unseen_text(study: StudyResults, method: str, compared: int) -> str:
    """Return the mean over unseen hospitals, and its difference from training alone.

    Their model is what :func:`kind_of` says.
    """
    kind = kind_of(method)
    pairs = [
        (of[method][kind], of[method]["local"])
        for of in held_out(study).values()
        if method in of and not math.isnan(of[method][kind] + of[method]["local"])
    ]
    if not pairs:
        return "–"
    gain = over_hospitals([a - b for a, b in pairs], compared)
    interval = between(gain)
    return f"{percent(statistics.fmean(a for a, _ in pairs))} ({interval or points(gain.mean)})"


def mean_text(study: StudyResults, method: str) -> str:
    """Return a method's mean score and its deviation over seeds."""
    mean, deviation = study.mean_score(method)
    return f"{percent(mean)} ± {percent(deviation)}"


def row_of(finished: FinishedStudies, method: str) -> list[str]:
    """Return a method's texts, without its chart, in the order of HEAD."""
    study, gain = (
        finished.study,
        finished.gains.get(method, Gain(math.nan, (math.nan, math.nan))),
    )
    assert study is not None
    silo = worst(study, method)
    calibration = list(over_silos(study, method, calibration_of(study)[0]).values())
    spent = [
        finite_or_nan(v.get("epsilon"))
        for run in study.of(method)
        for v in run["per_silo"].values()
    ]
    size, seconds = study.cost(method)
    return [
        spell(method),
        mean_text(study, method),
        "–" if silo is None else f"{percent(study.score(method, silo).mean)}",
        points(gain.mean),
        between(gain) or "–",
        SHOWN[gain.shown],
        unseen_text(study, method, finished.compared),
        number(statistics.fmean(map(abs, calibration)), 3) if calibration else "–",
        number(max(spent, default=math.nan), 1),
        size_text(size),
        duration(seconds),
    ]


def chart(gain: Gain | None, most: float) -> Markup:
    """Draw a gain and its interval on the scale of its set; zero is the line in the middle."""
    if gain is None or math.isnan(gain.mean):
        return Markup()
    ends = gain.interval if gain.has_interval else (gain.mean, gain.mean)
    low, mean, high = (
        60 + 55 * max(-1, min(1, v / most)) for v in (ends[0], gain.mean, ends[1])
    )
    colour = {1: "blue", -1: "vermillion", 0: "muted"}[gain.shown]
    chart_values = {"label": points(gain.mean), "low": low, "mean": mean, "high": high}
    template = report_environment().from_string(CHART)
    return Markup(template.render(chart_values, colour=colour))


def html_page(every: Sequence[FinishedStudies], lead: Sequence[str]) -> str:
    parts = []
    for finished in every:
        gains = finished.gains
        ends = [
            abs(end)
            for gain in gains.values()
            for end in (gain.mean, *gain.interval)
            if not math.isnan(end)
        ]
        most = max(sorted(ends)[: math.ceil(0.9 * len(ends))], default=1.0) or 1.0
        rows = []
        for method in finished.study.methods if finished.study else ():
            name, *values = row_of(finished, method)
            rows.append((name, [*values[:4], chart(gains.get(method), most), *values[4:]]))
        parts.append((finished, rows))
    head = [*HEAD[:5], "chart", *HEAD[5:]]
    template = report_environment().from_string(PAGE)
    return template.render(lead=lead, parts=parts, head=head)


def lead_of(every: Sequence[FinishedStudies], form: Form) -> list[str]:
    """Return what the whole page says first: what is shown, of the negative control, and what is missing."""
    parts = [
        f"{word} on {finished.dataset}: {', '.join(names)}."
        for finished in every
        for sign, word in ((1, "Gain over training alone"), (-1, "Loss"))
        if (names := finished.shown(sign))
    ]
    control = next(finished for finished in every if finished.dataset == NOTHING_TO_GAIN)
    return [
        *(parts or ["No difference from training alone is shown on any set."]),
        f"The negative control {NOTHING_TO_GAIN}: {control.sentence}",
        *counts_of(every, form),
    ]


def counts_of(every: Sequence[FinishedStudies], form: Form) -> list[str]:
    """Return what is finished, and what a cell is."""
    finished = sum(len(studies.study.methods) for studies in every if studies.study)
    missing = sum(len(studies.missing) for studies in every)
    return [
        f"{finished} pairs of data set and method are finished; {missing} are not measured yet.",
        f"A cell has {form.trials} trials of {form.rounds} rounds; there are {form.seeds} seeds.",
    ]


def overview_row(finished: FinishedStudies) -> list[str]:
    """Return a set's centres and the means of the methods that a reader asks for first."""
    study = finished.study
    means_ = (
        mean_text(study, name) if study and name in study.methods else "–" for name in OVERVIEW
    )
    return [finished.dataset, str(len(study.silos)) if study else "–", *means_]


def markdown_page(every: Sequence[FinishedStudies], form: Form) -> str:
    """Return the page for docs/: method, what is shown on each set, and means of few methods."""
    heads = ["data set", "centres", *map(spell, OVERVIEW)]
    return "\n".join(
        [
            INTRODUCTION,
            "## What is shown\n",
            *(f"* **{finished.title}.** {finished.sentence}" for finished in every),
            *(f"* {text}" for text in counts_of(every, form)),
            "\n## Means\n",
            table([overview_row(finished) for finished in every], heads),
            "",
        ]
    )


INTRODUCTION = """# Reference table

<!-- written by `python -m benchmarks.reference`; do not edit -->

This page is for researchers and reviewers. After it you know what each method reaches on patients of real hospitals,
all tuned alike.

* [reference-table.html](reference-table.html): all rows, with charts and columns that sort.
* [reference-table.csv](reference-table.csv): each cell with its settings.
* [reference-table-refused.csv](reference-table-refused.csv): the methods that do not fit a data set, with the reason.

```console
$ make table                                                   # two processes; goes on where it was interrupted
$ python -m benchmarks.reference --out table --methods ditto --sets bmt   # a part of it
$ python -m benchmarks.reference --out table --page docs       # the page and its files, of finished cells
```

The short form has 14,274 runs: 71 minutes in two processes on two cores (27 November 2026). All cells repeat but those
with differential privacy, which are of the arithmetic before 28 November 2026: a private gradient's last bits are
others since, and with them the choice of a trial.

## Design

Each method has a random search of its own, with equally many trials. Validation data of the hospitals that train rank
them. The search covers the learning rate, and each weight or rate of the method's own, from a tenth to ten times the
default. Each hospital is left out once, in groups, with a search of its own; first seed. All methods train a network of
16 hidden units. FedXgbBagging, local-trees and pooled-trees boost five trees a round at each hospital.
[data-sets.md](data-sets.md#tables-of-several-hospitals) describes the tables.

## Columns

* **mean**: the task's score in per cent on test data, mean over hospitals and seeds, ± the deviation over seeds.
* **worst hospital**: the lowest mean over seeds of a hospital.
* **gain over local**: in points, with the report's interval ([uncertainty](uncertainty.md)). It needs six hospitals.
  The methods of a set share its 5 % (Bonferroni), also those to come; each set is a family of its own.
  On `azpro-grades-dp` training alone has its own statistics (`normalization=silo`) and no noise: it sends nothing.
* **unseen hospital**: score at a hospital that did not train, of the model that it receives. With a method that leaves
  it a part to train, it is the score after that (`hold-out-epochs`). In brackets: the interval of its difference
  from training alone, or below six hospitals the difference. A dash: training alone has no model for others, no
  hospital is left out with differential privacy, or no trial trained (lp-proj on `rand-visits`).
* **calibration**: Brier score; for a measurement the distance of mean measured and mean predicted. Lower is better.
* **epsilon**: largest of a hospital's, for one run. The trials of the search are not in it.
* **bytes**, **seconds**: of one run. Seconds are the process's CPU, on one core.
"""


def reasons(every: Sequence[FinishedStudies]) -> Iterator[tuple[str, str, str]]:
    """Yield each method that is left out, where, and why, as it refuses the settings itself."""
    where: dict[tuple[str, str], list[str]] = {}
    for studies in every:
        for method, why in studies.left_out.items():
            where.setdefault((method, why), []).append(studies.dataset)
    for (method, why), sets in sorted(where.items()):
        yield method, "all" if len(sets) == len(every) else ", ".join(sets), why


def refused_file(every: Sequence[FinishedStudies]) -> str:
    """Return :func:`reasons` as csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [("method", "sets", "reason"), *reasons(every)]
    )
    return text.getvalue()


def results_file(folder: Path, form: Form) -> str:
    """Return the finished cells as csv: the chosen settings, the scores over hospitals, bytes and seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "set",
            "method",
            "seed",
            "held_out",
            "trial",
            "settings",
            "validation",
            "mean",
            "worst",
            "unseen",
            "bytes",
            "seconds",
        ]
    )
    for dataset in SETS:
        for method in ordered_methods():
            lines = read_lines(file_of(folder, dataset, method))
            for cell in itertools.chain(*cells_of(dataset, method, form)) if lines else ():
                if line := best_of(lines, cell, form):
                    writer.writerow([*cell, *cell_values(line)])
    return text.getvalue()


def cell_values(line: dict[str, Any]) -> list[Any]:
    """Return what the results file says of a cell, from its best line."""
    entry = line["entry"]
    score, final = entry["score"], entry["final"]
    new = [
        scores[kind_of(entry["strategy"])].get(score) for scores in entry["hold_out"].values()
    ]
    unseen = statistics.fmean(new) if new and None not in new else ""
    means_ = [final[f"{score}_mean"], final[f"{score}_worst"], unseen]
    size = entry["bytes_down"] + entry["bytes_up"]
    seconds = f"{entry['seconds']['total']:.2f}"
    return [
        line["trial"],
        json.dumps(line["values"]),
        line["validation"],
        *means_,
        size,
        seconds,
    ]


def write_page(folder: Path, into: Path, form: Form) -> None:
    """Write the page in both forms, and its csv files."""
    every = [found_of(folder, dataset, form) for dataset in SETS]
    lead = lead_of(every, form)
    into.mkdir(parents=True, exist_ok=True)
    write_atomically(into / f"{NAME}.md", markdown_page(every, form))
    write_atomically(into / f"{NAME}-refused.csv", refused_file(every))
    write_atomically(into / f"{NAME}.html", html_page(every, lead))
    write_atomically(into / f"{NAME}.csv", results_file(folder, form))
