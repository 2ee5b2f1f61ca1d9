"""The page of the reference table: csv files of finished cells, and from these alone Markdown, HTML and a picture.

``NAME.csv`` has each hospital's loss and score for each seed and fold, so that every number of the page can be computed
again. Numbers have six digits there, and the page is made from these.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.reference_cells import (
    BOOSTED,
    COHORTS,
    CONTRASTS,
    CONTROL,
    CURVES,
    FEW,
    FORMS,
    HIDDEN,
    LINEAR,
    NAMED,
    SETS,
    TREES,
    TWICE,
    CellGroup,
    Contrast,
    all_cells,
    curve_cells,
    finished,
    hold_cells,
    named_cells,
    network_of,
    read_lines,
)
from benchmarks.reference_gains import (
    Array,
    Estimate,
    conclusion,
    crossed_mean,
    holm,
    over_cohorts,
)
from partitions.common.errors import DataError
from partitions.common.files import append, write_atomically
from partitions.datasets.registry import DATASETS
from server.report.canvas import INK, LOWEST, SETTINGS
from server.report.html import count_noun, number, percent, report_environment, size_text
from server.report.inference import Interval
from server.report.methods import spell
from server.results.history import csv_text

NAME = "reference-table"
PLAN = f"{NAME}-plan.json"
LONG = "long"
UNMEASURED = "not measured yet"
PAGE, MARKDOWN = (
    Path(__file__).with_name(f"reference_page.{end}").read_text("utf-8")
    for end in ("html", "md.j2")
)
KEY = (*CellGroup._fields, "seed", "fold")
COLUMNS = (*KEY, "hospital", "tested", "loss", "score")
RUN_COLUMNS = (*KEY, "trial", "round", "validation", "bytes", "settings")
HEAD = (
    *("method", "network", "patients", "score", "worst hospital", "loss"),
    *("gain over local, %", "95 % interval", "q", "bytes"),
)
MARGIN = 5.0  # per cent of the loss: less is too little to matter
WORDS = {HIDDEN: "16 hidden units", LINEAR: "linear", TREES: "trees"}


def digits(value: float | None) -> str:
    """Return a number for a csv file; empty: unknown."""
    return "" if value is None else f"{value + 0.0:.6g}"


def stem(name: str) -> str:
    """Return how the published files of a form begin: those of the long one stand beside the short one's."""
    return f"{NAME}-{LONG}" if name == LONG else NAME


def csv_files(folder: Path, name: str) -> dict[str, str]:
    """Return a form's csv files by name: hospitals, runs, and what is not in them, with the reason."""
    form, begin = FORMS[name], stem(name)
    hospitals: list[Sequence[Any]] = []
    runs: list[Sequence[Any]] = []
    missing: list[Sequence[Any]] = []
    for cells in all_cells():
        lines = read_lines(cells.file(folder))
        why = cells.why_refused(form) if cells.dataset in DATASETS else "no such data set"
        if best := finished(cells, lines, form):
            for line in best:
                key = (*cells, line["seed"], line["fold"])
                for silo, (tested, *numbers) in line["silos"].items():
                    hospitals.append((*key, silo, tested, *map(digits, numbers)))
                chosen = line["trial"], line["round"], digits(line["validation"]), line["bytes"]
                runs.append((*key, *chosen, json.dumps(line["settings"])))
        else:
            refused = [why, *(line["why"] for line in lines if "why" in line)]
            missing.append((*cells, next(filter(None, refused), UNMEASURED)))
    return {
        f"{begin}.csv": csv_text([COLUMNS, *hospitals]),
        f"{begin}-runs.csv": csv_text([RUN_COLUMNS, *runs]),
        f"{begin}-missing.csv": csv_text([(*CellGroup._fields, "reason"), *missing]),
    }


def restore_cells(published: Path, folder: Path, name: str) -> None:
    """Write a page's cells into a folder that has none of them: ``csv_files`` of these are the page's again."""
    silos: dict[Any, dict[str, list[Any]]] = defaultdict(dict)
    lines: dict[CellGroup, list[dict[str, Any]]] = defaultdict(list)
    for end in ("", "-runs", "-missing"):
        text = (published / f"{stem(name)}{end}.csv").read_text("utf-8")
        for row in csv.DictReader(io.StringIO(text)):
            cells = CellGroup(row["dataset"], row["network"], int(row["most"]), row["method"])
            of = silos[cells, row.get("seed"), row.get("fold")]
            if end == "-runs":
                line = {key: json.loads(row[key]) for key in RUN_COLUMNS[4:]}
                line |= {"rounds": FORMS[name].rounds, "silos": of, "published": True}
                lines[cells].append(line)
            elif not end:
                numbers = (row[key].replace("inf", "Infinity") or "null" for key in COLUMNS[7:])
                of[row["hospital"]] = [*map(json.loads, numbers)]
            elif row["reason"] != UNMEASURED:
                line = dict.fromkeys(("seed", "fold", "trial", "rounds", "validation"))
                lines[cells].append({**line, "why": row["reason"]})
    for cells, runs in lines.items():
        with suppress(DataError), hold_cells(file := cells.file(folder)):
            if not read_lines(file):
                append(file, "".join(json.dumps(line) + "\n" for line in runs))


