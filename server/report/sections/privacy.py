"""Section on differential privacy: each silo's privacy cost, and the scores reached with it."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from server.report.charts.privacy import accuracy_by_epsilon, private_methods
from server.report.html import capital, percent
from server.report.methods import spelled
from server.report.study import Study
from server.report.templates import render
from server.results.spent import spent


def privacy_section(study: Study) -> Markup:
    """Render the section; empty if no run had differential privacy."""
    methods = private_methods(study)
    if not methods:
        return Markup()
    return render(
        "privacy",
        unit=str(study.config.get("dp.unit", "record")),
        simulated=study.simulated,
        several=sum(len(study.of(method)) for method in methods) > 1,
        head=["Hospital", "Method, seed", "Epsilon", "Delta", "Steps", capital(study)],
        rows=list(privacy_rows(study, methods)),
        without=[spelled(m) for m in study.methods if m not in methods],
        figure=[Markup(svg) for width in (820, 350) if (svg := accuracy_by_epsilon(study, width))],
        word=study.task.score_label,
    )


def privacy_rows(study: Study, methods: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a row for each silo and run."""
    for method in methods:
        for run in study.of(method):
            end = "" if (method, run["seed"]) in study.finished else ", not finished"
            for silo, cost in spent(study.history.of(method, run["seed"])).items():
                score = run["per_silo"].get(silo, {}).get(study.task.score)
                values = [f"{cost.epsilon:.2f}", f"{cost.delta:.1g}", f"{cost.steps:,}"]
                reached = "withheld" if score is None else percent(score)
                yield silo, [f"{spelled(method)}, {run['seed']}{end}", *values, reached]
