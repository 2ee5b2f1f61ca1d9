"""A study, read: :class:`Study` answers the questions of the report from a run directory."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from models.metrics import mean_rank
from models.tasks import ENDS, Task, task_of
from server.report.uncertainty import UNKNOWN, Interval, accuracy_interval, from_intervals, paired_bootstrap
from server.run.history import History, Row
from server.run.rundir import read_toml
from server.run.summary import compare, run_summary, values_by_round
from strategies import strategies
from strategies.base.relationships import Relationships
from strategies.base.settings import UserError, Value
from strategies.base.state import State

NAN = math.nan
EXACT = 1e-9  # two scores nearer than this are equal


@dataclass(frozen=True)
class Score:
    """Score of one method on one silo's test data: mean over seeds, their standard deviation, mean number of samples.

    ``interval`` is of one seed; with several the spread over seeds says more. ``nan`` where withheld.
    """

    mean: float
    spread: float
    interval: Interval
    n_test: int


@dataclass(frozen=True)
class Gain:
    """Difference of two methods in one silo: mean over seeds and 95 % interval."""

    mean: float
    interval: Interval

    @property
    def sign(self) -> int:
        """1 gains, 0 equal, -1 loses."""
        return 0 if math.isnan(self.mean) or abs(self.mean) < EXACT else (1 if self.mean > 0 else -1)

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


class Study:
    """A run directory, read. Raises UserError where ``path`` holds no run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} holds no run: there is no config.toml in it")
        self.config: dict[str, Value] = read_toml(path / "config.toml")
        file = path / "history.csv"
        self.history = History(file) if file.exists() else History()
        self.events = _events(path / "progress.jsonl")
        self.manifest: dict[str, Any] | None = _json(path / "manifest.json")
        self.runs = self._all_runs()

    # -- what there is ------------------------------------------------------------------------------------------------

    def _all_runs(self) -> list[dict[str, Any]]:
        """The summary's entries, and one for each run that began and did not end."""
        runs = list(self.summarised)
        done = {(r["strategy"], r["seed"]) for r in runs}
        for key in dict.fromkeys((r.strategy, r.seed) for r in self.history.rows):
            evaluated = any(r.silo and r.metric == self.task.score for r in self.history.of(*key))
            if key not in done and key[0] in strategies() and evaluated:
                runs.append(self._unfinished(*key))
        order = [n.strip() for n in str(self.config.get("strategy", "")).split(",")]
        first = baselines()
        rank = {n: (first.index(n) if n in first else len(first) + order.index(n)) for n in order}
        return compare(sorted(runs, key=lambda r: (rank.get(r["strategy"], 99), r["strategy"], r["seed"])))

    def _unfinished(self, strategy: str, seed: int) -> dict[str, Any]:
        rows = self.history.of(strategy, seed)
        cards: dict[str, dict[str, int]] = defaultdict(lambda: {"n_train": 0, "n_test": 0})
        for row in rows:
            if row.silo and row.split in ("train", "test") and row.n is not None:
                cards[row.silo][f"n_{row.split}"] = row.n
        totals = {k: int(sum(r.value for r in rows if r.metric == f"bytes_{k}")) for k in ("down", "up")}
        seconds = {"total": sum(r.value for r in rows if r.metric == "round_seconds")}
        cap = float(self.config.get("weight-cap", 0))
        last = max(r.round for r in rows)
        return run_summary(self.history, strategy, seed, last, cards, totals, seconds, cap, self.task)

    @cached_property
    def summarised(self) -> list[dict[str, Any]]:
        """The summary's entries: those of runs that came to their end."""
        runs: list[dict[str, Any]] = (_json(self.path / "summary.json") or {"runs": []})["runs"]
        return runs

    @cached_property
    def task(self) -> Task:
        """What the silos learn."""
        said = (str(found["task"]) for found in (*self.summarised, *self.events) if "task" in found)
        return task_of(next(said, "multiclass"))

    @cached_property
    def methods(self) -> list[str]:
        """Those with results: the baselines first, then in the order asked for."""
        return list(dict.fromkeys(r["strategy"] for r in self.runs))

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({r["seed"] for r in self.runs})

    @cached_property
    def silos(self) -> list[str]:
        return sorted({name for r in self.runs for name in r["silos"]})

    @cached_property
    def planned(self) -> list[tuple[str, int]]:
        """Every (strategy, seed) that the configuration asks for."""
        names = [n.strip() for n in str(self.config.get("strategy", "")).split(",") if n.strip()]
        seeds = [int(s) for s in str(self.config.get("seed", "0")).split(",")]
        return [(n, s) for s in seeds for n in names]

    @cached_property
    def faults(self) -> list[str]:
        """What did not come to its end, one sentence each."""
        last: dict[tuple[str, int], dict[str, Any]] = {}
        for event in self.events:
            last[event.get("strategy", ""), event.get("seed", 0)] = event
        ended = {(r["strategy"], r["seed"]) for r in self.summarised}
        found = []
        for key in self.planned:
            event = last.get(key, {})
            name = f"{spelled(key[0])}, seed {key[1]}"
            rounds = max((r.round for r in self.history.of(*key)), default=0)
            if event.get("event") == "error":
                where = f"after round {rounds}" if rounds else "before its first round ended"
                found.append(f"{name} failed {where}: {event.get('message', 'no reason given')}")
            elif key not in ended and rounds:
                found.append(f"{name} stopped after round {rounds} of {self.config.get('rounds', '?')}")
            elif key not in ended:
                found.append(f"{name} was not run")
        return found

    @cached_property
    def notes(self) -> list[str]:
        """What silos did not take part in, or did not give, one sentence each."""
        return list(dict.fromkeys(str(event["message"]) for event in self.events if event.get("event") == "note"))

    @cached_property
    def absences(self) -> list[tuple[str, int, str, int, str]]:
        """(strategy, seed, silo, rounds left out, the last reason) of silos that a round went on without."""
        return self._named("rejected")

    @cached_property
    def bounds(self) -> list[tuple[str, int, str, int, str]]:
        """(strategy, seed, silo, rounds, the last reason) of silos whose step counted in part only, or not at all."""
        return self._named("bounded")

    def _named(self, metric: str) -> list[tuple[str, int, str, int, str]]:
        counts: dict[tuple[str, int, str], int] = defaultdict(int)
        for row in self.history.rows:
            if row.metric == metric:
                counts[row.strategy, row.seed, row.silo] += 1
        reasons = {
            (e.get("strategy"), e.get("seed"), silo): str(reason)
            for e in self.events
            for silo, reason in (e.get(metric) or {}).items()
        }
        return [(*key, n, reasons.get(key, "")) for key, n in sorted(counts.items())]

    @property
    def simulated(self) -> bool:
        """Whether all silos were in one process of ours."""
        return any(self.path.glob("checkpoint/*/silos"))

    # -- comparing methods --------------------------------------------------------------------------------------------

    def of(self, method: str) -> list[dict[str, Any]]:
        """A method's summary entries, one per seed."""
        return [r for r in self.runs if r["strategy"] == method]

    def values(self, method: str) -> dict[tuple[str, int], tuple[float, int, Interval]]:
        """(silo, seed) -> (score on test data, test samples, the score's interval); ``nan`` where withheld."""
        return {
            (name, r["seed"]): (score := _known(v[self.task.score]), v["n_test"], self._interval(score, v))
            for r in self.of(method)
            for name, v in r["per_silo"].items()
        }

    def _interval(self, score: float, values: Mapping[str, Any]) -> Interval:
        """What the silo says of it; Wilson's of an accuracy, which anybody can tell."""
        if ENDS[0] in self.task.metrics:
            return _known(values[ENDS[0]]), _known(values[ENDS[1]])
        return accuracy_interval(score, values["n_test"])

    def score(self, method: str, silo: str) -> Score:
        found = [v for (name, _), v in self.values(method).items() if name == silo]
        known = [v for v in found if not math.isnan(v[0])]
        n_test = round(statistics.fmean(n for _, n, _ in found)) if found else 0
        if not known:
            return Score(NAN, NAN, UNKNOWN, n_test)
        scores = [score for score, _, _ in known]
        interval = known[0][2] if len(known) == 1 else UNKNOWN
        return Score(statistics.fmean(scores), spread(scores), interval, n_test)

    def sizes(self, silo: str, part: str) -> list[int]:
        """How many ``n_train`` or ``n_test`` samples a silo had: one number, ascending ones where seeds differ."""
        return sorted({r["per_silo"][silo][part] for r in self.runs if silo in r["per_silo"]})

    def gain(self, method: str, base: str, silo: str) -> Gain:
        """What ``method`` adds to ``base`` in one silo.

        The interval: for one seed that of two independent scores (of accuracies Newcombe's), over seeds a paired
        bootstrap of their differences.
        """
        mine, other = self.values(method), self.values(base)
        pairs = [(mine[k], other[k]) for k in mine if k[0] == silo and k in other]
        known = [(a, b) for a, b in pairs if not math.isnan(a[0]) and not math.isnan(b[0])]
        if not known:
            return Gain(NAN, UNKNOWN)
        differences = [a[0] - b[0] for a, b in known]
        (a, _, of_a), (b, _, of_b) = known[0]
        interval = from_intervals(a, of_a, b, of_b) if len(known) == 1 else paired_bootstrap(differences)
        return Gain(statistics.fmean(differences), interval)

    def mean_gain(self, method: str, base: str) -> Gain:
        """Over all silos (and seeds), each counting alike, with a paired bootstrap over them."""
        mine, other = self.values(method), self.values(base)
        known = [d for d in (mine[k][0] - other[k][0] for k in mine if k in other) if not math.isnan(d)]
        return Gain(statistics.fmean(known), paired_bootstrap(known)) if known else Gain(NAN, UNKNOWN)

    def counts(self, method: str, base: str) -> tuple[int, int, int]:
        """Silos that gain, are level, lose."""
        signs = [g.sign for g in (self.gain(method, base, s) for s in self.silos) if not math.isnan(g.mean)]
        return signs.count(1), signs.count(0), signs.count(-1)

    @cached_property
    def chosen_on(self) -> str:
        """The split that the best method was chosen on: ``val``, or ``test`` where no silo has validation data."""
        return "val" if any(r.split == "val" and not math.isnan(r.value) for r in self.history.rows) else "test"

    def _score(self, method: str) -> float:
        """Mean over seeds of the mean score over silos at the final round, on validation data if there are any."""
        scores = []
        for run in self.of(method):
            rows = self.history.of(method, run["seed"])
            values = values_by_round(rows, self.chosen_on, reports(method), self.task.score).get(
                run["final"]["round"], {}
            )
            scores += [statistics.fmean(values.values())] if values else []
        return statistics.fmean(scores) if scores else -1.0

    @cached_property
    def best(self) -> str | None:
        """The method of the headline: the best on validation data among those that exchange anything."""
        candidates = [m for m in self.methods if exchanges(m) and not is_pooled(m)]
        return max(candidates, key=self._score, default=None)

    @cached_property
    def personalised(self) -> str | None:
        """The best method whose result is a model per silo."""
        candidates = [m for m in self.methods if exchanges(m) and not ends_with_one_model(m) and not is_pooled(m)]
        return max(candidates, key=self._score, default=None)

    @cached_property
    def base(self) -> str | None:
        """What gains are counted from: the first baseline of the study that is not the headline's method."""
        return next((b for b in baselines() if b in self.methods and self.best not in (None, b)), None)

    @cached_property
    def columns(self) -> list[str]:
        """The methods of the per-silo table: the baselines, the best personalised one, and the headline's."""
        wanted = [*baselines(), self.personalised, self.best]
        return [m for m in dict.fromkeys(wanted) if m is not None and m in self.methods]

    @cached_property
    def ranks(self) -> dict[str, float]:
        """Mean rank of every method over silos and seeds; empty for a single method."""
        if len(self.methods) < 2:
            return {}
        tables = {m: self.values(m) for m in self.methods}
        keys = sorted(set.intersection(*(set(t) for t in tables.values())))
        return mean_rank({m: [t[k][0] for k in keys] for m, t in tables.items()})

    def final(self, method: str, key: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of an entry of ``final``, or of the run itself (``bmcta``...)."""
        found = [r["final"].get(key) if key in r["final"] else r.get(key) for r in self.of(method)]
        known = [float(v) for v in found if v is not None]
        return (statistics.fmean(known), spread(known)) if known else (NAN, NAN)

    def cost(self, method: str) -> tuple[float, float]:
        """Bytes and seconds of one run, mean over seeds."""
        runs = self.of(method)
        return (
            statistics.fmean(r["bytes_down"] + r["bytes_up"] for r in runs),
            statistics.fmean(r["seconds"].get("total") or 0.0 for r in runs),
        )

    # -- over the rounds ----------------------------------------------------------------------------------------------

    def curve(self, method: str, snapshot: str, silo: str | None = None) -> dict[int, list[float]]:
        """Round -> per seed the score on test data: mean over silos, or of one silo."""
        per_round: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for r in self._score_rows:
            if (r.strategy, r.snapshot) == (method, snapshot) and silo in (None, r.silo):
                per_round[r.round][r.seed].append(r.value)
        return {k: [statistics.fmean(v) for v in seeds.values()] for k, seeds in sorted(per_round.items())}

    @cached_property
    def _score_rows(self) -> list[Row]:
        return [
            r
            for r in self.history.rows
            if r.split == "test" and r.metric == self.task.score and not math.isnan(r.value)
        ]

    def per_round(self, method: str, metric: str) -> dict[int, float]:
        """Round -> mean over seeds of ``round_seconds``, ``bytes_down`` or ``bytes_up``."""
        found: dict[int, list[float]] = defaultdict(list)
        for r in self.history.rows:
            if r.strategy == method and r.metric == metric and not r.silo:
                found[r.round].append(r.value)
        return {k: statistics.fmean(v) for k, v in sorted(found.items())}

    def training_seconds(self, method: str) -> dict[int, float]:
        """Round -> seconds, mean over seeds, without the closing evaluation, in which nothing is trained."""
        last = max((r["rounds"] for r in self.of(method)), default=0)
        return {k: v for k, v in self.per_round(method, "round_seconds").items() if k <= last}

    @cached_property
    def replies(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(method, silo) -> exchanges that brought metrics, single metric values that left the silo, over all seeds."""
        exchanges: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
        values: dict[tuple[str, str], int] = defaultdict(int)
        for r in self.history.rows:
            if r.silo and r.snapshot and not math.isnan(r.value):
                exchanges[r.strategy, r.silo].add((r.seed, r.round))
                values[r.strategy, r.silo] += 1
        return {k: (len(v), values[k]) for k, v in exchanges.items()}

    @cached_property
    def senders(self) -> dict[tuple[str, int], set[tuple[int, str]]]:
        """(method, round) -> the (seed, silo) that trained in it; where training reports nothing, all that replied."""
        trained: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
        replied: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
        for r in self.history.rows:
            if r.silo and r.snapshot:
                (trained if r.split == "train" else replied)[r.strategy, r.round].add((r.seed, r.silo))
        return {**replied, **trained}

    @cached_property
    def metrics_that_left(self) -> list[str]:
        return sorted({r.metric for r in self.history.rows if r.snapshot and not math.isnan(r.value)})

    @cached_property
    def withheld(self) -> list[str]:
        """Silos with a value that stayed in the silo because it rests on too few samples."""
        unknown = {
            r.silo
            for r in self.history.rows
            if r.split == "test" and r.metric == self.task.score and r.value != r.value
        }
        return sorted(unknown - {r.silo for r in self.history.rows if r.split == "test" and r.metric == "loss"})

    @cached_property
    def relationships(self) -> Relationships | None:
        """Those of the first run that has some, where the silos' states are ours to read (simulations)."""
        return self._related[1] if self._related else None

    @cached_property
    def related_by(self) -> str:
        """What :attr:`relationships` shows: the method, and its own words."""
        method = strategies()[self._related[0]] if self._related else None
        return f"{method.spelling}: {method.relationships}" if method else ""

    @cached_property
    def _related(self) -> tuple[str, Relationships] | None:
        for name, seed in self.planned:
            method = strategies().get(name)
            if method is not None and method.relationships:
                states = newest_states(self.path / "checkpoint" / f"{name}-{seed}" / "silos")
                if found := method.read_relationships(states):
                    return name, found
        return None


def newest_states(folder: Path) -> dict[str, State]:
    """The newest state of each silo below ``folder`` that can be read."""
    states: dict[str, State] = {}
    for file in sorted(folder.glob("*/round-*.safetensors")):
        with contextlib.suppress(ValueError):
            states[file.parent.name] = State.load(file)
    return states


# ---------------------------------------------------------------------------------------------------------------------
# Small things


def _known(value: float | None) -> float:
    return NAN if value is None else value


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds (n - 1); ``nan`` for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else NAN


def spelled(method: str) -> str:
    """As its paper spells it; a method no longer known under its name on the command line."""
    known = strategies()
    return (known[method].spelling if method in known else "") or method


def baselines() -> list[str]:
    """The methods that others' gains are counted from: training alone before what is exchanged."""
    return sorted((n for n, s in strategies().items() if s.baseline), key=exchanges)


def alone() -> str:
    """The baseline that exchanges nothing."""
    return next(n for n in baselines() if not exchanges(n))


def exchanges(method: str) -> bool:
    """Whether the method sends anything; one no longer known did."""
    known = strategies()
    return method not in known or any(part != "0" for part in known[method].sends)


def is_pooled(method: str) -> bool:
    """Whether it is the reference that has everybody's data in one place: nothing to recommend."""
    known = strategies()
    return method in known and known[method].pooled


def ends_with_one_model(method: str) -> bool:
    known = strategies()
    return method in known and known[method].one_model


def reports(method: str) -> str:
    """The snapshot that a method's paper evaluates; that of a method no longer known: personal."""
    known = strategies()
    return known[method].reports if method in known else "personal"


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:  # the last line of a killed run
            continue
    return [e for e in events if isinstance(e, dict)]


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else None
