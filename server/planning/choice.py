"""Which methods can run with these settings, what they send, and what the reference table has measured of them.

A method can run where the checks of a run's start pass: those of its settings, and of the task where they name one. In
a study these are the checks of ``silofl study check``, with the least and the largest value of every setting. What
depends on samples or on the network is checked when a run starts.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from client.protocol.study import StudyProtocol, values
from models.tasks import task_of
from partitions.common.errors import UserError
from server.deploy.study_draft import check_method
from server.report.methods import alone
from strategies import strategies
from strategies.base.run_settings import RunSettings, parse_settings

TABLE = Path(__file__).parents[2] / "docs" / "reference-table.csv"
COLUMNS = {"dataset", "network", "most", "method", "loss"}
WHOLE = "0"  # in `most`: hospitals with all their training patients
Gains = Mapping[str, Mapping[str, float]]  # method -> data set and network -> gain


def choices(settings: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return a row for each method: why it cannot run with these settings ("": it can), and what it sends."""

    def check(method: str) -> list[RunSettings]:
        return [parse_settings({**settings, "strategy": method})]

    return rows_of(check, private=bool(settings.get("dp")))


def choices_in(study: StudyProtocol) -> list[dict[str, Any]]:
    """Return the rows of :func:`choices` for a study; ``listed``: whether the study lists the method."""
    rows = rows_of(partial(check_method, study), private=values(study, "dp") == [True])
    return [row | {"listed": row["name"] in study.methods} for row in rows]


def rows_of(
    check: Callable[[str], Sequence[RunSettings]], *, private: bool
) -> list[dict[str, Any]]:
    # The table has no runs with differential privacy
    gains: Gains = {} if private else read_gains()
    return [
        {
            "name": name,
            "title": s.info.title,
            "refused": line_of_refusal(check, name),
            "sends": {"down": s.info.sends[0], "up": s.info.sends[1]},
            "evidence": "what the others are compared with"
            if name == alone()
            else evidence_line(gains.get(name, {})),
        }
        for name, s in strategies().items()
    ]


def line_of_refusal(check: Callable[[str], Sequence[RunSettings]], method: str) -> str:
    """Return the line with which ``check`` or the task refuses a method; "" where neither does."""
    try:
        for run in check(method):
            if run.common.task != "auto":
                task = task_of(run.common.task)
                run.check_task(task, task.minimum_outputs)
    except UserError as error:
        return str(error)
    return ""


def read_gains(table: Path = TABLE) -> Gains:
    """Return by how many per cent each method's mean test loss is below training alone's, by data set and network.

    The mean is over hospitals, folds and seeds of the reference table. {} where the table is not here.
    """
    losses = defaultdict[tuple[str, str], list[float]](list)
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if not set(rows.fieldnames or ()) >= COLUMNS:
                return {}
            for row in rows:
                if row["most"] == WHOLE:
                    where = f"{row['dataset']}, {row['network']}"
                    losses[row["method"], where].append(float(row["loss"]))
    means = {key: statistics.fmean(each) for key, each in losses.items()}
    gains = defaultdict[str, dict[str, float]](dict)
    # Of trees the table has a baseline of its own, local-trees
    bases = {where: mean for (name, where), mean in means.items() if name.startswith(alone())}
    for (method, where), mean in means.items():
        if not method.startswith(alone()) and (base := bases.get(where)):
            gains[method][where] = 100 * (base - mean) / base
    return gains


def evidence_line(gains: Mapping[str, float]) -> str:
    """Return a method's evidence in one line."""
    if not gains:
        return "no evidence in the reference table"
    worst, best = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    below = sum(gain > 0 for gain in gains.values())
    ends = (f"{points_text(-gains[name])} % ({name})" for name in (best, worst))
    return f"loss below training alone's on {below} of {len(gains)}: {' to '.join(ends)}"


def points_text(gain: float) -> str:
    """Return a gain as text; of a model that diverged it has many digits."""
    return f"{gain:+.1f}" if abs(gain) < 1000 else f"{gain:+.0e}"
