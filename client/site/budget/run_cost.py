"""The cost of differential privacy in a run so far, as sent to the server in a reply.

For a deployed silo it comes from the site's ledger of the run, including repeated rounds. A simulation, and public
data, have no ledger: it comes from the silo's state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record import Record
from .accounting import epsilon_of
from .ledger import Line, totals

KEPT = "privacy"  # in a silo's state: noise, rate and steps of each kind of release in this run


def add_cost(
    plan: Any, numbers: dict[str, Any], ledger: Path | None, run_id: str, silo: str
) -> dict[str, float]:
    """Add a round's steps (``plan``) to those of the silo's state (``numbers``); return the run's cost so far.

    ``ledger``: the ledger's folder; None if there is none.
    """
    kept = {(one["noise"], one["rate"]): int(one["steps"]) for one in numbers.get(KEPT, ())}
    kind = plan.noise_multiplier, plan.sample_rate
    kept[kind] = kept.get(kind, 0) + plan.steps
    numbers[KEPT] = [
        {"noise": noise, "rate": rate, "steps": steps} for (noise, rate), steps in kept.items()
    ]
    releases = (in_ledger(ledger, run_id, silo) if ledger else ()) or numbers[KEPT]
    steps = sum(one["steps"] for one in releases)
    return {
        "epsilon": epsilon_of(releases, plan.delta),
        "delta": plan.delta,
        "dp_steps": float(steps),
    }


def in_ledger(state: Path, run_id: str, silo: str) -> Sequence[Line]:
    """Return the charges of a run, equal steps together."""
    with Record(state).reading() as db:
        return totals(db, run_id, silo)
