"""Section on the tuning of the methods: budgets, chosen settings, and the search space."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from server.report.answer import unsearched
from server.report.html import duration, lines, size_text, with_spread
from server.report.methods import spelled
from server.report.scores import spread
from server.report.study import Study
from server.report.templates import render
from server.results.reading import read_json
from server.results.tuned import STATES, TUNING

Search = Mapping[str, Any]
OBJECTIVES = {"mean": "mean over hospitals", "worst": "worst hospital"}


def tuning_section(study: Study) -> Markup:
    """Render the section; empty if the study does not use a search (``silofl simulate --tuned``)."""
    searches: Sequence[Search] = (read_json(study.path / TUNING) or {}).get("searches", [])
    if not searches:
        return Markup()
    asked = searches[0]["asked"]
    methods = [method for method in study.methods if method in asked["strategies"]]
    rounds = {method: {search["cost"][method]["rounds"] for search in searches} for method in methods}
    private = any(search["privacy"] for search in searches)
    head = ["Trials|complete, pruned, failed", "Rounds", "Bytes", "Time", "Best validation|score", "Chosen settings"]
    return render(
        "tuning",
        trials=asked["trials"],
        searches=len(searches),
        sampler=asked["sampler"],
        rounds=asked["settings"].get("rounds"),
        here=study.config.get("rounds"),
        objective=OBJECTIVES[asked["objective"]],
        word=study.task.score_label,
        equal=len({frozenset(found) for found in rounds.values()}) == 1,
        head=["Method", *map(lines, head), *([lines("Epsilon|of all trials")] if private else [])],
        rows=[(spelled(method), cells(searches, method, private=private)) for method in methods],
        unsearched=unsearched(study),
        searched=", ".join(str(search["seed"]) for search in searches),
        space=[f"{key} = {form}" for key, form in asked["space"].items()],
        spent=[(search["seed"], *largest(search["privacy"].get("all", {}))) for search in searches if private],
    )


def cells(searches: Sequence[Search], method: str, *, private: bool) -> list[str | Markup]:
    """Return a method's row: sums over the searches, and means of their best scores."""
    costs = [search["cost"][method] for search in searches]
    total = {key: sum(cost[key] for cost in costs) for key in (*STATES, "rounds", "bytes", "seconds")}
    best = [search["best"][method] for search in searches]
    scores = [one["score"] for one in best]
    return [
        ", ".join(str(total[state]) for state in STATES),
        f"{total['rounds']:,}",
        size_text(total["bytes"]),
        duration(total["seconds"]),
        with_spread(statistics.fmean(scores), spread(scores), "%"),
        "; ".join(", ".join(f"{k} {shown(v)}" for k, v in one["values"].items()) for one in best),
        *([", ".join(largest(search["privacy"].get(method, {}))[0] for search in searches)] if private else []),
    ]


def largest(spent: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Return the largest epsilon over silos with its delta; dashes if there is none."""
    most = max(spent.values(), key=lambda one: one["epsilon"], default=None)
    return ("–", "–") if most is None else (f"{most['epsilon']:.2f}", f"{most['delta']:.1g}")


def shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
