"""What a study registered before its runs: its comparison, tested at 5 %, and every deviation from it.

One 95 % interval decides between gain, loss and equivalence, so a wrong one of them needs an interval that misses the
truth: in at most 5 of 100 studies. As for every mean gain of the report, the interval without the hospitals that took
part in few rounds must decide so, too. Secondary methods share another 5 %, and so do the hospitals that are searched
for harm. Measured: docs/uncertainty.md, ``tests/server/report/test_registered.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from client.protocol.policy import SCORE
from client.protocol.study import Analysis, StudyProtocol, study_setting_faults
from models.metrics import LOSSES
from server.report.html import hospitals_of
from server.report.inference import (
    UNKNOWN,
    Gain,
    Interval,
    least_error,
    over_hospitals,
    over_patients,
    over_seeds,
    widen,
    with_interval,
)
from server.report.methods import spell
from server.report.pairs import Pair, means_by_silo
from server.report.participation import Rounds, rounds_missed, seldom
from server.report.study import StudyResults
from server.report.verdict import rests_on_few
from server.results.registration import KeptStudy
from server.results.study import study_runs

EQUIVALENT, GAIN, LOSS, INCONCLUSIVE, UNTESTED = (
    "equivalent",
    "gain",
    "loss",
    "inconclusive",
    "not tested",
)


@dataclass(frozen=True)
class Comparison:
    """One registered comparison: the mean gain, what follows from its interval, and the hospitals behind it.

    ``rare``: those of them that took part in few rounds; ``without``: the mean without them; ``both``: the mean with
    the interval that holds both intervals, which concludes. ``why``: the reason if the rare ones leave it inconclusive.
    """

    method: str
    gain: Gain
    both: Gain
    conclusion: str
    hospitals: int
    rare: Mapping[str, Rounds]
    without: Gain | None
    why: str


@dataclass(frozen=True)
class Harm:
    """Hospitals by their gain's interval, widened for their number, against the margin of harm.

    ``harmed``: whole below it; ``lost``: whole below zero; ``unclear``: it holds the margin. ``known``: hospitals that
    have an interval.
    """

    harmed: Mapping[str, Gain]
    lost: Mapping[str, Gain]
    unclear: Mapping[str, Interval]
    known: int


@dataclass(frozen=True)
class Registered:
    """A registered analysis, and what the run says of it."""

    registration: KeptStudy
    analysis: Analysis
    primary: Comparison
    secondary: list[Comparison]
    harm: Harm
    deviations: list[str]

    @property
    def metric(self) -> str:
        return self.analysis.metric

    @property
    def unit(self) -> str:
        return "hospital" if self.analysis.estimand == "hospital" else "patient"


def registered(study: StudyResults) -> Registered | None:
    """Return the registered analysis of a run; None if nothing was registered before it."""
    if study.registration is None or study.analysis is None or not study.runs:
        return None
    analysis = study.analysis
    among = len(analysis.secondary)
    return Registered(
        study.registration,
        analysis,
        compare_registered(study, analysis, analysis.method, 1),
        [compare_registered(study, analysis, method, among) for method in analysis.secondary],
        harm_of(study, analysis),
        list(deviations(study, study.registration, analysis)),
    )


def gains_of(study: StudyResults, analysis: Analysis, method: str) -> dict[str, float]:
    """Return each hospital's gain over the registered baseline: a mean over the registered seeds that have both."""
    gains = gains_by_seed(study, analysis, method)
    return means_by_silo(gains, gains)


def gains_by_seed(study: StudyResults, analysis: Analysis, method: str) -> dict[Pair, float]:
    """Return the gain of the registered metric by silo and seed, at the rounds that validation chose."""
    metric = "" if analysis.metric == SCORE else analysis.metric
    mine, other = (
        study.final_values(name, analysis.split, metric) for name in (method, analysis.baseline)
    )
    sign = -1 if analysis.metric in LOSSES else 1
    return {
        pair: sign * (mine[pair] - other[pair])
        for pair in mine.keys() & other.keys()
        if pair[1] in analysis.seeds
    }


def compare_registered(
    study: StudyResults, analysis: Analysis, method: str, among: int
) -> Comparison:
    """Return a registered comparison; ``among``: comparisons that share the 5 %."""
    gains = gains_of(study, analysis, method)
    missed = seldom(study, [method, analysis.baseline])
    rare = {silo: rounds for silo, rounds in missed.items() if silo in gains}
    often = {silo: value for silo, value in gains.items() if silo not in rare}
    gain = registered_mean(study, analysis, method, gains, among)
    without = registered_mean(study, analysis, method, often, among) if rare else None
    both = joint(gain, without) if without else gain
    effect = analysis.smallest_effect / 100
    alone, conclusion = conclude(gain, effect), conclude(both, effect)
    why = ""
    if alone not in (UNTESTED, INCONCLUSIVE) and conclusion in (UNTESTED, INCONCLUSIVE):
        why = rests_on_few(len(gains), len(rare))
    if alone != UNTESTED and conclusion == UNTESTED:
        conclusion = INCONCLUSIVE
    return Comparison(method, gain, both, conclusion, len(gains), rare, without, why)


