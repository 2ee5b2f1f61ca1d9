"""Properties of a method in the report: its names, baseline, snapshot, and what it sends and keeps.

A run directory may contain a method that no longer exists; it is shown under its name on the command line.
"""

from __future__ import annotations

from strategies import strategies
from strategies.base.info import MethodInfo


def info_of(method: str) -> MethodInfo:
    """Return a method's declarations; of an unknown method, its name and the defaults."""
    unknown = MethodInfo(name=method, title=method, paper="", uploads={})
    known = strategies()
    return known[method].info if method in known else unknown


def spell(method: str) -> str:
    """Return the method's name in the spelling of its paper."""
    return info_of(method).spelling or method


def baselines() -> list[str]:
    """Return the methods that gains are measured against, starting with the one without any exchange."""
    return sorted((n for n, s in strategies().items() if s.info.role.baseline), key=exchanges)


def baseline_name(method: str) -> str:
    """Return a baseline's name in a sentence: ``training alone``."""
    return info_of(method).role.baseline


def alone() -> str:
    """Return the baseline without any exchange."""
    return next(n for n in baselines() if not exchanges(n))


def shared() -> str:
    """Return the baseline with an exchange: one model for all."""
    return next(n for n in baselines() if exchanges(n))


def exchanges(method: str) -> bool:
    """Return whether the method sends anything; True for an unknown method."""
    return any(part != "0" for part in info_of(method).sends)
