"""A run directory: ``config.toml``, ``history.csv``, ``progress.jsonl``, ``summary.json``, ``checkpoint/``.

The server's checkpoints of a run: the newest, and the previous one in case the newest is damaged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from partitions.common.errors import DataError, UserError
from partitions.common.files import append, hold_lock, make_folder, sync, write_atomically
from partitions.common.parsed import parse_toml, read_text
from partitions.common.settings import toml_text
from server.results.reading import read_events
from strategies.base.settings import Value
from strategies.base.state import BUFFERS, GLOBAL, State, map_arrays
from strategies.base.strategy import PersonalizedStrategy

LOCK = ".lock"  # held by the process that trains
# How long the process of a run that was just stopped may still hold the lock
LINGER_SECONDS = 10.0
CONFIG = "config.toml"
NEXT = "config-next.toml"  # of a resumed run, until what it resumes has been checked
WORKERS = "workers"  # holds the directories of runs in parallel (worker_directories.py)
# These may differ between a run and its continuation; a change of any other setting is refused.
FREE_ON_RESUME = (
    "rounds",
    "resume",
    "out",
    "threads",
    "device",
    "data-dir",
    "init-weights",  # the path may change: the checkpoint holds the file's SHA-256
    "round-timeout",
    "min-silos",
    "agreed",
    "checkpoint-every",
    "patience",
    "min-delta",
)


def default_out(strategy: str) -> Path:
    """Return ``runs/TIME-STRATEGY``, with a number if that directory already exists."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy.replace(',', '+')}"
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return nested TOML tables as flat keys with dots."""
    flat: dict[str, Value] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_toml(path: Path) -> dict[str, Value]:
    """Return a configuration file as flat keys. Raises UserError, or OSError if it cannot be read."""
    try:
        return flatten(parse_toml(read_text(path)))
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except ValueError as error:
        raise UserError(f"the configuration file {path} cannot be read: {error}") from None


def check_holds_run(path: Path) -> None:
    """Raise UserError unless a directory holds a run, OSError if it cannot be searched."""
    try:
        (path / CONFIG).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} holds no run: there is no {CONFIG} in it") from None


class RunDirectory:
    """Directory of one study.

    ``part``: the name of a run that is executed in parallel with others. History, progress, summary and lock are then
    in ``workers/PART``; everything else is shared with the study.
    """

    def __init__(self, path: Path, part: str = "") -> None:
        self.path = path
        self.folder = path / WORKERS / part if part else path

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        path: Path,
        config: Mapping[str, Value],
        *,
        resume: bool,
        member: bool = False,
        stays: bool = False,
    ) -> Iterator[RunDirectory]:
        """Create or reopen the directory, and lock it against other processes until the block ends.

        ``config``: all settings; strategies and seeds may be comma-separated lists. ``member``: this is one run of a
        study whose directory already exists. Before anything is changed it raises UserError if the directory holds
        another run or anything else, and DataError if another process holds it. A resumed run waits up to
        :data:`LINGER_SECONDS` for the lock. Its changed settings are the directory's from :meth:`begin` on; until then
        they are in :data:`NEXT`, which goes with the block unless it ``stays`` for another process.
        """
        directory = cls(path.expanduser())
        directory._check_place(resume, member)
        make_folder(directory.path)
        with directory.hold(LINGER_SECONDS if resume else 0.0):
            # No other process has come in between
            exists = directory._check_place(resume, member)
            if not (exists and member):
                kept = {k: v for k, v in config.items() if k not in ("resume", "out")}
                if exists:
                    directory._check_same(kept)
                write_atomically(directory.path / (NEXT if exists else CONFIG), toml_text(kept))
            try:
                yield directory
            finally:
                if not (member or stays):
                    directory.end()

    def begin(self) -> None:
        """Take over the settings of a resumed run, which nothing has refused."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path / NEXT, self.path / CONFIG)

    def end(self) -> None:
        """Remove the settings of a resumed run that did not begin."""
        (self.path / NEXT).unlink(missing_ok=True)

    def settings(self) -> dict[str, Value]:
        """Return the settings of the run that begins, or has begun, here. Raises UserError."""
        with contextlib.suppress(UserError):
            return read_toml(self.path / NEXT)
        return read_toml(self.path / CONFIG)

    def _check_place(self, resume: bool, member: bool) -> bool:
        """Return whether a run exists here already. Raises UserError if the directory cannot be used."""
        path, exists = self.path, (self.path / CONFIG).exists()
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: give --out a directory")
        if exists and not (resume or member):
            raise UserError(
                f"{path} holds another run: give --out a new directory, or continue it with --set resume=true"
            )
        if not exists and path.exists() and any(entry.name != LOCK for entry in path.iterdir()):
            raise UserError(f"{path} is not empty and holds no run: give --out a new directory")
        if not exists and resume:
            raise UserError(f"{path} holds no run to resume")
        return exists

    @contextlib.contextmanager
    def hold(self, patience: float = 0.0) -> Iterator[None]:
        """Lock the directory. Raises DataError if another process still holds it after ``patience`` seconds."""
        with contextlib.ExitStack() as stack:
            # Another user's directory: a run without a lock is acceptable
            with contextlib.suppress(PermissionError):
                busy = f"{self.path}: another run is writing to it; silofl stop ends it"
                stack.enter_context(hold_lock(self.folder / LOCK, busy, patience))
            yield

    def check_free(self) -> None:
        """Raise DataError if another process holds this directory."""
        if (self.path / LOCK).exists():
            with self.hold():
                pass

    def _check_same(self, config: Mapping[str, Value]) -> None:
        before = read_toml(self.path / CONFIG)
        for key, value in config.items():
            if key not in FREE_ON_RESUME and key in before and before[key] != value:
                raise UserError(
                    f"{self.path} was run with {key} = {before[key]!r}, not {value!r}: "
                    f"resume with the settings of its config.toml, or give --out a new directory"
                )
        for folder in sorted(self.path.glob("checkpoint/*")):
            state, _ = load_checkpoint(folder)
            done = state.numbers["round"] if state else 0
            if done > int(config["rounds"]):
                raise UserError(
                    f"{folder.name} in {self.path} has {done} rounds behind it, more than "
                    f"rounds = {config['rounds']}: resume with at least as many"
                )

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def history(self) -> Path:
        return self.folder / "history.csv"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def progress_file(self) -> Path:
        return self.folder / "progress.jsonl"

    def checkpoint(self, run_key: str) -> Path:
        return self.path / "checkpoint" / run_key

    def progress(self, event: str, **values: Any) -> None:
        """Add a JSON line to ``progress.jsonl``, which ``silofl run`` and dashboards follow."""
        append(self.progress_file, json.dumps({"event": event, **values}) + "\n", durable=False)

    def sample_counts(self) -> dict[str, int]:
        """Return by silo the number of training samples last reported to a run of this directory."""
        counts: dict[str, int] = {}
        for event in read_events(self.progress_file):
            counts |= event["samples"] if event["event"] == "silos" else {}
        return counts

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(
            self.folder / name, json.dumps(value, indent=1, allow_nan=False) + "\n"
        )


