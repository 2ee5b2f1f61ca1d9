"""The report's page: head, sections and footer. The templates escape all values from a run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import matplotlib

from server.report.canvas import SETTINGS
from server.report.head import faults, headline, plan_box, risk, tiles, where
from server.report.html import render
from server.report.methods import exchanges, info_of, spell
from server.report.sections.cost import cost_section, left_section
from server.report.sections.evidence import evidence_section
from server.report.sections.methods import methods_section, tuning_section
from server.report.sections.privacy import privacy_section
from server.report.sections.repeat import repeat_section
from server.report.sections.rounds import rounds_section
from server.report.sections.silo_data import data_section, relationships_section
from server.report.sections.silos import silos_section, unseen_section
from server.report.study import StudyResults
from server.report.verdict import answer
from server.results.reading import run_name
from strategies import strategies

SECTIONS = (
    ("silos", "Hospitals", silos_section),
    ("methods", "Methods", methods_section),
    ("tuning", "Tuning", tuning_section),
    ("unseen", "Unseen", unseen_section),
    ("evidence", "Evidence", evidence_section),
    ("rounds", "Rounds", rounds_section),
    ("data", "Data", data_section),
    ("relationships", "Relationships", relationships_section),
    ("cost", "Cost", cost_section),
    ("privacy", "Privacy", privacy_section),
    ("left", "What left the hospitals", left_section),
    ("repeat", "Repeat", repeat_section),
)


def page(study: StudyResults) -> str:
    """Return the whole report of a study as HTML."""
    with matplotlib.rc_context(SETTINGS):
        sections = [
            (key, name, body) for key, name, section in SECTIONS if (body := section(study))
        ]
    sentence, lead = headline(study)
    return render(
        "page",
        title=run_name(study.path),
        where=where(study),
        sentence=sentence,
        lead=lead,
        plan=plan_box(study),
        answer=answer(study),
        risk=risk(study),
        faults=faults(study),
        tiles=tiles(study),
        sections=sections,
        footer=footer(study),
    )


def footer(study: StudyResults) -> str:
    """Return the version and the methods' sources."""
    try:
        release = version("silofl")
    except PackageNotFoundError:  # inside a Flower app bundle
        release = ""
    known = strategies()
    papers = [
        f"{spell(m)}: {info_of(m).paper}" for m in study.methods if m in known and exchanges(m)
    ]
    return f"silofl {release}. " + "; ".join(papers) + ("." if papers else "")
