"""Sections on the cost of the runs and on what left the silos."""

from __future__ import annotations

from markupsafe import Markup

from server.report.charts.counts import bytes_per_round
from server.report.charts.rounds import seconds_per_round
from server.report.evidence import evidence_that_left, own_models_that_left
from server.report.html import duration, lines, markup, size_text, typical
from server.report.methods import keeps, sends_numbers, spelled, uploads
from server.report.study import Study
from server.report.templates import render


def cost_section(study: Study) -> Markup:
    """Render bytes and seconds of each method; empty without results."""
    if not study.runs:
        return Markup()
    head = [
        "Down|per round",
        "Up|per round",
        "Bytes|in all",
        "Median|round",
        "Slowest|round",
        "Run",
        "of it|training",
        "of it|exchange",
        "of it|aggregation",
    ]
    return render(
        "cost",
        seeds=len(study.seeds),
        head=["Method", *map(lines, head)],
        rows=[(spelled(method), cost_row(study, method)) for method in study.methods],
        bytes=Markup(bytes_per_round(study)),
        seconds=Markup(seconds_per_round(study)),
    )


def cost_row(study: Study, method: str) -> list[str]:
    """Return a method's sizes and durations."""
    down, up = (typical(study.per_round(method, k)) for k in ("bytes_down", "bytes_up"))
    seconds = study.training_seconds(method)
    total, time = study.cost(method)
    return [
        size_text(down),
        size_text(up),
        size_text(total),
        duration(typical(seconds)),
        duration(max(seconds.values(), default=0.0)),
        duration(time),
        *(mean_seconds(study, method, part) for part in ("train", "communicate", "aggregate")),
    ]


def mean_seconds(study: Study, method: str, part: str) -> str:
    """Return the duration of one part of a method's runs, mean over seeds."""
    known = [r["seconds"][part] for r in study.of(method) if r["seconds"].get(part) is not None]
    return duration(sum(known) / len(known)) if known else "–"


def left_section(study: Study) -> Markup:
    """Render what left the silos, by method and by silo; empty without results."""
    if not study.runs:
        return Markup()
    rows, own = [], own_models_that_left(study)
    for m in study.methods:
        size = bytes_up_per_silo(study, m)
        text = markup("{}<small>{} numbers</small>", size_text(size), f"{size / 4:,.0f}") if size else "–"
        vectors, numbers = (", ".join(names) or "none" for names in (uploads(m), sends_numbers(m)))
        rows.append({"name": spelled(m), "vectors": vectors, "size": text, "numbers": numbers})
    silos = []
    for silo in study.silos:
        found = [study.replies.get((m, silo), (0, 0)) for m in study.methods]
        sent = sum(silo_bytes(study, m, silo) for m in study.methods)
        silos.append((silo, [sum(f[0] for f in found), size_text(sent), f"{sum(f[1] for f in found):,}"]))
    return render(
        "left",
        metrics=", ".join(study.metrics_that_left) or "none",
        allowed=", ".join(study.task.metrics),
        evidence=", ".join(evidence_that_left(study)),
        kept=[(spelled(m), what) for m in study.methods if m not in own for what in keeps(m)],
        own=[(spelled(m), ", ".join(silos)) for m, silos in own.items()],
        head=["Method", "Vectors", lines("per hospital|and round"), "Other numbers"],
        rows=rows,
        silo_head=["Hospital", lines("Replies with|metrics"), lines("Model|vectors"), lines("Metric|values")],
        silos=silos,
    )


def bytes_up_per_silo(study: Study, method: str) -> float:
    """Return the bytes of vectors that one silo sends in a typical round."""
    shares = [
        up / n for r, up in study.per_round(method, "bytes_up").items() if (n := len(senders(study, method, r))) and up
    ]
    return sorted(shares)[len(shares) // 2] if shares else 0.0


def senders(study: Study, method: str, server_round: int) -> set[tuple[int, str]]:
    """Return the (seed, silo) pairs that trained in a round."""
    return study.senders.get((method, server_round), set())


def silo_bytes(study: Study, method: str, silo: str) -> float:
    """Return the bytes of vectors that a silo sent over all rounds and seeds: its share of each round's."""
    total = 0.0
    for row in study.history.rows:
        if row.strategy == method and row.metric == "bytes_up" and row.value:
            here = {s for seed, s in senders(study, method, row.round) if seed == row.seed}
            total += row.value / len(here) if silo in here else 0.0
    return total
