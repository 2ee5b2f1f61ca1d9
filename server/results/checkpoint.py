"""The server's checkpoints of a run: the newest, and the previous one in case the newest is damaged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from partitions.common.errors import DataError
from partitions.common.files import sync
from strategies.base.client import BUFFERS, GLOBAL
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy

NEWEST = "server.safetensors"
BEFORE = "server-before.safetensors"
NAMES = (GLOBAL, BUFFERS)
REPORTED = "reported-"  # prefix of the array names of the model that the report shows


def save_checkpoint(folder: Path, state: State) -> None:
    """Write the newest checkpoint; the previous newest one is kept as the one before."""
    state.save(folder / NEWEST, keep=folder / BEFORE)


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
    if fault:
        raise DataError(
            f"{fault}; there is no other checkpoint: start the run again, with another --out"
        )
    return None, ""


def readable_checkpoints(folder: Path) -> list[tuple[Path, State]]:
    """Return the readable checkpoints with their files, newest first."""
    found = []
    for file in (folder / NEWEST, folder / BEFORE):
        with contextlib.suppress(DataError):
            found += [(file, State.load(file))] if file.exists() else []
    return found


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
    shares = method.info.one_model or "model" in method.info.uploads
    return {name: arrays[name] for name in NAMES if name in arrays} if whole and shares else {}
