"""Section with the commands that repeat a study and export its models."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from server.report.html import render, text_lines
from server.report.methods import alone, info_of
from server.report.study import StudyResults
from strategies.base.run_settings import defaults


def repeat_section(study: StudyResults) -> Markup:
    """Render the commands and the settings."""
    return render(
        "repeat",
        commands=commands(study),
        settings=[f"{k} = {v!r}" for k, v in study.config.items()],
    )


def commands(study: StudyResults) -> list[str]:
    """Return the commands that repeat this study, write its report and export its models."""
    c: dict[str, Any] = study.config
    standard, note = defaults(), study.path / "study"
    named = {key: c.get(key) for key in ("strategy", "rounds", "seed")}
    changed = {k: v for k, v in c.items() if k not in named and standard.get(k) != v}
    data = {k: changed.pop(k) for k in ("dataset", "partition", "silos") if k in changed}
    first = {key: c.get(key) for key in ("strategy", "seed", "rounds", "silos")}
    of_flower = study.manifest is not None and not note.exists()
    method, silo = study.best or alone(), next(iter(study.silos), "hospital-01")
    return text_lines(
        "commands",
        study=study,
        run=str(study.path),
        kind="simulate" if study.simulated else "flower" if of_flower else "run",
        asked=named,
        changed=changed,
        data=data,
        pairs=first | data | changed,
        file=note.read_text() if note.exists() else "",
        method=method,
        info=info_of(method),
        silo=silo,
        model=next((run for run in study.of(method) if silo in run["per_silo"]), None),
    )
