"""Directories and results of a study that also trains without some hospitals (``silofl simulate --hold-out``).

``RUN`` holds the runs with all hospitals. ``RUN/hold-out/NAME``, itself a run directory, holds the same methods and
seeds without ``NAME``; ``RUN/hold-out/silos.json`` lists them. ``summary.json`` of ``RUN`` then has, by hospital and
method, the score on the hospital's test data, a mean over seeds::

    "hold_out": {"hospital-03": {"fedper": {"zero_shot", "personalised", "local", "all_in"}}}

``zero_shot`` and ``personalised``: the hospital is a newcomer (server/run/newcomers.py). ``local``: it trains
alone. ``all_in``: it trains with the others by the same method. The last two are as the report of ``RUN`` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.common.adding import added
from partitions.common.errors import DataError, UserError
from partitions.common.files import write_atomically
from partitions.common.names import split_names, unknown_name
from server.results.reading import read_summary, which_of
from server.results.run_directory import RunDirectory
from server.results.study import study_runs
from strategies.base.run_settings import RunSettings

FOLDER, SILOS = "hold-out", "silos.json"
EACH = "each"
Groups = list[list[str]]  # each inner list: hospitals that are held out together
KINDS = ("zero_shot", "personalised")


def read_groups(wanted: str, known: Sequence[str]) -> Groups:
    """Return the groups for ``--hold-out``: the named silos together, or each by itself. Raises UserError."""
    if wanted == EACH:
        return [[name] for name in known]
    names = split_names(wanted)
    for name in names:
        if name not in known:
            raise unknown_name("silo to hold out", name, [*known, EACH])
    if not names:
        raise UserError("--hold-out: names of hospitals are needed here, or each")
    return [names]


def groups_of(out: Path) -> Groups:
    """Return the groups that a study's directory holds out. Raises DataError if its file is damaged."""
    file = out / FOLDER / SILOS
    if not file.exists():
        return []
    try:
        groups = json.loads(file.read_text())
        return [[str(name) for name in group] for group in groups]
    except (ValueError, TypeError):
        raise DataError(
            f"{file} is damaged: start the study again, with another --out"
        ) from None


def write_groups(directory: RunDirectory, groups: Groups) -> None:
    write_atomically(directory.path / FOLDER / SILOS, json.dumps(groups) + "\n")


def with_local(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings with ``local`` added to the methods, for the hospitals' results without federation."""
    names = split_names(values.get("strategy") or "fedavg")
    return {**values, "strategy": ",".join(names if "local" in names else ["local", *names])}


def runs_without(values: Mapping[str, object], groups: Groups) -> list[RunSettings]:
    """Return the runs of the study without each group."""
    return [
        run for group in groups for run in study_runs({**values, "hold-out": ",".join(group)})
    ]


def part_of(directory: RunDirectory, run: RunSettings) -> RunDirectory:
    """Return the directory that a run of the study belongs to."""
    held = run.common.held_out
    if not held or not (directory.path / FOLDER).is_dir():
        return directory
    return RunDirectory(directory.path / FOLDER / "+".join(held))


def parts_of(
    directory: RunDirectory, runs: Iterable[RunSettings]
) -> list[tuple[RunDirectory, list[RunSettings]]]:
    """Return the study's directories with their runs, in the order of the runs."""
    parts: dict[Path, tuple[RunDirectory, list[RunSettings]]] = {}
    for run in runs:
        part = part_of(directory, run)
        parts.setdefault(part.path, (part, []))[1].append(run)
    return list(parts.values())


def write_results(directory: RunDirectory) -> None:
    """Write ``hold_out`` into the study's summary from the runs that have ended, if there are any without hospitals."""
    groups = groups_of(directory.path)
    if not groups or not directory.summary.exists():
        return
    summary = read_summary(directory.summary)
    parts = (RunDirectory(directory.path / FOLDER / "+".join(group)) for group in groups)
    if scores := means(
        [
            row
            for part in parts
            for row in held_out_rows(read_summary(part.summary)["runs"], summary["runs"])
        ]
    ):
        directory.write_json("summary.json", {**summary, "hold_out": scores})


def results_in(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a summary's scores by held-out silo and method: the study's, or else those in its runs' entries.

    A run that holds silos out itself (``hold-out``, ``role: held-out``) has ``zero_shot`` and ``personalised`` only.
    """
    return summary.get("hold_out") or means(list(held_out_rows(summary.get("runs", []))))


Scored = tuple[str, str, dict[str, float | None]]  # silo, method, scores of one seed by kind


def held_out_rows(
    runs: Iterable[Mapping[str, Any]], everybody: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Scored]:
    """Yield the scores of the silos that these runs hold out, and in the study's runs with ``everybody`` if given."""
    known = {which_of(run): run for run in everybody}
    for run in runs:
        for silo, result in run.get("hold_out", {}).items():
            row = {kind: result[kind].get(run["score"]) for kind in KINDS}
            if known:
                for kind, method in (("local", "local"), ("all_in", run["strategy"])):
                    row[kind] = silo_score(known.get((method, run["seed"])), silo)
            yield silo, run["strategy"], row


def means(rows: Sequence[Scored]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the scores by silo and method as means over the seeds."""
    by_silo: dict[str, dict[str, dict[str, Any]]] = {}
    for silo, method, row in sorted(rows, key=lambda row: row[0]):
        each = [scores for name, strategy, scores in rows if (name, strategy) == (silo, method)]
        by_silo.setdefault(silo, {})[method] = {
            kind: mean_of_seeds([scores[kind] for scores in each]) for kind in row
        }
    return by_silo


def silo_score(run: Mapping[str, Any] | None, silo: str) -> float | None:
    """Return a silo's score in a run of the summary; None if unknown."""
    score = (run or {}).get("per_silo", {}).get(silo, {}).get((run or {}).get("score", ""))
    return None if score is None else float(score)


def mean_of_seeds(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return added(known) / len(known) if len(known) == len(values) else None
