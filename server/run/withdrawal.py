"""Deletion of what runs keep about a hospital that withdraws: ``silofl withdraw``.

* Checkpoints: its models, data summary, key, numbers and state, and copies of its model in other silos' states. (A run
  directory holds silos' states after a simulation.)
* ``history.csv``, ``progress.jsonl``, ``manifest.json``: its rows and entries.
* ``summary.json``: its entries; the means are computed anew from the other silos.
* An evaluation: its rows of ``matrix.csv`` and its model in ``models/``. A survey: its answer (``silofl report`` writes
  the page again).
* A study: the runs that held it out.

Aggregated models stay as they are. Such a run cannot be resumed, because the other silos' states come from a
federation that included this hospital. The checkpoint keeps the name, and nothing else, to refuse that.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from models.tasks import task_of
from partitions.common.errors import DataError, UserError
from partitions.common.files import write_atomically
from server.results.history import History, history_file
from server.results.hold_out import FOLDER, SILOS, groups_of, write_groups
from server.results.models import FOLDER as OWN_MODELS
from server.results.reading import read_events, read_json, read_summary
from server.results.run_directory import (
    WORKERS,
    RunDirectory,
    check_holds_run,
    load_checkpoint,
    read_toml,
)
from server.results.study import study_runs
from server.results.summary import FinishedRun, compare, evidence_in, summary_entry
from server.results.survey import CSV, JSON, PAGE, read_survey, without_silo, write_survey
from server.results.worker_directories import WorkerDirectories
from server.run.newcomers import ARRAYS as NEWCOMER
from strategies.base.state import State

# Lines of config.toml that may name hospitals
NAMING = re.compile(r'(hold-out|late-joiners|models) = "(.*)"')
LOGS = ("tensorboard", "mlflow", "mlruns")  # other programs' formats: reported, not searched


def withdraw(name: str, folders: Sequence[Path]) -> list[str]:
    """Delete what these runs, or all below ``runs/``, keep about a hospital; return a line for each changed run.

    Raises UserError if a folder holds no run, DataError if another process holds a run, both before anything is
    changed; UserError if no run keeps anything about the hospital.
    """
    for folder in folders:
        check_holds_run(folder)
    below = (
        file.parent
        for folder in folders or [Path("runs")]
        for file in folder.rglob("config.toml")
    )
    runs = sorted({run for run in below if name not in held_out_in(run)})
    for run in runs:
        RunDirectory(run).check_free()
    lines = []
    for run in runs:
        with RunDirectory(run).hold():
            done = _withdraw(name, run)
        if done:
            left = [log for log in LOGS if (run / log).exists()]
            note = f"; look through {', '.join(left)} yourself" if left else ""
            lines.append(f"{run}: {name} is deleted from {', '.join(done)}{note}")
    if not lines:
        raise UserError(
            f"no run in {', '.join(map(str, folders)) or 'runs/'} keeps anything of {name}"
        )
    return lines


def _withdraw(name: str, run: Path) -> list[str]:
    """Delete what one run keeps about a hospital; return a description of each deleted part."""
    if (run / WORKERS).is_dir():  # a study that was killed while several runs were in progress
        WorkerDirectories(
            RunDirectory(run), study_runs(read_toml(run / "config.toml"))
        ).take_back_all()
    done = [text for clean in CLEANERS for text in clean(run, name)]
    if done:
        done += _clean_config(run, name)
        if (run / "report.html").is_file():
            (run / "report.html").unlink()
            done.append("report.html (`silofl report` writes it again)")
    return done


def _clean_checkpoints(run: Path, name: str) -> Iterator[str]:
    for checkpoint in sorted((run / "checkpoint").glob("*")):
        known = _names(checkpoint)
        count = sum(_clean_state(file, name, known) for file in _states(checkpoint, name))
        for folder in (checkpoint / "silos" / name, checkpoint / OWN_MODELS / name):
            if folder.is_dir():
                shutil.rmtree(folder)
                count += 1
        if count:
            yield f"{count} states of {checkpoint.name}, which cannot be resumed"


def _clean_history(run: Path, name: str) -> Iterator[str]:
    file = history_file(run / "history.csv")
    if file.is_file() and History(run / "history.csv").drop(name):
        yield file.name


def _rewrite(file: Path, clean: Callable[[list[str]], list[str]]) -> list[str]:
    """Change the lines of a file, if there is one; return its name if that has changed them."""
    if not file.is_file():
        return []
    before = file.read_text(errors="replace").splitlines()
    if (after := clean(before)) == before:
        return []
    write_atomically(file, "".join(f"{line}\n" for line in after))
    return [file.name]


def _names(checkpoint: Path) -> list[str]:
    try:
        state, _ = load_checkpoint(checkpoint)
    except DataError:
        return []
    return list(state.numbers.get("silos", [])) if state else []


def _states(checkpoint: Path, name: str) -> list[Path]:
    """Return the files of the server's state and of every other silo's state."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return [file for file in files if name not in file.relative_to(checkpoint).parts]


