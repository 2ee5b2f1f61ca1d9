"""Total privacy cost of a search's trials: every trial trains on the same patients.

A silo's trials compose as its runs do at a hospital (client/site/budget): the Rényi divergences of all noised steps are
added. The steps come from the silos' states and the history of each trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from client.site.budget.accounting import epsilon_of
from client.site.budget.run_cost import KEPT
from server.results.history import History, spent
from server.results.run_directory import RunDirectory, newest_states
from strategies.base.run_settings import RunSettings

Releases = dict[str, dict[str, Any]]  # silo -> delta, epsilon and the releases (noise, rate, steps)


def releases_of(directory: RunDirectory, run: RunSettings) -> Releases:
    """Return the releases of each silo in a trial so far. Empty without differential privacy.

    Noise and rate come from the state, all steps from the history: a failed trial may not have saved its last state.
    """
    if run.privacy is None or not directory.history.exists():
        return {}
    states = newest_states(directory.checkpoint(run.run_key) / "silos")
    found: Releases = {}
    for silo, cost in spent(History(directory.history).of(run.common.strategy, run.common.seed)).items():
        kept = states[silo].numbers.get(KEPT, []) if silo in states else []
        steps = sum(one["steps"] for one in kept)
        releases = [dict(one) for one in kept]
        if releases:
            releases[0]["steps"] += max(cost.steps - steps, 0)
        found[silo] = {"delta": cost.delta, "epsilon": cost.epsilon, "releases": releases}
    return found


def together(trials: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return total epsilon and delta by silo of several trials' releases (:func:`releases_of`).

    For a trial whose states are lost, both are added to those of the others (basic composition).
    """
    every: dict[str, list[Mapping[str, Any]]] = {}
    for one in trials:
        for silo, found in one.items():
            every.setdefault(silo, []).append(found)
    total = {}
    for silo, own in sorted(every.items()):
        lost = [one for one in own if not one["releases"]]
        known = [release for one in own for release in one["releases"]]
        delta = max((one["delta"] for one in own if one["releases"]), default=0.0)
        epsilon = (epsilon_of(known, delta) if known else 0.0) + sum(one["epsilon"] for one in lost)
        total[silo] = {"epsilon": epsilon, "delta": delta + sum(one["delta"] for one in lost)}
    return total
