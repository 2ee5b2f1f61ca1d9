"""Calibration of a Cox model at one time: predicted and observed risk, and the slope of its log risk.

The risk until time t is 1 - exp(-H0(t) exp(s)), with Breslow's estimate of the baseline hazard H0 from the training
samples (Breslow, JRSS B 1972). The observed risk is 1 - S(t), S by Kaplan and Meier (JASA 1958). The slope b is that of
a Cox regression on s alone: 1 where differences in risk are as large as predicted (Royston and Altman, BMC Med. Res.
Methodol. 2013).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from models.evidence.calibration import BINS, LARGEST, STEPS, Bins, Units, join_bins

Array = npt.NDArray[np.float64]

FEWEST_EVENTS = 2


def baseline_hazard(s: Array, time: Array, event: Array, at: float) -> float:
    """Return H0(at) = sum over events until ``at`` of 1 / sum of exp(s) over those at risk."""
    total = 0.0
    for t, events in events_until(time, event, at):
        total += events / float(np.exp(s[time >= t]).sum())
    return total


def events_until(time: Array, event: Array, at: float) -> Iterator[tuple[float, float]]:
    """Yield each time of events until ``at``, and how many there are."""
    for t in np.unique(time[(event > 0) & (time <= at)]):
        yield t, float((event[time == t] > 0).sum())


def predicted_risk(s: Array, hazard: float) -> Array:
    return np.asarray(-np.expm1(-hazard * np.exp(s)))


def observed_risk(time: Array, event: Array, at: float) -> float:
    """Return 1 - S(at); ``nan`` where the last sample is censored before ``at``: then S(at) is not known."""
    if not len(time) or (time.max() < at and not event[time == time.max()].all()):
        return math.nan
    alive = 1.0
    for t, events in events_until(time, event, at):
        alive *= 1 - events / float((time >= t).sum())
    return 1 - alive


def brier_of_survival(risk: Array, time: Array, event: Array, at: float) -> float:
    """Return the Brier score at time ``at``, weighted by the inverse probability of not being censored.

    The mean of w (risk - event until ``at``)^2: w = 1 / G(T-) with an event until ``at``, 1 / G(at) where T > at, 0
    where censored until then (Graf et al., Statistics in Medicine 1999, eq. 4). G is Kaplan and Meier's estimate of the
    censoring; at equal times events come first. The weights sum to n, so the score is in 0..1. ``nan`` where the last
    sample is censored until ``at``.

    By hand: T = 1, 2, 2+, 3, 5+, 6 ("+" censored), at = 4. Of the four at risk of censoring at 2, one is censored:
    G = 3/4 from there on, G(2-) = 1. The weights are 1, 1, 0, 4/3, 4/3, 4/3. With the risks .9, .5, .5, .6, .3, 0 the
    score is (.01 + .25 + 4/3 .16 + 4/3 .09 + 0) / 6 = .89 / 9.
    """
    if not len(time) or (time.max() <= at and not event[time == time.max()].all()):
        return math.nan
    uncensored = 1.0
    weights = np.zeros_like(risk)
    for t in np.unique(time[time <= at]):
        here = time == t
        weights[here & (event > 0)] = 1 / uncensored
        censored = float((event[here] == 0).sum())
        if at_risk := float((time > t).sum()) + censored:
            uncensored *= 1 - censored / at_risk
    if (time > at).any():
        weights[time > at] = 1 / uncensored
    return float((weights * (risk - (time <= at)) ** 2).mean())


def kinds_until(time: Array, event: Array, at: float, units: Units) -> tuple[Units, Units]:
    """Return the units of samples with the event until ``at``, and of those still followed after it."""
    return units[(time <= at) & (event > 0)], units[time > at]


def risk_bins(
    risk: Array, time: Array, event: Array, at: float, least: int, units: Units
) -> Bins:
    """Return groups of about equally many samples by predicted risk, with the observed risk of each until ``at``.

    A group needs events of ``least`` different ``units`` (n,), and samples followed beyond ``at`` of as many; otherwise
    it joins its neighbour. With one event among n, the observed risk shows how many were at risk at that time, and so
    the time of one patient's event.
    """
    parts: list[npt.NDArray[np.intp]] = []
    if len(risk):
        groups = max(1, min(BINS, len(risk) // max(least, 20)))
        parts = np.array_split(np.argsort(risk, kind="stable"), groups)
        bin_of = join_bins(
            [kinds_until(time[rows], event[rows], at, units[rows]) for rows in parts], least
        )
        parts = [
            np.concatenate([parts[i] for i in np.flatnonzero(bin_of == k)])
            for k in np.unique(bin_of)
        ]
    return Bins(
        np.array([float(len(rows)) for rows in parts]),
        np.array([float(risk[rows].mean()) for rows in parts]),
        np.array([observed_risk(time[rows], event[rows], at) for rows in parts]),
    )


def cox_slope(s: Array, time: Array, event: Array) -> float:
    """Return b that maximises Cox's partial likelihood of b s (Breslow's ties); ``nan`` without a finite estimate."""
    if event.sum() < FEWEST_EVENTS or np.ptp(s) < 1e-9:
        return math.nan
    centred, b, step = s - s.mean(), 0.0, math.inf
    at_risk = time[None, :] >= time[event > 0][:, None]
    for _ in range(STEPS):
        weights = at_risk * np.exp(np.clip(b * centred, -500, 500))[None, :]
        total = weights.sum(1)
        mean = (weights * centred).sum(1) / total
        variance = ((weights * centred**2).sum(1) / total - mean**2).sum()
        if variance <= 0:
            return math.nan
        score = (centred[event > 0] - mean).sum()
        step = float(score / variance)
        b += step * min(1.0, 5.0 / max(abs(step), 1e-300))
        if abs(b) > LARGEST:
            return math.nan
        if abs(step) < 1e-12 * max(1.0, abs(b)):
            return b
    return b if abs(step) < 1e-9 else math.nan
