"""Values of the report, read from a run directory by :class:`StudyResults`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from client.protocol.study import Analysis
from models.metrics import mean_rank
from models.tasks import ENDS, Task, task_of
from partitions.common.names import split_names
from server.report.inference import (
    NAN,
    UNKNOWN,
    Gain,
    Score,
    Tested,
    accuracy_interval,
    finite_or_nan,
    from_intervals,
    least_error,
    over_hospitals,
    over_seeds,
    spread,
)
from server.report.methods import alone, baselines, exchanges, info_of, shared
from server.report.pairs import Pair, shared_means
from server.results.history import HEADER, History
from server.results.reading import read_events, read_json, read_summary, which_of
from server.results.registration import registration_of
from server.results.run_directory import check_holds_run, read_toml
from server.results.study import TUNING
from server.results.summary import compare, unfinished_summary, values_by_round
from strategies import strategies
from strategies.base.settings import Value


class StudyResults:
    """The results in a run directory. Raises UserError if ``path`` holds no run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_holds_run(path)
        self.config: dict[str, Value] = read_toml(path / "config.toml")
        # First: a run that ends meanwhile has its rows before its entry
        self.summary = read_summary(path / "summary.json")
        self.history = History.stored(path / "history.csv")
        self.events = read_events(path / "progress.jsonl")
        self.manifest: dict[str, Any] | None = read_json(path / "manifest.json")
        self.registration = registration_of(path)
        # Of finished runs
        self.summarised: list[dict[str, Any]] = self.summary["runs"]
        self.runs = self._all_runs()
        self._differences: dict[tuple[str, str], dict[str, dict[int, Gain]]] = {}

    def _all_runs(self) -> list[dict[str, Any]]:
        """Return the summary's entries, and an entry for each run that began and did not end."""
        runs = list(self.summarised)
        for key in self.history.runs():
            evaluated = any(
                r.silo and r.metric == self.task.score for r in self.history.of(*key)
            )
            if key not in self.finished and key[0] in strategies() and evaluated:
                cap = float(self.config.get("weight-cap", 0))
                runs.append(unfinished_summary(self.history, *key, self.task, cap))
        order = [*baselines(), *(name for name, _ in self.planned)]
        rank = {name: place for place, name in reversed(list(enumerate(order)))}
        runs.sort(key=lambda r: (rank.get(r["strategy"], math.inf), r["strategy"], r["seed"]))
        return compare(runs)

    @cached_property
    def finished(self) -> set[tuple[str, int]]:
        """Strategy and seed of the finished runs."""
        return set(map(which_of, self.summarised))

    @cached_property
    def task(self) -> Task:
        """The task that the silos train on."""
        entries = (*self.summarised, *self.events)
        return task_of(next((str(of["task"]) for of in entries if "task" in of), "multiclass"))

    @cached_property
    def methods(self) -> list[str]:
        """The methods with results: the baselines first, then the others in the order of the configuration."""
        return list(dict.fromkeys(r["strategy"] for r in self.runs))

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds with results."""
        return sorted({r["seed"] for r in self.runs})

    @cached_property
    def silos(self) -> list[str]:
        return sorted({name for r in self.runs for name in r["silos"]})

    @cached_property
    def unlabelled(self) -> dict[str, list[str]]:
        """The hospitals that do not label a finding or an outline, by its name."""
        return {k: v for run in self.runs for k, v in run.get("unlabelled", {}).items()}

    @cached_property
    def planned(self) -> list[tuple[str, int]]:
        """Every (strategy, seed) of the configuration."""
        names = split_names(self.config.get("strategy", ""))
        seeds = map(int, split_names(self.config.get("seed", 0)))
        return [(name, seed) for seed, name in itertools.product(seeds, names)]

    @property
    def searches(self) -> list[dict[str, Any]]:
        """The searches that the settings come from (``silofl simulate --tuned``)."""
        return list((read_json(self.path / TUNING) or {}).get("searches", []))

    @property
    def unsearched(self) -> list[int]:
        """The seeds whose settings were chosen by a search on another seed's split."""
        searched = {search["seed"] for search in self.searches}
        return [seed for seed in self.seeds if searched and seed not in searched]

    @property
    def split(self) -> tuple[str, ...]:
        """The simulated data set and its partition; empty if the data are the silos' own."""
        if not (self.manifest or self.simulated):
            return ()
        about = self.manifest or self.config
        return Path(str(about.get("dataset", ""))).name, str(about.get("partition", ""))

    @cached_property
    def joined(self) -> dict[str, dict[int, list[str]]]:
        """Methods by silo and first round, for silos that joined during a run."""
        joined: dict[str, dict[int, list[str]]] = {}
        for run in self.runs:
            for silo, first in run.get("joined", {}).items():
                methods = joined.setdefault(silo, {}).setdefault(first, [])
                methods += [] if run["strategy"] in methods else [run["strategy"]]
        return joined

    @property
    def simulated(self) -> bool:
        """Whether all silos were simulated: their states are in the run directory."""
        return any(self.path.glob("checkpoint/*/silos"))

    def of(self, method: str) -> list[dict[str, Any]]:
        """Return a method's summary entries, one per seed."""
        return [r for r in self.runs if r["strategy"] == method]

    @cached_property
    def tests(self) -> dict[str, dict[tuple[str, int], Tested]]:
        """By method, silo and seed the test result of the silo's model; the score is ``nan`` if withheld.

        Its interval is the one that the silo sent, or Wilson's for an accuracy.
        """
        tested: dict[str, dict[tuple[str, int], Tested]] = defaultdict(dict)
        sent = ENDS if ENDS[0] in self.task.metrics else ()
        for r in self.runs:
            for name, v in r["per_silo"].items():
                score, n = finite_or_nan(v[self.task.score]), v["n_test"]
                low, high = (
                    (finite_or_nan(v[e]) for e in sent) if sent else accuracy_interval(score, n)
                )
                tested[r["strategy"]][name, r["seed"]] = Tested(score, n, (low, high))
        return tested

    def score(self, method: str, silo: str) -> Score:
        tests = [tested for (name, _), tested in self.tests[method].items() if name == silo]
        scored = [tested for tested in tests if not math.isnan(tested.score)]
        n_test = round(statistics.fmean(tested.n for tested in tests)) if tests else 0
        if not scored:
            return Score(NAN, NAN, UNKNOWN, n_test)
        scores = [tested.score for tested in scored]
        interval = scored[0].interval if len(scored) == 1 else UNKNOWN
        return Score(statistics.fmean(scores), spread(scores), interval, n_test)

    def scored(self, methods: Sequence[str]) -> list[str]:
        """Return the silos that have a score of one of these methods."""
        return [
            silo
            for silo in self.silos
            if any(not math.isnan(self.score(method, silo).mean) for method in methods)
        ]

    def sizes(self, silo: str, part: str) -> list[int]:
        """Return a silo's ``n_train`` or ``n_test``: the different values over runs, ascending."""
        return sorted({r["per_silo"][silo][part] for r in self.runs if silo in r["per_silo"]})

    def count_tested(self, silos: Iterable[str]) -> list[int]:
        """Return the different sizes of these silos' test parts, ascending, without empty ones."""
        return sorted({n for silo in silos for n in self.sizes(silo, "n_test")} - {0})

    def differences(self, method: str, base: str) -> dict[str, dict[int, Gain]]:
        """Return by silo and seed the difference of ``method`` and ``base``, without withheld scores."""
        if (method, base) not in self._differences:
            mine, other = self.tests[method], self.tests[base]
            by_silo: dict[str, dict[int, Gain]] = {silo: {} for silo in self.silos}
            for silo, seed in sorted(mine.keys() & other.keys()):
                a, b = mine[silo, seed], other[silo, seed]
                if not math.isnan(difference := a.score - b.score):
                    interval = from_intervals(a.score, a.interval, b.score, b.interval)
                    by_silo[silo][seed] = Gain(difference, interval)
            self._differences[method, base] = by_silo
        return self._differences[method, base]

    def gain(self, method: str, base: str, silo: str) -> Gain:
        """Return the gain over ``base`` in one silo (:func:`over_seeds`)."""
        return over_seeds(self.differences(method, base)[silo])

    def gains(self, method: str, base: str) -> dict[str, Gain]:
        """Return the gain in each silo that has one."""
        return {
            silo: over_seeds(seeds)
            for silo, seeds in self.differences(method, base).items()
            if seeds
        }

    def mean_gain(self, method: str, base: str, without: Collection[str] = ()) -> Gain:
        """Return the mean gain over silos, with equal weights (:func:`over_hospitals`)."""
        kept = [gain for silo, gain in self.gains(method, base).items() if silo not in without]
        errors = list(map(least_error, kept))
        return over_hospitals([g.mean for g in kept], self.count_compared(method, base), errors)

    def silo_means(self, method: str, base: str) -> dict[str, float]:
        """Return each silo's difference of ``method`` and ``base`` as a mean over seeds, for silos that have one."""
        return {silo: gain.mean for silo, gain in self.gains(method, base).items()}

    def count_compared(self, method: str, base: str) -> int:
        """Return the number of methods that share the 5 % of their intervals (Bonferroni).

        What is named in advance has 5 % of its own: the registered comparison, and federating, FedAvg over training
        alone. Validation data choose the others at the hospitals that test them, so that the choice counts.
        """
        analysis = self.analysis
        registered = analysis and (analysis.method, analysis.baseline) == (method, base)
        if registered or (method, base) == (shared(), alone()):
            return 1
        return max(1, sum(m not in baselines() for m in self.methods))

    def paired_seeds(self, method: str, base: str) -> list[int]:
        """Return the seeds for which any silo has a score of both methods."""
        return sorted(
            {seed for seeds in self.differences(method, base).values() for seed in seeds}
        )

    def counts(self, method: str, base: str) -> tuple[int, int, int]:
        """Return the numbers of silos with a gain, with equal scores, and with a loss."""
        signs = [gain.sign for gain in self.gains(method, base).values()]
        return signs.count(1), signs.count(0), signs.count(-1)

    @cached_property
    def chosen_on(self) -> str:
        """The split on which the best method was chosen: ``val``, or ``test`` if no silo has validation data."""
        return "test" if self.rows.query("split == 'val'").value.isna().all() else "val"

    @cached_property
    def _scores(self) -> dict[str, float]:
        """By candidate with a score on :attr:`chosen_on` its mean over silos and seeds (:func:`shared_means`)."""
        return shared_means({m: self.final_values(m, self.chosen_on) for m in self.candidates})

    def _score(self, method: str) -> float:
        return self._scores.get(method, -math.inf)

    @property
    def chosen_among(self) -> int:
        """Number of methods among which :attr:`chosen_on` has chosen :attr:`best`; 1 if it is registered."""
        registered = self.analysis and self.analysis.method == self.best
        return 1 if registered else max(1, len(self._scores))

    def final_values(self, method: str, split: str, metric: str = "") -> dict[Pair, float]:
        """Return by silo and seed the score, or another ``metric``, at the final round."""
        values = dict[Pair, float]()
        for run in self.of(method):
            rows = self.history.of(method, run["seed"])
            which = split, info_of(method).reports, self.task.score, metric
            here = values_by_round(rows, *which).get(run["final"]["round"], {})
            values |= {(silo, run["seed"]): value for silo, value in here.items()}
        return values

    @property
    def analysis(self) -> Analysis | None:
        """What the run's study tests, fixed in advance; None: nothing."""
        return self.registration.study.analysis if self.registration else None

    @cached_property
    def best(self) -> str | None:
        """The method of the headline: the registered one, or the best with an exchange on :attr:`chosen_on`."""
        if self.analysis and self.analysis.method in self.methods:
            return self.analysis.method
        return max(self.candidates, key=self._score, default=None)

    @property
    def headed(self) -> str:
        """The method of the headline: :attr:`best`, or the first one if none has an exchange; empty without results."""
        return self.best or next(iter(self.methods), "")

    @cached_property
    def personalised(self) -> str | None:
        """The best method that ends with a model per silo."""
        several_models = (m for m in self.candidates if not info_of(m).role.one_model)
        return max(several_models, key=self._score, default=None)

    @property
    def candidates(self) -> list[str]:
        """The methods among which :attr:`best` is chosen: those with an exchange, without ``pooled``."""
        return [m for m in self.methods if exchanges(m) and not info_of(m).role.pooled]

    @cached_property
    def base(self) -> str | None:
        """The method that gains are measured against: registered, or the study's first baseline but :attr:`best`."""
        if self.analysis and {self.analysis.method, self.analysis.baseline} <= {*self.methods}:
            return self.analysis.baseline
        return next(
            (b for b in baselines() if b in self.methods and self.best not in (None, b)), None
        )

    @cached_property
    def columns(self) -> list[str]:
        """The methods of the per-silo table: the baselines, the best personalised one, and :attr:`best`."""
        wanted = [*baselines(), self.personalised, self.best]
        return [m for m in dict.fromkeys(wanted) if m is not None and m in self.methods]

    @cached_property
    def ranks(self) -> dict[str, float]:
        """Mean rank of every method over silos and seeds; empty for a single method."""
        if len(self.methods) < 2:
            return {}
        keys = sorted(set.intersection(*map(set, self.tests.values())))
        return mean_rank({m: [self.tests[m][k].score for k in keys] for m in self.methods})

    def final(self, method: str, key: str) -> tuple[float, float]:
        """Return mean and standard deviation over seeds of an entry of ``final`` or of the run (``bmcta``...)."""
        of_seeds = ({**r, **r["final"]}.get(key) for r in self.of(method))
        values = [float(v) for v in of_seeds if v is not None]
        return (statistics.fmean(values), spread(values)) if values else (NAN, NAN)

    def mean_score(self, method: str) -> tuple[float, float]:
        """Return mean and standard deviation over seeds of the mean score over silos."""
        return self.final(method, f"{self.task.score}_mean")

    def cost(self, method: str) -> tuple[float, float]:
        """Return bytes and seconds of one run, mean over seeds."""
        size = statistics.fmean(r["bytes_down"] + r["bytes_up"] for r in self.of(method))
        return size, statistics.fmean(r["seconds"].get("total") or 0.0 for r in self.of(method))

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The history as a table."""
        return pd.DataFrame(self.history.rows, columns=HEADER)

    @cached_property
    def silo_rows(self) -> pd.DataFrame:
        """The rows of silos' metrics."""
        return self.rows.query("silo != '' and snapshot != ''")

    def curve(
        self, method: str, snapshot: str, silo: str | None = None
    ) -> dict[int, list[float]]:
        """Return by round the test scores of the seeds: means over silos, or of one silo."""
        rows = self._score_rows.query("strategy == @method and snapshot == @snapshot").dropna()
        rows = rows if silo is None else rows[rows.silo == silo]
        means = rows.groupby(["round", "seed"]).value.agg(statistics.fmean)
        return {number: list(of) for number, of in means.groupby("round")}

    @cached_property
    def _score_rows(self) -> pd.DataFrame:
        rows = self.silo_rows.query("split == 'test' and metric == @self.task.score")
        return rows[["strategy", "seed", "round", "silo", "snapshot", "value"]]

    def per_round(self, method: str, metric: str, silo: str = "") -> dict[int, float]:
        """Return by round the mean over seeds of a metric that has no split: of the whole round, or of a silo."""
        rows = self.rows.query("strategy == @method and metric == @metric and silo == @silo")
        of_round = rows[rows.split == ""].groupby("round").value
        return dict(of_round.agg(statistics.fmean))

    @cached_property
    def withheld(self) -> list[str]:
        """Silos that withheld a score because it is computed from too few samples."""
        unknown = self._score_rows.query("value.isna()").silo
        lossy = self.silo_rows.query("split == 'test' and metric == 'loss'").silo
        return sorted({*unknown} - {*lossy})
