"""Privacy cost of each silo in the runs of a study, from its history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.results.history import History, Row
from strategies.base.transport.reporting import DELTA, EPSILON, STEPS


@dataclass(frozen=True)
class Spent:
    """Epsilon, delta and noised steps of one silo in one run."""

    epsilon: float
    delta: float
    steps: int


def spent(rows: Iterable[Row]) -> dict[str, Spent]:
    """Return each silo's cost in a run, from its last reply. Empty without differential privacy."""
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
    """Return each silo's total cost over the runs of a study: epsilons and deltas add up.

    ``unit``: the privacy unit of the runs. ``budget`` is None: only the sites hold budgets.
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
