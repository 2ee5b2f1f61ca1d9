"""Reasons of several silos, each once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from partitions.schema import few

NAMED = 3  # silos that a line names


def merge_reasons(
    reasons: Iterable[tuple[str, str]], noun: str = "silos", *, bare: bool = False
) -> list[str]:
    """Return a line for each reason: ``a: why``, or ``5 silos (a, b, c and 2 more): why``.

    ``reasons``: each with its silo, whose name may stand at its beginning, or in brackets before its colon.
    ``bare``: put the name before a reason that begins with it, too.
    """
    lines = defaultdict[str, dict[str, str]](dict)  # reason -> silo -> its line
    for name, line in reasons:
        head, _, reason = line.partition(": ")
        if line.startswith((f"{name} ", f"{name}, ")):
            reason = line.removeprefix(name).lstrip(", ")
            line = f"{name}: {line}" if bare else line
        elif f"({name})" not in head:
            reason, line = line, f"{name}: {line}"
        lines[reason][name] = line
    return [
        f"{len(of)} {noun} ({few(of, NAMED)}): {reason}" if len(of) > 1 else line
        for reason, of in lines.items()
        for line in [*of.values()][:1]
    ]
