"""The report's page: head, sections and footer. The templates escape all values from a run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import matplotlib
from markupsafe import Markup

from server.report.answer import answer
from server.report.charts.canvas import SETTINGS
from server.report.css import CSS
from server.report.head import faults, headline, tiles, title, where
from server.report.methods import exchanges, paper, spelled
from server.report.sections.cost import cost_section, left_section
from server.report.sections.evidence import evidence_section
from server.report.sections.methods import methods_section
from server.report.sections.privacy import privacy_section
from server.report.sections.repeat import repeat_section
from server.report.sections.rounds import data_section, relationships_section, rounds_section
from server.report.sections.silos import silos_section
from server.report.sections.tuning import tuning_section
from server.report.sections.unseen import unseen_section
from server.report.study import Study
from server.report.templates import render
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


def page(study: Study) -> str:
    """Return the whole report of a study as HTML."""
    with matplotlib.rc_context(SETTINGS):
        sections = [(key, name, body) for key, name, section in SECTIONS if (body := section(study))]
    sentence, lead = headline(study)
    return render(
        "page",
        title=title(study),
        css=Markup(CSS),
        where=where(study),
        sentence=sentence,
        lead=lead,
        answer=answer(study),
        faults=faults(study),
        tiles=tiles(study),
        sections=sections,
        footer=footer(study),
    )


def footer(study: Study) -> str:
    """Return the version and the methods' sources."""
    try:
        release = version("silofl")
    except PackageNotFoundError:  # inside a Flower app bundle
        release = ""
    known = strategies()
    papers = [f"{spelled(m)}: {paper(m)}" for m in study.methods if m in known and exchanges(m)]
    return f"silofl {release}. " + "; ".join(papers) + ("." if papers else "")
