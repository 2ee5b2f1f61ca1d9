"""The page of the reference table: csv files of finished cells, and from these alone Markdown, HTML and a picture.

``NAME.csv`` has each hospital's loss and score for each seed and fold, so that every number of the page can be computed
again. Numbers have six digits there, and the page is made from these.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.common import table
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
    CellGroup,
    Contrast,
    Form,
    all_cells,
    curve_cells,
    finished,
    named_cells,
    network_of,
    read_lines,
)
from benchmarks.reference_gains import (
    Array,
    Estimate,
    conclusion,
    crossed_mean,
    false_discovery,
    holm,
    over_cohorts,
)
from partitions.common.files import write_atomically
from partitions.datasets.registry import DATASETS
from server.report.canvas import INK, LOWEST, SETTINGS
from server.report.html import count_noun, number, percent, report_environment, size_text
from server.report.methods import spell

NAME = "reference-table"
PAGE = Path(__file__).with_name("reference_page.html").read_text(encoding="utf-8")
COLUMNS = (*CellGroup._fields, "seed", "fold", "hospital", "tested", "loss", "score")
RUN_COLUMNS = (
    *CellGroup._fields,
    "seed",
    "fold",
    "trial",
    "round",
    "validation",
    "bytes",
    "settings",
)
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


def csv_files(folder: Path, form: Form) -> dict[str, str]:
    """Return the csv files by name: hospitals, runs, and what is not in them, with the reason."""
    hospitals: list[Sequence[Any]] = []
    runs: list[Sequence[Any]] = []
    missing: list[Sequence[Any]] = []
    for cells in all_cells():
        lines = read_lines(cells.file(folder))
        why = cells.why_refused(form) if cells.dataset in DATASETS else "no such data set"
        if best := finished(cells, lines, form):
            for line in best:
                key = (*cells, line["seed"], line["fold"])
                for name, (tested, loss, score) in line["silos"].items():
                    hospitals.append((*key, name, tested, digits(loss), digits(score)))
                values = json.dumps(line["values"])
                chosen = (line["trial"], line["round"], digits(line["validation"]))
                runs.append((*key, *chosen, line["bytes"], values))
        else:
            refused = [why, *(line["why"] for line in lines if "why" in line)]
            missing.append((*cells, next(filter(None, refused), "not measured yet")))
    return {
        f"{NAME}.csv": csv_text(COLUMNS, hospitals),
        f"{NAME}-runs.csv": csv_text(RUN_COLUMNS, runs),
        f"{NAME}-missing.csv": csv_text((*CellGroup._fields, "reason"), missing),
    }


@dataclass(frozen=True)
class Results:
    """What the csv files hold. ``losses``, ``scores`` (hospitals, repeats), ``sizes``: bytes of a run, by cells."""

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
        return cls(
            losses, {of: score.clip(LOWEST, None) for of, score in scores.items()}, sizes
        )

    def gain(self, cells: CellGroup, baseline: str) -> Estimate | None:
        """Return how much lower the loss is, in per cent of the baseline's mean; None while one is not measured.

        A hospital without a loss in one of the repeats is left out.
        """
        mine, other = self.losses.get(cells), self.losses.get(cells._replace(method=baseline))
        if mine is None or other is None:
            return None
        known = np.isfinite(other - mine).all(axis=1)
        return crossed_mean(100 * (other - mine)[known] / other[known].mean())

    def score(self, cells: CellGroup) -> Array | None:
        """Return each hospital's mean score, clipped from below, for R² has no floor; None while not measured."""
        return None if cells not in self.scores else np.nanmean(self.scores[cells], axis=1)


def interval_text(estimate: Estimate) -> str:
    low, high = estimate.interval
    return f"{number(low, 1)} to {number(high, 1)}"


