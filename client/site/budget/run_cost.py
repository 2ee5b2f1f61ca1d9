"""What differential privacy has cost in a run so far, as a reply tells the server.

Of a deployed silo it is what the site's ledger has of the run, with rounds that were repeated. In a simulation, and of
public data, which have no ledger, it is what the silo's state has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .accounting import epsilon_of
from .ledger import Ledger, Line, charges

KEPT = "privacy"  # in the numbers of a silo's state: noise, rate and steps of each kind of release in this run


def add_cost(plan: Any, numbers: dict[str, Any], ledger: Path | None, run_id: str, silo: str) -> dict[str, float]:
    """Add a round's steps (``plan``) to those of the silo's state (``numbers``); return what the run has cost.

    ``ledger``: the folder that it is in; None: there is none.
    """
    kept = {(one["noise"], one["rate"]): int(one["steps"]) for one in numbers.get(KEPT, ())}
    kind = plan.noise_multiplier, plan.sample_rate
    kept[kind] = kept.get(kind, 0) + plan.steps
    numbers[KEPT] = [{"noise": noise, "rate": rate, "steps": steps} for (noise, rate), steps in kept.items()]
    releases = (in_ledger(ledger, run_id, silo) if ledger else ()) or numbers[KEPT]
    steps = sum(one["steps"] for one in releases)
    return {"epsilon": epsilon_of(releases, plan.delta), "delta": plan.delta, "dp_steps": float(steps)}


def in_ledger(state: Path, run_id: str, silo: str) -> Sequence[Line]:
    """The charges of a run."""
    return [line for line in charges(Ledger(state).lines()) if (line["run-id"], line["silo"]) == (run_id, silo)]