def registered_mean(
    study: StudyResults, analysis: Analysis, method: str, gains: Mapping[str, float], among: int
) -> Gain:
    """Return the mean of hospitals' gains as the study registered it, over hospitals or patients."""
    known = with_interval(tested_gains(study, analysis, method))
    errors = [least_error(known[silo]) if silo in known else 0.0 for silo in gains]
    if analysis.estimand == "hospital":
        return over_hospitals([*gains.values()], among, errors)
    patients = {
        row.silo: row.n
        for run in study.of(method)
        for row in study.history.of(method, run["seed"])
        if row.split == analysis.split and row.n
    }
    of_each = [patients.get(silo, 0) for silo in gains]
    return over_patients([*gains.values()], of_each, among, errors)


def joint(gain: Gain, other: Gain) -> Gain:
    """Return a gain with the interval that holds both; unknown if one is."""
    lows, highs = zip(gain.interval, other.interval, strict=True)
    known = gain.has_interval and other.has_interval
    return Gain(gain.mean, (min(lows), max(highs)) if known else UNKNOWN)


def conclude(gain: Gain, effect: float) -> str:
    """Return what an interval concludes: equivalent if it lies within the smallest effect to either side."""
    low, high = gain.interval
    if not gain.has_interval:
        return UNTESTED
    if -effect < low and high < effect:
        return EQUIVALENT
    return {1: GAIN, -1: LOSS, 0: INCONCLUSIVE}[gain.shown]


def tested_gains(study: StudyResults, analysis: Analysis, method: str) -> dict[str, Gain]:
    """Return each hospital's gain with its interval; of another metric or split than the report's score none."""
    if analysis.metric not in (SCORE, study.task.score) or analysis.split != "test":
        return {}
    return {
        silo: over_seeds({seed: of[seed] for seed in analysis.seeds if seed in of})
        for silo, of in study.differences(method, analysis.baseline).items()
    }


def harm_of(study: StudyResults, analysis: Analysis) -> Harm:
    """Return the hospitals' harm; of another metric or split than the report's score none is known."""
    known = with_interval(tested_gains(study, analysis, analysis.method))
    wide = {silo: widen(gain, len(known)) for silo, gain in known.items()}
    margin = -analysis.harm_margin / 100
    return Harm(
        {silo: known[silo] for silo, (_, high) in wide.items() if high < margin},
        {silo: known[silo] for silo, (_, high) in wide.items() if high < 0},
        {silo: ends for silo, ends in wide.items() if ends[0] < margin <= ends[1]},
        len(known),
    )


def deviations(
    study: StudyResults, registration: KeptStudy, analysis: Analysis
) -> Iterator[str]:
    """Yield each way in which the run is not what was registered, one sentence each."""
    protocol = registration.study
    if not registration.signer:
        yield "The study is not signed: nothing shows that it is the one that hospitals approved"
    for method, seed in analysis.runs:
        if (method, seed) not in study.finished:
            yield f"{spell(method)}, seed {seed}, did not finish"
    for run in study.summarised:
        name = f"{spell(run['strategy'])}, seed {run['seed']}"
        if run["strategy"] in analysis.methods and run["rounds"] != analysis.rounds:
            yield f"{name}, has {run['rounds']} rounds, not {analysis.rounds}"
    if more := [spell(method) for method in study.methods if method not in analysis.methods]:
        yield f"Run in addition: {', '.join(more)}"
    if seeds := [seed for seed in study.seeds if seed not in analysis.seeds]:
        yield f"Run in addition: seeds {', '.join(map(str, seeds))}, which the test leaves out"
    yield from _missing(study, protocol, analysis)
    yield from _settings(study, protocol)


def _missing(study: StudyResults, protocol: StudyProtocol, analysis: Analysis) -> Iterator[str]:
    for method in (analysis.method, *analysis.secondary):
        yield from _missing_gains(study, protocol, analysis, method)
    if len(study.silos) < protocol.participants:
        yield f"{hospitals_of(len(study.silos))} took part, at least {protocol.participants} were to train"
    if rare := seldom(study, analysis.methods):
        yield rounds_missed(rare)


def _missing_gains(
    study: StudyResults, protocol: StudyProtocol, analysis: Analysis, method: str
) -> Iterator[str]:
    """Yield the hospitals that a comparison has without a seed, or without any."""
    gains = gains_by_seed(study, analysis, method)
    both = f"{analysis.metric} for {spell(method)} and {spell(analysis.baseline)}"
    if not gains:
        yield f"No hospital has sent {both} on {analysis.split} data"
        return
    silos = {silo for silo, _ in gains}
    if missing := sorted({*study.silos, *protocol.training_peers} - silos):
        yield f"Not in the mean, without {both}: {', '.join(missing)}"
    for seed in analysis.seeds:
        lacking = sorted(silo for silo in silos if (silo, seed) not in gains)
        ran = {(method, seed), (analysis.baseline, seed)} <= study.finished
        # A whole seed of a run that did not finish has its own sentence
        if lacking and (ran or len(lacking) < len(silos)):
            yield f"Not in the mean of seed {seed}, without {both}: {', '.join(lacking)}"


def _settings(study: StudyResults, protocol: StudyProtocol) -> Iterator[str]:
    """Yield settings of the runs that the study does not allow, each once."""
    faults = (
        fault
        for run in study_runs(study.config)
        for fault in study_setting_faults(protocol, run.flat())
    )
    listed = ("strategy =", "seed =", "rounds =")
    yield from dict.fromkeys(
        fault for fault in faults if not any(key in fault for key in listed)
    )
