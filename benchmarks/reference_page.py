"""The page of the reference table: csv files of finished cells, and from these alone Markdown, HTML and a picture.

``NAME.csv`` has each hospital's loss and score for each seed and fold, so that every number of the page can be computed
again. Numbers have six digits there, and the page is made from these.
"""

from __future__ import annotations

import csv
import io
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

NAME = "reference-table"
PLAN = f"{NAME}-plan.json"
LONG = "long"
UNMEASURED = "not measured yet"
PAGE = Path(__file__).with_name("reference_page.html").read_text(encoding="utf-8")
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


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


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
                for silo, (tested, loss, score) in line["silos"].items():
                    hospitals.append((*key, silo, tested, digits(loss), digits(score)))
                chosen = (line["trial"], line["round"], digits(line["validation"]))
                runs.append((*key, *chosen, line["bytes"], json.dumps(line["settings"])))
        else:
            refused = [why, *(line["why"] for line in lines if "why" in line)]
            missing.append((*cells, next(filter(None, refused), UNMEASURED)))
    return {
        f"{begin}.csv": csv_text(COLUMNS, hospitals),
        f"{begin}-runs.csv": csv_text(RUN_COLUMNS, runs),
        f"{begin}-missing.csv": csv_text((*CellGroup._fields, "reason"), missing),
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
        tables = [pd.read_csv(io.StringIO(text)) for text in (hospitals, runs)]
        losses, scores = (
            {
                CellGroup(*cells): of.pivot(
                    index="hospital", columns=["seed", "fold"], values=column
                ).to_numpy()
                for cells, of in tables[0].groupby(key, sort=False)
            }
            for column in ("loss", "score")
        )
        sizes = {
            CellGroup(*of): mean for of, mean in tables[1].groupby(key)["bytes"].mean().items()
        }
        means = {
            of: np.nanmean(score.clip(LOWEST, None), axis=1) for of, score in scores.items()
        }
        return cls(losses, means, sizes)

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


def gain_text(estimate: Estimate, unit: str = " %") -> str:
    return f"{number(estimate.mean, 1)}{unit} ({span(estimate.interval)})"


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
    for family in dict.fromkeys(c.family for c in CONTRASTS):
        contrasts = [c for c in CONTRASTS if c.family == family]
        gains = {
            name: in_family(
                [results.gain(c.cells(name, network), c.baseline) for c in contrasts]
            )
            for name in (*COHORTS, CONTROL)
        }
        means = [
            over_cohorts([gains[name][i][0] for name in COHORTS]) for i in range(len(contrasts))
        ]
        for i, (contrast, pooled) in enumerate(zip(contrasts, in_family(means), strict=True)):
            fitting = [
                c for c in COHORTS if not contrast.cells(c, network).why_refused(FORMS["short"])
            ]
            by_set = {name: of[i] for name, of in gains.items()}
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
    return csv_text(
        ("form", "network", "hypothesis", "cohort", "gain", "low", "high", "p", "word"), rows
    )


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
    return csv_text(("set", "method", "most", "gain", "low", "high"), rows)


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
    few = curve_sentences(next(iter(tables.values())))
    shown = f"![gain over training alone, by training patients](images/{NAME}.svg)\n"
    tested = longest(tables, HIDDEN)
    return "\n".join(
        [
            INTRODUCTION,
            "## What is measured\n",
            *(f"* {text}" for name, of in tables.items() for text in covered(of, name)),
            "\n## Confirmatory result\n",
            *(
                line
                for name in reversed(tested)
                for line in (
                    f"In the {name} form:\n",
                    *(f"* {of.sentence}" for of in tested[name]),
                    "",
                )
                if tested[name]
            ),
            f"[By cohort]({NAME}-cohorts.csv), and with linear models: gains in %, p adjusted in its family.",
            "\n## Few patients\n",
            *([shown] if few else ["Not measured yet."]),
            *(
                [
                    f"FedAvg over Local, with at most {FEW[0]} training patients a hospital, and with all:\n"
                ]
                if few
                else []
            ),
            *(f"* {text}" for text in few),
            "",
        ]
    )


INTRODUCTION = f"""# Reference table

<!-- written by `python -m benchmarks.reference`; do not edit -->

This page is for researchers, reviewers and consortia. After it you know what federating and personalising gain on
patients of real hospitals, and how sure that is.

```console
$ make table                    # the long form; goes on from the cells of this page
$ make table FORM=short         # likewise
$ python -m benchmarks.reference --out table --form short --sets azpro        # anew, a part of it
```

* [The plan]({PLAN}): all settings, and what each method's search draws from.
* [Hospitals]({NAME}.csv): each one's loss and score in each seed and fold; this page is made from it.
* [Runs]({NAME}-runs.csv): the chosen settings. [Curves]({NAME}-curves.csv): gains over Local.
* [Missing]({NAME}-missing.csv): what is not in them, with the reason.
* The long form so far: [plan]({NAME}-long-plan.json), [hospitals]({NAME}-long.csv), [runs]({NAME}-long-runs.csv),
  [missing]({NAME}-long-missing.csv).
* [All rows]({NAME}.html), with scores, in columns that sort.

## Design

* **Hypotheses**, named before the first run. FedAvg has a lower loss than Local. FedAvg-FT, Ditto, FedALA and APPLE
  have a lower loss than FedAvg; the four share the 5 % (Holm). FedXgbBagging has a lower loss than local trees, which
  take no survival (tcga-brca).
* **Cohorts**: {", ".join(COHORTS)} ([data-sets.md](data-sets.md#tables-of-several-hospitals)). {CONTROL} is the
  control: there is little to predict, so a gain is mostly less overfitting. Both RAND sets are of the same
  persons, so the result without {TWICE} is shown.
* **Outcome**: the loss on test patients: log loss of classes, squared error of a measurement, partial likelihood of
  survival. A gain is how much lower it is, in per cent of the baseline's mean; hospitals weigh equally. Below 0 it is a
  harm. The score is second.
* **Test patients**: five folds, so each patient is tested once a seed.
* **Search**: each cell has its own, over the learning rate and at most one setting of the method. Trial 0 has the
  defaults. Linear models of rand-visits have a hundredth of the rates, for with more one hospital diverges. The mean
  loss on validation data chooses trial and round, for all hospitals together. Local, too, has no choice for each.
* **One cohort**: the mean over hospitals, with the spread over hospitals and over folds and seeds.
* **Over cohorts**: random effects with Hartung and Knapp's interval, and the prediction interval of a new cohort, which
  is a little narrow. This is the conclusion. By cohort, words are not adjusted for the number of cohorts.
* **Words**: gain or harm where p, adjusted in its family, is below .05; else equivalent where the 95 % interval lies
  within ± {MARGIN:g} %, too little to matter; else inconclusive. A gain within it is called small. Intervals are
  not adjusted: beside Holm's p one may exclude 0 without a gain.
* **Few patients**: at most {", ".join(map(str, FEW))} training patients a hospital, a fifth of them for validation.
* **Exploratory**: all methods on all sets, by successive halving. The page of all rows has q values (false discovery
  rate), and concludes nothing. R² below {percent(LOWEST)} counts as that, for it has no floor.

`benchmarks/reference_gains.py` has the equations, [uncertainty.md](uncertainty.md) their coverage.
"""


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
