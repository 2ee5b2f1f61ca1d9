"""The results of a study, ``summary.json``, computed from its history.

``score`` names the task's main metric, for example ``accuracy``. ``bmcta`` is the papers' statistic: the best round's
unweighted mean over silos of the score on test data (APPLE, section 4), which selects on test data. ``final`` and
``per_silo`` are taken at the round with the best mean score on validation data. All use the snapshot that the method's
paper reports. A silo that misses a round keeps its earlier score, so that a round does not become better because a
weak silo is absent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from models.evidence.measure import CALIBRATION, Evidence
from models.metrics import fairness_variance, incentivised_rate
from models.tasks import ENDS, MULTICLASS, Task
from partitions.common.adding import added
from partitions.schema import read_schema
from server.results.history import History, Row, joined_in, mean, spent_by_silo
from server.results.reading import read_summary, which_of
from server.results.run_directory import RunDirectory
from strategies import strategies
from strategies.base.transport.data_summary import sample_weights
from strategies.base.transport.reporting import SCHEMA

SiloValues = Mapping[str, float]
Values = dict[int, dict[str, float]]  # round -> silo -> value


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Values of a finished run that its history does not hold.

    ``silos``: per silo its ``n_train``, ``n_test`` and, where known, ``threads``; ``total_bytes``: ``down``, ``up``;
    ``weight_cap``: the setting, 0 in a run made before it existed; ``left_out``: silo -> reason; ``hold_out``: results
    of the held-out hospitals (server/run/newcomers.py); ``evidence``: for each silo's reported model
    (``models/evidence/measure.py``).
    """

    strategy: str
    seed: int
    rounds: int
    silos: Mapping[str, Mapping[str, Any]]
    total_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    weight_cap: float = 0.0
    task: Task = MULTICLASS
    left_out: Mapping[str, str] = field(default_factory=dict)
    # By early stopping: ``since``, ``planned``, ``patience``, ``min_delta``
    stopped: Mapping[str, float] | None = None
    hold_out: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)


def write_summary(
    directory: RunDirectory, history: History, run: FinishedRun
) -> dict[str, Any]:
    """Add one finished run to ``summary.json``."""
    return add_to_summary(directory, [summary_entry(history, run)])


def summary_entry(history: History, run: FinishedRun) -> dict[str, Any]:
    """Return one run's entry with its silos that were left or held out, without its gains over other runs."""
    held = {"hold_out": dict(run.hold_out)} if run.hold_out else {}
    return {**run_summary(history, run), "left_out": dict(run.left_out), **held}


def add_to_summary(
    directory: RunDirectory,
    new: Sequence[Mapping[str, Any]],
    order: Sequence[tuple[str, int]] = (),
) -> dict[str, Any]:
    """Add these runs' entries, and compute the gains of all runs of the study again.

    Entries are sorted by ``order`` of (strategy, seed); others stand at the end.
    """
    before = read_summary(directory.summary)
    runs: list[dict[str, Any]] = before["runs"]
    here = set(map(which_of, new))
    runs = [r for r in runs if which_of(r) not in here] + [dict(r) for r in new]
    places = {which: place for place, which in enumerate(order)}
    runs.sort(key=lambda r: places.get(which_of(r), len(places)))
    summary = {**before, "runs": compare(runs)}
    directory.write_json("summary.json", summary)
    return summary