def gain_text(estimate: Estimate | None, adjusted: float) -> str:
    if estimate is None:
        return "–"
    word = conclusion(estimate, adjusted, MARGIN)
    return f"{number(estimate.mean, 1)} ({interval_text(estimate)}) {word}"


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis: its gains by cohort, over cohorts, and the p values that its family shares."""

    contrast: Contrast
    gains: dict[str, tuple[Estimate | None, float]]
    pooled: tuple[Any, float]

    @property
    def name(self) -> str:
        return f"{spell(self.contrast.method)} over {spell(self.contrast.baseline)}"

    @property
    def measured(self) -> list[str]:
        return [name for name in COHORTS if self.gains[name][0] is not None]

    @property
    def sentence(self) -> str:
        """The result in words; without a conclusion before all cohorts are measured."""
        pooled, adjusted = self.pooled
        of = f"{len(self.measured)} of {len(COHORTS)} cohorts"
        if pooled is None:
            return f"**{self.name}: no conclusion.** {of} are measured, three are needed."
        low, high = pooled.prediction
        whole = self.measured == COHORTS
        word = conclusion(pooled, adjusted, MARGIN) if whole else "no conclusion yet"
        return (
            f"**{self.name}: {word}.** The loss is {number(pooled.mean, 1)} % lower ({interval_text(pooled)}) over "
            f"{of}. In a new cohort: {number(low, 1)} to {number(high, 1)} %."
        )


def hypotheses(results: Results, network: str) -> list[Hypothesis]:
    """Return the hypotheses with this network; trees, which have none, are tested once with each."""
    families = dict.fromkeys(c.family for c in CONTRASTS)
    done = []
    for family in families:
        contrasts = [c for c in CONTRASTS if c.family == family]
        by_set: dict[str, list[tuple[Estimate | None, float]]] = {}
        for name in (*COHORTS, CONTROL):
            by_set[name] = in_family(
                [
                    results.gain(
                        CellGroup(name, network_of(c.method, network), 0, c.method), c.baseline
                    )
                    for c in contrasts
                ]
            )
        pooled = in_family(
            [
                over_cohorts([gain for name in COHORTS if (gain := by_set[name][i][0])])
                for i in range(len(contrasts))
            ]
        )
        for i, contrast in enumerate(contrasts):
            gains = {name: of[i] for name, of in by_set.items()}
            done.append(Hypothesis(contrast, gains, pooled[i]))
    return done


def in_family(estimates: Sequence[Estimate | None]) -> list[tuple[Any, float]]:
    """Return each estimate with its p value, adjusted for the whole family, also for what is not measured yet."""
    adjusted = holm([1.0 if e is None else e.p for e in estimates])
    return list(zip(estimates, adjusted, strict=True))


def confirmatory_table(every: Sequence[Hypothesis]) -> str:
    heads = ["hypothesis", *COHORTS, f"{CONTROL} (control)", "over cohorts", "a new cohort"]
    rows = []
    for of in every:
        pooled = of.pooled[0]
        between = "–"
        if pooled is not None:
            low, high = pooled.prediction
            between = f"{number(low, 1)} to {number(high, 1)}"
        cells = [gain_text(*of.gains[name]) for name in (*COHORTS, CONTROL)]
        mean = gain_text(*of.pooled)
        if of.measured != COHORTS:  # no conclusion
            mean = mean.rpartition(") ")[0] + ")" if pooled else mean
        rows.append([of.name, *cells, mean, between])
    return table(rows, heads)


def score_table(results: Results) -> str:
    """Return the mean scores of the named methods."""
    rows = []
    for name in (*COHORTS, CONTROL):
        scores = [results.score(CellGroup(name, network_of(m), 0, m)) for m in NAMED]
        if any(score is not None for score in scores):
            rows.append(
                [name, *("–" if s is None else percent(float(np.nanmean(s))) for s in scores)]
            )
    return table(rows, ["cohort", *map(spell, NAMED)])


def curves(results: Results) -> dict[str, dict[str, dict[int, Estimate]]]:
    """Return by data set, method and most training patients (0: all) the gain over training alone."""
    return {
        name: {
            method: {
                most: gain
                for most in (*FEW, 0)
                if (gain := results.gain(CellGroup(name, HIDDEN, most, method), "local"))
            }
            for method in NAMED
            if network_of(method) == HIDDEN and method != "local"
        }
        for name in CURVES
    }


def curves_file(results: Results) -> str:
    rows = [
        (name, method, most or "all", *map(digits, (gain.mean, *gain.interval)))
        for name, methods in curves(results).items()
        for method, of in methods.items()
        for most, gain in of.items()
    ]
    return csv_text(("set", "method", "most", "gain", "low", "high"), rows)


def curve_sentences(results: Results) -> list[str]:
    """Return for each set what FedAvg gains with the fewest patients and with all."""
    ends = {
        name: [f"{number(of[n].mean, 1)} % ({interval_text(of[n])})" for n in (FEW[0], 0)]
        for name, methods in curves(results).items()
        if {FEW[0], 0} <= (of := methods["fedavg"]).keys()
    }
    return [
        f"On {name} FedAvg's loss is lower than Local's by {few} with at most {FEW[0]} training patients a hospital, "
        f"and by {whole} with all."
        for name, (few, whole) in ends.items()
    ]


def picture(results: Results) -> str:
    """Draw the curves of which each point is measured, a panel for each data set, as svg."""
    whole = {
        name: {method: of for method, of in methods.items() if len(of) > len(FEW)}
        for name, methods in curves(results).items()
    }
    panels = {name: methods for name, methods in whole.items() if methods}
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": NAME, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4 * max(1, len(panels)), 3.6), layout="constrained")
        figure.patch.set_facecolor("white")
        for i, (name, methods) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), i, title=name)
            axes.axhline(0, color=INK, linewidth=1)
            for method, of in methods.items():
                means = [gain.mean for gain in of.values()]
                axes.plot(range(len(means)), means, marker="o", label=spell(method))
            axes.set_xticks(range(len(FEW) + 1), [*map(str, FEW), "all"])
            axes.set_xlabel("most training patients of a hospital")
            axes.set_ylabel("lower loss than Local, %")
            axes.legend()
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().decode()


def explored_rows(results: Results, dataset: str) -> list[tuple[str, list[str]]]:
    """Return a row for each method, network and number of training patients of a set; q is over all of them."""
    rows, p_values = [], []
    for cells in results.losses:
        if cells.dataset != dataset:
            continue
        baseline = f"local{BOOSTED}" if cells.network == TREES else "local"
        gain = None if cells.method == baseline else results.gain(cells, baseline)
        score, loss = results.score(cells), results.losses[cells]
        assert score is not None
        values = [
            WORDS[cells.network],
            str(cells.most or "all"),
            percent(float(np.nanmean(score))),
            percent(float(np.nanmin(score))),
            number(float(loss.mean()), 3),
            number(gain.mean, 1) if gain else "–",
            interval_text(gain) if gain and gain.error > 0 else "–",
            "–",
            size_text(results.sizes[cells]),
        ]
        rows.append((spell(cells.method), values))
        p_values.append(gain.p if gain else None)
    known = [p for p in p_values if p is not None]
    shared = iter(false_discovery(known))
    for (_, values), p in zip(rows, p_values, strict=True):
        if p is not None:
            values[-2] = number(next(shared), 3)
    return rows


def html_page(results: Results, lead: Sequence[str]) -> str:
    parts = [
        (name, DATASETS[name].title, explored_rows(results, name))
        for name in SETS
        if name in DATASETS
    ]
    template = report_environment().from_string(PAGE)
    return template.render(lead=lead, parts=[part for part in parts if part[2]], head=HEAD)


def covered(results: Results, form: Form) -> list[str]:
    """Return what is measured, and what is not."""
    lines = [
        "The plan is the long form: 5 folds of 2 seeds, 10 trials of 40 rounds in each search.",
        f"Measured are {count_noun(form.folds, 'fold')} of {count_noun(form.seeds, 'seed')}, {form.trials} trials of "
        f"{form.rounds} rounds."
        + ("" if form == FORMS["long"] else " So all of it is provisional."),
    ]
    parts = {f"Confirmatory, {WORDS[n]} and trees": named_cells(n) for n in (HIDDEN, LINEAR)}
    parts["Few patients"] = curve_cells()
    known = {cells for part in parts.values() for cells in part}
    parts["Exploratory, the other methods and sets"] = [*{*all_cells()} - known]
    for part, of in parts.items():
        fitting = [cells for cells in of if not cells.why_refused(form)]
        missing = [cells for cells in fitting if cells not in results.losses]
        whole = {cells.dataset for cells in fitting} - {cells.dataset for cells in missing}
        names = ", ".join(name for name in SETS if name in whole) or "none"
        count = f"{len(fitting) - len(missing)} of {len(fitting)}"
        lines.append(f"{part}: {count} pairs of set and method. Complete sets: {names}.")
    return lines


def markdown_page(results: Results, form: Form) -> str:
    """Return the page for docs/."""
    first, second = (hypotheses(results, network) for network in (HIDDEN, LINEAR))
    few = curve_sentences(results)
    shown = f"![gain over training alone, by training patients](images/{NAME}.svg)\n"
    return "\n".join(
        [
            INTRODUCTION,
            "## What is measured\n",
            *(f"* {text}" for text in covered(results, form)),
            "\n## Confirmatory result\n",
            *(f"* {of.sentence}" for of in first),
            f"\nBy how many per cent the loss is lower, networks of {WORDS[HIDDEN]} (FedXgbBagging: trees):\n",
            confirmatory_table(first),
            *(
                [f"\nThe same with {WORDS[LINEAR]} models:\n", confirmatory_table(second[:-1])]
                if any(of.measured for of in second[:-1])
                else []
            ),
            "\nScores in per cent on test data, mean over hospitals:\n",
            score_table(results),
            "\n## Few patients\n",
            *([shown] if few else ["Not measured yet."]),
            *(f"* {text}" for text in few),
            "",
        ]
    )


INTRODUCTION = f"""# Reference table

