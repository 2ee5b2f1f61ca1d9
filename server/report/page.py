"""The report's page: head, sections and footer. The templates escape all values from a run."""

# ruff: noqa: E501  (template)

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import matplotlib
from markupsafe import Markup

from server.report.answer import answer
from server.report.canvas import SETTINGS
from server.report.css import CSS
from server.report.head import faults, headline, tiles, where
from server.report.html import render
from server.report.methods import exchanges, paper, spelled
from server.report.sections.cost import cost_section, left_section
from server.report.sections.evidence import evidence_section
from server.report.sections.methods import methods_section
from server.report.sections.privacy import privacy_section
from server.report.sections.repeat import repeat_section
from server.report.sections.rounds import rounds_section
from server.report.sections.silo_data import data_section, relationships_section
from server.report.sections.silos import silos_section
from server.report.sections.tuning import tuning_section
from server.report.sections.unseen import unseen_section
from server.report.study import Study
from strategies import strategies

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>silofl report: {{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
<main>
<header>
<p class="where">{{ where }}</p>
<h1>{{ sentence }}</h1>
<p class="lead">{{ lead }}</p>
{% if answer %}<div class="answer"><h2>Should we federate?</h2><p>{{ answer.sentence }}</p>{% if answer.condition %}<p class="note">{{ answer.condition }}</p>{% endif %}</div>{% endif %}
{{ faults }}
{{ tiles }}
<nav>{% for key, name, _ in sections %}<a href="#{{ key }}">{{ name }}</a>{% endfor %}</nav>
</header>
{% for key, _, body in sections %}
<section id="{{ key }}">{{ body }}</section>
{% endfor %}
<footer>{{ footer }}</footer>
</main>
</body>
</html>
"""
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
        PAGE,
        title=study.path.resolve().name,
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