def run_summary(history: History, run: FinishedRun) -> dict[str, Any]:
    """Return one run's entry without its gains over other runs (:func:`compare` adds them)."""
    rows, task = history.of(run.strategy, run.seed), run.task
    snapshot = strategies()[run.strategy].info.reports
    secondary = [*task.secondary_metrics, *(end for end in ENDS if end in task.metrics)]
    test, val, *others = (
        values_by_round(rows, split, snapshot, task.score, metric)
        for split, metric in (("test", ""), ("val", ""), *(("test", m) for m in secondary))
    )
    best, chosen = _best_round(test), _best_round(val) or max(test, default=None)
    measured = {
        metric: values.get(chosen or 0, {})
        for metric, values in zip([task.score, *secondary], [test, *others], strict=True)
    }
    evaluated = rounds_by_round(rows, snapshot, task.score).get(chosen or 0, {})
    names, costs = sorted(run.silos), spent_by_silo(rows)
    return {
        "strategy": run.strategy,
        "seed": run.seed,
        "rounds": run.rounds,
        "stopped": None if run.stopped is None else dict(run.stopped),
        "silos": names,
        **({"joined": joined} if (joined := joined_in(rows)) else {}),
        **unlabelled_in(run),
        "reports": snapshot,
        "task": task.name,
        "score": task.score,
        "threads": {
            "server": torch.get_num_threads(),
            **{n: run.silos[n].get("threads") for n in names},
        },
        "bmcta": _mean(test.get(best or 0, {})),
        "bmcta_round": best,
        "final": {"round": chosen, **_over_silos(run, measured)},
        "per_silo": {
            n: {
                **{key: run.silos[n][key] for key in ("n_train", "n_test")},
                **{metric: by_silo.get(n) for metric, by_silo in measured.items()},
                **_evidence(run.evidence.get(n, {})),
                "round": evaluated.get(n),  # of these values
                **({"epsilon": c.epsilon, "delta": c.delta} if (c := costs.get(n)) else {}),
                **dict.fromkeys(("gain_over_local", "gain_over_fedavg")),
            }
            for n in names
        },
        "incentivized_rate": None,
        "bytes_down": run.total_bytes["down"],
        "bytes_up": run.total_bytes["up"],
        "seconds": dict(run.seconds),
    }


def unfinished_summary(
    history: History, strategy: str, seed: int, task: Task, weight_cap: float
) -> dict[str, Any]:
    """Return the entry of a run that began and did not end, of what its history holds."""
    rows = history.of(strategy, seed)
    silos: dict[str, dict[str, int]] = defaultdict(lambda: {"n_train": 0, "n_test": 0})
    for row in rows:
        if row.silo and row.split in ("train", "test") and row.n is not None:
            silos[row.silo][f"n_{row.split}"] = row.n

    def total(metric: str) -> float:
        return sum(row.value for row in rows if row.metric == metric)

    run = FinishedRun(
        strategy=strategy,
        seed=seed,
        rounds=max(r.round for r in rows),
        silos=silos,
        total_bytes={key: int(total(f"bytes_{key}")) for key in ("down", "up")},
        seconds={"total": total("round_seconds")},
        weight_cap=weight_cap,
        task=task,
    )
    return run_summary(history, run)


def unlabelled_in(run: FinishedRun) -> dict[str, dict[str, list[str]]]:
    """Return ``unlabelled``: each label with the silos that lack it, whose scores leave it out; empty for none."""
    lacking = dict[str, list[str]]()
    for name, summary in sorted(run.silos.items()):
        for label in read_schema(summary.get(SCHEMA, "")).unlabelled:
            lacking.setdefault(label, []).append(name)
    return {"unlabelled": lacking} if lacking else {}


def _evidence(evidence: Evidence) -> dict[str, Any]:
    """Return the numbers on calibration of a silo's evidence, and the rest under one key."""
    numbers = {key: evidence.get(key) for key in CALIBRATION}
    return {**numbers, "evidence": {k: v for k, v in evidence.items() if k not in CALIBRATION}}


def _over_silos(
    run: FinishedRun, measured: Mapping[str, SiloValues]
) -> dict[str, float | None]:
    """Return the means over silos at the reported round, and the worst value and variance of the score."""
    name, score = run.task.score, measured[run.task.score]
    tested = sample_weights(
        {n: silo["n_test"] for n, silo in sorted(run.silos.items())}, run.weight_cap
    )
    samples = sum(tested[n] for n in score)
    return {
        f"{name}_mean": _mean(score),
        f"{name}_weighted": added(v * tested[n] for n, v in score.items()) / samples
        if samples
        else None,
        f"{name}_worst": min(score.values(), default=None),
        **{f"{metric}_mean": _mean(measured[metric]) for metric in run.task.secondary_metrics},
        "fairness_variance": fairness_variance(list(score.values())) if score else None,
    }