<!-- written by `python -m benchmarks.reference`; do not edit -->

This page is for researchers, reviewers and consortia. After it you know what federating and personalising gain on
patients of real hospitals, and how sure that is.

```console
$ make table                                   # the long form; goes on where it was interrupted
$ make table FORM=short                        # under 90 minutes in two processes
$ python -m benchmarks.reference --out table --form short --sets azpro        # a part of it
$ python -m benchmarks.reference --out table --form short --page docs         # the page, of finished cells
```

* [reference-table.csv]({NAME}.csv): each hospital's loss and score in each seed and fold; this page is made from it.
* [reference-table-runs.csv]({NAME}-runs.csv): the chosen settings.
* [reference-table-curves.csv]({NAME}-curves.csv): the curves.
* [reference-table-missing.csv]({NAME}-missing.csv): what is not in them, with the reason.
* [reference-table.html]({NAME}.html): all rows, with columns that sort.

## Design

* **Hypotheses**, named before the first run. FedAvg has a lower loss than Local. FedAvg-FT, Ditto, FedALA and APPLE
  have a lower loss than FedAvg; the four share the 5 % (Holm). FedXgbBagging has a lower loss than local trees.
* **Cohorts**: {", ".join(COHORTS)}; {CONTROL} is the control, where there is little to gain
  ([data-sets.md](data-sets.md#tables-of-several-hospitals)). Centres are the data's own.
* **Outcome**: the loss on test patients, in per cent of the baseline's mean. It is the log loss of classes, the squared
  error of a measurement, the partial likelihood of survival. The score is second.
* **Test patients**: five folds, so each patient is tested once a seed.
* **Search**: each cell has one of its own, over the learning rate and at most one setting of the method. Its class
  declares the ranges (`search`). Trial 0 has the defaults. Validation data of the hospitals choose trial and round, by
  the loss. The draws differ between sets, methods, seeds and folds.
* **One cohort**: the mean over hospitals, with the spread over hospitals and over folds and seeds. A loss of a method
  needs both, as a gain does.
* **Over cohorts**: random effects with Hartung and Knapp's interval, and the prediction interval of a new cohort.
* **Equivalent**: the 95 % interval lies within ± {MARGIN:g} %; less is too little to matter. A gain or loss that is
  shown there is called small.
* **Few patients**: the same with at most {", ".join(map(str, FEW))} training patients a hospital, a fifth of them for
  validation.
* **Exploratory**: all methods on all sets, by successive halving (the named methods have the whole search). The HTML
  page shows q values (false discovery rate, Benjamini and Hochberg), and concludes nothing.

Scores below {percent(LOWEST)} count as {percent(LOWEST)}, for R² has no floor. `benchmarks/reference_gains.py` has the
equations; [uncertainty.md](uncertainty.md) has their coverage. With six cohorts the prediction is a little narrow.
"""


def page_files(csvs: dict[str, str], name: str) -> dict[str, str]:
    """Return the page's files, from the csv files alone; ``name``: of the form."""
    results, form = Results.read(csvs[f"{NAME}.csv"], csvs[f"{NAME}-runs.csv"]), FORMS[name]
    lead = [
        *covered(results, form),
        "Exploratory: q is the false discovery rate among a set's rows.",
    ]
    return {
        f"{NAME}.md": markdown_page(results, form),
        f"{NAME}.html": html_page(results, lead),
        f"{NAME}-curves.csv": curves_file(results),
        f"images/{NAME}.svg": picture(results),
    }


def write_page(folder: Path, into: Path, name: str) -> None:
    """Write the csv files, and the page in both forms."""
    csvs = csv_files(folder, FORMS[name])
    (into / "images").mkdir(parents=True, exist_ok=True)
    for file, text in {**csvs, **page_files(csvs, name)}.items():
        write_atomically(into / file, text)
