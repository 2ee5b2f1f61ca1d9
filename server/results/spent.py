"""What differential privacy has cost each silo in the runs of a study, as its history has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.results.history import History, Row
from strategies.base.schema.reporting import DELTA, EPSILON, STEPS


@dataclass(frozen=True)
class Spent:
    """Epsilon, delta and noised steps of one silo in one run."""

    epsilon: float
    delta: float
    steps: int


def spent(rows: Iterable[Row]) -> dict[str, Spent]:
    """Return what a run has cost each silo: what its last reply said. Empty without differential privacy."""
    last: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.silo and not row.split and row.metric in (EPSILON, DELTA, STEPS):
            last[row.silo][row.metric] = row.value
    return {
        silo: Spent(values[EPSILON], values[DELTA], int(values[STEPS]))
        for silo, values in sorted(last.items())
        if values.keys() >= {EPSILON, DELTA, STEPS}
    }


def budgets_of(history: History, unit: str) -> list[dict[str, Any]]:
    """Each silo with what the runs of a study have cost it: epsilons and deltas of several runs add up.

    ``unit``: what the runs protected. No budget is known here: each site keeps its own.
    """
    runs: dict[str, list[tuple[str, Spent]]] = defaultdict(list)
    for strategy, seed in dict.fromkeys((row.strategy, row.seed) for row in history.rows):
        for silo, cost in spent(history.of(strategy, seed)).items():
            runs[silo].append((f"{strategy}-{seed}", cost))
    return [
        {
            "cohort": silo,
            "unit": unit,
            "delta": sum(cost.delta for _, cost in costs),
            "spent": sum(cost.epsilon for _, cost in costs),
            "budget": None,
            "left": None,
            "runs": [{"run": run, "epsilon": cost.epsilon, "steps": cost.steps} for run, cost in costs],
        }
        for silo, costs in sorted(runs.items())
    ]