def of_silo(key: str, name: str, known: Iterable[str]) -> bool:
    """Return whether a key is this silo's: ``NAME`` or ``model.NAME``. The longest matching name wins."""
    fitting = [n for n in {*known, name} if key == n or key.endswith(f".{n}")]
    return bool(fitting) and max(fitting, key=len) == name


def _clean_state(file: Path, name: str, known: Sequence[str]) -> bool:
    try:
        state = State.load(file)
    except DataError:  # the hospital's part in it is unknown, and the file cannot be used
        file.unlink()
        return True
    # Arrays are called MODEL.NAME; a bare name belongs to a method (`global`)
    ours = {key for key in state.arrays if of_silo(key, name, known) and key != name}
    # Of a held-out hospital
    ours |= {key for key in state.arrays if key.startswith(f"{NEWCOMER}{name}/")}
    arrays = {key: tensor for key, tensor in state.arrays.items() if key not in ours}
    gone = state.numbers.pop("withdrawn", [])
    numbers = {key: without(value, name, known) for key, value in state.numbers.items()}
    if len(arrays) == len(state.arrays) and numbers == state.numbers:
        return False
    State(arrays, {**numbers, "withdrawn": sorted({*gone, name})}).save(file)
    return True


def without(value: Any, name: str, known: Sequence[str]) -> Any:
    """Return a JSON value without this silo's keys, list items and records."""
    if isinstance(value, dict):
        return {
            k: without(v, name, known) for k, v in value.items() if not of_silo(k, name, known)
        }
    if isinstance(value, list):
        return [
            without(v, name, known)
            for v in value
            if v != name and not (isinstance(v, dict) and v.get("name") == name)
        ]
    return value


def _clean_manifest(run: Path, name: str) -> Iterator[str]:
    before = read_json(run / "manifest.json") or {}
    after = without(before, name, [s["name"] for s in before.get("silos", [])])
    if after != before:
        RunDirectory(run).write_json("manifest.json", after)
        yield "manifest.json"


def _clean_config(run: Path, name: str) -> list[str]:
    """Remove the silo from the settings that list silos: ``hold-out``, ``late-joiners``, ``evaluate.models``."""

    def clean_line(line: str) -> str:
        if not (match := NAMING.fullmatch(line)):
            return line
        entries = [
            e
            for e in match[2].split(",")
            if e.partition("=")[0].strip() != name and not e.endswith(f"@{name}")
        ]
        return f'{match[1]} = "{",".join(entries)}"'

    return _rewrite(run / "config.toml", lambda lines: list(map(clean_line, lines)))