@dataclass(frozen=True)
class Results:
    """What the csv files hold, by cells. ``losses``: (hospitals, repeats); ``sizes``: bytes of a run.

    ``scores``: each hospital's mean, clipped from below, for R² has no floor.
    """

    losses: dict[CellGroup, Array]
    scores: dict[CellGroup, Array]
    sizes: dict[CellGroup, float]

    @classmethod
    def read(cls, hospitals: str, runs: str) -> Results:
        key = list(CellGroup._fields)
        tables, sizes = (
            {
                CellGroup(*cells): table
                for cells, table in pd.read_csv(io.StringIO(text)).groupby(key, sort=False)
            }
            for text in (hospitals, runs)
        )
        losses = {
            cells: table.pivot(
                index="hospital", columns=["seed", "fold"], values="loss"
            ).to_numpy()
            for cells, table in tables.items()
        }
        scores = {
            cells: table["score"].clip(LOWEST).groupby(table["hospital"]).mean().to_numpy()
            for cells, table in tables.items()
        }
        return cls(losses, scores, {of: table["bytes"].mean() for of, table in sizes.items()})

    def gain(self, cells: CellGroup, baseline: str) -> Estimate | None:
        """Return how much lower the loss is, in per cent of the baseline's mean; None while one is not measured.

        A hospital without a loss in one of the repeats is left out.
        """
        mine, other = self.losses.get(cells), self.losses.get(cells._replace(method=baseline))
        if mine is None or other is None:
            return None
        known = np.isfinite(other - mine).all(axis=1)
        return crossed_mean(100 * (other - mine)[known] / other[known].mean())


Tables = Mapping[str, Results]  # by form


def span(ends: Interval) -> str:
    return " to ".join(number(end, 1) for end in ends)


