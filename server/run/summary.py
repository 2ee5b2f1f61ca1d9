"""``summary.json``: what a study came to, from its history.

``score`` names the metric of the ``task`` that all of it is about: ``accuracy`` of classes. ``bmcta`` is the papers'
statistic: the best round's unweighted mean over silos of the score on test data (APPLE, section 4), which selects on
test data. ``final`` and ``per_silo`` are taken at the round with the best mean score on validation data. Both are of
the snapshot that the method's paper reports. A silo that misses a round counts with what it had before: a round is not
better for a weak silo's absence.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.metrics import fairness_variance, incentivised_rate
from models.tasks import ENDS, MULTICLASS, Task
from server.run.history import History, Row
from server.run.loop import RoundLoop
from server.run.rundir import RunDirectory
from strategies import strategies
from strategies.base.cards import sample_weights

Values = dict[int, dict[str, float]]  # round -> silo -> value


def write_summary(directory: RunDirectory, history: History, federation: RoundLoop) -> dict[str, Any]:
    """Add one finished run to ``summary.json``."""
    c = federation.common
    sizes = federation.cards, federation.total_bytes, dict(federation.seconds)
    new = run_summary(history, c.strategy, c.seed, c.rounds, *sizes, c.weight_cap, federation.task)
    new["left_out"] = dict(federation.left_out)
    return add_to_summary(directory, [new])


def add_to_summary(
    directory: RunDirectory, new: Sequence[Mapping[str, Any]], order: Sequence[tuple[str, int]] = ()
) -> dict[str, Any]:
    """Add these runs' entries and compute anew what compares them with the study's others.

    They stand in this order of (strategy, seed), or else at the end.
    """
    runs = entries(directory) if directory.summary.exists() else []
    here = {(r["strategy"], r["seed"]) for r in new}
    runs = [r for r in runs if (r["strategy"], r["seed"]) not in here] + [dict(r) for r in new]
    places = {which: place for place, which in enumerate(order)}
    runs.sort(key=lambda r: places.get((r["strategy"], r["seed"]), len(places)))
    summary = {"runs": compare(runs)}
    directory.write_json("summary.json", summary)
    return summary


def entries(directory: RunDirectory) -> list[dict[str, Any]]:
    """What ``summary.json`` says of each run."""
    found: list[dict[str, Any]] = json.loads(directory.summary.read_text())["runs"]
    return found


def run_summary(
    history: History,
    strategy: str,
    seed: int,
    rounds: int,
    cards: Mapping[str, Mapping[str, Any]],
    total_bytes: Mapping[str, int],
    seconds: Mapping[str, float],
    weight_cap: float = 0.0,
    task: Task = MULTICLASS,
) -> dict[str, Any]:
    """One run's entry, still without its gains over other runs.

    ``cards``: per silo its ``n_train``, ``n_test`` and, where known, ``threads``; ``total_bytes``: ``down``, ``up``;
    ``weight_cap``: as in the setting, 0 in a run of before there was one.
    """
    rows = history.of(strategy, seed)
    snapshot = strategies()[strategy].reports

    test, val = (values_by_round(rows, split, snapshot, task.score) for split in ("test", "val"))
    names = sorted(cards)
    tested = sample_weights({n: cards[n]["n_test"] for n in names}, weight_cap)
    best = max(test, key=lambda r: (_mean(test[r]), -r), default=None)
    chosen = max(val, key=lambda r: (_mean(val[r]), -r), default=max(test, default=None))
    score = test.get(chosen or 0, {})
    ends = [metric for metric in ENDS if metric in task.metrics]
    beside = {
        metric: values_by_round(rows, "test", snapshot, task.score, metric).get(chosen or 0, {})
        for metric in (*task.beside, *ends)
    }
    return {
        "strategy": strategy,
        "seed": seed,
        "rounds": rounds,
        "silos": names,
        "reports": snapshot,
        "task": task.name,
        "score": task.score,
        # An older run's card, in a checkpoint, does not tell.
        "threads": {"server": torch.get_num_threads(), **{n: cards[n].get("threads") for n in names}},
        "bmcta": _number(_mean(test[best])) if best is not None else None,
        "bmcta_round": best,
        "final": {
            "round": chosen,
            f"{task.score}_mean": _number(_mean(score)),
            f"{task.score}_weighted": _number(_weighted(score, tested)),
            f"{task.score}_worst": _number(min(score.values(), default=math.nan)),
            **{f"{metric}_mean": _number(_mean(beside[metric])) for metric in task.beside},
            "fairness_variance": _number(fairness_variance(list(score.values()))) if score else None,
        },
        "per_silo": {
            n: {
                "n_train": cards[n]["n_train"],
                "n_test": cards[n]["n_test"],
                task.score: _number(score.get(n, math.nan)),
                **{metric: _number(values.get(n, math.nan)) for metric, values in beside.items()},
                "gain_over_local": None,
                "gain_over_fedavg": None,
            }
            for n in names
        },
        "incentivized_rate": None,
        "bytes_down": total_bytes["down"],
        "bytes_up": total_bytes["up"],
        "seconds": dict(seconds),
    }


def compare(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The runs with their gains over ``local`` and ``fedavg`` of the same seed, where the study has those."""
    result = []
    for run in runs:
        others = {r["strategy"]: r["per_silo"] for r in runs if r["seed"] == run["seed"]}
        score = run.get("score", "accuracy")
        local, fedavg = others.get("local"), others.get("fedavg")
        silos = {
            name: {
                **values,
                "gain_over_local": _gain(score, values, (local or {}).get(name)),
                "gain_over_fedavg": _gain(score, values, (fedavg or {}).get(name)),
            }
            for name, values in run["per_silo"].items()
        }
        rate = None
        if (
            local
            and fedavg
            and all(v["gain_over_local"] is not None and v["gain_over_fedavg"] is not None for v in silos.values())
        ):
            rate = incentivised_rate(
                *([side[n][score] for n in run["per_silo"]] for side in (run["per_silo"], local, fedavg))
            )
        result.append({**run, "per_silo": silos, "incentivized_rate": rate})
    return result


def _gain(score: str, mine: Mapping[str, Any], other: Mapping[str, Any] | None) -> float | None:
    if other is None or mine[score] is None or other.get(score) is None:
        return None
    return float(mine[score] - other[score])


def values_by_round(
    rows: Sequence[Row], split: str, snapshot: str, score: str = "accuracy", metric: str = ""
) -> Values:
    """The score of one run's rows, or another ``metric``. Withheld and unknown values are left out.

    A silo that misses a round has the values of its last one before, or else of its first.
    """
    known = [r for r in rows if r.snapshot == snapshot and not math.isnan(r.value)]
    found = {(r.round, r.silo): r.value for r in known if (r.split, r.metric) == (split, metric or score)}
    evaluated: dict[int, set[str]] = defaultdict(set)
    for r in known:
        if r.metric == score and r.split in ("val", "test"):
            evaluated[r.round].add(r.silo)
    values, rounds = Values(), sorted(evaluated)
    at = {silo: number for number in reversed(rounds) for silo in evaluated[number]}  # at first its first
    for number in rounds:
        at |= dict.fromkeys(evaluated[number], number)
        here = {silo: found[last, silo] for silo, last in at.items() if (last, silo) in found}
        if here:
            values[number] = here
    return values


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values) if values else math.nan


def _weighted(values: Mapping[str, float], counts: Mapping[str, int]) -> float:
    total = sum(counts[n] for n in values)
    return sum(v * counts[n] for n, v in values.items()) / total if total else math.nan


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
