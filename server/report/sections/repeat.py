"""Section with the commands that repeat a study and export its models."""

# ruff: noqa: E501  (template)
from __future__ import annotations

from typing import Any

from markupsafe import Markup

from server.report.html import render, text_lines
from server.report.methods import alone, info_of
from server.report.study import StudyResults
from strategies.base.run_settings import defaults

TEMPLATE = """<h2>Repeat it</h2><p class='lead'>The same settings and seed give the same numbers on the same machine and number of threads.</p>
<pre>{{ commands|join("\n") }}</pre>
<p class='note'><code>config.toml</code> beside this file holds every setting, <code>history.csv</code> every value, <code>summary.json</code> the final ones.</p>
<details><summary>All settings</summary><pre>{{ settings|join("\n") }}</pre></details>"""


def repeat_section(study: StudyResults) -> Markup:
    """Render the commands and the settings."""
    return render(
        TEMPLATE,
        commands=commands(study),
        settings=[f"{k} = {v!r}" for k, v in study.config.items()],
    )


COMMANDS = """{% macro text(value) %}{{ value|string|lower if value is boolean else value }}{% endmacro %}
{% macro options(values) %}{% for key, value in values.items() %} --{{ "data" if key == "dataset" and value.endswith(".npz") else key }} {{ value|string|quote }}{% endfor %}{% endmacro %}
{% macro changes() %}{% if changed %} --set{% for key, value in changed.items() %} {{ (key ~ "=" ~ text(value))|quote }}{% endfor %}{% endif %}{% endmacro %}
{% macro which() %}--strategy {{ method|quote }}{% if study.seeds|length > 1 %} --seed {{ model.seed }}{% endif %}{% endmacro %}
{% if kind == "flower" %}# Flower's simulation
{% set pairs %}{% for key, value in pairs.items() %}{{ " " if not loop.first }}{{ key }}={% if value is string %}"{{ value }}"{% else %}{{ text(value) }}{% endif %}{% endfor %}{% endset %}
flwr run . local --federation-config 'num-supernodes={{ study.config.silos }}' --run-config {{ pairs|quote }}
silofl report {{ run|quote }}
{% elif kind == "simulate" %}# from the settings of this directory
silofl simulate --config {{ run|quote }}/config.toml --out runs/again
# the same, in full
silofl simulate{{ options(asked) }}{{ options(data) }}{{ changes() }}
# this page again; the model of one silo, and of all, whose score it shows
silofl report {{ run|quote }}
{% else %}{% if file %}silofl up {{ file|quote }}{% else %}# with the federation up{% endif %}

silofl run --config {{ run|quote }}/config.toml --out runs/again
# the same, in full
silofl run{{ options(asked) }}{{ changes() }}
# this page again; the model whose score it shows, of all silos or, at its hospital, of one
silofl report {{ run|quote }}
{% endif %}
{% if model and kind != "flower" %}{% set round = model.per_silo[silo].get("round") %}
silofl export {{ run|quote if study.simulated else "STATE/" ~ study.path.resolve().name|quote }} --silo {{ silo|quote }} {{ which() }} --which reported
{%- if round and not study.simulated %} --round {{ round }}{% endif %} --out {{ silo|quote }}.safetensors
{% if info.one_model and info.reports == "received" %}
silofl export {{ run|quote }} {{ which() }} --which shared --out shared.safetensors
{% endif %}{% endif %}"""


def commands(study: StudyResults) -> list[str]:
    """Return the commands that repeat this study, write its report and export its models."""
    c: dict[str, Any] = study.config
    standard, note = defaults(), study.path / "study"
    asked = {key: c.get(key) for key in ("strategy", "rounds", "seed")}
    changed = {k: v for k, v in c.items() if k not in asked and standard.get(k) != v}
    data = {k: changed.pop(k) for k in ("dataset", "partition", "silos") if k in changed}
    first = {key: c.get(key) for key in ("strategy", "seed", "rounds", "silos")}
    of_flower = study.manifest is not None and not note.exists()
    method, silo = study.best or alone(), next(iter(study.silos), "hospital-01")
    return text_lines(
        COMMANDS,
        study=study,
        run=str(study.path),
        kind="simulate" if study.simulated else "flower" if of_flower else "run",
        asked=asked,
        changed=changed,
        data=data,
        pairs=first | data | changed,
        file=note.read_text() if note.exists() else "",
        method=method,
        info=info_of(method),
        silo=silo,
        model=next((run for run in study.of(method) if silo in run["per_silo"]), None),
    )
