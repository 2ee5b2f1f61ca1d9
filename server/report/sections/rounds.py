"""Sections on the rounds, the data of the silos, and the relationships between them."""

from __future__ import annotations

from markupsafe import Markup

from server.report.charts.counts import label_circles, relationship_map
from server.report.charts.rounds import before_after, by_round, trajectories
from server.report.html import capital
from server.report.methods import reports, spelled
from server.report.study import Study
from server.report.templates import render
from server.results.run_directory import newest_states
from server.results.summary import early_stop
from strategies import strategies
from strategies.base.info import MethodInfo, Relationships

PANELS = 6  # maximum number of methods shown before and after local training


def rounds_section(study: Study) -> Markup:
    """Render the scores by round; empty without scores."""
    methods = [m for m in study.methods if study.curve(m, reports(m))]
    if not methods:
        return Markup()
    shown = methods if len(methods) <= PANELS else list(dict.fromkeys([*study.columns, *methods]))[:PANELS]
    return render(
        "rounds",
        capital=capital(study),
        word=study.task.score_label,
        by_round=[Markup(by_round(study, width)) for width in (820, 350)],
        panels=[(spelled(m), Markup(before_after(study, m))) for m in shown],
        methods=len(methods),
        stopped=[
            f"{spelled(r['strategy'])}, seed {r['seed']}, {why}" for r in study.summarised if (why := early_stop(r))
        ],
    )


def data_section(study: Study) -> Markup:
    """Render the samples per silo and class; empty if they are unknown."""
    m = study.manifest
    if m is None or not study.task.single_label:
        return Markup()
    return render(
        "data",
        circles=[Markup(label_circles(m, width)) for width in (820, 350)],
        dataset=m["dataset"],
        partition=m["partition"],
        seeds=len(study.seeds),
        seed=m["seed"],
    )


def relationships_section(study: Study) -> Markup:
    """Render how much silos take from each other; empty if no method has such weights."""
    related = relationships(study)
    if related is None:
        return Markup()
    info, found = related
    return render(
        "relationships",
        related_by=f"{info.spelling}: {info.relationships}",
        map=[Markup(relationship_map(found, width)) for width in (600, 350)],
        last=found.rounds[-1],
        first=found.names[0],
        to_all=Markup(trajectories(found, False)),
        to_itself=Markup(trajectories(found, True)),
    )


def relationships(study: Study) -> tuple[MethodInfo, Relationships] | None:
    """Return the relationships of the first run that has any, if the silos' states can be read (simulations)."""
    for name, seed in study.planned:
        method = strategies().get(name)
        if method is not None and method.info.relationships:
            states = newest_states(study.path / "checkpoint" / f"{name}-{seed}" / "silos")
            if found := method.read_relationships(states):
                return method.info, found
    return None