def gain_text(estimate: Estimate) -> str:
    return f"{number(estimate.mean, 1)} % ({span(estimate.interval)})"


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis: its gains by cohort, over cohorts, and the p values that its family shares.

    ``cohorts``: those that it can be tested on; trees take no survival.
    """

    contrast: Contrast
    cohorts: list[str]
    gains: dict[str, tuple[Estimate | None, float]]
    pooled: tuple[Any, float]

    @property
    def name(self) -> str:
        return f"{spell(self.contrast.method)} over {spell(self.contrast.baseline)}"

    @property
    def measured(self) -> list[str]:
        """The cohorts where it is measured."""
        return [name for name in self.cohorts if self.gains[name][0] is not None]

    @property
    def sentence(self) -> str:
        """The result in words; without a conclusion before all cohorts are measured."""
        pooled, adjusted = self.pooled
        of = f"{len(self.measured)} of {len(self.cohorts)} cohorts"
        if pooled is None:
            return f"**{self.name}: no conclusion.** {of} are measured, three are needed."
        whole = self.measured == self.cohorts
        word = conclusion(pooled, adjusted, MARGIN) if whole else "no conclusion yet"
        less = over_cohorts([self.gains[name][0] for name in self.cohorts if name != TWICE])
        return (
            f"**{self.name}: {word}.** {gain_text(pooled)} over {of}, p = {number(adjusted, 3)}; in a new cohort "
            f"{span(pooled.prediction)} %."
            + (f" Without {TWICE} {gain_text(less)}." if less else "")
        )

    @property
    def rows(self) -> list[list[str]]:
        """Return a row of the csv file for each cohort where it is measured."""
        return [
            [
                self.name,
                name,
                *map(digits, (gain.mean, *gain.interval, p)),
                conclusion(gain, p, MARGIN),
            ]
            for name, (gain, p) in self.gains.items()
            if gain
        ]


def hypotheses(results: Results, network: str) -> list[Hypothesis]:
    """Return the hypotheses with this network; trees, which have none, are tested once with each."""
    done = []
    for _, family in itertools.groupby(CONTRASTS, key=lambda contrast: contrast.family):
        contrasts = list(family)
        gains = {
            name: in_family(
                [results.gain(c.cells(name, network), c.baseline) for c in contrasts]
            )
            for name in (*COHORTS, CONTROL)
        }
        means = [
            over_cohorts([gains[name][i][0] for name in COHORTS]) for i in range(len(contrasts))
        ]
        for i, pooled in enumerate(in_family(means)):
            contrast, by_set = contrasts[i], {name: of[i] for name, of in gains.items()}
            fitting = [
                c for c in COHORTS if not contrast.cells(c, network).why_refused(FORMS["short"])
            ]
            done.append(Hypothesis(contrast, fitting, by_set, pooled))
    return done


def longest(tables: Tables, network: str) -> dict[str, list[Hypothesis]]:
    """Return the hypotheses by form: each family in the longest form in which the whole of it is measured."""
    families: dict[str, tuple[str, list[Hypothesis]]] = {}
    for form, results in tables.items():
        every = hypotheses(results, network)
        for family in dict.fromkeys(c.family for c in CONTRASTS):
            of = [h for h in every if h.contrast.family == family]
            if family not in families or all(h.measured == h.cohorts for h in of):
                families[family] = form, of
    return {
        form: [h for of, group in families.values() if of == form for h in group]
        for form in tables
    }


def in_family(estimates: Sequence[Estimate | None]) -> list[tuple[Any, float]]:
    """Return each estimate with its p value, adjusted for the whole family, also for what is not measured yet."""
    adjusted = holm([1.0 if e is None else e.p for e in estimates])
    return list(zip(estimates, adjusted, strict=True))


def cohorts_file(tables: Tables) -> str:
    """Return the hypotheses by cohort, with both networks, as csv."""
    rows = [
        [form, network_of(of.contrast.method, network), *row]
        for network in (HIDDEN, LINEAR)
        for form, every in longest(tables, network).items()
        for of in every
        for row in of.rows
        if network == HIDDEN or of.contrast.family != "trees"
    ]
    header = ["form", "network", "hypothesis", "cohort", "gain", "low", "high", "p", "word"]
    return csv_text([header, *rows])


def curves(results: Results) -> dict[tuple[str, str], dict[int, Estimate]]:
    """Return by data set and method the gain over training alone, by most training patients (0: all)."""
    return {
        (name, method): {
            most: gain
            for most in (*FEW, 0)
            if (gain := results.gain(CellGroup(name, HIDDEN, most, method), "local"))
        }
        for name in CURVES
        for method in NAMED
        if network_of(method) == HIDDEN and method != "local"
    }


def curves_file(results: Results) -> str:
    rows = [
        (*of, most or "all", *map(digits, (gain.mean, *gain.interval)))
        for of, gains in curves(results).items()
        for most, gain in gains.items()
    ]
    return csv_text([("set", "method", "most", "gain", "low", "high"), *rows])


def curve_sentences(results: Results) -> list[str]:
    """Return for each set what FedAvg gains with the fewest patients and with all."""
    return [
        f"{name}: {gain_text(of[FEW[0]])}, {gain_text(of[0])}."
        for (name, method), of in curves(results).items()
        if method == "fedavg" and {FEW[0], 0} <= of.keys()
    ]


def picture(results: Results) -> str:
    """Draw the curves of which each point is measured, a panel for each data set, as svg."""
    whole = {key: of for key, of in curves(results).items() if len(of) > len(FEW)}
    panels = [*dict.fromkeys(name for name, _ in whole)]
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": NAME, "svg.fonttype": "none"}):
        figure = Figure(figsize=(2.9 * max(1, len(panels)), 3.8), layout="constrained")
        figure.patch.set_facecolor("white")
        axes = None
        for i, panel in enumerate(panels, 1):
            axes = figure.add_subplot(1, len(panels), i, title=panel, sharey=axes)
            axes.axhline(0, color=INK, linewidth=1)
            lines = {method: of for (name, method), of in whole.items() if name == panel}
            for shift, (method, of) in enumerate(lines.items()):
                places = [
                    place + 0.09 * (shift - (len(lines) - 1) / 2) for place in range(len(of))
                ]
                means = [gain.mean for gain in of.values()]
                [line] = axes.plot(places, means, marker="o", markersize=4, label=spell(method))
                low, high = zip(*(gain.interval for gain in of.values()), strict=True)
                axes.vlines(places, low, high, color=line.get_color(), linewidth=1, alpha=0.5)
            axes.set_xticks(range(len(FEW) + 1), [*map(str, FEW), "all"])
            axes.tick_params(labelleft=i == 1)
        if axes:
            figure.legend(
                *axes.get_legend_handles_labels(), loc="outside upper center", ncols=5
            )
        figure.supxlabel("most training patients of a hospital", fontsize="medium")
        figure.supylabel("lower loss than Local, %", fontsize="medium")
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().decode()


def explored_rows(results: Results, dataset: str) -> list[tuple[str, list[str]]]:
    """Return a row for each method, network and number of training patients of a set; q is over all of them."""
    every = [cells for cells in results.losses if cells.dataset == dataset]
    gains: dict[CellGroup, Estimate] = {}
    for cells in every:
        baseline = f"local{BOOSTED}" if cells.network == TREES else "local"
        if cells.method != baseline and (gain := results.gain(cells, baseline)):
            gains[cells] = gain
    shared = dict(
        zip(gains, stats.false_discovery_control([g.p for g in gains.values()]), strict=True)
    )
    rows = []
    for cells in every:
        score, gained = results.scores[cells], ["–"] * 3
        if gain := gains.get(cells):
            gained = [number(gain.mean, 1), span(gain.interval), number(shared[cells], 3)]
        values = [
            WORDS[cells.network],
            str(cells.most or "all"),
            *(percent(float(of)) for of in (np.nanmean(score), np.nanmin(score))),
            number(float(results.losses[cells].mean()), 3),
            *gained,
            size_text(results.sizes[cells]),
        ]
        rows.append((spell(cells.method), values))
    return rows


def html_page(results: Results, lead: Sequence[str]) -> str:
    parts = [
        (name, DATASETS[name].title, explored_rows(results, name))
        for name in SETS
        if name in DATASETS
    ]
    template = report_environment().from_string(PAGE)
    return template.render(lead=lead, parts=[part for part in parts if part[2]], head=HEAD)


def covered(results: Results, name: str) -> list[str]:
    """Return what is measured in a form, and what is not."""
    form = FORMS[name]
    lines = [
        f"The {name} form: {count_noun(form.folds, 'fold')} of {count_noun(form.seeds, 'seed')}, {form.trials} trials "
        f"of {form.rounds} rounds in each search."
        + ("" if name == LONG else " It is provisional.")
    ]
    parts = {f"Confirmatory, {WORDS[n]} and trees": named_cells(n) for n in (HIDDEN, LINEAR)}
    parts["Few patients"] = curve_cells()
    for part, of in parts.items():
        fitting = [cells in results.losses for cells in of if not cells.why_refused(form)]
        if any(fitting):
            lines.append(f"{part}: {sum(fitting)} of {len(fitting)} pairs of set and method.")
    # Without their number, which grows with each new method
    measured = sum(cells in results.losses for cells in all_cells())
    lines.append(f"All, with the exploratory ones: {measured} pairs of set and method.")
    return lines


def markdown_page(tables: Tables) -> str:
    """Return the page for docs/."""
    tested = longest(tables, HIDDEN)
    return (
        report_environment()
        .from_string(MARKDOWN)
        .render(
            name=NAME,
            plan=PLAN,
            cohorts=COHORTS,
            control=CONTROL,
            twice=TWICE,
            margin=MARGIN,
            few=FEW,
            lowest=LOWEST,
            covered=[text for name, of in tables.items() for text in covered(of, name)],
            tested={name: tested[name] for name in reversed(tested) if tested[name]},
            curves=curve_sentences(next(iter(tables.values()))),
        )
    )


def read_tables(folder: Path) -> Tables:
    """Return what a folder's csv files hold, by form, the long one last."""
    tables = {}
    for begin in (NAME, stem(LONG)):
        if (folder / f"{begin}.csv").is_file():
            plan = json.loads((folder / f"{begin}-plan.json").read_text("utf-8"))
            texts = ((folder / f"{begin}{end}.csv").read_text("utf-8") for end in ("", "-runs"))
            tables[plan["form"]] = Results.read(*texts)
    return tables


def page_files(tables: Tables) -> dict[str, str]:
    """Return the page's files, from the csv files alone. Curves and all rows are of the first form."""
    name, results = next(iter(tables.items()))
    lead = [
        *covered(results, name),
        "Exploratory: q is the false discovery rate among a set's rows.",
    ]
    return {
        f"{NAME}.md": markdown_page(tables),
        f"{NAME}.html": html_page(results, lead),
        f"{NAME}-cohorts.csv": cohorts_file(tables),
        f"{NAME}-curves.csv": curves_file(results),
        f"images/{NAME}.svg": picture(results),
    }


def write_page(folder: Path, into: Path, name: str) -> None:
    """Write a form's csv files, and the page of all forms that are there, as Markdown and HTML."""
    plan = {f"{stem(name)}-plan.json": (folder / PLAN).read_text("utf-8")}
    for file, text in {**plan, **csv_files(folder, name)}.items():
        write_atomically(into / file, text)
    for file, text in page_files(read_tables(into)).items():
        write_atomically(into / file, text)
