"""Section with the commands that repeat a study and export its models."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from server.report.html import render
from server.report.methods import alone, ends_with_one_model, reports
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


def commands(study: StudyResults) -> list[str]:
    """Return the commands that repeat this study, write its report and export its models."""
    c, standard = study.config, defaults()
    changed: dict[str, Any] = {
        k: v
        for k, v in c.items()
        if k not in ("strategy", "seed", "rounds") and standard.get(k) != v
    }
    named: dict[str, Any] = {
        k: changed.pop(k) for k in ("dataset", "partition", "silos") if k in changed
    }
    if (
        study.manifest is not None
        and not (study.path / "study").exists()
        and not study.simulated
    ):
        return _of_flower(study, named | changed)
    pairs = [shlex.quote(f"{k}={format_value(v)}") for k, v in changed.items()]
    main = f"--strategy {shlex.quote(str(c['strategy']))} --rounds {c.get('rounds')} --seed {c.get('seed')}"
    sets = f" --set {' '.join(pairs)}" if pairs else ""
    if study.simulated:
        return _of_simulation(study, f"{main}{_data_options(named)}{sets}")
    return _of_federation(study, f"{main}{sets}")


def _data_options(named: Mapping[str, Any]) -> str:
    """Return the options of a simulation's data; a file of one's own is ``--data``."""
    own = str(named.get("dataset", "")).endswith(".npz")
    options = [(k, v) for k, v in named.items() if k != "dataset" or not own]
    options += [("data", named["dataset"])] if own else []
    return "".join(f" --{k} {shlex.quote(str(v))}" for k, v in options)


def _of_simulation(study: StudyResults, options: str) -> list[str]:
    run = shlex.quote(str(study.path))
    method = study.best or alone()
    return [
        "# from the settings of this directory",
        f"silofl simulate --config {run}/config.toml --out runs/again",
        "# the same, in full",
        f"silofl simulate {options}",
        "# this page again; the model of one silo, and of all, whose score it shows",
        f"silofl report {run}",
        *exports(study, method, run, _first_silo(study)),
    ]


def _of_flower(study: StudyResults, changed: Mapping[str, Any]) -> list[str]:
    c = study.config
    first = {key: c.get(key) for key in ("strategy", "seed", "rounds", "silos")}
    pairs = " ".join(f"{k}={toml(v)}" for k, v in {**first, **changed}.items())
    return [
        "# Flower's simulation",
        f"flwr run . local --federation-config 'num-supernodes={c.get('silos')}' --run-config {shlex.quote(pairs)}",
        f"silofl report {shlex.quote(str(study.path))}",
    ]


def _of_federation(study: StudyResults, options: str) -> list[str]:
    run, note = shlex.quote(str(study.path)), study.path / "study"
    file = note.read_text() if note.exists() else ""
    state = f"STATE/{shlex.quote(study.path.resolve().name)}"
    return [
        f"silofl up {shlex.quote(file)}" if file else "# with the federation up",
        f"silofl run --config {run}/config.toml --out runs/again",
        "# the same, in full",
        f"silofl run {options}",
        "# this page again; the model whose score it shows, of all silos or, at its hospital, of one",
        f"silofl report {run}",
        *exports(study, study.best or alone(), state, _first_silo(study)),
    ]


def _first_silo(study: StudyResults) -> str:
    return study.silos[0] if study.silos else "hospital-01"


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
    if ends_with_one_model(method) and reports(method) == "received":
        lines.append(
            f"silofl export {shlex.quote(str(study.path))} {which} --which shared --out shared.safetensors"
        )
    return lines


def format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else format_value(value)