def evidence_in(entry: Mapping[str, Any]) -> dict[str, Evidence]:
    """Return by silo the evidence in a run's entry; empty for a run made before evidence existed."""
    by_silo = {}
    for name, values in entry["per_silo"].items():
        numbers = {key: values[key] for key in CALIBRATION if values.get(key) is not None}
        by_silo[name] = {**numbers, **values.get("evidence", {})}
    return by_silo


def round_name(number: int, rounds: int) -> str:
    """Return ``round 17``; ``after round 25`` for the closing exchange of 25 rounds."""
    return f"round {number}" if number <= rounds else f"after round {rounds}"


def early_stop(run: Mapping[str, Any]) -> str:
    """Return a sentence on the early stop in a run's entry; empty if the run did not stop early."""
    if not (why := run.get("stopped")):
        return ""
    return (
        f"stopped after round {run['rounds']} of {why['planned']}, because the mean validation score was not better "
        f"since round {why['since']} (patience = {why['patience']}, min-delta = {why['min_delta']:g})"
    )


def compare(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with their gains over ``local`` and ``fedavg`` of the same seed, if the study has those."""
    result = []
    for run in runs:
        others = {r["strategy"]: r["per_silo"] for r in runs if r["seed"] == run["seed"]}
        bases = {name: others.get(name, {}) for name in ("local", "fedavg")}
        score = run["score"]
        gains = {
            silo: {
                f"gain_over_{name}": _gain(score, values, base.get(silo))
                for name, base in bases.items()
            }
            for silo, values in run["per_silo"].items()
        }
        known = all(bases.values()) and None not in (
            gain for of in gains.values() for gain in of.values()
        )
        sides = (
            [side[silo][score] for silo in gains] for side in (run["per_silo"], *bases.values())
        )
        rate = incentivised_rate(*sides) if known else None
        silos = {silo: {**values, **gains[silo]} for silo, values in run["per_silo"].items()}
        result.append({**run, "per_silo": silos, "incentivized_rate": rate})
    return result


def _gain(score: str, mine: Mapping[str, Any], other: Mapping[str, Any] | None) -> float | None:
    if other is None or mine[score] is None or other.get(score) is None:
        return None
    return float(mine[score] - other[score])


def values_by_round(
    rows: Sequence[Row], split: str, snapshot: str, score: str = "accuracy", metric: str = ""
) -> Values:
    """Return by round and silo the score in one run's rows, or another ``metric``, without withheld values.

    A silo that misses a round has the values of its last earlier round, or else of its first one.
    """
    known = {
        (r.round, r.silo): r.value
        for r in rows
        if (r.split, r.snapshot, r.metric) == (split, snapshot, metric or score)
        and not math.isnan(r.value)
    }
    values = Values()
    for number, at in rounds_by_round(rows, snapshot, score).items():
        here = {silo: known[last, silo] for silo, last in at.items() if (last, silo) in known}
        if here:
            values[number] = here
    return values


def rounds_by_round(
    rows: Sequence[Row], snapshot: str, score: str
) -> dict[int, dict[str, int]]:
    """Return for each round, by silo in the order of the names, the round that its values come from."""
    evaluated: dict[int, set[str]] = defaultdict(set)
    for r in rows:
        scored = r.snapshot == snapshot and r.metric == score and r.split in ("val", "test")
        if scored and not math.isnan(r.value):
            evaluated[r.round].add(r.silo)
    rounds = sorted(evaluated)
    first = {silo: number for number in reversed(rounds) for silo in evaluated[number]}
    at, result = {silo: first[silo] for silo in sorted(first)}, {}
    for number in rounds:
        at |= dict.fromkeys(evaluated[number], number)
        result[number] = dict(at)
    return result


def _best_round(values: Values) -> int | None:
    """Return the first round with the best mean; None for no round."""
    return max(values, key=lambda r: (mean(values[r]), -r), default=None)


def _mean(values: SiloValues) -> float | None:
    return mean(values) if values else None