def newest_states(folder: Path) -> dict[str, State]:
    """Return the newest readable state of each silo in ``folder``."""
    states: dict[str, State] = {}
    for file in sorted(folder.glob("*/round-*.safetensors")):
        with contextlib.suppress(DataError):
            states[file.parent.name] = State.load(file)
    return states


NEWEST = "server.safetensors"
BEFORE = "server-before.safetensors"
NAMES = (GLOBAL, BUFFERS)
REPORTED = "reported-"  # prefix of the array names of the model that the report shows


def save_checkpoint(folder: Path, state: State) -> None:
    """Write the newest checkpoint; the previous newest one is kept as the one before."""
    state.save(folder / NEWEST, keep=folder / BEFORE)


def map_reported(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return these arrays of the reported model, mapped from the newest checkpoint."""
    if not names:
        return {}
    arrays = map_arrays(folder / NEWEST, [REPORTED + name for name in names])
    return {name: arrays[REPORTED + name] for name in names}


def load_checkpoint(folder: Path) -> tuple[State | None, str]:
    """Return the newest readable checkpoint (None: there is none) and the fault of a newer, damaged one.

    Raises DataError if checkpoints exist but none can be read.
    """
    fault = ""
    for file in (folder / NEWEST, folder / BEFORE):
        if file.exists():
            try:
                return State.load(file), fault
            except DataError as error:
                fault = fault or str(error)
        elif file.name == NEWEST and (folder / BEFORE).exists():
            fault = f"{file} is missing"
    if fault:
        raise DataError(
            f"{fault}; there is no other checkpoint: start the run again, with another --out"
        )
    return None, ""


def readable_checkpoints(folder: Path) -> list[tuple[Path, State]]:
    """Return the readable checkpoints with their files, newest first."""
    readable = []
    for file in (folder / NEWEST, folder / BEFORE):
        with contextlib.suppress(DataError):
            readable += [(file, State.load(file))] if file.exists() else []
    return readable


def go_back_to(folder: Path, file: Path | None) -> None:
    """Remove the checkpoints that are newer than ``file``; all of them for None.

    The rename is atomic, so a crash at any time leaves a checkpoint that can be resumed.
    """
    if file is None:
        (folder / BEFORE).unlink(missing_ok=True)
        (folder / NEWEST).unlink(missing_ok=True)
    elif file.name == BEFORE:
        os.replace(file, folder / NEWEST)
    if folder.exists():
        sync(folder)


def shared_arrays(
    arrays: Mapping[str, Tensor], method: type[PersonalizedStrategy], size: int
) -> dict[str, Tensor]:
    """Return the shared model (Σ,) and its running statistics; empty if the method has no shared model."""
    whole = GLOBAL in arrays and arrays[GLOBAL].shape == (size,)
    shares = method.info.role.one_model or "model" in method.info.uploads
    return {name: arrays[name] for name in NAMES if name in arrays} if whole and shares else {}
