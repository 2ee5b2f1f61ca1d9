"""Silos that took part in few of a run's rounds, so that their models and scores are old."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from server.report.study import Study

FEW = 0.5  # a silo that took part in fewer rounds than this share of the median silo's is marked
MARK = "†"

Rounds = tuple[int, int]  # took part in, of


def attendance(study: Study, method: str) -> dict[str, Rounds]:
    """Return by silo the numbers of its rounds and of the method's evaluated rounds, over all seeds."""
    taken: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for row in study.history.rows:
        if row.strategy == method and row.silo and row.snapshot:
            taken[row.silo].add((row.seed, row.round))
    last = {r["seed"]: r["rounds"] for r in study.of(method)}
    rounds = {(seed, number) for found in taken.values() for seed, number in found if number <= last.get(seed, 0)}
    return {silo: (len(taken[silo] & rounds), len(rounds)) for silo in study.silos} if rounds else {}


def seldom(study: Study, methods: Sequence[str]) -> dict[str, Rounds]:
    """Return silos that took part in few rounds of one of these methods, each with its lowest number of rounds.

    A silo without any score is not among them, as it does not enter the means.
    """
    found: dict[str, Rounds] = {}
    for method in methods:
        rounds = attendance(study, method)
        usual = statistics.median(taken for taken, _ in rounds.values()) if rounds else 0
        for silo, (taken, of) in rounds.items():
            if 0 < taken < FEW * usual and taken < found.get(silo, (of, of))[0]:
                found[silo] = taken, of
    return dict(sorted(found.items()))


def worst_silos(study: Study, method: str) -> set[str]:
    """Return the silos with the lowest score of one of the method's runs."""
    worst = set()
    for run in study.of(method):
        scores = {silo: v[study.task.score] for silo, v in run["per_silo"].items() if v[study.task.score] is not None}
        worst |= {silo for silo, score in scores.items() if score == min(scores.values())}
    return worst


def without(study: Study, method: str, silos: Collection[str]) -> tuple[float, float]:
    """Return the mean and the lowest score over all silos except ``silos``, as means over seeds; ``nan`` for none."""
    means, lowest = [], []
    for run in study.of(method):
        kept = [v[study.task.score] for silo, v in run["per_silo"].items() if silo not in silos]
        if known := [float(score) for score in kept if score is not None]:
            means.append(statistics.fmean(known))
            lowest.append(min(known))
    return (statistics.fmean(means), statistics.fmean(lowest)) if means else (math.nan, math.nan)


def rounds_missed(found: Mapping[str, Rounds]) -> str:
    """Return the silos' rounds as a clause: ``b took part in 3 of 25 rounds``."""
    lines = [f"{silo} took part in {taken} of {of} rounds" for silo, (taken, of) in list(found.items())[:5]]
    more = len(found) - len(lines)
    return ", ".join(lines) + (f", and {more} more in few" if more else "")
