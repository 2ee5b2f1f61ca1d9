"""Head of the report's page: its headline, the caution, what was registered, the risk, the faults, and the figures."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from markupsafe import Markup

from server.report.html import render, sentences
from server.report.inference import HOSPITALS_NEEDED, SEEDS_NEEDED, carrier
from server.report.methods import alone, exchanges, info_of, shared, spell
from server.report.participation import rounds_missed, silo_rounds
from server.report.registered import registered
from server.report.sections.evidence import evidence_that_left, own_models_that_left
from server.report.study import StudyResults
from server.report.verdict import MOST_NAMES, GainVerdict, largest_epsilon, verdict
from server.results.history import history_file
from server.run.reporter import WEIGHTS

BY_CHANCE = 0.025  # share of hospitals without any gain whose 95 % interval lies above zero


def where(study: StudyResults) -> Markup:
    """Return the line above the headline: run, data, silos, seeds, date."""
    history = history_file(study.path / "history.csv")
    files = (study.path / "summary.json", history, study.path / "config.toml")
    written = next(file for file in files if file.exists()).stat().st_mtime
    return sentences(
        "where", study=study, day=time.strftime("%-d %B %Y", time.localtime(written))
    )


def headline(study: StudyResults) -> tuple[Markup, Markup]:
    """Return the sentence at the top, and the caution below it: the limits of what it says."""
    scored = study.scored(study.methods)
    gain_verdict = compare_headline(study)
    federating, personalising = parts(study)
    values = {
        "plan": registered(study),
        "federating": federating,
        "personalising": personalising,
        "most": MOST_NAMES,
        "carrier": carrier(study.silo_means(study.headed, study.base)) if study.base else None,
        "study": study,
        "word": study.task.score_label,
        "method": study.headed,
        "base": study.base,
        "found": gain_verdict,
        "failed": bool(faults_of(study)),
        "silent": not scored,
        "known": len(study.scored([study.headed])),
        "exchanged": exchanges(study.headed),
        "by_chance": BY_CHANCE,
        "needed": SEEDS_NEEDED,
        "missed": rounds_missed(gain_verdict.rare) if gain_verdict else "",
    }
    return sentences("headline", **values), sentences("caution", **values)


def compare_headline(study: StudyResults) -> GainVerdict | None:
    """Return the verdict on the headline's method; None if there is no baseline to compare it with."""
    return verdict(study, study.headed, study.base) if study.base else None


def parts(study: StudyResults) -> tuple[GainVerdict | None, GainVerdict | None]:
    """Return what federating gains (one model for all, over training alone), and personalising over that; or None.

    The personalised method is the headline's, or the best one that ends with a model per silo.
    """
    model, base, headed = shared(), alone(), study.headed
    mine = headed if not info_of(headed).role.one_model else study.personalised
    federating = verdict(study, model, base) if {model, base} <= {*study.methods} else None
    return federating, verdict(study, mine, model) if mine and model in study.methods else None


def plan_box(study: StudyResults) -> Markup:
    """Render what was registered, what follows from it, and every deviation; empty without a registration."""
    plan = registered(study)
    values = {"study": study, "plan": plan, "most": MOST_NAMES, "needed": HOSPITALS_NEEDED}
    return render("registered", **values) if plan else Markup()


def risk(study: StudyResults) -> Markup:
    """Return the line of the risk to patients' data for a committee; empty without results."""
    if not study.runs:
        return Markup()
    return sentences(
        "risk",
        study=study,
        bytes=sum(run["bytes_up"] for run in study.runs),
        epsilon=largest_epsilon(study, study.headed),
        refusals=len(silo_rounds(study, "rejected")),
        evidence=evidence_that_left(study),
        models=sorted(
            {silo for silos in own_models_that_left(study).values() for silo in silos}
        ),
    )


def faults(study: StudyResults) -> Markup:
    """Render the runs that did not end and the notes of the run's log; empty if there are none."""
    return render("faults", faults=faults_of(study), notes=notes_of(study))


def tiles(study: StudyResults) -> Markup:
    """Render up to six figures below the headline; empty without results."""
    return render(
        "tiles",
        study=study,
        method=study.headed,
        found=compare_headline(study),
        parts=[
            (name, part)
            for name, part in zip(("Federating", "Personalising"), parts(study), strict=True)
            if part is not None and part.gains
        ],
    )


def faults_of(study: StudyResults) -> list[str]:
    """Return the runs that did not end, one sentence each."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for event in study.events:
        last[event.get("strategy", ""), event.get("seed", 0)] = event
    sentences_of_faults = []
    # The closing exchange has the number rounds + 1
    planned_rounds = int(study.config.get("rounds", 0))
    for key in study.planned:
        event = last.get(key, {})
        name = f"{spell(key[0])}, seed {key[1]}"
        rounds = min(max((r.round for r in study.history.of(*key)), default=0), planned_rounds)
        if event.get("event") == "error":
            where = f"after round {rounds}" if rounds else "before its first round ended"
            sentences_of_faults.append(
                f"{name} failed {where}: {event.get('message', 'no reason given')}"
            )
        elif key not in study.finished and rounds:
            sentences_of_faults.append(
                f"{name} stopped after round {rounds} of {planned_rounds}"
            )
        elif key not in study.finished:
            sentences_of_faults.append(f"{name} was not run")
    return sentences_of_faults


def notes_of(study: StudyResults) -> list[dict[str, Any]]:
    """Return the notes of the run's log on silos and the server, each once; those on weights stand with the silos.

    ``time``: its first time in UTC, empty in a run of 0.1; ``times``: how often it was noted.
    """
    notes = [e for e in study.events if e["event"] == "note" and e.get("part") != WEIGHTS]
    first = {note["message"]: str(note.get("time", "")) for note in reversed(notes)}
    return [
        {"message": message, "time": first[message], "times": times}
        for message, times in Counter(note["message"] for note in notes).items()
    ]
