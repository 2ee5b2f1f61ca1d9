"""Properties of a method in the report: its names, baseline, snapshot, and what it sends and keeps.

A run directory may contain a method that no longer exists; it is shown under its name on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies import strategies


def spell(method: str) -> str:
    """Return the method's name in the spelling of its paper."""
    known = strategies()
    return (known[method].info.spelling if method in known else "") or method


def paper(method: str) -> str:
    """Return the method's source; empty for an unknown method."""
    known = strategies()
    return known[method].info.paper if method in known else ""


def baselines() -> list[str]:
    """Return the methods that gains are measured against, starting with the one without any exchange."""
    return sorted((n for n, s in strategies().items() if s.info.baseline), key=exchanges)


def baseline_name(method: str) -> str:
    """Return a baseline's name in a sentence: ``training alone``."""
    return strategies()[method].info.baseline


def alone() -> str:
    """Return the baseline without any exchange."""
    return next(n for n in baselines() if not exchanges(n))


def exchanges(method: str) -> bool:
    """Return whether the method sends anything; True for an unknown method."""
    known = strategies()
    return method not in known or any(part != "0" for part in known[method].info.sends)


def is_pooled(method: str) -> bool:
    """Return whether the method is the reference that trains on all silos' data in one place."""
    known = strategies()
    return method in known and known[method].info.pooled


def ends_with_one_model(method: str) -> bool:
    """Return whether all silos end with the same model."""
    known = strategies()
    return method in known and known[method].info.one_model


def reports(method: str) -> str:
    """Return the snapshot that the method's paper evaluates; ``personal`` for an unknown method."""
    known = strategies()
    return known[method].info.reports if method in known else "personal"


def uploads(method: str) -> Sequence[str]:
    """Return the names of the model vectors that a silo sends."""
    known = strategies()
    return tuple(known[method].info.uploads) if method in known else ()


def sends_numbers(method: str) -> Sequence[str]:
    """Return the names of the other numbers that a silo sends."""
    known = strategies()
    return tuple(known[method].info.sends_numbers) if method in known else ()


def keeps(method: str) -> Sequence[str]:
    """Return what never leaves a silo with this method."""
    known = strategies()
    return tuple(known[method].info.keeps) if method in known else ()
