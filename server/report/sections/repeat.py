"""Section with the commands that repeat a study and export its models."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import shlex
from collections.abc import Mapping
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


COMMANDS = """{% if kind == "flower" %}# Flower's simulation
flwr run . local --federation-config 'num-supernodes={{ study.config.silos }}' --run-config {{ pairs|quote }}
silofl report {{ run }}
{% elif kind == "simulate" %}# from the settings of this directory
silofl simulate --config {{ run }}/config.toml --out runs/again
# the same, in full
silofl simulate {{ options }}
# this page again; the model of one silo, and of all, whose score it shows
silofl report {{ run }}
{% else %}{% if file %}silofl up {{ file|quote }}{% else %}# with the federation up{% endif %}

silofl run --config {{ run }}/config.toml --out runs/again
# the same, in full
silofl run {{ options }}
# this page again; the model whose score it shows, of all silos or, at its hospital, of one
silofl report {{ run }}
{% endif %}"""


def commands(study: StudyResults) -> list[str]:
    """Return the commands that repeat this study, write its report and export its models."""
    c, standard = study.config, defaults()
    main = {key: c.get(key) for key in ("strategy", "rounds", "seed")}
    changed: dict[str, Any] = {
        k: v for k, v in c.items() if k not in main and standard.get(k) != v
    }
    named: dict[str, Any] = {
        k: changed.pop(k) for k in ("dataset", "partition", "silos") if k in changed
    }
    note, run = study.path / "study", shlex.quote(str(study.path))
    values: dict[str, Any] = {"study": study, "run": run}
    if study.manifest is not None and not note.exists() and not study.simulated:
        first: dict[str, Any] = {
            key: c.get(key) for key in ("strategy", "seed", "rounds", "silos")
        }
        pairs = " ".join(f"{k}={toml(v)}" for k, v in {**first, **named, **changed}.items())
        return text_lines(COMMANDS, **values, kind="flower", pairs=pairs)
    options = _options(main)
    options += _data_options(named) if study.simulated else ""
    if changed:
        options += " --set " + " ".join(
            shlex.quote(f"{k}={format_value(v)}") for k, v in changed.items()
        )
    state = run if study.simulated else f"STATE/{shlex.quote(study.path.resolve().name)}"
    return [
        *text_lines(
            COMMANDS,
            **values,
            kind="simulate" if study.simulated else "run",
            options=options.strip(),
            file=note.read_text() if note.exists() else "",
        ),
        *exports(study, study.best or alone(), state, next(iter(study.silos), "hospital-01")),
    ]


def _options(values: Mapping[str, Any]) -> str:
    return "".join(f" --{k} {shlex.quote(str(v))}" for k, v in values.items())


def _data_options(named: Mapping[str, Any]) -> str:
    """Return the options of a simulation's data; a file of one's own is ``--data``."""
    if str(named.get("dataset", "")).endswith(".npz"):
        named = {k: v for k, v in named.items() if k != "dataset"} | {"data": named["dataset"]}
    return _options(named)


def exports(study: StudyResults, method: str, source: str, silo: str) -> list[str]:
    """Return the commands that export the reported models: a silo's from ``source``, and the shared one."""
    run = next((r for r in study.of(method) if silo in r["per_silo"]), None)
    if run is None:
        return []
    seed = f" --seed {run['seed']}" if len(study.seeds) > 1 else ""
    which = f"--strategy {shlex.quote(method)}{seed}"
    file = f"--out {shlex.quote(silo)}.safetensors"
    number = run["per_silo"][silo].get("round")
    of_round = "" if number is None or study.simulated else f" --round {number}"
    lines = [
        f"silofl export {source} --silo {shlex.quote(silo)} {which} --which reported{of_round} {file}"
    ]
    if info_of(method).one_model and info_of(method).reports == "received":
        lines.append(
            f"silofl export {shlex.quote(str(study.path))} {which} --which shared --out shared.safetensors"
        )
    return lines


def format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else format_value(value)
