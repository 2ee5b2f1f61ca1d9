"""Silos that took part in few of a run's rounds, so that their scores are old; results that only some methods have."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from server.report.methods import spell
from server.report.pairs import Pair, part_text
from server.report.study import StudyResults

# A silo that took part in fewer rounds than this share of the median silo's is marked
FEW = 0.5
MARK = "†"

Rounds = tuple[int, int]  # took part in, of


def attendance(study: StudyResults, method: str) -> dict[str, Rounds]:
    """Return by silo the numbers of its rounds and of the method's evaluated rounds, over all seeds."""
    rows = study.silo_rows.query("strategy == @method")[["silo", "seed", "round"]]
    last = {r["seed"]: r["rounds"] for r in study.of(method)}
    taken = rows[rows["round"] <= rows.seed.map(last)].drop_duplicates()
    of, counts = len(taken[["seed", "round"]].drop_duplicates()), taken.silo.value_counts()
    return {silo: (int(counts.get(silo, 0)), of) for silo in (study.silos if of else ())}


def seldom(study: StudyResults, methods: Sequence[str]) -> dict[str, Rounds]:
    """Return silos that took part in few rounds of one of these methods, each with its lowest number of rounds.

    A silo without any score is not among them, as it does not enter the means.
    """
    rare: dict[str, Rounds] = {}
    for method in methods:
        rounds = attendance(study, method)
        usual = statistics.median(taken for taken, _ in rounds.values()) if rounds else 0
        for silo, (taken, of) in rounds.items():
            if 0 < taken < FEW * usual and taken < rare.get(silo, (of, of))[0]:
                rare[silo] = taken, of
    return dict(sorted(rare.items()))


def worst(study: StudyResults, method: str, without: Collection[str] = ()) -> str | None:
    """Return the silo with the lowest mean score over seeds, except ``without``; None if no score is known."""
    scores = {s: study.score(method, s).mean for s in study.silos if s not in without}
    known = {s: v for s, v in scores.items() if not math.isnan(v)}
    return min(known, key=lambda s: known[s], default=None)


def mean_without(study: StudyResults, method: str, silos: Collection[str]) -> float:
    """Return the mean score over all silos except ``silos``, as a mean over seeds; ``nan`` for none."""
    means = []
    for run in study.of(method):
        kept = [v[study.task.score] for silo, v in run["per_silo"].items() if silo not in silos]
        if known := [float(score) for score in kept if score is not None]:
            means.append(statistics.fmean(known))
    return statistics.fmean(means) if means else math.nan


def part_of_results(study: StudyResults, method: str) -> str:
    """Return of how many silos or seeds a method's means are, if of fewer than other methods'; else empty."""
    scored = {
        name: {pair for pair, tested in of.items() if not math.isnan(tested.score)}
        for name, of in study.tests.items()
    }
    return part_text(scored.get(method, set()), set[Pair]().union(*scored.values()))


def rounds_missed(rare: Mapping[str, Rounds]) -> str:
    """Return the silos' rounds as a clause: ``b took part in 3 of 25 rounds``."""
    lines = [
        f"{silo} took part in {taken} of {of} rounds"
        for silo, (taken, of) in list(rare.items())[:5]
    ]
    more = len(rare) - len(lines)
    return ", ".join(lines) + (f", and {more} more in few" if more else "")


def opened_sums(study: StudyResults) -> list[str]:
    """Return a line for each run with secure aggregation: of how many silos its sums are, and which were repeated."""
    lines = []
    for (method, seed), rows in study.rows.groupby(["strategy", "seed"]):
        silos, attempts = (
            rows.value[rows.metric == metric] for metric in ("secure_silos", "secure_attempts")
        )
        if silos.empty:
            continue
        sums = silos[silos > 0].astype(int)
        ends = map(str, (sums.min(), sums.max()))
        sizes = "no" if sums.empty else "-".join(dict.fromkeys(ends))
        of = len(study.silos)
        line = f"{spell(method)}, seed {seed}: {len(sums)} sums of {sizes} of {of} hospitals"
        if repeated := int((attempts > 1).sum()):
            line += f", {repeated} of them repeated"
        if lost := len(silos) - len(sums):
            line += f"; impossible sums, which changed no model: {lost}"
        lines.append(line)
    return lines


def silo_rounds(study: StudyResults, metric: str) -> list[tuple[str, int, str, str, str]]:
    """Return silos that were ``rejected`` or ``bounded``: method, seed, silos, rounds, last reason.

    The silos of one reason are one entry, with their fewest and most rounds: ``2 hospitals: a, b``, ``1–3``.
    """
    rows = study.rows[study.rows.metric == metric]
    reasons = {
        (event.get("strategy"), event.get("seed"), silo): str(reason)
        for event in study.events
        for silo, reason in (event.get(metric) or {}).items()
    }
    merged = defaultdict[tuple[str, int, str], dict[str, int]](dict)
    for (method, seed, silo), n in rows.groupby(["strategy", "seed", "silo"]).size().items():
        merged[spell(method), seed, reasons.get((method, seed, silo), "")][silo] = n
    return [
        (
            *(method, seed),
            (f"{len(of)} hospitals: " if len(of) > 1 else "") + ", ".join(of),
            "–".join(dict.fromkeys(map(str, (min(of.values()), max(of.values()))))),
            reason,
        )
        for (method, seed, reason), of in merged.items()
    ]
