"""Tables as plain text, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(lines: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return the rows as text in columns: the first ``left`` aligned left, the others right."""
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
