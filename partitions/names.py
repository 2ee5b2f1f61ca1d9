"""Names of silos, and the one clear line for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def silo_name(index: int) -> str:
    """Name of the silo with this index (from 0): ``hospital-01``, ``hospital-02``, ..."""
    return f"hospital-{index + 1:02d}"


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> ValueError:
    """The error for a name that does not exist: says what is wrong, the nearest name, and all that exist."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}; {hint}there are: {', '.join(known) or 'none'}")
