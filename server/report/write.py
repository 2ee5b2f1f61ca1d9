"""``report.html``: what a study came to, for whoever has one minute and for whoever wants every number.

:func:`write_report` makes the page, :func:`silo_table` the same comparison as plain text. ``study`` finds the numbers,
``page`` has the words, ``charts`` draws, ``html`` has the CSS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from logging import WARNING
from pathlib import Path

from flwr.common import log

from partitions.disk import write_atomically
from partitions.manifest import describe
from partitions.simulated import divide
from server.report.page import page
from server.report.study import EXACT, Study, spelled
from server.run.rundir import RunDirectory
from strategies.base.run_settings import RunSettings


def write_manifest(directory: RunDirectory, settings: RunSettings) -> None:
    """``manifest.json`` of a simulated run: who holds what, for the report. A study's first seed writes it."""
    c = settings.common
    if (directory.path / "manifest.json").exists():
        return
    whole, silos = divide(settings.division)
    manifest = describe(whole, silos, name=c.partition, seed=c.seed, settings=settings.partition)
    directory.write_json("manifest.json", manifest)


def write_report(path: Path) -> Path:
    """Make ``report.html`` of the run directory ``path`` anew. Raises UserError where it holds no run."""
    study = Study(path)
    file = path / "report.html"
    write_atomically(file, page(study))
    return file


def try_report(path: Path) -> None:
    """The report at the end of a run: whatever goes wrong with it must not undo the run."""
    try:
        write_report(path)
    except Exception as error:
        log(WARNING, "no report: %s: %s (later: silofl report %s)", type(error).__name__, error, path)


def silo_table(study: Study) -> str:
    """The comparison per silo as plain text: scores in per cent, the gain in points, means and mean ranks."""
    methods, best, base = study.methods, study.best, study.base
    rows = [["silo", "test", *(spelled(m) for m in methods)]]
    for silo in study.silos:
        cells = [study.score(m, silo) for m in methods]
        n_test = max((c.n_test for c in cells), default=0)
        rows.append([silo, str(n_test), *(_percent(c.mean, c.spread) for c in cells)])
    rows.append(["mean", "", *(_percent(*study.final(m, f"{study.task.score}_mean")) for m in methods)])
    if best and base:
        gains = [study.gain(best, base, s).mean for s in study.silos] + [study.mean_gain(best, base).mean]
        rows = [[*row, text] for row, text in zip(rows, [f"{spelled(best)} gains", *map(_points, gains)], strict=True)]
    if study.ranks:
        ranks = ["-" if math.isnan(study.ranks[m]) else f"{study.ranks[m]:.2f}" for m in methods]
        rows.append(["mean rank", "", *ranks, *([""] if best and base else [])])
    text = columns(rows)
    rule = "-" * max(len(line) for line in text)
    silos = 1 + len(study.silos)
    note = f"{study.task.word} in % on test data, at the round that validation data chose"
    if len(study.seeds) > 1:
        note += f"; mean and standard deviation of {len(study.seeds)} seeds"
    return "\n".join([text[0], rule, *text[1:silos], rule, *text[silos:], note])


def columns(lines: Iterable[Sequence[str]]) -> list[str]:
    """Cells in columns: the first to the left, the others to the right."""
    rows = list(lines)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _percent(mean: float, deviation: float) -> str:
    if math.isnan(mean):
        return "-"
    return f"{100 * mean:.1f}" + ("" if math.isnan(deviation) else f" ±{100 * deviation:.1f}")


def _points(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0.0" if abs(value) < EXACT else f"{100 * value:+.1f}"