def _clean_summary(run: Path, name: str) -> Iterator[str]:
    """Compute the entries of the others anew: the old means would reveal the silo's values."""
    summary = read_summary(run / "summary.json")
    before, held, named = summary["runs"], summary.get("hold_out", {}), _name_pattern(name)
    texts = [[entry.get("left_out"), entry.get("hold_out")] for entry in before]
    if not any(name in entry["silos"] for entry in before) and not named.search(
        json.dumps([texts, held])
    ):
        return
    history, after = History(run / "history.csv"), []
    cap = float(read_toml(run / "config.toml").get("weight-cap", 0))
    for entry in before:
        silos = {silo: values for silo, values in entry["per_silo"].items() if silo != name}
        finished = FinishedRun(
            strategy=entry["strategy"],
            seed=entry["seed"],
            rounds=entry["rounds"],
            silos=silos,
            total_bytes={
                direction: entry[f"bytes_{direction}"] for direction in ("down", "up")
            },
            seconds=entry["seconds"],
            weight_cap=cap,
            task=task_of(entry["task"]),
            left_out={
                k: v
                for k, v in entry.get("left_out", {}).items()
                if not named.search(f"{k} {v}")
            },
            stopped=entry.get("stopped"),
            hold_out=without(entry.get("hold_out", {}), name, []),
            evidence=evidence_in({"per_silo": silos}),
        )
        threads = without(entry["threads"], name, [])
        after.append({**summary_entry(history, finished), "threads": threads})
    held = {"hold_out": of} if (of := without(held, name, [])) else {}
    RunDirectory(run).write_json("summary.json", {"runs": compare(after), **held})
    yield "summary.json"


def held_out_in(run: Path) -> list[str]:
    """Return the hospitals held out in a study's directory ``hold-out/A+B``; empty for any other directory."""
    return (
        run.name.split("+")
        if run.parent.name == FOLDER and (run.parent / SILOS).is_file()
        else []
    )


def _clean_held_out(run: Path, name: str) -> Iterator[str]:
    """Delete a study's runs that held the silo out; they existed only to evaluate it."""
    groups = groups_of(run)
    kept = [group for group in groups if name not in group]
    for group in groups:
        if name in group:
            shutil.rmtree(run / FOLDER / "+".join(group), ignore_errors=True)
    if kept != groups:
        write_groups(RunDirectory(run), kept)
        yield FOLDER


def _clean_matrix(run: Path, name: str) -> Iterator[str]:
    """Delete the silo's rows and its own models from an evaluation (``silofl evaluate``)."""
    entries = str(read_toml(run / "config.toml").get("evaluate.models", "")).split(",")
    gone = {name, *(e.partition("=")[0].strip() for e in entries if e.endswith(f"@{name}"))}
    files = [
        file
        for model_name in gone
        for file in (run / "models").glob(f"{model_name}.safetensors*")
    ]
    for file in files:
        file.unlink()
    yield from ["models"] if files else []

    def is_kept(line: str) -> bool:
        model, _, rest = line.partition(",")
        return model not in gone and rest.partition(",")[0] != name

    yield from _rewrite(run / "matrix.csv", lambda lines: list(filter(is_kept, lines)))


def _clean_survey(run: Path, name: str) -> list[str]:
    """Delete the silo's answer from a survey, and all findings that used it; also the page, which is now outdated."""
    if not (run / JSON).is_file():
        return []
    before = read_survey(run)
    after = without_silo(before, name)
    if after == before:
        return []
    write_survey(run, after)
    (run / PAGE).unlink(missing_ok=True)
    return [JSON, CSV]


def _name_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern that finds the name as a whole word."""
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")


def _clean_progress(run: Path, name: str) -> list[str]:
    """Delete the lines that name the silo, and those that are no events."""
    file = run / "progress.jsonl"

    def clean_lines(_: list[str]) -> list[str]:
        lines = [json.dumps(without(event, name, [])) for event in read_events(file)]
        return [line for line in lines if not _name_pattern(name).search(line)]

    return _rewrite(file, clean_lines)


CLEANERS: Sequence[Callable[[Path, str], Iterable[str]]] = (
    _clean_checkpoints,
    _clean_history,
    _clean_held_out,
    _clean_matrix,
    _clean_survey,
    _clean_summary,
    _clean_manifest,
    _clean_progress,
)
