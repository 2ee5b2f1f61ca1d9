"""Checklist page, ``checklist.html``: items of TRIPOD+AI, TRIPOD-Cluster and CONSORT-AI, filled from run and study.

What the run does not say is left to the authors, and named.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from markupsafe import Markup

from partitions.common.files import write_atomically
from server.report.html import macro_texts, render
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


def known_of(study: StudyResults) -> dict[str, Markup]:
    """Return what run and study say, by the name that the lists have for it; empty where they say nothing."""
    train, test = (
        [max(study.sizes(silo, part), default=0) for silo in study.silos]
        for part in ("n_train", "n_test")
    )
    return macro_texts(
        "known",
        study=study,
        plan=registered(study),
        reply=answer(study),
        evidence=evidence_that_left(study),
        held=held_out(study),
        train=train,
        test=test,
    )
