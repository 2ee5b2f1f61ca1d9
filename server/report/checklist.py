"""Checklist page, ``checklist.html``: items of TRIPOD+AI, TRIPOD-Cluster and CONSORT-AI, filled from run and study.

What the run does not say is left to the authors, and named.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from client.protocol.study import StudyProtocol
from partitions.common.files import write_atomically
from server.report.html import count_noun, hospitals_of, percent, render
from server.report.methods import spell
from server.report.registered import registered
from server.report.sections.evidence import evidence_that_left
from server.report.sections.silos import held_out
from server.report.study import StudyResults
from server.report.verdict import answer

PAGE = "checklist.html"
LISTS = Path(__file__).with_name("checklists.toml")


def write_checklist(path: Path) -> Path:
    """Write the page of a run directory. Raises UserError if it holds no run."""
    study, file = StudyResults(path), path / PAGE
    write_atomically(file, checklist_page(study))
    return file


def checklist_page(study: StudyResults) -> str:
    """Return the page as HTML; every value is escaped."""
    known = {name: text for name, text in known_of(study).items() if text}
    lists = {
        name: [(number, topic, known.get(key, "")) for number, topic, key in items]
        for name, items in tomllib.loads(LISTS.read_text("utf-8")).items()
    }
    empty = {
        name: [number for number, _, text in items if not text] for name, items in lists.items()
    }
    return render("checklist", title=study.path.resolve().name, lists=lists, empty=empty)


def known_of(study: StudyResults) -> dict[str, str]:
    """Return what run and study say, by the name that the lists have for it; empty where they say nothing."""
    return (
        _of_run(study)
        | (_of_study(study.registration.study) if study.registration else {})
        | _results(study)
    )


def _of_run(study: StudyResults) -> dict[str, str]:
    c, silos = study.config, study.silos
    tuned = "; settings tuned on validation data" if study.searches else ""
    whole = ", split by ".join(study.split) if study.split else "the hospitals' own data files"
    return {
        "data": whole,
        "centres": hospitals_of(len(silos)) if silos else "",
        "preparation": f"normalization = {c.get('normalization', 'agreed')}, augment = {c.get('augment') or 'none'}",
        "outcome": f"task {study.task.name}, scored by {study.task.score_label}",
        "split": "each hospital's own training, validation and test parts; validation data chose the round"
        if study.chosen_on == "val"
        else "each hospital's own training and test parts; the last round is reported",
        "model": f"network {c.get('model', 'auto')}; {', '.join(map(spell, study.methods))}; "
        f"{c.get('rounds')} rounds, seeds {', '.join(map(str, study.seeds))}{tuned}",
        "measures": ", ".join(
            [
                study.task.score_label,
                *study.task.secondary_metrics.values(),
                *evidence_that_left(study),
            ]
        ),
        "imbalance": f"class-weights = {c['class-weights']}" if c.get("class-weights") else "",
        "predictions": "silofl export and silofl predict; the model's card names its input",
        "registration": "not registered in advance",
        "sharing": "patients' data stay in the hospitals",
        "code": "the settings of the run, config.toml, and silofl",
    }


def _of_study(study: StudyProtocol) -> dict[str, str]:
    return {
        "question": study.purpose,
        "schema": f"schema with SHA-256 {study.schema_digest}" if study.schema_digest else "",
        "protocol": f"study {study.name}, SHA-256 {study.digest}; contact: {study.contact}; results: {study.results}",
        "code": f"app builds with SHA-256 {', '.join(study.apps)}",
        "size": study.analysis.in_words()[1] if study.analysis else "",
        "registration": " ".join(study.analysis.in_words())
        if study.analysis
        else "not registered in advance",
    }


def _results(study: StudyResults) -> dict[str, str]:
    if not study.runs:
        return {}
    reply, plan, method = answer(study), registered(study), study.headed
    scores = {silo: study.score(method, silo).mean for silo in study.silos}
    parts = {
        part: [max(study.sizes(silo, f"n_{part}"), default=0) for silo in study.silos]
        for part in ("train", "test")
    }
    groups = "subgroups" in evidence_that_left(study)
    unseen = held_out(study)
    return {
        "sizes": "; ".join(
            f"{silo}: {train} training and {test} test samples"
            for silo, train, test in zip(study.silos, *parts.values(), strict=True)
        ),
        "flow": f"{hospitals_of(len(study.silos))}, {sum(parts['train'])} training and {sum(parts['test'])} test "
        f"samples; without a score: {', '.join(study.withheld) or 'none'}",
        "performance": f"{spell(method)}: mean {percent(study.mean_score(method)[0])} % of {study.task.score_label}; "
        "the report has every hospital's with its interval",
        "clusters": f"{study.task.score_label} with {spell(method)}, by hospital: "
        + ", ".join(f"{silo} {percent(score)}" for silo, score in scores.items()),
        "fairness": "performance in subgroups that hospitals chose, in the report"
        if groups
        else "",
        "errors": "calibration and subgroups at each hospital, in the report"
        if evidence_that_left(study)
        else "",
        "unseen": f"{count_noun(len(unseen), 'hospital')} held out of the training"
        if unseen
        else "",
        "limits": ". ".join([*plan.deviations] if plan else [])
        or (reply.condition if reply else ""),
    }
